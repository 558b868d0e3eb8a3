"""Sweeps among the runs of a report: those that a comparison made, and those that the settings of the runs themselves show."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from corral.report.comparison import SavedComparison
from corral.report.groups import own_settings, problems_of, read_once, shared_settings, varying_settings
from corral.report.outcomes import COUNTED, Measure
from corral.report.read import Run
from corral.report.statistics import area_under_curve, has_collapsed
from corral.report.sweep.ranges import AUTO, Cell, SweepRow, cells, setting_text, value_at
from corral.report.sweep.usable import UsableRange, usable_range
from corral.run.text import count

_KL = "tr/kl_before"
"""How far the new policy went from the old one, before anything was done about it."""

_BUDGETS = ("steps", "iterations")
"""Settings that are no choice: more of them is more."""

_RATE = "learning_rate"
_RATES = {"learner.policy_rate": _RATE, "learner.rate": _RATE}
"""What robots' algorithms call their learning rate."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Contestants over a grid of settings."""

    problem: str
    key: str
    """The setting along the axis: the learning rate, where that was swept."""
    rows: Sequence[SweepRow]
    chosen: Mapping[str, Mapping[str, object]]
    """By contestant; nothing where no comparison chose."""
    choose_seeds: Sequence[int]
    report_seeds: Sequence[int]
    planned: bool
    """By a comparison; else it was found among the runs."""

    @property
    def cells(self) -> list[Cell]:
        """Means over seeds."""
        return cells(self.rows)

    @property
    def ranges(self) -> list[UsableRange]:
        """How wide the usable range of each contestant is."""
        return usable_range(self.rows, self.key)

    @property
    def seeds_text(self) -> str:
        """How many runs a mean is of: `2 seeds`, or `1 to 2 seeds` while some are missing."""
        counts = [len(cell.seeds) for cell in self.cells]
        least, most = min(counts), max(counts)
        return f"{'' if least == most else f'{least} to '}{count(most, 'seed')}"

    def rows_of(self, line: UsableRange) -> list[SweepRow]:
        """The runs that a range is about."""
        return [row for row in self.rows if row.contestant == line.contestant and self.others(row.setting) == line.setting]

    def others(self, setting: Mapping[str, object]) -> dict[str, object]:
        """A setting but for the axis."""
        return {name: value for name, value in setting.items() if name != self.key}


def find_sweeps(runs: Sequence[Run], comparisons: Sequence[SavedComparison], measure: Measure) -> list[Sweep]:
    """Those of comparisons, and of runs that belong to none."""
    places = {run.path.resolve(): run for run in runs}
    found, planned, about = [], set(), problems_of(runs)
    for comparison in comparisons:
        planned |= {entry.path.resolve() for entry in comparison.runs}
        entries = comparison.of_stage("sweep")
        key = axis(comparison.sweep)
        rows: dict[tuple[str, str, int], SweepRow] = {}  # a file that names a run twice is no reason to count it twice
        for entry in entries:
            run = places.get(entry.path.resolve())
            ended = (run is not None and run.stopped in COUNTED) or entry.state == "failed"
            if ended and key is not None and _on_axis(entry.setting.get(key)):
                name = entry.contestant, json.dumps(dict(entry.setting), sort_keys=True), entry.seed
                rows[name] = sweep_row(entry.contestant, entry.setting, entry.seed, run, measure)
        if rows and key is not None:
            where = next((about[id(places[path])] for entry in entries if (path := entry.path.resolve()) in places), "")
            found.append(
                Sweep(
                    problem=where, key=key, rows=[*rows.values()], chosen=comparison.chosen, planned=True,
                    choose_seeds=comparison.choose_seeds, report_seeds=comparison.report_seeds,
                )
            )  # fmt: skip
    return found + _infer_sweeps([run for path, run in places.items() if path not in planned], measure)


def _infer_sweeps(runs: Sequence[Run], measure: Measure) -> list[Sweep]:
    """Runs of one problem that differ in a setting of numbers, and count; of two with one seed the later."""
    found = []
    counted = [run for run in runs if run.stopped in COUNTED and run.values(measure.key)]
    about, own, shared = problems_of(runs), read_once(own_settings, counted), read_once(shared_settings, counted)
    for where in dict.fromkeys(about[id(run)] for run in counted):
        rows: dict[tuple[str, str, str], SweepRow] = {}
        members = [run for run in counted if about[id(run)] == where]
        seeds = sorted({run.seed for run in members})
        for run in members:
            peers = [peer for peer in members if peer.objective == run.objective]
            name = f"{run.objective} {setting_text(varying_settings(run, peers, own))}".strip()
            settings = {_RATES.get(key, key): _number(text) for key, text in varying_settings(run, peers, shared).items()}
            seed = seeds.index(run.seed)
            rows[name, json.dumps(settings, default=str), run.seed] = sweep_row(name, settings, seed, run, measure)
        grids = [dict(row.setting) for row in rows.values()]
        key = axis({name: [grid.get(name) for grid in grids] for grid in grids for name in grid})
        # Contestants that were not swept have no place on the axis.
        swept = [row for row in rows.values() if key is not None and _on_axis(row.setting.get(key))]
        if key is not None and len({row.setting[key] for row in swept}) > 1:
            found.append(Sweep(problem=where, key=key, rows=swept, chosen={}, choose_seeds=[], report_seeds=[], planned=False))
    return found


def sweep_row(contestant: str, setting: Mapping[str, object], seed: int, run: Run | None, measure: Measure) -> SweepRow:
    """What a run came to; the worst there is for one that failed."""
    points = run.values(measure.key) if run is not None and run.stopped in COUNTED else []
    if run is None or not points:
        worst = 0.0 if measure.key == "success" else -math.inf
        return SweepRow(contestant, setting, seed, worst, worst, False, fell_below_start=True)
    area = area_under_curve(points, run.planned_steps)
    greedy, kl = run.values("greedy"), run.values(_KL)
    return SweepRow(
        contestant,
        setting,
        seed,
        final=points[-1][1],
        auc=points[-1][1] if area is None else area,
        collapsed=has_collapsed(points, run.stopped),
        greedy=greedy[-1][1] if greedy else None,
        kl=fmean(value for _, value in kl) if kl else None,
        fell_below_start=any(value < points[0][1] for _, value in points),
    )


def axis(grid: Mapping[str, Sequence[Any]]) -> str | None:
    """The setting to draw along: a learning rate if one was swept, else the first of numbers, or of numbers and `auto`."""
    numeric = [
        key
        for key, values in grid.items()
        if key not in _BUDGETS
        and all(_on_axis(value) for value in values if value is not None)
        and any(_is_number(value) for value in values)
    ]
    return next((key for key in numeric if key.endswith("rate")), numeric[0] if numeric else None)


def sweep_table(sweeps: Sequence[Sweep]) -> list[dict[str, Any]]:
    """One row per contestant and setting."""
    rows = []
    for sweep in sweeps:
        ranges = {(found.contestant, *found.setting.items()): found for found in sweep.ranges}
        for cell in sweep.cells:
            value = value_at(cell.setting, sweep.key)
            others = tuple(sweep.others(cell.setting).items())
            found = ranges[cell.contestant, *others]
            rows.append(
                {
                    "problem": sweep.problem, "objective": cell.contestant, "axis": sweep.key, "value": value,
                    "other": " ".join(f"{name}={other}" for name, other in others), "seeds": len(cell.seeds),
                    "final": _finite(cell.final), "area": _finite(cell.auc), "greedy": cell.greedy,
                    "collapsed": cell.collapsed, "kl": cell.kl, "usable": value in found.own,
                    "usable_of_all": value in found.overall,
                    "chosen": dict(sweep.chosen.get(cell.contestant, {})) == dict(cell.setting) if sweep.chosen else None,
                }
            )  # fmt: skip
    return rows


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _on_axis(value: Any) -> bool:
    return value == AUTO or _is_number(value)


def _number(text: str) -> object:
    """A setting as it was before it became text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float | bool) else text
