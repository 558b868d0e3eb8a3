"""`corral explain NAME`: an objective's or a correction's docstring, and its settings with their defaults."""

import argparse
import ast
import dataclasses
import inspect
import itertools
import sys
import textwrap
from typing import Any

from corral.cli import refuse
from corral.naming import nearest
from corral.objective import OBJECTIVES
from corral.objective.config import ObjectiveConfig
from corral.objective.correction import CORRECTIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One name."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="an objective or a correction; without it, all are listed")


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Print the explanation."""
    if rest:
        return refuse(f"explain takes one name; got {' '.join(rest)} besides.")
    known: dict[str, tuple[Any, type]] = {**OBJECTIVES, **CORRECTIONS}
    if arguments.name is None:
        sys.stdout.write(_listing())
        return 0
    if arguments.name not in known:
        return refuse(f"there is no objective or correction {arguments.name!r}.{nearest(arguments.name, known)}")
    sys.stdout.write(_explanation(arguments.name, *known[arguments.name]))
    return 0


def _listing() -> str:
    """Every name with the first sentence of its docstring."""
    text = ""
    for title, registry in (("objectives", OBJECTIVES), ("corrections", CORRECTIONS)):
        rows = (f"  {name:<12} {(inspect.getdoc(entry[0]) or '').splitlines()[0]}\n" for name, entry in registry.items())
        text += f"{title}\n{''.join(rows)}"
    return text


def _explanation(name: str, function: Any, config_cls: type) -> str:
    """Docstring without its Args and Returns, then settings, needs and where to read on."""
    parts = [f"{name}\n", _body(inspect.getdoc(function) or "")]
    preset = vars(config_cls)["__doc__"]
    if not preset.startswith(f"{config_cls.__name__}("):  # a dataclass without words of its own has its signature there
        parts.append(f"{inspect.cleandoc(preset)}\n")
    parts.append(_settings(config_cls))
    if issubclass(config_cls, ObjectiveConfig):
        config = config_cls()
        parts.append(f"needs    {', '.join(sorted(config.needs))}\nanchor   {config.anchor}\nreduced  {config.reductions[0]}\n")
        parts.append(f"use it   corral train --objective {name}\n         docs/objectives/{name}.md\n")
    else:
        parts.append(f"use it   CorralConfig(correction={name!r}), where the sampler reports log-probs\n")
    return "\n".join(parts)


def _body(docstring: str) -> str:
    """Sentence, formula and reference; what the arguments are is for programmers."""
    kept, skipping = [], False
    for line in docstring.splitlines():
        if line and not line.startswith(" "):
            skipping = line in ("Args:", "Returns:")
        if not skipping:
            kept.append(line)
    return "\n".join(kept).rstrip() + "\n"


def _settings(config_cls: type) -> str:
    """Each setting with its default and what it means."""
    meanings: dict[str, str] = {}
    for cls in reversed(config_cls.__mro__[:-1]):
        meanings |= field_docs(cls)
    rows = []
    for field in dataclasses.fields(config_cls):
        rows.append(f"  {field.name} = {field.default!r}\n")
        rows += [f"      {line}\n" for line in textwrap.wrap(meanings.get(field.name, ""), 110)]
    return "settings\n" + ("".join(rows) or "  none\n")


def field_docs(cls: type) -> dict[str, str]:
    """Docstrings of a class's fields, from its source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return {}  # no source at hand
    statements = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found = {}
    for field, text in itertools.pairwise(statements):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                found[name] = inspect.cleandoc(meaning)
    return found
