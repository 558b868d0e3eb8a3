"""Ways to bound the network at learning rates far too large: tables of docs/results/deployed.md."""

import math
from collections.abc import Sequence
from statistics import fmean

from corral.lab.report.statistics import Difference, difference
from results.packed import Row
from results.pages import interval_text, markdown, rate_text, two_digits
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
    is_below_start,
    kl,
    mean,
    percent,
    where,
)  # fmt: skip
from results.spec import PRETRAINED

STEPS = 10
PLACES = (("demo", 1e-3), ("demo", 1e-2), (PRETRAINED, 1e-3))
"""Recipe and learning rate, all far too large."""
SHIPS = "auto_mean"
"""The arm that the trainer has."""
ARMS = {
    "auto_mean": "**rate follows the mean KL, retraction by the mean KL: what the trainer has**",
    "auto": "rate follows the mean KL, retraction by p99.9",
    "auto_redo": "rate follows the mean KL, batches redone where less than half is kept",
    "redo": "batches redone",
    "mean": "retraction by the mean KL",
    "p999": "retraction by p99.9",
    "cvar": "retraction by CVaR",
    "k3": "retraction by the sampled k3",
    "accept": "retraction by the mean KL, accepted on a held-out quarter",
    "rate_first": "rate follows k3, first batch redone",
    "rate_k3": "rate follows k3",
    "rate_mean": "rate follows the mean KL",
    "rate_update": "rate follows the KL after every update (rsl_rl)",
    "lookahead": "Lookahead",
    "ema": "EMA of the policy, .8 a batch",
    "stop": "stopped at a target KL (k3)",
    "calm": "warm-up, gradients clipped at .2",
    "none": "no bound",
}
"""Arms in the order of the page."""
SHIPPED = {"rate": "auto", "aim": 2.0}
BOUNDS = {1: 0.03, 4: 0.02}
"""Of `"auto"` by passes, and what its search on the first batch aims at, in bounds."""
FRESH = 406
"""Runs of seeds from here on confirm what those before them found, on the evidence's own page."""


def mechanisms(runs: Sequence[Row]) -> str:
    """Every arm with clipping and a constant schedule, against the one that the trainer has: points of mean success."""
    some = [run for run in where(runs, schedule="constant", steps=STEPS, objective="ppo_clip") if "held" in run]
    found = group(some, "arm", "recipe", "rate")
    lines = []
    for arm, name in ARMS.items():
        cells = []
        for recipe, rate in PLACES:
            own, ships = found.get((arm, recipe, rate)), found[SHIPS, recipe, rate]
            gap = None if own is None or arm == SHIPS else difference(*(by_seed(side, percent) for side in (own, ships)))
            shown = f"{mean(ships, area)} over the run" if arm == SHIPS else interval_text(gap)
            cells.append(shown + (f", {gap.seeds} seeds" if gap and gap.seeds < 3 else ""))
        lines += [[name, *cells]] if any(cell != "–" for cell in cells) else []
    return markdown(
        ("arm", *(f"{'embedded' if recipe == 'demo' else 'SmolLM2'}, {rate_text(rate)}" for recipe, rate in PLACES)), lines
    )


def behind(base: str, objective: str, rate: float) -> Difference:
    """Points of one pass at "auto" over a tuned rate on a pretrained model, on the seeds that chose this rate."""
    runs = [run for run in finished(DEPLOYED, EVIDENCE) if run["base"] == base and "held" not in run and run["seed"] < FRESH]
    runs = where(runs, objective=objective, passes=1)
    return difference(*(by_seed(where(runs, rate=one), percent) for one in ("auto", rate)))


def pretrained(base: str) -> str:
    """Every objective and number of passes of a pretrained model: at its best unheld rate, then held, at rates nobody tuned."""
    runs = [run for run in finished(DEPLOYED, EVIDENCE) if run["base"] == base and "held" not in run]
    return pretrained_table([run for run in runs if run["seed"] < FRESH])


def pretrained_table(runs: Sequence[Row]) -> str:
    """Rows for arms that have bounded runs; the best of the rates that have the most seeds is that of the most mean success."""
    lines = []
    for (objective, passes), members in group(runs, "objective", "passes").items():
        unbounded = {rate: some for (rate,), some in group(where(members, arm="off"), "rate").items()}
        bounded = group([run for run in members if run["arm"] != "off"], "bound", "rate", "schedule")
        if not (bounded and unbounded):
            continue
        best = max(unbounded, key=lambda rate: (len(unbounded[rate]), fmean(map(area, unbounded[rate]))))
        arms = [("no", best, unbounded[best])]
        arms += [("no", 1e-3, some) for rate, some in unbounded.items() if rate == 1e-3]  # as far off as the bounded runs are
        for (bound, rate, schedule), some in sorted(bounded.items(), key=lambda item: str(item[0][1])):
            arms.append((two_digits(bound) + (", constant" if schedule == "constant" else ""), rate, some))
        for how, rate, some in arms:
            sides = [by_seed(side, percent) for side in (some, unbounded[best])]
            gap = "–" if some == unbounded[best] or not sides[0].keys() & sides[1].keys() else interval_text(difference(*sides))
            cells = [mean(some, area), gap, mean(some, final), mean(some, greedy), kl(some, "mean")]
            fallen = f"{sum(map(is_below_start, some))} of {len(some)}"
            lines.append([objective, str(passes), how, rate_text(rate), *cells, fallen])
    head = ("objective", "passes", "bound", "rate", "mean success", "points over the best rate (95 %)", "at the end", "greedy")
    return markdown((*head, "KL", "below its start"), lines)


def first_batches(runs: Sequence[Row]) -> str:
    """Rows for what the first five batches pay for a rate that is found: mean training reward, and its loss in points.

    Runs at "auto" with the bound and the search that it has now. Each is paired with the run of its seed and device at the rate
    that a grid chose.
    """

    def reward(run: Row) -> float:
        return 100 * fmean(line["reward"] for line in run["lines"] if 1 <= line["step"] <= 5)

    lines = []
    models = {"": "embedded", "smollm2": "SmolLM2"}
    found = group([DEFAULTS | run for run in runs], "base", "objective", "passes")
    for (base, objective, passes), members in sorted(found.items(), key=lambda item: (item[0][0], item[0][2], item[0][1])):
        auto, grid = (
            by_seed(where(members, **how), reward) for how in (SHIPPED | {"bound": BOUNDS[passes]}, {"bound": math.inf})
        )
        pairs = auto.keys() & grid.keys()
        if base in models and len(pairs) > 1:
            means = [f"{fmean(some[seed] for seed in pairs):.1f}" for some in (auto, grid)]
            gap = difference(auto, grid)
            lines.append([models[base], objective, str(passes), *means, interval_text(gap), str(gap.seeds)])
    return markdown(("model", "objective", "passes", "auto, %", "grid, %", "points (95 %)", "seeds"), lines)
