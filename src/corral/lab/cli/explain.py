"""Command `corral explain NAME`: describe an objective, correction, recipe, task, algorithm or setting."""

import argparse
import ast
import dataclasses
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Container, Iterator, Sequence
from typing import Any, get_args

from corral.lab.cli import refuse
from corral.lab.jobs.robot.settings import ALGORITHMS, config_class, learner_class
from corral.lab.run.settings import recipes
from corral.lab.run.text import columns
from corral.lab.tasks import TASKS
from corral.objective import OBJECTIVES, objective_function, objective_names
from corral.objective.config import ObjectiveConfig
from corral.objective.correction import CORRECTIONS
from corral.validate import literal_words, pip_install, suggest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument NAME of `corral explain` to the parser."""
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="an objective, recipe, task, algorithm or setting; `settings` for all of them"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print every explanation of a name. `countdown`, for example, is both a recipe and a task."""
    if arguments.name is None:
        sys.stdout.write(_listing())
        return 0
    name: str = arguments.name
    found = list(_explanations(name)) or list(_trainer_setting(name))
    if not found:
        from corral.lab.jobs.llm.settings import trainer_types

        known = {*OBJECTIVES, *CORRECTIONS, *recipes(), *TASKS, *ALGORITHMS, "settings", *_own_settings()}
        guess = suggest(name, known | set(trainer_types()))
        listed = f"There are: {', '.join(sorted(known))}, and settings of the trainer."
        return refuse(f"there is no objective, recipe, task, algorithm or setting {name!r}.{guess} {listed}")
    sys.stdout.write("\n".join("\n".join(parts) for parts in found))
    return 0


def _explanations(name: str) -> Iterator[Sequence[str]]:
    """Yield the explanations of a name, each as parts to print with empty lines between."""
    if name in OBJECTIVES or name in CORRECTIONS:
        function, config_cls = (objective_function(name), OBJECTIVES[name][1]) if name in OBJECTIVES else CORRECTIONS[name]
        words = _own_doc(config_cls)
        parts = [f"{name}\n", _body(function), *([f"{words}\n"] if words else []), _settings(config_cls)]
        if issubclass(config_cls, ObjectiveConfig):
            own = config_cls()
            needs = f"needs    {', '.join(sorted(own.needs))}\nanchor   {own.anchor}\nreduced  {own.reductions[0]}\n"
            yield [*parts, needs, f"use it   corral train --objective {name}\n         docs/objectives/{name}.md\n"]
        else:
            yield [*parts, f"use it   CorralConfig(correction={name!r}), where the sampler reports log-probs\n"]
    if name in recipes():  # its comments explain it
        yield f"{name}: a recipe\n", f"{recipes()[name].read_text().rstrip()}\n", f"use it   corral train --recipe {name}\n"
    if name in TASKS:
        use = f"use it   corral train --task {name} --set task_config.KEY=VALUE\n         docs/tasks.md\n"
        yield f"{name}: a task\n", _body(TASKS[name]), _settings(TASKS[name]), use
    if name in ALGORITHMS:
        try:
            learner, config = learner_class(name), config_class(name)
        except ImportError as error:
            yield (f"{name}: a robot's algorithm; its settings need more: {pip_install('robot')} ({error.name} is missing).\n",)
        else:
            use = f"corral train --recipe via_point --algorithm {name} --set learner.KEY=VALUE"
            use = f"use it   {use}\n         docs/robots.md\n"
            yield f"{name}: a robot's algorithm\n", _body(learner), _settings(config), use
    if name == "settings":
        from corral.lab.jobs.llm.settings import DECIDED, Settings, trainer_types

        others = sorted(set(trainer_types()) - {*_own_settings(), *DECIDED})
        yield (
            _settings(Settings, _own_settings(), title="settings of a run: --name VALUE, or name = VALUE in a file"),
            f"settings of the trainer, CorralConfig and TRL's GRPOConfig (`corral explain NAME` for one)\n"
            f"{columns(others or ['they are in TRL, which is not installed in a tested release'], 110)}\n",
        )
    elif name in _own_settings():
        yield _setting(name, name, _own_settings()[name])


def _own_doc(config_cls: type) -> str:
    """Return the docstring of a settings class, or "" if it has only the signature that Python fills in for dataclasses."""
    doc = vars(config_cls)["__doc__"]
    return "" if doc.startswith(f"{config_cls.__name__}(") else inspect.cleandoc(doc)


def _objective_line(name: str) -> str:
    """Return an objective's description for the list of names.
    Objectives that share a function get their settings class's text."""
    entry, config_cls = OBJECTIVES[name]
    shared = sum(other == entry for other, _ in OBJECTIVES.values()) > 1
    return (_own_doc(config_cls) if shared else "") or inspect.getdoc(objective_function(name)) or ""


def _own_settings() -> dict[str, str]:
    """Return the descriptions of corral's settings for a language-model run, keyed by name. TRL's settings are not included."""
    from corral.lab.jobs.llm.settings import Settings

    return {name: text for name, text in field_docs(Settings).items() if name != "trainer"}


def _setting(name: str, title: str, words: str) -> Sequence[str]:
    """Return the texts that `corral explain` prints for a setting of a run: title, meaning, and command-line flag."""
    return f"{title}\n", f"{textwrap.fill(words, 110)}\n", f"use it   corral train --{name.replace('_', '-')} VALUE\n"


def _trainer_setting(name: str) -> Iterator[Sequence[str]]:
    """Explain a setting of CorralConfig, with the help text that corral, TRL or transformers gives it."""
    from corral.lab.jobs.llm.settings import trainer_types

    if name not in trainer_types():
        return
    from corral.trl.config import CorralConfig  # imports TRL

    item = next(field for field in dataclasses.fields(CorralConfig) if field.name == name)
    words = " ".join(str(item.metadata.get("help", "")).split()) or "TRL says nothing about it."
    yield _setting(name, _title(item), words)


def _listing() -> str:
    """List all names that `corral explain` knows, each with the first line of its description."""
    registries: dict[str, dict[str, str | None]] = {
        "objectives": {name: _objective_line(name) for name in objective_names()},
        "corrections": {name: inspect.getdoc(function) for name, (function, _) in CORRECTIONS.items()},
        "tasks": {name: inspect.getdoc(cls) for name, cls in TASKS.items()},
        "recipes": {name: path.read_text().lstrip("# ") for name, path in recipes(studies=False).items()},
    }
    lines = []
    for title, registry in registries.items():
        lines += [title, *(f"  {name:<22} {(what or '').partition(chr(10))[0]}" for name, what in registry.items())]
    lines += ["algorithms of robots", f"  {', '.join(ALGORITHMS)}"]
    studies = ", ".join(sorted(recipes().keys() - recipes(studies=False).keys()))
    lines.append(f"recipes of the studies in docs/results/llm.md\n  {studies}")
    return "\n".join([*lines, "and every setting by its name, or all of them: corral explain settings\n"])


def _body(documented: Any) -> str:
    """Extract description, formula and reference from a docstring, without the sections Args and Returns."""
    return (
        re.sub(r"^(?:Args|Returns):\n(?:(?: .*)?\n)*", "", f"{inspect.getdoc(documented) or ''}\n", flags=re.M).rstrip() + "\n"
    )


def _settings(config_cls: type, only: Container[str] | None = None, title: str = "settings") -> str:
    """List the settings of a class with their defaults and descriptions."""
    meanings, rows = field_docs(config_cls), []
    for field in dataclasses.fields(config_cls) if dataclasses.is_dataclass(config_cls) else ():
        if only is None or field.name in only:
            rows.append(f"  {_title(field)}\n")
            rows += [f"      {line}\n" for line in textwrap.wrap(meanings.get(field.name, ""), 110)]
    return f"{title}\n" + ("".join(rows) or "  none\n")


def _title(field: dataclasses.Field[Any]) -> str:
    """Format a setting as its name and default, with the other allowed values if it takes one of several words."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    others = ", ".join(repr(word) for word in literal_words(field.type, *get_args(field.type)) if word != default)
    return f"{field.name} = {default!r}{f' (or {others})' if others else ''}"


def field_docs(config_cls: type) -> dict[str, str]:
    """Return the docstrings under the fields of a class and its bases, read from source and keyed by field."""
    found = dict[str, str]()
    for cls in reversed(config_cls.__mro__[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError):
            continue  # no source at hand
        statements = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, text in itertools.pairwise(statements):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                    found[name] = inspect.cleandoc(meaning)
    known = {item.name for item in dataclasses.fields(config_cls)} if dataclasses.is_dataclass(config_cls) else found
    return {name: meaning for name, meaning in found.items() if name in known}
