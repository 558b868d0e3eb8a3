"""Starts of pretrained models for word problems with two numbers: SmolLM2 as it comes, Gemma after a supervised warm-up.

    python benchmarks/evidence/pretrained_starts.py smollm2 --log starts.jsonl
    python benchmarks/evidence/pretrained_starts.py gemma --seeds 1 2 3 --log starts.jsonl

A base model neither ends its answers nor knows what is asked of it: it learns demonstrations, a few at a time, until a tenth of
its samples on other training problems is right. Folders of BASES for the plans `b…` and `gate0-words`; a line each in --log,
with what a start can do on held-out problems, greedy and at four temperatures. Starts that are there already are left alone.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from evidence_spec import BASES, PRETRAINED
from supervised import BATCH, Start
from transformers.utils import logging as transformers_logging

from corral.run.files import append_line
from corral.task.two_numbers import TwoNumbers

TASK, RATE = TwoNumbers(), 2e-5
ROUND, ROUNDS = 4 * BATCH, 40
"""Demonstrations between two looks at the success, and rounds after which a start is taken as it is."""
ENOUGH, WATCHED = 0.1, 256
"""Success at temperature 1 at which a warm-up ends, and training problems on which it is watched."""


def load(base: str, device: str, model: str | None = None) -> Start:
    """A pretrained model, or another in its place, asked as the base is."""
    about = {**PRETRAINED, **BASES[base]}
    how: dict[str, Any] = {"instruction": str(about["instruction"]), "longest": int(about["max_completion_length"])}
    return Start(model or base, TASK, rate=RATE, device=device, **how)


def make(start: Start, base: str, seed: int, out: Path, *, rounds: int, problems: int) -> dict[str, Any]:
    """Write one start's folder whole, after a warm-up where it has rounds for one; what it can do."""
    began = time.monotonic()
    held_out = TASK.held_out_prompts(problems, seed=0)
    card: dict[str, Any] = {"model": base, "seed": seed, "held_out": problems, "before": start.measure(held_out[:WATCHED])}
    pairs = [(prompt, f" {answer}") for prompt, answer in TASK.demonstrations(rounds * ROUND, seed=10_000 + seed)]
    parts = (pairs[at : at + ROUND] for at in range(0, len(pairs), ROUND))
    watched = TASK.train_prompts(WATCHED, seed=20_000 + seed)
    card["rounds"] = start.until(ENOUGH, watched, parts, torch.Generator().manual_seed(seed))
    start.save(out)
    return card | {"after": start.measure(held_out), "seconds": time.monotonic() - began}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", choices=("smollm2", "gemma"))
    parser.add_argument("--log", type=Path, help="file to append a line per start to")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], help="of Gemma's warm-ups")
    parser.add_argument("--problems", type=int, default=1024, help="held-out ones, to measure on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    transformers_logging.disable_progress_bar()
    for seed in given.seeds:
        out = Path(str(BASES[given.base]["model"]).format(start=seed))
        if out.exists():
            continue
        out.parent.mkdir(parents=True, exist_ok=True)
        rounds = ROUNDS if given.base == "gemma" else 0
        card = make(load(given.base, given.device), given.base, seed, out, rounds=rounds, problems=given.problems)
        print(card, flush=True)
        if given.log is not None:
            append_line(given.log, card)


if __name__ == "__main__":
    main()
