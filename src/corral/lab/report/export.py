"""Figures for papers, SVG and PNG, and tables as CSV: what the page shows of all groups and seeds."""

import csv
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from corral.lab.report import figures, outcomes, plots
from corral.lab.report.content import RunReport
from corral.lab.report.forest import sort_pairs
from corral.lab.report.groups import Group
from corral.lab.report.html import shorten
from corral.lab.run.files import disk_sentence, write_whole
from corral.lab.run.text import visible
from corral.validate import RunError, pip_install

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
        written += _draw(
            partial(plots.draw_sweep, sweep=sweep, measure=report.measure, looks=report.looks),
            stem,
            f"{sweep.problem}: means over {sweep.seeds_text}, bands their range",
        )
    return written


def _of_problem(report: RunReport, groups: Sequence[Group], folder: Path, ending: str) -> list[Path]:
    """Curves, ends and histograms of the groups of one problem."""
    axis = "env_steps" if all(run.is_robot for group in groups for run in group.runs) else "update"
    looks = report.looks
    look, written = plots.line_styles(report.groups, looks), []
    about = _about(groups)
    said = f"{about}\nCircles: seeds. Interquartile means with 95 % bootstrap intervals."
    for metric in report.metrics:
        interval = metric.section == "learning"
        found = [(group, figures.curve(group, metric, report.every, interval=interval, axis=axis)) for group in groups]
        curves = [(group, curve) for group, curve in found if curve is not None]
        stem = folder / f"{metric.key.replace('/', '_')}{ending}"
        if curves:
            written.append(write_csv(_points(curves, axis), stem.with_name(f"{stem.name}.csv")))
            written += _draw(
                partial(plots.draw_curves, curves=curves, metric=metric, look=look, axis=axis),
                stem,
                f"{about}\n{_BANDS[interval]}",
            )
    rows = {id(group): row for group, row in zip(report.groups, report.tables["results"], strict=True)}
    ends = [(group, rows[id(group)], seeds) for group in groups if (seeds := outcomes.finals(group, report.measure.key))]
    if ends:
        written += _draw(
            partial(plots.draw_finals, rows=ends, measure=report.measure, look=look), folder / f"final{ending}", said
        )
    pairs = sort_pairs(
        [row for row in report.tables["comparisons"] if row["measure"] == "final" and row["problem"] == groups[0].problem]
    )
    if pairs:
        said = f"{pairs[0]['sentence']}\n{about}. Means of paired differences, Student's 95 % intervals; filled: claims."
        drawn = partial(plots.draw_forest, rows=pairs, looks=looks, what=f"final {report.measure.name}")
        written += _draw(drawn, folder / f"differences-of-pairs{ending}", said, rows=len(pairs))
    for group, name in zip(groups, _file_names([group.label for group in groups]), strict=True):
        moved = any(value and 0 < value < np.inf for run in group.runs for row in run.tokens for value in row["kl_before"])
        if moved:
            stem = folder / f"kl-per-token-{name}{ending}"
            written += _draw(partial(plots.draw_histogram, group=group, colour=look[group.key]["color"]), stem, about)
    return written


def _points(curves: Sequence[tuple[Group, figures.Curve]], axis: str) -> list[dict[str, Any]]:
    """What a figure draws, as rows."""
    return [
        {"objective": group.label, "step": step, axis: at, "value": value, "low": low, "high": high}
        for group, curve in curves
        for step, at, value, low, high in zip(curve.step, curve.at, curve.value, curve.low, curve.high, strict=True)
    ]


_BANDS = {
    True: "Lines: interquartile means over seeds (means of fewer than four). Bands: 95 % bootstrap intervals.",
    False: "Lines: interquartile means over seeds (means of fewer than four). Bands: range of the seeds.",
}


def _about(groups: Sequence[Group]) -> str:
    """What a figure that stands alone says of its runs: task and model, and the seeds."""
    seeds = list(dict.fromkeys(run.seed for group in groups for run in group.runs))
    return visible(shorten(f"{groups[0].problem}, seed{'' if len(seeds) == 1 else 's'} {', '.join(seeds)}", 110))


def _draw(on: Callable[[Any], None], stem: Path, about: str, rows: int = 0) -> list[Path]:
    """One figure as SVG and as PNG, under a line that says what was run."""
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
