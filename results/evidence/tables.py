"""Tables of docs/results/llm.md on the embedded model: cells of equal settings, a row each."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from statistics import fmean, stdev

from corral.lab.report.statistics import plain
from results.evidence.cells import Cell, arm_name, collapsed, compare, difference_text, most_collapses
from results.packed import Row
from results.pages import markdown, rate_text, short
from results.plans import ABLATIONS, AGAIN, ARMS, FAMILIES, HOT, PUBLISHED, REUSED, TUNED
from results.runs import area, final, greedy, kl, mean, steps_of

RATES = (1e-4, 2e-4, 3e-4, 1e-3, 3e-3)
HEAD = ("", "runs", "area", "final", "greedy", "KL mean", "p99.9", "max", "acted on", "collapsed")
WINDOW = 8
"""Batches in a row over which rewards are averaged."""
ANCHORED = (("dppo", "rollout"), ("dppo", "old"), ("ppo_clip", "rollout"), ("reinforce", "rollout"), ("troll", "old"))
"""Objective and anchor of long runs: 2,048 updates, 32 of each of 64 batches."""
RARE = (("ppo_clip", ""), ("rare_clip", "below .1"), ("rare_clip", "below .01"), ("dppo", ""))
"""Clipping, the same lifted for tokens whose old probability is below a threshold, and DPPO."""
OFTEN = {"passes": AGAIN["passes"], "steps": AGAIN["steps"], "every": AGAIN["eval_every"]}
"""Cells with four passes."""


def cells_of(name: str, found: Sequence[Row]) -> list[str]:
    """A row of a table: means over seeds, and collapses."""
    acted = fmean(line.get("tr/active_frac", 0.0) for run in found for line in steps_of(run))
    gone = sum(map(collapsed, found))
    most = f"{gone} of {len(found)}, at most {100 * most_collapses(gone, len(found)):.0f} %"
    numbers = [*(mean(found, read) for read in (area, final, greedy)), *(kl(found, one) for one in ("mean", "p999", "max"))]
    return [name, str(len(found)), *numbers, f"{100 * acted:.1f} %", most]


def table(cells: Iterable[tuple[str, Cell]], runs: Sequence[Row]) -> str:
    """A row for every cell with runs."""
    found = [(name, list(cell.runs(runs).values())) for name, cell in cells]
    return markdown(HEAD, [cells_of(name, members) for name, members in found if members])


def map_at(runs: Sequence[Row], rate: float | tuple[float, ...]) -> str:
    return table([(arm_name(arm), Cell(arm=arm, rate=rate)) for arm in ARMS], runs)


def by_rate(runs: Sequence[Row]) -> str:
    """Area under the held-out curve of every contestant at every rate, with its spread and the number of seeds."""
    found = {at: [area(run) for run in Cell(arm=at[0], rate=at[1]).runs(runs).values()] for at in product(ARMS, RATES)}
    rates = [rate for rate in RATES if any(found[arm, rate] for arm in ARMS)]
    lines = []
    for arm in ARMS:
        cells = [found[arm, rate] for rate in rates]
        texts = [
            f"{short(fmean(areas))}{f' ± {short(stdev(areas))}' if len(areas) > 1 else ''} ({len(areas)})" if areas else "–"
            for areas in cells
        ]
        lines += [[arm_name(arm), *texts]] if any(cells) else []
    return markdown(("", *map(rate_text, rates)), lines)


def reused(runs: Sequence[Row]) -> str:
    """Passes over a batch at every rate there is; first the fresh seeds, which were measured more often."""
    cells = [
        (
            f"{arm_name(arm)}, {8 * passes} updates, {rate_text(rate)}, {seeds} seeds",
            Cell(arm=arm, rate=rate, passes=passes, steps=10, every=every),
        )
        for (every, seeds), passes, arm, rate in product(((2, "fresh"), (5, "tuning")), (1, 4, 8), REUSED, (1e-4, TUNED, 4e-4))
    ]
    return table(cells, runs)


def ablations(runs: Sequence[Row]) -> str:
    """TROLL with one thing changed, paired with TROLL as it is by seed, at both rates."""
    lines = []
    for variant in ABLATIONS:
        row = [variant]
        for rate in (TUNED, HOT):
            cell = Cell(arm=("troll", variant), rate=rate)
            found = compare(cell, Cell(arm=("troll", ""), rate=rate), runs)
            row += ["–", "–"] if found is None else [cell.area(runs), f"{difference_text(found)} ({found.seeds})"]
        lines += [row] if any(Cell(arm=("troll", variant), rate=rate).runs(runs) for rate in (TUNED, HOT)) else []
    heads = [head for rate in (TUNED, HOT) for head in (f"area, {rate_text(rate)}", "points over TROLL")]
    return markdown(("changed", *heads), lines)


def mismatch(runs: Sequence[Row]) -> str:
    """Samplers in lower precision, by anchor."""
    arms = (("dppo", ""), ("ppo_clip", ""), ("troll", ""), ("troll", "unprojected"))
    return table(
        [
            (f"{arm_name(arm)}, {sampler}, `{anchor}`", Cell(arm=arm, others={"sampler": sampler, "anchor": anchor}))
            for arm, sampler, anchor in product(arms, ("fp8", "bf16"), ("rollout", "old"))
        ],
        runs,
    )


def pairs(runs: Sequence[Row], rows: Iterable[tuple[str, Sequence[Cell]]]) -> list[list[str]]:
    """A line for each row of cells that have paired runs: areas, what every other is above the last, and seeds."""
    lines = []
    for name, (*ours, theirs) in rows:
        found = [one for cell in ours if (one := compare(cell, theirs, runs)) is not None]
        if len(found) == len(ours):
            areas = [cell.area(runs) for cell in (*ours, theirs)]
            lines.append(
                [name, rate_text(theirs.rate), *areas, *map(difference_text, found), str(min(one.seeds for one in found))]
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
    """Thousands of updates at a small constant rate with a sampler in fp8; rewards in training, at best and at last, beside."""
    lines = []
    for name, anchor in ANCHORED:
        others = {"sampler": "fp8", "anchor": anchor, "schedule": "constant"}
        size = {"passes": 4, "steps": 64, "every": 16}
        if found := list(Cell(arm=(name, ""), rate=1e-4, others=others, **size).runs(runs).values()):
            rewards = [smoothed_rewards(run) for run in found]
            best, last = fmean(map(max, rewards)), fmean(curve[-1] for curve in rewards)
            lines.append([*cells_of(f"{name}, `{anchor}`", found), short(best), short(last)])
    return markdown((*HEAD, "reward, best", "reward, last"), lines)


def smoothed_rewards(run: Row) -> list[float]:
    """Rewards in training, means over 8 batches in a row; a dead run goes on at 0."""
    rewards = [line["reward"] for line in steps_of(run)]
    rewards += [0.0] * (run["steps"] - len(rewards))
    return [fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)]


def experts(runs: Sequence[Row]) -> str:
    """A mixture of experts with a sampler in fp8, by anchor."""
    about = {"model": "runs/starts/moe-1", "sampler": "fp8"}
    return table(
        [
            (f"{name}, `{anchor}`", Cell(arm=(name, ""), rate=TUNED, others={**about, "anchor": anchor}))
            for name, anchor in product(("dppo", "troll", "ppo_clip"), ("rollout", "old"))
        ],
        runs,
    )


def rare(runs: Sequence[Row]) -> str:
    """Clipping lifted for rare tokens, beside clipping and DPPO, with one pass and with four."""
    cells = [Cell(arm=arm, rate=rate, **size) for (rate, size), arm in product(((TUNED, {}), (TUNED, OFTEN), (HOT, {})), RARE)]
    return table([(f"{arm_name(one.arm)}, {8 * one.passes} updates, {rate_text(one.rate)}", one) for one in cells], runs)


def bounds(runs: Sequence[Row]) -> str:
    """DPPO by its bound, beside clipping."""
    arms = (("ppo_clip", ""), ("dppo", "δ=.1"), ("dppo", "δ=.15"), ("dppo", ""))
    cells = [(f"{arm_name(arm)}, {rate_text(rate)}", Cell(arm=arm, rate=rate)) for rate, arm in product((TUNED, HOT), arms)]
    return table(cells, runs)
