"""The study in one figure: success by passes over a batch, and by learning rate."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from study_table import Row, final

from corral.run.files import write_whole

COLOURS = {"troll": "#1f5fa8", "dppo": "#c2500a", "ppo_clip": "#1a7f5a", "reinforce": "#9c3d88"}


def draw(runs: Sequence[Row], over_rates: Sequence[Row], path: Path) -> None:
    """Two panels, the same file from the same rows."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "deployed"
    reused = [run for run in runs if run.get("passes") and run["steps"] == 10 and not run.get("reuse")]
    kept = [run for run in reused if (run["rate"], run["arm"]) in ((2e-4, "off"), ("auto", "on"))]
    panels: list[tuple[Sequence[Row], Callable[[Row], float], str]] = [
        (kept, lambda run: run["passes"], "passes over each batch"),
        (over_rates, lambda run: run["rate"], "learning rate"),
    ]
    panels = [(some, place, name) for some, place, name in panels if len({place(run) for run in some}) > 1]
    figure = Figure(figsize=(4.6 * len(panels), 3.4), layout="constrained")
    for axes, (some, place, name) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _lines(axes, some, place)
        axes.plot([], [], color="black", linestyle="--", label="held")
        axes.set(xscale="log", xlabel=name, ylabel=f"held-out success after {some[0]['steps']} steps", ylim=(-0.02, 0.8))
        ticks = sorted({place(run) for run in some})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize="small")
    write_whole(path, lambda beside: figure.savefig(beside, format="svg", metadata={"Date": None}))


def _lines(axes: Any, runs: Sequence[Row], place: Callable[[Row], float]) -> None:
    """A line per objective, dashed where it is held; a dot per run."""
    for objective, colour in COLOURS.items():
        for held in (False, True):
            mine = [run for run in runs if run["objective"] == objective and (run["arm"] != "off") == held]
            places = sorted({place(run) for run in mine})
            means = [fmean(final(run) for run in mine if place(run) == x) for x in places]
            label = objective if not held and places else None
            axes.plot(places, means, color=colour, linestyle="--" if held else "-", label=label)
            axes.scatter([place(run) for run in mine], [final(run) for run in mine], color=colour, s=9, alpha=0.6, linewidth=0)
