"""Import of Python objects by path (`module:name` or `file.py:name`), and tools that a model may call."""

import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Protocol, runtime_checkable

from corral.validate import nearest, pip_install

# ------------------------------------------------------------------------------------------------------ objects by path


def by_path(path: str, what: str) -> Any:
    """Import a function or class by `module:name` or `file.py:name`. The module may lie in the current folder.

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
        found = getattr(_from_file(module) if module.endswith(".py") else importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # a user's module can fail in any way when it is imported
        why = f"it raised SystemExit ({error})" if isinstance(error, SystemExit) else error
        raise ValueError(f"{what}, and {path!r} cannot be imported: {why}.") from error
    if not callable(found):
        raise ValueError(f"{what}, and {path!r} is {type(found).__name__}, which cannot be called.")
    return found


def _from_file(path: str) -> ModuleType:
    """Import a Python file once, under its path as module name, so that it hides no installed module."""
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
    """Import a library of the optional extra `task`. Raises ValueError with the command to install the library if missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{owner} needs {name}. Install it: {pip_install('task')}.") from error


# ---------------------------------------------------------------------------------------------------------------- tools

_EXPRESSION = re.compile(r"(?:^|[^0-9])([0-9]{1,9})([+*-])([0-9]{1,9})=$")


@runtime_checkable
class Tool(Protocol):
    """Interface of a tool that writes text into a completion after stop strings. The model never trains on the tool's text."""

    @property
    def stops(self) -> Sequence[str]:
        """Stop strings, each of which ends the model's turn so that the tool can reply."""

    def reply(self, problem: str, text: str) -> str | None:
        """Return the tool's reply to `text`, a completion that ends with a stop string. A reply of None ends the completion."""


class Calculator:
    """Tool that writes the result after `a+b=`, `a-b=` and `a*b=`, and `?` after anything else that ends in `=`."""

    stops: ClassVar[tuple[str, ...]] = ("=",)

    def reply(self, problem: str, text: str) -> str:
        """Compute the result of the calculation at the end of the text, such as `12+7=`. Returns `?` if there is none."""
        found = _EXPRESSION.search(text[-20:])
        if found is None:
            return "?"
        left, sign, right = int(found[1]), found[2], int(found[3])
        return str({"+": left + right, "-": left - right, "*": left * right}[sign])


TOOLS: dict[str, type[Tool]] = {"calculator": Calculator}


def make_tool(name: str) -> Tool:
    """Make a packaged tool by name, or a user's own class by its path `module:Class` or `file.py:Class`."""
    if ":" not in name and name not in TOOLS:
        raise ValueError(f"there is no tool {name!r}.{nearest(name, TOOLS)} Or your own: module:Class.")
    tool = TOOLS[name]() if name in TOOLS else by_path(name, "a tool of your own is module:Class")()
    if not isinstance(tool, Tool):
        raise ValueError(f"{name} is no tool: it needs `stops`, texts that end the model's turn, and `reply(problem, text)`.")
    if not tool.stops or not all(isinstance(stop, str) and stop for stop in tool.stops):
        raise ValueError(f"{name}: `stops` are the texts that end the model's turn, at least one; got {tool.stops!r}.")
    return tool
