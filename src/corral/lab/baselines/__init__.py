"""Baselines for robots: stable-baselines3, TRPL, and SAC on a GPU."""
