"""Is the arm solved, by whom, and which settings were tried? Runs of `robot_study.py --plan arm-tune arm-final` → the page.

python benchmarks/robot_arm.py --runs FOLDER …      runs' folders, or what robot_study.py printed, into results/robots_arm.json
python benchmarks/robot_arm.py                      that file into docs/results/robots.md
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from results import markdown, with_block
from robot_page import PAGE, thousands
from robot_plans import ARM_TRIED
from robot_results import ROWS, run_folders
from robot_study import measured_lines

from corral.lab.report.statistics import difference, holm, sentence, steps_to
from corral.lab.run.files import write_whole

FILE = Path(__file__).parent / "results/robots_arm.json"
NAME = re.compile(r"(?P<job>(arm|arm-tune)-(?P<row>tce|bbrl)-(?P<reward>dense|sparse)-(?P<setting>\S+)-(?P<seed>\d+))")
LINE = re.compile(NAME.pattern + r"\s+step\s+(?P<step>\d+)\s+success (?P<success>\S+)\s+return\s+(?P<return>\S+)")
SAID = {
    "critic": "one plan a context, a critic of contexts",
    "batch-512": "batches of 512 episodes, twice as many",
    "cov-0.01": "bound of the covariance 0.01",
    "cov-0.003": "as the recipe: bound of the covariance 0.003",
    "cov-0.001": "bound of the covariance 0.001",
    "independent-plans": "plans of a context independent, not mirrored",
    "small-steps": "bound of the mean 0.1, held at 0.15, rate 5·10⁻⁴",
    "basis-5": "5 basis functions",
}
"""What `ARM_TRIED` changes, in words."""
COLOURS = {"TCE, best setting": "#2563eb", "TCE, the recipe": "#0891b2", "BBRL, best setting": "#dc2626"}


class Ended(TypedDict):
    """The last measurement of a run, and the way there where its folder is known."""

    row: str
    reward: str
    setting: str
    seed: int
    step: int
    env_steps: int
    success: float
    paid: float
    curve: list[tuple[int, float]]


def read(place: Path) -> Iterator[tuple[str, Ended]]:
    """Name and end of every run in a folder of runs, or in a file that `robot_study.py` printed."""
    if place.is_file():
        for found in LINE.finditer(place.read_text()):
            yield ended(found, int(found["step"]), float(found["success"]), float(found["return"]), [])
    else:
        for folder in run_folders(place):
            if (found := NAME.fullmatch(folder.name)) and (lines := measured_lines(folder)):
                curve = [(int(line["env_steps"]), round(line["success"], 4)) for line in lines]
                yield ended(found, lines[-1]["step"], lines[-1]["success"], lines[-1]["return"], curve)


def ended(found: re.Match[str], step: int, success: float, paid: float, curve: list[tuple[int, float]]) -> tuple[str, Ended]:
    """A run by its name; a batch is as many episodes of 100 steps as its setting says."""
    about = {key: found[key] for key in ("row", "reward", "setting")}
    steps = 100 * step * int(ARM_TRIED[found["setting"]].get("learner__episodes", 1024))
    numbers = {"seed": int(found["seed"]), "step": step, "env_steps": steps, "success": round(success, 4)}
    return found["job"], Ended(**about, **numbers, paid=round(paid, 2), curve=curve)  # type: ignore[typeddict-item]


def grouped(runs: list[Ended]) -> dict[tuple[str, str], list[Ended]]:
    """Runs by row and setting, in the order of rows and seeds."""
    groups: dict[tuple[str, str], list[Ended]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (list(ROWS).index(run["row"]), run["setting"], run["seed"])):
        groups[run["row"], run["setting"]].append(run)
    return groups


def final_table(runs: list[Ended]) -> str:
    """Success of every seed, row by row, and the steps to 95 %."""
    lines = []
    for (row, setting), members in grouped(runs).items():
        success = [100 * run["success"] for run in members]
        steps = sorted({run["env_steps"] for run in members})
        far = thousands(steps[0]) if len(steps) == 1 else f"{steps[0] / 1e6:.1f} to {thousands(steps[-1])}"
        reached = [steps_to([(x, y) for x, y in run["curve"]], 0.95) for run in members if run["curve"]]
        median = float(np.median(reached)) if reached else np.inf
        each = ", ".join(f"{value:.1f}" for value in success)
        paid = f"{np.mean([run['paid'] for run in members]):.1f}".replace("-", "−")
        there = "–" if np.isinf(median) else f"{thousands(median)} ({len(reached)} seeds)"
        lines.append([ROWS[row], SAID[setting], str(len(members)), far, each, f"{np.mean(success):.1f}", paid, there])
    head = ["", "setting", "seeds", "steps", "success of each, %", "mean", "return", "median steps to 95 %"]
    return markdown(head, lines)


def tuning_table(tuned: dict[str, Ended]) -> str:
    """Success and return of every setting that was tried."""
    columns = [(row, reward) for row in ("tce", "bbrl") for reward in ("dense", "sparse")]
    found = {(run["row"], run["reward"], run["setting"]): run for run in tuned.values()}
    best = {at: max((run["success"], run["paid"]) for key, run in found.items() if key[:2] == at) for at in columns}
    lines = []
    for name in ARM_TRIED:
        cells = []
        for at in columns:
            run = found[*at, name]
            cell = f"{100 * run['success']:.0f} %, {run['paid']:.1f}".replace("-", "−")
            cells.append(f"**{cell}**" if (run["success"], run["paid"]) == best[at] else cell)
        lines.append([SAID[name], *cells])
    return markdown(["", *(f"{ROWS[row]}, {reward}" for row, reward in columns)], lines)


def claims(final: list[Ended], chosen: dict[tuple[str, str], str]) -> list[str]:
    """TCE against BBRL, each with the setting that did best, by pairs of equal seeds; all comparisons are made together."""
    made = []
    for reward in ("dense", "sparse"):
        runs = [run for run in final if run["reward"] == reward and run["setting"] == chosen[run["row"], reward]]
        tce, bbrl = ({str(run["seed"]): run for run in runs if run["row"] == row} for row in ("tce", "bbrl"))
        if len(set(tce) & set(bbrl)) > 1:
            points = [{seed: 100 * run["success"] for seed, run in rows.items()} for rows in (tce, bbrl)]
            paid = [{seed: run["paid"] for seed, run in rows.items()} for rows in (tce, bbrl)]
            made += [(f"success on {reward}", "points", difference(*points)), (f"return on {reward}", "", difference(*paid))]
    holds = holm([found.p for *_, found in made])
    return [
        sentence("TCE", "BBRL", what, found, holds=held, among=len(made), unit=unit)
        for (what, unit, found), held in zip(made, holds, strict=True)
    ]


def block(runs: dict[str, Ended]) -> str:
    """What the page says of the arm's long runs."""
    tuned = {name: run for name, run in runs.items() if name.startswith("arm-tune")}
    final = [run for name, run in runs.items() if name not in tuned]
    text = ""
    for reward in ("dense", "sparse"):
        text += f"**{reward.capitalize()}**\n\n{final_table([run for run in final if run['reward'] == reward])}\n"
    keys = {(run["row"], run["reward"]) for run in tuned.values()}
    chosen = {
        key: max((run["success"], run["paid"], run["setting"]) for run in tuned.values() if (run["row"], run["reward"]) == key)[
            2
        ]
        for key in keys
    }
    text += "".join(f"- {one}\n" for one in claims(final, chosen))
    steps = thousands(max(run["env_steps"] for run in tuned.values()))
    text += f"\nWhat was tried, on seed 100 with {steps} steps each: success, return; the best is bold.\n\n"
    return text + tuning_table(tuned)


def plot(final: list[Ended], path: Path) -> None:
    """Success of every seed over the steps, the median of a row's seeds thick."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "corral"  # the same file from the same numbers
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9.2, 3.2), sharey=True)
    for axis, reward in zip(axes, ("dense", "sparse"), strict=True):
        for (row, setting), members in grouped([run for run in final if run["reward"] == reward]).items():
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
    figure.tight_layout()
    write_whole(path, lambda beside: figure.savefig(beside, format="svg", metadata={"Date": None}))
    pyplot.close(figure)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs="*", help="later places win over earlier ones")
    options = parser.parse_args()
    if options.runs:
        found: dict[str, Ended] = {}
        for place in options.runs:
            found |= read(place)
        lines: list[Any] = [f"{json.dumps(name)}:{json.dumps(found[name], separators=(',', ':'))}" for name in sorted(found)]
        write_whole(FILE, lambda beside: beside.write_text("{\n" + ",\n".join(lines) + "\n}\n"))
    runs: dict[str, Ended] = json.loads(FILE.read_text())
    page = with_block(PAGE.read_text(), "arm", block(runs))
    plot([run for name, run in runs.items() if not name.startswith("arm-tune")], PAGE.with_name("robots-arm.svg"))
    write_whole(PAGE, lambda beside: beside.write_text(page))


if __name__ == "__main__":
    main()
