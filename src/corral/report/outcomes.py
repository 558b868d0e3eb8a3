"""What came out: where each objective stands, and who beats whom. Rows of plain values, ready for CSV."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from corral.report import statistics
from corral.report.groups import Group, flat, pairs
from corral.report.html import shortened, visible
from corral.report.read import Run

Row = dict[str, Any]

COUNTED = ("finished", "collapsed")
"""Runs that count in the statistics: those that used their budget, and those that were stopped because they fell apart."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number that a run ends with, and how to say it."""

    key: str
    name: str
    unit: str
    factor: float
    """From the run's number to `unit`."""


def main_metric(runs: Sequence[Run]) -> Measure:
    """Held-out success where it was measured, else the reward."""
    if any(run.values("success") for run in runs):
        return Measure(key="success", name="success", unit="points", factor=100.0)
    return Measure(key="reward", name="reward", unit="", factor=1.0)


def counted(group: Group, metric: str) -> dict[str, Run]:
    """A group's runs that count, by seed; of two with one seed the later one."""
    return {run.seed: run for run in group.runs if run.stopped in COUNTED and run.values(metric)}


def finals(group: Group, metric: str) -> dict[str, float]:
    """The last measurement of each run that counts."""
    return {seed: run.values(metric)[-1][1] for seed, run in counted(group, metric).items()}


def areas(group: Group, metric: str) -> dict[str, float]:
    """The mean of the metric over each run that counts."""
    found = {seed: statistics.area_under_curve(run.values(metric), run.planned) for seed, run in counted(group, metric).items()}
    return {seed: area for seed, area in found.items() if area is not None}


def default_threshold(groups: Sequence[Group], metric: str) -> float | None:
    """Nine tenths of what the best objective ends with."""
    ends = [
        statistics.interquartile_mean(np.array([*found.values()])).value for group in groups if (found := finals(group, metric))
    ]
    return 0.9 * max(ends) if ends else None


def results(groups: Sequence[Group], metric: str, threshold: float | None) -> list[Row]:
    """One row per group: final, area, greedy, steps to the threshold, collapses, time."""
    rows = []
    for group in groups:
        runs = counted(group, metric)
        row: Row = {"objective": group.objective, "setting": group.setting, "problem": group.problem}
        row |= {"runs": len(group.runs), "counted": len(runs)}
        greedy = {seed: run.values("greedy")[-1][1] for seed, run in runs.items() if run.values("greedy")}
        for name, found in (("final", finals(group, metric)), ("area", areas(group, metric)), ("greedy", greedy)):
            estimate = statistics.interquartile_mean(np.array([*found.values()])) if found else None
            row |= {
                name: estimate and estimate.value,
                f"{name}_low": estimate and estimate.low,
                f"{name}_high": estimate and estimate.high,
            }
        reached = [statistics.steps_to(run.values(metric), threshold) for run in runs.values()] if threshold is not None else []
        row |= {
            "steps_to_threshold": float(np.median(reached)) if reached and math.isfinite(np.median(reached)) else None,
            "reached": sum(map(math.isfinite, reached)),
            "collapsed": sum(statistics.collapsed(run.values(metric), run.stopped) for run in runs.values()),
            "seconds": float(np.mean([run.lines[-1].get("seconds") or 0.0 for run in runs.values()])) if runs else None,
        }
        rows.append(row)
    return rows


def comparisons(groups: Sequence[Group], measure: Measure) -> list[Row]:
    """One row per pair and measure, with its sentence. Claims hold among all pairs of their measure together."""
    rows = []
    for name, read in (("final", finals), ("area", areas)):
        found = []
        for ours, theirs in pairs(groups):
            a, b = read(ours, measure.key), read(theirs, measure.key)
            if a and b:
                scaled = ({seed: value * measure.factor for seed, value in side.items()} for side in (a, b))
                found.append((ours, theirs, statistics.difference(*scaled), a, b))
        holds = statistics.holm([difference.p for _, _, difference, _, _ in found])
        what = f"final {measure.name}" if name == "final" else f"mean {measure.name} over the run"
        for (ours, theirs, difference, a, b), held in zip(found, holds, strict=True):
            names = shortened(visible(ours.label), 80), shortened(visible(theirs.label), 80)
            words = statistics.sentence(*names, what, difference, holds=held, among=len(found), unit=measure.unit)
            other = differing(ours, theirs)
            chance = statistics.probability_of_improvement(np.array([*a.values()]), np.array([*b.values()]))
            rows.append(
                {
                    "measure": name, "problem": ours.problem, "ours": ours.label, "theirs": theirs.label,
                    "difference": difference.mean.value, "low": difference.mean.low, "high": difference.mean.high,
                    "unit": measure.unit, "p": difference.p, "seeds": difference.mean.count, "paired": difference.paired,
                    "claimed": statistics.claimed(difference, held), "probability": chance.value,
                    "probability_low": chance.low, "probability_high": chance.high,
                    "sentence": words + (f" They also differ in {other}." if other else ""),
                }
            )  # fmt: skip
    return rows


def differing(ours: Group, theirs: Group) -> str:
    """Settings in which two groups differ though neither was varied in them: a comparison that may not be fair."""
    aside = {"seed", "objective", "report_to", "guard", "keep_completions", "keep_checkpoints", "checkpoint_every"}
    a, b = (
        {
            key: value
            for key, value in flat(side.runs[0].settings).items()
            if key.split(".")[0] not in aside | {"objective_config"}
        }
        for side in (ours, theirs)
    )
    names = sorted(
        key for key in a.keys() | b.keys() if a.get(key) != b.get(key) and f"{key}=" not in ours.setting + theirs.setting
    )
    return ", ".join(names)
