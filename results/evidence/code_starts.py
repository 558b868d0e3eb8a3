"""One-line functions to write, and a warm start of the embedded model on them: the evidence's part on code, for a CPU.

    python -m results.evidence.code_starts --out runs/code-starts --seeds 1 2 3

Writes problems in the shape of the task `code` (runs/code-starts/problems: a sentence, calls with their results) and, for each
seed, a folder for the plan `e`: the embedded model, supervised on right functions for other problems, a fourth of them at a
time, until a fifth of its programs pass their tests in the sandbox. Starts that are there already are left alone.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch

from corral.run.files import append_line, write_whole
from corral.task.code import Code
from results.evidence.spec import CODE
from results.evidence.supervised import Start

OPERATORS = {"plus": "+", "minus": "-", "times": "*"}
TERMS = ("a", "b", *map(str, range(2, 10)))
CALLS = ((1, 2), (5, 3), (-4, 7), (10, -6))
"""Arguments on which a function is tried: no two different functions of a problem's kind need differ on fewer."""
RATE, ENOUGH, PARTS, WATCHED = 1e-3, 0.2, 4, 128
ROUNDS = 40
"""Fourths of the examples after which a start is taken as it is."""
SIZES = {"sft": 2000, "train": 2000, "test": 1024}
"""Problems to learn from by example, by reinforcement, and to measure on."""


def functions() -> list[tuple[str, str]]:
    """All sentences with a right function, each once, in a random order that is always the same."""
    found = {}
    for x in TERMS:
        for y in TERMS:
            for z in TERMS:
                if not {"a", "b"} & {x, y, z}:
                    continue
                for second, sign in OPERATORS.items():
                    for first, inner in OPERATORS.items():
                        found[f"{x} {first} {y}, all {second} {z}"] = f"({x}{inner}{y}){sign}{z}"
                    for word, name in (("larger", "max"), ("smaller", "min")):
                        found[f"the {word} of {x} and {y}, {second} {z}"] = f"{name}({x},{y}){sign}{z}"
    pairs = [(f"f(a,b): {text}", f"def f(a,b):return {code}") for text, code in found.items()]
    random.Random(0).shuffle(pairs)
    return pairs


def write_problems(folder: Path) -> list[tuple[str, str]]:
    """Files of problems for reinforcement and for measuring, no sentence in two of them; the rest is shown in warm-ups."""
    pairs, start = functions(), 0
    parts = {}
    for name, size in SIZES.items():
        parts[name], start = pairs[start : start + size], start + size
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "test"):
        text = "".join(json.dumps(_row(*pair)) + "\n" for pair in parts[name])
        write_whole(folder / f"{name}.jsonl", lambda beside, text=text: beside.write_text(text))
    return parts["sft"]


def _row(prompt: str, code: str) -> dict[str, Any]:
    """A problem of the task `code`."""
    names: dict[str, Any] = {}
    exec(code, names)
    tests = [{"args": list(call), "result": names["f"](*call)} for call in CALLS]
    return {"prompt": prompt, "entry": "f", "tests": tests, "reference": code}


def make(folder: Path, pairs: list[tuple[str, str]], seed: int, out: Path, *, rounds: int, device: str) -> dict[str, Any]:
    """Train one start and write its folder whole; what it can do on problems to train on."""
    task = Code(path=str(folder), workers=1)
    how: dict[str, Any] = {"instruction": str(CODE["instruction"]), "longest": int(CODE["max_completion_length"])}
    start = Start("tiny", task, rate=RATE, device=device, **how)
    watched = task.train_prompts(WATCHED, seed=10_000 + seed)
    card: dict[str, Any] = {"model": "tiny", "task": "code", "seed": seed, "before": start.success(watched)}
    parts = (pairs[round % PARTS :: PARTS] for round in range(rounds))
    card["rounds"] = start.until(ENOUGH, watched, parts, torch.Generator().manual_seed(seed))
    start.save(out)
    return card


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(CODE["task_config"]["path"]).parent)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="at most")
    parser.add_argument("--log", type=Path, help="file to append a line per start to")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    pairs = write_problems(given.out / "problems")
    for seed in given.seeds:
        if (out := given.out / str(seed)).exists():
            continue
        card = make(given.out / "problems", pairs, seed, out, rounds=given.rounds, device=given.device)
        print(card, flush=True)
        if given.log is not None:
            append_line(given.log, card)


if __name__ == "__main__":
    main()
