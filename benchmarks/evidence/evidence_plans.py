"""The runs of each part of the evidence, the most telling first, one seed after another."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from evidence_spec import Run

SEEDS = (301, 302, 303, 304, 305)
"""The first two are those of the study of deployed networks."""
RATES = (1e-3, 3e-4, 1e-4, 3e-3)
"""Half decades; the best of every objective is inside."""
ARMS = (
    ("ppo_clip", ""),
    ("troll", ""),
    ("dppo", ""),
    ("troll", "unprojected"),
    ("reinforce", ""),
    ("dppo", "top-K"),
    ("drpo", ""),
)
"""Objective and variant of the contestants."""
REUSED = (("ppo_clip", ""), ("troll", ""), ("dppo", ""), ("troll", "unprojected"), ("reinforce", ""))
"""Those with one and with 32 updates per batch."""
ABLATIONS = (
    "constant dual", "unprojected", "no regression", "α=.1", "α=.3", "α=3", "α=10", "ε=.01", "ε=.2", "union", "fill", "K=4",
    "mass .9", "K=16", "K=4, mass .9",
)  # fmt: skip
PUBLISHED = (("troll", "published"), ("troll", "token mean"), ("ppo_clip", "token mean"), ("dppo", "token sum, no std"))
"""Objectives as their papers run them, where that differs from the common form: sums over a fixed length for all."""


def run(arm: tuple[str, str], rate: float, seed: int, **others: Any) -> Run:
    """One run of an arm."""
    return Run(objective=arm[0], variant=arm[1], rate=rate, seed=seed, **others)


def the_map() -> list[Run]:
    """Seven contestants × four rates at 8 updates per batch, 15 batches."""
    return [run(arm, rate, seed) for seed, rate, arm in itertools.product(SEEDS, RATES, ARMS)]


def floor() -> list[Run]:
    """One update per batch: objectives differ by rounding alone, so this is what chance does."""
    grid = itertools.product(SEEDS, (1e-3, 3e-3, 3e-4), REUSED)
    return [run(arm, rate, seed, updates=1) for seed, rate, arm in grid]


def reused() -> list[Run]:
    """32 updates per batch at three rates, 10 batches; 2e-4 is shared with the study of deployed networks."""
    grid = itertools.product(SEEDS, (2e-4, 6e-4, 6e-5), REUSED)
    return [run(arm, rate, seed, passes=4, steps=10, eval_every=5, eval_size=1024) for seed, rate, arm in grid]


def ablations() -> list[Run]:
    """TROLL, one thing changed at a time, where it acts (1e-3) and where it is tuned (3e-4)."""
    grid = itertools.product(SEEDS, (1e-3, 3e-4), ("", *ABLATIONS))
    return [run(("troll", variant), rate, seed) for seed, rate, variant in grid]


def published() -> list[Run]:
    """The papers' own reductions and advantages, at the best rate and above it."""
    return [run(arm, rate, seed) for seed, rate, arm in itertools.product(SEEDS, (3e-4, 1e-3), PUBLISHED)]


def first() -> list[Run]:
    """Three seeds of the map, then of the ablations where TROLL acts: two hours of one core, eight minutes of sixteen."""
    ablated = [spec for spec in ablations() if spec.rate == 1e-3]
    return [spec for spec in [*the_map(), *ablated] if spec.seed in SEEDS[:3]]


def tiny() -> list[Run]:
    """Two steps of every variant, and of one update per batch: does it run at all?"""
    small: dict[str, Any] = {"steps": 2, "eval_size": 16, "eval_every": 2}
    arms = dict.fromkeys([*ARMS, *PUBLISHED, *(("troll", variant) for variant in ABLATIONS)])
    return [run(arm, 1e-3, 1, **small) for arm in arms] + [run(("troll", ""), 1e-3, 1, updates=1, **small)]


PLANS: dict[str, Callable[[], Sequence[Run]]] = {
    "first": first,
    "a": the_map,
    "a-floor": floor,
    "a-reuse": reused,
    "a-published": published,
    "g": ablations,
    "tiny": tiny,
}
