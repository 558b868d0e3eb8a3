"""A user's own class or function, by its dotted path, and libraries that are there only if an extra was installed."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from corral.naming import pip_install


def by_path(path: str, what: str) -> Any:
    """The object at `module:name` or `file.py:name`, from a module that is installed or lies beside the user.

    Args:
        path: as in `my_tasks:Sorting` or `../mine/tasks.py:Sorting`.
        what: the setting it is for, and how it is written: "`reward` is module:function".
    """
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{what}; got {path!r}.")
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules beside the user, as `python -m` finds them
    try:
        return getattr(_from_file(module) if module.endswith(".py") else importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # a user's module can fail in any way when it is imported
        why = f"it raised SystemExit ({error})" if isinstance(error, SystemExit) else error
        raise ValueError(f"{what}, and {path!r} cannot be imported: {why}.") from error


def _from_file(path: str) -> ModuleType:
    """The module in a file, once; its name is the file's, so that it hides no module that is installed."""
    name = str(Path(path).expanduser().resolve())
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, name)
    assert spec is not None  # since the name ends with .py
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def library(name: str, owner: str) -> ModuleType:
    """A library of the extra `task`, or a sentence that says how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{owner} needs {name}. Install it: {pip_install('task')}.") from error
