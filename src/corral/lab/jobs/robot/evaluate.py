"""Evaluation of a robot's run on held-out contexts: return, success and smoothness, with intervals, a table and a film."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

from corral.lab.environments import ENVIRONMENTS, Environment
from corral.lab.jobs.robot.measure import smoothness
from corral.lab.jobs.robot.settings import Settings
from corral.lab.jobs.robot.train import restored
from corral.lab.run.files import disk_errors, write_json
from corral.lab.run.interval import LEVEL, Estimate, wilson
from corral.lab.run.life import Evaluation
from corral.lab.run.text import count
from corral.lab.run.view import PatientConsole, number
from corral.provenance import commit, versions
from corral.robot.episode import Episodes, held_out_seeds
from corral.robot.tracking import Array
from corral.validate import RunError

_RESAMPLES = 2000
"""Number of bootstrap resamples."""
_FILM_EPISODES = 3
"""Number of episodes in a film."""

_SMOOTHNESS = {"jerk": "jerk (LDJ)", "spectrum": "spectrum (SPARC)", "torque_rate": "torque rate"}
"""Names of the measures of smoothness in a table."""

WAYS = ("mean", "exploring")
"""Two ways to play: without exploration, and as in training."""


def evaluate(
    run: Path, *, episodes: int = 256, checkpoint: str = "latest", out: Path | None = None, video: Path | None = None
) -> Evaluation:
    """Play episodes from a checkpoint, with and without exploration, on the held-out contexts common to all runs."""
    if episodes < 1:
        raise RunError(f"`episodes` must be at least 1; got {episodes}.")
    if video is not None:
        _check_video(video)
    seeds = held_out_seeds(episodes)
    with restored(run, checkpoint) as (settings, agent, chosen, complaints):
        played = {"mean": agent.evaluate(seeds), "exploring": agent.explore(seeds)}
    known = ENVIRONMENTS[settings.environment]
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
    if video is not None:
        _film(settings, seeds[:_FILM_EPISODES], played["mean"].actions[:_FILM_EPISODES].numpy(), video)
    return Evaluation(where, result)


def _estimates(episodes: Episodes, environment: Environment) -> dict[str, dict[str, float | None]]:
    """Estimates of every number with intervals over contexts. A smoothness nearer to 0 is smoother, whatever its sign.

    Returns are means; smoothness is a median, since one episode at rest would spoil a mean. Success is left out where the
    environment does not say it. Episodes that ended early are smooth up to their end.
    """
    success = episodes.success[~episodes.success.isnan()].numpy()
    found = {"return": bootstrap(episodes.returns.numpy(), np.mean)}
    if len(success):
        found["success"] = Estimate(float(success.mean()), *wilson(float(success.mean()), len(success)))
    for name, values in smoothness(episodes, environment).items():
        if len(values):
            found[_SMOOTHNESS[name]] = bootstrap(values, np.median)
    return {name: asdict(one) for name, one in found.items()}


def bootstrap(values: Array, statistic: Callable[..., Any], level: float = LEVEL) -> Estimate:
    """A statistic of independent values and its percentile bootstrap interval, from a fixed random seed.

    One value has no interval: it is all that can be drawn, and a width of 0 would say that it is certain.
    """
    if len(values) < 2:
        return Estimate(float(statistic(values)), None, None)
    draws = np.random.default_rng(0).integers(len(values), size=(_RESAMPLES, len(values)))
    low, high = np.quantile(statistic(values[draws], axis=1), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(statistic(values)), float(low), float(high))


def _check_video(path: Path) -> None:
    """Raise a RunError for a film that could not be written, before hours of episodes."""
    if path.suffix not in (".gif", ".mp4") or not path.parent.is_dir():
        raise RunError(f"--video is a file in a folder that is there, and ends in .gif or .mp4; got {path}.")
    try:
        from corral.lab.jobs.robot.picture import check_format  # matplotlib and imageio

        check_format(path)
    except ImportError as error:
        raise RunError(f"--video {path}: {error}") from error


def _film(settings: Settings, seeds: list[int], actions: Array, path: Path) -> None:
    """Play the first episodes again and film them."""
    from corral.lab.jobs.robot.picture import render_video  # matplotlib and imageio

    env = gymnasium.make(settings.environment, render_mode="rgb_array", **settings.environment_config)
    try:
        with disk_errors(path):
            render_video(env, seeds, actions, path)
    except (ValueError, ImportError) as error:
        raise RunError(str(error)) from error
    finally:
        env.close()


def show(result: Mapping[str, Any], where: Path, video: Path | None, *, quiet: bool) -> None:
    """Print the results of an evaluation as a table and a sentence, with their folder."""
    console, problems = PatientConsole(), PatientConsole(stderr=True)
    for sentence in result["complaints"]:
        problems.print(f"[yellow]warning:[/] {escape(sentence)}", soft_wrap=True, highlight=False)
    if not quiet:
        rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        rows.add_column("")
        for way in WAYS:
            rows.add_column(way, justify="right")
            rows.add_column(f"{result['level']:.0%} interval")
        for name in result["estimates"]["mean"]:
            found = [result["estimates"][way].get(name) for way in WAYS]
            rows.add_row(
                name, *(cell for one in found for cell in ([number(one["value"]), _interval(one)] if one else ["–", ""]))
            )
        console.print(rows)
    found = result["estimates"]["mean"]
    text = f"{result['algorithm']} on {result['environment']['name']} after {result['step']} steps: "
    if "success" in found:
        one = found["success"]
        text += f"success {one['value']:.1%} ({one['low']:.1%} – {one['high']:.1%}), "
    contexts = count(result["episodes"], "held-out context")
    text += f"return {number(found['return']['value'])} over {contexts}. In {where / 'eval.json'}"
    text += f"; film: {video}" if video is not None else ""
    console.print(escape(text), soft_wrap=True, highlight=False)


def _interval(one: Mapping[str, float | None]) -> str:
    """Text of an interval, or a dash if a single episode gives none."""
    low, high = one["low"], one["high"]
    return "–" if low is None or high is None else f"{number(low)} … {number(high)}"
