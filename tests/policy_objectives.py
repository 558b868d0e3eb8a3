"""Objectives that are policy gradients, for tests of what holds for each. `distill` has a teacher, and tests of its own."""

from corral import make_objective, objective_names

POLICY_OBJECTIVES = [name for name in objective_names() if "dist_teacher" not in make_objective(name).needs]
"""As registered when the tests are collected, before any of them registers one of its own."""
