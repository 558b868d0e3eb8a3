"""Export of a report for papers: figures as SVG and PNG, and tables as CSV, for all groups and seeds.

A page's figures are drawn by its scripts, which answer filters. Here matplotlib draws the same data, without a browser.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from corral.lab.report.content import RunReport, name_seeds
from corral.lab.report.figures import Metric, curve, kl_bound
from corral.lab.report.html import Row, shorten
from corral.lab.report.looks import LIGHT, MARKERS
from corral.lab.report.outcomes import Group
from corral.lab.report.page import AXES, page_data
from corral.lab.report.sweep import AUTO
from corral.lab.run.files import disk_errors, write_whole
from corral.lab.run.text import visible
from corral.validate import RunError, pip_install

_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
"""First characters of a text that a spreadsheet would compute as a formula."""

_Rows = list[Row]

_Figures = dict[str, tuple[str, Callable[[Any], object]]]
"""Mapping from a figure's file name to (text about the runs, function that draws on the figure's axes)."""


def export(report: RunReport, folder: Path) -> list[Path]:
    """Write a report's figures as SVG and PNG, its tables, and the points of its curves. Returns the paths of the files."""
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise RunError(f"exporting figures needs matplotlib. Install it: {pip_install('report')}.") from missing
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    data, tables = page_data(report), dict(report.tables)
    figures: _Figures = {}
    for index, problem in enumerate(report.problems, 1):
        points, drawn = _problem(report, data, problem, "" if len(report.problems) == 1 else f"-{index}")
        tables |= points
        figures |= drawn
    for index, (sweep, lines) in enumerate(zip(report.sweeps, data["sweeps"], strict=True), 1):
        about = f"{sweep.problem}: means over {sweep.seeds_text}, bands their range"
        figures["sweep" if len(report.sweeps) == 1 else f"sweep-{index}"] = about, partial(draw_sweep, lines, data["measure"])
    written = [write_csv(rows, folder / f"{name}.csv") for name, rows in tables.items() if rows]
    for name, (about, draw) in figures.items():
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        title = "\n".join(textwrap.fill(line, 84) for line in visible(about).replace("$", r"\$").splitlines())
        figure.suptitle(title, fontsize="x-small", x=0.01, ha="left")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        draw(axes)
        for ending in ("svg", "png"):
            written.append(folder / f"{name}.{ending}")
            write_whole(written[-1], partial(figure.savefig, format=ending, dpi=200))
    return written


def _problem(report: RunReport, data: dict[str, Any], problem: str, ending: str) -> tuple[dict[str, _Rows], _Figures]:
    """Make the tables of points and the figures for one problem: curves, final values, and differences between groups."""
    groups = [group for group in report.groups if group.problem == problem]
    seeds = list(dict.fromkeys(run.seed for group in groups for run in group.runs))
    about = shorten(f"{problem}, {name_seeds(seeds)}", 110)
    axis = "env_steps" if all(run.is_robot for group in groups for run in group.runs) else "step"
    points: dict[str, _Rows] = {}
    figures: _Figures = {}
    for metric in report.metrics:
        interval = metric.section == "learning"
        found = [(group, curve(group, metric, report.every, interval=interval, axis=axis)) for group in groups]
        curves = [(group, frame.assign(objective=group.label)) for group, frame in found if frame is not None]
        name = f"{metric.key.replace('/', '_')}{ending}"
        if curves:
            columns = list(dict.fromkeys(["objective", "step", axis, "value", "low", "high"]))
            points[name] = pd.concat([frame for _, frame in curves])[columns].to_dict("records")
            said = f"{about}\nLines: interquartile means over seeds (means of fewer than four). Bands: "
            said += "95 % bootstrap intervals." if interval else "range of the seeds."
            figures[name] = said, partial(draw_curves, curves=curves, metric=metric, styles=report.styles, axis=axis)
    keys = {group.key: data["groups"][group.key] for group in groups}
    ends = [row | keys[row["group"]] | {"name": keys[row["group"]]["label"]} for row in data["finals"] if row["group"] in keys]
    if ends:
        said, percent = (
            f"{about}\nCircles: seeds. Interquartile means with 95 % bootstrap intervals.",
            data["measure"]["percent"],
        )
        figures[f"final{ending}"] = said, partial(draw_rows, rows=ends, what=f"Final {report.measure.name}", percent=percent)
    for forest in data["forest"]:
        if forest["problem"] == data["groups"][groups[0].key]["problem"]:
            first = forest["rows"][0]["said"]
            said = f"{first}\n{about}. Means of paired differences, Student's 95 % intervals; filled: claims."
            drawn = partial(draw_rows, rows=forest["rows"], what=forest["of"], origin=0.0)
            figures[f"differences-of-pairs{ending}"] = said, drawn
    return points, figures


def write_csv(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Write a table as CSV with the columns of its first row. Texts that a spreadsheet would compute are quoted with '."""
    cells = [[_inert(row[key]) for key in rows[0]] for row in rows]
    frame = pd.DataFrame(cells, columns=[_inert(key) for key in rows[0]], dtype=object)  # or steps would become 8.0 beside None
    form = {"index": False, "encoding": "utf-8", "errors": "replace", "lineterminator": "\r\n"}
    write_whole(path, lambda beside: frame.to_csv(beside, **form))
    return path


def _inert(value: Any) -> Any:
    """Quote a text with ' if a spreadsheet would compute the text as a formula, even after white space or in full width."""
    return f"'{value}" if isinstance(value, str) and value.lstrip().startswith(_FORMULA) else value


# ------------------------------------------------------------------------------------------------------------- drawing

_DASHES = ("-", "--", ":", "-.")


def _label(text: str) -> str:
    """Escape the label of a curve for matplotlib, which hides labels that begin with _ and reads $ as a formula."""
    text = visible(text).replace("$", r"\$")
    return text if not text.startswith("_") else f" {text}"


def draw_curves(
    axes: Any, curves: Sequence[tuple[Group, pd.DataFrame]], metric: Metric, styles: Mapping[int, tuple[int, ...]], axis: str
) -> None:
    """Draw the curves of a metric over training, one per group of runs, with bands."""
    for group, points in curves:
        colour, marker, dash = styles[group.key]
        style = {"color": LIGHT[colour], "marker": MARKERS[marker % len(MARKERS)], "linestyle": _DASHES[dash]}
        label = _label(f"{group.label} ({points['seeds'].max()})")
        axes.plot(points[axis], points["value"], label=label, markevery=max(1, len(points) // 12), ms=4, **style)
        axes.fill_between(points[axis], points["low"], points["high"], color=LIGHT[colour], alpha=0.16, linewidth=0)
    if metric.log and any((points["value"] > 0).any() for _, points in curves):
        axes.set_yscale("log")
    if metric.key.startswith("tr/kl"):
        for bound in {bound for group, _ in curves if (bound := kl_bound(group)) is not None}:
            axes.axhline(bound, color="black", linestyle=(0, (5, 4)), linewidth=0.9)
            place = {"xy": (1, bound), "xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
            axes.annotate(f"bound {bound:g}", fontsize="x-small", **place)
    axes.locator_params(axis="x", integer=True)
    _in_percent(axes.yaxis, metric.percent)
    axes.set(xlabel=AXES[axis], ylabel=metric.title)
    axes.legend(frameon=False, fontsize="small", title="objective (seeds)", title_fontsize="small")


def draw_rows(axes: Any, rows: _Rows, what: str, percent: bool = False, origin: float | None = None) -> None:
    """Draw a row per group or pair: seeds as circles, an interval, and a marker at the value, hollow if `hollow` is set."""
    for place, row in enumerate(reversed(rows)):
        colour, seeds = LIGHT[row["colour"]], [*row.get("seeds", {}).values()]
        if row["low"] is not None:
            axes.plot([row["low"], row["high"]], [place] * 2, color=colour)
        axes.scatter(seeds, [place] * len(seeds), facecolor="white", edgecolor=colour, zorder=3)
        face = "white" if row.get("hollow") else colour
        marker = MARKERS[row["marker"] % len(MARKERS)]
        axes.scatter([row["value"]], [place], facecolor=face, edgecolor=colour, marker=marker, s=55, zorder=4)
    if origin is not None:
        axes.axvline(origin, color="black", linewidth=0.8)
    _in_percent(axes.xaxis, percent)
    axes.set(xlabel=what[0].upper() + what[1:], ylim=(-0.6, len(rows) - 0.4))
    axes.set_yticks(range(len(rows)), [_label(row["name"]) for row in reversed(rows)])
    axes.figure.set_figheight(max(3.4, 1.2 + 0.28 * len(rows)))


def draw_sweep(sweep: dict[str, Any], measure: dict[str, Any], axes: Any) -> None:
    """Draw final values over the values of a swept setting: means over seeds, and bands from lowest to highest seed."""
    numbers = [value for value in sweep["values"] if value != AUTO]
    if numbers[0] > 0 and numbers[-1] / numbers[0] >= 8:
        axes.set_xscale("log")
        beside = numbers[-1] * (numbers[-1] / numbers[0]) ** 0.25
    else:
        beside = numbers[-1] + 0.25 * (numbers[-1] - numbers[0] or abs(numbers[-1]) or 1.0)
    places = [beside if value == AUTO else value for value in sweep["values"]]
    for line in sweep["lines"]:
        colour, marker = LIGHT[line["colour"]], MARKERS[line["marker"]]
        cells = [[value for value in cell["final"] if isinstance(value, float)] for cell in line["cells"]]
        found = [(index, np.mean(cell), min(cell), max(cell)) for index, cell in enumerate(cells) if cell]
        along = [(places[index], *heights) for index, *heights in found if sweep["values"][index] != AUTO]
        at, means, low, high = zip(*along, strict=True) if along else ((),) * 4
        axes.plot(at, means, color=colour, linestyle=_DASHES[line["dash"]], label=_label(line["label"]))
        axes.fill_between(at, low, high, color=colour, alpha=0.16, linewidth=0)
        for index, mean, least, most in found:
            if sweep["values"][index] == AUTO:  # no line leads there
                axes.plot([places[index]] * 2, [least, most], color=colour, alpha=0.4)
            usable = index in line["usable"]
            if usable or sweep["values"][index] == AUTO:
                face = colour if usable else "white"
                axes.scatter([places[index]], [mean], facecolor=face, edgecolor=colour, marker=marker, s=30, zorder=4)
    axes.set_xticks(places, sweep["names"])
    axes.minorticks_off()
    _in_percent(axes.yaxis, measure["percent"])
    axes.set(xlabel=sweep["key"], ylabel=f"Final {measure['name']}")
    axes.legend(frameon=False, fontsize="small", title="dots: usable", title_fontsize="small")


def _in_percent(axis: Any, percent: bool) -> None:
    """Label the ticks of a figure's axis in percent, if the axis has shares."""
    if percent:
        axis.set_major_formatter("{x:.0%}")
