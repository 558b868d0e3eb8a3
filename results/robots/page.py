"""docs/results/robots.md: tables, sentences and figures from the rows of results/robots."""

import re
import textwrap
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from corral.lab.report.statistics import (
    Difference,
    difference,
    holm,
    interquartile_curve,
    interquartile_mean,
    steps_to,
)
from corral.lab.run.text import count
from results.packed import Row, read
from results.pages import DOCS, Texts, fill, interval_text, new_figure, p_text, save_figure, spaced_table, thousands
from results.robots import arm, credit
from results.robots.runs import FILES, HEIGHT, LENGTHS, TASKS

PAGE = DOCS / "results/robots.md"
ORDER = ("TCE", "BBRL", "TOP-ERL", "PPO", "TRPL", "SAC")
"""Of rows by the name they begin with; those that begin alike are in the order of the alphabet."""
COLOURS = {
    "TCE": ("#2563eb", "#0891b2", "#7c3aed", "#1e3a8a", "#6366f1", "#38bdf8", "#c026d3", "#0f172a"),
    "BBRL": ("#dc2626", "#be185d", "#f87171"),
    "TOP-ERL": ("#0d9488", "#115e59"),
    "PPO": ("#059669", "#84cc16", "#14b8a6", "#166534", "#a3a300", "#4d7c0f"), "TRPL": ("#4b5563", "#9ca3af"),
    "SAC": ("#d97706", "#92400e", "#fbbf24", "#b45309"),
}  # fmt: skip
"""Of the rows that begin with each, in turn."""
Rows = dict[str, list[Row]]
Compared = dict[str, tuple[Difference, float]]
"""By row: what TCE's row is above it in return, and the adjusted p-value."""


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


def results_table(rows: Rows, compared: Compared) -> str:
    """Return, success and effort of each row at its end, and what the row in bold is above the others at equal steps."""
    end, own, lines = ends(rows), best(rows, "TCE"), []
    highest = max(interquartile_mean(values(runs, "return", end[row])).value for row, runs in rows.items())
    high = any(HEIGHT in run for runs in rows.values() for run in runs)  # of the hopper, in runs since it is measured
    for row, runs in rows.items():
        paid, success = (values(runs, name, end[row]) for name in ("return", "success"))
        cells = [row, str(len(runs)), thousands(end[row]), estimate(paid), estimate(100 * success, "{:.0f}")]
        cells += [estimate(values([run for run in runs if HEIGHT in run], HEIGHT, end[row]), "{:.2f}")] if high else []
        cells += [
            way_there(runs, end[row], highest),
            middle([mean_until(run, "explore/torque_rate", end[row]) for run in runs]),
        ]
        found = compared.get(row)
        cells += ["–", "–"] if found is None else [interval_text(found[0]), p_text(found[1])]
        lines.append([f"**{row}**", *cells[1:]] if row == own and compared else cells)
    head = ["", "seeds", "steps", "return", "success, %", *["max height, m"] * high, "steps to 80 %", "torque rate"]
    head += ["bold row − this one", "p (Holm)"]
    return spaced_table(head, lines)


def way_there(runs: list[Row], end: int, highest: float) -> str:
    """Median environment steps to 80 % of the way from the first return to the best final one, and seeds that get there."""
    reached = []
    for run in runs:
        points = [(x, y) for x, y in zip(run["env_steps"], run["return"], strict=True) if x <= end]
        way = highest - run["return"][0]
        reached.append(steps_to(points, run["return"][0] + 0.8 * way) if way > 0 else np.inf)
    median = float(np.median(reached))
    return ("–" if np.isinf(median) else thousands(median)) + f" ({int(np.isfinite(reached).sum())} of {len(runs)})"


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


def compare(tasks: dict[str, Rows]) -> dict[str, Compared]:
    """TCE less every other row of each task, by pairs of equal seeds; all comparisons of the page are corrected together.

    Rows that were measured at other steps are compared on the line between two measurements.
    """
    made: list[tuple[str, str, Difference]] = []
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
                made.append((task, row, difference(ours, theirs)))
    found: dict[str, Compared] = {task: {} for task in tasks}
    for (task, row, gap), p in zip(made, holm([gap.p for *_, gap in made]), strict=True):
        found[task][row] = gap, p
    return found


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


def section(task: str, rows: Rows, compared: Compared) -> str:
    """Section of the page on one task."""
    cut = [f"{row} ({thousands(max(run['asked'] * run['batch'] for run in rows[row]))})" for row in unfinished(rows)]
    text = f"### {task[0].upper()}{task[1:]}\n\n{results_table(rows, compared)}"
    if cut:
        text += f"\nNot all runs came to the end over which their learning rates fall: {', '.join(cut)}.\n"
    if elsewhere := moved(rows):
        text += f"\nBegun in MuJoCo Warp, resumed in MuJoCo: {', '.join(elsewhere)}.\n"
    return text


class Advice(NamedTuple):
    """A row of the page's first table."""

    situation: str
    use: str
    task: str
    row: str
    """What TCE is compared with."""


ADVICE = (
    Advice("rewards on the way, few steps", "TCE", "via-point arm, dense", "BBRL"),
    Advice("a reward at two moments, few steps", "TCE", "via-point arm, sparse", "BBRL"),
    Advice("plans or single steps?", "TCE", "via-point arm, sparse", "PPO"),
    Advice("a push decides all later rewards", "TCE with credit for what comes later",
           "box pushing, dense, learned in MuJoCo Warp, up to 10 million steps", "BBRL, 4 plans a context"),
    Advice("all reward at the end", "BBRL, or TCE with segments where the plan moves",
           "hopper jump, sparse, up to 10 million steps", "BBRL"),
    Advice("reach (Meta-World)", "TCE", "Meta-World, reach-v3, up to 10 million steps", "BBRL, 4 plans a context"),
    Advice("press a button (Meta-World)", "TCE", "Meta-World, button-press-v3, up to 10 million steps", "PPO"),
    Advice("open a door (Meta-World)", "PPO", "Meta-World, door-open-v3, up to 10 million steps", "PPO"),
)  # fmt: skip


def advice(compared: dict[str, Compared]) -> str:
    """What to use in which situation, and the difference in return that supports it."""
    lines = []
    for one in ADVICE:
        gap, p = compared[one.task][one.row]
        other = one.row.split(",")[0]
        task = f"[{one.task.split(', up to')[0].split(', learned')[0]}](#{anchor(one.task)})"
        cells = [f"{interval_text(gap)} over {other}", str(gap.seeds), p_text(p)]
        lines.append([one.situation, one.use, *cells, task])
    return spaced_table(["situation", "use", "return of TCE (95 %)", "seeds", "p (Holm)", "task"], lines)


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
    compared = compare(tasks)
    return {
        "advice": lambda: advice(compared),
        "glance": lambda: glance_table(tasks),
        "tasks": lambda: "\n".join(section(task, rows, compared[task]) for task, rows in tasks.items()),
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
