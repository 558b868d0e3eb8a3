"""What the fresh seeds say of settings that were chosen on others: arms, named comparisons under Holm, rates."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import Any

from plans import CHOSEN, FRESH
from scipy import stats
from spec import START, Shipped
from study_table import Row, area, certificate, final, held_out, is_below_start, steps_of

from corral.report.statistics import Difference, difference, holm

LEVEL = 0.60
"""Success that rollouts are counted to."""
MARGIN = 0.02
"""Points by which "auto" may be behind a tuned rate."""
NAMES = (
    'TROLL, 4 passes, `"auto"` held at .03',
    "clipping, 4 passes at 2e-4",
    "clipping, one pass at 4e-4, twenty steps",
    'DPPO, 8 passes, `"auto"` held at .02',
    'clipping, 8 passes, `"auto"` held at .08',
    "TROLL, 4 passes at 2e-4",
)
"""Of `CHOSEN`, in its order."""
COMPARED = ((0, 1), (3, 1), (4, 1), (0, 5))
"""The comparisons that were named before a run was looked at, by their places in `CHOSEN`."""
Values = dict[str, float]
"""A number per seed."""


def signed(value: float) -> str:
    """`+.062`, `−.013`."""
    return f"{'−' if value < 0 else '+'}{abs(value):.3f}".replace("0.", ".")


def short(value: float) -> str:
    """`.578`."""
    return f"{value:.3f}".removeprefix("0")


def with_interval(values: Sequence[float]) -> str:
    """Mean and 95 % interval (Student) over seeds."""
    if len(values) < 2:
        return short(values[0])
    half = float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return f"{short(fmean(values))} ± {short(half)}"


def steps_to(run: Row, level: float = LEVEL) -> float:
    """Steps of rollouts until held-out success reaches `level`, straight between measurements; infinite where it never does."""
    for (before, low), (after, high) in pairwise(held_out(run)):
        if low < level <= high:
            return before + (after - before) * (level - low) / (high - low)
    return math.inf


def runs_of(runs: Sequence[Row], how: Mapping[str, Any], *, steps: int = 10) -> list[Row]:
    """Runs of a setting on fresh seeds, by seed."""
    spec = Shipped(**{"seed": 0, "steps": steps, **how})
    wanted = {"objective": spec.objective, "rate": spec.rate, "arm": spec.arm, "passes": spec.passes, "steps": spec.steps}
    found = [run for run in runs if wanted.items() <= run.items() and run["seed"] in FRESH and not run.get("reuse")]
    return sorted((run for run in found if run.get("start", START) == START), key=lambda run: run["seed"])


def by_seed(runs: Sequence[Row], read: Callable[[Row], float]) -> Values:
    """A number per seed."""
    return {str(run["seed"]): read(run) for run in runs}


def confirmed(runs: Sequence[Row]) -> list[list[str]]:
    """A line per chosen setting: seeds, area and final success with intervals, greedy success, steps to .60, KL."""
    lines = []
    for name, how in zip(NAMES, CHOSEN, strict=True):
        if not (found := runs_of(runs, how)):
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


def compared(runs: Sequence[Row]) -> str:
    """The named comparisons: paired differences of area, and which hold together."""
    pairs = [(a, b, *(by_seed(runs_of(runs, CHOSEN[place]), area) for place in (a, b))) for a, b in COMPARED]
    found: list[tuple[int, int, Difference]] = [
        (a, b, difference(ours, theirs)) for a, b, ours, theirs in pairs if ours and theirs
    ]
    lines = []
    for (a, b, one), holds in zip(found, holm([one.p for *_, one in found]), strict=True):
        low, high = one.mean.low, one.mean.high
        interval = "no interval" if low is None or high is None else f"{signed(low)} to {signed(high)}"
        verdict = "holds" if holds else "does not show"
        lines.append(f"- {NAMES[a]}, against {NAMES[b]}: {signed(one.mean.value)} ({interval}; {one.seeds} seeds): {verdict}.")
    return "\n".join(lines) + "\n"


def not_worse(ours: Values, theirs: Values, margin: float = MARGIN) -> tuple[float, float, bool]:
    """Mean paired difference, its one-sided lower 95 % bound, and whether that is above −margin."""
    gaps = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    error = stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.inf
    low = fmean(gaps) - float(stats.t.ppf(0.95, max(len(gaps) - 1, 1))) * error
    return fmean(gaps), low, low >= -margin


def auto_against_tuned(runs: Sequence[Row]) -> str:
    """A line per objective: "auto" against the demo's own rate, one pass, fifteen steps."""
    lines = []
    for objective in ("troll", "ppo_clip"):
        one = {"objective": objective, "passes": 1}
        auto = runs_of(runs, {**one, "rate": "auto", "bound": 0.03}, steps=15)
        tuned = runs_of(runs, {**one, "rate": 2e-4}, steps=15)
        if len({run["seed"] for run in auto} & {run["seed"] for run in tuned}) < 2:
            continue
        said = []
        for name, read in (("final", final), ("area", area)):
            mean, low, holds = not_worse(by_seed(auto, read), by_seed(tuned, read))
            told = "not inferior by 2 points" if holds else "may be inferior by 2 points"
            said.append(f"{name} {signed(mean)}, at least {signed(low)}: {told}")
        lines.append(f'- {objective}, `"auto"` less 2e-4 ({len(auto)} and {len(tuned)} seeds): {"; ".join(said)}.')
    return "\n".join(lines) + "\n"


def collapses(runs: Sequence[Row]) -> str:
    """How many held runs of the trainer as it ships fell below their start."""
    held = [run for run in runs if "passes" in run and run["arm"] != "off"]
    fallen = [run for run in held if run["dead"] or is_below_start(run)]
    return (
        f"Of {len(held)} held runs, {len(fallen)} had a measurement below its start, {sum(run['dead'] for run in held)} died.\n"
    )
