"""Everything that a report says, computed once; the page and the exported files are views of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corral.report import figures, outcomes, tables
from corral.report.groups import Group, group_runs
from corral.report.html import shortened
from corral.report.read import Run
from corral.run.files import RunError


@dataclass(frozen=True, kw_only=True)
class Report:
    """Runs in groups, what was measured, and every table."""

    title: str
    groups: Sequence[Group]
    measure: outcomes.Measure
    threshold: float | None
    metrics: Sequence[figures.Metric]
    every: int
    """Steps per point of a figure."""
    tables: Mapping[str, list[dict[str, Any]]]

    @property
    def runs(self) -> list[Run]:
        """Of all groups."""
        return [run for group in self.groups for run in group.runs]


def make_report(runs: Sequence[Run], *, title: str | None = None, threshold: float | None = None) -> Report:
    """Group, count, compare.

    Args:
        threshold: of the metric, for the steps to it; None takes nine tenths of what the best objective ends with.
    """
    if not runs:
        raise RunError("a report needs at least one run.")
    groups = group_runs(runs)
    measure = outcomes.main_metric(runs)
    threshold = outcomes.default_threshold(groups, measure.key) if threshold is None else threshold
    metrics = figures.drawn_metrics(runs)
    differ, same = tables.configuration(groups)
    return Report(
        title=title or headline(groups),
        groups=groups,
        measure=measure,
        threshold=threshold,
        metrics=metrics,
        every=figures.stride(runs, metrics),
        tables={
            "results": outcomes.results(groups, measure.key, threshold),
            "comparisons": outcomes.comparisons(groups, measure),
            "runs": tables.run_table(groups, measure.key),
            "events": tables.events(groups),
            "differences": differ,
            "settings": same,
            "versions": tables.versions(groups),
            "commands": tables.commands(groups),
        },
    )


def headline(groups: Sequence[Group]) -> str:
    """What the page is about: `countdown with tiny: dppo, troll`."""
    problems = list(dict.fromkeys(group.problem for group in groups))
    names = list(dict.fromkeys(group.objective for group in groups))
    what = problems[0] if len(problems) == 1 else f"{len(problems)} problems"
    return shortened(f"{what}: {', '.join(names) if len(names) <= 6 else f'{len(names)} objectives'}", 120)
