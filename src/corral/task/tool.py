"""Tools and environments that answer a model in the middle of its completion: a calculator, a guessing game, one's own."""

import re
from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

from corral.naming import nearest
from corral.task.imports import by_path

_EXPRESSION = re.compile(r"(?:^|[^0-9])([0-9]{1,9})([+*-])([0-9]{1,9})=$")


@runtime_checkable
class Tool(Protocol):
    """Somebody who writes into a completion whenever the model has ended its turn. What it writes is never trained on."""

    @property
    def stops(self) -> Sequence[str]:
        """Texts that end the model's turn."""

    def reply(self, problem: str, text: str) -> str | None:
        """What comes next in the completion `text` of a problem, which ends with one of `stops`; None ends the completion."""


class Calculator:
    """Writes the result after `a+b=`, `a-b=` and `a*b=`, and `?` after anything else that ends in `=`."""

    stops: ClassVar[tuple[str, ...]] = ("=",)

    def reply(self, problem: str, text: str) -> str:
        """The result of the last two numbers."""
        found = _EXPRESSION.search(text[-20:])
        if found is None:
            return "?"
        left, sign, right = int(found[1]), found[2], int(found[3])
        return str({"+": left + right, "-": left - right, "*": left * right}[sign])


TOOLS: dict[str, type[Tool]] = {"calculator": Calculator}


def make_tool(name: str) -> Tool:
    """A packaged tool by name, or one's own class by its path `module:Class` or `file.py:Class`."""
    if ":" not in name and name not in TOOLS:
        raise ValueError(f"there is no tool {name!r}.{nearest(name, TOOLS)} Or your own: module:Class.")
    found = TOOLS[name] if name in TOOLS else by_path(name, "a tool of your own is module:Class")
    if not callable(found):
        raise ValueError(f"a tool of your own is module:Class, and {name!r} is {type(found).__name__}, not a class.")
    tool = found()
    if not isinstance(tool, Tool):
        raise ValueError(f"{name} is no tool: it needs `stops`, texts that end the model's turn, and `reply(problem, text)`.")
    if not tool.stops or not all(isinstance(stop, str) and stop for stop in tool.stops):
        raise ValueError(f"{name}: `stops` are the texts that end the model's turn, at least one; got {tool.stops!r}.")
    return tool
