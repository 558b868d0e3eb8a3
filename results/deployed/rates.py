"""Usable ranges of the learning rate, and of the bound that replaces it: tables, and rates on fresh seeds."""

import math
from collections.abc import Iterable, Sequence
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from corral.lab.report.statistics import holm
from corral.lab.report.sweep import SweepRow, UsableRange, usable_range
from results.packed import Row
from results.pages import markdown, rate_text, signed
from results.plans import BOUNDS, FRESH, RATES, TUNING
from results.runs import Values, area, by_seed, final, greedy, group, is_below_start, kl, mean, where, with_interval, with_start

OBJECTIVES = ("troll", "dppo", "ppo_clip", "reinforce")
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


def over_rates(
    runs: Iterable[Row], schedule: str | tuple[str, ...] = "linear", arm: str | tuple[str, ...] = (UNHELD, HELD)
) -> list[Row]:
    """Runs of the plan over rates: one pass, ten steps, held and not."""
    return where(runs, passes=1, steps=10, seed=TUNING, schedule=schedule, rate=RATES, arm=arm)


def sweep_rows(runs: Iterable[Row]) -> list[SweepRow]:
    """Runs as `corral compare` judges them: held or not, an objective is one contestant, with one tuned setting."""
    return [
        SweepRow(
            run["objective"],
            # A bound of inf holds nothing.
            {"learning_rate": run["rate"], "deployed_bound": float(run["bound"]), "schedule": run["schedule"]},
            run["seed"], final(run), area(run), run["dead"], fell_below_start=is_below_start(run),
        )
        for run in runs
    ]  # fmt: skip


def rates(runs: Sequence[Row], schedule: str) -> str:
    """Final success, and area below it, in the mean over seeds by rate; what is usable is bold."""
    some, tried, lines = over_rates(runs, schedule), sorted(RATES), []
    found, ranges = group(some, "objective", "arm", "rate"), usable_range(sweep_rows(some))
    for objective, (arm, held) in product(OBJECTIVES, ARMS.items()):
        good = {rate for one in ranges if (one.contestant, is_held(one)) == (objective, bool(held)) for rate in one.own}
        cells = [found.get((objective, arm, rate), []) for rate in tried]
        for what, read in (("final", final), ("area", area)) if any(cells) else ():
            texts = [mean(cell, read) if cell else "–" for cell in cells]
            texts = [f"**{text}**" if rate in good else text for rate, text in zip(tried, texts, strict=True)]
            lines.append([f"{objective}{held}" if what == "final" else "", what, *texts])
    return with_start(markdown(("", "", *map(rate_text, tried)), lines))


def is_held(found: UsableRange) -> bool:
    return found.setting.get("deployed_bound", math.inf) != math.inf


def listed(ranges: Iterable[UsableRange], held: str = ", held") -> str:
    """A line for each range: `- troll: 1e-4 … 1e-3 (3 of 7 rates), 1.0 to 1.5 decades.`"""
    order = sorted(ranges, key=lambda one: (OBJECTIVES.index(one.contestant), is_held(one)))
    texts = [", ".join(filter(None, [one.text(one.own), one.width_text])) for one in order]
    return "".join(
        f"- {one.contestant}{held if is_held(one) else ''}: {text}.\n" for one, text in zip(order, texts, strict=True)
    )


def usable(runs: Sequence[Row], schedule: str) -> str:
    """The usable range of rates of every objective, unheld and held."""
    return listed(usable_range(sweep_rows(over_rates(runs, schedule))))


def usable_against_unheld(runs: Sequence[Row]) -> str:
    """The usable range of rates of every objective, held with a constant schedule, by its best rate with nothing held."""
    unheld, held = over_rates(runs, SCHEDULES, UNHELD), over_rates(runs, "constant", HELD)
    return listed(filter(is_held, usable_range(sweep_rows([*held, *unheld]), baseline=sweep_rows(unheld)) if held else []))


def usable_bounds(runs: Sequence[Row], schedule: str) -> str:
    """The usable range of bounds at "auto", by the best of all bounds and of all rates and schedules with nothing held."""
    some = where(runs, passes=1, steps=10, seed=TUNING, schedule=schedule, reuse=None, rate="auto", bound=BOUNDS)
    rows = sweep_rows([*some, *over_rates(runs, SCHEDULES, UNHELD)])
    ranges = usable_range(rows, key="deployed_bound") if some else []
    return listed((one for one in ranges if one.setting.get("learning_rate") == "auto"), held="")


def fresh_rates(runs: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Group the runs of one pass and fifteen steps on fresh seeds by objective, rate, arm and schedule."""
    return group(where(runs, passes=1, steps=15, seed=FRESH, reuse=None), "objective", "rate", "arm", "schedule")


def confirmed_rates(runs: Sequence[Row]) -> str:
    """Rates on fresh seeds, unheld and held: area and final success with intervals, collapses, KL."""
    found, lines = fresh_rates(runs), []
    settings = [(rate, UNHELD, "linear") for rate in (*TUNED, 1e-3, 3e-3)] + [(rate, HELD, kind) for rate, kind in TRIED]
    for objective, (rate, arm, schedule) in product(("troll", "ppo_clip"), settings):
        if some := found.get((objective, rate, arm, schedule)):
            fallen = sum(run["dead"] or is_below_start(run) for run in some)
            cells = [with_interval(list(map(read, some))) for read in (area, final)]
            cells += [mean(some, greedy), f"{fallen} of {len(some)}", kl(some, "mean")]
            lines.append([objective, rate_text(rate), schedule, "no" if arm == UNHELD else ".03", str(len(some)), *cells])
    head = ("objective", "rate", "schedule", "held at", "n", "area", "final, 4,096 problems", "greedy")
    return with_start(markdown((*head, "fell below the start", "KL mean"), lines))


class NotWorse(NamedTuple):
    """Test of non-inferiority by a margin."""

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
    a, b = (np.array([side[seed] for seed in shared or side]) for side in (ours, theirs))
    value = float(a.mean() - b.mean())
    runs = f"{len(shared)} seeds" if shared else f"{len(a)} and {len(b)} runs"
    if min(len(a), len(b)) < 2 or max(map(np.ptp, [a - b] if shared else [a, b])) == 0:
        return NotWorse(value, -math.inf, None, runs)
    how = {"alternative": "greater"}
    test = stats.ttest_rel(a + margin, b, **how) if shared else stats.ttest_ind(a + margin, b, equal_var=False, **how)
    return NotWorse(value, float(test.confidence_interval(0.95).low) - margin, float(test.pvalue), runs)


def not_inferior(runs: Sequence[Row]) -> str:
    """Held runs against the better of two tuned rates on the same seeds: area under Holm, the final value beside it."""
    found, tests, texts = fresh_rates(runs), [], []
    for objective in ("troll", "ppo_clip"):
        tuned = {rate: cell for rate in TUNED if (cell := found.get((objective, rate, UNHELD, "linear")))}
        best = max(tuned, key=lambda rate: fmean(map(area, tuned[rate])), default=None)
        for rate, schedule in TRIED if best else ():
            if cell := found.get((objective, rate, HELD, schedule)):
                one, end = (not_worse(by_seed(cell, read), by_seed(tuned[best], read)) for read in (area, final))
                tests.append(one.p)
                name = '`"auto"`' if rate == "auto" else rate_text(rate)
                texts.append(
                    f"- {objective}, {name} held at .03, {schedule}, less {rate_text(best)} unheld ({one.runs}): area "
                    f"{signed(one.mean)}, at least {signed(one.low)}; final {signed(end.mean)}, at least {signed(end.low)}: "
                )
    verdicts = ["not inferior" if holds else "may be inferior" for holds in holm(tests)]
    return "".join(f"{text}{verdict}.\n" for text, verdict in zip(texts, verdicts, strict=True))
