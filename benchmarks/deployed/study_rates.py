"""How far off a learning rate may be, or the bound that replaces it: tables, usable ranges, and rates on fresh seeds."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from plans import BOUNDS, FRESH, RATES, TUNING
from scipy import stats
from study_table import Row, area, final, is_below_start
from study_text import (
    OBJECTIVES,
    Values,
    by_seed,
    group,
    kl,
    markdown,
    rate_text,
    short,
    signed,
    with_interval,
    with_start,
)

from corral.lab.report.statistics import holm
from corral.lab.report.sweep import SweepRow, UsableRange, usable_range

SCHEDULES = ("linear", "constant")
MARGIN = 0.02
"""Points of area by which a held run may be behind a tuned rate."""
TUNED = (2e-4, 4e-4)
"""Rates among which the tuned one is, with nothing held."""
TRIED = (("auto", "constant"), ("auto", "linear"), (3e-3, "linear"), (2e-4, "linear"))
"""Rate and schedule of what is held at .03 and must not be inferior to it; "auto" is a start at 1e-3."""
UNHELD, HELD = "off", "on 0.03"
ARMS = {UNHELD: "", HELD: ", held"}
"""Of the plan over rates."""


def over_rates(runs: Iterable[Row], schedule: str = "linear") -> list[Row]:
    """Runs of the plan over rates: one pass, ten steps, held and not."""
    some = [run for run in runs if run.get("passes") == 1 and run["steps"] == 10 and run["seed"] in TUNING]
    return [run for run in some if run["schedule"] == schedule and run["rate"] in RATES and run["arm"] in ARMS]


def over_bounds(runs: Iterable[Row], schedule: str) -> list[Row]:
    """Runs at "auto" with one pass and ten steps."""
    some = [run for run in runs if run.get("passes") == 1 and run["steps"] == 10 and run["seed"] in TUNING]
    some = [run for run in some if run["schedule"] == schedule and not run.get("reuse")]
    return [run for run in some if run["rate"] == "auto" and run["bound"] in BOUNDS]


def sweep_rows(runs: Iterable[Row]) -> list[SweepRow]:
    """Runs as `corral compare` judges them: held or not, an objective is one contestant, with one tuned setting."""
    return [
        SweepRow(
            run["objective"],
            # A bound of inf holds nothing.
            {"learning_rate": run["rate"], "deployed_bound": float(run["bound"]), "schedule": run["schedule"]},
            run["seed"],
            final(run),
            area(run),
            run["dead"],
            fell_below_start=is_below_start(run),
        )
        for run in runs
    ]


def rates(runs: Sequence[Row], schedule: str) -> str:
    """Final success, and area below it, in the mean over seeds by rate; what is usable is bold."""
    some = over_rates(runs, schedule)
    found, ranges = group(some, "objective", "arm", "rate"), usable_range(sweep_rows(some))
    lines = []
    for objective in OBJECTIVES:
        for arm, held in ARMS.items():
            usable = {rate for one in ranges if one.contestant == objective and _is_held(one) == bool(held) for rate in one.own}
            for what, read in (("final", final), ("area", area)):
                cells = [found.get((objective, arm, rate), []) for rate in sorted(RATES)]
                if any(cells):
                    texts = [short(fmean(map(read, cell))) if cell else "–" for cell in cells]
                    texts = [f"**{text}**" if rate in usable else text for rate, text in zip(sorted(RATES), texts, strict=True)]
                    lines.append([f"{objective}{held}" if what == "final" else "", what, *texts])
    return with_start(markdown(("", "", *map(rate_text, sorted(RATES))), lines))


def _is_held(found: UsableRange) -> bool:
    return found.setting["deployed_bound"] != math.inf


def usable(runs: Sequence[Row], schedule: str) -> str:
    """The usable range of rates of every objective, unheld and held."""
    ranges = usable_range(sweep_rows(over_rates(runs, schedule)))
    order = sorted(ranges, key=lambda one: (OBJECTIVES.index(one.contestant), _is_held(one)))
    return "".join(f"- {one.contestant}{', held' if _is_held(one) else ''}: {_range_text(one)}.\n" for one in order)


def usable_against_unheld(runs: Sequence[Row]) -> str:
    """The usable range of rates of every objective, held with a constant schedule, by its best rate with nothing held."""
    unheld = [run for kind in SCHEDULES for run in over_rates(runs, kind) if run["arm"] == UNHELD]
    held = [run for run in over_rates(runs, "constant") if run["arm"] == HELD]
    ranges = usable_range(sweep_rows([*held, *unheld]), baseline=sweep_rows(unheld)) if held else []
    order = sorted(filter(_is_held, ranges), key=lambda one: OBJECTIVES.index(one.contestant))
    return "".join(f"- {one.contestant}, held: {_range_text(one)}.\n" for one in order)


def _range_text(found: UsableRange) -> str:
    """`1e-4 … 1e-3 (3 of 7 rates), 1.0 to 1.5 decades`."""
    return ", ".join(filter(None, [found.text(found.own), found.width_text]))


def usable_bounds(runs: Sequence[Row], schedule: str) -> str:
    """The usable range of bounds at "auto", by the best of all bounds and of all rates and schedules with nothing held."""
    unheld = [run for kind in SCHEDULES for run in over_rates(runs, kind) if run["arm"] == UNHELD]
    some = over_bounds(runs, schedule)
    ranges = usable_range(sweep_rows([*some, *unheld]), key="deployed_bound") if some else []
    order = sorted(ranges, key=lambda one: OBJECTIVES.index(one.contestant))
    return "".join(f"- {one.contestant}: {_range_text(one)}.\n" for one in order if one.setting.get("learning_rate") == "auto")


def fresh_rates(runs: Iterable[Row]) -> dict[tuple[object, ...], list[Row]]:
    """One pass, fifteen steps, on fresh seeds: by objective, rate and arm."""
    some = [run for run in runs if run.get("passes") == 1 and run["steps"] == 15 and run["seed"] in FRESH]
    return group((run for run in some if not run.get("reuse")), "objective", "rate", "arm", "schedule")


def confirmed_rates(runs: Sequence[Row]) -> str:
    """Rates on fresh seeds, unheld and held: area and final success with intervals, collapses, KL."""
    found, lines = fresh_rates(runs), []
    settings = [(rate, UNHELD, "linear") for rate in (*TUNED, 1e-3, 3e-3)] + [(rate, HELD, kind) for rate, kind in TRIED]
    for objective in ("troll", "ppo_clip"):
        for rate, arm, schedule in settings:
            if some := found.get((objective, rate, arm, schedule)):
                fallen = sum(run["dead"] or is_below_start(run) for run in some)
                cells = [with_interval([read(run) for run in some]) for read in (area, final)]
                cells += [short(fmean(final(run, "greedy") for run in some)), f"{fallen} of {len(some)}", kl(some, "mean")]
                lines.append([objective, rate_text(rate), schedule, "no" if arm == UNHELD else ".03", str(len(some)), *cells])
    head = ("objective", "rate", "schedule", "held at", "n", "area", "final, 4,096 problems", "greedy")
    return with_start(markdown((*head, "fell below the start", "KL mean"), lines))


class NotWorse(NamedTuple):
    """Whether ours is not inferior to theirs by a margin."""

    mean: float
    low: float
    """One-sided lower 95 % bound of the mean difference."""
    p: float | None
    """Of a difference as low as −margin; None where there is no spread to tell by."""
    runs: str
    """`10 seeds`, or `5 and 10 runs` where none are paired."""


def not_worse(ours: Values, theirs: Values, margin: float = MARGIN) -> NotWorse:
    """The difference against −margin, one-sided: paired by seed (Student), or of independent runs where none are (Welch)."""
    shared = [seed for seed in ours if seed in theirs]
    if shared:
        sides = [[ours[seed] - theirs[seed] for seed in shared]]
        mean, runs = fmean(sides[0]), f"{len(shared)} seeds"
    else:
        sides = [[*ours.values()], [*theirs.values()]]
        mean, runs = fmean(sides[0]) - fmean(sides[1]), f"{len(ours)} and {len(theirs)} runs"
    squares = [stdev(side) ** 2 / len(side) if len(side) > 1 else math.inf for side in sides]
    error = math.sqrt(sum(squares))
    if not 0 < error < math.inf:
        return NotWorse(mean, -math.inf, None, runs)
    freedom = sum(squares) ** 2 / sum(square**2 / (len(side) - 1) for square, side in zip(squares, sides, strict=True))
    low = mean - float(stats.t.ppf(0.95, freedom)) * error
    return NotWorse(mean, low, float(stats.t.sf((mean + margin) / error, freedom)), runs)


def not_inferior(runs: Sequence[Row]) -> str:
    """Held runs against the better of two tuned rates on the same seeds: area under Holm, the final value beside it."""
    found, tests, texts = fresh_rates(runs), [], []
    for objective in ("troll", "ppo_clip"):
        tuned = {rate: cell for rate in TUNED if (cell := found.get((objective, rate, UNHELD, "linear")))}
        if not tuned:
            continue
        best = max(tuned, key=lambda rate: fmean(map(area, tuned[rate])))
        for rate, schedule in TRIED:
            if not (cell := found.get((objective, rate, HELD, schedule))):
                continue
            one, end = (not_worse(by_seed(cell, read), by_seed(tuned[best], read)) for read in (area, final))
            tests.append(one.p)
            name = '`"auto"`' if rate == "auto" else rate_text(rate)
            texts.append(
                f"- {objective}, {name} held at .03, {schedule}, less {rate_text(best)} unheld ({one.runs}): area "
                f"{signed(one.mean)}, at least {signed(one.low)}; final {signed(end.mean)}, at least {signed(end.low)}: "
            )
    verdicts = ["not inferior" if holds else "may be inferior" for holds in holm(tests)]
    return "".join(f"{text}{verdict}.\n" for text, verdict in zip(texts, verdicts, strict=True))
