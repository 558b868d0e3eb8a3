"""Step-based baselines for robot tasks: stable-baselines3's PPO and SAC, and TRPL."""
