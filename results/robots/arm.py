"""Is the via-point arm solved, by whom, and which settings were tried? Runs of the plans `arm-tune` and `arm-final`."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from corral.lab.report.statistics import difference, holm, steps_to
from results.packed import Row
from results.pages import interval_text, new_figure, p_text, save_figure, spaced_table, thousands
from results.robots.runs import ROWS
from results.runs import where

SAID = {
    "critic": "one plan a context, a critic of contexts",
    "batch-512": "batches of 512 episodes, twice as many",
    "cov-0.01": "bound of the covariance 0.01",
    "cov-0.003": "as the recipe: bound of the covariance 0.003",
    "cov-0.001": "bound of the covariance 0.001",
    "independent-plans": "plans of a context independent, not mirrored",
    "small-steps": "bound of the mean 0.1, of the network 0.15, rate 5·10⁻⁴",
    "basis-5": "5 basis functions",
}
"""Settings that were tried, as changes of the recipe via_point_long."""
COLOURS = {"TCE, best setting": "#2563eb", "TCE, the recipe": "#0891b2", "BBRL, best setting": "#dc2626"}
REWARDS = ("dense", "sparse")


def is_tuning(run: Row) -> bool:
    """True if a run served to choose a setting, and is no evidence."""
    return run["name"].startswith("arm-tune")


def reached(run: Row) -> tuple[float, float]:
    """Success, then return."""
    return run["success"], run["paid"]


def grouped(runs: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Runs by row and setting, in the order of rows and seeds."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (list(ROWS).index(run["row"]), run["setting"], run["seed"])):
        groups[run["row"], run["setting"]].append(run)
    return groups


def final_table(runs: Sequence[Row]) -> str:
    """Success of every seed, row by row, and the steps to 95 %."""
    lines = []
    for (row, setting), members in grouped(runs).items():
        success = [100 * run["success"] for run in members]
        steps = sorted({run["env_steps"] for run in members})
        far = thousands(steps[0]) if len(steps) == 1 else f"{steps[0] / 1e6:.1f} to {thousands(steps[-1])}"
        solved = [steps_to([(x, y) for x, y in run["curve"]], 0.95) for run in members if run["curve"]]
        median = float(np.median(solved)) if solved else np.inf
        each, mean = ", ".join(f"{value:.1f}" for value in success), f"{np.mean(success):.1f}"
        paid = f"{np.mean([run['paid'] for run in members]):.1f}".replace("-", "−")
        there = "–" if np.isinf(median) else f"{thousands(median)} ({len(solved)} seeds)"
        lines.append([ROWS[row], SAID[setting], str(len(members)), far, each, mean, paid, there])
    head = ["", "setting", "seeds", "steps", "success of each, %", "mean", "return", "median steps to 95 %"]
    return spaced_table(head, lines)


def tuning_table(tuned: Sequence[Row]) -> str:
    """Success and return of every setting that was tried, the best bold."""
    found = {(run["row"], run["reward"], run["setting"]): run for run in tuned}
    columns = [(row, reward) for row in ("tce", "bbrl") for reward in REWARDS]
    best = {at: max(reached(run) for key, run in found.items() if key[:2] == at) for at in columns}
    lines = []
    for name in SAID:
        cells = [SAID[name]]
        for at in columns:
            success, paid = reached(found[*at, name])
            cell = f"{100 * success:.0f} %, {paid:.1f}".replace("-", "−")
            cells.append(f"**{cell}**" if (success, paid) == best[at] else cell)
        lines.append(cells)
    return spaced_table(["", *(f"{ROWS[row]}, {reward}" for row, reward in columns)], lines)


def compared_table(final: Sequence[Row], chosen: dict[tuple[str, str], str]) -> str:
    """TCE less BBRL, each with the setting that did best, by pairs of equal seeds; all comparisons are corrected together."""
    made = []
    for reward in REWARDS:
        tce, bbrl = (where(final, reward=reward, row=row, setting=chosen[row, reward]) for row in ("tce", "bbrl"))
        if len({run["seed"] for run in tce} & {run["seed"] for run in bbrl}) > 1:
            for what, key, factor in (("success, points", "success", 100), ("return", "paid", 1)):
                sides = ({str(run["seed"]): factor * run[key] for run in rows} for rows in (tce, bbrl))
                made.append((f"{reward}: {what}", difference(*sides)))
    adjusted = holm([gap.p for _, gap in made])
    lines = [[name, interval_text(gap), str(gap.seeds), p_text(p)] for (name, gap), p in zip(made, adjusted, strict=True)]
    return spaced_table(["TCE − BBRL", "difference (95 %)", "seeds", "p (Holm)"], lines)


def block(runs: Sequence[Row]) -> str:
    """Block of the page on the arm's long runs."""
    tuned, final = ([run for run in runs if is_tuning(run) == wanted] for wanted in (True, False))
    by_success = sorted(tuned, key=lambda run: (*reached(run), run["setting"]))
    chosen = {(run["row"], run["reward"]): run["setting"] for run in by_success}  # the best is the last
    text = "".join(f"**{reward.capitalize()}**\n\n{final_table(where(final, reward=reward))}\n" for reward in REWARDS)
    steps = thousands(max(run["env_steps"] for run in tuned))
    text += (
        f"{compared_table(final, chosen)}\nSettings on seed 100 with {steps} steps each, the best in bold: success, return.\n\n"
    )
    return text + tuning_table(tuned)


def draw(runs: Sequence[Row], path: Path) -> None:
    """Success of every seed over the steps, the median of a row's seeds thick."""
    figure, axes = new_figure(2, figsize=(9.2, 3.2), sharey=True)
    for axis, reward in zip(axes, REWARDS, strict=True):
        for (row, setting), members in grouped([run for run in runs if not is_tuning(run) and run["reward"] == reward]).items():
            name = f"{ROWS[row]}, {'the recipe' if setting == 'cov-0.003' else 'best setting'}"
            curves = [np.array(run["curve"]).T for run in members if run["curve"]]
            for steps, success in curves:
                axis.plot(steps / 1e6, 100 * success, color=COLOURS[name], lw=0.6, alpha=0.4)
            middle = 100 * np.median([success for _, success in curves], 0)
            axis.plot(curves[0][0] / 1e6, middle, color=COLOURS[name], lw=2, label=name)
        axis.axhline(95, color="#9ca3af", lw=0.8, ls=":")
        axis.set(title=f"via-point arm, {reward}", xlabel="million environment steps")
    axes[0].set_ylabel("success, %")
    axes[0].legend(fontsize=8, frameon=False, loc="lower right")
    save_figure(figure, path)
