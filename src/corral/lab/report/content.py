"""The content of a report, computed once; the page and the exports are views of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from corral.lab.report import figures, outcomes, tables
from corral.lab.report.groups import Group, group_runs, split_runs
from corral.lab.report.html import shorten
from corral.lab.report.looks import Look, assign_looks
from corral.lab.report.read import Run, SavedComparison
from corral.lab.report.sweep import Sweep, find_sweeps, sweep_table
from corral.validate import RunError


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Runs in groups, what was measured, and every table."""

    title: str
    groups: Sequence[Group]
    """Those that the page is about."""
    sweep_groups: Sequence[Group]
    """Runs on which a comparison chose its settings: they are in the sweep and in the lists, and count for nothing else."""
    sweeps: Sequence[Sweep]
    comparisons: Sequence[SavedComparison]
    measure: outcomes.Measure
    threshold: float | None
    """For the steps to it; None where every problem has its own."""
    metrics: Sequence[figures.Metric]
    every: int
    """Steps per point of a figure."""
    tables: Mapping[str, list[dict[str, Any]]]

    @property
    def runs(self) -> list[Run]:
        """Runs of all groups."""
        return [run for group in self.groups for run in group.runs]

    @property
    def problems(self) -> list[str]:
        """Task and model of the groups, each once."""
        return list(dict.fromkeys(group.problem for group in self.groups))

    @property
    def seeds(self) -> list[str]:
        """Seeds of the runs, each once."""
        return list(dict.fromkeys(run.seed for run in self.runs))

    @cached_property
    def looks(self) -> dict[str, Look]:
        """Colour and marker of every contestant, by the name that its groups and its sweep have."""
        swept = [row.contestant for sweep in self.sweeps for row in sweep.rows]
        return assign_looks([*(group.objective for group in self.groups), *swept])

    @cached_property
    def styles(self) -> dict[int, tuple[int, int, int]]:
        """Colour, marker and dash of each group, by its key. Dashes tell four settings apart; others change the marker."""
        settings, found = list(dict.fromkeys(group.setting for group in self.groups)), {}
        for group in self.groups:
            (colour, marker), place = self.looks[group.objective], 0 if group.chosen else settings.index(group.setting)
            found[group.key] = colour, marker + place // 4, place % 4
        return found

    @property
    def is_single(self) -> bool:
        """True if the report is about one run and nothing else."""
        return len(self.runs) == 1 and not self.sweep_groups


def make_report(
    runs: Sequence[Run],
    comparisons: Sequence[SavedComparison] = (),
    *,
    title: str | None = None,
    threshold: float | None = None,
    notes: Sequence[str] = (),
) -> RunReport:
    """Group runs, and compute every table.

    Args:
        comparisons: what `corral compare` wrote beside the runs, from `read_comparisons`.
        notes: what was wrong with files that belong to no run.
        threshold: of the metric, for the steps to it; None takes nine tenths of the best objective's end, problem by problem.
    """
    if not runs:
        raise RunError("a report needs at least one run.")
    shown, aside, chosen = split_runs(runs, comparisons)
    groups, swept = group_runs(shown, chosen), group_runs(aside)
    measure = outcomes.main_metric(runs)
    if threshold is not None and not math.isfinite(threshold):
        raise RunError(f"a threshold is a number; got {threshold}.")
    if threshold is not None and measure.key == "success" and not 0 <= threshold <= 1:
        raise RunError(f"a threshold of success lies between 0 and 1; got {threshold:g}. For 60 %, give 0.6.")
    by_problem = [[group for group in groups if group.problem == name] for name in dict.fromkeys(g.problem for g in groups)]
    thresholds = [outcomes.default_threshold(own, measure.key) if threshold is None else threshold for own in by_problem]
    metrics = figures.select_metrics(shown)
    found = find_sweeps(runs, comparisons, measure)
    differ, same = tables.configuration(groups)
    return RunReport(
        title=title or _headline(groups),
        groups=groups,
        sweep_groups=swept,
        sweeps=found,
        comparisons=comparisons,
        measure=measure,
        threshold=thresholds[0] if len(set(thresholds)) == 1 else None,
        metrics=metrics,
        every=figures.stride(shown, metrics),
        tables={
            "results": [
                row
                for own, reach in zip(by_problem, thresholds, strict=True)
                for row in outcomes.results(own, measure.key, reach)
            ],
            "comparisons": outcomes.comparisons(groups, measure),
            "overall": outcomes.overall(groups, measure),
            "sweep": sweep_table(found),
            "runs": tables.run_table([*groups, *swept], measure.key),
            "events": [*tables.events([*groups, *swept]), *tables.plan_events(comparisons, runs), *tables.file_events(notes)],
            "differences": differ,
            "settings": same,
            "versions": tables.versions([*groups, *swept]),
            "commands": tables.commands(groups),
        },
    )


def _headline(groups: Sequence[Group]) -> str:
    """The default title of a page: `countdown with tiny: dppo, troll`."""
    problems = list(dict.fromkeys(group.problem for group in groups))
    names = list(dict.fromkeys(group.objective for group in groups))
    what = problems[0] if len(problems) == 1 else f"{len(problems)} problems"
    return shorten(f"{what}: {', '.join(names) if len(names) <= 6 else f'{len(names)} objectives'}", 120)
