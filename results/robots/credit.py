"""Why TCE stands still on hopper jump: runs of the plan `hopper-credit`."""

from collections.abc import Sequence

import numpy as np

from corral.lab.report.statistics import difference, holm, sentence
from results.packed import Row
from results.pages import spaced_table

SAID = {
    "tce": "TCE",
    "tce-to-go": "TCE, credit for what comes later",
    "tce-plans": "TCE, four plans a context",
    "tce-plans-to-go": "TCE, four plans a context, credit for what comes later",
    "tce-moving": "TCE, credit for what comes later, segments of the first second",
    "tce-take-off": "TCE, paid at take-off",
    "bbrl": "BBRL",
    "bbrl-plans": "BBRL, four plans a context",
}
"""Rows of the plan, in words; each is compared with the first."""


def block(runs: Sequence[Row]) -> str:
    """Ends of all seeds, and each row against plain TCE by pairs of equal seeds, all comparisons made together."""
    ends = {row: {run["seed"]: run["curve"][-1] for run in runs if run["row"] == row} for row in SAID}
    ends = {row: seeds for row, seeds in ends.items() if seeds}
    paid = {row: {seed: end[1] for seed, end in seeds.items()} for row, seeds in ends.items()}
    lines = []
    for row, seeds in ends.items():
        each = ", ".join(f"{value:.1f}" for value in paid[row].values())
        success = 100 * np.mean([end[2] for end in seeds.values()])
        lines.append([SAID[row], str(len(seeds)), each, f"{np.mean(list(paid[row].values())):.1f}", f"{success:.0f}"])
    others = [row for row in ends if row != "tce"]
    made = [difference(paid[row], paid["tce"]) for row in others]
    said = [
        sentence(SAID[row], "TCE", "return", found, holds=holds, among=len(made), unit="")
        for row, found, holds in zip(others, made, holm([found.p for found in made]), strict=True)
    ]
    table = spaced_table(["2 million steps", "seeds", "return of each", "mean", "success, %"], lines)
    return table + "\n" + "".join(f"- {one}\n" for one in said)
