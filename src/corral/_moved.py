"""Old module paths and their present ones, so that imports of released docs, settings and checkpoints keep working.

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
"""Old path → new path below `corral`; the modules inside a moved package move with it."""


def new_path(name: str) -> str | None:
    """Return the present path of an old module path; None for a name without an entry."""
    old = name.removeprefix("corral.")
    for known in sorted(MOVED, key=len, reverse=True):
        if old == known or old.startswith(f"{known}."):
            return f"corral.{MOVED[known]}{old.removeprefix(known)}"
    return None


class MovedFinder(MetaPathFinder, Loader):
    """Import hook that makes an old path another name of the module at its new path."""

    def find_spec(
        self, fullname: str, path: Iterable[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a spec for an old path; None for any other, including the real modules `corral.llm` and `corral.task`."""
        moved = fullname.startswith("corral.") and fullname not in ("corral.llm", "corral.task") and new_path(fullname)
        return ModuleSpec(fullname, self) if moved else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module at the new path; a missing one is a ModuleNotFoundError with that path."""
        path = new_path(spec.name)
        assert path is not None
        module = import_module(path)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import system has replaced."""
        module.__spec__ = self._own


def install() -> None:
    """Install the hook once, before all others: an updated checkout may have empty folders of moved packages."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedFinder())
