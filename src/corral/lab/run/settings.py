"""Merging of settings from recipes, files and flags, with each value converted to its field's type."""

import json
import re
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from corral.validate import Checked, RunError, limited, nearest, run_errors

GuardMode = Literal["warn", "stop", "off"]
"""Response to a policy's collapse: warn, stop the run, or ignore the collapse."""

MAX_SEED = 2**32 - 1
"""Largest random seed that NumPy accepts. The other libraries that get the seed accept it too."""

RECIPES = Path(__file__).parents[1] / "recipes"

COMPARE = "compare"
"""Name of the recipe's TOML table that only `corral compare` reads. It holds no settings of a run."""

SECRET = re.compile(r"token$|secret|password|passwd|api.?key|credential", re.IGNORECASE)
"""Pattern of setting names that hold secrets. Secrets must not appear on a page or model card, which people publish."""

_LEADING_POINT = re.compile(r"^([+-]?)\.(?=\d)")
"""Pattern of the leading point in a number such as .05, which TOML refuses because it requires 0.05."""


@dataclass(frozen=True, kw_only=True)
class JobSettings(Checked):
    """Base class of settings from the command line. A wrong value raises a RunError that names only the setting."""

    name = ""  # messages need no owner: a command has one such job

    def __post_init__(self) -> None:
        with run_errors():
            super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class RunSettings(JobSettings):
    """Settings common to training runs of language models and robots."""

    seed: int = limited(0, at_least=0, at_most=MAX_SEED)
    """Random seed of everything drawn at random, such as prompts, contexts and samples."""
    eval_every: int = limited(10, at_least=1)
    """Number of steps between measurements on held-out problems or contexts.
    The first and last steps are always measured."""
    eval_size: int = limited(512, at_least=1)
    """Number of held-out problems (for a robot: held-out contexts) on which success is measured.
    A robot's contexts are the same in every run."""
    checkpoint_every: int = limited(10, at_least=1)
    """Number of steps between checkpoints. The last step always has a checkpoint."""
    keep_checkpoints: int = limited(2, at_least=1)
    """Number of newest checkpoints to keep on disk."""
    guard: GuardMode = "warn"
    """Response to a collapse: `warn`, or `stop` with a checkpoint. `off` switches the check off."""


def add_layer(merged: dict[str, Any], layer: Mapping[str, Any], tables: Sequence[str]) -> None:
    """Merge the settings in `layer` over earlier settings: later values win, and tables in `tables` are merged key by key."""
    for key, value in layer.items():
        if key in tables and isinstance(value, Mapping):
            if not isinstance(before := merged.get(key, {}), Mapping):
                raise RunError(f"`{key}` is a table of settings; got {before!r}.")
            # Neither JSON nor YAML has inf as people write it.
            merged[key] = {**before, **{inner: guess(given) for inner, given in value.items()}}
        else:
            merged[key] = value


def nested(pairs: Iterable[tuple[str, Any]], tables: Sequence[str]) -> dict[str, Any]:
    """Turn flags into nested settings: `lora.r` becomes the key `r` of the table `lora`, which must be one of `tables`."""
    layer: dict[str, Any] = {}
    for key, value in pairs:
        table, _, inner = key.replace("-", "_").partition(".")
        if not inner:
            layer[table] = value
        elif table in tables:
            layer.setdefault(table, {})[inner] = value
        else:
            raise RunError(
                f"there is no setting `{key}`: only {', '.join(tables[:-1])} and {tables[-1]} have settings of their own."
            )
    return layer


def read_file(path: Path) -> dict[str, Any]:
    """Read settings from a TOML or YAML file."""
    toml = path.suffix == ".toml"
    try:
        text = path.read_text()
        if toml:
            content: Any = tomllib.loads(text)
        else:
            import yaml  # TOML, and so every recipe, needs nothing beyond Python

            try:
                content = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(" ".join(str(error).split())) from error  # it has the place on lines of their own
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is not {'TOML' if toml else 'YAML'}: {error}") from error
    if not isinstance(content, dict):
        raise RunError(f"{path} should hold settings, `key = value` in TOML or `key: value` in YAML.")
    return content


def changed_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance whose values differ from the defaults."""
    known = {item.name: item.default for item in fields(config)}
    return {name: value for name, value in vars(config).items() if value != known.get(name)}


def toml_lines(settings: Mapping[str, Any]) -> list[str]:
    """Format settings as TOML lines for `read_file`: values first, then tables. None and empty values are left out."""
    kept = {key: value for key, value in settings.items() if value is not None and value not in ({}, [], (), "")}
    tables = {key: value for key, value in kept.items() if isinstance(value, Mapping)}
    lines = [f"{key} = {_toml(value)}" for key, value in kept.items() if key not in tables]
    for key, table in tables.items():
        lines += ["", f"[{key}]", *_toml_pairs(table)]
    return lines


def _toml(value: Any) -> str:
    """Format a value as TOML. JSON strings are valid TOML except for the character DEL."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(_toml_pairs(value))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return repr(value)  # nan and inf are TOML's too
    return json.dumps(value if isinstance(value, int) else str(value)).replace("\x7f", "\\u007f")


def _toml_pairs(table: Mapping[str, Any]) -> list[str]:
    """Format the entries of a table as `key = value`, without entries that are None."""
    given = {key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key): table[key] for key in table}
    return [f"{key} = {_toml(value)}" for key, value in given.items() if value is not None]


def recipes(kind: str = "*", *, studies: bool = True) -> dict[str, Path]:
    """Return the recipes that ship with corral, keyed by name: all, or those for one kind of run (llm or robot).

    Args:
        studies: include the recipes that repeat a study of docs/results/llm.md.
    """
    paths = sorted(RECIPES.glob(f"{kind}/*.toml"))
    return {path.stem: path for path in paths if studies or not path.stem.startswith("evidence-")}


def read_recipe(name: str) -> dict[str, Any]:
    """Read the settings of a recipe that ships with corral."""
    known = recipes()
    if name not in known:
        raise RunError(f"there is no recipe {name!r}.{nearest(name, known)}")
    layer = read_file(known[name])
    layer.pop(COMPARE, None)
    base = layer.pop("recipe", None)  # whose keys and tables this one has too, unless it has its own
    return layer if base is None else read_recipe(base) | layer


def guess(text: Any) -> Any:
    """Guess the value of a command-line text of unknown type: parsed as TOML if possible, else the text itself."""
    if not isinstance(text, str):
        return text
    if text.lower() == "none":
        return None
    try:
        return tomllib.loads("value = " + _LEADING_POINT.sub(r"\g<1>0.", text))["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def coerce(key: str, value: Any, hint: Any) -> Any:
    """Convert `value` to the type `hint` of the setting `key`. Raises RunError if it does not fit."""
    kinds = set(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else {hint}
    choices = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    if choices and len(kinds - {type(None)}) == 1:  # words, or words and nothing
        if type(None) in kinds and (value is None or value == "none"):
            return None
        words = {False: ("off", "no"), True: ("on", "yes")}[value] if isinstance(value, bool) else ()  # YAML reads them so
        value = next((word for word in words if word in choices), value)
        if value not in choices:
            raise RunError(f"`{key}` is one of {', '.join(map(str, choices))}; got {value!r}.")
        return value
    kinds = {list if get_origin(kind) is Sequence else get_origin(kind) or kind for kind in kinds}
    read = value if str in kinds and not kinds & {dict, list} else guess(value)
    if type(None) in kinds and (read is None or value == "none"):
        return None
    for kind in (bool, int, float, dict, list, str):
        if kind in kinds and type(read) is kind:
            return read
    if float in kinds and isinstance(read, int | str) and not isinstance(read, bool):
        try:
            return float(read)  # YAML reads 1e-4 as text
        except ValueError:
            pass
    if str in kinds:
        return str(value)
    if kinds & {bool, int, float, dict, list}:
        wanted = " or ".join(sorted("none" if kind is type(None) else kind.__name__ for kind in kinds))
        raise RunError(f"`{key}` is {wanted}; got {value!r}.")
    return read
