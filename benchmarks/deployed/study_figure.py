"""Two figures: the idea (how far a network moves, and its way back), and success by passes over a batch and by rate."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from plans import FRESH
from study_rates import over_rates
from study_table import Row, certificate, final, steps_of

from corral.lab.run.files import write_whole

COLOURS = {"troll": "#1f5fa8", "dppo": "#c2500a", "ppo_clip": "#1a7f5a", "reinforce": "#9c3d88"}


def draw(runs: Sequence[Row], path: Path) -> None:
    """Success by passes, and by rate under both schedules; the same file from the same rows."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "deployed"
    reused = [
        run for run in runs if run.get("passes") and run["steps"] == 10 and not run.get("reuse") and run["seed"] not in FRESH
    ]
    reused = [run for run in reused if run["schedule"] == "linear"]
    kept = [run for run in reused if (run["rate"], run["arm"]) in ((2e-4, "off"), ("auto", "on"))]
    panels: list[tuple[Sequence[Row], Callable[[Row], float], str]] = [
        (kept, lambda run: run["passes"], "passes over each batch"),
        (over_rates(runs), lambda run: run["rate"], "learning rate, linear schedule"),
        (over_rates(runs, "constant"), lambda run: run["rate"], "learning rate, constant"),
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


def draw_idea(runs: Sequence[Row], path: Path, *, bound: float = 0.02, passes: int = 8, seed: int = 301) -> None:
    """Left: the way back from a step that went too far. Right: the mean KL after every step of one seed, held and not."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "deployed"
    figure = Figure(figsize=(9.2, 3.2), layout="constrained")
    line, steps = figure.subplots(1, 2)
    _way_back(line)
    for objective, how in (("ppo_clip", "PPO clip"), ("troll", "TROLL")):
        for arm, style in (("off", "-"), ("on", "--")):
            wanted = {"objective": objective, "arm": arm, "passes": passes, "seed": seed, "steps": 10, "schedule": "linear"}
            rates = (2e-4, "auto")
            for run in [run for run in runs if wanted.items() <= run.items() and run["rate"] in rates and not run.get("reuse")]:
                moved = [certificate(step, "mean") for step in steps_of(run)]
                end = f"{how}{', held' if arm == 'on' else ''}: {100 * final(run):.0f} %"
                steps.plot(range(1, 11), moved, color=COLOURS[objective], linestyle=style, label=end)
    limits = [bound * (1 - (step - 0.5) / 10) ** 2 for step in range(1, 11)]
    steps.plot(range(1, 11), limits, color="black", linewidth=0.8, linestyle=":", label="bound")
    steps.set(
        yscale="log", ylim=(2e-5, 1), xlabel=f"step ({passes} passes over each batch)", ylabel="mean KL(new‖old) of the network"
    )
    steps.legend(frameon=False, fontsize="small", title="held-out success after ten steps", title_fontsize="small")
    write_whole(path, lambda beside: figure.savefig(beside, format="svg", metadata={"Date": None}))


def _way_back(axes: Any) -> None:
    """D along the line from the old weights to the new ones, the bound, and the share that is kept."""
    distance, bound = 0.14, 0.02
    kept = (bound / distance) ** 0.5
    shares = [place / 100 for place in range(101)]
    axes.plot(shares, [distance * share**2 for share in shares], color="black")
    axes.axhline(bound, color="black", linewidth=0.8, linestyle=":")
    axes.plot([kept, kept], [0, bound], color="#1f5fa8", linewidth=1)
    axes.scatter([0, 1, kept], [0, distance, bound], color=["black", "#c2500a", "#1f5fa8"], zorder=3)
    for text, at, colour in (
        ("after the updates", (0.98, distance), "#c2500a"),
        ("deployed: s ≈ √(δ/D₁)", (0.02, bound + 0.012), "#1f5fa8"),
        ("bound δ", (0.98, bound + 0.004), "black"),
    ):
        axes.annotate(text, at, color=colour, fontsize="small", ha="left" if "deployed" in text else "right", va="bottom")
    ends = (0, kept, 1)
    axes.set_xticks(ends, [r"$\theta_{old}$", "s", r"$\theta_{new}$"])
    axes.set(ylim=(-0.004, 0.16), ylabel="D(s): mean KL to the old network", xlabel="share of the step that is kept")
