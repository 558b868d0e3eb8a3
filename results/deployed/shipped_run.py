"""One run of the study with the trainer as it ships: `corral train` in a folder of its own, its metrics step by step."""

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from corral.lab.jobs.llm.evaluate import EvalSettings, prepare_evaluation
from corral.lab.jobs.llm.problems import Sampling, generate
from corral.lab.jobs.llm.rewards import verifier
from corral.lab.jobs.llm.settings import read_recipe, resolve
from corral.lab.jobs.llm.train import train
from corral.lab.models.load import load_model
from corral.lab.run.folder import RunFolder
from results.deployed.spec import Shipped

DEAD = 4
"""Steps in a row without any reward after which nothing can be learned any more."""
GREEDY = 1024
"""Held-out problems that are answered greedily at the end."""
KEPT = (
    "step", "reward", "success", "greedy", "learning_rate", "entropy", "grad_norm", "seconds", "tr/active_frac", "tr/ess",
    "tr/deployed_kl_mean", "tr/deployed_kl_p999", "tr/deployed_kl_max", "tr/step_share", "tr/passes", "tr/rate_trials",
)  # fmt: skip
"""Of a line of metrics: what pages read, and a few that tell why a run went wrong."""


def is_dead(lines: list[dict[str, Any]]) -> bool:
    """Whether so many steps in a row had no reward at all; the one in which the run was told to end may have had some."""
    rewards = [line["reward"] for line in lines if line["reward"] is not None]
    return any(not any(rewards[at : at + DEAD]) for at in range(len(rewards) - DEAD + 1))


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
    """Held-out success of the last network on more problems than the curve's; greedy on some of them."""
    found = measure(EvalSettings(model=str(folder), problems=spec.end_size, seed=spec.seed, device=spec.layer()["device"]))
    return {"success": found[1.0], "greedy": found[0.0], "problems": spec.end_size}


def measure(settings: EvalSettings, temperatures: Sequence[float] = (1.0,), greedy: int = GREEDY) -> dict[float, float]:
    """Success by temperature, one sample a problem in float32; at 0, greedy, on the first `greedy` problems."""
    job = prepare_evaluation(settings)
    model, tokenizer = load_model(job.subject.model)
    model.to(job.device).eval()  # type: ignore[arg-type]  # transformers wraps `to` and loses its signature
    problems, success = job.problems(tokenizer), verifier(job.task)
    found = {}
    for temperature in (0.0, *temperatures):
        asked, right = job.held_out if temperature else job.held_out[:greedy], 0.0
        torch.manual_seed(settings.seed)
        for start in range(0, len(asked), 512):
            batch = asked[start : start + 512]
            ids, longest = problems.tokens(batch), job.sampling.max_tokens
            sampling = Sampling(max_tokens=longest, greedy=not temperature, temperature=temperature or 1.0)
            tokens = generate(model, tokenizer, ids, sampling)
            texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
            right += sum(success(prompts=batch, completions=texts, problem=batch))
        found[temperature] = right / len(asked)
    return found


def _interrupt(folder: Path, deadline: float, over: Event) -> None:
    """Ctrl-C, which ends a run after its step, once it is dead or out of time."""
    while not over.wait(1.0):
        if time.monotonic() > deadline or is_dead(RunFolder(folder).lines()):
            os.kill(os.getpid(), signal.SIGINT)
            return


def _shorten(line: dict[str, Any]) -> dict[str, Any]:
    """What the study needs of a line of metrics, to six digits."""
    kept = {key: value for key, value in line.items() if key in KEPT and value is not None}
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in kept.items()}
