"""Names of settings and objectives read from source files, so that a refusal waits for neither torch nor TRL."""

import ast
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from corral.llm import TRL_RANGE
from corral.naming import suggest
from corral.run.settings import coerce
from corral.task import TASKS
from corral.validate import RunError

_HERE = Path(__file__).parent

_CONFIGS = (
    ("trl", "trainer/grpo_config.py", "GRPOConfig"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("transformers", "training_args.py", "TrainingArguments"),
)
"""What CorralConfig inherits its settings from."""

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
"""What other libraries call a setting, and the flag that it has here."""


def refuse_unknown(key: str, known: list[str], objective: str, task: str) -> str:
    """The sentence about a setting that does not exist: where it belongs, or the nearest that there is."""
    where = "`corral explain settings` lists them all."
    if key in _ALSO_CALLED:
        return f"there is no setting `{key}`. Use {_ALSO_CALLED[key]}. {where}"
    owners = [name for name in (objective, *objective_fields()) if key in objective_fields().get(name, ())]
    if owners:
        return f"there is no setting `{key}`; {owners[0]} has one: --set objective_config.{key}=…. {where}"
    task_cls = TASKS.get(task)
    if is_dataclass(task_cls) and key in (item.name for item in fields(task_cls)):
        return f"there is no setting `{key}`; {task} has one: --set task_config.{key}=…. {where}"
    return f"there is no setting `{key}`.{suggest(key, known)} {where}"


def trainer_names() -> list[str] | None:
    """Settings of CorralConfig; None where TRL is not there, older than the tested ones, or keeps its source elsewhere."""
    types = _trainer_types()
    return None if types is None else list(types)


def check_numbers(given: Mapping[str, Any]) -> None:
    """Refuse settings of CorralConfig that should be numbers or switches and are none, as far as their source tells."""
    types = _trainer_types() or {}
    for key, value in given.items():
        hint = _PLAIN.get(types.get(key, ""))
        if key == "learning_rate":
            read_rate(value)
        elif hint is not None:
            coerce(key, value, hint)


def read_rate(value: Any) -> float | str:
    """A learning rate: a number, or `auto`; a text such as 1e-4 is read as its number."""
    if value == "auto":
        return "auto"
    try:
        rate: float = coerce("learning_rate", value, float)
    except RunError:
        raise RunError(f"`learning_rate` is a number, or auto, which finds one; got {value!r}.") from None
    return rate


_PLAIN: dict[str, Any] = {
    f"{hint.__name__}{none}": hint | None if none else hint for hint in (int, float, bool) for none in ("", " | None")
}
"""Types that can be told from their text."""


@cache
def _trainer_types() -> dict[str, str] | None:
    """The settings, each with its type as the source has it; CorralConfig's own come first, and win."""
    try:
        if _numbers(version("trl")) < _numbers(TRL_RANGE[0]):
            return None
    except PackageNotFoundError:
        return None
    types = class_fields(_HERE / "config.py").get("CorralConfig", {})
    for package, path, name in _CONFIGS:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            return None
        try:
            inherited = class_fields(Path(spec.origin).parent / path)[name]
        except (OSError, SyntaxError, KeyError):
            return None
        types |= {key: hint for key, hint in inherited.items() if key not in types}
    return types


@cache
def objective_fields() -> dict[str, tuple[str, ...]]:
    """Each objective's own settings; of a preset, those of the file that it is in."""
    folder = _HERE.parent / "objective"
    registry = next(
        node.value
        for node in ast.parse((folder / "__init__.py").read_text()).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "OBJECTIVES"
    )
    assert isinstance(registry, ast.Dict)
    found: dict[str, tuple[str, ...]] = {}
    for key, value in zip(registry.keys, registry.values, strict=True):
        assert isinstance(key, ast.Constant)
        assert isinstance(value, ast.Tuple)
        function = value.elts[0]
        assert isinstance(function, ast.Name)
        classes = class_fields(folder / f"{function.id}.py")
        found[str(key.value)] = tuple(dict.fromkeys(name for names in classes.values() for name in names))
    return found


def class_fields(path: Path) -> dict[str, dict[str, str]]:
    """The fields, of each dataclass in a file, that its constructor takes, with their types as written."""
    return {
        node.name: {
            item.target.id: ast.unparse(item.annotation)
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and _is_given(item)
        }
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }


def _is_given(field: ast.AnnAssign) -> bool:
    """Whether a caller may give this field: no ClassVar, no field(init=False)."""
    if "ClassVar" in ast.dump(field.annotation):
        return False
    keywords = field.value.keywords if isinstance(field.value, ast.Call) else []
    return not any(item.arg == "init" and isinstance(item.value, ast.Constant) and not item.value.value for item in keywords)


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".")[:2])
