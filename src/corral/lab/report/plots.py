"""The page's figures by matplotlib, for papers. Each is drawn on given axes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from corral.lab.report import figures
from corral.lab.report.groups import Group
from corral.lab.report.looks import LIGHT, MARKERS, Look
from corral.lab.report.outcomes import Measure
from corral.lab.report.ranges import AUTO, Value, ordered, value_at, value_text
from corral.lab.report.sweep import Sweep
from corral.lab.run.text import visible

_DASHES = ("-", "--", ":", "-.")

_AXES = {"update": "updates", "env_steps": "environment steps"}


def _label(text: str) -> str:
    """A label that begins with _ is hidden, and $ begins a formula: neither is for labels of ours to do."""
    text = visible(text).replace("$", r"\$")
    return text if not text.startswith("_") else f" {text}"


def line_styles(groups: Sequence[Group], looks: Mapping[str, Look]) -> dict[int, dict[str, Any]]:
    """Colour and marker by objective, dashes by setting; by the key of the group."""
    settings = list(dict.fromkeys(group.setting for group in groups))
    found = {}
    for group in groups:
        (colour, marker), place = looks[group.objective], 0 if group.chosen else settings.index(group.setting)
        found[group.key] = {
            "color": LIGHT[colour], "marker": MARKERS[(marker + place // 4) % len(MARKERS)], "linestyle": _DASHES[place % 4],
        }  # fmt: skip
    return found


def draw_curves(
    axes: Any, curves: Sequence[tuple[Group, figures.Curve]], metric: figures.Metric, look: dict[int, Any], axis: str
) -> None:
    """A metric over the run."""
    scale = 100.0 if metric.percent else 1.0
    for group, curve in curves:
        value, low, high = ([scale * number for number in column] for column in (curve.value, curve.low, curve.high))
        every = max(1, len(curve.at) // 12)
        axes.plot(curve.at, value, label=_label(f"{group.label} ({curve.seeds})"), markevery=every, ms=4, **look[group.key])
        axes.fill_between(curve.at, low, high, color=look[group.key]["color"], alpha=0.16, linewidth=0)
    if metric.log and any(number > 0 for _, curve in curves for number in curve.value):
        axes.set_yscale("log")
    if metric.key.startswith("tr/kl"):
        for bound in {bound for group, _ in curves if (bound := figures.kl_bound(group)) is not None}:
            axes.axhline(bound, color="black", linestyle=(0, (5, 4)), linewidth=0.9)
            axes.annotate(
                f"bound {bound:g}", (1, bound), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize="x-small"
            )
    axes.locator_params(axis="x", integer=True)
    axes.set(xlabel=_AXES[axis], ylabel=f"{metric.title}{' (%)' if metric.percent else ''}")
    axes.legend(frameon=False, fontsize="small", title="objective (seeds)", title_fontsize="small")


def draw_finals(
    axes: Any, rows: Sequence[tuple[Group, dict[str, Any], dict[str, float]]], measure: Measure, look: dict[int, Any]
) -> None:
    """Where each group ended: its seeds, and their interquartile mean with its interval."""
    for place, (group, row, seeds) in enumerate(reversed(rows)):
        colour, factor = look[group.key]["color"], measure.factor
        if row["final_low"] is not None:
            axes.plot(
                [row["final_low"] * factor, row["final_high"] * factor], [place] * 2, color=colour, alpha=0.35, linewidth=6
            )
        axes.scatter(
            [value * factor for value in seeds.values()], [place] * len(seeds), facecolor="white", edgecolor=colour, zorder=3
        )
        axes.scatter([row["final"] * factor], [place], color=colour, marker=look[group.key]["marker"], s=60, zorder=4)
    axes.set(xlabel=f"Final {measure.name}{' (%)' if measure.factor == 100 else ''}", ylim=(-0.6, len(rows) - 0.4))
    axes.set_yticks(range(len(rows)), [_label(group.label) for group, _, _ in reversed(rows)])


def draw_forest(axes: Any, rows: Sequence[dict[str, Any]], looks: Mapping[str, Look], what: str) -> None:
    """Differences of pairs with Student's interval, who is ahead first; claims are filled."""
    for place, row in enumerate(reversed(rows)):
        colour, marker = (kind[index] for kind, index in zip((LIGHT, MARKERS), looks[row["our_objective"]], strict=True))
        if row["low"] is not None:
            axes.plot([row["low"], row["high"]], [place] * 2, color=colour)
        axes.scatter(
            [row["difference"]],
            [place],
            facecolor=colour if row["claimed"] else "white",
            edgecolor=colour,
            marker=marker,
            s=55,
            zorder=3,
        )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(xlabel=f"{what}{', ' if rows[0]['unit'] else ''}{rows[0]['unit']}", ylim=(-0.6, len(rows) - 0.4))
    axes.set_yticks(range(len(rows)), [_label(f"{row['ours']} − {row['theirs']}") for row in reversed(rows)])


def draw_sweep(axes: Any, sweep: Sweep, measure: Measure, looks: Mapping[str, Look]) -> None:
    """Final values over the swept setting: means over seeds, and the range of the seeds."""
    places = _places(ordered([value for line in sweep.ranges for value in line.tried]))
    for index, line in enumerate(sweep.ranges):
        mine = sweep.rows_of(line)
        columns = {
            value: [row.final * measure.factor for row in mine if value_at(row.setting, sweep.key) == value]
            for value in line.tried
        }
        dash = _DASHES[sum(other.contestant == line.contestant for other in sweep.ranges[:index]) % 4]
        colour, marker = LIGHT[looks[line.contestant][0]], MARKERS[looks[line.contestant][1]]
        along = {value: column for value, column in columns.items() if value != AUTO}
        axes.plot([*along], [*map(np.mean, along.values())], color=colour, linestyle=dash, label=_label(line.label))
        axes.fill_between(
            [*along], [*map(min, along.values())], [*map(max, along.values())], color=colour, alpha=0.16, linewidth=0
        )
        for value, column in columns.items():
            if value == AUTO:  # no line leads there
                axes.plot([places[value]] * 2, [min(column), max(column)], color=colour, alpha=0.4)
                axes.scatter(
                    [places[value]], [np.mean(column)], facecolor="white", edgecolor=colour, marker=marker, s=30, zorder=3
                )
            if value in line.own:
                axes.scatter([places[value]], [np.mean(column)], color=colour, marker=marker, s=30, zorder=4)
    if _is_logarithmic([value for value in places if not isinstance(value, str)]):
        axes.set_xscale("log")
    axes.set_xticks([*places.values()], [*map(value_text, places)])
    axes.minorticks_off()
    axes.set(xlabel=sweep.key, ylabel=f"Final {measure.name}{' (%)' if measure.factor == 100 else ''}")
    axes.legend(frameon=False, fontsize="small", title="dots: usable", title_fontsize="small")


def _places(values: Sequence[Value]) -> dict[Value, float]:
    """Where each value of an axis is drawn: numbers at themselves, `auto` a quarter of the axis to the right of them."""
    numbers = [value for value in values if not isinstance(value, str)]
    first, last = numbers[0], numbers[-1]
    apart = (last - first) or abs(last) or 1.0
    beside = last * (last / first) ** 0.25 if _is_logarithmic(numbers) else last + 0.25 * apart
    return {value: beside if isinstance(value, str) else value for value in values}


def _is_logarithmic(numbers: Sequence[float]) -> bool:
    return numbers[0] > 0 and numbers[-1] / numbers[0] >= 8


def draw_histogram(axes: Any, group: Group, colour: str) -> None:
    """How far single tokens wanted to go, and how far they went."""
    before, after = (
        _positive([row.get(name) for run in group.runs for row in run.tokens]) for name in ("kl_before", "kl_after")
    )
    bounds = {row.get("bound") for run in group.runs for row in run.tokens if after}
    origin = np.log10(bound) if len(bounds) == 1 and (bound := bounds.pop()) else 0.0  # an edge, give or take its rounding
    low, high = (2 * (np.log10(np.clip(end, 1e-7, None) / 1.002) - origin) for end in (min(before), max(before)))
    bins = origin + np.log10(1.002) + np.arange(np.floor(low), np.ceil(high) + 1) / 2
    axes.hist(np.maximum(before, 1.01e-7), 10**bins, color=colour, alpha=0.85, label="as the network wants it")
    if after:
        axes.hist(np.maximum(after, 1.01e-7), 10**bins, histtype="step", color="black", label="after the projection")
    axes.set(xscale="log", yscale="log", xlabel="KL per token (nats)", ylabel="tokens", title=_label(group.label))
    axes.legend(frameon=False, fontsize="small")


def _positive(rows: Sequence[Sequence[float | None] | None]) -> list[float]:
    return [value for row in rows if row is not None for value in row if value is not None and 0 < value < np.inf]
