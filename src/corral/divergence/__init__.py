"""Divergences between two policies: categorical, binary (one token or any other), Gaussian, or estimated from samples."""
