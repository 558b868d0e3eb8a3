"""Usable ranges of the learning rate, and of the bound that replaces it: tables, and rates on fresh seeds."""

import math
from collections.abc import Iterable, Sequence
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from corral.lab.report.statistics import holm
from corral.lab.report.sweep import SweepRow, usable_range
from results.packed import Row
from results.pages import markdown, p_text, points, rate_text
from results.plans import FRESH, RATES, TUNING
from results.runs import Values, area, by_seed, final, greedy, group, is_below_start, kl, mean, where, with_interval, with_start

OBJECTIVES = ("troll", "dppo", "ppo_clip", "reinforce")
SCHEDULES = ("linear", "constant")
MARGIN = 0.02
"""Points of area by which a held run may be behind a tuned rate."""
TUNED = (2e-4, 4e-4)
"""Rates among which the tuned one is, with nothing held."""
TRIED = (("auto", "constant"), ("auto", "linear"), (3e-3, "linear"), (2e-4, "linear"))
"""Rate and schedule of runs with a bound of .03 that must not be inferior to it; "auto" is a start at 1e-3."""
UNHELD, HELD = "off", "on 0.03"


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


def usable(runs: Sequence[Row]) -> str:
    """The usable range of rates of every objective, by its best rate without a bound: alone, then with a bound, constant."""
    free, bounded = over_rates(runs, SCHEDULES, UNHELD), over_rates(runs, "constant", HELD)
    ranges = usable_range(sweep_rows([*bounded, *free]), baseline=sweep_rows(free)) if bounded else []
    found = {(one.contestant, one.setting.get("deployed_bound") != math.inf): one for one in ranges}
    lines = []
    for objective in OBJECTIVES:
        if one := found.get((objective, True)):
            lines.append([objective, one.text(one.own), one.width_text])
    return markdown(("objective", "usable learning rates", "width"), lines)


def fresh_rates(runs: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Group the runs of one pass and fifteen steps on fresh seeds by objective, rate, arm and schedule."""
    return group(where(runs, passes=1, steps=15, seed=FRESH, reuse=None), "objective", "rate", "arm", "schedule")


def confirmed_rates(runs: Sequence[Row]) -> str:
    """Learning rates on fresh seeds, with a bound and without: success with intervals, collapses, KL."""
    found, lines = fresh_rates(runs), []
    settings = [(rate, UNHELD, "linear") for rate in (*TUNED, 1e-3, 3e-3)] + [(rate, HELD, kind) for rate, kind in TRIED]
    for objective, (rate, arm, schedule) in product(("troll", "ppo_clip"), settings):
        if some := found.get((objective, rate, arm, schedule)):
            fallen = sum(run["dead"] or is_below_start(run) for run in some)
            cells = [with_interval(list(map(read, some))) for read in (area, final)]
            cells += [mean(some, greedy), f"{fallen} of {len(some)}", kl(some, "mean")]
            lines.append([objective, rate_text(rate), schedule, "no" if arm == UNHELD else ".03", *cells])
    head = ("objective", "rate", "schedule", "bound", "mean success", "at the end", "greedy", "fell below the start", "KL")
    return with_start(markdown(head, lines))


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


def verdicts(runs: Sequence[Row]) -> list[list[str]]:
    """Bounded runs against the better of two tuned rates on the same seeds: mean success under Holm, the end beside it."""
    found, tests, lines = fresh_rates(runs), list[float | None](), list[list[str]]()
    for objective in ("troll", "ppo_clip"):
        tuned = {rate: cell for rate in TUNED if (cell := found.get((objective, rate, UNHELD, "linear")))}
        best = max(tuned, key=lambda rate: fmean(map(area, tuned[rate])), default=None)
        for rate, schedule in TRIED if best else ():
            if cell := found.get((objective, rate, HELD, schedule)):
                one, end = (not_worse(by_seed(cell, read), by_seed(tuned[best], read)) for read in (area, final))
                tests.append(one.p)
                name = '`"auto"`' if rate == "auto" else rate_text(rate)
                gaps = [f"{points(100 * of.mean)}, at least {points(100 * of.low)}" for of in (one, end)]
                lines.append([f"{objective}, {name}, {schedule} − {rate_text(best)} without a bound", *gaps, one.runs])
    return [[*line, p_text(p)] for line, p in zip(lines, holm(tests), strict=True)]


def not_inferior(runs: Sequence[Row]) -> str:
    """The tests of non-inferiority as a table."""
    head = ("difference", "points of mean success", "points at the end", "runs", "p (Holm) of being 2 points behind")
    return markdown(head, verdicts(runs))
