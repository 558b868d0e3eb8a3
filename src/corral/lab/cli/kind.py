"""The kind of a run, language model or robot, and the packages that it needs."""

import argparse
from pathlib import Path
from typing import Literal

from corral.lab.cli import check_installed
from corral.lab.run.files import read_json
from corral.lab.run.settings import read_file, recipes

Kind = Literal["llm", "robot"]

_NEEDED: dict[Kind, tuple[str, ...]] = {
    "llm": ("transformers", "trl", "accelerate", "rich"),
    "robot": ("gymnasium", "mujoco", "rich", "pyarrow"),
}
"""Packages that training of each kind requires."""


def all_recipes() -> dict[str, Path]:
    """Find every built-in recipe, name → path, in the folders recipes/<kind>."""
    folder = Path(__file__).parents[1] / "recipes"
    return {name: path for kind in _NEEDED for name, path in recipes(folder / kind).items()}


def kind_of(arguments: argparse.Namespace) -> Kind:
    """The kind of run that flags ask for: by the run's settings, the recipe's folder, or an `environment` in the file."""
    if arguments.resume is not None:
        return kind_of_run(arguments.resume)
    if arguments.recipe is not None:
        found = all_recipes().get(arguments.recipe)
        return "robot" if found is not None and found.parent.name == "robot" else "llm"
    if arguments.config is not None:
        return "robot" if "environment" in read_file(arguments.config) else "llm"
    return "llm"


def kind_of_run(path: Path) -> Kind:
    """The kind of the run in this folder; "llm" if it is no run."""
    try:
        content = read_json(path / "config.json")
        return "robot" if "environment" in content["settings"] else "llm"
    except (OSError, ValueError, KeyError, TypeError):
        return "llm"


def check_kind(kind: Kind, what: str) -> None:
    """Raise a RunError if a package is missing for `what`, such as "training"."""
    check_installed(f"{what} needs", _NEEDED[kind], kind)
