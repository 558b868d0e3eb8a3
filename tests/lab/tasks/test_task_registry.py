"""The registry: names, a user's own class by its dotted path, and one function that grades."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

import corral.task
from corral.lab.tasks import TASKS, Task, find_task, make_task, names, verify_all
from corral.lab.tasks.procedural import Countdown

OFFLINE = {"arithmetic", "code", "countdown", "expression", "reasoning_gym", "two_numbers"}
OURS = OFFLINE | {"gsm8k", "math500", "aime24", "aime25", "amc", "dapo_math", "jsonl", "humaneval", "mbpp", "apps", "words"}


def test_every_promised_name_is_there() -> None:
    assert names() == sorted(TASKS)
    assert set(names()) >= OURS  # other tests may have added their own
    assert all(TASKS[name].name == name for name in OURS)
    assert all(inspect.getdoc(TASKS[name]) for name in OURS)
    assert callable(corral.task.run_python)
    assert corral.task.SandboxResult


@pytest.mark.parametrize("name", sorted(OFFLINE))
def test_tasks_that_need_neither_files_nor_a_network(name: str) -> None:
    task = make_task(name)
    assert isinstance(task, Task)
    train, held_out = task.train_prompts(30, 0), task.held_out_prompts(20, 0)
    assert (len(train), train[:10]) == (30, task.train_prompts(10, 0))
    assert held_out[:5] == task.held_out_prompts(5, 0)
    assert not set(train) & set(held_out)
    assert 0.0 <= task.verify(train[0], "no answer") <= 1.0
    with pytest.raises(ValueError, match=name):
        task.verify("a prompt of another task", "1")
    with pytest.raises(ValueError, match="cannot be negative"):
        task.train_prompts(-1, 0)


MODULE = """
from dataclasses import dataclass
from typing import ClassVar

@dataclass(frozen=True, kw_only=True)
class Shout:
    name: ClassVar[str] = "shout"
    loudness: int = 1
    max_completion_length: int = 3
    def train_prompts(self, count, seed): return ["abc"] * count
    def held_out_prompts(self, count, seed): return ["xyz"] * count
    def verify(self, prompt, completion): return float(completion == prompt.upper())

class Plain:
    name, max_completion_length = "plain", 3
    train_prompts, held_out_prompts, verify = Shout.train_prompts, Shout.held_out_prompts, Shout.verify
    def __init__(self, word="x"): self.word = word

class Half:
    name = "half"
    def verify(self, prompt, completion): return 0.0

number = 7
"""


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the user's folder; its name is new for every test, since modules stay imported."""
    name = "tasks_of_" + tmp_path.name.replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_broken.py").write_text("import no_such_module")
    (tmp_path / f"{name}_wrong.py").write_text("def f(:")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    return name


def test_a_class_of_the_users_own(beside: str) -> None:
    task = make_task(f"{beside}:Shout", loudness=3)
    assert isinstance(task, Task)
    assert task.loudness == 3
    assert verify_all(task, ["abc", "abc"], ["ABC", "abc"]) == [1.0, 0.0]
    assert make_task(f"{beside}:Plain", word="y").word == "y"
    with pytest.raises(ValueError, match=rf"{beside}:Shout: there is no setting `loud`. Did you mean 'loudness'\?"):
        make_task(f"{beside}:Shout", loud=3)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{}:Missing", r"a task of your own is module:Class, and '.*:Missing' cannot be imported: module .* has no attribute"),
        ("no_such_module_at_all:Task", r"cannot be imported: No module named 'no_such_module_at_all'"),
        ("{}_broken:Task", r"cannot be imported: No module named 'no_such_module'"),
        ("{}_wrong:Task", r"cannot be imported: invalid syntax"),
        ("{}:number", r"is int, which cannot be called"),
        ("{}:Half", r"is not a task: it has no max_completion_length, train_prompts, held_out_prompts"),
        ("{}:", r"a task of your own is module:Class; got"),
        (":Task", r"a task of your own is module:Class; got ':Task'"),
    ],
)
def test_what_is_no_task(path: str, message: str, beside: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_task(path.format(beside))


def test_settings_that_an_init_does_not_have(beside: str) -> None:
    with pytest.raises(ValueError, match=r"Plain cannot be made with \{'size': 3\}: .*unexpected keyword argument 'size'"):
        make_task(f"{beside}:Plain", size=3)


def test_unknown_names_get_a_near_match(unchecked_shapes: None) -> None:
    with pytest.raises(ValueError, match=r"no task 'gsm8'. Did you mean 'gsm8k'\? There are: .* Or your own: module:Class."):
        make_task("gsm8")
    with pytest.raises(ValueError, match=r"no task None\. There are: .* Or your own: module:Class."):
        make_task(None)


@dataclass(frozen=True, kw_only=True)
class Together(Countdown):
    """Grades all at once, and not always well."""

    name: ClassVar[str] = "together"
    gives: tuple[Any, ...] = ()

    def verify_all(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        return list(self.gives)


def test_verify_all_takes_the_tasks_own_if_there_is_one() -> None:
    prompts = ["3 7 12>22:"] * 2
    assert verify_all(make_task("countdown"), prompts, ["3+7=10+12=22", "22"]) == [1.0, 0.0]
    assert verify_all(Together(gives=(0.25, 0.5)), prompts, ["a", "b"]) == [0.25, 0.5]
    with pytest.raises(ValueError, match=r"together.verify_all gave 1 rewards for 2 completions"):
        verify_all(Together(gives=(0.25,)), prompts, ["a", "b"])
    with pytest.raises(ValueError, match="there are 2 prompts for 1 completions"):
        verify_all(make_task("countdown"), prompts, ["a"])
    assert verify_all(make_task("countdown"), [], []) == []
