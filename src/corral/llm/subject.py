"""What is evaluated: a model by name, or a checkpoint of a run with the task and instruction of that run."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import corral
from corral.run.choose import choose_checkpoint
from corral.run.files import RunError
from corral.run.folder import RunFolder

BUILT_IN = ("tiny", "smollm2", "gemma", "smoke")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Weights, and the defaults of whoever trained them."""

    name: str
    """As the user said it."""
    model: str
    """As `load_model` takes it."""
    identity: dict[str, Any]
    """What tells these weights from others under the same name."""
    run: Path | None = None
    step: int | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    """Task, its settings, instruction, tools and length of the run."""
    half: bool = True
    """Whether a GPU computes it in bfloat16: of a run, what its training did."""
    complaints: tuple[str, ...] = ()
    """What is wrong with newer checkpoints, if an older one had to be taken."""


def find_subject(name: str, checkpoint: str | None) -> Subject:
    """A run's checkpoint (`latest` unless said), or a model: tiny, smollm2, a folder, or a name on the hub."""
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
    """Whether a folder is a run of a language model."""
    return _run_config(path) is not None


def _run_config(path: Path) -> dict[str, Any] | None:
    """The content of a run's config.json; None if this is a model's, or none at all."""
    try:
        content = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and {"settings", "objective"} <= content.keys() else None


def _of_run(name: str, path: Path, content: dict[str, Any], which: str) -> Subject:
    chosen, complaints = choose_checkpoint(RunFolder.open(path, write=False), which)
    manifest = json.loads((chosen.path / "manifest.json").read_text())["files"]
    settings = content["settings"]
    return Subject(
        name=name,
        model=str(chosen.path),
        identity={file: entry["sha256"] for file, entry in manifest.items() if Path(file).suffix == ".safetensors"},
        run=path,
        step=chosen.step,
        defaults={
            "task": settings["task"],
            "task_config": settings.get("task_config") or {},
            "instruction": settings.get("instruction", "{problem}"),
            "max_tokens": content["trainer"]["max_completion_length"],
            "max_turns": content["trainer"].get("max_tool_calling_iterations"),
            "chat_template_kwargs": content["trainer"].get("chat_template_kwargs") or {},
            **{name: settings[name] for name in ("tool", "tools", "environment_factory") if settings.get(name)},
        },
        half=content["trainer"].get("bf16", True),
        complaints=tuple(complaints),
    )
