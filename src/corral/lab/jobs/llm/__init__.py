"""Training runs of language models: settings, training, evaluation, export."""
