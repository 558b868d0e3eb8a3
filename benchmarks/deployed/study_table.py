"""What the runs of the study found: read from their files, and by setting. Plans need it where no report can be made."""

import json
import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from spec import START

Row = dict[str, Any]
"""One run: its settings, how it ended, and a line per step."""


def finished(places: list[Path]) -> dict[str, Row]:
    """Finished runs of every results file there is, by key."""
    files = [file for place in places for file in (sorted(place.rglob("*.jsonl")) if place.is_dir() else [place])]
    lines = [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]
    return {line["key"]: line for line in lines if line.get("finished")}


def is_demo(run: Row) -> bool:
    """Whether it is one of the demo's own model and task."""
    return run.get("start", START) == START and run.get("recipe", "demo") == "demo"


def steps_of(run: Row) -> list[Row]:
    """Lines of steps with updates: a run of the trainer's has one more, from before the first."""
    return [line for line in run["lines"] if line["step"] > 0]


def held_out(run: Row) -> list[tuple[float, float]]:
    """Success on held-out problems by step; a dead run goes on at 0 from where it died."""
    points = [(float(line["step"]), line["success"]) for line in run["lines"] if "success" in line]
    if not run["dead"]:
        return points
    died = float(run["lines"][-1]["step"])
    return [*(point for point in points if point[0] < died), (died, 0.0), (float(run["steps"]), 0.0)]


def area(run: Row) -> float:
    """Mean success on held-out problems over the run, from its first measurement on: by trapezia, as reports have it."""
    points = held_out(run)
    below = sum((after - before) * (low + high) / 2 for (before, low), (after, high) in pairwise(points))
    return below / (points[-1][0] - points[0][0]) if len(points) > 1 else points[0][1]


def is_below_start(run: Row) -> bool:
    """Whether any measurement is below the first."""
    points = held_out(run)
    return any(value < points[0][1] for _, value in points)


def rewards(run: Row) -> float:
    """Mean success in training over all steps. The warm start knows its split by heart: greedy, it solves all of it."""
    return sum(line["reward"] for line in steps_of(run)) / run["steps"]


def final(run: Row, key: str = "success") -> float:
    """Success on the held-out problems after the last step, or greedy, on the most that were asked; 0 of a dead run."""
    return 0.0 if run["dead"] else (run.get("end") or run["lines"][-1])[key]


def certificate(line: Row, name: str) -> float:
    """A statistic of the deployed network's KL after a step; NaN where it was not published, as of too few tokens."""
    value = line["after"][name] if "after" in line else line.get(f"tr/deployed_kl_{name}", math.nan)
    return min(float(value), 99.0)  # a run that died may have had an infinite one


def share(line: Row) -> float:
    """How much of a step was kept."""
    return line.get("share", line.get("tr/step_share", 1.0))


def setting(run: Row) -> tuple[str, str, str, int, str]:
    """What runs that differ in their seeds alone have in common."""
    how = f"{run['rate']} {run['arm']}" + (f" reuse {run['reuse']}" if run.get("reuse") else "")
    return (run["objective"], run["schedule"], f"{run['steps']} steps", run.get("passes", 1), how)


def print_table(runs: dict[str, Row]) -> None:
    """Means over seeds: area under the held-out curve, rewards in training, final success, and what was kept."""
    groups = defaultdict(list)
    for run in runs.values():
        groups[setting(run)].append(run)
    columns = ("area", "rewards", "final", "greedy", "mean KL", "p999", "max", "share", "cpu s")
    names = f"{'objective':10} {'schedule':9} {'':8} passes {'rate, arm':18} n"
    print(f"{names} {' '.join(f'{name:>7}' for name in columns)}  area of each")
    for key, found in sorted(groups.items(), key=lambda item: (item[0][:4], -fmean(map(area, item[1])))):
        lines = [line for run in found for line in steps_of(run)]
        values = [
            fmean(map(area, found)),
            fmean(map(rewards, found)),
            fmean(map(final, found)),
            fmean(final(run, "greedy") for run in found),
        ]
        values += [fmean(certificate(line, name) for line in lines) for name in ("mean", "p999", "max")]
        values += [fmean(map(share, lines)), fmean(run["cpu"] for run in found)]
        numbers = " ".join(f"{value:7.4g}" if value < 0.1 else f"{value:7.3f}" for value in values)
        each = " ".join(f"{area(run):.3f}" for run in sorted(found, key=lambda run: run["seed"]))
        print(f"{key[0]:10} {key[1]:9} {key[2]:8} {key[3]:6} {key[4]:18} {len(found)} {numbers}  {each}")
