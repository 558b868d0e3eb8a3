"""A user's own file of prompts and answers, under every verifier."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from corral.lab.tasks import columns_of, make_task, messages_of, text_of, verify_all
from corral.lab.tasks.jsonl import read_reward


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
    with pytest.raises(ValueError, match="line 1: `messages` should be a chat that ends with the user's message"):
        make_task("jsonl", path=path, prompt_column="messages")


SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 · 7?"}


def test_chats_of_several_messages(tmp_path: Path) -> None:
    rows = [{"prompt": [SYSTEM, {**USER, "name": "Ada"}], "answer": 42}, {"prompt": "b", "answer": 1}]
    task = make_task("jsonl", path=write(tmp_path, rows), held_out=0.5)
    prompt = "system: Be brief.\n\nuser: 6 · 7?"
    assert task.verify(prompt, "42") == 1.0
    assert messages_of(task, prompt) == [SYSTEM, USER], "a role and a content each"
    assert messages_of(task, "b") == [{"role": "user", "content": "b"}]
    for number, (chat, why) in enumerate(
        [
            ([USER, {"role": "assistant", "content": "42"}], "a chat that ends with the user's message"),
            (
                [SYSTEM, {"role": "user", "content": ""}],
                "a text that is not empty, or a chat, every message with a role and a content",
            ),
            ([SYSTEM, "b"], "a text that is not empty, or a chat, every message with a role and a content"),
            ([SYSTEM], "a chat that ends with the user's message"),
        ]
    ):
        path = write(tmp_path, [{"prompt": chat, "answer": 1}], f"bad{number}.jsonl")
        with pytest.raises(ValueError, match=f"line 1: `prompt` should be {why}"):
            make_task("jsonl", path=path)


def test_reward_functions_get_every_column_as_json_has_it(tmp_path: Path) -> None:
    rows = [
        {"question": "a", "answer": "42", "level": 3, "tags": ["sum"]},
        {"question": "b", "answer": 21, "level": None},  # columns of several types, and one that is missing
    ]
    task = make_task("jsonl", path=write(tmp_path, rows), prompt_column="question", held_out=0.5)
    assert columns_of(task, ["b", "a", "a"]) == {
        "question": ["b", "a", "a"],
        "answer": [21, "42", "42"],
        "level": [None, 3, 3],
        "tags": [None, ["sum"], ["sum"]],
    }
    with pytest.raises(ValueError, match="'c' is no prompt of this task"):
        columns_of(task, ["c"])
    named = [{"prompt": letter, "problem": letter, "completion": "x", "answer": 1} for letter in "ab"]
    task = make_task("jsonl", path=write(tmp_path, named, "named.jsonl"), held_out=0.5)
    assert columns_of(task, ["a"]) == {"answer": [1]}, "the prompt and the problem are passed already"
    assert columns_of(make_task("arithmetic"), ["1+1:"]) == {}


@pytest.mark.parametrize(
    ("chat", "text"),
    [
        ("plain", "plain"),
        ([{"role": "assistant", "content": "a"}], "a"),
        ([{"role": "assistant", "content": None}, {"role": "assistant", "content": "b"}], "b"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "c"}, {"type": "image"}]}], "c"),
    ],
)
def test_the_text_of_a_completion(chat: Any, text: str) -> None:
    assert text_of(chat) == text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "jsonl: `path` is missing: a file of problems, --set task_config.path=FILE"),
        (
            {"path": "mine.jsonl", "verifier": "maths"},
            r"there is no verifier 'maths'. Did you mean 'math'\? There are: code",
        ),
        (
            {"path": "mine.jsonl", "verifier": "exact", "format_weight": 0.1},
            "`format_weight` is for the verifiers math",
        ),
        ({"path": "empty.jsonl"}, r"jsonl: empty\.jsonl is empty: there is no problem in it"),
        ({"path": "mine.jsonl", "held_out": "empty.jsonl"}, r"jsonl: empty\.jsonl is empty"),
        ({"path": "mine.jsonl", "prompt_column": "text"}, "there is no `text`; the row has prompt, answer"),
        ({"path": "mine.jsonl", "verifier": "number"}, "line 1: `answer` should be one number; got 'x'"),
        ({"path": "mine.jsonl", "unsafe_code_execution": "no"}, "`unsafe_code_execution` is one of True, False; got 'no'"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_what_cannot_be(settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, [{"prompt": "a", "answer": "x"}, {"prompt": "b", "answer": "2"}])
    (tmp_path / "empty.jsonl").write_text("\n")
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
        assert read_reward("mine", value) == number
    else:
        with pytest.raises(ValueError, match="the verifier mine gave"):
            read_reward("mine", value)
