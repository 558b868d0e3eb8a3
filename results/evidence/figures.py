"""Figures of docs/results/llm.md: the map over rates, reuse of batches, pretrained models, TROLL's ablations."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from corral.lab.report.looks import LIGHT, MARKERS, Look, assign_looks
from results.evidence.cells import Cell, arm_name, compare, word_cell
from results.evidence.tables import OFTEN, RATES
from results.packed import Row
from results.pages import draw_line, new_figure, rate_text, save_figure
from results.plans import ABLATIONS, ARMS, GEMMA_RATES, SEEDS, WORD_ARMS, WORD_RATES
from results.runs import area, where


def draw(runs: Sequence[Row], folder: Path) -> None:
    """Write every figure for which there are runs."""
    for name, paint in PAINTS.items():
        figure, (axes,) = new_figure(figsize=(7.2, 3.8))
        axes.spines[["top", "right"]].set_visible(False)
        if paint(axes, runs):
            save_figure(figure, folder / f"llm-{name}.svg")


def _paint_arms(axes: Any, runs: Sequence[Row], rates: Sequence[float], words: str, **size: Any) -> bool:
    """Mean success by learning rate of every contestant; dotted where its colour is close to another's."""
    looks = assign_looks([" ".join(filter(None, (arm[0], arm[1].replace(" ", "-")))) for arm in ARMS])
    for arm, look in zip(ARMS, looks.values(), strict=True):
        style = "--" if arm[1] else ":" if arm[0] == "drpo" else "-"
        _line(axes, runs, rates, partial(Cell, arm=arm, **size), arm_name(arm), look, style)
    axes.set(xscale="log", xlabel=f"learning rate{words}")
    return _end(axes, size.get("steps", 15), rates)


def _paint_words(axes: Any, runs: Sequence[Row], base: str, rates: Sequence[float]) -> bool:
    """Mean success of a pretrained model by learning rate, and beside the rates at "auto", where the network is bounded."""
    looks, automatic = assign_looks([arm for arm, _ in WORD_ARMS]), list[float]()
    for objective, passes in (*WORD_ARMS, ("ppo_clip", 4)):
        name, style = (objective, "-") if passes == 1 else (f"{objective} × {passes} passes", "--")
        _line(axes, runs, rates, partial(word_cell, base, objective, passes), name, looks[objective], style)
        found = where(runs, seed=SEEDS, rate="auto", base=base, objective=objective, passes=passes)
        if found:
            automatic.append(rates[-1] * 2.2 * 1.25 ** len(automatic))
            color, marker = LIGHT[looks[objective][0]], MARKERS[looks[objective][1]]
            draw_line(axes, {automatic[-1]: list(map(area, found))}, color=color, marker=marker, linewidth=0)
            width, mean = (automatic[-1] / 1.09, automatic[-1] * 1.09), fmean(map(area, found))
            axes.plot(width, [mean, mean], color=color, linestyle=style)
    axes.set(xscale="log", xlabel="learning rate")
    return _end(axes, 12, rates, {fmean(automatic): '"auto"'} if automatic else {})


def _line(
    axes: Any, runs: Sequence[Row], rates: Iterable[float], cell: Callable[..., Cell], name: str, look: Look, style: str
) -> None:
    """A contestant's line over rates."""
    found = {rate: [area(run) for run in cell(rate=rate).runs(runs).values()] for rate in rates}
    values = {rate: areas for rate, areas in found.items() if areas}
    draw_line(axes, values, color=LIGHT[look[0]], marker=MARKERS[look[1]], label=name, linestyle=style)


def _end(axes: Any, batches: int, rates: Sequence[float], beside: dict[float, str] | None = None) -> bool:
    """Ticks and a legend; False where there is no line of two points."""
    ticks = {rate: rate_text(rate) for rate in rates} | (beside or {})
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.set_ylabel(f"mean held-out success, {batches} batches")
    if found := any(len(line.get_xdata()) > 1 for line in axes.lines):
        axes.legend(frameon=False, fontsize="small")
    return found


def _paint_ablations(axes: Any, runs: Sequence[Row]) -> bool:
    """Differences to TROLL as it is at 1e-3, with intervals."""
    found = {
        name: compare(Cell(arm=("troll", name), rate=1e-3), Cell(arm=("troll", ""), rate=1e-3), runs) for name in ABLATIONS
    }
    rows = [(name, one.mean) for name, one in reversed(found.items()) if one is not None]
    for place, (_, mean) in enumerate(rows):
        axes.plot(mean.value, place, "o", color=LIGHT[0], markersize=4)
        if mean.low is not None and mean.high is not None:
            axes.plot([mean.low, mean.high], [place, place], color=LIGHT[0], linewidth=1)
    axes.axvline(0, color="black", linewidth=0.6)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize="small")
    axes.set_xlabel("points over TROLL as it is, learning rate 1e-3")
    return bool(rows)


PAINTS: dict[str, Callable[[Any, Sequence[Row]], bool]] = {
    "map": partial(_paint_arms, rates=RATES, words=""),
    "reuse": partial(_paint_arms, rates=(1e-4, 2e-4, 4e-4), words=", four passes over a batch", **OFTEN),
    "ablations": _paint_ablations,
    "words": partial(_paint_words, base="smollm2", rates=WORD_RATES),
    "words-gemma": partial(_paint_words, base="gemma", rates=GEMMA_RATES),
}
"""Name of a figure → what draws it, False where it has no runs."""
