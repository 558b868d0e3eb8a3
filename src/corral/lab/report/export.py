"""Exports for papers: figures as SVG and PNG, and tables as CSV, for all groups and seeds."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from corral.lab.report import outcomes
from corral.lab.report.content import RunReport
from corral.lab.report.figures import Metric, curve, kl_bound
from corral.lab.report.groups import Group
from corral.lab.report.html import shorten
from corral.lab.report.looks import LIGHT, MARKERS, Look
from corral.lab.report.outcomes import Measure, sort_pairs
from corral.lab.report.read import value_text
from corral.lab.report.sweep import AUTO, Sweep, Value, ordered
from corral.lab.run.files import disk_sentence, write_whole
from corral.lab.run.text import visible
from corral.validate import RunError, pip_install

_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
"""First characters that make a spreadsheet compute a cell."""

_AVERAGES = "Lines: interquartile means over seeds (means of fewer than four)."


def export(report: RunReport, folder: Path) -> list[Path]:
    """Write every figure as SVG and PNG, every table, and the points of every curve."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(disk_sentence(error, folder)) from error
    made = _Export(report, folder)
    for name, rows in report.tables.items():
        if rows:
            made.table(name, rows)
    for problem, name in zip(report.problems, _file_names(report.problems), strict=True):
        ending = "" if len(report.problems) == 1 else f"-{name}"
        made.problem([group for group in report.groups if group.problem == problem], ending)
    for index, sweep in enumerate(report.sweeps):
        name = "sweep" if len(report.sweeps) == 1 else f"sweep-{index + 1}"
        with made.figure(name, f"{sweep.problem}: means over {sweep.seeds_text}, bands their range") as axes:
            draw_sweep(axes, sweep, report.measure, report.looks)
    return made.written


@dataclass
class _Export:
    """Folder of an export, and the files written so far."""

    report: RunReport
    folder: Path
    written: list[Path] = field(default_factory=list)

    def table(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        """Write a table as CSV."""
        self.written.append(write_csv(rows, self.folder / f"{name}.csv"))

    @contextmanager
    def figure(self, name: str, about: str, rows: int = 0) -> Iterator[Any]:
        """Context with axes to draw on, which are saved as SVG and PNG under a line that describes the runs."""
        try:
            from matplotlib.figure import Figure
        except ImportError as missing:
            raise RunError(f"exporting figures needs matplotlib. Install it: {pip_install('report')}.") from missing
        figure = Figure(figsize=(5.2, max(3.4, 1.2 + 0.28 * rows)), layout="constrained")
        title = "\n".join(textwrap.fill(line, 84) for line in about.replace("$", r"\$").splitlines())
        figure.suptitle(title, fontsize="x-small", x=0.01, ha="left")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        yield axes
        for ending in ("svg", "png"):
            self.written.append(self.folder / f"{name}.{ending}")
            write_whole(self.written[-1], partial(figure.savefig, format=ending, dpi=200))

    def problem(self, groups: Sequence[Group], ending: str) -> None:
        """Write curves, final values, differences and histograms of the groups of one problem."""
        report, measure = self.report, self.report.measure
        axis = "env_steps" if all(run.is_robot for group in groups for run in group.runs) else "update"
        look = {
            key: {"color": LIGHT[colour], "marker": MARKERS[marker % len(MARKERS)], "linestyle": _DASHES[dash]}
            for key, (colour, marker, dash) in report.styles.items()
        }
        seeds = list(dict.fromkeys(run.seed for group in groups for run in group.runs))
        about = visible(shorten(f"{groups[0].problem}, seed{'' if len(seeds) == 1 else 's'} {', '.join(seeds)}", 110))
        for metric in report.metrics:
            interval = metric.section == "learning"
            found = [(group, curve(group, metric, report.every, interval=interval, axis=axis)) for group in groups]
            curves = [(group, points) for group, points in found if points is not None]
            name = f"{metric.key.replace('/', '_')}{ending}"
            if curves:
                columns = ["objective", "step", axis, "value", "low", "high"]
                frame = pd.concat([points.assign(objective=group.label) for group, points in curves])
                self.table(name, frame[columns].to_dict("records"))
                bands = "95 % bootstrap intervals" if interval else "range of the seeds"
                with self.figure(name, f"{about}\n{_AVERAGES} Bands: {bands}.") as axes:
                    draw_curves(axes, curves, metric, look, axis)
        rows = {group.key: row for group, row in zip(report.groups, report.tables["results"], strict=True)}
        ends = [(group, rows[group.key], ends) for group in groups if (ends := outcomes.finals(group, measure.key))]
        if ends:
            said = f"{about}\nCircles: seeds. Interquartile means with 95 % bootstrap intervals."
            with self.figure(f"final{ending}", said) as axes:
                draw_finals(axes, ends, measure, look)
        compared = [row for row in report.tables["comparisons"] if row["measure"] == "final"]
        pairs = sort_pairs([row for row in compared if row["problem"] == groups[0].problem])
        if pairs:
            said = f"{pairs[0]['sentence']}\n{about}. Means of paired differences, Student's 95 % intervals; filled: claims."
            with self.figure(f"differences-of-pairs{ending}", said, rows=len(pairs)) as axes:
                draw_forest(axes, pairs, report.looks, f"final {measure.name}")
        for group, name in zip(groups, _file_names([group.label for group in groups]), strict=True):
            if _positive(group, "kl_before"):
                with self.figure(f"kl-per-token-{name}{ending}", about) as axes:
                    draw_histogram(axes, group, look[group.key]["color"])


def write_csv(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Write a table with the columns of its first row. A text that a spreadsheet would compute is quoted with '."""
    cells = [[_inert(row[key]) for key in rows[0]] for row in rows]
    frame = pd.DataFrame(cells, columns=[_inert(key) for key in rows[0]], dtype=object)  # or steps would become 8.0 beside None
    form = {"index": False, "encoding": "utf-8", "errors": "replace", "lineterminator": "\r\n"}
    write_whole(path, lambda beside: frame.to_csv(beside, **form))
    return path


def _inert(value: Any) -> Any:
    """Quote a text that a spreadsheet would compute, also after white space and in full width."""
    return f"'{value}" if isinstance(value, str) and value.lstrip().startswith(_FORMULA) else value


def _file_names(texts: Sequence[str]) -> list[str]:
    """Build short, unique file names; a number distinguishes names that become equal."""
    found: list[str] = []
    for text in texts:
        name = "".join(letter if letter.isalnum() else "-" for letter in text)[:60].strip("-") or "problem"
        same = sum(other == name or other.startswith(f"{name}~") for other in found)
        found.append(f"{name}~{same + 1}" if same else name)
    return found


# ------------------------------------------------------------------------------------------------------------- drawing

_DASHES = ("-", "--", ":", "-.")

_AXES = {"update": "updates", "env_steps": "environment steps"}


def _label(text: str) -> str:
    """Escape a label for matplotlib, which hides labels that begin with _ and reads $ as a formula."""
    text = visible(text).replace("$", r"\$")
    return text if not text.startswith("_") else f" {text}"


def draw_curves(
    axes: Any, curves: Sequence[tuple[Group, pd.DataFrame]], metric: Metric, look: dict[int, Any], axis: str
) -> None:
    """Draw the curves of a metric over the run."""
    scale = 100.0 if metric.percent else 1.0
    for group, points in curves:
        at, every, style = points[axis], max(1, len(points) // 12), look[group.key]
        label = _label(f"{group.label} ({points['seeds'].max()})")
        axes.plot(at, scale * points["value"], label=label, markevery=every, ms=4, **style)
        axes.fill_between(at, scale * points["low"], scale * points["high"], color=style["color"], alpha=0.16, linewidth=0)
    if metric.log and any((points["value"] > 0).any() for _, points in curves):
        axes.set_yscale("log")
    if metric.key.startswith("tr/kl"):
        for bound in {bound for group, _ in curves if (bound := kl_bound(group)) is not None}:
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
    """Draw the final values of each group: its seeds, and their interquartile mean with its interval."""
    for place, (group, row, seeds) in enumerate(reversed(rows)):
        colour, ends = look[group.key]["color"], np.array([*seeds.values()]) * measure.factor
        if row["final_low"] is not None:
            interval = [row["final_low"] * measure.factor, row["final_high"] * measure.factor]
            axes.plot(interval, [place] * 2, color=colour, alpha=0.35, linewidth=6)
        axes.scatter(ends, [place] * len(ends), facecolor="white", edgecolor=colour, zorder=3)
        axes.scatter([row["final"] * measure.factor], [place], color=colour, marker=look[group.key]["marker"], s=60, zorder=4)
    axes.set(xlabel=f"Final {measure.name}{' (%)' if measure.factor == 100 else ''}", ylim=(-0.6, len(rows) - 0.4))
    axes.set_yticks(range(len(rows)), [_label(group.label) for group, _, _ in reversed(rows)])


def draw_forest(axes: Any, rows: Sequence[dict[str, Any]], looks: Mapping[str, Look], what: str) -> None:
    """Draw differences of pairs with Student's interval, the largest claim first; claims have filled markers."""
    for place, row in enumerate(reversed(rows)):
        colour, marker = LIGHT[looks[row["our_objective"]][0]], MARKERS[looks[row["our_objective"]][1]]
        if row["low"] is not None:
            axes.plot([row["low"], row["high"]], [place] * 2, color=colour)
        face = colour if row["claimed"] else "white"
        axes.scatter([row["difference"]], [place], facecolor=face, edgecolor=colour, marker=marker, s=55, zorder=3)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(xlabel=f"{what}{', ' if rows[0]['unit'] else ''}{rows[0]['unit']}", ylim=(-0.6, len(rows) - 0.4))
    axes.set_yticks(range(len(rows)), [_label(f"{row['ours']} − {row['theirs']}") for row in reversed(rows)])


def draw_sweep(axes: Any, sweep: Sweep, measure: Measure, looks: Mapping[str, Look]) -> None:
    """Draw final values over the swept setting: means over seeds, and the range of the seeds."""
    places = _places(ordered([value for line in sweep.ranges for value in line.tried]))
    for index, line in enumerate(sweep.ranges):
        columns = {value: [row.final * measure.factor for row in rows] for value, rows in sweep.along(line).items()}
        dash = _DASHES[sum(other.contestant == line.contestant for other in sweep.ranges[:index]) % 4]
        colour, marker = LIGHT[looks[line.contestant][0]], MARKERS[looks[line.contestant][1]]
        along = {value: column for value, column in columns.items() if value != AUTO}
        axes.plot([*along], [*map(np.mean, along.values())], color=colour, linestyle=dash, label=_label(line.label))
        ends = [*map(min, along.values())], [*map(max, along.values())]
        axes.fill_between([*along], *ends, color=colour, alpha=0.16, linewidth=0)
        for value, column in columns.items():
            at, dot = ([places[value]], [np.mean(column)]), {"marker": marker, "s": 30}
            if value == AUTO:  # no line leads there
                axes.plot([places[value]] * 2, [min(column), max(column)], color=colour, alpha=0.4)
                axes.scatter(*at, facecolor="white", edgecolor=colour, zorder=3, **dot)
            if value in line.own:
                axes.scatter(*at, color=colour, zorder=4, **dot)
    if _is_logarithmic([value for value in places if not isinstance(value, str)]):
        axes.set_xscale("log")
    axes.set_xticks([*places.values()], [*map(value_text, places)])
    axes.minorticks_off()
    axes.set(xlabel=sweep.key, ylabel=f"Final {measure.name}{' (%)' if measure.factor == 100 else ''}")
    axes.legend(frameon=False, fontsize="small", title="dots: usable", title_fontsize="small")


def _places(values: Sequence[Value]) -> dict[Value, float]:
    """Positions on an axis: a number at its value, and `auto` a quarter of the axis to the right of all numbers."""
    numbers = [value for value in values if not isinstance(value, str)]
    first, last = numbers[0], numbers[-1]
    apart = (last - first) or abs(last) or 1.0
    beside = last * (last / first) ** 0.25 if _is_logarithmic(numbers) else last + 0.25 * apart
    return {value: beside if isinstance(value, str) else value for value in values}


def _is_logarithmic(numbers: Sequence[float]) -> bool:
    return numbers[0] > 0 and numbers[-1] / numbers[0] >= 8


def draw_histogram(axes: Any, group: Group, colour: str) -> None:
    """Draw histograms of the KL of single tokens before and after the projection."""
    before, after = _positive(group, "kl_before"), _positive(group, "kl_after")
    bounds = {row.get("bound") for run in group.runs for row in run.tokens if after}
    origin = np.log10(bound) if len(bounds) == 1 and (bound := bounds.pop()) else 0.0  # an edge, give or take its rounding
    low, high = (2 * (np.log10(np.clip(end, 1e-7, None) / 1.002) - origin) for end in (min(before), max(before)))
    bins = origin + np.log10(1.002) + np.arange(np.floor(low), np.ceil(high) + 1) / 2
    axes.hist(np.maximum(before, 1.01e-7), 10**bins, color=colour, alpha=0.85, label="as the network wants it")
    if after:
        axes.hist(np.maximum(after, 1.01e-7), 10**bins, histtype="step", color="black", label="after the projection")
    axes.set(xscale="log", yscale="log", xlabel="KL per token (nats)", ylabel="tokens", title=_label(group.label))
    axes.legend(frameon=False, fontsize="small")


def _positive(group: Group, name: str) -> list[float]:
    """Positive, finite values of a column of lists, over all runs of a group."""
    lists = [row.get(name) or [] for run in group.runs for row in run.tokens]
    return [value for values in lists for value in values if value is not None and 0 < value < np.inf]
