"""Tables of docs/results/llm.md on the embedded model: cells of equal settings, a row each."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from statistics import fmean, stdev

from corral.lab.report.statistics import plain
from results.evidence.cells import Cell, arm_name, collapsed, compare
from results.packed import Row
from results.pages import interval_text, markdown, rate_text
from results.plans import ABLATIONS, AGAIN, ARMS, FAMILIES, HOT, PUBLISHED, REUSED, TUNED
from results.runs import area, final, greedy, kl, mean

RATES = (1e-4, 2e-4, 3e-4, 1e-3, 3e-3)
HEAD = ("", "runs", "mean success", "at the end", "greedy", "KL", "collapsed")
"""Held-out success in the mean over a run and at its end; KL of the network in a mean batch."""
ANCHORED = (("dppo", "rollout"), ("dppo", "old"), ("ppo_clip", "rollout"), ("reinforce", "rollout"), ("troll", "old"))
"""Objective and anchor of long runs: 2,048 updates, 32 of each of 64 batches."""
RARE = (("ppo_clip", ""), ("rare_clip", "below .1"), ("rare_clip", "below .01"), ("dppo", ""))
"""Clipping, the same lifted for tokens whose old probability is below a threshold, and DPPO."""
OFTEN = {"passes": AGAIN["passes"], "steps": AGAIN["steps"], "every": AGAIN["eval_every"]}
"""Cells with four passes."""


def cells_of(name: str, found: Sequence[Row]) -> list[str]:
    """A row of a table: means over seeds, and collapses."""
    numbers = [mean(found, read) for read in (area, final, greedy)]
    return [name, str(len(found)), *numbers, kl(found, "mean"), f"{sum(map(collapsed, found))} of {len(found)}"]


def table(cells: Iterable[tuple[str, Cell]], runs: Sequence[Row]) -> str:
    """A row for every cell with runs."""
    found = [(name, list(cell.runs(runs).values())) for name, cell in cells]
    return markdown(HEAD, [cells_of(name, members) for name, members in found if members])


def hot(runs: Sequence[Row]) -> str:
    """Every contestant at a rate that is too large."""
    return table([(arm_name(arm), Cell(arm=arm, rate=HOT)) for arm in ARMS], runs)


def by_rate(runs: Sequence[Row]) -> str:
    """Mean success of every contestant at every rate, and the number of runs."""
    found = {at: Cell(arm=at[0], rate=at[1]).runs(runs).values() for at in product(ARMS, RATES)}
    rates = [rate for rate in RATES if any(found[arm, rate] for arm in ARMS)]
    lines = [
        [arm_name(arm), *(f"{mean(cell, area)} ({len(cell)})" if (cell := found[arm, rate]) else "–" for rate in rates)]
        for arm in ARMS
    ]
    return markdown(("", *map(rate_text, rates)), lines)


def reused(runs: Sequence[Row]) -> str:
    """Four passes over a batch at the rate that was the best of three for each of TROLL, DPPO and clipping."""
    return table([(arm_name(arm), Cell(arm=arm, rate=TUNED, **OFTEN)) for arm in REUSED], runs)


def ablations(runs: Sequence[Row]) -> str:
    """Points of TROLL with one thing changed over TROLL as it is, paired by seed, at both rates."""
    lines = []
    for variant in ABLATIONS:
        cells = [[Cell(arm=("troll", name), rate=rate) for name in (variant, "")] for rate in (TUNED, HOT)]
        lines.append([variant, *(interval_text(compare(changed, plain, runs)) for changed, plain in cells)])
    return markdown(("changed", *(f"points at {rate_text(rate)}" for rate in (TUNED, HOT))), lines)


def pairs(runs: Sequence[Row], rows: Iterable[tuple[str, Sequence[Cell]]]) -> list[list[str]]:
    """A line for each row of cells that have paired runs: areas, what every other is above the last, and seeds."""
    lines = []
    for name, (*ours, theirs) in rows:
        found = [one for cell in ours if (one := compare(cell, theirs, runs)) is not None]
        if len(found) == len(ours):
            areas = [cell.area(runs) for cell in (*ours, theirs)]
            lines.append(
                [name, rate_text(theirs.rate), *areas, *map(interval_text, found), str(min(one.seeds for one in found))]
            )
    return lines


def estimators(runs: Sequence[Row]) -> str:
    """TROLL against clipping under each advantage, paired by seed."""
    rows = [
        (variant or "standardised", [Cell(arm=(name, variant), rate=rate) for name in ("troll", "ppo_clip")])
        for variant, rate in product(("", "no std", "rloo", "reinforce++"), (TUNED, HOT))
    ]
    return markdown(("advantage", "rate", "TROLL", "clipping", "points", "seeds"), pairs(runs, rows))


def starts(runs: Sequence[Row]) -> str:
    """Other warm starts and families: TROLL and DPPO against clipping, paired by seed."""
    names = [*(f"llama-{seed}" for seed in (1, 2, 3)), *(f"{family}-1" for family in FAMILIES)]
    rows = [
        (
            name,
            [Cell(arm=(arm, ""), rate=rate, others={"model": f"runs/starts/{name}"}) for arm in ("troll", "dppo", "ppo_clip")],
        )
        for name, rate in product(names, (TUNED, HOT))
    ]
    head = ("start", "rate", "TROLL", "DPPO", "clipping", "TROLL − clipping", "DPPO − clipping", "seeds")
    return markdown(head, pairs(runs, rows))


def published(runs: Sequence[Row]) -> str:
    """Objectives as their papers average, against the common form of the same, paired by seed."""
    rows = [
        (arm_name(arm), [Cell(arm=form, rate=rate) for form in (arm, (arm[0], ""))])
        for arm, rate in product(PUBLISHED, (TUNED, HOT))
    ]
    return markdown(("form", "rate", "area", "common form", "points", "seeds"), pairs(runs, rows))


def floor(runs: Sequence[Row]) -> str:
    """Spread between objectives with one update per batch, where all objectives are one algorithm."""
    found = defaultdict(list)
    for run in runs:
        if (run["updates"], run["passes"], run["steps"]) == (1, 1, 15):
            found[run["rate"], run["seed"], run["device"]].append(100 * area(run))
    several = [areas for areas in found.values() if len(areas) > 1]
    spreads = [stdev(areas) for areas in several]
    told = f"differ by {plain(fmean(spreads))} points (sd)" if any(spreads) else "have the same measurements to the last digit"
    count = sum(map(len, several))
    return (
        f"With one update per batch all objectives are one algorithm: {count} runs of them, equal in seed and rate, {told}.\n"
    )


def stability(runs: Sequence[Row]) -> str:
    """2,048 updates at a small constant rate with a sampler in fp8, by anchor."""
    size = {"passes": 4, "steps": 64, "every": 16}
    others = {"sampler": "fp8", "schedule": "constant"}
    return table(
        [
            (f"{name}, `{anchor}`", Cell(arm=(name, ""), rate=1e-4, others={**others, "anchor": anchor}, **size))
            for name, anchor in ANCHORED
        ],
        runs,
    )


def rare(runs: Sequence[Row]) -> str:
    """Clipping lifted for rare tokens, beside clipping and DPPO, with four passes."""
    return table([(arm_name(arm), Cell(arm=arm, rate=TUNED, **OFTEN)) for arm in RARE], runs)


def bounds(runs: Sequence[Row]) -> str:
    """DPPO by its bound at a rate that is too large, beside clipping."""
    arms = (("ppo_clip", ""), ("dppo", "δ=.1"), ("dppo", "δ=.15"), ("dppo", ""))
    return table([(arm_name(arm), Cell(arm=arm, rate=HOT)) for arm in arms], runs)
