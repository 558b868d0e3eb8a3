"""Sweeps: runs that differ in one setting, the best setting of each objective, and the range over which it is usable.

A comparison at one learning rate mostly tells whose rate it was. So every contestant is run over the same grid, and its setting
is chosen on some seeds and reported on others.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any, Literal

from scipy import stats

from corral.lab.report.groups import problems_of, varying_settings
from corral.lab.report.outcomes import COUNTED, Measure
from corral.lab.report.read import Run, SavedComparison, setting_pairs, setting_text, value_text
from corral.lab.report.statistics import area_under_curve, has_collapsed
from corral.lab.run.interval import LEVEL
from corral.lab.run.text import count

AUTO = "auto"
"""The one word among the numbers of an axis: `learning_rate="auto"`."""

Value = float | str
"""A place on an axis: a number, or `auto` beside it."""


@dataclass(frozen=True)
class SweepRow:
    """A run of a sweep, and its scores."""

    contestant: str
    """An objective, or an algorithm."""
    setting: Mapping[str, object]
    """The settings that were swept, and their values in this run."""
    seed: int
    final: float
    """What it ended with. A run that collapsed counts with its last value, one that failed with 0; −inf is allowed too."""
    auc: float
    """The mean over the run."""
    collapsed: bool
    greedy: float | None = None
    kl: float | None = None
    fell_below_start: bool = False
    """Whether any measurement was below the one before training."""

    def __post_init__(self) -> None:
        for name, value in (("final", self.final), ("auc", self.auc)):
            if math.isnan(value) or value == math.inf:
                raise ValueError(
                    f"SweepRow: `{name}` of {self.contestant}, seed {self.seed}, is {value}: no best could be told. A run that "
                    f"failed counts with 0."
                )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """All runs of one contestant with one setting, and their means."""

    contestant: str
    setting: Mapping[str, object]
    rows: Sequence[SweepRow]
    seeds: tuple[int, ...]
    final: float
    auc: float
    collapsed: float
    """The share of runs that collapsed."""
    greedy: float | None
    """A mean of the runs that measured it, as for `kl`."""
    kl: float | None

    @property
    def is_stable(self) -> bool:
        """True if all its runs stayed at or above their start, and none failed."""
        return all(not row.fell_below_start and math.isfinite(row.final) and math.isfinite(row.auc) for row in self.rows)


def cells(rows: Sequence[SweepRow]) -> list[Cell]:
    """Means over seeds, contestants in their order, settings ascending."""
    found: dict[str, dict[tuple[object, ...], list[SweepRow]]] = {}
    for row in rows:
        members = found.setdefault(row.contestant, {}).setdefault(_sort_key(row.setting), [])
        if any(row.seed == other.seed for other in members):
            raise ValueError(
                f"sweep: {row.contestant} with {dict(row.setting)} has seed {row.seed} twice: count each run once."
            )
        members.append(row)

    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None and math.isfinite(value)]
        return fmean(known) if known else None

    return [
        Cell(
            contestant=contestant,
            setting=dict(members[0].setting),
            rows=members,
            seeds=tuple(sorted(row.seed for row in members)),
            final=fmean(row.final for row in members),
            auc=fmean(row.auc for row in members),
            collapsed=fmean(row.collapsed for row in members),
            greedy=mean(row.greedy for row in members),
            kl=mean(row.kl for row in members),
        )
        for contestant, settings in found.items()
        for _, members in sorted(settings.items())
    ]


def _sort_key(setting: Mapping[str, object]) -> tuple[object, ...]:
    """A setting as something to sort and look up by: numbers before texts, ascending."""
    return tuple(
        (name, 0, float(value), "")
        if isinstance(value, int | float) and not isinstance(value, bool)
        else (name, 1, 0.0, str(value))
        for name, value in sorted(setting.items())
    )


def choose_setting(rows: Sequence[SweepRow]) -> dict[str, Mapping[str, object]]:
    """The setting with the highest mean final value, for each contestant; of equals the one with more area, then the smaller.

    Raises:
        ValueError: if settings of a contestant were run with different seeds: the one with the luckier seeds would win.
    """
    found = cells(rows)
    chosen: dict[str, Mapping[str, object]] = {}
    for contestant in dict.fromkeys(cell.contestant for cell in found):
        own = [cell for cell in found if cell.contestant == contestant]
        for cell in own:
            if cell.seeds != own[0].seeds:
                raise ValueError(
                    f"choose_setting: {contestant} has seeds {list(own[0].seeds)} with {dict(own[0].setting)}, but "
                    f"{list(cell.seeds)} with {dict(cell.setting)}. Run all settings with the same seeds; one that failed "
                    f"counts with a final value of 0."
                )
        chosen[contestant] = max(own, key=lambda cell: (cell.final, cell.auc)).setting  # of equals the first, so the smaller
    return chosen


def value_at(setting: Mapping[str, object], key: str) -> Value:
    """The value of a swept setting along an axis: a number, or the word `auto`."""
    value = setting.get(key)
    if value == AUTO:
        return AUTO
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"sweep: {key!r} must be a number or {AUTO!r} in every row; got {value!r}.")
    return float(value)


def ordered(values: Collection[Value]) -> tuple[Value, ...]:
    """Each value once: numbers ascending, then `auto`."""
    numbers = sorted(value for value in {*values} if not isinstance(value, str))
    return (*numbers, AUTO) if AUTO in values else (*numbers,)


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
        sure = max(self._stretches(self.own), key=_decades, default=[])
        maybe = [stretch for stretch in self._stretches(self.possible) if not sure or sure[0] in stretch]
        return _decades(sure), max(map(_decades, [sure, *maybe]))

    @property
    def width_text(self) -> str:
        """`1.0 to 1.5 decades, open above`: a stretch that reaches the end of the grid may go on. Empty where there is none."""
        if self.width is None or not any(self.width):
            return ""
        least, most = (f"{decades:.1f}" for decades in self.width)
        sure, numbers = max(self._stretches(self.own), key=_decades, default=[]), self._numbers
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
    stable = [cell for cell in found if cell.is_stable]
    judged = not stable or any(len(cell.rows) > 1 for cell in stable)
    units = [_uncertainty([[vars(row)[name] for row in cell.rows] for cell in stable]) for name in ("final", "auc")]
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
            if cell.is_stable
            and all(
                mean + side * unit / math.sqrt(len(cell.rows)) >= aim
                for mean, unit, aim in zip((cell.final, cell.auc), units, least, strict=True)
            )
        )

    lines: dict[tuple[str, object], list[Cell]] = {}
    for cell in found:
        lines.setdefault((cell.contestant, _sort_key(without(cell.setting, key))), []).append(cell)
    ranges = []
    for (contestant, _), members in lines.items():
        own = [cell for cell in tuned if cell.contestant == contestant]
        ranges.append(
            UsableRange(
                contestant=contestant,
                key=key,
                setting=without(members[0].setting, key),
                tried=tuple(value_at(cell.setting, key) for cell in members),
                own=within(members, own, -1),
                overall=within(members, tuned, -1),
                possible=within(members, own, 1),
                judged=judged,
            )
        )
    return ranges


def without(setting: Mapping[str, object], key: str) -> dict[str, object]:
    """A setting but for the axis."""
    return {name: value for name, value in setting.items() if name != key}


def _uncertainty(groups: Sequence[Sequence[float]]) -> float:
    """The uncertainty of one run: Student's one-sided quantile times the pooled standard deviation; 0 without repetitions."""
    freedom = sum(len(group) - 1 for group in groups)
    if freedom == 0:
        return 0.0
    squares = math.fsum((value - fmean(group)) ** 2 for group in groups for value in group)
    return float(stats.t.ppf(LEVEL, freedom)) * math.sqrt(squares / freedom)


def _decades(stretch: Sequence[float]) -> float:
    return math.log10(stretch[-1] / stretch[0]) if stretch else 0.0


# ------------------------------------------------------------------------------------------------------- finding sweeps

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
        """The usable range of each contestant and other settings."""
        return usable_range(self.rows, self.key)

    @property
    def seeds_text(self) -> str:
        """The number of seeds behind a mean: `2 seeds`, or `1 to 2 seeds` while some are missing."""
        counts = [len(cell.seeds) for cell in self.cells]
        least, most = min(counts), max(counts)
        return f"{'' if least == most else f'{least} to '}{count(most, 'seed')}"

    def along(self, line: UsableRange) -> dict[Value, list[SweepRow]]:
        """The runs that a range is about, by their place on the axis."""
        found: dict[Value, list[SweepRow]] = {value: [] for value in line.tried}
        for row in self.rows:
            if row.contestant == line.contestant and without(row.setting, self.key) == line.setting:
                found[value_at(row.setting, self.key)].append(row)
        return found


def find_sweeps(runs: Sequence[Run], comparisons: Sequence[SavedComparison], measure: Measure) -> list[Sweep]:
    """Find the sweeps of comparisons, and those among runs of no comparison."""
    places = {run.path.resolve(): run for run in runs}
    found, planned, about = [], set(), problems_of(runs)
    for comparison in comparisons:
        planned |= {path for path, _ in comparison.places()}
        entries, key = comparison.places("sweep"), axis(comparison.sweep)
        rows: dict[tuple[str, str, int], SweepRow] = {}  # a file that names a run twice is no reason to count it twice
        for path, entry in entries:
            run = places.get(path)
            ended = (run is not None and run.stopped in COUNTED) or entry.state == "failed"
            if ended and key is not None and _on_axis(entry.setting.get(key)):
                name = entry.contestant, json.dumps(dict(entry.setting), sort_keys=True), entry.seed
                rows[name] = sweep_row(entry.contestant, entry.setting, entry.seed, run, measure)
        if rows and key is not None:
            where = next((about[id(places[path])] for path, _ in entries if path in places), "")
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
    about = problems_of(runs)
    for where in dict.fromkeys(about[id(run)] for run in counted):
        rows: dict[tuple[str, str, str], SweepRow] = {}
        members = [run for run in counted if about[id(run)] == where]
        seeds = sorted({run.seed for run in members})
        for run in members:
            peers = [peer for peer in members if peer.objective == run.objective]
            name = f"{run.objective} {setting_text(varying_settings(run, peers, 'own_settings'))}".strip()
            varied = varying_settings(run, peers, "shared_settings")
            settings = {_RATES.get(key, key): _number(text) for key, text in varied.items()}
            seed = seeds.index(run.seed)
            rows[name, json.dumps(settings, default=str), run.seed] = sweep_row(name, settings, seed, run, measure)
        grids = [dict(row.setting) for row in rows.values()]
        key = axis({name: [grid.get(name) for grid in grids] for grid in grids for name in grid})
        # Contestants that were not swept have no place on the axis.
        swept = [row for row in rows.values() if key is not None and _on_axis(row.setting.get(key))]
        if key is not None and len({row.setting[key] for row in swept}) > 1:
            found.append(Sweep(problem=where, key=key, rows=swept, chosen={}, choose_seeds=[], report_seeds=[], planned=False))
    return found


def _number(text: str) -> object:
    """A setting as it was before it became text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float | bool) else text


def sweep_row(contestant: str, setting: Mapping[str, object], seed: int, run: Run | None, measure: Measure) -> SweepRow:
    """The scores of a run; the lowest possible ones for a run that failed."""
    points = run.values(measure.key) if run is not None and run.stopped in COUNTED else []
    if run is None or not points:
        worst = 0.0 if measure.key == "success" else -math.inf
        return SweepRow(contestant, setting, seed, worst, worst, False, fell_below_start=True)
    area, kl = area_under_curve(points, run.planned_steps), [value for _, value in run.values(_KL)]
    return SweepRow(
        contestant,
        setting,
        seed,
        final=points[-1][1],
        auc=points[-1][1] if area is None else area,
        collapsed=has_collapsed(points, run.stopped),
        greedy=run.final("greedy"),
        kl=fmean(kl) if kl else None,
        fell_below_start=any(value < points[0][1] for _, value in points),
    )


def axis(grid: Mapping[str, Sequence[Any]]) -> str | None:
    """The setting to draw along: a learning rate if one was swept, else the first of numbers, or of numbers and `auto`."""
    numeric = [
        key
        for key, values in grid.items()
        if key not in _BUDGETS
        and all(_on_axis(value) for value in values if value is not None)
        and any(_on_axis(value) and value != AUTO for value in values)
    ]
    return next((key for key in numeric if key.endswith("rate")), numeric[0] if numeric else None)


def _on_axis(value: Any) -> bool:
    return value == AUTO or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))


def sweep_table(sweeps: Sequence[Sweep]) -> list[dict[str, Any]]:
    """One row per contestant and setting."""
    rows = []
    for sweep in sweeps:
        ranges = {(found.contestant, *found.setting.items()): found for found in sweep.ranges}
        for cell in sweep.cells:
            value, others = value_at(cell.setting, sweep.key), without(cell.setting, sweep.key)
            found = ranges[cell.contestant, *others.items()]
            final, area = (number if math.isfinite(number) else None for number in (cell.final, cell.auc))
            rows.append(
                {
                    "problem": sweep.problem, "objective": cell.contestant, "axis": sweep.key, "value": value,
                    "other": " ".join(f"{name}={other}" for name, other in others.items()), "seeds": len(cell.rows),
                    "final": final, "area": area, "greedy": cell.greedy,
                    "collapsed": cell.collapsed, "kl": cell.kl, "usable": value in found.own,
                    "usable_of_all": value in found.overall,
                    "chosen": dict(sweep.chosen.get(cell.contestant, {})) == dict(cell.setting) if sweep.chosen else None,
                }
            )  # fmt: skip
    return rows
