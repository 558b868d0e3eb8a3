"""Every task, from two steps of training to an evaluation of what came out, through the command line and without a network."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from corral.lab.cli import main
from corral.lab.tasks import make_task, names

MATHS = [{"problem": f"What is ${n} + {n}$?", "answer": str(2 * n)} for n in range(1, 7)]

ROWS: dict[str, list[dict[str, Any]]] = {
    **dict.fromkeys(("aime24", "aime25", "amc", "math500"), MATHS),
    "jsonl": [{"prompt": f"Double {n}.", "answer": 2 * n} for n in range(1, 7)],
    "humaneval": [
        {
            "prompt": f'def add{n}(x):\n    """Add {n}."""\n',
            "entry_point": f"add{n}",
            "canonical_solution": f"    return x + {n}\n",
            "test": f"def check(candidate):\n    assert candidate(1) == {n + 1}\n",
        }
        for n in range(1, 7)
    ],
    "mbpp": [
        {"text": f"Add {n}.", "code": f"def add(x):\n    return x + {n}", "test_list": [f"assert add(1) == {n + 1}"]}
        for n in range(1, 7)
    ],
    "apps": [
        {"question": f"Read a number and print it plus {n}.", "input_output": {"inputs": ["1\n"], "outputs": [f"{n + 1}\n"]}}
        for n in range(1, 7)
    ],
}  # fmt: skip
"""Data sets in the shapes in which they are passed around, a handful of rows each."""

SHIPPED = ("arithmetic", "code", "countdown", "dapo_math", "expression", "gsm8k", "reasoning_gym", "two_numbers", "words")
"""Tasks that need no file: they draw their problems, or a few ship with corral."""

RIGHT = {
    "math500": ("What is $3 + 3$?", "So it is $\\boxed{6}$."),
    "jsonl": ("Double 3.", "\\boxed{6}"),
    "humaneval": ('def add3(x):\n    """Add 3."""\n', "```python\ndef add3(x):\n    return x + 3\n```"),
    "apps": ("Read a number and print it plus 3.", "```python\nprint(int(input()) + 3)\n```"),
}
"""One right answer for some of them, so that a reward of 0 everywhere means what it says."""


def settings(name: str, folder: Path) -> list[str]:
    """Flags that make a task run here."""
    if name not in ROWS:
        return []
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    return ["--set", f"task_config.path={path}", "--set", "task_config.held_out=0.4"]


def test_no_task_is_left_out() -> None:
    assert {*ROWS, *SHIPPED} == set(names()) - {"digits", "letters"}  # which only tests have


@pytest.mark.parametrize("name", sorted([*ROWS, *SHIPPED]))
def test_a_task_trains_and_evaluates(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    out = tmp_path / "run"
    flags = ["--task", name, *settings(name, tmp_path), "--instruction", "Q: {problem}"]
    assert main(["train", "--smoke", *flags, "--quiet", "--out", str(out)]) == 0, capsys.readouterr().err
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["stopped"], summary["steps"], summary["task"]) == ("finished", 2, name)
    evaluate = ["eval", str(out), "--problems", "2", "--samples", "2", "--quiet", "--out", str(tmp_path / "e")]
    assert main(evaluate) == 0, capsys.readouterr().err
    rows = pq.read_table(tmp_path / "e" / "completions.parquet").to_pylist()
    assert len(rows) == 2 * 3
    assert all(0 <= row["reward"] <= 1 for row in rows)
    saved = json.loads((tmp_path / "e" / "eval.json").read_text())["settings"]
    assert (saved["task"]["name"], saved["instruction"]) == (name, "Q: {problem}")


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_right_answers_to_these_problems_are_paid(name: str, tmp_path: Path) -> None:
    settings(name, tmp_path)
    task = make_task(name, path=str(tmp_path / f"{name}.jsonl"), held_out=0.4)
    prompt, completion = RIGHT[name]
    assert task.verify(prompt, completion) == 1.0
    assert task.verify(prompt, completion.replace("3", "4").replace("6", "7")) == 0.0
