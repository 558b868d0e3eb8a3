"""Training runs of robots: their settings, training, evaluation and export."""
