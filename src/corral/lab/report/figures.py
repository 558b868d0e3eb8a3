"""Data of the figures: which metrics, their captions, and every run's points, thinned out to what a page can hold."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from corral.lab.report.groups import Group
from corral.lab.report.read import Run
from corral.lab.report.statistics import interquartile_curve, middle_mean
from corral.objective import make_config

BUDGET = 250_000
"""Numbers on a page, over all runs and metrics: about two megabytes."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric of metrics.jsonl, as a figure."""

    key: str
    title: str
    caption: str
    section: Literal["learning", "region", "motion"]
    percent: bool = False
    log: bool = False
    """A logarithmic axis: values span decades."""
    largest: bool = False
    """Of several steps the largest counts, not the mean."""


def _metric(section: Literal["learning", "region", "motion"], key: str, title: str, caption: str, **look: bool) -> Metric:
    return Metric(key=key, title=title, caption=caption, section=section, **look)


_learning, _region, _motion = (partial(_metric, section) for section in ("learning", "region", "motion"))

METRICS = (
    _learning("success", "Success", "held-out problems solved by one sample at temperature 1", percent=True),
    _learning("greedy", "Greedy success", "held-out problems solved by the likeliest tokens", percent=True),
    _learning("return", "Return", "mean over held-out contexts, without exploration"),
    _learning("reward", "Training reward", "mean reward of the rollouts"),
    _region("entropy", "Entropy", "nats per token of the policy"),
    _region("tr/active_frac", "Active fraction", "share of tokens on which the trust region acted", percent=True),
    _region("tr/kl_before", "Mean KL", "to the old policy, nats per token, as the network wants it", log=True),
    _region("tr/kl_after", "Mean KL after projection", "the same once projected; other objectives have none", log=True),
    _region("tr/kl_max", "Largest KL", "of any token in the batch; ▲ marks infinite values", log=True, largest=True),
    _region("tr/ratio_max", "Largest ratio", "new over old probability of any sampled token", log=True, largest=True),
    _region("tr/dual", "Dual variable", "η, mean over the projected tokens: how hard the region pulls back"),
    _region("tr/mismatch", "Sampler mismatch", "total variation between sampler and trainer on sampled tokens", log=True),
    _region("tr/rest_mass", "Mass outside the support", "old probability of tokens that are not kept one by one", log=True),
    _region("tr/unconverged", "Unconverged projections", "tokens per update whose projection did not converge"),
    _region("tr/deployed_kl_mean", "Deployed KL", "mean KL to the network before the step, nats per token", log=True),
    _region("learning_rate", "Learning rate", "of a step; where a bound holds, the next follows the deployed KL", log=True),
    _region("tr/active_cov", "Active covariances", "share of Gaussians whose covariance was projected", percent=True),
    _region("skipped", "Skipped updates", "updates with a non-finite loss or gradient so far", largest=True),
    _region("grad_norm", "Gradient norm", "before clipping", log=True),
    _region("completions/mean_length", "Completion length", "mean, in tokens"),
    _region("tokens_per_second", "Speed", "tokens per second"),
    _region("steps_per_second", "Speed", "environment steps per second"),
    _motion("motion/jerk", "Jerk", "minus the log of the dimensionless jerk: higher is smoother"),
    _motion("explore/jerk", "Jerk while exploring", "the same with the noise of training"),
    _motion("motion/spectrum", "Spectral arc length", "negative: nearer to 0 is smoother"),
    _motion("explore/spectrum", "Spectral arc length while exploring", "the same with the noise of training"),
    _motion("motion/torque_rate", "Torque rate", "how fast actions change: nearer to 0 is smoother", log=True),
    _motion("explore/torque_rate", "Torque rate while exploring", "the same with the noise of training", log=True),
    _motion(
        "explore/autocorrelation", "Autocorrelation of exploration", "of what noise adds to actions, .1 s apart; white noise: 0"
    ),
)


_ROBOTS = {
    "success": "held-out contexts solved, without exploration",
    "reward": "mean return of the training episodes",
    "entropy": "nats, of the Gaussian over plans",
    "tr/active_frac": "share of plans whose mean was projected",
    "tr/kl_before": "mean KL to the old policy, nats per plan, as the network wants it",
    "tr/ratio_max": "new over old density of anything that was credited",
}
"""Where metrics of robots mean something else."""

_SAMPLED = {
    "tr/kl_before": "; {names}: k3's estimate from the sampled tokens, not to be compared with the largest KL",
    "tr/kl_max": "; {names}: of the sampled token against all others, a lower bound",
}
"""Of objectives that see the sampled token alone: the two are estimated otherwise, and the mean may exceed the largest."""


def select_metrics(runs: Sequence[Run]) -> list[Metric]:
    """Metrics that any run has; counters only if they ever count, the learning rate beside a deployed KL alone."""
    found, robots = [], all(run.is_robot for run in runs)
    certified = any("tr/deployed_kl_mean" in line for run in runs for line in run.lines)
    for metric in METRICS:
        if metric.key == "learning_rate" and not certified:
            continue
        metric = replace(metric, caption=_ROBOTS[metric.key]) if robots and metric.key in _ROBOTS else metric
        if metric.key in _SAMPLED and (names := _without_support(runs)):
            metric = replace(metric, caption=metric.caption + _SAMPLED[metric.key].format(names=names))
        values = [value for run in runs for line in run.lines if isinstance(value := line.get(metric.key), float)]
        if values and (metric.key not in ("skipped", "tr/unconverged") or any(values)):
            found.append(metric)
    return found


def _without_support(runs: Sequence[Run]) -> str:
    """Objectives of language models that log a KL and no mass outside a support: they have none."""
    found = [run for run in runs if not run.is_robot and any("tr/kl_before" in line for line in run.lines)]
    return ", ".join(dict.fromkeys(run.objective for run in found if not any("tr/rest_mass" in line for line in run.lines)))


def kl_bound(group: Group) -> float | None:
    """The bound of an objective where that is a KL; its seeds share it."""
    given = group.runs[0].config.get("objective")
    settings = dict(given) if isinstance(given, Mapping) else {}
    bound = None
    with suppress(ValueError):  # an older run, or one of an objective that is not registered here
        bound = make_config(settings.pop("name", ""), settings).kl_bound
    return float(bound) if bound is not None and 0 < bound < math.inf else None


def stride(runs: Sequence[Run], metrics: Sequence[Metric]) -> int:
    """Steps per point: one, unless that would be too many numbers for a page."""
    numbers = sum(len(run.lines) for run in runs) * max(len(metrics), 1)
    return max(1, math.ceil(numbers / BUDGET))


def points(run: Run, metrics: Sequence[Metric], every: int) -> dict[str, list[Any]]:
    """Columns of a run: updates, rollouts, tokens and seconds, then the metrics. A point stands for the steps up to it.

    Step 0 is a point of its own: it is before any update. None is nothing measured; "inf" an infinite value.
    """
    buckets: dict[int, list[Any]] = {}
    for line in run.lines:
        buckets.setdefault(math.ceil(line["step"] / every), []).append(line)
    last = [lines[-1] for lines in buckets.values()]
    columns: dict[str, list[Any]] = {
        "step": [int(line["step"]) for line in last],
        "update": [_finite(line.get("update"), line["step"]) for line in last],
        "rollouts": [run.rollouts_per_step * line["step"] for line in last],
        "tokens": [_finite(line.get("num_tokens"), 0.0) for line in last],
        "env_steps": [_finite(line.get("env_steps"), 0.0) for line in last],
        "seconds": [_finite(line.get("seconds"), 0.0) for line in last],
    }
    for metric in metrics:
        columns[metric.key] = [_summary([line.get(metric.key) for line in lines], metric) for lines in buckets.values()]
    return columns


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A group's curve of one metric: at each point the interquartile mean of its seeds and an interval."""

    step: Sequence[int]
    at: Sequence[float]
    """Updates, or environment steps."""
    value: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    seeds: int


def curve(group: Group, metric: Metric, every: int = 1, *, interval: bool = True, axis: str = "update") -> Curve | None:
    """Where at least one seed measured something. The interval is a bootstrap's, or the range of the seeds."""
    by_step: dict[int, list[tuple[float, float]]] = {}
    for run in group.runs:
        columns = points(run, [metric], every)
        for step, at, value in zip(columns["step"], columns[axis], columns[metric.key], strict=True):
            if isinstance(value, float):
                by_step.setdefault(step, []).append((at, value))
    if not by_step:
        return None
    steps = sorted(by_step)
    values = [[value for _, value in by_step[step]] for step in steps]
    middle, low, high = _with_interval(values) if interval else _with_range(values)
    at = [float(np.mean([at for at, _ in by_step[step]])) for step in steps]
    return Curve(step=steps, at=at, value=middle, low=low, high=high, seeds=max(map(len, values)))


def _with_range(values: Sequence[Sequence[float]]) -> tuple[list[float], list[float], list[float]]:
    middle = [float(middle_mean(np.array(found)[:, None])[0]) for found in values]
    return middle, [min(found) for found in values], [max(found) for found in values]


def _with_interval(values: Sequence[Sequence[float]]) -> tuple[list[float], list[float], list[float]]:
    """Bootstrap at once the points that have equally many seeds: one call of rliable each, and equal draws."""
    found: dict[int, tuple[float, float, float]] = {}
    for count in {len(entry) for entry in values}:
        indices = [index for index, entry in enumerate(values) if len(entry) == count]
        columns = interquartile_curve(np.array([values[index] for index in indices]).T)
        found |= {index: (float(a), float(b), float(c)) for index, a, b, c in zip(indices, *columns, strict=True)}
    middle, low, high = zip(*(found[index] for index in range(len(values))), strict=True)
    return list(middle), list(low), list(high)


def _summary(values: Sequence[Any], metric: Metric) -> float | str | None:
    """One number for several steps."""
    numbers = [value for value in values if isinstance(value, float) and not math.isnan(value)]
    finite = [value for value in numbers if math.isfinite(value)]
    if numbers and (not finite or (metric.largest and max(numbers) == math.inf)):
        return "inf"
    if not finite:
        return None
    return max(finite) if metric.largest else sum(finite) / len(finite)


def _finite(value: Any, default: float) -> float:
    return value if isinstance(value, float) and math.isfinite(value) else float(default)
