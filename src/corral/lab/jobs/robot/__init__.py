"""Runs of robots: settings, training, evaluation, export."""
