"""One run of the study with the trainer as it ships: `corral train` in a folder of its own, its metrics step by step."""

import os
import signal
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread
from typing import Any

from rich.console import Console
from spec import Shipped
from transformers.utils import logging as transformers_logging

from corral.llm.eval_view import EvalView
from corral.llm.evaluate import EvalSettings, evaluate
from corral.llm.settings import read_recipe, resolve
from corral.llm.train import train
from corral.run.folder import RunFolder

DEAD = 4
"""Steps in a row without any reward after which nothing can be learned any more."""
KEPT = ("step", "reward", "success", "greedy", "learning_rate", "entropy", "grad_norm", "seconds", "completions/mean_length")
"""Of a line of metrics, besides everything under tr/."""


def is_dead(lines: list[dict[str, Any]]) -> bool:
    """Whether the last steps had no reward at all."""
    rewards = [line["reward"] for line in lines if line["reward"] is not None]
    return len(rewards) >= DEAD and not any(rewards[-DEAD:])


def run(spec: Shipped, deadline: float) -> dict[str, Any]:
    """Train, and tell how it went; `finished` is False where the deadline came first."""
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
        lines = RunFolder(folder).lines()
        end = _measure_end(spec, folder) if spec.end_size and stopped == "finished" else None
    dead = stopped == "interrupted" and is_dead(lines)
    return {
        "key": spec.key,
        **asdict(spec),
        "arm": spec.arm,
        "finished": dead or stopped == "finished",
        "dead": dead,
        "seconds": time.monotonic() - began,
        "cpu": time.process_time() - cpu,
        "end": end,
        "lines": [_shorten(line) for line in lines],
    }


def _measure_end(spec: Shipped, folder: Path) -> dict[str, float]:
    """Held-out success of the last network on more problems than the curve's."""
    console = Console(quiet=True)
    asked = EvalSettings(model=str(folder), problems=spec.end_size, samples=1, seed=spec.seed, device=spec.layer()["device"])
    found = evaluate(asked, EvalView(console, console)).result["estimates"]
    return {"success": found["pass@1"]["value"], "greedy": found["greedy"]["value"], "problems": spec.end_size}


def _interrupt(folder: Path, deadline: float, over: Event) -> None:
    """Ctrl-C, which ends a run after its step, once it is dead or out of time."""
    while not over.wait(1.0):
        if time.monotonic() > deadline or is_dead(RunFolder(folder).lines()):
            os.kill(os.getpid(), signal.SIGINT)
            return


def _shorten(line: dict[str, Any]) -> dict[str, Any]:
    """What the study needs of a line of metrics, to six digits."""
    kept = {key: value for key, value in line.items() if (key in KEPT or key.startswith("tr/")) and value is not None}
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in kept.items()}
