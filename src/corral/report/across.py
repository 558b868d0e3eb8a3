"""Results over several tasks: normalised scores, interquartile mean, mean, probability of improvement."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from corral.report import statistics
from corral.report.groups import Group
from corral.report.outcomes import Measure, finals

_Scores = dict[str, dict[str, dict[str, float]]]
"""By contestant, problem and seed."""


def overall(groups: Sequence[Group], measure: Measure) -> list[dict[str, Any]]:
    """One row per contestant that has runs on every problem: interquartile mean and mean over tasks and seeds.

    Runs are resampled within each task (rliable's stratified bootstrap). Nothing if there are fewer than two problems, or
    fewer than two contestants with runs on all of them.
    """
    scores = normalise_scores(groups, measure)
    problems = {group.problem for group in groups}
    matrices = {name: _matrix(found) for name, found in scores.items() if found.keys() == problems and _matrix(found).size}
    if len(problems) < 2 or len(matrices) < 2:
        return []
    rows = []
    for name, found in matrices.items():
        middle, mean = statistics.interquartile_mean(found), statistics.mean_over_tasks(found)
        beaten = [statistics.chance_over_tasks(found, other) for rival, other in matrices.items() if rival != name]
        rows.append(
            {
                "objective": name, "tasks": found.shape[1], "seeds": found.shape[0],
                "middle": middle.value, "middle_low": middle.low, "middle_high": middle.high,
                "mean": mean.value, "mean_low": mean.low, "mean_high": mean.high,
                "chance": float(np.mean(beaten)),
            }
        )  # fmt: skip
    return rows


def normalise_scores(groups: Sequence[Group], measure: Measure) -> _Scores:
    """Final values on one scale: success as it is; returns so that 0 is where runs of the task began and 1 the best end.

    score = (final − start) / (best − start)          start: mean over the task's runs; best: highest group mean
    """
    found: _Scores = {}
    for problem in dict.fromkeys(group.problem for group in groups):
        here = [group for group in groups if group.problem == problem]
        ends = {group.label: finals(group, measure.key) for group in here}
        low, high = 0.0, 1.0
        if measure.key != "success":
            starts = [run.values(measure.key)[0][1] for group in here for run in group.runs if run.values(measure.key)]
            low = float(np.mean(starts)) if starts else 0.0
            high = max((float(np.mean([*values.values()])) for values in ends.values() if values), default=low)
        for group in here:
            if ends[group.label] and high > low:
                scaled = {seed: (value - low) / (high - low) for seed, value in ends[group.label].items()}
                found.setdefault(group.label, {})[problem] = scaled
    return found


def _matrix(found: Mapping[str, Mapping[str, float]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[R T] of the seeds that every problem has."""
    shared = [seed for seed in next(iter(found.values())) if all(seed in seeds for seeds in found.values())]
    return np.array([[found[problem][seed] for problem in sorted(found)] for seed in shared], dtype=float)
