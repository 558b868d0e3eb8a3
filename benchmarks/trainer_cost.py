"""What does a trust region cost over clipping in the trainer, and what its certificate? Time of a step by part, and memory.

    OMP_NUM_THREADS=1 python benchmarks/trainer_cost.py ppo_clip troll --out runs/cost.jsonl              the demo, CPU time
    OMP_NUM_THREADS=1 python benchmarks/trainer_cost.py measured held auto --set objective=troll          the deployed network
    python benchmarks/trainer_cost.py --device cuda --model DIR --set max_completion_length=128 … --out FILE

Contenders take turns, so that other work on the machine meets all of them; the first step of each run is left out, and on a GPU
a whole round before the first, in which kernels are compiled. Rollouts end the same way for all: a step's time is that of the
same number of completions. On a GPU it is time on the clock, with the queue empty at either end.
"""

import argparse
import os
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from corral.lab.jobs.llm.settings import TABLES, read_recipe, resolve
from corral.lab.jobs.llm.train import train
from corral.lab.jobs.llm.trainer import RunTrainer
from corral.lab.run.files import append_line
from corral.lab.run.settings import nested
from corral.trl.deployed import DeployedCallback, DeployedProbe
from corral.trl.trainer import CorralTrainer

CONTENDERS: dict[str, dict[str, Any]] = {
    "ppo_clip": {"objective": "ppo_clip"},
    "reinforce": {"objective": "reinforce"},
    "dppo": {"objective": "dppo"},
    "dppo top-K": {"objective": "dppo", "objective_config": {"estimator": "topk"}},
    "troll": {"objective": "troll"},
    "troll union": {"objective": "troll", "support": "union"},
    "measured": {"deployed_bound": "inf"},
    "held": {"deployed_bound": 0.02},
    "auto": {"learning_rate": "auto"},
}
"""What is timed, by name; clipping first, as everything is told relative to it. The last three are the recipe's objective."""
TIMED = (
    (CorralTrainer, "training_step", "step"), (CorralTrainer, "_generate", "rollouts"),
    (DeployedCallback, "on_step_begin", "certificate"), (DeployedCallback, "on_step_end", "certificate"),
    (DeployedProbe, "add", "certificate"),
)  # fmt: skip
"""Methods whose time is added up, and under which name."""


class Clock(transformers.TrainerCallback):
    """Seconds by name after the first step: of the CPU, or on the clock where a GPU works."""

    def __init__(self, device: str) -> None:
        self.spent: Counter[str] = Counter()
        self.device, self.steps = device, 0

    def now(self) -> float:
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, owner: type, method: str, name: str) -> Any:
        """A patch under which the method's time is added up."""
        original = getattr(owner, method)

        def run(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            try:
                return original(*args, **kwargs)
            finally:
                self.spent[name] += self.now() - start

        return patch.object(owner, method, run)

    def on_log(self, *_: Any, **__: Any) -> None:
        """Start counting after the first step."""
        self.steps += 1
        if self.steps == 1:
            self.spent.clear()
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()


def measure(name: str, steps: int, device: str, layers: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of a step, of its rollouts, of everything after them and of its certificate; most memory on a GPU in MiB."""
    clock, start = Clock(device), CorralTrainer.__init__

    def begin(trainer: CorralTrainer, *args: Any, **kwargs: Any) -> None:
        start(trainer, *args, **kwargs)
        trainer.add_callback(clock)

    quick = {"eval_size": 1, "eval_every": 999, "keep_completions": 0, "checkpoint_every": 999, "steps": steps + 1}
    settings = resolve([*layers, {"device": device, **quick}, CONTENDERS[name]])
    with ExitStack() as stack:
        for part in TIMED:
            stack.enter_context(clock.timed(*part))
        stack.enter_context(patch.object(CorralTrainer, "__init__", begin))
        stack.enter_context(patch.object(RunTrainer, "measure", lambda _: {}))  # held-out success is not what is timed
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stopped = train(settings, out=folder / "run", quiet=True).summary["stopped"]
    if stopped != "finished":
        raise SystemExit(f"trainer_cost: {name} was {stopped} before its {steps + 1} steps; nothing is written of it.")
    found = {key: clock.spent[key] / steps for key in ("step", "rollouts", "certificate")}
    memory = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0
    return found | {"updates": found["step"] - found["rollouts"], "mib": memory}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", nargs="*", metavar="contender", help=f"of {', '.join(CONTENDERS)}; all unless named")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--model", help="other than the recipe's")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of `corral train`")
    parser.add_argument("--out", type=Path, help="file to append a line per measurement to")
    given = parser.parse_args()
    torch.set_num_threads(1 if given.device == "cpu" else 8)
    layers = [read_recipe(given.recipe), {"model": given.model} if given.model else {}]
    layers.append(nested([tuple(pair.split("=", 1)) for pair in given.set], TABLES))
    for turn in range(-1 if given.device == "cuda" else 0, given.rounds):
        for name in given.contenders or CONTENDERS:
            found = measure(name, given.steps, given.device, layers)
            about = {"name": name, "round": turn, "device": given.device, "recipe": given.recipe}
            about |= {"model": Path(str(layers[1].get("model", "tiny"))).name, "torch": torch.__version__}
            if given.out is not None and turn >= 0:
                given.out.parent.mkdir(parents=True, exist_ok=True)
                append_line(given.out, {**about, **found, "date": time.strftime("%Y-%m-%d"), "set": given.set})
            parts = ", ".join(f"{part} {found[part]:.3f} s" for part in ("step", "updates", "certificate"))
            print(f"round {turn + 1}  {name:20} {parts}, {found['mib']:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
