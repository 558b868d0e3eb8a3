"""Figures of docs/results/llm.md: the map over rates, reuse of batches, TROLL's ablations."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from evidence_plans import ABLATIONS, ARMS, GEMMA_RATES, SEEDS, WORD_ARMS, WORD_RATES
from evidence_rows import Cell, Row, arm_name, compare, word_cell
from study_table import area

from corral.lab.report.looks import LIGHT, MARKERS, assign_looks
from corral.lab.run.files import write_whole

RATES = (1e-4, 2e-4, 3e-4, 1e-3, 3e-3)


def figures(runs: Sequence[Row]) -> dict[str, Any]:
    """Every figure for which there are runs, by name."""
    from matplotlib.figure import Figure

    found = {}
    paints = {"map": _paint_map, "reuse": _paint_reuse, "ablations": _paint_ablations}
    paints |= {"words": partial(_paint_words, base="smollm2"), "words-gemma": partial(_paint_words, base="gemma")}
    for name, paint in paints.items():
        figure = Figure(figsize=(7.2, 3.8), layout="constrained")
        if paint(figure.subplots(), runs):
            found[name] = figure
    return found


def draw(runs: Sequence[Row], folder: Path) -> None:
    """Write them, the same files from the same rows."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "evidence"
    for name, figure in figures(runs).items():
        write_whole(
            folder / f"llm-{name}.svg",
            lambda beside, figure=figure: figure.savefig(beside, format="svg", metadata={"Date": None}),
        )


def _paint_map(axes: Any, runs: Sequence[Row]) -> bool:
    """Area by learning rate."""
    _lines(axes, runs, RATES, lambda arm, rate: Cell(arm=arm, rate=rate))
    axes.set(xscale="log", xlabel="learning rate", ylabel="area under held-out success, 15 batches", ylim=(-0.02, 0.62))
    return _end(axes, RATES, [f"{rate:.0e}".replace("e-0", "e-") for rate in RATES])


def _paint_reuse(axes: Any, runs: Sequence[Row]) -> bool:
    """Area by learning rate with four passes over each batch."""
    rates = (1e-4, 2e-4, 4e-4)
    _lines(axes, runs, rates, lambda arm, rate: Cell(arm=arm, rate=rate, passes=4, steps=10, every=2))
    axes.set(xscale="log", xlabel="learning rate, four passes over a batch", ylabel="area under held-out success, 10 batches")
    return _end(axes, rates, [f"{rate:.0e}".replace("e-0", "e-") for rate in rates])


def _paint_words(axes: Any, runs: Sequence[Row], base: str) -> bool:
    """Area of a pretrained model by learning rate, and beside the rates at "auto", where runs are held."""
    rates, automatic = GEMMA_RATES if base == "gemma" else WORD_RATES, []
    for objective, passes in (*WORD_ARMS, ("ppo_clip", 4)):
        name = objective if passes == 1 else f"{objective} × {passes} passes"
        look = (*assign_looks([arm for arm, _ in WORD_ARMS])[objective], "-" if passes == 1 else "--")
        _line(axes, runs, rates, partial(word_cell, base, objective, passes), name, look)
        about = {"rate": "auto", "base": base, "objective": objective, "passes": passes}
        same = (run for run in runs if run["seed"] in SEEDS and all(run[key] == value for key, value in about.items()))
        if found := list(map(area, same)):
            automatic.append(rates[-1] * 2.2 * 1.25 ** len(automatic))
            axes.plot([automatic[-1] / 1.09, automatic[-1] * 1.09], [fmean(found)] * 2, color=LIGHT[look[0]], linestyle=look[2])
            _dots(axes, [(automatic[-1], value) for value in found], look)
    axes.set(xscale="log", xlabel="learning rate", ylabel="area under held-out success, 12 batches")
    ticks = [*rates, *([fmean(automatic)] if automatic else [])]
    return _end(axes, ticks, [*(f"{rate:.0e}".replace("e-0", "e-") for rate in rates), '"auto"'][: len(ticks)])


def _lines(axes: Any, runs: Sequence[Row], places: Sequence[float], cell: Callable[[tuple[str, str], float], Cell]) -> None:
    """A line per contestant; dotted where its colour is close to another's."""
    looks = assign_looks([" ".join(filter(None, (arm[0], arm[1].replace(" ", "-")))) for arm in ARMS])
    for arm, look in zip(ARMS, looks.values(), strict=True):
        style = "--" if arm[1] else ":" if arm[0] == "drpo" else "-"
        _line(axes, runs, places, lambda place, arm=arm: cell(arm, place), arm_name(arm), (*look, style))


def _line(
    axes: Any,
    runs: Sequence[Row],
    places: Sequence[float],
    cell: Callable[[float], Cell],
    name: str,
    look: tuple[int, int, str],
) -> None:
    """A contestant's line through its means, a dot per run."""
    found = [(place, area(run)) for place in places for run in cell(place).runs(runs).values()]
    means = [(place, fmean(y for x, y in found if x == place)) for place in places if any(x == place for x, _ in found)]
    if not means:
        return
    axes.plot(*zip(*means, strict=True), color=LIGHT[look[0]], label=name, linestyle=look[2])
    _dots(axes, found, look)


def _dots(axes: Any, found: Sequence[tuple[float, float]], look: tuple[int, int, str]) -> None:
    """A dot per run."""
    colour, marker, _ = look
    axes.scatter(*zip(*found, strict=True), color=LIGHT[colour], marker=MARKERS[marker], s=12, alpha=0.55, linewidth=0)


def _end(axes: Any, ticks: Sequence[float], names: Sequence[str]) -> bool:
    """Ticks and a legend; False where there is no line of two points."""
    axes.set_xticks(ticks, names)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    if not any(len(line.get_xdata()) > 1 for line in axes.lines):
        return False
    axes.legend(frameon=False, fontsize="small")
    return True


def _paint_ablations(axes: Any, runs: Sequence[Row]) -> bool:
    """Differences to TROLL as it is at 1e-3, with intervals."""
    rows = []
    for variant in ABLATIONS:
        found = compare(Cell(arm=("troll", variant), rate=1e-3), Cell(arm=("troll", ""), rate=1e-3), runs)
        if found is not None:
            rows.append((variant, found.mean))
    for place, (_, mean) in enumerate(reversed(rows)):
        axes.plot(mean.value, place, "o", color=LIGHT[0], markersize=4)
        if mean.low is not None and mean.high is not None:
            axes.plot([mean.low, mean.high], [place, place], color=LIGHT[0], linewidth=1)
    axes.axvline(0, color="black", linewidth=0.6)
    axes.set_yticks(range(len(rows)), [variant for variant, _ in reversed(rows)], fontsize="small")
    axes.set_xlabel("points of area over TROLL as it is, learning rate 1e-3")
    axes.spines[["top", "right"]].set_visible(False)
    return bool(rows)
