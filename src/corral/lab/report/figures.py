"""Data of a report's figures: metrics, captions, and points of every run, thinned so that the page stays small."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd

from corral.lab.report.outcomes import Group
from corral.lab.report.read import Run, table_in
from corral.lab.report.statistics import interquartile_curve, middle_mean
from corral.objective import make_config

BUDGET = 250_000
"""Largest number of values on a report's page, over all runs and metrics: about two megabytes."""


Section = Literal["learning", "region", "motion"]


@dataclass(frozen=True)
class Metric:
    """Metric from metrics.jsonl, with title, caption and axis of its figure."""

    key: str
    title: str
    caption: str
    percent: bool = False
    log: bool = False
    """True for a logarithmic axis, if values of the metric span decades."""
    largest: bool = False
    """True if a point shows the maximum of the metric over several steps, False for the mean."""
    section: Section = "region"


_SAMPLED = "of objectives without a support k3's estimate from the sampled tokens, not to be compared with the largest KL"
_BOUND = "of objectives without a support that of the sampled token against all others, a lower bound"
"""Part of a caption on objectives without a top-k support, whose largest KL is a lower bound.

Their mean and largest KL are different estimates, so the mean can be larger."""


_SECTIONS: dict[Section, tuple[Metric, ...]] = {
    "learning": (
        Metric("success", "Success", "held-out problems solved by one sample at temperature 1", percent=True),
        Metric("greedy", "Greedy success", "held-out problems solved by the likeliest tokens", percent=True),
        Metric("return", "Return", "mean over held-out contexts, without exploration"),
        Metric("reward", "Training reward", "mean reward of the rollouts"),
    ),
    "region": (
        Metric("entropy", "Entropy", "nats per token of the policy"),
        Metric("tr/active_frac", "Active fraction", "share of tokens on which the trust region acted", percent=True),
        Metric("tr/kl_before", "Mean KL", f"to the old policy, nats per token, as the network wants it; {_SAMPLED}", log=True),
        Metric("tr/kl_after", "Mean KL after projection", "the same once projected; other objectives have none", log=True),
        Metric("tr/kl_max", "Largest KL", f"of any token in the batch; ▲: infinite; {_BOUND}", log=True, largest=True),
        Metric("tr/ratio_max", "Largest ratio", "new over old probability of any sampled token", log=True, largest=True),
        Metric("tr/dual", "Dual variable", "η, mean over the projected tokens: how hard the region pulls back"),
        Metric("tr/mismatch", "Sampler mismatch", "total variation between sampler and trainer on sampled tokens", log=True),
        Metric("tr/rest_mass", "Mass outside the support", "old probability of tokens that are not kept one by one", log=True),
        Metric("tr/unconverged", "Unconverged projections", "tokens per update whose projection did not converge"),
        Metric("tr/deployed_kl_mean", "Deployed KL", "mean KL to the network before the step, nats per token", log=True),
        Metric("learning_rate", "Learning rate", "of a step; where a bound holds, the next follows the deployed KL", log=True),
        Metric("tr/active_cov", "Active covariances", "share of Gaussians whose covariance was projected", percent=True),
        Metric("skipped", "Skipped updates", "updates with a non-finite loss or gradient so far", largest=True),
        Metric("grad_norm", "Gradient norm", "before clipping", log=True),
        Metric("completions/mean_length", "Completion length", "mean, in tokens"),
        Metric("tokens_per_second", "Speed", "tokens per second"),
        Metric("steps_per_second", "Speed", "environment steps per second"),
    ),
    "motion": (
        Metric("motion/jerk", "Jerk", "minus the log of the dimensionless jerk: higher is smoother"),
        Metric("explore/jerk", "Jerk while exploring", "the same with the noise of training"),
        Metric("motion/spectrum", "Spectral arc length", "negative: nearer to 0 is smoother"),
        Metric("explore/spectrum", "Spectral arc length while exploring", "the same with the noise of training"),
        Metric("motion/torque_rate", "Torque rate", "how fast actions change: nearer to 0 is smoother", log=True),
        Metric("explore/torque_rate", "Torque rate while exploring", "the same with the noise of training", log=True),
        Metric("explore/autocorrelation", "Autocorrelation of exploration", "of noise in actions, .1 s apart; white noise: 0"),
    ),
}
METRICS = [replace(metric, section=section) for section, metrics in _SECTIONS.items() for metric in metrics]

_ROBOTS = {
    "success": "held-out contexts solved, without exploration",
    "reward": "mean return of the training episodes",
    "entropy": "nats, of the Gaussian over plans",
    "tr/active_frac": "share of plans whose mean was projected",
    "tr/kl_before": "mean KL to the old policy, nats per plan, as the network wants it",
    "tr/ratio_max": "new over old density of anything that was credited",
    "tr/kl_max": "of any plan in the batch; ▲: infinite",
    "tr/unconverged": "projections per update that did not converge",
    "tr/deployed_kl_mean": "mean KL to the network before the step, nats per plan",
}
"""Mapping from metrics that mean something else for robots to the metrics' captions."""


def select_metrics(runs: Sequence[Run]) -> list[Metric]:
    """Select the metrics that at least one run has logged. Counters that are always zero are left out.

    The learning rate is shown only beside a deployed KL.
    """
    lines = [line for run in runs for line in run.lines]
    found = [metric for metric in METRICS if any(isinstance(line.get(metric.key), float) for line in lines)]
    empty = {key for key in ("skipped", "tr/unconverged") if not any(line.get(key) for line in lines)}
    empty |= {"learning_rate"} if not any("tr/deployed_kl_mean" in line for line in lines) else set()
    captions = _ROBOTS if all(run.is_robot for run in runs) else {}
    shown = [metric for metric in found if metric.key not in empty]
    return [replace(metric, caption=captions.get(metric.key, metric.caption)) for metric in shown]


def kl_bound(group: Group) -> float | None:
    """Return the KL bound of a group's objective, or None if the objective has no bound on the KL."""
    settings = dict(table_in(group.runs[0].config, "objective"))
    bound = None
    with suppress(ValueError, TypeError):  # an older run, an objective that is not registered here, or a damaged file
        bound = make_config(str(settings.pop("name", "")), settings).kl_bound
    return float(bound) if bound is not None and 0 < bound < math.inf else None


def stride(runs: Sequence[Run], metrics: Sequence[Metric]) -> int:
    """Compute the number of training steps per point of a figure: 1, unless the page would hold too many values."""
    numbers = sum(len(run.lines) for run in runs) * max(len(metrics), 1)
    return max(1, math.ceil(numbers / BUDGET))


def points(run: Run, metrics: Sequence[Metric], every: int) -> dict[str, list[Any]]:
    """Compute the points of a run's curves, as columns: steps, updates, rollouts, tokens, seconds and metrics.

    A point summarises the steps since the last point. Step 0 is a point of its own: it is before any update. None is nothing
    measured; "inf" an infinite value.
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


def curve(group: Group, metric: Metric, every: int = 1, *, interval: bool = True, axis: str = "step") -> pd.DataFrame | None:
    """Compute a group's curve of a metric over its seeds, with a row per measured step. Returns None without measurements.

    Columns are `step`, `axis`, the interquartile mean `value`, `low` and `high`, and the number of `seeds`. The interval is a
    bootstrap's, or the range of the seeds.
    """
    frame = pd.concat([pd.DataFrame(points(run, [metric], every)) for run in group.runs])
    frame = frame[[isinstance(value, float) and value == value for value in frame[metric.key]]]
    if frame.empty:
        return None
    steps = frame.groupby("step")
    values = [column.to_numpy(float) for _, column in steps[metric.key]]
    place = {} if axis == "step" else {axis: (axis, "mean")}
    found = steps.agg(**place, seeds=(metric.key, "size")).reset_index()
    for _, rows in found.groupby("seeds"):  # points with equally many seeds are bootstrapped at once, with equal draws
        block = np.array([values[index] for index in rows.index]).T
        curves = interquartile_curve(block) if interval else (middle_mean(block), block.min(0), block.max(0))
        found.loc[rows.index, ["value", "low", "high"]] = np.column_stack(curves)
    return found


def _summary(values: Sequence[Any], metric: Metric) -> float | str | None:
    """Compute the mean or maximum of a metric over several steps. Returns "inf" for infinite values and None for no value."""
    numbers = [value for value in values if isinstance(value, float) and not math.isnan(value)]
    finite = [value for value in numbers if math.isfinite(value)]
    if numbers and (not finite or (metric.largest and max(numbers) == math.inf)):
        return "inf"
    if not finite:
        return None
    return max(finite) if metric.largest else sum(finite) / len(finite)


def _finite(value: Any, default: float) -> float:
    return value if isinstance(value, float) and math.isfinite(value) else float(default)
