"""Audits of a run's own tokens: the effect of clipping, and the counterfactual effect of a true trust region."""
