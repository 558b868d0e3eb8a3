"""Rows of the robots' studies from folders of runs.

python -m results.robots.runs RUNS [RUNS …] --keep      folders of `corral train`, or folders of those, into runs.parquet
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from results.packed import FOLDER, Row, read, write

FILES = {name: FOLDER / f"robots/{name}.parquet" for name in ("runs", "arm", "credit")}
TASKS = {
    "corral/ViaPointReacher-v0": "via-point arm",
    "corral/HopperJump-v0": "hopper jump",
    "corral/BoxPushing-v0": "box pushing",
    "corral/MetaWorld-v0": "Meta-World",
}
ROWS = {
    "tce": "TCE", "bbrl": "BBRL", "top_erl": "TOP-ERL",
    "sb3-ppo": "PPO", "sb3-ppo-gsde": "PPO, gSDE", "sb3-ppo-pink": "PPO, coloured noise",
    "sb3-sac": "SAC", "sb3-sac-gsde": "SAC, gSDE", "sb3-sac-pink": "SAC, coloured noise", "sb3-trpl": "TRPL",
}  # fmt: skip
LENGTHS = {0.9e6: "up to 10 million steps", 20e6: "more than 20 million steps"}
"""Runs of so many planned steps stand by themselves: those of a task that are about as long are compared."""
MEASURED = (
    "return", "success", "motion/jerk", "motion/spectrum", "motion/torque_rate", "explore/jerk", "explore/spectrum",
    "explore/torque_rate", "explore/autocorrelation",
)  # fmt: skip

HEIGHT = "max_height"
"""Measurement of the hopper alone: the number that was published."""


def task_of(config: Mapping[str, Any]) -> str:
    """Name of a run's task: the environment, its reward or task, the simulator if not MuJoCo, and the length if long."""
    settings = config["settings"]
    chosen = [
        key if value is True else str(value) for key, value in settings["environment_config"].items() if value is not False
    ]
    steps = settings["iterations"] * config["objective"]["episodes"] * config["task"]["steps"]
    length = [words for least, words in LENGTHS.items() if steps >= least][-1:]
    simulators = {settings.get("simulator"), *(change["from"] for change in config.get("simulated", ()))}  # older runs: None
    where = ["learned in MuJoCo Warp"] if "warp" in simulators else []
    return ", ".join([TASKS[settings["environment"]], *chosen, *where, *length]).replace("_", " ")


def row_of(config: Mapping[str, Any]) -> str:
    """Name of a run's row: the algorithm, and the rules that differ from its usual ones."""
    algorithm, chosen = config["settings"]["algorithm"], config["objective"]
    row = ROWS[algorithm]
    if algorithm == "tce" and not chosen["closing_segment"]:
        row += ", published rules"
    elif algorithm == "tce" and chosen["move_to_event"]:
        row += ", paid at take-off"
    if (plans := chosen.get("plans_per_context", 1)) > 1:
        row += f", {plans} plans a context"
    if chosen.get("credit_lam"):
        row += ", credit for what comes later"
    if (until := chosen.get("segments_until")) not in (None, "inf"):
        row += f", segments of the first {until:g} s"
    if chosen.get("replan_every"):
        row += f", a plan every {chosen['replan_every']} steps" + (
            " from the state" if chosen["replan_from"] == "state" else ""
        )
    if chosen.get("contextual_covariance"):
        row += ", covariance of the context"
    if algorithm.endswith("-pink") and chosen["noise_colour"] != 1:
        row += f" 1/f^{chosen['noise_colour']:g}"
    return row + (", same controller" if chosen.get("controller_span") else "")


def measured_lines(folder: Path) -> list[Row]:
    """Lines of metrics with an evaluation."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.is_file() else []
    return [line for line in lines if line.get("return") is not None]


def read_run(path: Path) -> Row | None:
    """Read the fields of a run that the page needs; None if nothing was measured."""
    config, measured = json.loads((path / "config.json").read_text()), measured_lines(path)
    if not measured or "motion/jerk" not in measured[0]:
        return None
    last = json.loads([line for line in (path / "metrics.jsonl").read_text().splitlines() if line.endswith("}")][-1])
    settings, last_measured = config["settings"], measured[-1]
    return {
        "task": task_of(config), "row": row_of(config), "seed": settings["seed"], "asked": settings["iterations"],
        "iterations": last["step"], "batch": last["env_steps"] // max(1, last["step"]),
        "seconds": round(last["seconds"]), "learner": settings["learner"],
        "prodmp": settings["prodmp"] if config["model"]["prodmp"] else None,
        "versions": {name: config["versions"].get(name) for name in ("torch", "mujoco", "gymnasium", "stable_baselines3")},
        **({"simulated": config["simulated"]} if "simulated" in config else {}),
        "env_steps": [line["env_steps"] for line in measured],
        **{name: [rounded(line.get(name)) for line in measured] for name in MEASURED},
        **({HEIGHT: [rounded(line.get(HEIGHT)) for line in measured]} if HEIGHT in last_measured else {}),
    }  # fmt: skip


def rounded(value: float | None) -> float | None:
    """Five digits are more than any seed repeats."""
    return None if value is None else float(f"{value:.5g}")


def run_folders(root: Path) -> Iterator[Path]:
    """Folders of runs in a folder, itself included."""
    yield from sorted(path.parent for path in root.rglob("config.json") if (path.parent / "metrics.jsonl").is_file())


def longest(runs: list[Row]) -> list[Row]:
    """Longest run of each task, row and seed."""
    by_length = sorted(runs, key=lambda run: run["iterations"])
    kept = {(run["task"], run["row"], run["seed"]): run for run in by_length}
    return [kept[key] for key in sorted(kept)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=FILES["runs"], help="a file other than the study's own")
    parser.add_argument("--keep", action="store_true", help="add to what runs.parquet holds, instead of replacing it")
    chosen = parser.parse_args()
    found = [run for root in chosen.runs for path in run_folders(root) if (run := read_run(path)) is not None]
    write(chosen.out, longest([*(read(chosen.out) if chosen.keep else []), *found]))
    print(f"{len(read(chosen.out))} runs in {chosen.out}, {chosen.out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
