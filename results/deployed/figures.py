"""Figures of docs/results/deployed.md."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from results.deployed.rates import over_rates
from results.packed import Row
from results.pages import draw_line, new_figure, save_figure
from results.plans import TUNING
from results.runs import certificate, final, steps_of, where

COLOURS = {"troll": "#1f5fa8", "dppo": "#c2500a", "ppo_clip": "#1a7f5a", "reinforce": "#9c3d88"}
Values = Mapping[float, Sequence[float]]
"""A value per run, by place on the axis."""


def values(points: Iterable[tuple[float, float]]) -> Values:
    """Values by place."""
    found = defaultdict(list)
    for place, value in points:
        found[place].append(value)
    return found


def draw_study(runs: Sequence[Row], path: Path) -> None:
    """Success by passes, and by rate under both schedules: a line per objective, dashed where it is held."""
    reused = [run for run in where(runs, steps=10, reuse=None, seed=TUNING, schedule="linear") if "passes" in run]
    kept = [run for run in reused if (run["rate"], run["arm"]) in ((2e-4, "off"), ("auto", "on"))]
    panels: list[tuple[Sequence[Row], str, str]] = [
        (kept, "passes", "passes over each batch"),
        (over_rates(runs), "rate", "learning rate, linear schedule"),
        (over_rates(runs, "constant"), "rate", "learning rate, constant"),
    ]
    figure, row = new_figure(len(panels), figsize=(4.6 * len(panels), 3.4))
    for axes, (some, place, name) in zip(row, panels, strict=True):
        for objective, color in COLOURS.items():
            for held in (False, True):
                mine = [run for run in where(some, objective=objective) if (run["arm"] != "off") == held]
                look: dict[str, Any] = {"linestyle": "--"} if held else {"label": objective}
                draw_line(axes, values((run[place], final(run)) for run in mine), color=color, **look)
        axes.plot([], [], color="black", linestyle="--", label="bounded")
        axes.set(xscale="log", xlabel=name, ylabel=f"held-out success after {some[0]['steps']} steps", ylim=(-0.02, 0.8))
        ticks = sorted({run[place] for run in some})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize="small")
    save_figure(figure, path)


def draw_idea(runs: Sequence[Row], path: Path, *, bound: float = 0.02, passes: int = 8, seed: int = 301) -> None:
    """Left: the way back from a step that went too far. Right: the mean KL after every step of one seed, held and not."""
    figure, (line, steps) = new_figure(2, figsize=(9.2, 3.2))
    _way_back(line)
    wanted: dict[str, Any] = {
        "passes": passes,
        "seed": seed,
        "steps": 10,
        "schedule": "linear",
        "reuse": None,
        "rate": (2e-4, "auto"),
    }
    for objective, how in (("ppo_clip", "PPO clip"), ("troll", "TROLL")):
        for arm, style, held in (("off", "-", ""), ("on", "--", ", bounded")):
            for run in where(runs, objective=objective, arm=arm, **wanted):
                moved = [certificate(step, "mean") for step in steps_of(run)]
                end = f"{how}{held}: {100 * final(run):.0f} %"
                steps.plot(range(1, 11), moved, color=COLOURS[objective], linestyle=style, label=end)
    limits = [bound * (1 - (step - 0.5) / 10) ** 2 for step in range(1, 11)]
    steps.plot(range(1, 11), limits, color="black", linewidth=0.8, linestyle=":", label="bound")
    steps.set(
        yscale="log", ylim=(2e-5, 1), xlabel=f"step ({passes} passes over each batch)", ylabel="mean KL(new‖old) of the network"
    )
    steps.legend(frameon=False, fontsize="small", title="held-out success after ten steps", title_fontsize="small")
    save_figure(figure, path)


def _way_back(axes: Any) -> None:
    """D along the line from the old weights to the new ones, the bound, and the share that is kept."""
    distance, bound = 0.14, 0.02
    kept = (bound / distance) ** 0.5
    shares = [place / 100 for place in range(101)]
    axes.plot(shares, [distance * share**2 for share in shares], color="black")
    axes.axhline(bound, color="black", linewidth=0.8, linestyle=":")
    axes.plot([kept, kept], [0, bound], color="#1f5fa8", linewidth=1)
    axes.scatter([0, 1, kept], [0, distance, bound], color=["black", "#c2500a", "#1f5fa8"], zorder=3)
    for text, at, colour, side in (
        ("after the updates", (0.98, distance), "#c2500a", "right"),
        ("deployed: s ≈ √(δ/D₁)", (0.02, bound + 0.012), "#1f5fa8", "left"),
        ("bound δ", (0.98, bound + 0.004), "black", "right"),
    ):
        axes.annotate(text, at, color=colour, fontsize="small", ha=side, va="bottom")
    axes.set_xticks((0, kept, 1), [r"$\theta_{old}$", "s", r"$\theta_{new}$"])
    axes.set(ylim=(-0.004, 0.16), ylabel="D(s): mean KL to the old network", xlabel="share of the step that is kept")
