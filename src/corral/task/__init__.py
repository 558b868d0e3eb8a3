"""Tasks and the sandbox for code written by a model, under their public names."""

# ruff: noqa: F403, F405 - most names are those of corral.lab.tasks, imported at their first use

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corral.lab.sandbox import SandboxResult, run_python
    from corral.lab.tasks import *
    from corral.lab.tasks.grader import grader_counts

__all__ = [
    "TASKS", "SandboxResult", "Task", "columns_of", "find_task", "grader_counts", "make_task", "messages_of", "names",
    "run_python", "text_of", "verify_all",
]  # fmt: skip

_ELSEWHERE = {"SandboxResult": "sandbox", "run_python": "sandbox", "grader_counts": "tasks.grader"}


def __getattr__(name: str) -> Any:
    """Import the lab's tasks when one of their names is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(f"corral.lab.{_ELSEWHERE.get(name, 'tasks')}"))[name]
