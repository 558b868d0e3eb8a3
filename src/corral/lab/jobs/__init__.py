"""The two kinds of training run, llm and robot: each has the modules `settings`, `smoke`, `prepare` and `train`."""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from corral.lab.run.settings import nested, read_file, read_recipe

Kind = Literal["llm", "robot"]


def job_module(kind: Kind, name: str) -> Any:
    """Import the module `name` for this kind of run."""
    return import_module(f"{__name__}.{kind}.{name}")


def resolve(kind: Kind, recipe: str | None, config: Path | None, given: Iterable[tuple[str, Any]], *, smoke: bool) -> Any:
    """Merge a recipe, a settings file, --smoke and flags into a run's checked settings; later sources win."""
    settings = job_module(kind, "settings")
    layers = [read_recipe(recipe)] if recipe else []
    layers += [read_file(config)] if config is not None else []
    flags = nested(given, settings.TABLES)
    layers += job_module(kind, "smoke").smoke_layers([*layers, flags]) if smoke else []
    resolved = settings.resolve([*layers, flags])
    if kind == "robot":
        settings.check_flags(resolved, flags)
    return resolved
