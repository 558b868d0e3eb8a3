"""Problems of the task `code` whose answers are one-line functions, and demonstrations of others."""

import json
import random
from pathlib import Path
from typing import Any

from corral.lab.run.files import write_whole

OPERATORS = {"plus": "+", "minus": "-", "times": "*"}
TERMS = ("a", "b", *map(str, range(2, 10)))
CALLS = ((1, 2), (5, 3), (-4, 7), (10, -6))
"""Arguments on which a function is tried: no two different functions of a problem's kind need differ on fewer."""
SIZES = {"sft": 2000, "train": 2000, "test": 1024}
"""Problems to learn from by example, by reinforcement, and to measure on."""


def functions() -> list[tuple[str, str]]:
    """Pairs of a sentence and a right function, each once, in a fixed random order."""
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
