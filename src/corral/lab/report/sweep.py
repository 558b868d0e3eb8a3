"""Sweeps: groups that differ in one number, and the range of it over which each objective is usable."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any, Literal

from scipy import stats

from corral.lab.report.comparison import SavedComparison
from corral.lab.report.groups import own_settings, problems_of, read_once, shared_settings, varying_settings
from corral.lab.report.outcomes import COUNTED, Measure
from corral.lab.report.ranges import (
    AUTO,
    Cell,
    SweepRow,
    Value,
    cells,
    setting_key,
    setting_pairs,
    setting_text,
    value_at,
    value_text,
)
from corral.lab.report.read import Run
from corral.lab.report.statistics import area_under_curve, has_collapsed
from corral.lab.run.interval import LEVEL
from corral.lab.run.text import count

SHARE = 0.95
"""Of what the tuned setting has, that a usable one has to reach for certain."""


RULE = f"the lower 95 % bounds of both are within {100 * SHARE:g} % of the tuned setting, and no measurement is below the start"
"""What `usable` means, after the names of the final value and of the mean over the run."""


@dataclass(frozen=True, kw_only=True)
class UsableRange:
    """At which values of one setting a contestant comes close to a tuned one, all its other settings being as said."""

    contestant: str
    key: str
    setting: Mapping[str, object]
    """The other swept settings."""
    tried: tuple[Value, ...]
    """Values of `key`: numbers ascending, then `auto`."""
    own: tuple[Value, ...]
    """Those that are for certain within reach of the contestant's own tuned setting."""
    overall: tuple[Value, ...]
    """Those that are for certain within reach of the tuned setting of all contestants."""
    possible: tuple[Value, ...]
    """Those that may be within reach of the contestant's own tuned setting: its runs do not exclude it."""
    judged: bool = True
    """Whether there was any spread to judge by: not where every setting has one run."""

    @property
    def label(self) -> str:
        """`troll`, or `troll, num_iterations=4`."""
        return ", ".join([self.contestant, *setting_pairs(self.setting)])

    @property
    def sentence(self) -> str:
        """`troll: 3e-5 … 3e-4 (3 of 4 rates), 1.0 to 1.5 decades`."""
        return ", ".join(filter(None, [f"{self.label}: {self.text(self.own)}", self.width_text]))

    def text(self, usable: Sequence[Value]) -> str:
        """`3e-5 … 3e-4 (3 of 4 rates)`. Values with a gap between them are named one by one."""
        what = "rates" if self.key.endswith("rate") else "values"
        if not self.judged:
            return f"cannot be told from one run each ({len(self.tried)} {what})"
        numbers = [value for value in usable if not isinstance(value, str)]
        places = [self.tried.index(value) for value in numbers]
        together = len(places) > 1 and places[-1] - places[0] == len(places) - 1
        names = [f"{value_text(numbers[0])} … {value_text(numbers[-1])}"] if together else [*map(value_text, numbers)]
        names += [value for value in usable if isinstance(value, str)]
        return f"{', '.join(names) or 'none'} ({len(usable)} of {len(self.tried)} {what})"

    @property
    def width(self) -> tuple[float, float] | None:
        """Decades that are usable without a gap: at least, and at most. None along an axis of one number, or with a zero on it.

        At least: between the ends of the widest stretch of `own`. At most: of the stretch of `possible` that holds it. Both are
        of values that were tried; the edge itself lies between two of them.
        """
        numbers = self._numbers
        if len(numbers) < 2 or numbers[0] <= 0:
            return None
        sure = _widest(self._stretches(self.own))
        maybe = [stretch for stretch in self._stretches(self.possible) if not sure or sure[0] in stretch]
        return _decades(sure), max(_decades(sure), _decades(_widest(maybe)))

    @property
    def width_text(self) -> str:
        """`1.0 to 1.5 decades, open above`: a stretch that reaches the end of the grid may go on. Empty where there is none."""
        if self.width is None or not any(self.width):
            return ""
        least, most = (f"{decades:.1f}" for decades in self.width)
        sure, numbers = _widest(self._stretches(self.own)), self._numbers
        open_ends = [word for word, place in (("below", 0), ("above", -1)) if sure and sure[place] == numbers[place]]
        beyond = f", open {' and '.join(open_ends)}" if open_ends else ""
        return f"{least if least == most else f'{least} to {most}'} decades{beyond}"

    @property
    def _numbers(self) -> list[float]:
        return [value for value in self.tried if not isinstance(value, str)]

    def _stretches(self, values: Sequence[Value]) -> list[list[float]]:
        """Values that were tried one after the other, all of them among `values`."""
        grouped = groupby(self._numbers, key=lambda number: number in values)
        return [[*members] for inside, members in grouped if inside]


def usable_range(
    rows: Sequence[SweepRow],
    key: str = "learning_rate",
    share: float = SHARE,
    baseline: Sequence[SweepRow] | None = None,
) -> list[UsableRange]:
    """The values of `key` that are usable for certain, by contestant and other swept settings.

        usable  iff  low(final) ≥ share · final*  and  low(area) ≥ share · area*  and  no measurement is below the start
        low(x) = mean(x) − t₉₅ · s / √n           for a value below 0: x* − (1 − share) · |x*| instead of share · x*

    * is the mean of the tuned setting: the contestant's own with the highest mean final value, or that of all contestants. s is
    pooled over all settings of the sweep whose runs stay above their start, as two or three seeds alone tell no spread; t₉₅ is
    Student's one-sided quantile.

    Args:
        key: a swept setting whose values are numbers, or `auto`.
        share: of the tuned setting.
        baseline: those of the rows that the tuned setting is chosen among; all of them unless given.
    """
    found = cells(rows)
    tuned = found if baseline is None else cells(baseline)
    stable = [cell for cell in found if _is_stable(cell)]
    judged = not stable or any(len(cell.seeds) > 1 for cell in stable)
    units = _uncertainty([cell.finals for cell in stable]), _uncertainty([cell.aucs for cell in stable])
    lowest = min((cell.final for cell in found), default=0.0)

    def within(members: Sequence[Cell], rivals: Sequence[Cell], side: Literal[-1, 1]) -> tuple[Value, ...]:
        """Values whose lower or upper bounds reach the tuned setting among `rivals`."""
        best = max(rivals, key=lambda cell: (cell.final, cell.auc))
        # Where all failed, or the best is a zero that is the minimum too, nothing is usable.
        if not judged or not math.isfinite(best.final) or best.final == 0 <= lowest:
            return ()
        least = [aim - (1 - share) * abs(aim) for aim in (best.final, best.auc)]
        return tuple(
            value_at(cell.setting, key)
            for cell in members
            if _is_stable(cell)
            and all(
                mean + side * unit / math.sqrt(len(cell.seeds)) >= aim
                for mean, unit, aim in zip((cell.final, cell.auc), units, least, strict=True)
            )
        )

    ranges = []
    for (contestant, _), members in _by_others(found, key).items():
        own = [cell for cell in tuned if cell.contestant == contestant]
        ranges.append(
            UsableRange(
                contestant=contestant,
                key=key,
                setting=_others(members[0], key),
                tried=tuple(value_at(cell.setting, key) for cell in members),
                own=within(members, own, -1),
                overall=within(members, tuned, -1),
                possible=within(members, own, 1),
                judged=judged,
            )
        )
    return ranges


def _is_stable(cell: Cell) -> bool:
    """Whether all its runs stayed above their start, and none failed."""
    return not cell.fell_below_start and all(map(math.isfinite, (*cell.finals, *cell.aucs)))


def _uncertainty(groups: Sequence[Sequence[float]]) -> float:
    """How far one run may be off: Student's one-sided quantile times the standard deviation within groups; 0 without any."""
    freedom = sum(len(group) - 1 for group in groups)
    if freedom == 0:
        return 0.0
    squares = math.fsum((value - fmean(group)) ** 2 for group in groups for value in group)
    return float(stats.t.ppf(LEVEL, freedom)) * math.sqrt(squares / freedom)


def _others(cell: Cell, key: str) -> dict[str, object]:
    """A cell's setting but for the axis."""
    return {name: value for name, value in cell.setting.items() if name != key}


def _by_others(found: Sequence[Cell], key: str) -> dict[tuple[str, object], list[Cell]]:
    """Cells along the axis, by contestant and other settings."""
    groups: dict[tuple[str, object], list[Cell]] = {}
    for cell in found:
        groups.setdefault((cell.contestant, setting_key(_others(cell, key))), []).append(cell)
    return groups


def _widest(stretches: Sequence[Sequence[float]]) -> Sequence[float]:
    """Of several the one over most decades, of equals the first; empty where there is none."""
    return max(stretches, key=_decades, default=())


def _decades(stretch: Sequence[float]) -> float:
    return math.log10(stretch[-1] / stretch[0]) if stretch else 0.0


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
