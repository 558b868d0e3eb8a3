"""Figures for papers, SVG and PNG, and tables as CSV: what the page shows of all groups and seeds."""

import csv
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from corral.report import figures, outcomes, plots
from corral.report.content import RunReport
from corral.report.groups import Group
from corral.run.files import RunError, disk_sentence, write_whole

_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
"""What a spreadsheet computes begins with one of these."""


def export(report: RunReport, folder: Path) -> list[Path]:
    """Every figure twice, every table once, and the points of every curve."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(disk_sentence(error, folder)) from error
    written = [write_csv(rows, folder / f"{name}.csv") for name, rows in report.tables.items() if rows]
    problems = list(dict.fromkeys(group.problem for group in report.groups))
    for problem, name in zip(problems, _file_names(problems), strict=True):
        ending = "" if len(problems) == 1 else f"-{name}"
        written += _of_problem(report, [group for group in report.groups if group.problem == problem], folder, ending)
    for index, sweep in enumerate(report.sweeps):
        stem = folder / ("sweep" if len(report.sweeps) == 1 else f"sweep-{index + 1}")
        written += _draw(partial(plots.draw_sweep, sweep=sweep, measure=report.measure), stem)
    return written


def _of_problem(report: RunReport, groups: Sequence[Group], folder: Path, ending: str) -> list[Path]:
    """Curves, ends and histograms of the groups of one problem."""
    axis = "env_steps" if all(run.is_robot for group in groups for run in group.runs) else "update"
    look, written = plots.line_styles(report.groups), []
    for metric in report.metrics:
        interval = metric.section == "learning"
        found = [(group, figures.curve(group, metric, report.every, interval=interval, axis=axis)) for group in groups]
        curves = [(group, curve) for group, curve in found if curve is not None]
        stem = folder / f"{metric.key.replace('/', '_')}{ending}"
        if curves:
            written.append(write_csv(_points(curves, axis), stem.with_name(f"{stem.name}.csv")))
            written += _draw(partial(plots.draw_curves, curves=curves, metric=metric, look=look, axis=axis), stem)
    rows = {id(group): row for group, row in zip(report.groups, report.tables["results"], strict=True)}
    ends = [(group, rows[id(group)], seeds) for group in groups if (seeds := outcomes.finals(group, report.measure.key))]
    if ends:
        written += _draw(partial(plots.draw_finals, rows=ends, measure=report.measure), folder / f"final{ending}")
    for group, name in zip(groups, _file_names([group.label for group in groups]), strict=True):
        moved = any(value and 0 < value < np.inf for run in group.runs for row in run.tokens for value in row["kl_before"])
        if moved:
            stem = folder / f"kl-per-token-{name}{ending}"
            written += _draw(partial(plots.draw_histogram, group=group, colour=look[group.key]["color"]), stem)
    return written


def _points(curves: Sequence[tuple[Group, figures.Curve]], axis: str) -> list[dict[str, Any]]:
    """What a figure draws, as rows."""
    return [
        {"objective": group.label, "step": step, axis: at, "value": value, "low": low, "high": high}
        for group, curve in curves
        for step, at, value, low, high in zip(curve.step, curve.at, curve.value, curve.low, curve.high, strict=True)
    ]


def _draw(on: Callable[[Any], None], stem: Path) -> list[Path]:
    """One figure as SVG and as PNG."""
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise RunError("exporting figures needs matplotlib. Install it: pip install 'corral[report]'.") from missing
    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    on(axes)
    paths = [stem.with_name(f"{stem.name}{ending}") for ending in (".svg", ".png")]
    for path in paths:
        write_whole(path, partial(figure.savefig, format=path.suffix[1:], dpi=200))
    return paths


def write_csv(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """A table; the columns are those of its first row. A text that a spreadsheet would compute is quoted with '."""

    def write(beside: Path) -> None:
        with beside.open("w", newline="", encoding="utf-8", errors="replace") as file:
            writer = csv.writer(file)
            writer.writerow([_inert(key) for key in rows[0]])
            writer.writerows([_inert(row[key]) for key in rows[0]] for row in rows)

    write_whole(path, write)
    return path


def _inert(value: Any) -> Any:
    """Spreadsheets run what begins with one of these, also behind white space and in full width."""
    return f"'{value}" if isinstance(value, str) and value.lstrip().startswith(_FORMULA) else value


def _file_names(texts: Sequence[str]) -> list[str]:
    """Short names of files, each of its own: of two that are alike as far as a name goes, the later has a number."""
    found: list[str] = []
    for text in texts:
        name = "".join(letter if letter.isalnum() else "-" for letter in text)[:60].strip("-") or "problem"
        same = sum(other == name or other.startswith(f"{name}~") for other in found)
        found.append(f"{name}~{same + 1}" if same else name)
    return found
