"""Prompts and verifiers: what a policy is asked, and what counts as right. This file is the one registry."""

from typing import Any, ClassVar, Protocol, runtime_checkable

from corral.objective.naming import build_config, nearest
from corral.task.countdown import Countdown


@runtime_checkable
class Task(Protocol):
    """Something to learn: prompts to train on, prompts never trained on, and a verifier for both.

    Implementations are frozen dataclasses whose fields are the settings. Prompts are drawn by seed, the same ones on every
    machine, with replacement; the first prompts of a longer draw are those of a shorter one.
    """

    name: ClassVar[str]

    @property
    def max_prompt_length(self) -> int:
        """Characters of the longest prompt."""

    @property
    def max_completion_length(self) -> int:
        """Characters of the longest right completion. Allow one more token, for the end of the sequence."""

    def train_prompts(self, count: int, seed: int) -> list[str]:
        """Prompts to learn from."""

    def held_out_prompts(self, count: int, seed: int) -> list[str]:
        """Prompts to evaluate on; their problems never occur in `train_prompts`, whatever the seeds."""

    def verify(self, prompt: str, completion: str) -> float:
        """The reward, 0 to 1, of a completion, which may be any text; ValueError where the prompt is not this task's."""


TASKS: dict[str, type[Task]] = {
    "countdown": Countdown,
}


def names() -> list[str]:
    """Every registered task, in alphabetical order."""
    return sorted(TASKS)


def make_task(name: str, **settings: Any) -> Task:
    """The task `name` with these settings; `names()` lists what there is."""
    if name not in TASKS:
        raise ValueError(f"make_task: there is no task {name!r}.{nearest(name, TASKS)}")
    task: Task = build_config(name, TASKS[name], settings)
    return task
