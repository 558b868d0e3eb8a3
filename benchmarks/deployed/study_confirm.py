"""What the fresh seeds say of settings that were chosen on others: named comparisons under Holm, other tasks and starts."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from plans import CHOSEN, FRESH, MANY
from spec import START, Shipped
from study_table import Row, area, certificate, final, held_out, is_below_start, steps_of
from study_text import (
    best_temperature,
    by_seed,
    markdown,
    numbers,
    short,
    signed,
    start_success,
    two_digits,
    with_interval,
    with_start,
)

from corral.lab.report.statistics import Difference, difference, holm

LEVEL = 0.60
"""Success that rollouts are counted to."""
WIDE = 0.03
"""The widest bound that is advised."""
NAMES = (
    'TROLL, 4 passes, `"auto"` held at .03',
    "clipping, 4 passes at 2e-4",
    "clipping, one pass at 4e-4, twenty steps",
    'DPPO, 8 passes, `"auto"` held at .02',
    'clipping, 8 passes, `"auto"` held at .08',
    "TROLL, 4 passes at 2e-4",
)
"""Of `CHOSEN`, in its order."""
MANY_NAMES = (
    'TROLL, `"auto"` held at .01, constant',
    'clipping, `"auto"` held at .02, constant',
    'DPPO, `"auto"` held at .02, constant',
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


def steps_to(run: Row, level: float = LEVEL) -> float:
    """Steps of rollouts until held-out success reaches `level`, straight between measurements; infinite where it never does."""
    for (before, low), (after, high) in pairwise(held_out(run)):
        if low < level <= high:
            return before + (after - before) * (level - low) / (high - low)
    return math.inf


def runs_of(runs: Sequence[Row], how: Mapping[str, Any], *, steps: int = 10, start: str = START) -> list[Row]:
    """Runs of a setting on fresh seeds, by seed."""
    spec = Shipped(**{"seed": 0, "steps": steps, **how})
    wanted = {"objective": spec.objective, "rate": spec.rate, "arm": spec.arm, "passes": spec.passes, "steps": spec.steps}
    found = [run for run in runs if wanted.items() <= run.items() and run["seed"] in FRESH and not run.get("reuse")]
    found = [run for run in found if run.get("schedule", spec.schedule) == spec.schedule]
    return sorted((run for run in found if run.get("start", START) == start), key=lambda run: run["seed"])


CONFIRMED = (
    "setting",
    "n",
    "area over the run",
    "final, 4,096 problems",
    "greedy",
    "steps to .60 (runs that get there)",
    "KL mean",
)


def confirmed_table(runs: Sequence[Row], names: Sequence[str] = NAMES) -> str:
    """The chosen settings, and what the start can do."""
    return with_start(markdown(CONFIRMED, confirmed(runs, names)))


def confirmed(runs: Sequence[Row], names: Sequence[str] = NAMES) -> list[list[str]]:
    """A line per chosen setting: seeds, area and final success with intervals, greedy success, steps to .60, KL."""
    lines = []
    for name in names:
        if not (found := runs_of(runs, SETTINGS[name])):
            continue
        took = [steps_to(run) for run in found]
        reached = sum(map(math.isfinite, took))
        middle = f"{median(took):.1f}" if math.isfinite(median(took)) else f"over {found[0]['steps']}"
        moved = fmean(certificate(line, "mean") for run in found for line in steps_of(run))
        cells = [with_interval([read(run) for run in found]) for read in (area, final)]
        cells += [
            short(fmean(final(run, "greedy") for run in found)),
            f"{middle} ({reached} of {len(found)})",
            f"{moved:.2g}".removeprefix("0"),
        ]
        lines.append([name, str(len(found)), *cells])
    return lines


def compared(runs: Sequence[Row], named: Sequence[tuple[str, str]] = COMPARED) -> str:
    """The named comparisons: differences of area, paired where they can be, and which hold together."""
    pairs = [(a, b, *(by_seed(runs_of(runs, SETTINGS[name]), area) for name in (a, b))) for a, b in named]
    found: list[tuple[str, str, Difference]] = [
        (a, b, difference(ours, theirs)) for a, b, ours, theirs in pairs if ours and theirs
    ]
    lines = []
    for (a, b, one), holds in zip(found, holm([one.p for *_, one in found]), strict=True):
        low, high = one.mean.low, one.mean.high
        interval = "no interval" if low is None or high is None else f"{signed(low)} to {signed(high)}"
        verdict = "holds" if holds else "does not show"
        seeds = f"{one.seeds} seeds" if one.paired else f"{one.seeds} runs each"
        lines.append(f"- {a}, against {b}: {signed(one.mean.value)} ({interval}; {seeds}): {verdict}.")
    return "\n".join(lines) + "\n"


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


def runs_elsewhere(runs: Sequence[Row]) -> dict[str, tuple[list[Row], list[Row]]]:
    """TROLL's and clipping's runs by start, where there are any of both."""
    found = {start: tuple(runs_of(runs, CHOSEN[place], start=start) for place in (0, 1)) for start in ELSEWHERE}
    return {start: (ours, theirs) for start, (ours, theirs) in found.items() if ours and theirs}


def places_above(runs: Sequence[Row]) -> tuple[int, int]:
    """On how many of the other tasks and starts TROLL's mean is above clipping's, and how many there are."""
    sides = runs_elsewhere(runs).values()
    return sum(fmean(map(final, ours)) > fmean(map(final, theirs)) for ours, theirs in sides), len(sides)


def elsewhere(runs: Sequence[Row]) -> str:
    """TROLL and clipping as they were chosen for the demo, on other tasks, starts and families: success after ten steps."""
    lines, known = [], start_success()
    for start, (ours, theirs) in runs_elsewhere(runs).items():
        name = ELSEWHERE[start]
        at = known.get(start, {})
        best = (
            f"{short(at[best_temperature(at)])} at {two_digits(best_temperature(at)) if best_temperature(at) else 'greedy'}"
            if at
            else "–"
        )
        cells = [short(at[1.0]) if at else "–", best, *(numbers(map(final, side)) for side in (ours, theirs))]
        gap = difference(by_seed(ours, final), by_seed(theirs, final))
        interval = (
            "" if gap.mean.low is None or gap.mean.high is None else f" ({signed(gap.mean.low)} to {signed(gap.mean.high)})"
        )
        lines.append([name, *cells, f"{signed(gap.mean.value)}{interval}"])
    head = (
        "task or start",
        "start",
        "at its best temperature",
        "TROLL, 4 passes, `auto` at .03",
        "clipping, 4 passes",
        "difference",
    )
    return markdown(head, lines)


def collapses(runs: Sequence[Row]) -> str:
    """How many held runs of the trainer as it ships fell below their start, at bounds up to .03 and wider ones."""
    held = [run for run in runs if "passes" in run and run["arm"] != "off"]
    narrow = [run for run in held if (run["bound"] or 0.02) <= WIDE]
    wide = [run for run in held if (run["bound"] or 0.02) > WIDE]
    said = []
    for name, some in ((f"{two_digits(WIDE)} or less", narrow), ("more", wide)):
        fallen, died = sum(run["dead"] or is_below_start(run) for run in some), sum(run["dead"] for run in some)
        said.append(f"of {len(some)} runs held at {name}, {fallen} had a measurement below the start and {died} died")
    text = "; ".join(said)
    return f"{text[0].upper()}{text[1:]}.\n"
