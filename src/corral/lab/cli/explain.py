"""Command `corral explain NAME`: describe an objective, correction, recipe, task, algorithm or setting."""

import argparse
import ast
import dataclasses
import importlib
import inspect
import itertools
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corral.lab.cli import refuse
from corral.lab.cli.kind import all_recipes
from corral.lab.jobs.robot.settings import ALGORITHMS
from corral.lab.tasks import TASKS
from corral.objective import OBJECTIVES, objective_function, objective_names
from corral.objective.config import ObjectiveConfig
from corral.objective.correction import CORRECTIONS
from corral.validate import pip_install, suggest

_LEARNERS = {"tce": ("robot.tce", "TCE", "TCEConfig"), "bbrl": ("robot.bbrl", "BBRL", "BBRLConfig")}
"""Module, class and settings of robot algorithms; all others are step-based baselines."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name to explain."""
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="an objective, recipe, task, algorithm or setting; `settings` for all of them"
    )


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Print the explanation of everything with this name."""
    if rest:
        return refuse(f"explain takes one name; got {' '.join(rest)} besides.")
    if arguments.name is None:
        sys.stdout.write(_listing())
        return 0
    name: str = arguments.name
    found = list(_explanations(name))
    if not found:
        from corral.lab.jobs.llm.settings import trainer_names

        known = {*OBJECTIVES, *CORRECTIONS, *all_recipes(), *TASKS, *ALGORITHMS, "settings", *_own_settings()}
        guess = suggest(name, known | set(trainer_names() or ()))
        listed = f"There are: {', '.join(sorted(known))}, and settings of the trainer."
        return refuse(f"there is no objective, recipe, task, algorithm or setting {name!r}.{guess} {listed}")
    sys.stdout.write("\n".join(found))
    return 0


def _explanations(name: str) -> Iterator[str]:
    """Explanations of a name, one of each kind: `countdown` is a recipe and a task."""
    registered = {**OBJECTIVES, **CORRECTIONS}
    if name in registered:
        function = objective_function(name) if name in OBJECTIVES else CORRECTIONS[name][0]
        yield _explanation(name, function, registered[name][1])
    if name in all_recipes():
        yield _recipe(name, all_recipes()[name])
    if name in TASKS:
        yield _task(name)
    if name in ALGORITHMS:
        yield _algorithm(name)
    if name == "settings":
        yield _all_settings()
    elif name in _own_settings():
        yield _setting(name, name, _own_settings()[name])
    elif not (name in registered or name in all_recipes() or name in TASKS or name in ALGORITHMS):
        yield from _trainer_setting(name)


def _recipe(name: str, path: Path) -> str:
    """Text of a recipe's file, which its comments explain."""
    return f"{name}: a recipe\n\n{path.read_text().rstrip()}\n\nuse it   corral train --recipe {name}\n"


def _task(name: str) -> str:
    """Docstring of a task, and its settings."""
    return (
        f"{name}: a task\n\n{_body(inspect.getdoc(TASKS[name]) or '')}\n{_settings(TASKS[name])}\n"
        f"use it   corral train --task {name} --set task_config.KEY=VALUE\n         docs/tasks.md\n"
    )


def _algorithm(name: str) -> str:
    """Docstring of a robot algorithm, and its settings."""
    module, learner, config = _LEARNERS.get(name, ("lab.baselines.stable", "Baseline", "BaselineConfig"))
    try:
        there = vars(importlib.import_module(f"corral.{module}"))
    except ImportError as error:
        return f"{name}: a robot's algorithm; its settings need more: {pip_install('robot')} ({error.name} is missing).\n"
    return (
        f"{name}: a robot's algorithm\n\n{_body(inspect.getdoc(there[learner]) or '')}\n{_settings(there[config])}\n"
        f"use it   corral train --recipe via_point --algorithm {name} --set learner.KEY=VALUE\n         docs/robots.md\n"
    )


def _own_settings() -> dict[str, str]:
    """Own settings of a language-model run with their meanings; TRL's are not included."""
    from corral.lab.jobs.llm.settings import Settings

    return {name: text for name, text in field_docs(Settings).items() if name != "trainer"}


def _setting(name: str, title: str, words: str) -> str:
    """Explanation of one setting, with its flag."""
    return f"{title}\n\n{textwrap.fill(words, 110)}\n\nuse it   corral train --{name.replace('_', '-')} VALUE\n"


def _all_settings() -> str:
    """Names of every setting of a run, including TRL's."""
    from corral.lab.jobs.llm.settings import DECIDED, Settings, trainer_names
    from corral.lab.run.text import columns

    own = _settings(Settings, _own_settings()).replace(
        "settings\n", "settings of a run: --name VALUE, or name = VALUE in a file\n"
    )
    others = sorted(set(trainer_names() or ()) - {*_own_settings(), *DECIDED})
    return (
        f"settings of a run: --name VALUE, or name = VALUE in a file\n{own}\n"
        f"settings of the trainer, CorralConfig and TRL's GRPOConfig (`corral explain NAME` for one)\n"
        f"{columns(others or ['they are in TRL, which is not installed in a tested release'], 110)}\n"
    )


def _trainer_setting(name: str) -> Iterator[str]:
    """Explanation of a CorralConfig setting, in the words of TRL or transformers."""
    from corral.lab.jobs.llm.settings import trainer_names

    if name not in (trainer_names() or ()):
        return
    from corral.trl.config import CorralConfig  # imports TRL

    item = next(field for field in dataclasses.fields(CorralConfig) if field.name == name)
    words = " ".join(str(item.metadata.get("help", "")).split()) or "TRL says nothing about it."
    yield _setting(name, f"{name} = {_default(item)!r}", words)


def _listing() -> str:
    """Names of one kind, each with the first sentence of its docstring."""
    registries: dict[str, dict[str, str | None]] = {
        "objectives": {name: inspect.getdoc(objective_function(name)) for name in objective_names()},
        "corrections": {name: inspect.getdoc(function) for name, (function, _) in CORRECTIONS.items()},
        "tasks": {name: inspect.getdoc(cls) for name, cls in TASKS.items()},
        "recipes": {name: path.read_text().lstrip("# ") for name, path in all_recipes().items()},
    }
    text = ""
    for title, registry in registries.items():
        text += f"{title}\n"
        text += "".join(f"  {name:<22} {next(iter((what or '').splitlines()), '')}\n" for name, what in registry.items())
    text += f"algorithms of robots\n  {', '.join(ALGORITHMS)}\n"
    return text + "and every setting by its name, or all of them: corral explain settings\n"


def _explanation(name: str, function: Any, config_cls: type) -> str:
    """Docstring without Args and Returns, then settings, required fields and further reading."""
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
    """Sentence, formula and reference of a docstring; the arguments are for programmers."""
    kept, skipping = [], False
    for line in docstring.splitlines():
        if line and not line.startswith(" "):
            skipping = line in ("Args:", "Returns:")
        if not skipping:
            kept.append(line)
    return "\n".join(kept).rstrip() + "\n"


def _settings(config_cls: type, only: dict[str, str] | None = None) -> str:
    """Each setting with its default and its meaning."""
    meanings: dict[str, str] = {}
    for cls in reversed(config_cls.__mro__[:-1]):
        meanings |= field_docs(cls)
    rows = []
    for field in dataclasses.fields(config_cls) if dataclasses.is_dataclass(config_cls) else ():
        if only is None or field.name in only:
            rows.append(f"  {field.name} = {_default(field)!r}\n")
            rows += [f"      {line}\n" for line in textwrap.wrap(meanings.get(field.name, ""), 110)]
    return "settings\n" + ("".join(rows) or "  none\n")


def _default(field: dataclasses.Field[Any]) -> Any:
    """Default of a setting, from its factory if it has one."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def field_docs(cls: type) -> dict[str, str]:
    """Docstrings of a class's fields, read from its source."""
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
