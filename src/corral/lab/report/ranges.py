"""A sweep's results by setting: means over seeds, and the best setting of each contestant.

A comparison at one learning rate mostly tells whose rate it was. So every contestant is run over the same grid, and its setting
is chosen on some seeds and reported on others.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

AUTO = "auto"
"""The one word among the numbers of an axis: `learning_rate="auto"`."""

Value = float | str
"""A place on an axis: a number, or `auto` beside it."""


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
    fell_below_start: bool
    """Whether any run did."""
    finals: tuple[float, ...]
    """Of each seed."""
    aucs: tuple[float, ...]


def cells(rows: Sequence[SweepRow]) -> list[Cell]:
    """Means over seeds, contestants in their order, settings ascending. A mean of greedy success or KL is of those measured."""
    found: dict[str, dict[tuple[object, ...], list[SweepRow]]] = {}
    for row in rows:
        members = found.setdefault(row.contestant, {}).setdefault(setting_key(row.setting), [])
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
            fell_below_start=any(row.fell_below_start for row in members),
            finals=tuple(row.final for row in members),
            aucs=tuple(row.auc for row in members),
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


def setting_key(setting: Mapping[str, object]) -> tuple[object, ...]:
    """A setting as something to sort and look up by: numbers before texts, ascending."""
    return tuple(
        (name, 0, float(value), "")
        if isinstance(value, int | float) and not isinstance(value, bool)
        else (name, 1, 0.0, str(value))
        for name, value in sorted(setting.items())
    )
