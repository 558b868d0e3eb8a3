"""The subject of an evaluation: a model by name, or a checkpoint of a run with that run's task and instruction."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import corral
from corral.lab.run.files import read_json
from corral.lab.run.folder import RunFolder, choose_checkpoint
from corral.validate import RunError

BUILT_IN = ("tiny", "smollm2", "gemma", "smoke")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to evaluate, and the default settings of its training."""

    name: str
    """Name as the user gave it."""
    model: str
    """Name or path for `load_model`."""
    identity: dict[str, Any]
    """Fingerprint that distinguishes these weights from others of equal name."""
    run: Path | None = None
    step: int | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    """Task, its settings, instruction, tools and completion length of the run."""
    half: bool = True
    """True if a GPU computes the model in bfloat16; a run's checkpoint uses the type of its training."""
    complaints: tuple[str, ...] = ()
    """Sentences on damaged newer checkpoints, if an older checkpoint had to be used."""


def find_subject(name: str, checkpoint: str | None) -> Subject:
    """Find a run's checkpoint (`latest` by default), or a model: tiny, smollm2, a folder, or a name on the hub."""
    path = Path(name)
    if name not in BUILT_IN and path.is_dir() and (content := _run_config(path)) is not None:
        return _of_run(name, path, content, checkpoint or "latest")
    if checkpoint is not None:
        raise RunError(f"--checkpoint chooses among those of a run, and {name} is no run.")
    if name in BUILT_IN:
        return Subject(name=name, model=name, identity={"corral": corral.__version__})
    if path.is_dir():
        if not any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
            raise RunError(f"{name} is neither a run nor a model: it has no config.json, nor an adapter_config.json.")
        found = sorted(file for pattern in _WEIGHTS for file in path.glob(pattern))
        files = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in found}
        return Subject(name=name, model=name, identity={"files": files})
    if name.startswith((".", "/", "runs/")) or name.count("/") > 1 or path.exists():
        raise RunError(f"there is no run or model folder {name}.")
    return Subject(name=name, model=name, identity={"hub": name})


def is_run(path: Path) -> bool:
    """Return True if a folder is a run of a language model."""
    return _run_config(path) is not None


def _run_config(path: Path) -> dict[str, Any] | None:
    """The content of a run's config.json; None if the folder holds a model or no config.json."""
    try:
        content = read_json(path / "config.json")
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and {"settings", "objective"} <= content.keys() else None


def named_code(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Flags and values of settings that import user code, or run model-written code outside the sandbox.

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


def _of_run(name: str, path: Path, content: dict[str, Any], which: str) -> Subject:
    folder = RunFolder.open(path, write=False)
    chosen, complaints = choose_checkpoint(folder, which)
    settings, trainer = content["settings"], content.get("trainer")
    try:
        tools = _typed(settings, "tools", list | str, [])  # one alone may be a text
        tools = [tools] if tools and isinstance(tools, str) else list(tools)
        if not all(isinstance(one, str) for one in tools):
            raise TypeError("`tools` should be import paths alone.")
        config = _typed(settings, "task_config", dict, {})
        return Subject(
            name=name,
            model=str(chosen.path),
            identity={file: sha for file, (_, sha) in chosen.files().items() if Path(file).suffix == ".safetensors"},
            run=path,
            step=chosen.step,
            defaults={
                "task": _typed(settings, "task", str),
                # What a model writes is run unconfined only where the command line says so.
                "task_config": {key: value for key, value in config.items() if key != "unsafe_code_execution"},
                "instruction": _typed(settings, "instruction", str, "{problem}"),
                "max_tokens": _typed(trainer, "max_completion_length", int),
                "max_turns": _typed(trainer, "max_tool_calling_iterations", int, None),
                "chat_template_kwargs": _typed(trainer, "chat_template_kwargs", dict, {}),
                "tool": _typed(settings, "tool", str, ""),
                "tools": tools,
                "environment_factory": _typed(settings, "environment_factory", str, ""),
            },
            half=_typed(trainer, "bf16", bool, True),
            complaints=tuple(complaints),
        )
    except TypeError as error:
        raise RunError(f"{folder.config} is not what a run writes: {error}") from error


_NEEDED = object()


def _typed(table: Any, key: str, kind: Any, default: Any = _NEEDED) -> Any:
    """A value of a run's config.json; a TypeError if it is missing or of another type."""
    value = table.get(key) if isinstance(table, Mapping) else None
    if value is None and default is not _NEEDED:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise TypeError(f"`{key}` is {type(value).__name__} and should be {getattr(kind, '__name__', kind)}.")
    return value


def newest_checkpoint(name: str) -> str | None:
    """The newest intact checkpoint of a run's folder; None if the folder is no run."""
    if name in BUILT_IN or not Path(name).is_dir():
        return None
    return find_subject(name, None).model if is_run(Path(name)) else None
