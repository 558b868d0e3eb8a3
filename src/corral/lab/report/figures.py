"""Data of the figures: which metrics, their captions, and every run's points, thinned out to what a page can hold."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd

from corral.lab.report.groups import Group
from corral.lab.report.read import Run, table_in
from corral.lab.report.statistics import interquartile_curve, middle_mean
from corral.objective import make_config

BUDGET = 250_000
"""Numbers on a page, over all runs and metrics: about two megabytes."""


@dataclass(frozen=True)
class Metric:
    """One metric of metrics.jsonl, as a figure."""

    section: Literal["learning", "region", "motion"]
    key: str
    title: str
    caption: str
    percent: bool = False
    log: bool = False
    """A logarithmic axis: values span decades."""
    largest: bool = False
    """Of several steps the largest counts, not the mean."""


METRICS = (
    Metric("learning", "success", "Success", "held-out problems solved by one sample at temperature 1", percent=True),
    Metric("learning", "greedy", "Greedy success", "held-out problems solved by the likeliest tokens", percent=True),
    Metric("learning", "return", "Return", "mean over held-out contexts, without exploration"),
    Metric("learning", "reward", "Training reward", "mean reward of the rollouts"),
    Metric("region", "entropy", "Entropy", "nats per token of the policy"),
    Metric("region", "tr/active_frac", "Active fraction", "share of tokens on which the trust region acted", percent=True),
    Metric("region", "tr/kl_before", "Mean KL", "to the old policy, nats per token, as the network wants it", log=True),
    Metric(
        "region", "tr/kl_after", "Mean KL after projection", "the same once projected; other objectives have none", log=True
    ),
    Metric("region", "tr/kl_max", "Largest KL", "of any token in the batch; ▲ marks infinite values", log=True, largest=True),
    Metric("region", "tr/ratio_max", "Largest ratio", "new over old probability of any sampled token", log=True, largest=True),
    Metric("region", "tr/dual", "Dual variable", "η, mean over the projected tokens: how hard the region pulls back"),
    Metric(
        "region", "tr/mismatch", "Sampler mismatch", "total variation between sampler and trainer on sampled tokens", log=True
    ),
    Metric(
        "region", "tr/rest_mass", "Mass outside the support", "old probability of tokens that are not kept one by one", log=True
    ),
    Metric("region", "tr/unconverged", "Unconverged projections", "tokens per update whose projection did not converge"),
    Metric("region", "tr/deployed_kl_mean", "Deployed KL", "mean KL to the network before the step, nats per token", log=True),
    Metric(
        "region", "learning_rate", "Learning rate", "of a step; where a bound holds, the next follows the deployed KL", log=True
    ),
    Metric("region", "tr/active_cov", "Active covariances", "share of Gaussians whose covariance was projected", percent=True),
    Metric("region", "skipped", "Skipped updates", "updates with a non-finite loss or gradient so far", largest=True),
    Metric("region", "grad_norm", "Gradient norm", "before clipping", log=True),
    Metric("region", "completions/mean_length", "Completion length", "mean, in tokens"),
    Metric("region", "tokens_per_second", "Speed", "tokens per second"),
    Metric("region", "steps_per_second", "Speed", "environment steps per second"),
    Metric("motion", "motion/jerk", "Jerk", "minus the log of the dimensionless jerk: higher is smoother"),
    Metric("motion", "explore/jerk", "Jerk while exploring", "the same with the noise of training"),
    Metric("motion", "motion/spectrum", "Spectral arc length", "negative: nearer to 0 is smoother"),
    Metric("motion", "explore/spectrum", "Spectral arc length while exploring", "the same with the noise of training"),
    Metric("motion", "motion/torque_rate", "Torque rate", "how fast actions change: nearer to 0 is smoother", log=True),
    Metric("motion", "explore/torque_rate", "Torque rate while exploring", "the same with the noise of training", log=True),
    Metric(
        "motion",
        "explore/autocorrelation",
        "Autocorrelation of exploration",
        "of what noise adds to actions, .1 s apart; white noise: 0",
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
    logged = {key for run in runs for line in run.lines for key in line}
    for metric in METRICS:
        if metric.key == "learning_rate" and "tr/deployed_kl_mean" not in logged:
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
    settings = dict(table_in(group.runs[0].config, "objective"))
    bound = None
    with suppress(ValueError, TypeError):  # an older run, an objective that is not registered here, or a damaged file
        bound = make_config(str(settings.pop("name", "")), settings).kl_bound
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


def curve(group: Group, metric: Metric, every: int = 1, *, interval: bool = True, axis: str = "update") -> pd.DataFrame | None:
    """A group's curve of one metric: a row per step at which at least one seed measured something; None without any.

    Columns are `step`, `axis`, the interquartile mean `value`, `low` and `high`, and the number of `seeds`. The interval is a
    bootstrap's, or the range of the seeds.
    """
    frame = pd.concat([pd.DataFrame(points(run, [metric], every)) for run in group.runs])
    frame = frame[[isinstance(value, float) and value == value for value in frame[metric.key]]]
    if frame.empty:
        return None
    steps = frame.groupby("step")
    values = [column.to_numpy(float) for _, column in steps[metric.key]]
    found = steps.agg(**{axis: (axis, "mean"), "seeds": (axis, "size")}).reset_index()
    found["value"], found["low"], found["high"] = np.nan, [min(column) for column in values], [max(column) for column in values]
    for _, rows in found.groupby("seeds"):  # points with equally many seeds are bootstrapped at once, with equal draws
        block = np.array([values[index] for index in rows.index]).T
        columns = interquartile_curve(block) if interval else (middle_mean(block),)
        for name, column in zip(("value", "low", "high"), columns, strict=False):
            found.loc[rows.index, name] = column
    return found


def _summary(values: Sequence[Any], metric: Metric) -> float | str | None:
    """The mean, or the largest value, of a metric over several steps."""
    numbers = [value for value in values if isinstance(value, float) and not math.isnan(value)]
    finite = [value for value in numbers if math.isfinite(value)]
    if numbers and (not finite or (metric.largest and max(numbers) == math.inf)):
        return "inf"
    if not finite:
        return None
    return max(finite) if metric.largest else sum(finite) / len(finite)


def _finite(value: Any, default: float) -> float:
    return value if isinstance(value, float) and math.isfinite(value) else float(default)
