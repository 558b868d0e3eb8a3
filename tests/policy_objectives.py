"""Objectives that are policy gradients, for tests of what holds for each. `distill` has a teacher, and tests of its own."""

import pytest

from corral import make_objective, objective_names

POLICY_OBJECTIVES = [name for name in objective_names() if "dist_teacher" not in make_objective(name).needs]
"""As registered when the tests are collected, before any of them registers one of its own."""

KINDS = ("ppo_clip", "dppo", "gspo", "troll")
"""One of each: clipped, masked, by whole sequences, projected."""


def one_of_each_kind(*, without: tuple[str, ...] = ()) -> list[object]:
    """Parameters of a test that `make test` runs for one objective of each kind, and `make test-all` for every one."""
    names = (name for name in POLICY_OBJECTIVES if name not in without)
    return [pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in names]
