"""Metrics on held-out contexts: success, return and smoothness of motion, with exploration and without."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from corral.robot.env import Environment
from corral.robot.episode import Episodes, held_out_seeds
from corral.robot.smoothness import lag_autocorrelation, log_dimensionless_jerk, spectral_arc_length, torque_rate
from corral.robot.tracking import Array

MOVED = 32
"""Contexts of which the motions are looked at, and which exploration plays again."""
LAG = 0.1
"""Seconds after which exploration is compared with itself."""
_SHORTEST = 4
"""Steps that a motion must have to have a jerk."""


def measure(agent: Any, environment: Environment, contexts: int) -> dict[str, float | None]:
    """One line's measurements, on the contexts that every run and every algorithm is measured on.

    Args:
        agent: a `Learner` or a `Baseline`.
        contexts: how many held-out contexts.
    Returns:
        `success` and `return` without exploration; medians of the smoothness of motion over the first `MOVED` contexts, and,
        from the same contexts played as in training, `explore/…` with the autocorrelation of what exploration adds to the
        actions. None where there is nothing to measure.
    """
    seeds = held_out_seeds(contexts)
    mean = agent.evaluate(seeds)
    known = mean.success[~mean.success.isnan()]
    found: dict[str, float | None] = {
        "success": float(known.mean()) if len(known) else None,
        "return": float(mean.returns.mean()),
    }
    exploring = agent.explore(seeds[:MOVED])
    found |= _medians(smoothness(mean, environment, MOVED), "motion/")
    found |= _medians(smoothness(exploring, environment, MOVED), "explore/")
    return found | {"explore/autocorrelation": autocorrelation(exploring, mean, environment)}


def smoothness(episodes: Episodes, environment: Environment, count: int | None = None) -> dict[str, Array]:
    """Three measures of each of the first `count` episodes that lasted and moved; nearer to 0 is smoother."""
    lengths = episodes.mask.sum(-1).tolist()[:count]
    velocities = episodes.observations[:, 1:, slice(*environment.tracking.velocities)].numpy()
    actions, dt = episodes.actions.numpy(), environment.dt
    measures: dict[str, Callable[[int, int], Array]] = {
        "jerk": lambda row, end: log_dimensionless_jerk(velocities[row, :end], dt),
        "spectrum": lambda row, end: spectral_arc_length(velocities[row, :end], dt),
        "torque_rate": lambda row, end: torque_rate(actions[row, :end], dt),
    }
    found = {
        name: np.array([float(one(row, end)) for row, end in enumerate(lengths) if end >= _SHORTEST])
        for name, one in measures.items()
    }
    return {name: values[np.isfinite(values)] for name, values in found.items()}  # at rest there is no smoothness


def _medians(values: dict[str, Array], prefix: str) -> dict[str, float | None]:
    """A median each, since one odd episode would spoil a mean; None of nothing."""
    return {prefix + name: float(np.median(found)) if len(found) else None for name, found in values.items()}


def autocorrelation(exploring: Episodes, mean: Episodes, environment: Environment) -> float | None:
    """Autocorrelation of the exploration noise in the actions at a lag of `LAG` seconds; 0 for white noise.

    Args:
        exploring: episodes played as in training.
        mean: those of the same contexts without exploration, and maybe more after them.
    """
    whole = exploring.mask.all(-1) & mean.mask[: len(exploring.mask)].all(-1)
    added = (exploring.actions - mean.actions[: len(exploring.actions)])[whole].numpy()
    lag = max(1, round(LAG / environment.dt))
    if not len(added) or added.shape[1] <= lag:
        return None
    with np.errstate(invalid="ignore"):
        found = lag_autocorrelation(added, lag)
    return found if math.isfinite(found) else None
