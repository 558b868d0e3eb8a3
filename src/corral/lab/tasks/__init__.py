"""Interface of tasks (prompts with a verifier of completions), and the registry of all packaged tasks by name."""

import dataclasses
from collections import UserDict
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any, ClassVar, Protocol, runtime_checkable

from corral.lab.tasks.imports import by_path
from corral.lab.tasks.messages import Message, text_of
from corral.validate import build_config, nearest

__all__ = ["TASKS", "Task", "columns_of", "find_task", "make_task", "messages_of", "names", "text_of", "verify_all"]


@runtime_checkable
class Task(Protocol):
    """Interface of a task: training prompts, held-out prompts, and a verifier for both.

    Implementations are frozen dataclasses whose fields are the settings. Prompts are drawn by seed, the same ones on every
    machine; the first prompts of a longer draw are those of a shorter one. A procedural task draws with replacement. A finite
    one goes through its training problems once per epoch, reshuffled each time, and gives each held-out problem at most once.

    A prompt is the problem's text and the key to its answer, so it is unique inside a task. Three methods are optional:

        verify_all(prompts, completions)   where grading many together is faster than one by one
        columns(prompt)                    what reward functions get besides, by name: the row's other columns
        messages(prompt)                   the prompt as a chat, where it is more than one message of the user's
    """

    name: ClassVar[str]

    @property
    def max_completion_length(self) -> int:
        """Largest number of tokens that a correct completion may need, without the end token.

        The embedded models' tokens are characters.
        """

    def train_prompts(self, count: int, seed: int) -> list[str]:
        """Draw `count` prompts for training."""

    def held_out_prompts(self, count: int, seed: int) -> list[str]:
        """Draw `count` prompts for evaluation. Their problems never occur in `train_prompts`, for any seeds."""

    def verify(self, prompt: str, completion: str) -> float:
        """Reward of a completion (any text), from 0 to 1. Raises ValueError for a prompt of another task."""


class _Tasks(UserDict[str, Any]):
    """Registry of task classes by name. A packaged class is given as `module:Class` and imported at its first lookup."""

    def __getitem__(self, name: str) -> type[Any]:
        found = super().__getitem__(name)
        return resolve_name(f"{__name__}.{found}") if isinstance(found, str) else found


TASKS = _Tasks(
    aime24="math_problems:AIME24", aime25="math_problems:AIME25", amc="math_problems:AMC", apps="code.task:APPS",
    arithmetic="procedural:Arithmetic", code="code.task:Code", countdown="procedural:Countdown",
    dapo_math="math_problems:DAPOMath", expression="procedural:Expression", gsm8k="math_problems:GSM8K",
    humaneval="code.task:HumanEval", jsonl="jsonl:Jsonl", math500="math_problems:MATH500", mbpp="code.task:MBPP",
    reasoning_gym="reasoning_gym:ReasoningGym", two_numbers="procedural:TwoNumbers", words="math_problems:WordProblems",
)  # fmt: skip
"""All packaged tasks by name."""

_PARTS = ("name", "max_completion_length", "train_prompts", "held_out_prompts", "verify")
"""Attributes that a class needs to be a task."""


def names() -> list[str]:
    """Names of all registered tasks, in alphabetical order."""
    return sorted(TASKS)


def find_task(name: str) -> type[Any]:
    """Find a task's class by its registered name, or by the path `module:Class` of a user's own class."""
    if not isinstance(name, str) or ":" not in name:
        if name not in TASKS:
            raise ValueError(f"make_task: there is no task {name!r}.{nearest(name, TASKS)} Or your own: module:Class.")
        return TASKS[name]
    found = by_path(name, "a task of your own is module:Class")
    if not isinstance(found, type):
        raise ValueError(f"a task of your own is module:Class, and {name!r} is {type(found).__name__}, not a class.")
    fields = [field.name for field in dataclasses.fields(found)] if dataclasses.is_dataclass(found) else []
    missing = [part for part in _PARTS if part not in (*dir(found), *fields)]
    if missing:
        raise ValueError(f"{name} is not a task: it has no {', '.join(missing)}. corral.task.Task says what they are.")
    return found


def make_task(name: str, **settings: Any) -> Task:
    """Make a task with the given settings, by its registered name or by the path `module:Class` of a user's own class."""
    task_cls = find_task(name)
    if dataclasses.is_dataclass(task_cls):
        task: Task = build_config(name, task_cls, settings)
        return task
    try:
        own: Task = task_cls(**settings)
        return own
    except TypeError as error:  # settings that its __init__ does not have
        raise ValueError(f"{name} cannot be made with {settings}: {error}.") from error


def settings_of(task: Task) -> dict[str, Any]:
    """Return a task's settings by name: the fields of a dataclass, or the attributes of any other object."""
    if not dataclasses.is_dataclass(task):
        return {**vars(task)}
    return {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}


def verify_all(task: Task, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Return the rewards of many completions, by the task's `verify_all` if it defines this method, else by its `verify`."""
    if len(prompts) != len(completions):
        raise ValueError(f"verify_all: there are {len(prompts)} prompts for {len(completions)} completions.")
    together = getattr(task, "verify_all", None)  # a class of the user's own need not have it
    try:
        if together is None:
            return [task.verify(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        rewards = list(together(prompts, completions))
    except SystemExit as error:  # sys.exit(0) in a verifier of the user's would end a run as if it had finished
        raise ValueError(
            f"{task.name}: its verifier raised SystemExit ({error}). A verifier gives a number for every text."
        ) from error
    if len(rewards) != len(completions):
        raise ValueError(f"{task.name}.verify_all gave {len(rewards)} rewards for {len(completions)} completions.")
    return rewards


def columns_of(task: Task, prompts: Sequence[str]) -> dict[str, list[Any]]:
    """Return the data columns of these prompts as lists by column name. A value is None where a row lacks the column."""
    columns = getattr(task, "columns", None)
    rows = [columns(prompt) for prompt in prompts] if columns is not None else []
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def messages_of(task: Task, prompt: str) -> list[Message]:
    """Turn a prompt into chat messages: the task's messages if it defines them, else one user message."""
    messages = getattr(task, "messages", None)
    return [{"role": "user", "content": prompt}] if messages is None else messages(prompt)
