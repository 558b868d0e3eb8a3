"""Settings chosen on some seeds, confirmed on fresh ones: named comparisons under Holm, other tasks and starts."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from corral.lab.report.statistics import difference, holm
from results.packed import Row
from results.pages import interval_text, markdown, numbers, p_text, short, two_digits
from results.plans import CHOSEN, FRESH, MANY
from results.runs import (
    area,
    at_best,
    by_seed,
    final,
    greedy,
    held_out,
    is_below_start,
    kl,
    mean,
    percent,
    starts,
    where,
    with_interval,
    with_start,
)  # fmt: skip
from results.spec import START, Run

LEVEL = 0.60
"""Success that rollouts are counted to."""
WIDE = 0.03
"""The widest bound that is advised."""
NAMES = (
    'TROLL, 4 passes, `"auto"`, bound .03',
    "clipping, 4 passes at 2e-4",
    "clipping, one pass at 4e-4, twenty steps",
    'DPPO, 8 passes, `"auto"`, bound .02',
    'clipping, 8 passes, `"auto"`, bound .08',
    "TROLL, 4 passes at 2e-4",
)
"""Of `CHOSEN`, in its order."""
MANY_NAMES = (
    'TROLL, `"auto"`, bound .01, constant',
    'clipping, `"auto"`, bound .02, constant',
    'DPPO, `"auto"`, bound .02, constant',
    "clipping at 1e-4, constant",
    "TROLL at 1e-4, constant",
)
"""Of `MANY`, all with four passes."""
SETTINGS: dict[str, Mapping[str, Any]] = dict(zip((*NAMES, *MANY_NAMES), (*CHOSEN, *MANY), strict=True))
COMPARED = ((NAMES[0], NAMES[1]), (NAMES[3], NAMES[1]), (NAMES[4], NAMES[1]), (NAMES[0], NAMES[5]))
"""The comparisons that were named before a run was looked at."""
MANY_COMPARED = (
    (MANY_NAMES[0], NAMES[0]),
    (MANY_NAMES[0], MANY_NAMES[4]),
    (MANY_NAMES[1], NAMES[1]),
    (MANY_NAMES[1], MANY_NAMES[3]),
    (MANY_NAMES[2], NAMES[1]),
)
"""The same of several passes with a constant schedule: against what was the best before, and against the schedule alone."""
ELSEWHERE = {
    "n_max29": "countdown, numbers never seen",
    "n_max9": "countdown, numbers to 9",
    "arithmetic": "sums and differences of three digits",
    "start1": "another warm start",
    "start2": "another",
    "start3": "another",
    "gemma": "Gemma 2's architecture",
}
"""Starts other than the demo's, in the order of the page."""


def steps_to(run: Row, level: float = LEVEL) -> float:
    """Steps of rollouts until held-out success reaches `level`, straight between measurements; infinite where it never does."""
    for (before, low), (after, high) in pairwise(held_out(run)):
        if low < level <= high:
            return before + (after - before) * (level - low) / (high - low)
    return math.inf


def runs_of(runs: Sequence[Row], how: Mapping[str, Any], *, steps: int = 10, start: str = START) -> list[Row]:
    """Runs of a setting on fresh seeds, by seed."""
    spec = Run(**{"seed": 0, "steps": steps, **how})
    wanted = {name: getattr(spec, name) for name in ("objective", "rate", "arm", "passes", "steps", "schedule")}
    return sorted(where(runs, **wanted, start=start, seed=FRESH, reuse=None), key=lambda run: run["seed"])


def confirmed_table(runs: Sequence[Row], names: Sequence[str] = NAMES) -> str:
    """The chosen settings, and what the start can do."""
    head = ("setting", "n", "mean success", "at the end", "greedy", "steps to .60 (runs that get there)", "KL")
    return with_start(markdown(head, confirmed(runs, names)))


def confirmed(runs: Sequence[Row], names: Sequence[str] = NAMES) -> list[list[str]]:
    """A line per chosen setting: seeds, area and final success with intervals, greedy success, steps to .60, KL."""
    lines = []
    for name in names:
        if found := runs_of(runs, SETTINGS[name]):
            took = [steps_to(run) for run in found]
            middle = f"{median(took):.1f}" if math.isfinite(median(took)) else f"over {found[0]['steps']}"
            cells = [with_interval(list(map(read, found))) for read in (area, final)]
            cells += [mean(found, greedy), f"{middle} ({sum(map(math.isfinite, took))} of {len(found)})", kl(found, "mean")]
            lines.append([name, str(len(found)), *cells])
    return lines


def verdicts(runs: Sequence[Row], named: Sequence[tuple[str, str]] = COMPARED) -> list[list[str]]:
    """The named comparisons: differences of mean success, paired where they can be, corrected together."""
    pairs = [(a, b, *(by_seed(runs_of(runs, SETTINGS[name]), percent) for name in (a, b))) for a, b in named]
    found = [(f"{a} − {b}", difference(ours, theirs)) for a, b, ours, theirs in pairs if ours and theirs]
    adjusted = holm([one.p for _, one in found])
    return [[name, interval_text(one), str(one.seeds), p_text(p)] for (name, one), p in zip(found, adjusted, strict=True)]


def compared(runs: Sequence[Row], named: Sequence[tuple[str, str]] = COMPARED) -> str:
    """The named comparisons as a table."""
    return markdown(("difference", "points (95 %)", "seeds", "p (Holm)"), verdicts(runs, named))


def runs_elsewhere(runs: Sequence[Row]) -> dict[str, tuple[list[Row], list[Row]]]:
    """TROLL's and clipping's runs by start, where there are any of both."""
    found = {start: tuple(runs_of(runs, CHOSEN[place], start=start) for place in (0, 1)) for start in ELSEWHERE}
    return {start: (ours, theirs) for start, (ours, theirs) in found.items() if ours and theirs}


def places_above(runs: Sequence[Row]) -> tuple[int, int]:
    """Number of other tasks and starts on which TROLL's mean is above clipping's, and number of all."""
    sides = runs_elsewhere(runs).values()
    return sum(fmean(map(final, ours)) > fmean(map(final, theirs)) for ours, theirs in sides), len(sides)


def elsewhere(runs: Sequence[Row]) -> str:
    """TROLL and clipping as they were chosen for the demo, on other tasks, starts and families: success after ten steps."""
    lines, known = [], starts()
    for start, sides in runs_elsewhere(runs).items():
        begin = [short(at[1.0]), at_best(at, "{success} at {at}")] if (at := known.get(start)) else ["–", "–"]
        gap = difference(*(by_seed(side, lambda run: 100 * final(run)) for side in sides))
        lines.append([ELSEWHERE[start], *begin, *(numbers(map(final, side)) for side in sides), interval_text(gap)])
    head = ("task or start", "start", "at its best temperature", "TROLL", "clipping", "points (95 %)")
    return markdown(head, lines)


def collapses(runs: Sequence[Row]) -> str:
    """Number of bounded runs that fell below their start, at bounds up to .03 and at wider ones."""
    held, said = [run for run in runs if "passes" in run and run["arm"] != "off"], []
    for name, wide in ((f"{two_digits(WIDE)} or less", False), ("more", True)):
        some = [run for run in held if (run.get("bound", 0.02) > WIDE) == wide]
        fallen, died = sum(run["dead"] or is_below_start(run) for run in some), sum(run["dead"] for run in some)
        said.append(f"of {len(some)} runs with a bound of {name}, {fallen} had a measurement below the start and {died} died")
    text = "; ".join(said)
    return f"{text[0].upper()}{text[1:]}.\n"
