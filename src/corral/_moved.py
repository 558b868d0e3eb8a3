"""Old module paths and where they are now: imports of released docs, of users' settings and of saved checkpoints go on working.

This table is the one place in the library that names the lab, and nothing in it is imported before somebody asks for it.
"""

import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "audit": "lab.audit",
    "cli": "lab.cli",
    "compare": "lab.compare",
    "compare.command": "lab.compare.plan",
    "engine": "engines",
    "kernels": "head",
    "llm.eval_view": "lab.jobs.llm.results",
    "llm.evaluate": "lab.jobs.llm.evaluate",
    "llm.eval_settings": "lab.jobs.llm.eval_settings",
    "llm.guard": "lab.jobs.llm.trainer",
    "llm.models": "lab.models.load",
    "llm.results": "lab.jobs.llm.results",
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
"""Old path → new path below `corral`; what lies inside a moved package moves with it."""


def new_path(name: str) -> str | None:
    """The present path of a module by its old one; None if the name never was a path that is kept."""
    old = name.removeprefix("corral.")
    for known in sorted(MOVED, key=len, reverse=True):
        if old == known or old.startswith(f"{known}."):
            return f"corral.{MOVED[known]}{old.removeprefix(known)}"
    return None


class MovedFinder(MetaPathFinder, Loader):
    """Import hook: an old path is another name of the module at its new path."""

    def find_spec(
        self, fullname: str, path: Iterable[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for an old path; None for any other, and for `corral.llm` and `corral.task`, which are modules themselves."""
        moved = fullname.startswith("corral.") and fullname not in ("corral.llm", "corral.task") and new_path(fullname)
        return ModuleSpec(fullname, self) if moved else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module at the new path; a ModuleNotFoundError that names it where there is none."""
        path = new_path(spec.name)
        assert path is not None
        module = import_module(path)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import system has replaced: it was executed at its new path."""
        module.__spec__ = self._own


def install() -> None:
    """Add the hook, once, before all others: an updated checkout may have empty folders where packages were."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedFinder())
