"""Starts that reinforcement learning teaches something: warm starts ended early, and short runs of `corral train` from each.

    PYTHONPATH=src:. python scripts/start_that_learns.py --out runs/learns

The embedded model answers .85 of countdown greedily before any reinforcement, which can only sharpen it. A candidate here is a
model of the same size, trained from random weights on right answers until it answers about .3 of a task greedily. From each
start go runs of 15 batches of rollouts with 4 passes, one for every learning rate, all side by side.

--out gets rows.jsonl, a line for every start and for every measurement of a run on held-out problems, sampled at temperature 1
and greedily; a .safetensors of every start, with the config and tokenizer of src/corral/lab/models/tiny; and log.txt. A run
that has not ended --minutes after the beginning is interrupted, and its rows say how far it came.
"""
# ruff: noqa: T201 (a script prints what it finds)

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from warm_start import build, demonstrate, save_whole, success, train

from corral.lab.run.files import append_line
from corral.lab.tasks import make_task, verify_all
from results.evidence.code_problems import write_problems


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A task, and how a model is prepared for it."""

    task: str
    config: dict[str, Any] = field(default_factory=dict)
    """The task's settings."""
    shown: dict[str, Any] = field(default_factory=dict)
    """Other settings of the problems that are demonstrated."""


CANDIDATES = {
    # Numbers are 1 to 19, and the start has seen none above 12: neither in prompts nor as a number to use.
    "unseen": Candidate(task="countdown", shown={"n_max": 12}),
    "sums": Candidate(task="arithmetic", config={"operations": "+-", "digits": 3}),  # 473+285: → 473+200=673+80=753+5=758
    "products": Candidate(task="arithmetic", config={"operations": "*"}),  # 23*47: → 23*40=920,23*7=161,920+161=1081
    "formula": Candidate(task="expression"),  # 1>3 2>5 3>7 4>9: → 2*x+1
    "functions": Candidate(task="code"),  # f(a,b): a plus 3, all times b → def f(a,b):return (a+3)*b, run in the sandbox
}


class Functions:
    """One-line functions of the task `code` as the warm start asks for them: every prompt ends its line."""

    instruction, max_completion_length = "{problem}\n", 32

    def __init__(self, folder: Path, unsafe: bool) -> None:
        self.pairs = write_problems(folder)
        self.config = {"path": str(folder), "workers": 2, "unsafe_code_execution": unsafe}
        self.task = make_task("code", **self.config)

    def demonstrations(self, count: int, seed: int) -> list[tuple[str, str]]:
        """All demonstrations, however many are asked for."""
        return [(f"{prompt}\n", answer) for prompt, answer in self.pairs]

    def train_prompts(self, count: int, seed: int) -> list[str]:
        """Problems for reinforcement, of which none is demonstrated."""
        return [f"{prompt}\n" for prompt in self.task.train_prompts(count, seed)]

    def held_out_prompts(self, count: int, seed: int) -> list[str]:
        """Problems to measure on."""
        return [f"{prompt}\n" for prompt in self.task.held_out_prompts(count, seed)]

    def verify_all(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """1.0 for every program that passes its tests."""
        return verify_all(self.task, [prompt.removesuffix("\n") for prompt in prompts], completions)


def tasks_of(candidate: Candidate, folder: Path, unsafe: bool) -> tuple[Any, Any]:
    """The task that a start is to learn, and the task whose demonstrations it is shown. `folder` is for problems in files."""
    if candidate.task == "code":
        task: Any = Functions(folder, unsafe)
        return task, task
    task = make_task(candidate.task, **candidate.config)
    return task, make_task(candidate.task, **candidate.shown) if candidate.shown else task


def prepare(name: str, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Make a candidate's start in `work`, in a process of its own, and return what it can do."""
    candidate = CANDIDATES[name]
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    sys.stdout = sys.stderr = open(args.out / "log.txt", "a", buffering=1)  # noqa: SIM115 (as long as the process lives)
    task, shown = tasks_of(candidate, work / "problems", args.unsafe_code_execution)
    model, tokenizer = build("llama", args.seed)
    model.to(args.device)
    data = demonstrate(shown, tokenizer, args.demonstrations, args.seed, model.device)
    began = time.monotonic()
    how = {"steps": 2000, "batch": args.batch, "lr": args.lr, "weight_decay": 0.1, "noise": 0.0, "report_every": 100}
    how |= {"until": args.until, "seconds": args.seconds, "evaluate": args.problems, "seed": args.seed}
    train(model, tokenizer, task, data, argparse.Namespace(**how))
    seconds, prompts = time.monotonic() - began, task.held_out_prompts(args.problems, args.seed)
    row = {"start": name, "task": candidate.task, "task_config": getattr(task, "config", candidate.config)}
    row |= {"instruction": getattr(task, "instruction", "{problem}"), "seconds": round(seconds, 1)}
    row |= {"success": success(model, tokenizer, task, prompts, args.seed)}
    row |= {"greedy": success(model, tokenizer, task, prompts, None)}
    save_whole(work / name, model.cpu(), row)
    shutil.copyfile(work / name / "model.safetensors", args.out / f"{name}.safetensors")
    append_line(args.out / "rows.jsonl", row)
    return row


def reinforce(start: Future[dict[str, Any]], rate: str, args: argparse.Namespace, work: Path, deadline: float) -> str:
    """Run `corral train` from a start, write its measurements as rows, and return a line of the table."""
    made = start.result()
    name, out = made["start"], work / f"{made['start']}-{rate}"
    # As the demo has it: 64 prompts with 8 completions each, and 8 updates in every pass over them.
    settings = {"recipe": "demo", "model": work / name, "task": made["task"], "seed": args.seed, "steps": args.steps}
    settings |= {
        "learning-rate": rate,
        "num-iterations": 4,
        "instruction": made["instruction"],
        "device": args.device,
        "out": out,
    }
    settings |= {"eval-every": 5, "eval-size": args.problems, "eval-batch-size": 512, "checkpoint-every": args.steps}
    for key, value in made["task_config"].items():
        settings[f"task-config.{key}"] = str(value).lower() if isinstance(value, bool) else value
    command = [sys.executable, "-m", "corral.lab.cli", "train", "--quiet"]
    for key, value in settings.items():
        command += [f"--{key}", str(value)]
    alone = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with open(args.out / "log.txt", "a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=alone)
        try:
            process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # it ends its step, and says that it was interrupted
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with the programs that it runs
                process.wait()
    metrics = out / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    for line in lines:
        about = {key: line.get(key) for key in ("step", "success", "greedy", "reward", "entropy", "seconds")}
        append_line(args.out / "rows.jsonl", {"run": name, "rate": rate, "status": process.returncode, **about})
    measured = [line for line in lines if line.get("success") is not None]
    if not measured:
        return f"{name:10} {rate:>6}  no measurement; log.txt says why"
    first, last = measured[0], measured[-1]
    return (
        f"{name:10} {rate:>6}  {last['step']:5d}  {first['success']:.3f} → {last['success']:.3f}    "
        f"{first['greedy']:.3f} → {last['greedy']:.3f}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Make all starts side by side, begin the runs of each as soon as it is there, and print the table."""
    about = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about.add_argument("--out", type=Path, required=True, help="folder of rows.jsonl, log.txt and the starts' weights")
    about.add_argument("--only", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    about.add_argument("--rates", nargs="+", default=["3e-4", "1e-3", "auto"], help="learning rates of reinforcement learning")
    about.add_argument("--until", type=float, default=0.3, help="greedy success that ends a warm start")
    about.add_argument("--seconds", type=float, default=60.0, help="of a warm start, at most")
    about.add_argument("--minutes", type=float, default=5.0, help="in total, after which runs are interrupted")
    about.add_argument("--demonstrations", type=int, default=100_000)
    about.add_argument("--batch", type=int, default=1024, help="demonstrations per step")
    about.add_argument("--lr", type=float, default=2e-3, help="largest learning rate of the warm start")
    about.add_argument("--steps", type=int, default=15, help="batches of rollouts")
    about.add_argument("--problems", type=int, default=1024, help="held-out ones, to measure on")
    about.add_argument("--seed", type=int, default=0)
    about.add_argument("--unsafe-code-execution", action="store_true", help="where the system has no sandbox (docs/safety.md)")
    about.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = about.parse_args(argv)
    if args.out.exists() and any(args.out.iterdir()):
        about.error(f"{args.out} is not empty; choose another --out")
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * args.minutes - 25
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(len(args.only), mp_context=multiprocessing.get_context("spawn")) as makers,
        ThreadPoolExecutor(len(args.only) * len(args.rates)) as runs,
    ):
        work = Path(folder)
        starts = {name: makers.submit(prepare, name, args, work) for name in args.only}
        pending = [
            runs.submit(reinforce, starts[name], rate, args, work, deadline) for name in args.only for rate in args.rates
        ]
        for name, start in starts.items():
            if (error := start.exception()) is not None:
                print(f"{name}: {error}", flush=True)
            else:
                made = start.result()
                print(f"{name}: T=1 {made['success']:.3f}, greedy {made['greedy']:.3f}, {made['seconds']} s", flush=True)
        print("start        rate  batches  T=1              greedy")
        for run in pending:
            if run.exception() is None:
                print(run.result(), flush=True)


if __name__ == "__main__":
    main()
