"""What did clipping do to a run, and what would a real trust region have done? Measured on the run's own tokens."""
