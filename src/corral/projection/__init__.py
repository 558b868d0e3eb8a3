"""Projections: replace a new policy outside the trust region by the nearest policy inside."""
