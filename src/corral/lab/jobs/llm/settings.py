"""Settings of a language-model run from recipe, file and flags, checked before torch is imported."""

import ast
import builtins
import dataclasses
import typing
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_type_hints

from packaging.version import Version

from corral.lab.jobs.llm.own_objective import find_objective
from corral.lab.jobs.llm.rewards import Reward, as_functions, path_of
from corral.lab.run.settings import RunSettings, add_layer, coerce
from corral.lab.run.trackers import TRACKERS, missing_packages
from corral.lab.tasks import TASKS, make_task
from corral.lab.tasks.dataset import FiniteTask
from corral.lab.tasks.imports import make_tool
from corral.lab.tasks.procedural import ProceduralTask
from corral.objective import OBJECTIVES, make_config
from corral.trl import TRL_RANGE
from corral.validate import RunError, check_keys, limited, nearest, run_errors, suggest

_CONFIGS = (
    ("corral", "trl/config.py", "CorralConfig"),
    ("trl", "trainer/grpo_config.py", "GRPOConfig"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("transformers", "training_args.py", "TrainingArguments"),
)
"""Package, module file and class name of CorralConfig and its base classes, from which settings are read."""

_ALSO_CALLED = {
    "epochs": "--num-iterations, passes over each batch of rollouts, or --steps",
    "num_epochs": "--num-iterations, passes over each batch of rollouts, or --steps",
    "group_size": "--num-generations",
    "algorithm": "--objective, or for a robot a recipe of its own beside it, such as --recipe via_point",
    "iterations": "--steps, or for a robot a recipe of its own beside it, such as --recipe via_point",
    "loss": "--objective",
    "environment": "--environment-factory module:Class, or for a robot a recipe of its own, such as --recipe via_point",
    "rollout_func": "--tool module:Class, or --tools and --environment-factory of a chat model",
    "dataset": "--task jsonl --set task_config.path=FILE",
    "data": "--task jsonl --set task_config.path=FILE",
    "train_file": "--task jsonl --set task_config.path=FILE",
    "clip": "--objective ppo_clip --set objective_config.clip_low=0.2 --set objective_config.clip_high=0.2",
    "kl_coef": "--beta",
    "use_peft": "--lora.r 16",
    "lora_r": "--lora.r",
    "lora_alpha": "--lora.lora_alpha",
}
"""Names of settings in other libraries, each with corral's flag for the same setting."""


def refuse_unknown(key: str, known: list[str], objective: str, task: str) -> str:
    """Return the error text for an unknown setting, which suggests the setting's place or the nearest existing name."""
    where = "`corral explain settings` lists them all."
    if key in _ALSO_CALLED:
        return f"there is no setting `{key}`. Use {_ALSO_CALLED[key]}. {where}"
    owners = [name for name, (_, config_cls) in OBJECTIVES.items() if key in (item.name for item in fields(config_cls))]
    owners.sort(key=lambda name: name != objective)
    if owners:
        return f"there is no setting `{key}`; {owners[0]} has one: --set objective_config.{key}=…. {where}"
    task_cls = TASKS.get(task)
    if is_dataclass(task_cls) and key in (item.name for item in fields(task_cls)):
        return f"there is no setting `{key}`; {task} has one: --set task_config.{key}=…. {where}"
    return f"there is no setting `{key}`.{suggest(key, known)} {where}"


_NAMES = defaultdict(lambda: object, vars(typing) | vars(builtins))
"""Namespace to evaluate a type's text: names of `typing`, Python's built-in names, and `object` for any other name."""


@cache
def trainer_types() -> dict[str, Any]:
    """Read the names and types of CorralConfig's settings from source code, because importing TRL takes seconds.

    The result is empty if TRL is unsupported.

    Its own fields precede inherited fields. A type that only TRL or transformers knows is `object`.
    """
    types: dict[str, str] = {}
    try:
        if Version(version("trl")).release[:2] < Version(TRL_RANGE[0]).release:
            return {}
        for package, path, name in _CONFIGS:
            spec = find_spec(package)
            if spec is None or spec.origin is None:
                return {}
            body = ast.parse((Path(spec.origin).parent / path).read_text()).body
            (config_cls,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
            found: dict[str, str] = {}
            for item in config_cls.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    hint, default = ast.unparse(item.annotation), ast.unparse(item.value) if item.value is not None else ""
                    if "ClassVar" not in hint and "init=False" not in default:
                        found[item.target.id] = hint
            types = found | types
    except (PackageNotFoundError, OSError, SyntaxError, ValueError):  # no TRL, or a release that has moved its source
        return {}
    return {key: eval(hint, {}, _NAMES) for key, hint in types.items()}  # texts of the installed packages' own source


_PACKAGES = {"use_vllm": "vllm", "deepspeed": "deepspeed"}
"""TRL settings that need another package, each with the package's name."""


TABLES = ("objective_config", "task_config", "lora")
"""Names of settings that are tables. A later source of settings changes only those keys of a table that it has."""

DECIDED = {
    "output_dir": "--out",
    "max_steps": "steps",
    "num_train_epochs": "steps",
    "save_steps": "checkpoint_every",
    "save_strategy": "checkpoint_every",
    "save_total_limit": "keep_checkpoints",
    "eval_steps": "eval_every",
    "eval_strategy": "eval_every",
    "use_cpu": "device",
    "resume_from_checkpoint": "--resume",
    "disable_tqdm": "--quiet",
    "log_completions": "keep_completions",
    "logging_steps": "nothing: every step is logged",
    "logging_strategy": "nothing: every step is logged",
    "shuffle_dataset": "seed",
    "data_seed": "seed",
    "push_to_hub": "`corral export RUN --out DIR`, then `hf upload NAME DIR`",
    "ignore_data_skip": "nothing: a resumed run continues where it stopped",
}
"""TRL settings that users cannot change because the run decides them, each with what to use instead."""

_CLIP = "--objective ppo_clip --set objective_config.clip_low=0.2 --set objective_config.clip_high=0.2"
_OF_OBJECTIVES = {
    "epsilon": f"{_CLIP}, or another objective's bound: --set objective_config.bound=0.05",
    "epsilon_high": _CLIP,
    "delta": "--objective dual_clip --set objective_config.dual_clip=3",
    "importance_sampling_level": "--objective gspo, or --objective troll --set objective_config.level=sequence",
}
"""Settings of TRL's built-in losses, each with the corral flag to use instead."""


ONE_OF_TOOLS = "`tool` writes into a text, `tools` and `environment_factory` are called by a chat model: use one or the other."


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Settings of a language-model run. Settings of CorralConfig, and so of TRL's GRPOConfig, are in `trainer`."""

    model: str = "tiny"
    """Model to train: `tiny`, `tiny-sums`, `smollm2`, `gemma`, or a folder or hub id that transformers can load.
    `tiny` and `tiny-sums` are embedded; `smollm2` and `gemma` need `make smollm2` and `make gemma`. An adapter is trained
    further."""
    task: str = "countdown"
    """Task to learn: a name from corral.task, or a class of your own as `module:Class`."""
    task_config: dict[str, Any] = field(default_factory=dict)
    """Settings of the task."""
    objective: str = "troll"
    """Objective to learn with: a name from corral.objective_names(), or a function of your own.
    Your function is given as `file.py:function` or `module:function` (docs/tutorials/own-objective.md)."""
    objective_config: dict[str, Any] = field(default_factory=dict)
    """Settings of the objective."""
    lora: dict[str, Any] = field(default_factory=dict)
    """Settings of peft's LoraConfig for a new adapter, such as r and lora_alpha.
    If empty, every weight is trained, or only the adapter if `model` is one."""
    steps: int = limited(100, at_least=1)
    """Number of batches of rollouts. Each batch gives one or more updates."""
    eval_batch_size: int = limited(256, at_least=1)
    """Number of held-out problems that are answered at a time."""
    keep_completions: int = limited(16, at_least=0)
    """Number of completions of every step that are written to completions.parquet."""
    report_to: str = "none"
    """Trackers that TRL reports to: none, tensorboard, wandb, trackio, or several names separated by commas."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on. `auto` means the GPU if there is a GPU."""
    instruction: str = "{problem}"
    """Prompt text around each problem. {problem} stands for the task's prompt."""
    teacher: str = ""
    """Teacher model of `distill`, or reference model of `troll` with centre="reference".
    It is named as for `model`, and has the same vocabulary. If empty, it is the model as it was before training; as a teacher
    it also gets the solutions."""
    teacher_instruction: str = ""
    """Prompt text of the teacher, with {problem}, {solution} and other columns of the task's data.
    If empty, the model's prompt text, after a line with the {solution} if the model is its own teacher."""
    reward: tuple[str | Reward, ...] = ()
    """Reward functions in place of the task's verifier, with TRL's signature.
    They are given as `module:function`, `file.py:function=0.5` with a weight, or Python functions. `verifier` stands for the
    task's verifier."""
    tool: str = ""
    """Tool that replies within completions: `calculator`, or a class of your own as `module:Class`.
    A tool has the interface corral.lab.tasks.imports.Tool. Its replies are not trained on."""
    tools: tuple[str | Callable[..., Any], ...] = ()
    """Functions that a chat model may call (TRL's `tools`). Their results are not trained on.
    They are given as `module:function`, `file.py:function` or Python functions."""
    environment_factory: str | Callable[..., Any] = ""
    """Environment whose methods a chat model may call (TRL's `environment_factory`).
    It is given as `module:Class`, `file.py:Class` or a Python class."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Settings of CorralConfig, checked but not yet applied."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{problem}" not in self.instruction:
            raise RunError(f"`instruction` must contain {{problem}}, where the task's prompt goes; got {self.instruction!r}.")
        if self.task not in TASKS and ":" not in self.task:
            raise RunError(f"there is no task {self.task!r}.{nearest(self.task, TASKS)}")
        if self.tool and (self.tools or self.environment_factory):
            raise RunError(ONE_OF_TOOLS)
        # What is packaged is checked now. A path, module:Class, is imported when it is used.
        task, config = self.task, self.task_config
        task_cls: type[Any] | None = TASKS.get(task)
        with run_errors():
            if ":" not in self.objective:
                find_objective(self.objective)
                make_config(self.objective, self.objective_config)
            if is_dataclass(task_cls):
                check_keys(task, task_cls, config)
                if issubclass(task_cls, ProceduralTask):  # others may take their data from the hub
                    make_task(task, **config)
            if self.tool and ":" not in self.tool:
                make_tool(self.tool)
        if is_dataclass(task_cls) and issubclass(task_cls, FiniteTask) and config.get("held_out", task_cls.held_out) == 1:
            raise RunError(
                f"{task} is for evaluation: all of its problems are held out, and none is left to train on. Train on a file "
                f"(--set task_config.path=FILE) with these held out (--set task_config.held_out=FILE), or hold out a share."
            )

    def flat(self) -> dict[str, Any]:
        """All settings in one flat table, as in a settings file: keys of the run and of the trainer together."""
        paths: dict[str, Any] = {name: tuple(map(path_of, vars(self)[name])) for name in ("reward", "tools")}
        own = dataclasses.asdict(dataclasses.replace(self, environment_factory=path_of(self.environment_factory), **paths))
        return own | own.pop("trainer")

    def missing_packages(self) -> list[str]:
        """Return a sentence on each package that these settings need and that is not installed."""
        reports = [(f"report_to={name}", name) for name in self.report_to.split(",") if name in TRACKERS]
        return missing_packages(reports + [(key, name) for key, name in _PACKAGES.items() if self.trainer.get(key)])

    def check_packages(self) -> None:
        """Raise RunError if the settings need a missing package, before a library fails minutes later with a traceback."""
        for sentence in self.missing_packages():
            raise RunError(sentence)


def resolve(layers: Iterable[Mapping[str, Any]]) -> Settings:
    """Merge settings from several sources and check every name and type. Later sources override earlier sources key by key.

    A layer that changes the objective or task drops its earlier settings. A reduction that came before the objective holds
    only if it is one of that objective's own. What is wrong is said before torch and TRL are imported.
    """
    merged, inherited = dict[str, Any](), False
    for layer in layers:
        inherited = "loss_type" not in layer and (inherited or not layer.keys().isdisjoint(("objective", "objective_config")))
        for name in ("objective", "task"):
            if name in layer and layer[name] != merged.get(name, layer[name]):
                merged.pop(f"{name}_config", None)
        add_layer(merged, layer, TABLES)
    hints, types = get_type_hints(Settings), trainer_types() or _imported_types()
    del hints["trainer"]
    own, trainer = dict[str, Any](), dict[str, Any]()
    for key, value in merged.items():
        if key in DECIDED:
            raise RunError(f"`{key}` is decided by the run. Use {DECIDED[key]}.")
        if key in _OF_OBJECTIVES:
            raise RunError(f"`{key}` is a setting of TRL's own loss, and here the objective has it. Use {_OF_OBJECTIVES[key]}.")
        if key in FUNCTIONS:
            own[key] = FUNCTIONS[key](value)
        elif key in hints:
            own[key] = coerce(key, value, hints[key])
        elif key == "learning_rate" and value != "auto":  # on a command line a number is a text too
            try:
                trainer[key] = coerce(key, value, float)
            except RunError:
                raise RunError(f"`{key}` is a number, or auto, which finds one; got {value!r}.") from None
        elif key in types:
            trainer[key] = coerce(key, value, types[key])
        else:
            about = (str(merged.get(name, vars(Settings)[name])) for name in ("objective", "task"))
            raise RunError(refuse_unknown(key, [*hints, *types], *about))
    settings = Settings(**own, trainer=trainer)
    if inherited and "loss_type" in trainer:
        from corral.trl.api import REDUCTIONS

        with suppress(ValueError):  # of an objective's own settings, which is raised when it is made
            find_objective(settings.objective)
            reduction = REDUCTIONS.get(trainer["loss_type"])  # None for an unknown name, which CorralConfig refuses
            if reduction is not None and reduction not in make_config(settings.objective, settings.objective_config).reductions:
                del trainer["loss_type"]
    return settings


def _imported_types() -> dict[str, Any]:
    """Import TRL and return the names and types of CorralConfig's settings, if the source code cannot be read.

    Refuses an unsupported TRL.
    """
    from corral.trl.config import CorralConfig

    known, hints = fields(CorralConfig), get_type_hints(CorralConfig)
    return {item.name: hints[item.name] for item in known if item.init}


def _as_environment(given: Any) -> Any:
    if not isinstance(given, str) and not callable(given):
        raise RunError(f"`environment_factory` is module:Class or file.py:Class, or a Python class; got {given!r}.")
    return given


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "reward": as_functions,
    "tools": lambda given: as_functions(
        [] if given in ("", [""]) else given, "`tools` are module:function or file.py:function"
    ),
    "environment_factory": _as_environment,
}
"""Settings that hold user functions or classes: name → function that checks and converts the setting's value."""


def named_code(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the flag and the value of every setting that names user code.

    These are imported, and so executed, when they are used: a run that comes from a stranger may name its own files.
    """
    for name in ("task", "objective", "tool", "tools", "environment_factory", "reward"):
        given = settings.get(name) or ()
        paths = given if isinstance(given, list | tuple) else [given]
        yield from ((f"--{name.replace('_', '-')}", str(path)) for path in paths if ":" in str(path))
    config = settings.get("task_config")
    verifier = config.get("verifier") if isinstance(config, Mapping) else None  # of `jsonl`
    if ":" in str(verifier):
        yield "--set", f"task_config.verifier={verifier}"
