"""Tables of docs/results/llm.md on the embedded model: cells of equal settings, a row each."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from statistics import fmean, stdev

from evidence_plans import ABLATIONS, ANCHORED, ARMS, FAMILIES, HOT, LONG, MOE, PUBLISHED, RARE, REUSED, TUNED
from evidence_rows import Cell, Row, arm_name, collapsed, compare, measures, most_collapses, steps_of
from llm_claims import TROLL
from llm_figures import RATES
from study_page import markdown, rate_text, short, two_digits

from corral.lab.report.statistics import Difference, plain, signed

HEAD = ("", "runs", "area", "final", "greedy", "KL mean", "p99.9", "max", "acted on", "collapsed")
WINDOW = 8
"""Batches in a row over which rewards are averaged."""


def cells_of(name: str, found: Sequence[Row]) -> list[str]:
    """A row of a table: means over seeds, and collapses."""
    mean = measures(found)
    success = [short(mean[key]) for key in ("area", "final", "greedy")]
    kl = [two_digits(mean[key]) for key in ("mean", "p999", "max")]
    gone = sum(map(collapsed, found))
    most = f"{gone} of {len(found)}, at most {100 * most_collapses(gone, len(found)):.0f} %"
    return [name, str(len(found)), *success, *kl, f"{100 * mean['acted']:.1f} %", most]


def table(cells: Iterable[tuple[str, Cell]], runs: Sequence[Row]) -> str:
    """A row for every cell with runs, and the names of those without; "Not run yet." where none has any."""
    found = [(name, list(cell.runs(runs).values())) for name, cell in cells]
    missing = [name for name, members in found if not members]
    lines = [cells_of(name, members) for name, members in found if members]
    if not lines:
        return "Not run yet.\n"
    absent = f"Not run yet: {'; '.join(missing)}.\n" if missing else ""
    return "\n".join(filter(None, [markdown(HEAD, lines), absent]))


def map_at(runs: Sequence[Row], rate: float | tuple[float, ...]) -> str:
    return table([(arm_name(arm), Cell(arm=arm, rate=rate)) for arm in ARMS], runs)


def by_rate(runs: Sequence[Row]) -> str:
    """Area under the held-out curve of every contestant at every rate, with its spread and the number of seeds."""
    rates = [rate for rate in RATES if any(Cell(arm=arm, rate=rate).runs(runs) for arm in ARMS)]
    lines = []
    for arm in ARMS:
        if not any(Cell(arm=arm, rate=rate).runs(runs) for rate in rates):
            continue
        row = [arm_name(arm)]
        for rate in rates:
            areas = [measures([run])["area"] for run in Cell(arm=arm, rate=rate).runs(runs).values()]
            spread = f" ± {short(stdev(areas))}" if len(areas) > 1 else ""
            row.append(f"{short(fmean(areas))}{spread} ({len(areas)})" if areas else "–")
        lines.append(row)
    return markdown(("", *map(rate_text, rates)), lines) if lines else "Not run yet.\n"


def reused(runs: Sequence[Row]) -> str:
    """Passes over a batch at every rate there is; first the fresh seeds, which were measured more often."""
    cells = []
    for every, passes, arm, rate in product((2, 5), (1, 4, 8), REUSED, (1e-4, TUNED, 4e-4)):
        cell = Cell(arm=arm, rate=rate, passes=passes, steps=10, every=every)
        if cell.runs(runs):
            seeds = "fresh" if every == 2 else "tuning"
            cells.append((f"{arm_name(arm)}, {8 * passes} updates, {rate_text(rate)}, {seeds} seeds", cell))
    return table(cells, runs)


def ablations(runs: Sequence[Row]) -> str:
    """TROLL with one thing changed, paired with TROLL as it is by seed, at both rates."""
    lines = []
    for variant in ABLATIONS:
        if not any(Cell(arm=("troll", variant), rate=rate).runs(runs) for rate in (TUNED, HOT)):
            continue
        row = [variant]
        for rate in (TUNED, HOT):
            cell = Cell(arm=("troll", variant), rate=rate)
            found = compare(cell, Cell(arm=TROLL, rate=rate), runs)
            if found is None:
                row += ["–", "–"]
                continue
            area = short(measures(list(cell.runs(runs).values()))["area"])
            row += [area, f"{difference_text(found)} ({found.seeds})"]
        lines.append(row)
    head = ("changed", f"area, {rate_text(TUNED)}", "points over TROLL", f"area, {rate_text(HOT)}", "points over TROLL")
    return markdown(head, lines) if lines else f"Not run yet: {'; '.join(ABLATIONS)}.\n"


def mismatch(runs: Sequence[Row]) -> str:
    """Samplers in lower precision, by anchor."""
    cells = []
    for arm in (("dppo", ""), ("ppo_clip", ""), ("troll", ""), ("troll", "unprojected")):
        for sampler in ("fp8", "bf16"):
            for anchor in ("rollout", "old"):
                others = {"sampler": sampler, "anchor": anchor}
                cells.append((f"{arm_name(arm)}, {sampler}, `{anchor}`", Cell(arm=arm, others=others)))
    return table(cells, runs)


def estimators(runs: Sequence[Row]) -> str:
    """TROLL against clipping under each advantage, paired by seed."""
    lines = []
    for variant, rate in product(("", "no std", "rloo", "reinforce++"), (TUNED, HOT)):
        cells = [Cell(arm=(name, variant), rate=rate) for name in ("troll", "ppo_clip")]
        found = compare(*cells, runs) if variant or any(cell.runs(runs) for cell in cells) else None
        if found is not None:
            areas = [short(measures(list(cell.runs(runs).values()))["area"]) for cell in cells]
            lines.append([variant or "standardised", rate_text(rate), *areas, difference_text(found), str(found.seeds)])
    return markdown(("advantage", "rate", "TROLL", "clipping", "points", "seeds"), lines) if lines else "Not run yet.\n"


STARTED = ("troll", "dppo", "ppo_clip")
"""Objectives from other starts, clipping last."""


def starts(runs: Sequence[Row]) -> str:
    """Other warm starts and families: TROLL and DPPO against clipping, paired by seed."""
    lines = []
    for name in [*(f"llama-{seed}" for seed in (1, 2, 3)), *(f"{family}-1" for family in FAMILIES)]:
        for rate in (TUNED, HOT):
            cells = [Cell(arm=(arm, ""), rate=rate, others={"model": f"runs/starts/{name}"}) for arm in STARTED]
            *ours, clipping = cells
            found = [one for cell in ours if (one := compare(cell, clipping, runs)) is not None]
            if len(found) == len(ours):
                areas = [short(measures(list(cell.runs(runs).values()))["area"]) for cell in cells]
                seeds = str(min(one.seeds for one in found))
                lines.append([name, rate_text(rate), *areas, *map(difference_text, found), seeds])
    titles = ("start", "rate", "TROLL", "DPPO", "clipping", "TROLL − clipping", "DPPO − clipping", "seeds")
    return markdown(titles, lines) if lines else "Not run yet.\n"


def floor(runs: Sequence[Row]) -> str:
    """With one update per batch every objective is the same algorithm: what is left is chance."""
    found = defaultdict(list)
    for run in runs:
        if run["updates"] == 1 and run["passes"] == 1 and run["steps"] == 15:
            found[run["rate"], run["seed"], run["device"]].append(measures([run])["area"])
    spreads = [100 * stdev(areas) for areas in found.values() if len(areas) > 1]
    if not spreads:
        return "One update per batch, where all objectives are one algorithm, has not been run yet.\n"
    count = sum(len(areas) for areas in found.values() if len(areas) > 1)
    told = f"differ by {plain(fmean(spreads))} points (sd)" if any(spreads) else "have the same measurements to the last digit"
    return (
        f"With one update per batch all objectives are one algorithm: {count} runs of them, equal in seed and rate, {told}.\n"
    )


def stability(runs: Sequence[Row]) -> str:
    """Thousands of updates at a small constant rate with a sampler in fp8; rewards in training, at best and at last, beside."""
    lines = []
    for name, anchor in ANCHORED:
        others = {"sampler": "fp8", "anchor": anchor, "schedule": "constant"}
        size = {"passes": LONG["passes"], "steps": LONG["steps"], "every": LONG["eval_every"]}
        found = list(Cell(arm=(name, ""), rate=1e-4, others=others, **size).runs(runs).values())
        if found:
            rewards = [smoothed_rewards(run) for run in found]
            best, last = fmean(map(max, rewards)), fmean(curve[-1] for curve in rewards)
            lines.append([*cells_of(f"{name}, `{anchor}`", found), short(best), short(last)])
    return markdown((*HEAD, "reward, best", "reward, last"), lines) if lines else "Not run yet.\n"


def smoothed_rewards(run: Row) -> list[float]:
    """Rewards in training, means over 8 batches in a row; a dead run goes on at 0."""
    rewards = [line["reward"] for line in steps_of(run)]
    rewards += [0.0] * (run["steps"] - len(rewards))
    return [fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)]


def experts(runs: Sequence[Row]) -> str:
    """A mixture of experts with a sampler in fp8, by anchor."""
    cells = []
    for name, anchor in product(("dppo", "troll", "ppo_clip"), ("rollout", "old")):
        others = {"model": MOE, "sampler": "fp8", "anchor": anchor}
        cells.append((f"{name}, `{anchor}`", Cell(arm=(name, ""), rate=TUNED, others=others)))
    return table(cells, runs)


def rare(runs: Sequence[Row]) -> str:
    """Clipping lifted for rare tokens, beside clipping and DPPO, with one pass and with four."""
    if not any(run["objective"] == "rare_clip" for run in runs):
        return "Not run yet.\n"
    again = {"passes": 4, "steps": 10, "every": 2}
    cells = []
    for (rate, size), arm in product(((TUNED, {}), (TUNED, again), (HOT, {})), RARE):
        cell = Cell(arm=arm, rate=rate, **size)
        cells.append((f"{arm_name(arm)}, {8 * cell.passes} updates, {rate_text(rate)}", cell))
    return table(cells, runs)


def bounds(runs: Sequence[Row]) -> str:
    """DPPO by its bound, beside clipping."""
    arms = (("ppo_clip", ""), ("dppo", "δ=.1"), ("dppo", "δ=.15"), ("dppo", ""))
    cells = [(f"{arm_name(arm)}, {rate_text(rate)}", Cell(arm=arm, rate=rate)) for rate, arm in product((TUNED, HOT), arms)]
    return table([(name, cell) for name, cell in cells if cell.runs(runs)], runs)


def published(runs: Sequence[Row]) -> str:
    """Objectives as their papers average, against the common form of the same, paired by seed."""
    lines = []
    for arm, rate in product(PUBLISHED, (TUNED, HOT)):
        cells = [Cell(arm=form, rate=rate) for form in (arm, (arm[0], ""))]
        found = compare(*cells, runs)
        if found is not None:
            areas = [short(measures(list(cell.runs(runs).values()))["area"]) for cell in cells]
            lines.append([arm_name(arm), rate_text(rate), *areas, difference_text(found), str(found.seeds)])
    return markdown(("form", "rate", "area", "common form", "points", "seeds"), lines) if lines else "Not run yet.\n"


def difference_text(found: Difference) -> str:
    """Points with their interval, where there is one."""
    mean = found.mean
    return signed(mean.value) + ("" if mean.low is None or mean.high is None else f" [{plain(mean.low)} … {plain(mean.high)}]")
