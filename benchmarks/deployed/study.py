"""The study of what holds a deployed network: many runs of the demo side by side, one JSON line each.

    OMP_NUM_THREADS=1 python benchmarks/deployed/study.py --plan gate0 --workers 16 --minutes 9 --out results

Runs that a file under --out or --done already has are skipped, so that a study can be done in pieces; those that would not end
in time are left to the next piece. `--list` says what would run, `--table` what the results are.
"""

import argparse
import itertools
import json
import multiprocessing as mp
import os
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path
from queue import Empty
from statistics import fmean
from typing import Any

os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from held_run import run  # after the environment: torch reads it once
from spec import Arm, Spec

TUNED = (2e-4, 4e-4)
"""Rates at which nothing needs to be held: the best, and the largest that is not far behind."""
DEAD_AT = {1e-2: ("none", "calm", "stop", "rate_k3", "rate_mean", "rate_update")}
"""Arms that end at 0 at a rate: two seeds show that."""
SHARE = {1e-3: 0.25, 1e-2: 0.03}
"""Lookahead's share of a step: about what retraction keeps at that rate."""

ARMS = {
    "auto": Arm(control="mean", retract="p999", slack=2.0),
    "auto_mean": Arm(control="mean", retract="mean", slack=2.0),
    "auto_redo": Arm(control="mean", retract="mean", slack=2.0, redo=True),
    "rate_first": Arm(control="k3", first=True),
    "mean": Arm(retract="mean"),
    "redo": Arm(retract="mean", redo=True),
    "rate_k3": Arm(control="k3"),
    "rate_update": Arm(within=True),
    "lookahead": Arm(),
    "p999": Arm(retract="p999"),
    "rate_mean": Arm(control="mean"),
    "none": Arm(),
    "accept": Arm(retract="mean", accept=True),
    "stop": Arm(stop=True),
    "ema": Arm(ema=0.8),
    "calm": Arm(calm=True),
    "cvar": Arm(retract="cvar"),
    "k3": Arm(retract="k3"),
}
"""What is compared, the most telling first. Prodigy and schedule-free AdamW are packages that the study does without."""
FIRST = 7
"""The arms, from the first, that are seen with every seed before the others are."""


def gate0(objective: str, seeds: int) -> list[Spec]:
    """Every arm × two rates far too large × two schedules, and nothing at rates that suit it.

    Blocks of a schedule, some arms and two or three seeds, the most telling first; within a block seeds are outermost.
    """
    some, others = tuple(ARMS)[:FIRST], tuple(ARMS)[FIRST:-2]
    early, late, every = range(201, 204), range(204, 201 + seeds), range(201, 201 + seeds)
    blocks = [
        ("linear", ("tuned", *some), early), ("linear", others, early), ("constant", ("tuned", *some), early),
        ("linear", ("tuned", *some), late), ("constant", others, early), ("constant", ("tuned", *some), late),
        ("linear", others, late), ("constant", others, late), ("linear", tuple(ARMS)[-2:], every),
    ]  # fmt: skip
    plan = []
    for schedule, arms, few in blocks:
        for seed, name in itertools.product(few, arms):
            for rate in TUNED if name == "tuned" else SHARE:
                if name in DEAD_AT.get(rate, ()) and seed > 202:
                    continue
                held = Arm(share=SHARE[rate]) if name == "lookahead" else ARMS.get(name, Arm())
                plan.append(Spec(arm=name, held=held, rate=rate, schedule=schedule, seed=seed, objective=objective))
    return plan


def tiny() -> list[Spec]:
    """Two steps of every arm: does it run at all?"""
    small: dict[str, Any] = {"steps": 2, "eval_size": 64, "seed": 1, "schedule": "constant"}
    held = {name: Arm(share=0.3) if name == "lookahead" else arm for name, arm in ARMS.items()}
    return [Spec(arm=name, held=arm, rate=1e-3, **small) for name, arm in held.items()]


PLANS = {
    "gate0": lambda: gate0("ppo_clip", 5),
    "gate0-troll": lambda: gate0("troll", 5),
    "tiny": tiny,
}


STARTUP = 15
"""Seconds that a process may need for its imports."""


def worker(jobs: Any, results: Any, deadline: float, expected: dict[str, float]) -> None:
    """Runs one after another, none that would not be finished in time."""
    import torch

    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lives
    while time.time() < deadline:
        try:
            spec = jobs.get(timeout=1)
        except Empty:
            return
        began, left = time.monotonic(), deadline - time.time()
        if STARTUP + spec.steps * expected.get(spec.arm, fmean(expected.values()) if expected else 0.0) > left:
            continue
        try:
            found = run(spec, began + left)
        except Exception:  # whatever went wrong belongs to this run alone, and is written down
            found = {"key": spec.key, "finished": False, "error": traceback.format_exc()}
        results.put(found)


def durations(runs: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Seconds a step in the slowest run of each arm there was; an arm that was never run is missing."""
    longest: dict[str, float] = defaultdict(float)
    for line in runs.values():
        longest[line["arm"]] = max(longest[line["arm"]], line["seconds"] / line["steps"])
    return dict(longest)


def finished(places: list[Path]) -> dict[str, dict[str, Any]]:
    """Finished runs of every results file there is, by key."""
    files = [file for place in places for file in (sorted(place.rglob("*.jsonl")) if place.is_dir() else [place])]
    lines = [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]
    return {line["key"]: line for line in lines if line.get("finished")}


def study(plan: list[Spec], workers: int, minutes: float, file: Path, expected: dict[str, float]) -> None:
    """Runs side by side until the plan or the time is over; each is appended whole as it ends."""
    deadline, context = time.time() + 60 * minutes, mp.get_context("spawn")
    jobs, results = context.Queue(), context.Queue()
    for spec in plan:
        jobs.put(spec)
    pool = [context.Process(target=worker, args=(jobs, results, deadline, expected), daemon=True) for _ in range(workers)]
    for process in pool:
        process.start()
    done = 0
    while done < len(plan) and (any(process.is_alive() for process in pool) or not results.empty()):
        try:
            found = results.get(timeout=2)
        except Empty:
            if time.time() > deadline + 20:
                break
            continue
        done += 1
        with file.open("a") as out:
            out.write(json.dumps(found) + "\n")
        last = [line["success"] for line in found.get("lines", ()) if "success" in line]
        passed = time.time() - deadline + 60 * minutes
        print(f"{passed:5.0f} s  {found['key']:45}  {found.get('seconds', 0):4.0f} s  success {last}", flush=True)
        if "error" in found:
            print(found["error"], flush=True)
    for process in pool:
        process.terminate()  # at most what is still busy after the deadline


def area(line: dict[str, Any]) -> float:
    """Mean training success over all steps; every problem is new, so this is held out too. A dead run goes on at 0."""
    return sum(step["reward"] for step in line["lines"]) / line["steps"]


def table(runs: dict[str, dict[str, Any]]) -> None:
    """Means over seeds: area under the curve, final success, and what was kept."""
    groups = defaultdict(list)
    for line in runs.values():
        groups[line["objective"], line["schedule"], line["rate"], line["arm"]].append(line)
    columns = ("area", "final", "greedy", "mean KL", "p999", "max", "k3", "share", "probes", "cpu s")
    print(f"{'objective':10} {'schedule':9} {'rate':6} {'arm':12} n {' '.join(f'{name:>7}' for name in columns)}  area of each")
    for key, lines in sorted(groups.items(), key=lambda item: (*item[0][:3], -fmean(map(area, item[1])))):
        steps = [step for line in lines for step in line["lines"]]
        last = [{"success": 0.0, "greedy": 0.0} if line["dead"] else line["lines"][-1] for line in lines]
        values = [fmean(map(area, lines)), fmean(one["success"] for one in last), fmean(one["greedy"] for one in last)]
        values += [fmean(min(step["after"][name], 99.0) for step in steps) for name in ("mean", "p999", "max", "k3")]
        values += [fmean(step[name] for step in steps) for name in ("share", "probes")] + [fmean(line["cpu"] for line in lines)]
        numbers = " ".join(f"{value:7.4g}" if value < 0.1 else f"{value:7.3f}" for value in values)
        each = " ".join(f"{area(line):.3f}" for line in sorted(lines, key=lambda line: line["seed"]))
        print(f"{key[0]:10} {key[1]:9} {key[2]:<6g} {key[3]:12} {len(lines)} {numbers}  {each}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=PLANS, default="gate0")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=Path("runs/deployed"))
    parser.add_argument("--done", type=Path, nargs="*", default=[], help="folders or files with results of earlier pieces")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    have = finished([options.out, *options.done])
    plan = [spec for spec in PLANS[options.plan]() if spec.key not in have]
    if options.table:
        table(have)
    elif options.list:
        print("\n".join(spec.key for spec in plan))
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        print(f"{len(plan)} runs to do, {len(have)} done; {options.workers} workers, {options.minutes:g} minutes", flush=True)
        study(plan, options.workers, options.minutes, options.out / f"{options.plan}.jsonl", durations(have))
        table(finished([options.out, *options.done]))


if __name__ == "__main__":
    main()
