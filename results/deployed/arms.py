"""Arms that hold the network at rates far too large, on the demo and on pretrained models: tables of docs/results/deployed.md."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from corral.lab.report.statistics import Difference, difference
from results.packed import FOLDER, Row, read
from results.pages import markdown, numbers, rate_text, signed, two_digits
from results.runs import (
    DEFAULTS,
    DEPLOYED,
    EVIDENCE,
    area,
    by_seed,
    final,
    finished,
    greedy,
    group,
    held_out,
    is_below_start,
    kl,
    mean,
    where,
    with_interval,
    with_start,
)  # fmt: skip

STEPS = 10
SHIPS = "auto_mean"
"""The arm that the trainer has."""
ARMS = {
    "tuned": "nothing held",
    "auto_mean": "**controlled by the mean, retracted by the mean at 2 δ**",
    "auto": "controlled by the mean, retracted by p99.9",
    "auto_redo": "controlled, batches redone below a share of ½",
    "redo": "redone, not controlled",
    "mean": "retracted by the mean alone",
    "p999": "retracted by p99.9 alone",
    "cvar": "retracted by CVaR alone",
    "k3": "retracted by the sampled k3 alone",
    "accept": "retracted by the mean, accepted on a held-out quarter",
    "rate_first": "rate controlled by k3, first batch redone, no retraction",
    "rate_k3": "rate controlled by k3 alone",
    "rate_mean": "rate controlled by the mean alone",
    "rate_update": "rate controlled after every update (rsl_rl's rule)",
    "lookahead": "Lookahead, share ¼ at 1e-3 and .03 at 1e-2",
    "ema": "EMA of the policy, .8 a batch",
    "stop": "stopped at a target KL (k3)",
    "calm": "warm-up, gradients clipped at .2",
    "none": "nothing held",
}
"""Arms in the order of the page."""
FRESH = 406
"""Runs of seeds from here on confirm what those before them found, on the evidence's own page."""


def measured(runs: Sequence[Row], against: Sequence[Row]) -> list[str]:
    """Cells of a setting: area, its paired difference, final and greedy success, and how far the network goes."""
    cells = [with_interval(list(map(area, runs))), behind(runs, against), mean(runs, final), mean(runs, greedy)]
    return [*cells, kl(runs, "mean"), kl(runs, "p999")]


def behind(ours: Sequence[Row], theirs: Sequence[Row]) -> str:
    """The paired difference of area with its 95 % interval; a dash without any pair, or between runs and themselves."""
    mine, others = by_seed(ours, area), by_seed(theirs, area)
    gaps = [mine[seed] - others[seed] for seed in mine if seed in others]
    if not gaps or ours == theirs:
        return "–"
    return with_interval(gaps, signed)


def gate0(runs: Sequence[Row], schedule: str) -> str:
    """Every arm at every rate on the demo."""
    some = [run for run in where(runs, schedule=schedule, steps=STEPS, objective="ppo_clip") if "held" in run]
    return with_start(gate0_table(some))


def gate0_words(runs: Sequence[Row], schedule: str) -> str:
    """Every arm at every rate on SmolLM2."""
    some = [run for run in where(runs, schedule=schedule, recipe="evidence-b") if "held" in run]
    return gate0_table(some, ARMS | {"lookahead": "Lookahead, share .03"})


def gate0_table(runs: Sequence[Row], names: Mapping[str, str] = ARMS) -> str:
    """Arms in the order of their names, each at its rates, beside the one that ships at the same rate."""
    found = group(runs, "arm", "rate")
    ships = [cell for (arm, _), cell in found.items() if arm == SHIPS]
    only = ships[0] if len(ships) == 1 else []  # at one rate alone, it is what every other is compared with
    lines, before = [], ""
    for arm, name in names.items():
        for rate in sorted(rate for of, rate in found if of == arm):
            some = found[arm, rate]
            shown, before = "" if name == before else name, name
            lines.append([shown, rate_text(rate), str(len(some)), *measured(some, found.get((SHIPS, rate), only))])
    return markdown(("arm", "rate", "n", "area", "less the bold arm's", "final", "greedy", "KL mean", "p99.9"), lines)


def pretrained(base: str) -> str:
    """Every objective and number of passes of a pretrained model: at its best unheld rate, then held, at rates nobody tuned."""
    runs = [run for run in finished(DEPLOYED, EVIDENCE) if run["base"] == base and "held" not in run]
    return pretrained_table([run for run in runs if run["seed"] < FRESH])


def pretrained_table(runs: Sequence[Row]) -> str:
    """Rows for arms that have held runs; the best of the rates that have the most seeds is that of the largest mean area."""
    lines = []
    for (objective, passes), members in group(runs, "objective", "passes").items():
        unheld = {rate: some for (rate,), some in group(where(members, arm="off"), "rate").items()}
        held = group([run for run in members if run["arm"] != "off"], "bound", "rate", "schedule")
        if not (held and unheld):
            continue
        best = max(unheld, key=lambda rate: (len(unheld[rate]), fmean(map(area, unheld[rate]))))
        arms = [("no", best, unheld[best])]
        arms += [("no", 1e-3, some) for rate, some in unheld.items() if rate == 1e-3]  # as far off as the held runs' rates are
        for (bound, rate, schedule), some in sorted(held.items(), key=lambda item: str(item[0][1])):
            arms.append((two_digits(bound) + (", constant" if schedule == "constant" else ""), rate, some))
        for how, rate, some in arms:
            fallen = f"{sum(map(is_below_start, some))} of {len(some)}"
            lines.append([objective, str(passes), how, rate_text(rate), str(len(some)), *measured(some, unheld[best]), fallen])
    head = ("objective", "passes", "held at", "rate", "n", "area", "less the best unheld rate's", "final", "greedy", "KL mean")
    return markdown((*head, "p99.9", "below its start"), lines)


def start_over() -> str:
    """Success after 5 and 10 steps at a far too large learning rate, by whether the optimizer starts over, of each seed."""
    names = {"before": "moments kept, rate down to a quarter", "after": "the optimizer starts over"}
    lines = []
    for (objective, code), members in group(read(FOLDER / "deployed/start-over.parquet"), "objective", "code").items():
        found = [dict(held_out(run | {"dead": False})) for run in members]
        lines.append([objective, names[code], *(numbers(points[step] for points in found) for step in (5.0, 10.0))])
    return markdown(("objective", "", "after 5 steps", "after 10"), lines)


def first_batches(runs: Sequence[Row]) -> str:
    """Rows for what the first five batches pay for a rate that is found: mean training reward, and its loss in points.

    Runs at "auto" are told apart by their bound, and by the aim of the search in bounds. Each is paired with the run of its
    seed and device at the rate that a grid chose.
    """

    def reward(run: Row) -> float:
        return 100 * fmean(line["reward"] for line in run["lines"] if 1 <= line["step"] <= 5)

    lines = []
    models = {"": "embedded", "smollm2": "SmolLM2", "qwen": "Qwen 0.5B"}
    for (base, objective, passes), members in group([DEFAULTS | run for run in runs], "base", "objective", "passes").items():
        grid = by_seed(where(members, bound=math.inf), reward)
        for (bound, aim), auto in sorted(group(where(members, rate="auto"), "bound", "aim").items()):
            found = by_seed(auto, reward)
            pairs = [seed for seed in found if seed in grid]
            if len(pairs) < 2:
                continue
            first = fmean(line["learning_rate"] for run in auto for line in run["lines"] if line["step"] == 1)
            means = [f"{fmean(some[seed] for seed in pairs):.1f}" for some in (found, grid)]
            about = [models[base], objective, str(passes), f"{bound:g}", f"{aim:g}", f"{first:.1e}".replace("e-0", "e-")]
            lines.append([*about, *means, points(difference(found, grid))])
    lines.sort(key=lambda line: (list(models.values()).index(line[0]), int(line[2])))
    head = ("model", "objective", "passes", "bound", "aim", "first rate", "auto, %", "grid, %", "auto − grid, points")
    return markdown(head, lines)


def points(found: Difference) -> str:
    """`−2.2 (−3.5 to −1.0; 3 seeds)`."""
    value, *ends = (
        None if one is None else f"{one:+.1f}".replace("-", "−").replace("0.", ".", one**2 < 1)
        for one in (found.mean.value, found.mean.low, found.mean.high)
    )
    return f"{value} ({' to '.join(ends) + '; ' if None not in ends else ''}{found.seeds} seeds)"
