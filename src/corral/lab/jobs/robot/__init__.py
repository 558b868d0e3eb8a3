"""Training runs of robots: settings, training, evaluation, export."""
