"""Sweeps: runs that differ in one setting, each objective's best setting, and the range over which it is usable.

A comparison at one learning rate mostly tells whose rate it was. So every contestant is run over the same grid, and its setting
is chosen on some seeds and reported on others.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from statistics import fmean
from typing import Any, Literal

from scipy import stats

from corral.lab.report.outcomes import COUNTED, Measure, name_contestant, problems_of
from corral.lab.report.read import ChooseBy, Run, SavedComparison, is_number, setting_pairs, setting_text, value_text
from corral.lab.report.statistics import area_under_curve, has_collapsed
from corral.lab.run.interval import LEVEL
from corral.lab.run.settings import guess
from corral.lab.run.text import count

AUTO = "auto"
"""The only value of a swept setting that can be a text, as in `learning_rate="auto"`."""

Value = float | str
"""Value of a swept setting, such as a learning rate: a number, or `auto`."""


@dataclass(frozen=True)
class SweepRow:
    """Scores of one run of a sweep."""

    contestant: str
    """Name of the compared method: an objective, or a robot algorithm."""
    setting: Mapping[str, object]
    """Swept settings of the run, with their values."""
    seed: int | str
    final: float
    """Final value of the main metric. A run that failed counts as 0 if success is measured, otherwise as −inf."""
    auc: float
    """Mean of the main metric over the run (area under the curve)."""
    collapsed: bool
    greedy: float | None = None
    kl: float | None = None
    fell_below_start: bool = False
    """True if the main metric was ever below its value before training."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Runs of one compared method with one setting, and their mean scores over seeds."""

    contestant: str
    setting: Mapping[str, object]
    rows: Sequence[SweepRow]
    final: float
    auc: float
    collapsed: float
    """Share of the cell's runs that collapsed."""
    greedy: float | None
    """Mean greedy success of the runs that measured it; None if none did. `kl` is averaged in the same way."""
    kl: float | None

    @property
    def is_stable(self) -> bool:
        """True if no run of the cell failed or fell below its value before training."""
        return all(not row.fell_below_start and math.isfinite(row.final) and math.isfinite(row.auc) for row in self.rows)


def cells(rows: Sequence[SweepRow]) -> list[Cell]:
    """Group a sweep's runs by compared method and setting, with means over seeds. Settings are in ascending order."""
    found: dict[str, dict[tuple[object, ...], list[SweepRow]]] = {}
    for row in rows:
        found.setdefault(row.contestant, {}).setdefault(_sort_key(row.setting), []).append(row)

    def mean(members: Sequence[SweepRow], score: str) -> Any:
        known = [value for row in members if (value := getattr(row, score)) is not None]
        return fmean(known) if known else None

    scores = ("final", "auc", "collapsed", "greedy", "kl")
    return [
        Cell(
            contestant=contestant, setting=members[0].setting, rows=members,
            **{score: mean(members, score) for score in scores},
        )
        for contestant, settings in found.items()
        for _, members in sorted(settings.items())
    ]  # fmt: skip


def _sort_key(setting: Mapping[str, Any]) -> tuple[object, ...]:
    """Sort key for swept settings: ascending, with numbers before texts."""
    items = sorted(setting.items())
    return tuple((name, 0, value, "") if is_number(value) else (name, 1, 0.0, str(value)) for name, value in items)


def choose_setting(rows: Sequence[SweepRow], by: ChooseBy = "final") -> dict[str, Mapping[str, object]]:
    """Choose the setting with the highest mean score for each compared method. `by` is the score: final value, or run mean.

    On a tie the other one decides, then the smaller setting. All settings must have been run with the same seeds.
    """

    def score(cell: Cell) -> tuple[float, float]:
        return (cell.final, cell.auc) if by == "final" else (cell.auc, cell.final)

    by_contestant = groupby(cells(rows), key=lambda cell: cell.contestant)
    return {name: max(own, key=score).setting for name, own in by_contestant}  # of equals the first, so the smaller


def value_at(setting: Mapping[str, Any], key: str) -> Value:
    """Return the value of the swept setting `key`: a number, or the word `auto`. Raises ValueError for any other value."""
    value = setting.get(key)
    if isinstance(value, int | float) and is_number(value):
        return float(value)
    if value == AUTO:
        return AUTO
    raise ValueError(f"sweep: {key!r} must be a number or {AUTO!r} in every row; got {value!r}.")


def ordered(values: Collection[Value]) -> tuple[Value, ...]:
    """Sort the different values of a swept setting: numbers ascending, then `auto`."""
    numbers = sorted(value for value in {*values} if not isinstance(value, str))
    return (*numbers, AUTO) if AUTO in values else (*numbers,)


SHARE = 0.95
"""Share of the tuned setting's score that a usable setting must reach with certainty."""


RULE = f"the lower 95 % bounds of both are within {100 * SHARE:g} % of the tuned setting, and no measurement is below the start"
"""Second half of the sentence that defines a `usable` setting. The first half names final value and mean over the run."""


@dataclass(frozen=True, kw_only=True)
class UsableRange:
    """Values of one swept setting at which a method scores close to a tuned setting, while other settings are fixed."""

    contestant: str
    key: str
    setting: Mapping[str, object]
    """Values of the swept settings other than the one that varies, the same over the whole range."""
    tried: tuple[Value, ...]
    """Values of the swept setting that were tried: numbers ascending, then `auto`."""
    own: tuple[Value, ...]
    """Values of the setting whose score is certainly close to that of the method's best setting."""
    overall: tuple[Value, ...]
    """Values that are certainly close to the best setting of the best method."""
    possible: tuple[Value, ...]
    """Values that are possibly close to the best setting of the same method, as far as the runs show."""
    judged: bool = True
    """True if a setting was run with several seeds, so that the spread over seeds can be estimated."""

    @property
    def label(self) -> str:
        """Name of the usable range: `troll`, or `troll, num_iterations=4`."""
        return ", ".join([self.contestant, *setting_pairs(self.setting)])

    @property
    def sentence(self) -> str:
        """Sentence on the usable range: `troll: 3e-5 … 3e-4 (3 of 4 rates), 1.0 to 1.5 decades`."""
        return ", ".join(filter(None, [f"{self.label}: {self.text(self.own)}", self.width_text]))

    def text(self, usable: Sequence[Value]) -> str:
        """Format a usable range: `3e-5 … 3e-4 (3 of 4 rates)`. Values with a gap between them are listed."""
        tried = count(len(self.tried), "rate" if self.key.endswith("rate") else "value")
        if not self.judged:
            return f"cannot be told from one run{f' each ({tried})' if len(self.tried) > 1 else ''}"
        numbers = [value for value in usable if not isinstance(value, str)]
        places = [self.tried.index(value) for value in numbers]
        together = len(places) > 1 and places[-1] - places[0] == len(places) - 1
        names = [f"{value_text(numbers[0])} … {value_text(numbers[-1])}"] if together else [*map(value_text, numbers)]
        names += [value for value in usable if isinstance(value, str)]
        return f"{', '.join(names) or 'none'} ({len(usable)} of {tried})"

    @property
    def width(self) -> tuple[float, float] | None:
        """Width of the usable range in decades, as (at least, at most). None for a single number, or if a value is 0 or less.

        At least: between the ends of the widest stretch of `own`. At most: of the stretch of `possible` that holds it. Both are
        of values that were tried; the edge itself lies between two of them.
        """
        numbers = self._numbers
        if len(numbers) < 2 or numbers[0] <= 0:
            return None
        sure = self._widest(self.own)
        return _decades(sure), max(_decades(sure), _decades(self._widest(self.possible, sure)))

    @property
    def width_text(self) -> str:
        """Width of the usable range as text: `1.0 to 1.5 decades, open above`. Empty if there is no width.

        A range at the end of the grid may continue beyond it. Empty without a width.
        """
        if self.width is None or not any(self.width):
            return ""
        least, most = (f"{decades:.1f}" for decades in self.width)
        sure, numbers = self._widest(self.own), self._numbers
        open_ends = [word for word, place in (("below", 0), ("above", -1)) if sure and sure[place] == numbers[place]]
        beyond = f", open {' and '.join(open_ends)}" if open_ends else ""
        return f"{least if least == most else f'{least} to {most}'} decades{beyond}"

    @property
    def _numbers(self) -> list[float]:
        return [value for value in self.tried if not isinstance(value, str)]

    def _widest(self, values: Sequence[Value], around: Sequence[float] = ()) -> list[float]:
        """Find the widest stretch of consecutive tried values within `values` that contains all numbers in `around`."""
        grouped = groupby(self._numbers, key=lambda number: number in values)
        stretches = [[*members] for inside, members in grouped if inside]
        return max((stretch for stretch in stretches if {*around} <= {*stretch}), key=_decades, default=[])


def usable_range(
    rows: Sequence[SweepRow],
    key: str = "learning_rate",
    share: float = SHARE,
    baseline: Sequence[SweepRow] | None = None,
) -> list[UsableRange]:
    """Compute the certainly usable values of a swept setting, for each method and each combination of other swept settings.

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
        """Return the values whose lower (`side` −1) or upper (+1) bounds come close to the best setting among `rivals`."""
        best = max(rivals, key=lambda cell: (cell.final, cell.auc))
        # Where all failed, or the best is a zero that is the minimum too, nothing is usable.
        if not judged or not math.isfinite(best.final) or best.final == 0 <= lowest:
            return ()
        least = [aim - (1 - share) * abs(aim) for aim in (best.final, best.auc)]

        def close(cell: Cell) -> bool:
            scores = zip((cell.final, cell.auc), units, least, strict=True)
            return all(mean + side * unit / math.sqrt(len(cell.rows)) >= aim for mean, unit, aim in scores)

        return tuple(value_at(cell.setting, key) for cell in members if cell.is_stable and close(cell))

    lines: dict[tuple[str, object], list[Cell]] = {}
    for cell in found:
        lines.setdefault((cell.contestant, _sort_key(without(cell.setting, key))), []).append(cell)
    ranges = []
    for (contestant, _), members in lines.items():
        own, setting = [cell for cell in tuned if cell.contestant == contestant], without(members[0].setting, key)
        tried = tuple(value_at(cell.setting, key) for cell in members)
        usable = {"own": within(members, own, -1), "overall": within(members, tuned, -1), "possible": within(members, own, 1)}
        ranges.append(UsableRange(contestant=contestant, key=key, setting=setting, tried=tried, judged=judged, **usable))
    return ranges


def without(setting: Mapping[str, object], key: str) -> dict[str, object]:
    """Copy a mapping of settings without the setting `key`."""
    return {name: value for name, value in setting.items() if name != key}


def _uncertainty(groups: Sequence[Sequence[float]]) -> float:
    """Compute the uncertainty of one run's score: Student's quantile times the pooled standard deviation; 0 for single runs."""
    freedom = sum(len(group) - 1 for group in groups)
    if freedom == 0:
        return 0.0
    squares = math.fsum((value - fmean(group)) ** 2 for group in groups for value in group)
    return float(stats.t.ppf(LEVEL, freedom)) * math.sqrt(squares / freedom)


def _decades(stretch: Sequence[float]) -> float:
    return math.log10(stretch[-1] / stretch[0]) if stretch else 0.0


# ------------------------------------------------------------------------------------------------------- finding sweeps

_KL = "tr/kl_before"
"""Name of the metric for the mean KL between new and old policy, before projection."""

_BUDGETS = ("steps", "iterations")
"""Settings for a run's budget of steps, which are never the axis of a sweep."""

_RATE = "learning_rate"
_RATES = {"learner.policy_rate": _RATE, "learner.rate": _RATE}
"""Mapping from the learning rate's names in robot algorithms to the common name."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Runs of a sweep: a grid of compared methods and settings, drawn over one of the settings."""

    problem: str
    key: str
    """Name of the swept setting on the horizontal axis: the learning rate, if it was swept."""
    rows: Sequence[SweepRow]
    comparison: SavedComparison | None = None
    """The comparison that planned the sweep; None if no comparison planned it."""

    @property
    def chosen(self) -> Mapping[str, Mapping[str, Any]]:
        """Chosen setting by compared method; empty without a comparison."""
        return self.comparison.chosen if self.comparison is not None else {}

    @cached_property
    def cells(self) -> list[Cell]:
        """Means over seeds, for each compared method and setting of the sweep."""
        return cells(self.rows)

    @cached_property
    def ranges(self) -> list[UsableRange]:
        """Usable range for each compared method and each combination of other settings."""
        return usable_range(self.rows, self.key)

    @property
    def seeds_text(self) -> str:
        """Number of seeds behind each mean of the sweep, as text: `2 seeds`, or `1 to 2 seeds` if some runs are missing."""
        counts = [len(cell.rows) for cell in self.cells]
        least, most = min(counts), max(counts)
        return f"{'' if least == most else f'{least} to '}{count(most, 'seed')}"

    def along(self, line: UsableRange) -> dict[Value, Sequence[SweepRow]]:
        """Return the runs of one usable range's method and other settings, by value of the swept setting."""
        cells = [cell for cell in self.cells if cell.contestant == line.contestant]
        return {
            value_at(cell.setting, self.key): cell.rows for cell in cells if without(cell.setting, self.key) == line.setting
        }


def find_sweeps(runs: Sequence[Run], comparisons: Sequence[SavedComparison], measure: Measure) -> list[Sweep]:
    """Find the sweeps of comparisons, and sweeps among the remaining runs."""
    places = {run.path.resolve(): run for run in runs}
    found, planned, about = [], set(), problems_of(runs)
    for comparison in comparisons:
        planned |= {path for path, _ in comparison.places()}
        entries = [(places.get(path), entry) for path, entry in comparison.places("sweep")]
        rows = [
            sweep_row(entry.contestant, entry.setting, entry.seed, run, measure)
            for run, entry in entries
            if entry.state == "failed" or (run is not None and run.stopped in COUNTED)
        ]
        problem = next((about[id(run)] for run, _ in entries if run is not None), "")
        found += _make_sweep(problem, axis(comparison.sweep), rows, comparison)
    rest = [run for path, run in places.items() if path not in planned]
    counted = [run for run in rest if run.stopped in COUNTED and run.values(measure.key)]
    about = problems_of(rest)
    for problem in dict.fromkeys(about[id(run)] for run in counted):
        rows = []
        members = [run for run in counted if about[id(run)] == problem]
        for run in members:
            name, varied = name_contestant(run, members)
            settings = {_RATES.get(key, key): guess(text) for key, text in varied.items()}
            rows.append(sweep_row(name, settings, run.seed, run, measure))
        names = dict.fromkeys(name for row in rows for name in row.setting)
        key = axis({name: [row.setting.get(name) for row in rows] for name in names})
        found += _make_sweep(problem, key, rows)
    return found


def _make_sweep(
    problem: str, key: str | None, rows: Sequence[SweepRow], comparison: SavedComparison | None = None
) -> list[Sweep]:
    """Make a sweep from runs with a value of the swept setting `key`, the latest run per seed. Empty if no values differ."""
    if key is None:
        return []
    latest = {(row.contestant, _sort_key(row.setting), row.seed): row for row in rows if _on_axis(row.setting.get(key))}
    if len({row.setting[key] for row in latest.values()}) < (2 if comparison is None else 1):
        return []
    return [Sweep(problem=problem, key=key, rows=[*latest.values()], comparison=comparison)]


def sweep_row(contestant: str, setting: Mapping[str, object], seed: int | str, run: Run | None, measure: Measure) -> SweepRow:
    """Compute the scores of a sweep's run. A failed run gets the lowest possible scores."""
    points = run.values(measure.key) if run is not None and run.stopped in COUNTED else []
    if run is None or not points:
        worst = 0.0 if measure.key == "success" else -math.inf
        return SweepRow(contestant, setting, seed, worst, worst, False, fell_below_start=True)
    area, kl = area_under_curve(points, run.planned_steps), [value for _, value in run.values(_KL)]
    assert area is not None, "there are points"
    return SweepRow(
        contestant,
        setting,
        seed,
        final=points[-1][1],
        auc=area,
        collapsed=has_collapsed(points, run.stopped),
        greedy=run.final("greedy"),
        kl=fmean(kl) if kl else None,
        fell_below_start=any(value < points[0][1] for _, value in points),
    )


def axis(grid: Mapping[str, Sequence[Any]]) -> str | None:
    """Choose the swept setting for the horizontal axis of a sweep's figure. Returns None if no setting has numbers.

    A swept learning rate comes first, then settings with numbers, then settings with numbers and `auto`.
    """
    numeric = [
        key
        for key, values in grid.items()
        if key not in _BUDGETS
        and all(_on_axis(value) for value in values if value is not None)
        and any(_on_axis(value) and value != AUTO for value in values)
    ]
    return next((key for key in numeric if key.endswith("rate")), numeric[0] if numeric else None)


def _on_axis(value: Any) -> bool:
    return value == AUTO or (is_number(value) and math.isfinite(value))


def sweep_table(sweeps: Sequence[Sweep]) -> list[dict[str, Any]]:
    """Build the table of all sweeps, a row per compared method and setting."""
    rows = []
    for sweep in sweeps:
        ranges = {(found.contestant, _sort_key(found.setting)): found for found in sweep.ranges}
        for cell in sweep.cells:
            value, others = value_at(cell.setting, sweep.key), without(cell.setting, sweep.key)
            found = ranges[cell.contestant, _sort_key(others)]
            final, area = (number if math.isfinite(number) else None for number in (cell.final, cell.auc))
            rows.append(
                {
                    "problem": sweep.problem, "objective": cell.contestant, "axis": sweep.key, "value": value,
                    "other": setting_text(others), "seeds": len(cell.rows),
                    "final": final, "area": area, "greedy": cell.greedy,
                    "collapsed": cell.collapsed, "kl": cell.kl, "usable": value in found.own,
                    "usable_of_all": value in found.overall,
                    "chosen": dict(sweep.chosen.get(cell.contestant, {})) == dict(cell.setting) if sweep.chosen else None,
                }
            )  # fmt: skip
    return rows
