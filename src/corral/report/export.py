"""Figures for papers, SVG and PNG, and tables as CSV: what the page shows of all groups and seeds."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corral.report import figures
from corral.report.content import Report
from corral.report.groups import Group
from corral.report.html import visible
from corral.run.files import RunError, disk_sentence, write_whole

COLOURS = ("#1f5fa8", "#c2500a", "#1a7f5a", "#9c3d88", "#8a6d00", "#117a8b", "#b3263c", "#555d6b")
"""As on the page."""

DASHES = ("-", "--", ":", "-.")


def export(report: Report, folder: Path) -> list[Path]:
    """Every figure twice, every table once, and the points of every curve."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(disk_sentence(error, folder)) from error
    written = [write_csv(rows, folder / f"{name}.csv") for name, rows in report.tables.items() if rows]
    for metric in report.metrics:
        name = metric.key.replace("/", "_")
        for problem in dict.fromkeys(group.problem for group in report.groups):
            groups = [group for group in report.groups if group.problem == problem]
            stem = name if len({group.problem for group in report.groups}) == 1 else f"{name}-{_file_name(problem)}"
            rows = points(groups, metric, report.every)
            if rows:
                written += [write_csv(rows, folder / f"{stem}.csv"), *draw(report, groups, metric, folder / stem)]
    return written


def points(groups: Sequence[Group], metric: figures.Metric, every: int) -> list[dict[str, Any]]:
    """What a figure draws, as rows."""
    rows = []
    for group in groups:
        curve = figures.curve(group, metric, every, interval=metric.section == "learning")
        for step, update, value, low, high in zip(*_columns(curve), strict=True):
            rows.append({"objective": group.label, "step": step, "update": update, "value": value, "low": low, "high": high})
    return rows


def draw(report: Report, groups: Sequence[Group], metric: figures.Metric, stem: Path) -> list[Path]:
    """One figure as SVG and as PNG."""
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise RunError("exporting figures needs matplotlib. Install it: pip install 'corral[report]'.") from missing
    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    axes = figure.add_subplot()
    objectives = list(dict.fromkeys(group.objective for group in report.groups))
    settings = list(dict.fromkeys(group.setting for group in report.groups))
    scale = 100.0 if metric.percent else 1.0
    for group in groups:
        curve = figures.curve(group, metric, report.every, interval=metric.section == "learning")
        if curve is None:
            continue
        look = {"color": COLOURS[objectives.index(group.objective) % 8], "linestyle": DASHES[settings.index(group.setting) % 4]}
        value, low, high = ([scale * number for number in column] for column in (curve.value, curve.low, curve.high))
        # A label that begins with _ is hidden, and $ begins a formula: neither is for labels of ours to do.
        label = f"{visible(group.label)} ({curve.seeds})".replace("$", r"\$")
        axes.plot(curve.update, value, label=label if not label.startswith("_") else f" {label}", **look)
        axes.fill_between(curve.update, low, high, color=look["color"], alpha=0.16, linewidth=0)
    if metric.log and any(number > 0 for line in axes.lines for number in line.get_ydata()):
        axes.set_yscale("log")
    axes.set(xlabel="updates", ylabel=f"{metric.title}{' (%)' if metric.percent else ''}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize="small", title="objective (seeds)", title_fontsize="small")
    paths = [stem.with_name(f"{stem.name}{ending}") for ending in (".svg", ".png")]
    for path in paths:
        write_whole(path, lambda beside, kind=path.suffix[1:]: figure.savefig(beside, format=kind, dpi=200))
    return paths


def write_csv(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """A table; the columns are those of its first row. A text that a spreadsheet would compute is quoted with '."""

    def write(beside: Path) -> None:
        with beside.open("w", newline="", encoding="utf-8", errors="replace") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows({key: _inert(value) for key, value in row.items()} for row in rows)

    write_whole(path, write)
    return path


def _columns(curve: figures.Curve | None) -> tuple[Sequence[Any], ...]:
    return ([],) * 5 if curve is None else (curve.step, curve.update, curve.value, curve.low, curve.high)


def _inert(value: Any) -> Any:
    """Spreadsheets run what begins with one of these."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text)[:60].strip("-") or "problem"
