"""Contestants over a grid of settings: which setting of each is best, and how wide the usable range is."""
