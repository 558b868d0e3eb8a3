"""The studies on language models: many runs side by side, one JSON line each.

    OMP_NUM_THREADS=1 python -m results.study --plan reuse bound tune --workers 16 --minutes 8 --out runs/deployed
    python -m results.packed results/deployed/runs.parquet runs/deployed        then `make results`

Plans are in results/plans.py and results/table.py. Runs that the raw rows or --out already have are skipped, so that a study
can be done in pieces; those that would not end in time are left to the next piece, and so are those whose warm start is not
there. `--list` says what would run. With `--device cuda` all workers share one GPU, in float32 as on a CPU; under NVIDIA's MPS
that is four to five times as fast as one core each:

    nvidia-cuda-mps-control -d
    OMP_NUM_THREADS=1 python -m results.study --plan rates --device cuda --workers 15 --minutes 8

`--only` takes the runs whose key a regular expression finds. Runs that sample with vLLM need `--fresh`, a process for each run,
since vLLM gives the card's memory back only when its process ends. Every row has the `--commit` that it was made with.
"""

import argparse
import gc
import math
import multiprocessing as mp
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from threading import Event, Thread

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch  # after the environment: it reads it once
from transformers.utils import logging as transformers_logging

from corral.lab.jobs.llm.evaluate import EvalSettings, prepare_evaluation
from corral.lab.jobs.llm.problems import Sampling, generate
from corral.lab.jobs.llm.rewards import verifier
from corral.lab.jobs.llm.settings import resolve
from corral.lab.jobs.llm.train import train
from corral.lab.models.load import load_model
from corral.lab.run.files import append_line
from corral.lab.run.folder import RunFolder
from corral.lab.run.settings import read_recipe
from results.front import ROWS, front
from results.packed import Row, read
from results.plans import PLANS
from results.runs import DEPLOYED, EVIDENCE, finished
from results.spec import Run, cost_group
from results.table import long, table

STAGED: dict[str, Callable[[Sequence[Row]], list[Run]]] = {"table": table, "table-long": long, "front": front}
"""Plans that depend on the rows that there are."""
STARTUP = 15
"""Seconds that a process may need for its imports."""
FAILURES = 2
"""Runs of each worker that failed in a row, after which the study ends: a faulty device would waste the plan."""
DEAD = 4
"""Steps in a row without any reward after which nothing can be learned any more."""
GREEDY, SEVERAL = 1024, 512
"""Held-out problems that are answered at the end greedily, and several times."""
KEPT = (
    "step", "reward", "success", "greedy", "learning_rate", "entropy", "grad_norm", "seconds", "tr/active_frac", "tr/ess",
    "tr/deployed_kl_mean", "tr/deployed_kl_p999", "tr/deployed_kl_max", "tr/step_share", "tr/passes", "tr/rate_trials",
    "tr/kl_before", "tr/mismatch", "tr/staleness",
)  # fmt: skip
"""Of a line of metrics: what pages read, and a few that tell why a run went wrong."""


def is_dead(lines: list[Row]) -> bool:
    """Whether so many steps in a row had no reward at all; the one in which the run was told to end may have had some."""
    rewards = [line["reward"] for line in lines if line["reward"] is not None]
    return any(not any(rewards[at : at + DEAD]) for at in range(len(rewards) - DEAD + 1))


def run(spec: Run, deadline: float) -> Row:
    """`corral train` in a folder of its own, and how it went; `finished` is False where the deadline came first."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    settings = resolve([read_recipe(spec.recipe), spec.layer()])
    began, cpu = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory() as place:
        folder, over = Path(place) / "run", Event()
        watch = Thread(target=_interrupt, args=(folder, deadline, over), daemon=True)
        watch.start()
        try:
            stopped = train(settings, out=folder, quiet=True).summary["stopped"]
        except KeyboardInterrupt:  # before the first step
            stopped = "interrupted"
        finally:
            over.set()
            watch.join()
        lines, end = RunFolder(folder).lines(), None
        if spec.end_size and stopped == "finished":
            device = spec.layer()["device"]
            asked = EvalSettings(model=str(folder), problems=spec.end_size, seed=spec.seed, device=device)
            found = measure(asked, pass_at=spec.pass_at)
            end = {"success": found[1.0], "greedy": found[0.0], "problems": spec.end_size}
            end |= {"pass": found[math.inf]} if spec.pass_at else {}
    dead = stopped == "interrupted" and is_dead(lines)
    took = {"seconds": time.monotonic() - began, "cpu": time.process_time() - cpu}
    about = {"key": spec.key, **asdict(spec), "arm": spec.arm, "finished": dead or stopped == "finished", "dead": dead}
    return {**about, **took, "end": end, "lines": [_shorten(line) for line in lines]}


def _interrupt(folder: Path, deadline: float, over: Event) -> None:
    """Ctrl-C, which ends a run after its step, once it is dead or out of time."""
    while not over.wait(1.0):
        if time.monotonic() > deadline or is_dead(RunFolder(folder).lines()):
            os.kill(os.getpid(), signal.SIGINT)
            return


def _shorten(line: Row) -> Row:
    """What the study needs of a line of metrics, to six digits."""
    kept = {key: value for key, value in line.items() if key in KEPT and value is not None}
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in kept.items()}


def measure(
    settings: EvalSettings, temperatures: Sequence[float] = (1.0,), greedy: int = GREEDY, pass_at: int = 0
) -> dict[float, float]:
    """Success by temperature, one sample a problem in float32; at 0, greedy, on the first `greedy` problems.

    With `pass_at` also, under inf, the share of `SEVERAL` problems that any of so many samples at temperature 1 solves.
    """
    job = prepare_evaluation(settings)
    model, tokenizer = load_model(job.subject.model)
    model.to(job.device).eval()  # type: ignore[arg-type]  # transformers wraps `to` and loses its signature
    problems, success = job.problems(tokenizer), verifier(job.task)

    def solved(asked: Sequence[str], temperature: float) -> list[float]:
        """Verdicts on one answer to each problem."""
        verdicts: list[float] = []
        for start in range(0, len(asked), 512):
            batch = asked[start : start + 512]
            ids, longest = problems.tokens(batch), job.sampling.max_tokens
            sampling = Sampling(max_tokens=longest, greedy=not temperature, temperature=temperature or 1.0)
            tokens = generate(model, tokenizer, ids, sampling)
            texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
            verdicts += success(prompts=batch, completions=texts, problem=batch)
        return verdicts

    found = {}
    for temperature in (0.0, *temperatures):
        torch.manual_seed(settings.seed)
        found[temperature] = fmean(solved(job.held_out if temperature else job.held_out[:greedy], temperature))
    if pass_at:
        torch.manual_seed(settings.seed)
        found[math.inf] = fmean(map(max, zip(*(solved(job.held_out[:SEVERAL], 1.0) for _ in range(pass_at)), strict=True)))
    return found


def begin() -> None:
    """Set up a process that runs specs."""
    torch.set_num_threads(1)
    os.environ["MASTER_PORT"] = str(20_000 + os.getpid() % 20_000)  # vLLM opens it: runs side by side need one each
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lives


def attempt(spec: Run, device: str, deadline: float, expected: Mapping[str, float]) -> Row | None:
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


def durations(runs: Sequence[Row]) -> dict[str, float]:
    """Seconds that a step of each group may take: a fifth more CPU time than in its median run. A group never run is begun."""
    taken: dict[str, list[float]] = defaultdict(list)
    for line in runs:
        taken[cost_group(line)].append(line["cpu"] / line["steps"])
    return {group: 1.2 * median(seconds) for group, seconds in taken.items()}


def study(plan: Sequence[Run], options: argparse.Namespace, file: Path, expected: Mapping[str, float], deadline: float) -> bool:
    """Runs side by side until the plan or the time is over; each is appended whole as it ends. True if the plan is over."""
    began, failed = time.time(), 0
    device, workers = options.device, options.workers
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of all processes
    # Its processes are killed at the end: a run that is told to end would go on to its next step.
    with mp.get_context("spawn").Pool(workers, begin, maxtasksperchild=1 if options.fresh else None) as pool:
        runs = pool.imap_unordered(partial(attempt, device=device, deadline=deadline, expected=expected), plan)
        while failed < FAILURES * workers:
            try:
                found = runs.next(max(1.0, deadline + 20 - time.time()))
            except StopIteration:
                return True
            except mp.TimeoutError:
                return False
            if found is not None:
                append_line(file, found | {"commit": options.commit})
                last = [line["success"] for line in found.get("lines", ()) if "success" in line]
                took = f"{time.time() - began:5.0f} s  {found['key']:50}  {found.get('seconds', 0):4.0f} s"
                print(f"{took}  success {last}{found.get('error', '')}", flush=True)
                failed = failed + 1 if "error" in found else 0
    return False


def can_start(spec: Run) -> bool:
    """Whether the model that it starts from is there: some are made first, in folders."""
    return "/" not in start_of(spec) or Path(start_of(spec)).exists()


def start_of(spec: Run) -> str:
    """The model that it starts from."""
    return str(spec.layer().get("model", "tiny"))


def checkout() -> str:
    """The short name of the commit that is checked out."""
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=[*PLANS, *STAGED], nargs="+", required=True, help="one after the other")
    parser.add_argument("--steps", type=int, help="other than the plan's, to try it out")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--done", type=Path, nargs="*", default=[DEPLOYED, EVIDENCE, ROWS], help="earlier rows: files, folders")
    parser.add_argument("--only", type=re.compile, default="", metavar="PATTERN", help="runs whose key this expression finds")
    parser.add_argument("--fresh", action="store_true", help="a new process for every run")
    parser.add_argument("--commit", help="the commit that rows are made with, by default this checkout's")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("study: ended by SIGTERM"))  # so that its processes end too
    if options.list:
        print("\n".join(spec.key for spec in to_do(options, [])))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    options.commit = options.commit or checkout()
    deadline, tried = time.time() + 60 * options.minutes, list[str]()
    while plan := to_do(options, tried):  # runs that depend on others come after them
        have, left = done(options), (deadline - time.time()) / 60
        print(f"{len(plan)} runs to do, {len(have)} done; {options.workers} workers, {max(left, 0):.1f} minutes", flush=True)
        if not study(plan, options, options.out / f"{'+'.join(options.plan)}.jsonl", durations(have), deadline):
            break
        tried += [spec.key for spec in plan]


def done(options: argparse.Namespace) -> list[Row]:
    """Finished runs of this study and of earlier ones."""
    return [run for run in finished(options.out, *options.done) if "passes" in run]


def to_do(options: argparse.Namespace, tried: Collection[str]) -> list[Run]:
    """Runs of the plans that can start, are not finished, and were not tried before."""
    have, plan = {run["key"] for run in done(options)}, list[Run]()
    for name in options.plan:
        plan += STAGED[name](read(options.out, *options.done)) if name in STAGED else PLANS[name]()
    plan = plan if options.steps is None else [replace(spec, steps=options.steps) for spec in plan]
    plan = [spec for spec in dict.fromkeys(plan) if spec.key not in have and spec.key not in tried]
    plan = [spec for spec in plan if options.only.search(spec.key)]
    plan, waiting = [spec for spec in plan if can_start(spec)], [spec for spec in plan if not can_start(spec)]
    if waiting:
        print(f"{len(waiting)} runs wait for {', '.join(sorted({start_of(spec) for spec in waiting}))}", flush=True)
    return plan


if __name__ == "__main__":
    main()
