"""How well, how fast and how smoothly do TCE, BBRL and step-based baselines learn the robots' tasks? Runs → one small file.

python benchmarks/robot_results.py RUNS [RUNS …]      folders of `corral train`, or folders of those, into results/robots.json
python benchmarks/robot_page.py                       the file into docs/results/robots.md and its figures
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from corral.lab.run.files import write_whole

FILE = Path(__file__).parent / "results/robots.json"
TASKS = {
    "corral/ViaPointReacher-v0": "via-point arm",
    "corral/HopperJump-v0": "hopper jump",
    "corral/BoxPushing-v0": "box pushing",
    "corral/MetaWorld-v0": "Meta-World",
}
ROWS = {
    "tce": "TCE", "bbrl": "BBRL", "sb3-ppo": "PPO", "sb3-ppo-gsde": "PPO, gSDE", "sb3-ppo-pink": "PPO, coloured noise",
    "sb3-sac": "SAC", "sb3-sac-gsde": "SAC, gSDE", "sb3-sac-pink": "SAC, coloured noise", "sb3-trpl": "TRPL",
}  # fmt: skip
LENGTHS = {0.9e6: "up to 10 million steps", 20e6: "more than 20 million steps"}
"""Runs of so many planned steps stand by themselves: those of a task that are about as long are compared."""
MEASURED = (
    "return", "success", "motion/jerk", "motion/spectrum", "motion/torque_rate", "explore/jerk", "explore/spectrum",
    "explore/torque_rate", "explore/autocorrelation",
)  # fmt: skip
Run = dict[str, Any]


def task_of(config: Mapping[str, Any]) -> str:
    """What was learned: the environment, its reward or task, where it was simulated if not in MuJoCo, and for how long where
    that is long."""
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
    """How: the algorithm, and by which rules where there are several."""
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


def read_run(path: Path) -> Run | None:
    """What the page needs of a run; None if nothing was measured in it."""
    config = json.loads((path / "config.json").read_text())
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    measured = [line for line in lines if line.get("return") is not None]
    if not measured or "motion/jerk" not in measured[0]:
        return None
    settings = config["settings"]
    return {
        "task": task_of(config), "row": row_of(config), "seed": settings["seed"], "asked": settings["iterations"],
        "iterations": lines[-1]["step"], "batch": lines[-1]["env_steps"] // max(1, lines[-1]["step"]),
        "seconds": round(lines[-1]["seconds"]), "learner": settings["learner"],
        "prodmp": settings["prodmp"] if config["model"]["prodmp"] else None,
        "versions": {name: config["versions"].get(name) for name in ("torch", "mujoco", "gymnasium", "stable_baselines3")},
        **({"simulated": config["simulated"]} if "simulated" in config else {}),
        "env_steps": [line["env_steps"] for line in measured],
        **{name: [rounded(line.get(name)) for line in measured] for name in MEASURED},
    }  # fmt: skip


def rounded(value: float | None) -> float | None:
    """Five digits are more than any seed repeats."""
    return None if value is None else float(f"{value:.5g}")


def run_folders(root: Path) -> Iterator[Path]:
    """Folders of runs in a folder, itself included."""
    yield from sorted(path.parent for path in root.rglob("config.json") if (path.parent / "metrics.jsonl").is_file())


def longest(runs: list[Run]) -> list[Run]:
    """One run per task, row and seed: the one that went furthest."""
    kept: dict[tuple[str, str, int], Run] = {}
    for run in runs:
        key = run["task"], run["row"], run["seed"]
        if key not in kept or run["iterations"] > kept[key]["iterations"]:
            kept[key] = run
    return [kept[key] for key in sorted(kept)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--keep", action="store_true", help="add to what the file holds, instead of replacing it")
    chosen = parser.parse_args()
    found = [run for root in chosen.runs for path in run_folders(root) if (run := read_run(path)) is not None]
    if chosen.keep and chosen.out.exists():
        found += json.loads(chosen.out.read_text())["runs"]
    runs = longest(found)
    lines = ",\n".join(json.dumps(run, separators=(",", ":")) for run in runs)
    write_whole(chosen.out, lambda beside: beside.write_text(f'{{"runs":[\n{lines}\n]}}\n'))
    print(f"{len(runs)} runs in {chosen.out}, {chosen.out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
