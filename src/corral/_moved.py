"""Map old module paths to new ones, so that imports in released docs, settings and checkpoints keep working.

This table is the one place in the library that names the lab, and nothing in it is imported before somebody asks for it.
"""

import sys
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

MOVED = {
    "audit": "lab.audit",
    "cli": "lab.cli",
    "compare": "lab.compare",
    "compare.command": "lab.compare.plan",
    "engine": "engines",
    "kernels": "head",
    "llm.eval_view": "lab.jobs.llm.eval_results",
    "llm.evaluate": "lab.jobs.llm.evaluate",
    "llm.eval_settings": "lab.jobs.llm.eval_settings",
    "llm.guard": "lab.jobs.llm.trainer",
    "llm.models": "lab.models.load",
    "llm.results": "lab.jobs.llm.eval_results",
    "llm.rewards": "lab.jobs.llm.rewards",
    "llm.settings": "lab.jobs.llm.settings",
    "llm.smoke": "lab.jobs.llm.smoke",
    "llm.tiny": "lab.models.tiny",
    "llm.train": "lab.jobs.llm.train",
    "llm.trl_api": "trl.api",
    "llm": "trl",
    "naming": "validate",
    "report.comparison": "lab.report.read",
    "report": "lab.report",
    "robot.baseline": "lab.baselines.stable",
    "robot.env": "lab.environments",
    "robot.evaluate": "lab.jobs.robot.evaluate",
    "robot.export": "lab.jobs.robot.export",
    "robot.exported": "lab.jobs.robot.exported",
    "robot.picture": "lab.jobs.robot.picture",
    "robot.settings": "lab.jobs.robot.settings",
    "robot.train": "lab.jobs.robot.train",
    "run": "lab.run",
    "run.watch": "lab.run.guard",
    "task": "lab.tasks",
    "task.answer": "lab.tasks.math",
    "task.sandbox": "lab.sandbox",
    "task.tool": "lab.tasks.imports",
    "types": "tensors",
}
"""Map from the old path of a module to its new path, both below `corral`. Modules inside a moved package move with it."""


ENTRY = f"{__file__}:moved"
"""Marker in the `__path__` of packages whose modules have moved. The import system passes it to `MovedFinder`."""

HOLDERS = ("corral.llm", "corral.robot", "corral.task")
"""Packages that have kept their own path although some of their modules have moved."""


class MovedFinder(Loader):
    """Import finder for old module paths: importing an old path loads the module at its new path."""

    def __init__(self, entry: str) -> None:
        """Accept only the path entry `ENTRY`. For other entries, an ImportError makes the import system try another finder."""
        if entry != ENTRY:
            raise ImportError

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module spec for an old path, or for a package whose modules have moved. Returns None for any other name."""
        if fullname in HOLDERS:
            spec = PathFinder.find_spec(fullname, [entry for entry in sys.modules["corral"].__path__ if entry != ENTRY])
            assert spec is not None
            assert spec.submodule_search_locations is not None  # since they are packages
            spec.submodule_search_locations.insert(0, ENTRY)
            return spec
        old = fullname.removeprefix("corral.")
        for known in sorted(MOVED, key=len, reverse=True):
            if old == known or old.startswith(f"{known}."):
                return ModuleSpec(fullname, self, origin=f"corral.{MOVED[known]}{old.removeprefix(known)}")
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module at its new path. If it is missing, a ModuleNotFoundError names the new path."""
        assert spec.origin is not None
        module = import_module(spec.origin)
        self._own = module.__spec__
        if ENTRY not in (inside := vars(module).get("__path__", [ENTRY])):
            inside.insert(0, ENTRY)  # else its modules would be imported twice, under both names
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import system replaced during an import of the old path."""
        module.__spec__ = self._own


def install(path: list[str]) -> None:
    """Put `ENTRY` first in the `__path__` of corral, so that old paths win over empty folders left by an update.

    A hook for all imports would do the same, and be asked for every import of every library.
    """
    if ENTRY not in path:
        sys.path_hooks.append(MovedFinder)
        path.insert(0, ENTRY)
