"""What does a trust region cost over clipping, in the trainer? Time of a whole step, of its updates alone, and memory.

    OMP_NUM_THREADS=1 python benchmarks/evidence/trainer_cost.py --rounds 3 --out results/cost.jsonl         the demo, CPU time
    python benchmarks/evidence/trainer_cost.py --device cuda --model DIR --set max_completion_length=128 … --out FILE

Objectives take turns, so that other work on the machine meets all of them; the first step of each run is left out, and on a GPU
a whole round before the first, in which kernels are compiled. Rollouts end the same way for all: a step's time is that of the
same number of completions.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "deployed"))

import torch
import transformers
from cost import Clock  # beside the study of deployed networks

from corral.lab.jobs.llm.settings import TABLES, read_recipe, resolve
from corral.lab.jobs.llm.train import train
from corral.lab.jobs.llm.trainer import RunTrainer
from corral.lab.run.files import append_line
from corral.lab.run.settings import nested
from corral.trl.trainer import CorralTrainer

OBJECTIVES: dict[str, dict[str, Any]] = {
    "ppo_clip": {"objective": "ppo_clip"},
    "reinforce": {"objective": "reinforce"},
    "dppo": {"objective": "dppo"},
    "dppo top-K": {"objective": "dppo", "objective_config": {"estimator": "topk"}},
    "troll": {"objective": "troll"},
    "troll union": {"objective": "troll", "support": "union"},
    "ppo_clip, measured": {"objective": "ppo_clip", "deployed_bound": "inf"},
}
"""What is timed, by name; clipping first, as everything is told relative to it."""


def measure(name: str, steps: int, device: str, layers: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of a step, of its rollouts and of everything after them, and the largest memory on a GPU in MiB."""
    clock = Clock(device)
    undo = [clock.on(CorralTrainer, "training_step", "step"), clock.on(CorralTrainer, "_generate", "rollouts")]
    first: dict[str, float] = {}

    class AfterTheFirst(transformers.TrainerCallback):
        """Starts counting there."""

        def on_log(self, *_: Any, **__: Any) -> None:
            if not first:
                first.update(clock.spent)
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()

    start, success = CorralTrainer.__init__, RunTrainer.measure

    def begin(trainer: CorralTrainer, *args: Any, **kwargs: Any) -> None:
        start(trainer, *args, **kwargs)
        trainer.add_callback(AfterTheFirst())

    CorralTrainer.__init__ = begin  # type: ignore[method-assign]
    RunTrainer.measure = lambda _: {}  # type: ignore[method-assign]  # held-out success is not what is timed
    quick = {"eval_size": 1, "eval_every": 999, "keep_completions": 0, "checkpoint_every": 999, "steps": steps + 1}
    try:
        with tempfile.TemporaryDirectory() as folder:
            settings = resolve([*layers, {"device": device, **quick}, OBJECTIVES[name]])
            stopped = train(settings, out=Path(folder) / "run", quiet=True).summary["stopped"]
            if stopped != "finished":
                raise SystemExit(f"trainer_cost: {name} was {stopped} before its {steps + 1} steps; nothing is written of it.")
    finally:
        CorralTrainer.__init__, RunTrainer.measure = start, success  # type: ignore[method-assign]
        for take_off in undo:
            take_off()
    spent = {key: (clock.spent[key] - first[key]) / steps for key in ("step", "rollouts")}
    memory = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0
    return {"step": spent["step"], "rollouts": spent["rollouts"], "updates": spent["step"] - spent["rollouts"], "mib": memory}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("objectives", nargs="*", metavar="objective", help=f"of {', '.join(OBJECTIVES)}; all unless named")
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
        for name in given.objectives or OBJECTIVES:
            found = measure(name, given.steps, given.device, layers)
            about = {"name": name, "round": turn, "device": given.device, "recipe": given.recipe}
            about |= {"model": Path(str(layers[1].get("model", "tiny"))).name, "torch": torch.__version__}
            if given.out is not None and turn >= 0:
                given.out.parent.mkdir(parents=True, exist_ok=True)
                append_line(given.out, {**about, **found, "date": time.strftime("%Y-%m-%d"), "set": given.set})
            seconds = f"step {found['step']:.3f} s, updates {found['updates']:.3f} s"
            print(f"round {turn + 1}  {name:20} {seconds}, {found['mib']:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
