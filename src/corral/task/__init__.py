"""Tasks and the sandbox for code written by a model, under their public names."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corral.lab.sandbox import SandboxResult, run_python
    from corral.lab.tasks import Task, find_task, make_task, verify_all

__all__ = ["SandboxResult", "Task", "find_task", "make_task", "run_python", "verify_all"]


def __getattr__(name: str) -> Any:
    """Import the lab's tasks when one of their names is first used."""
    tasks = vars(import_module("corral.lab.tasks"))
    if name not in tasks["__all__"]:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return tasks[name]
