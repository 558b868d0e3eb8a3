"""Settings of an evaluation, checked before torch or TRL is imported, so that errors appear at once."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from corral.lab.jobs.llm.settings import ONE_OF_TOOLS
from corral.lab.models.subject import Subject, find_subject, named_code
from corral.lab.tasks import TASKS
from corral.validate import RunError, nearest, require


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """Settings of an evaluation. None stands for the run's own value, or for a default of the task."""

    model: str
    """Model to evaluate: a run's folder, tiny, smollm2, a model folder, or a name on the hub."""
    task: str | None = None
    """Task, by a name from corral.task; the run's own by default."""
    task_config: dict[str, Any] = field(default_factory=dict)
    """Settings of the task, merged over the run's."""
    instruction: str | None = None
    """Instruction around each problem; {problem} is the task's prompt."""
    tool: str | None = None
    """Tool that answers the model within a completion: the run's own by default; "" is none."""
    tools: tuple[str | Callable[..., Any], ...] | None = None
    """Functions that a chat model may call: the run's own by default; () is none."""
    environment_factory: str | Callable[..., Any] | None = None
    """Environment whose methods a chat model may call: the run's own by default; "" is none."""
    checkpoint: str | None = None
    """Checkpoint of a run: latest, best (by measured success), or the number of a step."""
    problems: int | None = None
    """Number of held-out problems: by default all of a data set, or 512 of a procedural task."""
    samples: int = 4
    """Number of samples per problem, in addition to the greedy completion."""
    temperature: float = 1.0
    """Temperature of the samples; 1 is the policy itself."""
    top_p: float = 1.0
    """Probability mass from which tokens are sampled; 1 is the policy itself."""
    max_tokens: int | None = None
    """Largest number of tokens in a completion."""
    batch_size: int | None = None
    """Number of prompts answered at a time: 256 with transformers, 2048 with vLLM."""
    seed: int = 0
    """Random seed of the choice of problems and of every sample."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "transformers", "vllm"] = "auto"

    def __post_init__(self) -> None:
        require(self, "problems", "max_tokens", "batch_size", at_least=1, integer=True, optional=True, name="", error=RunError)
        require(self, "samples", at_least=1, integer=True, name="", error=RunError)
        require(self, "seed", at_least=0, integer=True, name="", error=RunError)
        note = "the greedy answer is given in any case"
        require(self, "temperature", above=0, note=note, name="", error=RunError)
        require(self, "top_p", above=0, at_most=1, name="", error=RunError)
        if self.instruction is not None and "{problem}" not in self.instruction:
            raise RunError(f"`instruction` must contain {{problem}}, where the task's prompt goes; got {self.instruction!r}.")
        if self.task is not None and self.task not in TASKS and ":" not in self.task:
            raise RunError(f"there is no task {self.task!r}.{nearest(self.task, TASKS)}")

    def find(self) -> tuple[Subject, str]:
        """The subject of the evaluation and its task."""
        subject = find_subject(self.model, self.checkpoint)
        task = self.task or subject.defaults.get("task")
        if task is None:
            what = "is no folder here, and a model of the hub" if "hub" in subject.identity else "is a model, and"
            raise RunError(f"{self.model} {what} has no task of its own: say which with --task.")
        self._refuse_unrepeated(subject, task)
        return subject, task

    def _refuse_unrepeated(self, subject: Subject, task: str) -> None:
        """Refuse user code that the run's settings name and the command line does not repeat: a stranger's run may name its own
        files."""
        own = {"task": task, "task_config": {**self.inherited(subject, task), **self.task_config}, **self.multi_turn(subject)}
        given = {"task": self.task, "task_config": self.task_config, **{name: vars(self)[name] for name in MULTI_TURN}}
        repeated = set(named_code(given))
        missing = [code for code in named_code(own) if code not in repeated]
        if missing:
            paths = ", ".join(path for _, path in missing)
            flags = " ".join(f"{flag} {shlex.quote(path)}" for flag, path in missing)
            raise RunError(
                f"{self.model} names code in its own config.json, {paths}, and reading a run imports nothing. If you trust "
                f"that code, type it yourself: {flags}"
            )

    def inherited(self, subject: Subject, task: str) -> dict[str, Any]:
        """The run's own settings of its task, or none if another task was chosen."""
        found: dict[str, Any] = subject.defaults.get("task_config", {}) if task == subject.defaults.get("task") else {}
        return found

    def multi_turn(self, subject: Subject) -> dict[str, Any]:
        """The tool or environment that answers within completions, and the chat template's arguments; a run's own by
        default."""
        own = subject.defaults
        given = {name: vars(self)[name] for name in MULTI_TURN if vars(self)[name] is not None}
        if any(given.values()):  # another one takes the place of the run's
            own = {name: value for name, value in own.items() if name not in MULTI_TURN}
        chosen = {name: own.get(name) for name in (*MULTI_TURN, "max_turns", "chat_template_kwargs")} | given
        if chosen["tool"] and (chosen["tools"] or chosen["environment_factory"]):
            raise RunError(ONE_OF_TOOLS)
        return {name: value for name, value in chosen.items() if value}


MULTI_TURN = ("environment_factory", "tool", "tools")
"""Settings that choose the tool, functions or environment that answer within completions."""
