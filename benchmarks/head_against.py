"""Is one source tree faster than another? A process per tree; both prepare the same case and take turns, round by round.

The benchmark's own code is this tree's in both; corral is imported from the folder each process is given. The parent asks for
one round at a time, so that one of them is on the machine, and the order changes every round. The anchor is the same code in
both: its own ratio says how far two processes differ by themselves.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
from head_cases import SECTIONS, About
from rows import Row
from timing import free_memory, milliseconds

import corral

HERE = Path(corral.__file__).parents[1]
ROUNDS = 15
WARM_UP = 3


class Tree:
    """A process that measures one source tree. A question is a line of JSON, and so is its answer."""

    def __init__(self, source: Path) -> None:
        source = Path(os.path.abspath(source))
        path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, __file__], env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self.source = source

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.source} has ended with status {self.process.wait()}; see above why.")
        return json.loads(line)

    def ask(self, question: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.hear()


class Comparison:
    """This tree and another one, case by case."""

    def __init__(self, other: Path) -> None:
        self.this, self.other = Tree(HERE), Tree(other)
        try:
            for tree in (self.this, self.other):
                if (imported := tree.hear()) != str(tree.source):
                    raise ValueError(f"--against wants a source folder, with corral in it: {tree.source} gives {imported}.")
        except Exception:
            self.close()
            raise

    def measure(self, section: str, about: About, rounds: int | None = None) -> list[Row]:
        """A row per contender: medians in both trees, and this tree's time over the other's with quartiles of the rounds."""
        case = {"section": section, "about": about, "threads": torch.get_num_threads()}
        for tree in (self.this, self.other):
            tree.ask(case)
        this: list[dict[str, float]] = []
        other: list[dict[str, float]] = []
        for number in range(rounds or ROUNDS):
            for tree, taken in ((self.this, this), (self.other, other))[:: 1 if number % 2 else -1]:
                taken.append(tree.ask({}))
        return [{**about, **_row(key, [x[key] for x in this], [x[key] for x in other])} for key in this[0]]

    def close(self) -> None:
        for tree in (self.this, self.other):
            tree.process.communicate()  # ends its questions, and with them the process


def _row(key: str, this: list[float], other: list[float]) -> Row:
    ratios = [a / b for a, b in zip(this, other, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    figures = {
        "ms": statistics.median(this), "ms_other": statistics.median(other),
        "ratio": middle, "ratio_low": low, "ratio_high": high,
    }  # fmt: skip
    task, name = key.split(": ")
    return {"task": task, "name": name, **{what: float(f"{value:.4g}") for what, value in figures.items()}}


def prepare(case: dict[str, Any]) -> Callable[[], dict[str, float]]:
    """A function that times one run of every contender of ours, and of the anchor."""
    torch.set_num_threads(case["threads"])
    section = SECTIONS[case["section"]]
    prepared = section.prepare(case["about"], section.device)
    runs = {": ".join(key): run for key, run in prepared.runs.items() if "corral" in key[1] or key == prepared.anchor}
    for run in [*runs.values()] * WARM_UP:
        run()
    return lambda: {name: milliseconds(run, section.device, wall=prepared.wall) for name, run in runs.items()}


def serve(questions: TextIO, answers: TextIO) -> None:
    """Say where corral is; then prepare every case that is asked for, and take a round of it whenever nothing is."""
    take_round: Callable[[], dict[str, float]] = dict
    print(json.dumps(str(HERE)), file=answers, flush=True)
    for line in questions:
        answer: Any = "ready"
        if case := json.loads(line):
            take_round = dict  # nothing refers to the last case
            free_memory()
            take_round = prepare(case)
        else:
            answer = take_round()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer
    serve(sys.stdin, out)
