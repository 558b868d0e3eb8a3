"""Why TCE stands still on hopper jump: runs of the plan `hopper-credit`."""

from collections.abc import Sequence

import numpy as np

from corral.lab.report.statistics import difference, holm
from results.packed import Row
from results.pages import interval_text, p_text, spaced_table

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
    """Ends of all seeds, and each row less plain TCE by pairs of equal seeds, all comparisons corrected together."""
    ends = {row: {run["seed"]: run["curve"][-1] for run in runs if run["row"] == row} for row in SAID}
    ends = {row: seeds for row, seeds in ends.items() if seeds}
    paid = {row: {seed: end[1] for seed, end in seeds.items()} for row, seeds in ends.items()}
    gaps = {row: difference(paid[row], paid["tce"]) for row in ends if row != "tce"}
    adjusted = dict(zip(gaps, holm([gap.p for gap in gaps.values()]), strict=True))
    lines = []
    for row, seeds in ends.items():
        cells = [", ".join(f"{value:.1f}" for value in paid[row].values()), f"{np.mean(list(paid[row].values())):.1f}"]
        cells.append(f"{100 * np.mean([end[2] for end in seeds.values()]):.0f}")
        compared = [interval_text(gaps[row]), p_text(adjusted[row])] if row in gaps else ["–", "–"]
        lines.append([SAID[row], str(len(seeds)), *cells, *compared])
    head = ["2 million steps", "seeds", "return of each", "mean", "success, %", "return over TCE (95 %)", "p (Holm)"]
    return spaced_table(head, lines)
