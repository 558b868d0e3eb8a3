"""Starts of pretrained models for word problems: SmolLM2 as it comes, or supervised on problems from books; Gemma supervised.

    python -m results.evidence.pretrained_starts smollm2 --log starts.jsonl
    python -m results.evidence.pretrained_starts gemma --seeds 1 2 3 --log starts.jsonl
    python -m results.evidence.pretrained_starts books --seeds 1 2 3 --log starts.jsonl

Where next to nothing is right there is nothing to reinforce: a model learns demonstrations, a few at a time, until a share of
its samples on problems to reinforce is right. Folders of BASES for the plans `b…` and `gate0-words`; a line each in --log, with
what a start can do on held-out problems, greedy and at four temperatures. Starts that are there already are left alone.
"""

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers.utils import logging as transformers_logging

from corral.run.files import append_line
from corral.task import Task, make_task
from corral.task.two_numbers import TwoNumbers
from results.evidence.spec import BASES, PRETRAINED
from results.evidence.supervised import BATCH, Start

RATE, ROUND, WATCHED = 2e-5, 4 * BATCH, 256
"""The rate of a warm-up, demonstrations between two looks at its success, and training problems that it is watched on."""


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """How a base becomes a start."""

    model: str
    """What `corral train --model` calls it."""
    rounds: int = 0
    """Of ROUND demonstrations, after which a start is taken as it is."""
    enough: float = 0.1
    """Success at temperature 1 that ends the warm-up before that."""


WARM_UPS = {
    "smollm2": WarmUp(model="smollm2"),
    "gemma": WarmUp(model="gemma", rounds=40),
    "books": WarmUp(model="smollm2", rounds=42, enough=0.2),
}
"""Books have 1,823 problems to demonstrate: 42 rounds are three times through them."""


def task_of(base: str, **changes: Any) -> Task:
    """The problems that a base is asked."""
    about = PRETRAINED | BASES[base]
    return make_task(about["task"], **{**about.get("task_config", {}), **changes})


def demonstrations(base: str, count: int, seed: int) -> list[tuple[str, str]]:
    """Problems with their answers; of books those of the half that is not reinforced."""
    if isinstance(task := task_of(base), TwoNumbers):
        return task.demonstrations(count, seed)
    told = task_of(base, part="sft")
    return [(prompt, told.answer(prompt)) for prompt in told.train_prompts(count, seed)]  # type: ignore[attr-defined]  # tasks with data have it


def load(base: str, device: str, model: str | None = None) -> Start:
    """A pretrained model, or another in its place, asked as the base is."""
    about = PRETRAINED | BASES[base]
    how: dict[str, Any] = {"instruction": str(about["instruction"]), "longest": int(about["max_completion_length"])}
    return Start(model or WARM_UPS[base].model, task_of(base), rate=RATE, device=device, **how)


def make(start: Start, base: str, seed: int, out: Path, *, rounds: int, problems: int) -> dict[str, Any]:
    """Write one start's folder whole, after a warm-up where it has rounds for one; what it can do."""
    began, how = time.monotonic(), WARM_UPS[base]
    held_out = start.task.held_out_prompts(problems, seed=0)
    card = {"model": base, "seed": seed, "held_out": len(held_out), "before": start.measure(held_out[:WATCHED])}
    pairs = [(prompt, f" {answer}") for prompt, answer in demonstrations(base, rounds * ROUND, seed=10_000 + seed)]
    parts = (pairs[at : at + ROUND] for at in range(0, len(pairs), ROUND))
    watched = start.task.train_prompts(WATCHED, seed=20_000 + seed)
    card["rounds"] = start.until(how.enough, watched, parts, torch.Generator().manual_seed(seed))
    start.save(out)
    return card | {"after": start.measure(held_out), "seconds": time.monotonic() - began}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", choices=WARM_UPS)
    parser.add_argument("--log", type=Path, help="file to append a line per start to")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], help="of the warm-ups")
    parser.add_argument("--problems", type=int, default=1024, help="held-out ones, to measure on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    transformers_logging.disable_progress_bar()
    for seed in given.seeds:
        out = Path(str(BASES[given.base]["model"]).format(start=seed))
        if out.exists():
            continue
        out.parent.mkdir(parents=True, exist_ok=True)
        start, rounds = load(given.base, given.device), WARM_UPS[given.base].rounds
        card = make(start, given.base, seed, out, rounds=rounds, problems=given.problems)
        print(card, flush=True)
        if given.log is not None:
            append_line(given.log, card)


if __name__ == "__main__":
    main()
