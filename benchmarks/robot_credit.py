"""Why TCE stands still on hopper jump: runs of `robot_study.py --plan hopper-credit` → docs/results/robots.md.

python benchmarks/robot_credit.py --runs FOLDER     runs' folders into results/robots_credit.json, beside those it has
python benchmarks/robot_credit.py                   that file into the page
"""

import argparse
import json
import re
from pathlib import Path

import numpy as np
from results import markdown, with_block
from robot_page import PAGE
from robot_results import run_folders
from robot_study import measured_lines

from corral.lab.report.statistics import difference, holm, sentence
from corral.lab.run.files import write_whole

FILE = Path(__file__).parent / "results/robots_credit.json"
NAME = re.compile(r"hopper-2M-(?P<row>.+)-(?P<seed>\d+)")
SAID = {
    "tce": "TCE",
    "tce-to-go": "TCE, credit for what comes later",
    "tce-plans": "TCE, four plans a context",
    "tce-plans-to-go": "TCE, four plans a context, credit for what comes later",
    "tce-moving": "TCE, credit for what comes later, segments of the first second",
    "tce-take-off": "TCE, paid at take-off",
    "bbrl": "BBRL",
    "bbrl-plans": "BBRL, four plans a context",
}
"""Rows of the plan, in words; each is compared with the first."""
Curves = dict[str, dict[str, list[tuple[int, float, float]]]]
"""Row → seed → environment steps, return and success of each measurement."""


def read(place: Path) -> Curves:
    """All finished runs in a folder."""
    found: Curves = {}
    for folder in sorted(run_folders(place)):
        if (name := NAME.fullmatch(folder.name)) and (folder / "summary.json").exists():
            curve = [
                (line["env_steps"], round(line["return"], 3), round(line["success"], 4)) for line in measured_lines(folder)
            ]
            found.setdefault(name["row"], {})[name["seed"]] = curve
    return found


def block(runs: Curves) -> str:
    """Ends of all seeds, and each row against plain TCE by pairs of equal seeds, all comparisons made together."""
    ends = {row: {seed: curve[-1] for seed, curve in runs[row].items()} for row in SAID if row in runs}
    lines = []
    for row, seeds in ends.items():
        paid, success = ([end[k] for end in seeds.values()] for k in (1, 2))
        each = ", ".join(f"{value:.1f}" for value in paid)
        lines.append([SAID[row], str(len(seeds)), each, f"{np.mean(paid):.1f}", f"{100 * np.mean(success):.0f}"])
    paid_by = {row: {seed: end[1] for seed, end in seeds.items()} for row, seeds in ends.items()}
    others = [row for row in ends if row != "tce"]
    made = [difference(paid_by[row], paid_by["tce"]) for row in others]
    said = [
        sentence(SAID[row], "TCE", "return", found, holds=holds, among=len(made), unit="")
        for row, found, holds in zip(others, made, holm([found.p for found in made]), strict=True)
    ]
    table = markdown(["2 million steps", "seeds", "return of each", "mean", "success, %"], lines)
    return table + "\n" + "".join(f"- {one}\n" for one in said)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path)
    options = parser.parse_args()
    if options.runs:
        held, found = json.loads(FILE.read_text()) if FILE.exists() else {}, read(options.runs)
        held |= {row: held.get(row, {}) | seeds for row, seeds in found.items()}
        rows = [f"{json.dumps(row)}:{json.dumps(seeds, separators=(',', ':'))}" for row, seeds in held.items()]
        write_whole(FILE, lambda beside: beside.write_text("{\n" + ",\n".join(rows) + "\n}\n"))
    page = with_block(PAGE.read_text(), "credit", block(json.loads(FILE.read_text())))
    write_whole(PAGE, lambda beside: beside.write_text(page))


if __name__ == "__main__":
    main()
