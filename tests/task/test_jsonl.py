"""A user's own file of prompts and answers, under every verifier."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from corral.task import make_task, verify_all
from corral.task.jsonl import checked_reward


def write(folder: Path, rows: list[Any], name: str = "mine.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def both(folder: Path, answers: list[Any], **settings: Any) -> Any:
    """A task of two problems, a and b; one of them is held out."""
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in zip("ab", answers, strict=True)]
    return make_task("jsonl", path=write(folder, rows), held_out=0.5, **settings)


@pytest.mark.parametrize(
    ("verifier", "answers", "right", "wrong"),
    [
        ("math", [r"\frac{1}{2}", "(1,2)"], [r"\boxed{0.5}", r"\boxed{(1, 2)}"], [r"\boxed{0.4}", r"\boxed{(2,1)}"]),
        ("number", ["1,000", 2.5], ["#### 1000", "it is 2.50"], ["#### 1001", "25"]),
        ("exact", ["Paris", "x\ny"], [" Paris\n", "x\ny"], ["paris", "x y"]),
    ],
)
def test_verifiers(verifier: str, answers: list[Any], right: list[str], wrong: list[str], tmp_path: Path) -> None:
    task = both(tmp_path, answers, verifier=verifier)
    assert task.sizes == (1, 1)
    assert verify_all(task, ["a", "b"], right) == [1.0, 1.0]
    assert verify_all(task, ["a", "b"], wrong) == [0.0, 0.0]
    assert task.verify("a", right[0]) == 1.0


def test_code(tmp_path: Path) -> None:
    tests = [{"stdin": "2 3\n", "stdout": "5\n"}], {"entry": "add", "tests": [{"args": [2, 3], "result": 5}]}
    task = both(tmp_path, list(tests), verifier="code")
    right = ["```python\nprint(sum(map(int, input().split())))\n```", "def add(a, b):\n    return a + b"]
    assert verify_all(task, ["a", "b"], right) == [1.0, 1.0]
    assert verify_all(task, ["a", "b"], right[::-1]) == [0.0, 0.0]
    assert verify_all(task, [], []) == []


def test_tests_of_code_are_checked_when_they_are_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"jsonl: 2 rows are malformed:\n  mine.jsonl, line 1: `tests` should be a list"):
        both(tmp_path, ["5", []], verifier="code")


VERIFIERS = """
def length(prompt, completion, answer): return min(len(completion), answer["longest"]) / answer["longest"]
def yes(prompt, completion, answer): return True
def much(prompt, completion, answer): return 2.0
def nothing(prompt, completion, answer): return None
number = 3
"""


def test_a_verifier_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_verifiers.py").write_text(VERIFIERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    answers = [{"longest": 4}, {"longest": 2}]
    task = both(tmp_path, answers, verifier="my_verifiers:length")
    assert verify_all(task, ["a", "b"], ["xx", "xx"]) == [0.5, 1.0]
    assert both(tmp_path, answers, verifier="my_verifiers:yes").verify("a", "") == 1.0
    for name, value in (("much", "2.0"), ("nothing", "None")):
        with pytest.raises(ValueError, match=f"my_verifiers:{name} gave {value}. A task's reward is a number from 0 to 1"):
            both(tmp_path, answers, verifier=f"my_verifiers:{name}").verify("a", "")
    with pytest.raises(ValueError, match="'my_verifiers:missing' cannot be imported"):
        both(tmp_path, answers, verifier="my_verifiers:missing")
    with pytest.raises(ValueError, match="'my_verifiers:number' is int, which cannot be called"):
        both(tmp_path, answers, verifier="my_verifiers:number")


def test_columns_of_any_name_and_chats(tmp_path: Path) -> None:
    rows = [{"question": "a", "target": 1}, {"question": "b", "target": 2}]
    task = make_task("jsonl", path=write(tmp_path, rows), prompt_column="question", answer_column="target", held_out=0.5)
    assert verify_all(task, ["a", "b"], ["1", "1"]) == [1.0, 0.0]
    chats = [{"prompt": [{"role": "user", "content": letter}], "answer": "1"} for letter in "ab"]
    assert make_task("jsonl", path=write(tmp_path, chats, "chats.jsonl"), held_out=0.5).verify("a", "1") == 1.0
    named = [{"messages": row["prompt"], "answer": row["answer"]} for row in chats]
    path = write(tmp_path, named, "named.jsonl")
    assert make_task("jsonl", path=path, prompt_column="messages", held_out=0.5).verify("a", "1") == 1.0
    path = write(tmp_path, [{"messages": [], "answer": 1}], "empty.jsonl")
    with pytest.raises(ValueError, match="line 1: `messages` should be one message of the user's"):
        make_task("jsonl", path=path, prompt_column="messages")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "jsonl: `path` is missing"),
        (
            {"path": "mine.jsonl", "verifier": "maths"},
            r"there is no verifier 'maths'. Did you mean 'math'\? There are: code",
        ),
        (
            {"path": "mine.jsonl", "verifier": "exact", "format_weight": 0.1},
            "`format_weight` is for the verifiers math",
        ),
        ({"path": "mine.jsonl", "prompt_column": "text"}, "there is no `text`; the row has prompt, answer"),
        ({"path": "mine.jsonl", "verifier": "number"}, "line 1: `answer` should be one number; got 'x'"),
        ({"path": "mine.jsonl", "unsafe_code_execution": "no"}, "`unsafe_code_execution` is true or false; got 'no'"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_what_cannot_be(settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, [{"prompt": "a", "answer": "x"}, {"prompt": "b", "answer": "2"}])
    with pytest.raises(ValueError, match=message):
        make_task("jsonl", **settings)


@given(value=st.one_of(st.floats(), st.none(), st.text(), st.booleans(), st.integers()))
@example(value=10**400)
@example(value=torch.tensor([0.5, 0.5]))
@example(value=torch.tensor(0.5))
def test_rewards_are_numbers_from_0_to_1(value: Any) -> None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = -1.0
    if 0 <= number <= 1:
        assert checked_reward("mine", value) == number
    else:
        with pytest.raises(ValueError, match="the verifier mine gave"):
            checked_reward("mine", value)
