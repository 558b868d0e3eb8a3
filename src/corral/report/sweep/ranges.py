"""A sweep's results: the best setting of each contestant, and the usable range of a setting.

A comparison at one learning rate mostly tells whose rate it was. So every contestant is run over the same grid, its setting is
chosen on some seeds and reported on others, and the headline is the usable range: how far the rate can be off.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

SHARE = 0.95
"""Of the best final value, that a usable setting has to reach."""


@dataclass(frozen=True)
class SweepRow:
    """One run of a sweep."""

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

    def __post_init__(self) -> None:
        for name, value in (("final", self.final), ("auc", self.auc)):
            if math.isnan(value) or value == math.inf:
                raise ValueError(
                    f"SweepRow: `{name}` of {self.contestant}, seed {self.seed}, is {value}: no best could be told. A run that "
                    f"failed counts with 0."
                )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """All seeds of one contestant with one setting, in the mean."""

    contestant: str
    setting: Mapping[str, object]
    seeds: tuple[int, ...]
    final: float
    auc: float
    collapsed: float
    """The share of runs that did."""
    greedy: float | None
    kl: float | None


@dataclass(frozen=True, kw_only=True)
class UsableRange:
    """At which values of one setting a contestant comes close to the best, all its other settings being as said."""

    contestant: str
    key: str
    setting: Mapping[str, object]
    """The other swept settings."""
    tried: tuple[float, ...]
    """Values of `key`, ascending."""
    own: tuple[float, ...]
    """Those within reach of the contestant's own best, over all its settings."""
    overall: tuple[float, ...]
    """Those within reach of the best of all contestants."""

    @property
    def label(self) -> str:
        """`troll`, or `troll, num_iterations=4`."""
        return ", ".join([self.contestant, *setting_pairs(self.setting)])

    @property
    def sentence(self) -> str:
        """`troll: 3e-5 … 3e-4 (3 of 4 rates)`."""
        return f"{self.label}: {self.text(self.own)}"

    def text(self, usable: Sequence[float]) -> str:
        """`3e-5 … 3e-4 (3 of 4 rates)`. Values with a gap between them are named one by one."""
        what = "rates" if self.key.endswith("rate") else "values"
        places = [self.tried.index(value) for value in usable]
        together = len(places) > 1 and places[-1] - places[0] == len(places) - 1
        names = [value_text(value) for value in usable]
        shown = f"{names[0]} … {names[-1]}" if together else ", ".join(names) or "none"
        return f"{shown} ({len(usable)} of {len(self.tried)} {what})"


def cells(rows: Sequence[SweepRow]) -> list[Cell]:
    """Means over seeds, contestants in their order, settings ascending. A mean of greedy success or KL is of those measured."""
    found: dict[str, dict[tuple[object, ...], list[SweepRow]]] = {}
    for row in rows:
        members = found.setdefault(row.contestant, {}).setdefault(_key(row.setting), [])
        if any(row.seed == other.seed for other in members):
            raise ValueError(
                f"sweep: {row.contestant} with {dict(row.setting)} has seed {row.seed} twice: count each run once."
            )
        members.append(row)
    return [
        Cell(
            contestant=contestant,
            setting=dict(members[0].setting),
            seeds=tuple(sorted(row.seed for row in members)),
            final=fmean(row.final for row in members),
            auc=fmean(row.auc for row in members),
            collapsed=fmean(row.collapsed for row in members),
            greedy=_mean([row.greedy for row in members]),
            kl=_mean([row.kl for row in members]),
        )
        for contestant, settings in found.items()
        for _, members in sorted(settings.items())
    ]


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


def usable_range(rows: Sequence[SweepRow], key: str = "learning_rate", share: float = SHARE) -> list[UsableRange]:
    """The values of `key` whose mean final value is within `share` of the best, by contestant and other swept settings.

        usable  iff  final ≥ best − (1 − share) · |best|          for success: final ≥ share · best

    Args:
        key: a swept setting whose values are numbers.
        share: of the best; the best is the contestant's own over all its settings, or that of all contestants.
    """
    found = cells(rows)
    lowest = min((cell.final for cell in found), default=0.0)
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in found:
        value = cell.setting.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"usable_range: {key!r} must be a number in every row; {cell.contestant} has {value!r}.")
        others = {name: other for name, other in cell.setting.items() if name != key}
        groups.setdefault((cell.contestant, _key(others)), []).append(cell)

    def within(members: list[Cell], rivals: list[Cell]) -> tuple[float, ...]:
        best = max(cell.final for cell in rivals)
        # Where all failed, or the best is a zero that is the minimum too, nothing is usable.
        least = best - (1 - share) * abs(best) if math.isfinite(best) and not best == 0 <= lowest else math.inf
        return tuple(number_at(cell.setting, key) for cell in members if cell.final >= least)

    return [
        UsableRange(
            contestant=members[0].contestant,
            key=key,
            setting={name: value for name, value in members[0].setting.items() if name != key},
            tried=tuple(number_at(cell.setting, key) for cell in members),
            own=within(members, [cell for cell in found if cell.contestant == members[0].contestant]),
            overall=within(members, found),
        )
        for members in groups.values()
    ]


def number_at(setting: Mapping[str, object], key: str) -> float:
    """The value of a swept setting that has numbers alone for values, as `usable_range` makes sure."""
    value = setting[key]
    assert isinstance(value, int | float), f"{key} is {value!r}"
    return float(value)


def value_text(value: object) -> str:
    """A setting for people: 3e-05 as 3e-5, and .0003 as 3e-4."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if value == 0 or not math.isfinite(value) or 1e-2 <= abs(value) < 1e5:
        return f"{value:g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def setting_pairs(setting: Mapping[str, object]) -> list[str]:
    """`key=value` of each."""
    return [f"{key}={value_text(value)}" for key, value in setting.items()]


def setting_text(setting: Mapping[str, object]) -> str:
    """`learning_rate=1e-4 num_iterations=4`."""
    return " ".join(setting_pairs(setting))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(known) if known else None


def _key(setting: Mapping[str, object]) -> tuple[object, ...]:
    """A setting as something to sort and look up by: numbers before texts, ascending."""
    return tuple(
        (name, 0, float(value), "")
        if isinstance(value, int | float) and not isinstance(value, bool)
        else (name, 1, 0.0, str(value))
        for name, value in sorted(setting.items())
    )
