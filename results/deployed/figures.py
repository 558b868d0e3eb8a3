"""Figures of docs/deployed.md, README's figure and the sentences below it: what a batch of rollouts and a rate are good for."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from corral.lab.report.looks import LIGHT, MARKERS, assign_looks
from results.deployed.confirm import LEVEL, places_above, runs_of, steps_to
from results.deployed.plans import CHOSEN, TUNING
from results.deployed.rates import HELD, TUNED, UNHELD, fresh_rates, over_rates
from results.packed import Row
from results.pages import draw_line, new_figure, save_figure
from results.runs import certificate, final, held_out, steps_of, where

COLOURS = {"troll": "#1f5fa8", "dppo": "#c2500a", "ppo_clip": "#1a7f5a", "reinforce": "#9c3d88"}
NAMES = {"troll": "TROLL", "ppo_clip": "clip"}
LEARNED = (("troll", "TROLL, 4 passes", "-"), ("ppo_clip", "clip, 4 passes", "-"), ("ppo_clip", "clip, 1 pass", "--"))
"""The first of CHOSEN; of clipping, the best of those that were tried, and the best with one pass."""
Values = Mapping[float, Sequence[float]]
"""A value per run, by place on the axis."""


def values(points: Iterable[tuple[float, float]]) -> Values:
    """Values by place."""
    found = defaultdict(list)
    for place, value in points:
        found[place].append(value)
    return found


def learned(runs: Sequence[Row]) -> list[Values]:
    """Held-out success over batches of rollouts on fresh seeds, of each of LEARNED."""
    return [values(point for run in runs_of(runs, how) for point in held_out(run)) for how in CHOSEN[: len(LEARNED)]]


def over_constant_rates(runs: Sequence[Row], objective: str, arm: str) -> Values:
    """Success after ten batches, used once each, by constant learning rate."""
    return values((run["rate"], final(run)) for run in where(over_rates(runs, "constant", arm), objective=objective))


def draw_headline(runs: Sequence[Row], path: Path) -> None:
    """Left: what rollouts buy. Right: what a learning rate costs, with the network held and not."""
    figure, (left, right) = new_figure(2, figsize=(9.6, 3.1))
    looks = {name: {"color": LIGHT[colour], "marker": MARKERS[place]} for name, (colour, place) in assign_looks(NAMES).items()}
    for (name, label, line), found in zip(LEARNED, learned(runs), strict=True):
        draw_line(left, found, label=label, linestyle=line, **looks[name])
    for arm, end, line in ((HELD, ", held", "-"), (UNHELD, "", "--")):
        for name, label in NAMES.items():
            draw_line(right, over_constant_rates(runs, name, arm), label=label + end, linestyle=line, **looks[name])
    left.set(title="held-out success", xlabel="batches of rollouts", ylim=(0.15, 0.75), xticks=range(0, 21, 5))
    right.set(
        title="after ten batches, by learning rate", xlabel="constant learning rate, one pass", xscale="log", ylim=(-0.02, 0.65)
    )
    for axes in (left, right):
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    save_figure(figure, path, dark=True)


def sentences(runs: Sequence[Row]) -> str:
    """What README says below the figure: batches of rollouts to a success, and what `learning_rate="auto"` buys."""
    return f"{sentence(runs)}\n\n{sentence_of_rates(runs)}\n"


def sentence(runs: Sequence[Row]) -> str:
    """What the figure's left says, in numbers, with how many runs each rests on."""
    found = [runs_of(runs, how) for how in CHOSEN[: len(LEARNED)]]
    ours, tuned, once = (median(map(steps_to, some)) for some in found)
    (seeds,) = {len(some) for some in found}
    above, places = places_above(runs)
    others = f"; it is above clip in {above} of {places} [other tasks and starts](docs/deployed.md#elsewhere)" if places else ""
    return (
        f"TROLL, with four passes over each batch, has {100 * LEVEL:.0f} % success after {ours:.1f} batches of rollouts; "
        f"PPO's clip, tuned over rate and passes,\nafter {tuned:.1f}, with one pass after {once:.0f}. (Medians of {seeds} "
        f"fresh seeds of [the study](docs/deployed.md#fresh-seeds), a small model; TROLL held at .03, "
        f"linear{others};\n`make results`.)"
    )


def sentence_of_rates(runs: Sequence[Row]) -> str:
    """What `learning_rate="auto"` buys on fresh seeds, against the best rate that was tried, and one 2.5 times as large."""
    found = fresh_rates(runs)

    def ends(rate: float | str, arm: str, schedule: str) -> list[float]:
        return [100 * fmean(map(final, found[name, rate, arm, schedule])) for name in NAMES]

    (auto, clip_auto), (lost, clip_lost) = ends("auto", HELD, "constant"), ends(1e-3, UNHELD, "linear")
    tuned, clip_tuned = map(max, zip(*(ends(rate, UNHELD, "linear") for rate in TUNED), strict=True))
    seeds = min(len(found[name, "auto", HELD, "constant"]) for name in NAMES)
    return (
        f'`learning_rate="auto"` holds the network that samples next, in place of a rate to tune: with one pass TROLL ends at '
        f"{auto:.0f} % ({seeds} fresh seeds), at\nthe better of two tuned rates at {tuned:.0f}, at 2.5 times that rate at "
        f"{lost:.0f}; clip at {clip_auto:.0f}, {clip_tuned:.0f} and {clip_lost:.0f} "
        f"([rates](docs/deployed.md#rates-how-far-off-one-may-be))."
    )


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
        axes.plot([], [], color="black", linestyle="--", label="held")
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
        for arm, style, held in (("off", "-", ""), ("on", "--", ", held")):
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
