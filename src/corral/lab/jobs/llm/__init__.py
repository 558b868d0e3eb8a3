"""Runs of language models: settings, training, evaluation, export."""
