"""The usable range of a setting: how far it can be off, with the certainty that the seeds allow."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Literal

from scipy import stats

from corral.report.sweep.ranges import Cell, SweepRow, Value, cells, setting_key, setting_pairs, value_at, value_text
from corral.run.interval import LEVEL

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
