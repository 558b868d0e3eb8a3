"""Runs that nobody trained: the files of a run folder, filled by formula. `python synthetic.py` writes data/ beside it.

- `write_run(folder, …)`: one run.
- `write_small_set(folder)`: troll, dppo and ppo_clip, three seeds each; one of ppo_clip collapses, a fourth of dppo goes on.
- `write_comparison(folder)`: a sweep of two contestants over four rates and two numbers of updates, with its compare.json.
- `write_robot_run(folder, …)`: a run of a robot.
"""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

GAINS = {"troll": 0.45, "dppo": 0.30, "ppo_clip": 0.28}
ACTIONS = {"troll": "projected", "dppo": "masked", "ppo_clip": "clipped"}

TOKENS = pa.schema(
    [("step", pa.int64()), ("update", pa.int64())]
    + [(name, pa.float64()) for name in ("reward", "advantage", "bound")]
    + [(name, pa.list_(pa.string())) for name in ("token", "action")]
    + [(name, pa.list_(pa.float32())) for name in ("kl_before", "kl_after", "log_ratio")]
)


def config(objective: str, seed: int, steps: int, **settings: Any) -> dict[str, Any]:
    """As corral writes it, as far as a report reads it."""
    given = {"model": "tiny", "task": "countdown", "objective": objective, "objective_config": {}, "seed": seed, "steps": steps}
    given |= {"learning_rate": 8e-4, "steps_per_generation": 8, **settings}
    return {
        "settings": given,
        "objective": {"name": objective, "bound": 0.05} if objective == "troll" else {"name": objective},
        "task": {"name": given["task"]},
        "model": {"name": given["model"], "parameters": 927872},
        "trainer": {"learning_rate": given["learning_rate"], "hub_token": "hf_secret"},
        "command": ["corral", "train", "--objective", objective, "--seed", str(seed), "--out", "runs/x"],
        "versions": {"python": "3.11.7", "corral": "0.1.0", "torch": "2.13.0"},
        "commit": "0123456789abcdef",
    }


def lines(
    objective: str, seed: int, steps: int, *, collapse: bool = False, every: int = 2, gain: float | None = None
) -> list[dict[str, Any]]:
    """Metrics of a run that learns, or falls apart halfway."""
    draw, found = random.Random(ascii(f"{objective} {seed}")), []
    gain = (GAINS.get(objective, 0.2) if gain is None else gain) + 0.02 * draw.gauss(0, 1)
    for step in range(steps + 1):
        done = step / max(steps, 1)
        level = 0.2 + gain * (1 - math.exp(-3 * done)) + 0.01 * draw.gauss(0, 1)
        if collapse and done > 0.5:
            level *= max(0.02, 1 - 3 * (done - 0.5))
        measured = step % every == 0 or step == steps
        line: dict[str, Any] = {"step": step, "update": 8 * step, "seconds": 2.0 + 3.0 * step + draw.random()}
        line |= {
            "success": round(level, 4) if measured else None,
            "greedy": round(min(1, level + 0.2), 4) if measured else None,
            "reward": None,
        }
        if step:
            kl = 0.01 * math.exp(-done) * (1 + 0.3 * draw.random())
            line |= {"reward": round(level + 0.02 * draw.gauss(0, 1), 4), "num_tokens": 12000.0 * step, "skipped": 0}
            line |= {"entropy": 0.65 * math.exp(-1.5 * done), "grad_norm": 0.7 + 0.1 * draw.random()}
            line |= {"completions/mean_length": 13.0, "tokens_per_second": 4000.0 + 200 * draw.random()}
            line |= {"tr/active_frac": 0.03 * (1 - 0.8 * done) * (1 + 0.2 * draw.random()), "tr/kl_before": kl}
            infinite = objective == "dppo" and step % 3 == 0
            line |= {"tr/kl_max": "inf" if infinite else 20 * kl, "tr/ratio_max": 1.2 + 2 * draw.random()}
            if objective == "troll":
                line |= {
                    "tr/kl_after": 0.4 * kl,
                    "tr/dual": 0.5 + 0.3 * draw.random(),
                    "tr/rest_mass": 5e-5,
                    "tr/unconverged": 0.0,
                }
        if collapse and done > 0.75 and not any("warnings" in before for before in found):
            line["warnings"] = [
                "success fell from 0.36 to 0.08 and stayed there: the policy is collapsing. Try a smaller learning rate."
            ]
        found.append(line)
    return found


def write_run(
    folder: Path,
    objective: str = "troll",
    seed: int = 0,
    steps: int = 8,
    *,
    stopped: str | None = "finished",
    collapse: bool = False,
    completions: list[dict[str, Any]] | None = None,
    tokens: bool = False,
    every: int = 2,
    gain: float | None = None,
    **settings: Any,
) -> Path:
    """The files of one run; `stopped=None` is a run that still goes on."""
    folder.mkdir(parents=True)
    rows = lines(objective, seed, steps, collapse=collapse, every=every, gain=gain)
    kept = rows if stopped is not None else rows[: len(rows) // 2 + 1]
    (folder / "config.json").write_text(json.dumps(config(objective, seed, steps, **settings), indent=2))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    if stopped is not None:
        measured = [line["success"] for line in kept if line["success"] is not None]
        end = {
            "objective": objective,
            "task": settings.get("task", "countdown"),
            "model": settings.get("model", "tiny"),
            "seed": seed,
        }
        end |= {"steps": kept[-1]["step"], "success_final": measured[-1], "seconds": kept[-1]["seconds"], "stopped": stopped}
        end |= {"why": None if stopped == "finished" else f"it was {stopped}"}
        (folder / "summary.json").write_text(json.dumps(end, indent=2))
    pq.write_table(
        pa.Table.from_pylist(completions if completions is not None else sampled(steps)), folder / "completions.parquet"
    )
    if tokens:
        pq.write_table(pa.Table.from_pylist(token_rows(objective, steps), schema=TOKENS), folder / "tokens.parquet")
    return folder


def sampled(steps: int) -> list[dict[str, Any]]:
    """Two completions for every other step."""
    texts = [("19 10 5>45:", "19-10=9*5=45", 1.0, 0.9), ("19 10 5>45:", "19+10=29*5=45", 0.0, -0.9)]
    return [
        {"step": step, "update": 8 * step, "prompt": prompt, "completion": text, "reward": reward, "advantage": advantage}
        for step in range(1, steps + 1, 2)
        for prompt, text, reward, advantage in texts
    ]


def token_rows(objective: str, steps: int) -> list[dict[str, Any]]:
    """One completion, token by token: one in four wants to leave the region."""
    draw, text = random.Random(objective), list("19-10=9*5=45")
    kl = [0.06 + 0.2 * draw.random() if index % 4 == 1 else 0.01 * draw.random() for index in range(len(text))]
    acted = [value > 0.05 for value in kl]
    return [
        {
            "step": steps, "update": 8 * steps, "reward": 1.0, "advantage": 0.9, "bound": 0.05, "token": text,
            "action": [ACTIONS[objective] if out else "" for out in acted], "kl_before": kl,
            "kl_after": [min(value, 0.05) for value in kl] if objective == "troll" else None,
            "log_ratio": [2 * value for value in kl],
        }
    ]  # fmt: skip


def write_small_set(folder: Path) -> Path:
    """Ten runs: enough for a claim, a tie, a collapse and a run in progress."""
    for objective in GAINS:
        for seed in range(4 if objective == "dppo" else 3):
            write_run(
                folder / f"{objective}-{seed}",
                objective,
                seed,
                stopped=None if (objective, seed) == ("dppo", 3) else "finished",
                collapse=(objective, seed) == ("ppo_clip", 1),
                tokens=seed == 0,
            )
    return folder


RATES = (1e-4, 3e-4, 1e-3, 3e-3)
CHOSEN = {"ppo_clip": {"learning_rate": 3e-4, "num_iterations": 1}, "troll": {"learning_rate": 1e-3, "num_iterations": 1}}


def gain_at(contestant: str, setting: dict[str, Any]) -> float:
    """Best at 3e-4 (ppo_clip) or 1e-3 (troll), less with more updates; troll falls off slowly."""
    off = math.log10(setting["learning_rate"] / (1e-3 if contestant == "troll" else 3e-4))
    speed = 0.04 if contestant == "troll" else 0.6
    return 0.4 - speed * abs(off) - (0.2 if setting["num_iterations"] == 4 else 0.0)


def write_comparison(folder: Path, *, reported: bool = True, **changes: Any) -> Path:
    """Two seeds to choose on, three to report; one run of the sweep failed before it left anything, a reported one waits."""
    runs = []
    for contestant in CHOSEN:
        grid = [{"learning_rate": rate, "num_iterations": count} for rate in RATES for count in (1, 4)]
        planned = [(setting, seed, "sweep") for setting in grid for seed in (0, 1)]
        planned += [(CHOSEN[contestant], seed, "report") for seed in (2, 3, 4, 5)] if reported else []
        for setting, seed, stage in planned:
            name, state = f"{contestant}_{setting['learning_rate']:g}_{setting['num_iterations']}_seed{seed}", "finished"
            if (contestant, setting, seed) == ("ppo_clip", {"learning_rate": 3e-3, "num_iterations": 4}, 1):
                state = "failed"
            if seed == 5:
                state = "waiting"
            if state == "finished":
                gain = gain_at(contestant, setting)
                write_run(folder / name, contestant, seed, collapse=gain < 0, gain=max(gain, 0.0), tokens=seed == 2, **setting)
            run = {"folder": name, "contestant": contestant, "setting": setting, "seed": seed, "stage": stage, "state": state}
            runs.append({**run, "error": "out of memory" if state == "failed" else None})
    content: dict[str, Any] = {"version": 1, "kind": "llm", "recipe": "demo", "contestants": [*CHOSEN]}
    content["command"] = "corral compare --recipe demo --sweep learning_rate --hub-token hf_secret --out somewhere"
    content["sweep"] = {"learning_rate": [*RATES], "num_iterations": [1, 4]}
    content |= {"choose_seeds": [0, 1], "report_seeds": [2, 3, 4, 5], "chosen": CHOSEN if reported else {}, "runs": runs}
    (folder / "compare.json").write_text(json.dumps(content | changes))
    return folder


def write_comparison_of_two(folder: Path) -> Path:
    """The smallest sweep: one contestant, two rates, one seed each, and one more run that is reported."""
    runs = []
    for rate, seed, stage in ((1e-4, 0, "sweep"), (1e-3, 0, "sweep"), (1e-3, 1, "report")):
        name, setting = f"{rate:g}-{seed}", {"learning_rate": rate}
        write_run(folder / name, "troll", seed, steps=2, every=1, **setting)
        run = {"folder": name, "contestant": "troll", "setting": setting, "seed": seed, "stage": stage, "state": "finished"}
        runs.append({**run, "error": None})
    content = {"version": 1, "kind": "llm", "command": "corral compare", "sweep": {"learning_rate": [1e-4, 1e-3]}, "runs": runs}
    content |= {
        "choose_seeds": [0],
        "report_seeds": [1],
        "chosen": {"troll": {"learning_rate": 1e-3}},
        "contestants": ["troll"],
    }
    (folder / "compare.json").write_text(json.dumps(content))
    return folder


def write_robot_run(
    folder: Path, algorithm: str = "tce", seed: int = 0, *, task: str = "corral/ViaPointReacher-v0", solved: bool = True
) -> Path:
    """Ten batches; success is measured where `solved`, else the return alone."""
    folder.mkdir(parents=True)
    draw = random.Random(f"{algorithm} {task} {seed}")
    settings = {"environment": task, "environment_config": {"reward": "dense"}, "algorithm": algorithm, "seed": seed}
    settings |= {
        "iterations": 10,
        "learner": {"episodes": 64, **({"policy_rate": 2e-3} if algorithm == "tce" else {"rate": 3e-4})},
    }
    model = "gaussian-prodmp" if algorithm == "tce" else "gaussian-mlp"
    content = {"settings": settings, "objective": {"name": algorithm}, "task": {"name": task}, "model": {"name": model}}
    command = ["corral", "train", "--recipe", "via_point", "--algorithm", algorithm, "--seed", str(seed)]
    (folder / "config.json").write_text(json.dumps({**content, "command": command, "versions": {"mujoco": "4.0.0"}}))
    pull, rows = (0.9 if algorithm == "tce" else 0.5), []
    for step in range(11):
        reached = pull * (1 - math.exp(-step / 4)) + 0.01 * draw.gauss(0, 1)
        line: dict[str, Any] = {"step": step, "update": 25 * step, "seconds": 1.0 + step, "env_steps": 6400 * step}
        line |= {"success": max(0.0, reached) if solved else None, "return": -70 + 60 * reached, "reward": -75 + 60 * reached}
        line |= {"motion/jerk": -8 - draw.random(), "motion/torque_rate": 0.3, "explore/autocorrelation": 0.7}
        line |= {"tr/kl_before": 0.2, "tr/kl_after": 0.1, "tr/active_frac": 0.8} if algorithm == "tce" and step else {}
        rows.append(line)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    end = {"objective": algorithm, "task": task, "model": model, "seed": seed, "steps": 10, "stopped": "finished", "why": None}
    (folder / "summary.json").write_text(json.dumps(end))
    return folder


if __name__ == "__main__":
    here = Path(__file__).parent / "data"
    shutil.rmtree(here, ignore_errors=True)
    write_small_set(here)
