"""Many robots' runs side by side, in pieces: a run that a piece does not finish goes on in the next.

    python -m results.robots.study --plan decisive --workers 16 --minutes 8 --out PIECE
    python -m results.robots.study --plan decisive --table --out PIECE      what came out so far
    python -m results.robots.study --plan decisive --try                    a batch of each kind of run; the plan's cost
    python -m results.robots.study --plan decisive --only 'planar-[01]$' …  some of its runs, the others on another machine
    python -m results.robots.study --plan decisive --set simulator=warp …   simulated on a GPU that all runs share
    python -m results.robots.runs --keep PIECE                              runs → results/robots/runs.parquet

Every run is one `corral train` on one thread, in a folder of --out. Plans are in plans.py.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

from corral.lab.jobs.robot.prepare import check_used, learner_config, prepare
from corral.lab.jobs.robot.settings import TABLES, Settings, check_flags, resolve
from corral.lab.run.settings import nested, read_recipe
from results.robots.plans import PLANS, Job
from results.robots.runs import measured_lines

_GRACE = 60
"""Seconds that a run may need to reach its next checkpoint."""
_ON_GPU = {("learner.device", "cuda"), ("simulator", "warp")}
"""Settings of runs that see the GPU; it is hidden from all others."""


def is_finished(folder: Path) -> bool:
    """True if a run came to its end."""
    summary = folder / "summary.json"
    return summary.is_file() and json.loads(summary.read_text())["stopped"] == "finished"


def start(job: Job, folder: Path) -> subprocess.Popen[bytes]:
    """A new run, or the rest of one; what it prints goes to a file beside its folder."""
    resume = (folder / "checkpoints").is_dir() and any((folder / "checkpoints").iterdir())
    simulator = [part for key, value in job.changes if key == "simulator" for part in ("--simulator", value)]
    arguments = ["--resume", str(folder), *simulator] if resume else [*job.arguments(), "--out", str(folder)]
    command = [sys.executable, "-m", "corral.lab.cli", "train", *arguments, "--quiet"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if not _ON_GPU & set(job.changes):
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if not resume and folder.is_dir():  # killed before its first checkpoint
        folder.rename(folder.with_name(f"{folder.name}.lost-{time.time_ns()}"))
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def settings_of(job: Job) -> Settings:
    """Settings of a run, resolved and checked as by `corral train`."""
    layers = [read_recipe(job.recipe), nested([("seed", str(job.seed)), *job.changes], TABLES)]
    settings = resolve(layers)
    check_flags(settings, layers[-1])
    check_used(settings)
    return settings


def select(jobs: Iterable[Job], only: str | None, given: Sequence[str] = ()) -> list[Job]:
    """Runs whose name contains a match of a regular expression, all without one, with settings `KEY=VALUE` on top of theirs."""
    added = tuple((key, value) for key, _, value in (one.partition("=") for one in given))
    return [replace(job, changes=job.changes + added) for job in jobs if only is None or re.search(only, job.name)]


def try_jobs(jobs: Sequence[Job]) -> None:
    """Time one batch of each setting after a warm-up, and print what all runs would take, in hours of one core.

    SAC is tried with four episodes: an update for every step makes a batch of 64 take minutes.
    """
    total = 0.0
    for setting, members in by_setting(jobs).items():
        settings = settings_of(members[0])
        whole = learner_config(settings).episodes
        episodes = min(whole, 4) if settings.algorithm.startswith("sb3-sac") else whole
        agent = prepare(replace(settings, learner={**settings.learner, "episodes": episodes}))
        agent.step()
        began = time.process_time()
        agent.step()
        seconds = (time.process_time() - began) * whole / episodes
        agent.plant.close()
        hours = seconds * settings.iterations * len(members) / 3600
        total += hours
        count = f"{len(members)} × {settings.iterations} batches"
        print(f"{setting:40} {count:18} {seconds:8.2f} CPU-seconds a batch  {hours:7.1f} core-hours", flush=True)
    print(f"{'':40} {len(jobs)} runs {total:51.1f} core-hours, measurements on held-out contexts not counted")


def run_jobs(jobs: Sequence[Job], workers: int, minutes: float, root: Path) -> None:
    """Run as many jobs at a time as there are workers, in the plan's order; when time is over, runs stop at a checkpoint."""
    began, waiting, running = time.monotonic(), list(jobs), dict[Job, subprocess.Popen[bytes]]()
    while (waiting or running) and (left := 60 * minutes - (time.monotonic() - began)) > 0:
        while waiting and len(running) < workers and left > _GRACE:
            job = waiting.pop(0)
            running[job] = start(job, root / job.name)
        for job, process in list(running.items()):
            if process.poll() is not None:
                del running[job]
                print(f"{time.monotonic() - began:5.0f} s  {job.name:40} {outcome(root / job.name)}", flush=True)
        time.sleep(0.5)
    for process in running.values():
        process.send_signal(signal.SIGINT)
    for job, process in running.items():
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
        print(f" stopped {job.name:40} {outcome(root / job.name)}", flush=True)


def outcome(folder: Path) -> str:
    """The last measurement of a run, in words."""
    if not (lines := measured_lines(folder)):
        return f"nothing measured; see {folder.with_suffix('.log').name}"
    last = lines[-1]
    success = "–" if last["success"] is None else f"{last['success']:.3f}"
    return f"step {last['step']:5}  success {success}  return {last['return']:8.2f}  {last['seconds']:5.0f} s"


def by_setting(jobs: Sequence[Job]) -> dict[str, list[Job]]:
    """Runs that differ in their seed alone."""
    groups: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        groups[job.setting].append(job)
    return groups


def print_table(jobs: Sequence[Job], root: Path) -> None:
    """Means over the seeds of each setting, of the last measurement."""
    columns = ["return", "success", "env_steps", "seconds"]
    lines = [
        {"setting": job.setting, "runs": 1} | {name: measured[-1][name] for name in columns}
        for job in jobs
        if (measured := measured_lines(root / job.name))
    ]
    if lines:
        groups = pd.DataFrame(lines).groupby("setting", sort=False)
        each = groups["success"].agg(lambda values: " ".join(f"{value:.2f}" for value in values))
        print(groups[columns].mean().assign(runs=groups["runs"].sum(), each=each).to_string(float_format="{:.3f}".format))
    ran = {line["setting"] for line in lines}
    for setting in dict.fromkeys(job.setting for job in jobs if job.setting not in ran):
        print(f"{setting:40} not run")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=PLANS, nargs="+", required=True, help="one after the other")
    parser.add_argument("--only", metavar="REGEX", help="runs of the plan whose name contains a match, such as 'bbrl-[012]$'")
    parser.add_argument("--set", metavar="KEY=VALUE", nargs="+", default=[], dest="given", help="settings of every run")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=Path("runs/robot-study"))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--try", action="store_true", dest="rehearse", help="one batch of each kind of run; writes nothing")
    options = parser.parse_args()
    if options.rehearse:
        torch.set_num_threads(1)
        found = [job for plan in options.plan for job in PLANS[plan]()]
        return try_jobs(select(found, options.only, options.given))
    root = options.out
    root.mkdir(parents=True, exist_ok=True)
    began, jobs = time.monotonic(), list[Job]()
    for plan in options.plan:
        jobs += (own := select(PLANS[plan](), options.only, options.given))
        left = [job for job in own if not is_finished(root / job.name)]
        if options.list:
            print("\n".join(" ".join([job.name, *job.arguments()]) for job in left))
        elif not options.table:
            minutes = options.minutes - (time.monotonic() - began) / 60
            print(f"{len(left)} runs to do, {len(own) - len(left)} done; {options.workers} at a time, {minutes:.1f} minutes")
            run_jobs(left, options.workers, minutes, root)
    if not jobs:
        raise SystemExit(f"study: no run of {' or '.join(options.plan)} matches --only {options.only!r}. See --list.")
    print_table(jobs, root)


if __name__ == "__main__":
    main()
