"""Evaluation of robot policies on held-out contexts, during and after training: return, success and smoothness of motion."""

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

from corral.lab.environments import Environment
from corral.lab.jobs.robot.prepare import find_environment, restored
from corral.lab.run.files import disk_errors, write_json
from corral.lab.run.interval import LEVEL, Estimate, wilson
from corral.lab.run.life import Evaluation
from corral.lab.run.text import count
from corral.lab.run.view import PatientConsole, number
from corral.provenance import commit, versions
from corral.robot.episode import Episodes, held_out_seeds
from corral.robot.tracking import Array
from corral.validate import RunError, run_errors

MOVED = 32
"""Number of held-out contexts on which smoothness and exploration noise are measured during training."""
LAG = 0.1
"""Time lag in seconds at which the autocorrelation of exploration noise is measured."""
_SHORTEST = 4
"""Smallest number of steps of an episode for which jerk can be computed."""
_RESAMPLES = 2000
"""Number of bootstrap resamples for a confidence interval."""
_FILM_EPISODES = 3
"""Number of episodes in an evaluation's film."""
_SMOOTHNESS = {"jerk": "jerk (LDJ)", "spectrum": "spectrum (SPARC)", "torque_rate": "torque rate"}
"""Names in tables of the smoothness measures jerk, spectrum and torque rate."""
WAYS = ("mean", "exploring")
"""Names of the two ways to play evaluation episodes: without exploration, or with the exploration of training."""
_PADDING = 16
"""Length of the zeros appended to a motion before its Fourier transform, in multiples of the motion's length.
They resolve the spectrum's arc length to a per mille."""


def log_dimensionless_jerk(velocities: Array, dt: float) -> Array:
    """Log dimensionless jerk: −log of a motion's squared jerk, normalised by duration and peak speed.
    Nearer to 0 is smoother.

        LDJ = − log( (duration³ / peak²) ∫ ‖v̈‖² dt )          peak = max ‖v‖

    NaN for a robot that does not move.

    Args:
        velocities: [* T D], T ≥ 4.
        dt: seconds from one to the next.
    Returns:
        [*].
    Ref:
        Balasubramanian et al. 2015, J. NeuroEng. Rehab. 12:112. Invariant: a minimum-jerk motion has −log 204.8.
    """
    jerk = np.diff(velocities, 2, axis=-2) / dt**2
    peak = np.linalg.norm(velocities, axis=-1).max(-1)
    duration = dt * velocities.shape[-2]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(-np.log(duration**3 / peak**2 * np.square(jerk).sum((-2, -1)) * dt))


def spectral_arc_length(velocities: Array, dt: float, *, cutoff: float = 10.0, threshold: float = 0.05) -> Array:
    """Spectral arc length of motions: minus the length of the speed's normalised amplitude spectrum. Nearer to 0 is smoother.

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
    """Mean rate of torque change ‖Δu‖ / Δt [*] of actions [* T D], a measure of wear on a robot's motors and gears."""
    return np.asarray(np.linalg.norm(np.diff(actions, axis=-2), axis=-1).mean(-1) / dt)


def lag_autocorrelation(deviations: Array, lag: int) -> float:
    """Correlation of exploration noise with itself `lag` steps later, over all episodes, times and joints.

        Σ x_t x_{t+lag} / √( Σ x_t² Σ x_{t+lag}² )

    Args:
        deviations: [E T D], executed minus mean motion.
        lag: steps, 1 ≤ lag < T.
    """
    early, late = deviations[..., :-lag, :], deviations[..., lag:, :]
    return float((early * late).sum() / np.sqrt(np.square(early).sum() * np.square(late).sum()))


# ------------------------------------------------------------------------------------------------------------ measurements


def measure(agent: Any, environment: Environment, contexts: int) -> dict[str, float | None]:
    """Measure a policy during training, on held-out contexts common to all runs and algorithms.

    Args:
        agent: a `Learner` or a `Baseline`.
        contexts: how many held-out contexts.
    Returns:
        `success`, `return` and, of the hopper, `max_height` without exploration; medians of the smoothness of motion over the
        first `MOVED` contexts, and, from the same contexts played as in training, `explore/…` with the autocorrelation of what
        exploration adds to the actions. None where there is nothing to measure.
    """
    seeds = held_out_seeds(contexts)
    mean = agent.evaluate(seeds)
    known = mean.success[~mean.success.isnan()]
    found: dict[str, float | None] = {
        "success": float(known.mean()) if len(known) else None,
        "return": float(mean.returns.mean()),
    }
    if not mean.max_height.isnan().any():
        found["max_height"] = float(mean.max_height.mean())
    exploring = agent.explore(seeds[:MOVED])
    for prefix, episodes in (("motion/", mean), ("explore/", exploring)):
        for name, values in smoothness(episodes, environment, MOVED).items():  # a median: one odd episode would spoil a mean
            found[prefix + name] = float(np.median(values)) if len(values) else None
    return found | {"explore/autocorrelation": autocorrelation(exploring, mean, environment)}


def smoothness(episodes: Episodes, environment: Environment, count: int | None = None) -> dict[str, Array]:
    """Compute three smoothness measures for each of the first `count` episodes that are long enough and move.
    Nearer to 0 is smoother."""
    velocities = episodes.observations[:count, 1:, slice(*environment.tracking.velocities)].numpy()
    found: dict[str, list[float]] = {name: [] for name in _SMOOTHNESS}
    for speeds, actions, mask in zip(velocities, episodes.actions[:count].numpy(), episodes.mask[:count], strict=True):
        if (end := int(mask.sum())) >= _SHORTEST:
            found["jerk"].append(float(log_dimensionless_jerk(speeds[:end], environment.dt)))
            found["spectrum"].append(float(spectral_arc_length(speeds[:end], environment.dt)))
            found["torque_rate"].append(float(torque_rate(actions[:end], environment.dt)))
    return {name: np.array([x for x in values if math.isfinite(x)]) for name, values in found.items()}  # none at rest


def autocorrelation(exploring: Episodes, mean: Episodes, environment: Environment) -> float | None:
    """Autocorrelation of exploration noise in the actions at a lag of `LAG` seconds. It is 0 for white noise.

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


# ------------------------------------------------------------------------------------------------------------- evaluations


def evaluate(
    run: Path, *, episodes: int = 256, checkpoint: str = "latest", out: Path | None = None, video: Path | None = None
) -> Evaluation:
    """Evaluate a checkpoint of a robot's run on held-out contexts common to all runs, with and without exploration."""
    if episodes < 1:
        raise RunError(f"`episodes` must be at least 1; got {episodes}.")
    if video is not None:
        with run_errors((ValueError, ImportError)):
            from corral.lab.jobs.robot.picture import check_film, render_video  # matplotlib and imageio

            check_film(video)
    seeds = held_out_seeds(episodes)
    with restored(run, checkpoint) as (settings, agent, chosen, complaints):
        known, name, given = find_environment(settings), settings.environment, settings.environment_config
        film: gymnasium.Env | None = None
        if video is not None and known.maker is None:
            film = gymnasium.make(name, render_mode="rgb_array", **given)
        elif video is not None:  # what cannot be filmed is refused before anything is played
            from corral.lab.environments.own import make_film

            film = make_film(name, known.maker, known.steps, given)
        played = {"mean": agent.evaluate(seeds), "exploring": agent.explore(seeds)}
    result = {
        "run": str(run),
        "step": chosen.step,
        "environment": {"name": settings.environment, **settings.environment_config},
        "algorithm": settings.algorithm,
        "episodes": episodes,
        "level": LEVEL,
        "estimates": {way: _estimates(found, known) for way, found in played.items()},
        "complaints": complaints,
        "versions": versions(),
        "commit": commit(),
    }
    where = out or run / "evals" / f"step-{chosen.step}-episodes-{episodes}"
    with disk_errors(where):
        where.mkdir(parents=True, exist_ok=True)
    write_json(where / "eval.json", result)
    if video is not None and film is not None:
        with closing(film), disk_errors(video):
            render_video(film, seeds[:_FILM_EPISODES], played["mean"].actions[:_FILM_EPISODES].numpy(), video)
    return Evaluation(where, result)


def _estimates(episodes: Episodes, environment: Environment) -> dict[str, dict[str, float | None]]:
    """Estimate every measure of an evaluation, with confidence intervals over contexts.
    Smoothness may have either sign; nearer to 0 is smoother.

    Returns are means; smoothness is a median, since one episode at rest would spoil a mean. Success is left out where the
    environment does not say it. Episodes that ended early are smooth up to their end.
    """
    success = episodes.success[~episodes.success.isnan()].numpy()
    found = {"return": bootstrap(episodes.returns.numpy(), np.mean)}
    if len(success):
        found["success"] = Estimate(float(success.mean()), *wilson(float(success.mean()), len(success)))
    if not episodes.max_height.isnan().any():
        found["max height (m)"] = bootstrap(episodes.max_height.numpy(), np.mean)
    for name, values in smoothness(episodes, environment).items():
        if len(values):
            found[_SMOOTHNESS[name]] = bootstrap(values, np.median)
    return {name: asdict(one) for name, one in found.items()}


def bootstrap(values: Array, statistic: Callable[..., Any], level: float = LEVEL) -> Estimate:
    """Compute a statistic of independent values and its percentile bootstrap interval, with a fixed random seed.

    One value has no interval: it is all that can be drawn, and a width of 0 would say that it is certain.
    """
    if len(values) < 2:
        return Estimate(float(statistic(values)), None, None)
    draws = np.random.default_rng(0).integers(len(values), size=(_RESAMPLES, len(values)))
    low, high = np.quantile(statistic(values[draws], axis=1), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(statistic(values)), float(low), float(high))


def show(result: Mapping[str, Any], where: Path, video: Path | None, *, quiet: bool) -> None:
    """Print the results of an evaluation as a table and a sentence, with the folder that holds them."""
    console, problems = PatientConsole(), PatientConsole(stderr=True)
    for sentence in result["complaints"]:
        problems.print(f"[yellow]warning:[/] {escape(sentence)}", soft_wrap=True, highlight=False)
    estimates = result["estimates"]
    if not quiet:
        rows = Table("", box=box.SIMPLE_HEAD, pad_edge=False)
        for way in WAYS:
            rows.add_column(way, justify="right")
            rows.add_column(f"{result['level']:.0%} interval")
        for name in estimates["mean"]:
            rows.add_row(name, *(cell for way in WAYS for cell in _cells(estimates[way].get(name))))
        console.print(rows)
    text = f"{result['algorithm']} on {result['environment']['name']} after {result['step']} steps: "
    if one := estimates["mean"].get("success"):
        text += f"success {one['value']:.1%} ({one['low']:.1%} – {one['high']:.1%}), "
    contexts = count(result["episodes"], "held-out context")
    text += f"return {number(estimates['mean']['return']['value'])} over {contexts}. In {where / 'eval.json'}"
    text += f"; film: {video}" if video is not None else ""
    console.print(escape(text), soft_wrap=True, highlight=False)


def _cells(one: Mapping[str, Any] | None) -> tuple[str, str]:
    """Format an estimate and its confidence interval as table cells. A single episode gives no interval."""
    if one is None:
        return "–", ""
    interval = "–" if one["low"] is None else f"{number(one['low'])} … {number(one['high'])}"
    return number(one["value"]), interval
