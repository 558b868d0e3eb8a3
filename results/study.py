"""The studies on language models: many runs side by side, one JSON line each.

    OMP_NUM_THREADS=1 python -m results.study --plan reuse bound tune --workers 16 --minutes 8 --out runs/deployed
    python -m results.packed results/deployed/runs.parquet runs/deployed        then `make results`

Plans of networks that are held begin as in results/deployed/plans.py, those of the evidence for language models as in
results/evidence/plans.py. Runs that a file of either study or of --out already has are skipped, so that a study can be done in
pieces; those that would not end in time are left to the next piece, and so are those whose warm start is not there. `--list`
says what would run, `--table` what the results are. With `--device cuda` all workers share one GPU, in float32 as on a CPU;
under NVIDIA's MPS that is four to five times as fast as one core each:

    nvidia-cuda-mps-control -d
    OMP_NUM_THREADS=1 python -m results.study --plan rates --device cuda --workers 15 --minutes 8
"""

import argparse
import gc
import multiprocessing as mp
import os
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch  # after the environment: it reads it once

from corral import register_objective
from corral.lab.run.files import append_line
from corral.objective import OBJECTIVES
from results.deployed import held_run, plans, shipped_run
from results.deployed.spec import Shipped, Spec, cost_group
from results.evidence import plans as evidence
from results.evidence.coarse_sampler import sampling_in
from results.evidence.spec import OWN_OBJECTIVES
from results.packed import Row
from results.runs import DEPLOYED, EVIDENCE, finished, print_table

PLANS = plans.PLANS | evidence.PLANS
STARTUP = 15
"""Seconds that a process may need for its imports."""
FAILURES = 2
"""Runs of each worker that failed in a row, after which the study ends: a faulty device would waste the plan."""


def begin() -> None:
    """Set up a process that runs specs."""
    torch.set_num_threads(1)
    for name in OWN_OBJECTIVES.keys() - OBJECTIVES.keys():
        register_objective(name, *OWN_OBJECTIVES[name])
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lives


def attempt(spec: Spec | Shipped, device: str, deadline: float, expected: Mapping[str, float]) -> Row | None:
    """One run on a device, and how it went; None where it would not be finished in time."""
    spec, left = replace(spec, device=device), deadline - time.time()
    if STARTUP + spec.steps * expected.get(cost_group(asdict(spec)), 0.0) > left:
        return None
    try:
        return run(spec, time.monotonic() + left)
    except Exception:  # whatever went wrong belongs to this run alone, and is written down
        return {"key": spec.key, "finished": False, "error": traceback.format_exc()}
    finally:
        gc.collect()
        torch.cuda.empty_cache()  # what this run held, others on the card may need


def run(spec: Spec | Shipped, deadline: float) -> Row:
    """One run, by a sampler in lower precision where the spec names one."""
    if isinstance(spec, Spec):
        return held_run.run(spec, deadline)
    precision = getattr(spec, "sampler", "")  # a plain run of the trainer has no such field
    with sampling_in(precision) if precision else nullcontext():
        return shipped_run.run(spec, deadline)


def durations(runs: Sequence[Row]) -> dict[str, float]:
    """Seconds that a step of each group may take: a fifth more CPU time than in its median run. A group never run is begun."""
    taken: dict[str, list[float]] = defaultdict(list)
    for line in runs:
        taken[cost_group(line)].append(line["cpu"] / line["steps"])
    return {group: 1.2 * median(seconds) for group, seconds in taken.items()}


def study(
    plan: Sequence[Spec | Shipped], device: str, workers: int, minutes: float, file: Path, expected: Mapping[str, float]
) -> None:
    """Runs side by side until the plan or the time is over; each is appended whole as it ends."""
    began, deadline, failed = time.time(), time.time() + 60 * minutes, 0
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of all processes
    # Its processes are killed at the end: a run that is told to end would go on to its next step.
    with mp.get_context("spawn").Pool(workers, begin) as pool:
        runs = pool.imap_unordered(partial(attempt, device=device, deadline=deadline, expected=expected), plan)
        while failed < FAILURES * workers:
            try:
                found = runs.next(max(1.0, deadline + 20 - time.time()))
            except (StopIteration, mp.TimeoutError):
                break
            if found is not None:
                append_line(file, found)
                last = [line["success"] for line in found.get("lines", ()) if "success" in line]
                took = f"{time.time() - began:5.0f} s  {found['key']:50}  {found.get('seconds', 0):4.0f} s"
                print(f"{took}  success {last}{found.get('error', '')}", flush=True)
                failed = failed + 1 if "error" in found else 0


def can_start(spec: Spec | Shipped) -> bool:
    """Whether the model that it starts from is there: some are made first, in folders."""
    return "/" not in start_of(spec) or Path(start_of(spec)).exists()


def start_of(spec: Spec | Shipped) -> str:
    """The model that it starts from."""
    return str(spec.layer().get("model", "tiny"))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=PLANS, nargs="+", default=["gate0"], help="one after the other")
    parser.add_argument("--steps", type=int, help="other than the plan's, to try it out")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--done", type=Path, nargs="*", default=[DEPLOYED, EVIDENCE], help="files or folders of earlier pieces")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("study: ended by SIGTERM"))  # so that its processes end too
    have = {run["key"]: run for run in finished(options.out, *options.done)}
    plan = [spec for name in options.plan for spec in PLANS[name]()]
    plan = plan if options.steps is None else [replace(spec, steps=options.steps) for spec in plan]
    plan = [spec for spec in dict.fromkeys(plan) if spec.key not in have]
    plan, waiting = [spec for spec in plan if can_start(spec)], [spec for spec in plan if not can_start(spec)]
    if waiting:
        print(f"{len(waiting)} runs wait for {', '.join(sorted({start_of(spec) for spec in waiting}))}", flush=True)
    if options.table:
        print_table(have.values())
    elif options.list:
        print("\n".join(spec.key for spec in plan))
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        print(f"{len(plan)} runs to do, {len(have)} done; {options.workers} workers, {options.minutes:g} minutes", flush=True)
        file = options.out / f"{'+'.join(options.plan)}.jsonl"
        study(plan, options.device, options.workers, options.minutes, file, durations(list(have.values())))
        print_table(finished(options.out, *options.done))


if __name__ == "__main__":
    main()
