"""Measurements of robots on held-out contexts: return, success, smoothness of motion."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from corral.lab.environments import Environment
from corral.robot.episode import Episodes, held_out_seeds
from corral.robot.tracking import Array

_PADDING = 16
"""Zeros appended to a motion, in multiples of its length: they resolve the arc of the spectrum to a per mille."""


def log_dimensionless_jerk(velocities: Array, dt: float) -> Array:
    """Negative logarithm of the squared jerk, made independent of duration and size; nearer to 0 is smoother.

        LDJ = − log( (duration³ / peak²) ∫ ‖v̈‖² dt )          peak = max ‖v‖

    −∞ never occurs but for noise without end; a robot that does not move has NaN.

    Args:
        velocities: [* T D], T ≥ 4.
        dt: seconds from one to the next.
    Returns:
        [*].
    Ref:
        Balasubramanian et al. 2015, J. NeuroEng. Rehab. 12:112. Invariant: a minimum-jerk motion has −log 204.8.
    """
    _check("log_dimensionless_jerk", velocities, 4)
    jerk = np.diff(velocities, 2, axis=-2) / dt**2
    peak = np.linalg.norm(velocities, axis=-1).max(-1)
    duration = dt * velocities.shape[-2]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(-np.log(duration**3 / peak**2 * np.square(jerk).sum((-2, -1)) * dt))


def spectral_arc_length(velocities: Array, dt: float, *, cutoff: float = 10.0, threshold: float = 0.05) -> Array:
    """Negative arc length of the speed's normalised spectrum up to where it has faded; nearer to 0 is smoother.

        SPARC = − ∫₀^ω_c √( 1/ω_c² + (dV̂/dω)² ) dω          V̂ = |V(ω)| / V(0)
        ω_c: the highest frequency at most `cutoff` where V̂ ≥ `threshold`

    Args:
        velocities: [* T D], T ≥ 4.
        dt: seconds from one to the next.
        cutoff: Hz; human and robot motion lies below 10.
        threshold: V̂ below which a spectrum counts as faded.
    Returns:
        [*]; NaN for a robot that does not move.
    Ref:
        Balasubramanian et al. 2015, J. NeuroEng. Rehab. 12:112. Invariant: size and duration do not matter.
    """
    _check("spectral_arc_length", velocities, 4)
    speed = np.linalg.norm(velocities, axis=-1)
    size = _PADDING * speed.shape[-1]
    frequency = np.fft.rfftfreq(size, dt)
    spectrum = np.abs(np.fft.rfft(speed, size, axis=-1))
    with np.errstate(invalid="ignore"):
        spectrum = spectrum / spectrum[..., :1]
    lengths = np.full(speed.shape[:-1], np.nan)
    for place in np.ndindex(lengths.shape):
        if np.isfinite(row := spectrum[place]).all():
            last = np.flatnonzero((frequency <= cutoff) & (row >= threshold))[-1]
            lengths[place] = np.hypot(np.diff(frequency[: last + 1]) / frequency[last], np.diff(row[: last + 1])).sum()
    return np.asarray(-lengths)


def torque_rate(actions: Array, dt: float) -> Array:
    """Mean ‖Δu‖ / Δt [*] of actions [* T D], a measure of wear on motors and gears."""
    _check("torque_rate", actions, 2)
    return np.asarray(np.linalg.norm(np.diff(actions, axis=-2), axis=-1).mean(-1) / dt)


def lag_autocorrelation(deviations: Array, lag: int) -> float:
    """Correlation of the exploration with itself `lag` steps later, over episodes, times and joints.

        Σ x_t x_{t+lag} / √( Σ x_t² Σ x_{t+lag}² )

    Args:
        deviations: [E T D], executed minus mean motion.
        lag: steps, 1 ≤ lag < T.
    """
    _check("lag_autocorrelation", deviations, lag + 1)
    if lag < 1:
        raise ValueError(f"lag_autocorrelation: `lag` is a number of steps ≥ 1; got {lag}.")
    early, late = deviations[..., :-lag, :], deviations[..., lag:, :]
    return float((early * late).sum() / np.sqrt(np.square(early).sum() * np.square(late).sum()))


def _check(name: str, values: Array, least: int) -> None:
    if values.ndim < 2 or values.shape[-2] < least:
        raise ValueError(f"{name}: needs [* T D] with T ≥ {least}; got {list(values.shape)}.")


MOVED = 32
"""Number of contexts on which smoothness and exploration are measured."""
LAG = 0.1
"""Seconds of lag in the autocorrelation of exploration."""
_SHORTEST = 4
"""Smallest number of steps for which a jerk is defined."""


def measure(agent: Any, environment: Environment, contexts: int) -> dict[str, float | None]:
    """Measurements for one line of metrics, on the held-out contexts common to all runs and algorithms.

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
    for prefix, episodes in (("motion/", mean), ("explore/", exploring)):
        for name, values in smoothness(episodes, environment, MOVED).items():  # a median: one odd episode would spoil a mean
            found[prefix + name] = float(np.median(values)) if len(values) else None
    return found | {"explore/autocorrelation": autocorrelation(exploring, mean, environment)}


def smoothness(episodes: Episodes, environment: Environment, count: int | None = None) -> dict[str, Array]:
    """Three measures for each of the first `count` episodes that lasted and moved; nearer to 0 is smoother."""
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
