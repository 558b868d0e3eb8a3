"""docs/results/robots.md: tables, sentences and figures from the rows of results/robots."""

import re
import textwrap
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path

import numpy as np

from corral.lab.report.statistics import (
    Difference,
    difference,
    holm,
    interquartile_curve,
    interquartile_mean,
    sentence,
    steps_to,
)
from corral.lab.run.text import count
from results.packed import Row, read
from results.pages import DOCS, Texts, fill, new_figure, save_figure, spaced_table, thousands
from results.robots import arm, credit
from results.robots.runs import FILES, LENGTHS, TASKS

PAGE = DOCS / "results/robots.md"
ORDER = ("TCE", "BBRL", "PPO", "TRPL", "SAC")
"""Of rows by the name they begin with; those that begin alike are in the order of the alphabet."""
COLOURS = {
    "TCE": ("#2563eb", "#0891b2", "#7c3aed", "#1e3a8a", "#6366f1", "#38bdf8", "#c026d3", "#0f172a"),
    "BBRL": ("#dc2626", "#be185d", "#f87171"),
    "PPO": ("#059669", "#84cc16", "#14b8a6", "#166534", "#a3a300", "#4d7c0f"), "TRPL": ("#4b5563", "#9ca3af"),
    "SAC": ("#d97706", "#92400e", "#fbbf24", "#b45309"),
}  # fmt: skip
"""Of the rows that begin with each, in turn."""
SHARES = (0.5, 0.8, 0.95)
Rows = dict[str, list[Row]]


def by_task(runs: Iterable[Row]) -> dict[str, Rows]:
    """Runs of each task by row, in the rows' order; those that came less than half as far as they were to are left out."""
    tasks: dict[str, Rows] = {}
    for task, group in groupby(sorted(runs, key=place), lambda run: run["task"]):
        kept = [run for run in group if 2 * run["iterations"] >= run["asked"]]
        tasks[task] = {
            row: [run for run in kept if run["row"] == row] for row in sorted({run["row"] for run in kept}, key=rank)
        }
    return {task: rows for task, rows in tasks.items() if rows}


def rank(row: str) -> tuple[int, str]:
    """Sort key of a row in tables."""
    return ORDER.index(row.split(",")[0]), row


def colours(tasks: dict[str, Rows]) -> dict[str, str]:
    """Colour of each row, the same in every figure."""
    every = sorted({row for rows in tasks.values() for row in rows}, key=rank)
    alike = {first: list(found) for first, found in groupby(every, lambda row: row.split(",")[0])}
    return {
        row: COLOURS[first][number % len(COLOURS[first])] for first, rows in alike.items() for number, row in enumerate(rows)
    }


def place(run: Row) -> tuple[int, str]:
    """Sort key of a run's task on the page."""
    return list(TASKS.values()).index(run["task"].split(",")[0]), run["task"]


def ends(rows: Rows) -> dict[str, int]:
    """Environment steps at which each row is looked at: the most at which all of its runs were measured."""
    return {row: common_end(runs) for row, runs in rows.items()}


def common_end(runs: list[Row]) -> int:
    """The most environment steps at which all of these were measured."""
    return max(set.intersection(*(set(run["env_steps"]) for run in runs)))


def at(run: Row, name: str, end: int) -> float | None:
    """Measurement of a run at environment step `end`."""
    return run[name][run["env_steps"].index(end)]


def values(runs: list[Row], name: str, end: int) -> np.ndarray:
    """Measurements at environment step `end` of every seed that has one."""
    return np.array([value for run in runs if (value := at(run, name, end)) is not None], dtype=float)


def estimate(scores: np.ndarray, form: str = "{:.1f}") -> str:
    """Interquartile mean, and its interval."""
    if not len(scores):
        return "–"
    found = interquartile_mean(scores)
    text = form.format(found.value)
    if found.low is not None:
        text += f" ({form.format(found.low)} … {form.format(found.high)})"
    return text.replace("-", "−")


def results_table(rows: Rows) -> str:
    """Return and success at the end, and what they cost where most of the task's runs were made."""
    versions = [run["versions"] for runs in rows.values() for run in runs]
    usual, lines = max(versions, key=versions.count), []
    for (row, runs), end in zip(rows.items(), ends(rows).values(), strict=True):
        timed = [run["seconds"] * end / (run["iterations"] * run["batch"]) for run in runs if run["versions"] == usual]
        seconds = f"{np.median(timed):.0f}" if timed else "–"
        paid, success = values(runs, "return", end), 100 * values(runs, "success", end)
        lines.append([row, str(len(runs)), thousands(end), estimate(paid), estimate(success, "{:.0f}"), seconds])
    return spaced_table(["", "seeds", "steps", "return", "success, %", "seconds"], lines)


def efficiency_table(rows: Rows) -> str:
    """Environment steps to shares of the way from the first return to the best final one: median of the seeds."""
    end = ends(rows)
    highest = max(interquartile_mean(values(runs, "return", end[row])).value for row, runs in rows.items())
    lines = []
    for row, runs in rows.items():
        cells = []
        for share in SHARES:
            reached = []
            for run in runs:
                points = [(x, y) for x, y in zip(run["env_steps"], run["return"], strict=True) if x <= end[row]]
                way = highest - run["return"][0]
                reached.append(steps_to(points, run["return"][0] + share * way) if way > 0 else np.inf)
            got, middle = int(np.isfinite(reached).sum()), float(np.median(reached))
            cells.append(("–" if np.isinf(middle) else thousands(middle)) + f" ({got} of {len(runs)})")
        lines.append([row, *cells])
    return spaced_table(
        ["steps to", *(f"{share:.0%} of the way to {highest:.1f}".replace("-", "−") for share in SHARES)], lines
    )


def smoothness_table(rows: Rows) -> str:
    """While exploring, averaged over training, and of the policy's own motions at the end: medians of the seeds."""
    explored = ("explore/jerk", "explore/spectrum", "explore/torque_rate", "explore/autocorrelation")
    moved = ("motion/jerk", "motion/spectrum", "motion/torque_rate")
    lines = []
    for (row, runs), end in zip(rows.items(), ends(rows).values(), strict=True):
        means = [[mean_until(run, name, end) for run in runs] for name in explored]
        last = [[at(run, name, end) for run in runs] for name in moved]
        lines.append([row, *(middle(found) for found in [*means, *last])])
    head = ["", "exploring: LDJ", "SPARC", "torque rate", "autocorrelation", "at the end: LDJ", "SPARC", "torque rate"]
    return spaced_table(head, lines)


def mean_until(run: Row, name: str, end: int) -> float | None:
    """Mean of a run's measurements up to `end`."""
    found = [y for x, y in zip(run["env_steps"], run[name], strict=True) if x <= end and y is not None]
    return float(np.mean(found)) if found else None


def middle(found: list[float | None]) -> str:
    """The median of those that are there."""
    there = [value for value in found if value is not None]
    return f"{np.median(there):.3g}".replace("-", "−") if there else "–"


OURS = (
    "TCE, 4 plans a context, credit for what comes later",
    "TCE, 4 plans a context",
    "TCE, credit for what comes later, segments of the first 1 s",
    "TCE, credit for what comes later",
    "TCE",
)
"""What the other rows of a task are compared with: the first that it has."""


def claims(tasks: dict[str, Rows]) -> dict[str, list[str]]:
    """TCE against every other row of each task, by pairs of equal seeds; all comparisons of the page are made together.

    Rows that were measured at other steps are compared on the line between two measurements.
    """
    made: list[tuple[str, str, str, Difference, int]] = []
    for task, rows in tasks.items():
        own = best(rows, "TCE")
        for row in rows:
            if own is None or row == own:
                continue
            end = min(run["env_steps"][-1] for run in [*rows[own], *rows[row]])  # equal steps, where one row has fewer
            ours, theirs = (
                {str(run["seed"]): float(np.interp(end, run["env_steps"], run["return"])) for run in rows[one]}
                for one in (own, row)
            )
            if set(ours) & set(theirs):
                made.append((task, own, row, difference(ours, theirs), end))
    holds = holm([found.p for *_, found, _ in made])
    said: dict[str, list[str]] = {task: [] for task in tasks}
    for (task, one, other, found, end), held in zip(made, holds, strict=True):
        measure = f"return after {thousands(end)} steps"
        said[task].append(sentence(one, other, measure, found, holds=held, among=len(made), unit=""))
    return said


def best(rows: Rows, kind: str) -> str | None:
    """The row that stands for an algorithm: TCE's by `OURS`, of the others the one that succeeds most, then by return."""
    if kind == "TCE":
        return next((name for name in OURS if name in rows), None)
    end, found = ends(rows), [row for row in rows if row.split(",")[0] == kind]
    means = {row: [interquartile_mean(values(rows[row], of, end[row])).value for of in ("success", "return")] for row in found}
    return max(found, key=lambda row: means[row], default=None)


def glance_table(tasks: dict[str, Rows]) -> str:
    """Success of each algorithm on the tasks with long runs, and the seeds and steps that it had."""
    long = {task: rows for task, rows in tasks.items() if task.endswith(tuple(LENGTHS.values()))}
    kinds = [kind for kind in ORDER if any(best(rows, kind) for rows in long.values())]
    lines = []
    for task, rows in long.items():
        cells, end = [], ends(rows)
        for kind in kinds:
            row = best(rows, kind)
            if row is None:
                cells.append("–")
                continue
            success = 100 * interquartile_mean(values(rows[row], "success", end[row])).value
            cells.append(f"{success:.0f} % ({count(len(rows[row]), 'seed')}, {end[row] / 1e6:.3g} million)")
        lines.append([f"[{task}](#{anchor(task)})", *cells])
    return spaced_table(["success on held-out contexts", *kinds], lines)


def anchor(title: str) -> str:
    """Anchor of a section, as mkdocs names it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()))


def unfinished(rows: Rows) -> list[str]:
    """Rows with a run that did not come to its end."""
    return [row for row, runs in rows.items() if any(run["iterations"] < run["asked"] for run in runs)]


def moved(rows: Rows) -> list[str]:
    """Rows with runs that began in MuJoCo Warp and were resumed in MuJoCo, and after how many steps."""
    found = []
    for row, runs in rows.items():
        after = [run["simulated"][-1]["after"] * run["batch"] for run in runs if run.get("simulated")]
        if after:
            found.append(f"{row} ({count(len(after), 'run')}, after {thousands(min(after))} steps or more)")
    return found


def section(task: str, rows: Rows, said: list[str]) -> str:
    """Section of the page on one task."""
    cut = [f"{row} ({thousands(max(run['asked'] * run['batch'] for run in rows[row]))})" for row in unfinished(rows)]
    text = f"### {task[0].upper()}{task[1:]}\n\n{results_table(rows)}\n"
    if cut:
        text += f"Not all runs came to the end over which their learning rates fall: {', '.join(cut)}.\n\n"
    if elsewhere := moved(rows):
        text += f"Begun in MuJoCo Warp, resumed in MuJoCo: {', '.join(elsewhere)}.\n\n"
    text += "".join(f"- {one}\n" for one in said) + ("\n" if said else "")
    return text + f"{efficiency_table(rows)}\n{smoothness_table(rows)}"


def draw_curves(tasks: dict[str, Rows], name: str, path: Path) -> None:
    """Learning curves of every task: interquartile mean over the seeds, with its interval."""
    colour_of, columns = colours(tasks), min(3, len(tasks))
    height = -(-len(tasks) // columns)
    figure, axes = new_figure(columns, height, figsize=(4.6 * columns, 3.4 * height))
    for axis in axes[len(tasks) :]:
        axis.set_visible(False)
    for axis, (task, rows) in zip(axes, tasks.items(), strict=False):
        for (row, runs), end in zip(rows.items(), ends(rows).values(), strict=True):
            steps = [x for x in runs[0]["env_steps"] if x <= end]
            value, low, high = interquartile_curve(np.array([[at(run, name, x) for x in steps] for run in runs], dtype=float))
            millions, colour = np.array(steps) / 1e6, colour_of[row]
            axis.plot(millions, value, color=colour, lw=1.5, label=f"{row} ({count(len(runs), 'seed')})")
            axis.fill_between(millions, low, high, color=colour, alpha=0.15, lw=0)
        axis.set(xlabel="million environment steps", ylabel=name)
        axis.set_title(textwrap.fill(task, 52), fontsize=10)
        axis.legend(fontsize=6, frameon=False)
    save_figure(figure, path)


def blocks(tasks: dict[str, Rows]) -> dict[str, Callable[[], str]]:
    """Name → text of every block."""
    said = claims(tasks)
    return {
        "glance": lambda: glance_table(tasks),
        "tasks": lambda: "\n".join(section(task, rows, said[task]) for task, rows in tasks.items()),
        "credit": lambda: credit.block(read(FILES["credit"])),
        "arm": lambda: arm.block(read(FILES["arm"])),
    }


def pages(read_page: Callable[[Path], str]) -> Texts:
    """The page as the raw rows have it."""
    return fill(read_page, (PAGE,), "measured", blocks(by_task(read(FILES["runs"]))))


def draw(folder: Path = PAGE.parent) -> None:
    """Write the figures."""
    tasks = by_task(read(FILES["runs"]))
    for name in ("return", "success"):
        draw_curves(tasks, name, folder / f"robots-{name}.svg")
    arm.draw(read(FILES["arm"]), folder / "robots-arm.svg")
