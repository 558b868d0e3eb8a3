"""Settings of an evaluation, and the model or run to evaluate, both checked before torch or TRL is imported."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import corral
from corral.lab.jobs.llm.settings import ONE_OF_TOOLS, Settings, named_code, resolve
from corral.lab.models import BUILT_IN
from corral.lab.run.folder import RunFolder, choose_checkpoint, read_run
from corral.lab.run.settings import JobSettings, coerce
from corral.lab.tasks import TASKS
from corral.validate import RunError, limited, nearest

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")

MULTI_TURN = ("environment_factory", "tool", "tools")
"""Names of the settings for multi-turn completions: tool, functions and environment."""

_OF_RUN = ("task", "task_config", "instruction", *MULTI_TURN)
"""Names of the settings that an evaluation inherits from the evaluated run."""

_OF_TRAINER: dict[str, Any] = {
    "max_completion_length": int,
    "max_tool_calling_iterations": int | None,
    "chat_template_kwargs": dict | None,
    "bf16": bool | None,
}
"""Trainer settings that an evaluation inherits from the evaluated run: name → type in config.json."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to evaluate, with the run's settings if the model is a checkpoint of a run."""

    name: str
    """Name of the model or run, as the user gave it."""
    model: str
    """Name or path of the model, as `load_model` takes it."""
    identity: dict[str, Any]
    """Fingerprint of the model's weights, which differs between models of the same name with other weights."""
    run: Path | None = None
    step: int | None = None
    settings: Settings | None = None
    """The run's settings for task, instruction and tools. All other settings have their defaults."""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Trainer settings that the evaluation inherits from the run."""
    complaints: tuple[str, ...] = ()
    """Warnings about damaged newer checkpoints, if an older checkpoint is evaluated instead."""

    @property
    def half(self) -> bool:
        """True if a GPU should compute the model in bfloat16. A run trained in float32 is evaluated in float32."""
        return self.trainer.get("bf16") is not False

    def settings_of(self, task: str) -> dict[str, Any]:
        """Return the run's `task_config`, without `unsafe_code_execution`, if `task` is the run's task; else an empty table.

        Programs that a model writes run unconfined only where the command line allows it.
        """
        if self.settings is None or self.settings.task != task:
            return {}
        return {key: value for key, value in self.settings.task_config.items() if key != "unsafe_code_execution"}


@dataclass(frozen=True, kw_only=True)
class EvalSettings(JobSettings):
    """Settings of an evaluation. None stands for the evaluated run's value, or for a default of the task."""

    model: str
    """Model to evaluate: a run's folder, tiny, smollm2, a model folder, or a name on the hub."""
    task: str | None = None
    """Name of the task. The default is the evaluated run's task."""
    task_config: dict[str, Any] = field(default_factory=dict)
    """Settings of the task. A setting given here replaces the evaluated run's setting of the same name."""
    instruction: str | None = None
    """Prompt text around each problem; {problem} stands for the task's prompt."""
    tool: str | None = None
    """Tool that writes into the model's completions. The default is the run's tool; "" means no tool."""
    tools: tuple[str | Callable[..., Any], ...] | None = None
    """Functions that a chat model may call. The default is the run's functions; () means no functions."""
    environment_factory: str | Callable[..., Any] | None = None
    """Environment whose methods a chat model may call. The default is the run's environment; "" means no environment."""
    checkpoint: str | None = None
    """Checkpoint of a run: latest, best (by measured success), or the number of a step."""
    problems: int | None = limited(None, at_least=1)
    """Number of held-out problems. The default is all problems of a data set, or 512 of a procedural task."""
    samples: int = limited(4, at_least=1)
    """Number of samples per problem, in addition to the greedy completion."""
    temperature: float = limited(1.0, above=0, note="the greedy answer is given in any case")
    """Sampling temperature; 1 samples from the unmodified policy."""
    top_p: float = limited(1.0, above=0, at_most=1)
    """Probability mass for nucleus (top-p) sampling; 1 samples from the unmodified policy."""
    max_tokens: int | None = limited(None, at_least=1)
    """Largest number of tokens in a completion."""
    batch_size: int | None = limited(None, at_least=1)
    """Number of prompts answered at a time. The default is 256 with transformers and 2048 with vLLM."""
    seed: int = limited(0, at_least=0)
    """Random seed for choosing problems and for every sample."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "transformers", "vllm"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.instruction is not None and "{problem}" not in self.instruction:
            raise RunError(f"`instruction` must contain {{problem}}, where the task's prompt goes; got {self.instruction!r}.")
        if self.task is not None and self.task not in TASKS and ":" not in self.task:
            raise RunError(f"there is no task {self.task!r}.{nearest(self.task, TASKS)}")

    def find(self) -> tuple[Subject, str]:
        """Find the model or run to evaluate, and the task."""
        subject = find_subject(self.model, self.checkpoint)
        task = self.task or (None if subject.settings is None else subject.settings.task)
        if task is None:
            what = "is no folder here, and a model of the hub" if "hub" in subject.identity else "is a model, and"
            raise RunError(f"{self.model} {what} has no task of its own: say which with --task.")
        # A run from elsewhere may name its own files: flags must repeat code that only the run's settings name.
        own = {"task": task, "task_config": {**subject.settings_of(task), **self.task_config}, **self.multi_turn(subject)}
        repeated = set(named_code(vars(self)))
        missing = [code for code in named_code(own) if code not in repeated]
        if missing:
            paths = ", ".join(path for _, path in missing)
            flags = " ".join(f"{flag} {shlex.quote(path)}" for flag, path in missing)
            raise RunError(
                f"{self.model} names code in its own config.json, {paths}, and reading a run imports nothing. If you trust "
                f"that code, type it yourself: {flags}"
            )
        return subject, task

    def multi_turn(self, subject: Subject) -> dict[str, Any]:
        """Return the settings of tools, environment and chat template, which are by default those of the evaluated run."""
        given = {name: vars(self)[name] for name in MULTI_TURN if vars(self)[name] is not None}
        inherits = subject.settings is not None and not any(given.values())  # else another one takes the place of the run's
        chosen = ({name: vars(subject.settings)[name] for name in MULTI_TURN} if inherits else {}) | given
        if chosen.get("tool") and (chosen.get("tools") or chosen.get("environment_factory")):
            raise RunError(ONE_OF_TOOLS)
        chosen["max_turns"] = subject.trainer.get("max_tool_calling_iterations")
        chosen["chat_template_kwargs"] = subject.trainer.get("chat_template_kwargs")
        return {name: value for name, value in chosen.items() if value}


def find_subject(name: str, checkpoint: str | None) -> Subject:
    """Find a run's checkpoint (`latest` by default), or a model: tiny, smollm2, a folder, or a name on the hub."""
    path = Path(name)
    if name not in BUILT_IN and path.is_dir() and (content := read_run(path)) is not None:
        folder = RunFolder.open(path, write=False)
        chosen, complaints = choose_checkpoint(folder, checkpoint or "latest")
        own, trainer = content["settings"], content.get("trainer")
        try:
            if not isinstance(own, Mapping) or own.get("task") is None:
                raise RunError("`settings` names no task.")
            if not isinstance(trainer, Mapping):
                raise RunError("it has no table `trainer`.")
            return Subject(
                name=name,
                model=str(chosen.path),
                identity={file: sha for file, (_, sha) in chosen.files().items() if Path(file).suffix == ".safetensors"},
                run=path,
                step=chosen.step,
                settings=resolve([{key: own[key] for key in _OF_RUN if own.get(key) is not None}]),
                trainer={key: coerce(key, trainer.get(key), hint) for key, hint in _OF_TRAINER.items()},
                complaints=tuple(complaints),
            )
        except RunError as error:
            raise RunError(f"{folder.config} is not what a run writes: {error}") from error
    if checkpoint is not None:
        raise RunError(f"--checkpoint chooses among those of a run, and {name} is no run.")
    if name in BUILT_IN:
        return Subject(name=name, model=name, identity={"corral": corral.__version__})
    if path.is_dir():
        if not any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
            inside = max(path.glob("checkpoint-*"), key=lambda one: one.stat().st_mtime, default=None)
            hint = "" if inside is None else f" It holds a trainer's checkpoints: give one of them, such as {inside}."
            raise RunError(f"{name} is neither a run nor a model: it has no config.json, nor an adapter_config.json.{hint}")
        found = sorted(file for pattern in _WEIGHTS for file in path.glob(pattern))
        files = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in found}
        return Subject(name=name, model=name, identity={"files": files})
    if name.startswith((".", "/", "runs/")) or name.count("/") > 1 or path.exists():
        raise RunError(f"there is no run or model folder {name}.")
    return Subject(name=name, model=name, identity={"hub": name})
