"""Step-based baselines for robot tasks: stable-baselines3's algorithms, TRPL, and SAC on a GPU."""
