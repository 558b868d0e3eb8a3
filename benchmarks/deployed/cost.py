"""What does it cost to certify, or hold, the network that is deployed? CPU time of a demo step, and of its certificate.

    OMP_NUM_THREADS=1 python benchmarks/deployed/cost.py [held …] [--steps 6] [--set objective=troll num_iterations=4 …]
    python benchmarks/deployed/cost.py --device cuda --recipe countdown

Both are taken in the same run, so that other work on the machine cancels. A step is TRL's (rollouts, scoring, updates); the
first is left out. On a GPU it is time on the clock, with the queue empty at either end.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from corral.lab.jobs.llm.settings import read_recipe, resolve
from corral.lab.jobs.llm.train import train
from corral.trl.deployed import DeployedCallback, DeployedProbe
from corral.trl.trainer import CorralTrainer

MODES: dict[str, dict[str, Any]] = {
    "measured": {"deployed_bound": "inf"},
    "held": {"deployed_bound": 0.02},
    "auto": {"learning_rate": "auto"},
}


class Clock:
    """Seconds by name: of the CPU, or on the clock where a GPU works."""

    def __init__(self, device: str) -> None:
        self.spent: Counter[str] = Counter()
        self.device = device

    def now(self) -> float:
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def on(self, owner: type, method: str, name: str) -> Callable[[], None]:
        """From now on the method's time is added up; what is returned takes the clock off again."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            try:
                return original(*args, **kwargs)
            finally:
                self.spent[name] += self.now() - start

        setattr(owner, method, timed)
        return lambda: setattr(owner, method, original)


def cost(settings: dict[str, Any], steps: int, device: str, recipe: str) -> tuple[float, float]:
    """Seconds of a step without the certificate, and of its certificate."""
    clock = Clock(device)
    parts = [(DeployedCallback, "on_step_begin"), (DeployedCallback, "on_step_end"), (DeployedProbe, "add")]
    undo = [clock.on(owner, method, "certificate") for owner, method in parts]
    undo.append(clock.on(CorralTrainer, "training_step", "step"))
    first: Counter[str] = Counter()

    class AfterTheFirst(transformers.TrainerCallback):
        """Starts counting there."""

        def on_log(self, *_: Any, **__: Any) -> None:
            if not first:
                first.update(clock.spent)

    start = CorralTrainer.__init__

    def begin(trainer: CorralTrainer, *args: Any, **kwargs: Any) -> None:
        start(trainer, *args, **kwargs)
        trainer.add_callback(AfterTheFirst())

    CorralTrainer.__init__ = begin  # type: ignore[method-assign]
    layers = [read_recipe(recipe), {"device": device, "eval_size": 1, "eval_every": 999, "keep_completions": 0}]
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = resolve([*layers, {**settings, "steps": steps + 1, "checkpoint_every": 999}])
            train(run, out=Path(folder) / "run", quiet=True)
    finally:
        CorralTrainer.__init__ = start  # type: ignore[method-assign]
        for take_off in undo:
            take_off()
    spent = {name: (clock.spent[name] - first[name]) / steps for name in ("step", "certificate")}
    return spent["step"], spent["certificate"]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", metavar="mode", help=f"of {', '.join(MODES)}; all of them unless named")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--recipe", default="demo", help="of `corral train`")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of `corral train`")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    others = dict(pair.split("=", 1) for pair in given.set)
    for mode in given.modes or MODES:
        step, certificate = cost({**MODES[mode], **others}, given.steps, given.device, given.recipe)
        sys.stdout.write(f"{mode:9} step {step:.2f} s, certificate {certificate:.2f} s: + {certificate / step:.1%}\n")


if __name__ == "__main__":
    main()
