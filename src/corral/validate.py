"""Validation of user input: error types, nearest matches for misspelt names, and range checks for fields of settings."""

import dataclasses
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

# ------------------------------------------------------------------------------------------------------------- errors


class RunError(Exception):
    """Raised if a run cannot start or continue. The message states the problem, the reason and a remedy."""


class UserCodeError(RunError):
    """Raised if a function that the user wrote failed. The original exception is chained."""


class RewardError(UserCodeError):
    """Raised if a reward function failed. The original exception is chained."""


@contextmanager
def run_errors(kinds: type[Exception] | tuple[type[Exception], ...] = ValueError) -> Iterator[None]:
    """Context that converts errors about invalid arguments to a RunError with the same message."""
    try:
        yield
    except kinds as error:
        raise RunError(str(error)) from error


def pip_install(extra: str) -> str:
    """Return the pip commands that install an optional extra of corral, from the package index or in a source checkout."""
    return f"pip install 'corral[{extra}]', or in a checkout pip install -e '.[{extra}]'"


# -------------------------------------------------------------------------------------------------------------- names

_ALSO_CALLED = {
    "ppo": ["ppo_clip"], "grpo": ["ppo_clip"], "dapo": ["clip_higher"], "dpo": ["dppo"], "epsilon": ["bound", "clip_low"],
    "delta": ["bound"], "epsilon_low": ["clip_low"], "epsilon_high": ["clip_high"], "lr": ["learning_rate"],
    "rate": ["learning_rate"], "batch_size": ["per_device_train_batch_size"], "max_tokens": ["max_completion_length"],
}  # fmt: skip
"""Names from papers and other libraries, each mapped to names in corral. Similar spelling alone would find wrong names.
The most likely name comes first."""


def nearest(name: object, known: Iterable[str]) -> str:
    """Return the last part of an error message about an unknown name: the nearest known name, and all known names."""
    known = sorted(known)
    typed = str(name).lower().replace("-", "_")
    meant = [other for other in _ALSO_CALLED.get(typed, ()) if other in known][:1]
    # Recipes have hyphens of their own, so the name is also tried as it was typed.
    close = meant or get_close_matches(typed, known, n=1) or get_close_matches(str(name), known, n=1)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    return f"{guess} There are: {', '.join(known) or 'none'}."


def suggest(name: object, known: Iterable[str]) -> str:
    """Return an error message's hint with the nearest known name, for cases with hundreds of known names."""
    return nearest(name, known).split(" There are:")[0]


def build_config(owner: str, config_cls: type, settings: Mapping[str, Any]) -> Any:
    """Build `config_cls(**settings)`. Raises a ValueError that names an unknown setting."""
    check_keys(owner, config_cls, settings)
    return config_cls(**settings)


def check_keys(owner: str, config_cls: type, settings: Iterable[str]) -> None:
    """Raise a ValueError for the first name in `settings` that is not a field of a settings class."""
    known = [field.name for field in dataclasses.fields(config_cls) if field.init]
    for key in settings:
        if key not in known:
            raise ValueError(f"{owner}: there is no setting `{key}`.{nearest(key, known)}")


# ------------------------------------------------------------------------------------------------------------- fields


def number_in(value: object, low: float, high: float = math.inf) -> bool:
    """True if `value` is a number in [low, high]. False for NaN, booleans and other types."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def require(
    owner: object,
    *fields: str,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    finite: bool = False,
    integer: bool = False,
    one_of: Iterable[object] | None = None,
    each: bool = False,
    optional: bool = False,
    what: str = "",
    note: str = "",
    name: str | None = None,
    error: type[Exception] = ValueError,
) -> None:
    """Raise an error unless each named field of `owner` is valid: a number in a range, or one of the allowed values.

        require(self, "bound", "bound_low", at_least=0, what="a divergence", note="inf switches it off")
        ValueError: dppo: `bound` is a divergence and must be ≥ 0 (inf switches it off); got -1.

    NaN and booleans are no numbers; inf is one unless `finite`, `integer` or a limit excludes it.

    Args:
        owner: the object that has the fields, `self` in `__post_init__`.
        fields: their names; all must meet the same condition.
        at_least, above: lower limit, included or not.
        at_most, below: upper limit, included or not.
        finite: refuse inf.
        integer: refuse all but whole numbers.
        one_of: the values allowed, compared together with their type (1 is not True); excludes the limits.
        each: the field is a sequence, not empty, and this holds for each of its entries.
        optional: None is allowed too.
        what: what the field is, with its article.
        note: anything more to say, in brackets.
        name: the owner's name in the message; by default that of `owner_name`.
        error: the exception to raise.
    """
    choices = None if one_of is None else list(one_of)

    def fits(value: object) -> bool:
        if choices is not None:
            return any(type(value) is type(choice) and value == choice for choice in choices)
        return (
            isinstance(value, int if integer else int | float)
            and number_in(value, -math.inf)
            and (not finite or abs(value) <= sys.float_info.max)  # as floats, larger integers are inf
            and (at_least is None or value >= at_least)
            and (above is None or value > above)
            and (at_most is None or value <= at_most)
            and (below is None or value < below)
        )

    for field in fields:
        value = getattr(owner, field)  # the caller names its own fields
        if optional and value is None:
            continue
        if not (isinstance(value, Sequence) and value and all(map(fits, value)) if each else fits(value)):
            must = f"is one of {', '.join(map(str, choices))}" if choices is not None else ""
            must = must or _condition(integer, finite, (at_least, above), (at_most, below))
            if what:
                must = f"is {what}, {must[3:]}" if must.startswith("is ") else f"is {what} and {must}"
            must = ("holds at least one entry, each of which " if each else "") + must
            who = owner_name(owner) if name is None else name
            more = (", or None" if optional else "") + (f" ({note})" if note else "")
            raise error(f"{f'{who}: ' if who else ''}`{field}` {must}{more}; got {value!r}.")


def limited(default: Any, **limits: Any) -> Any:
    """Declare a field of a `Checked` settings class with a default and limits. `require` documents the limits."""
    return dataclasses.field(default=default, metadata=limits)


def literal_words(*types: Any) -> list[Any]:
    """Return the values that are allowed by those of the given types that are `Literal` types."""
    return [word for kind in types if get_origin(kind) is Literal for word in get_args(kind)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """Base class of settings whose fields are validated: against limits beside their defaults, and against `Literal` types.

    Whole numbers and None are read from a field's type. A subclass that changes a default keeps its limits.
    """

    def __post_init__(self) -> None:
        limits: dict[str, Mapping[str, Any]] = {}
        for cls in reversed(type(self).__mro__):
            own = vars(cls).get("__dataclass_fields__", {})
            limits |= {name: item.metadata for name, item in own.items() if item.metadata}
        for item in dataclasses.fields(self):
            types = get_args(item.type) if get_origin(item.type) in (Union, UnionType) else (item.type,)
            if words := literal_words(*types):
                require(self, item.name, one_of=words, optional=NoneType in types)
            elif item.name in limits:
                found = {"integer": int in types and float not in types, "optional": NoneType in types, **limits[item.name]}
                require(self, item.name, **found)


_Limits = tuple[float | None, float | None]
"""One end of a number's allowed range: an inclusive limit and an exclusive limit. At most one of them is set."""


def _condition(integer: bool, finite: bool, low: _Limits, high: _Limits) -> str:
    """Describe a range of numbers for an error message, such as "is a whole number ≥ 1" or "must lie in (0, 1]"."""
    (at_least, above), (at_most, below) = low, high
    least, most = at_least if above is None else above, at_most if below is None else below
    kind = "whole number" if integer else "finite number" if finite else "number"
    if least is not None and most is not None:
        interval = f"in {'[' if above is None else '('}{least}, {most}{']' if below is None else ')'}"
        return f"is a {kind} {interval}" if integer or finite else f"must lie {interval}"
    if least is None and most is None:
        return f"is a {kind}"
    limit = f"{'≥' if above is None else '>'} {least}" if least is not None else f"{'≤' if below is None else '<'} {most}"
    return f"is a {kind} {limit}" if integer else f"must be {'finite and ' * finite}{limit}"


_WORD_START = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def owner_name(owner: object) -> str:
    """Return a name for an object in error messages: its attribute `name`, or a name made from its class.

    `PPOClipConfig` becomes ppo_clip, `ProDMP` stays.
    """
    given = getattr(owner, "name", None)  # tasks have a name; most settings do not
    if isinstance(given, str):
        return given
    called = type(owner).__name__
    bare = called.removesuffix("Config")
    return called if bare == called else _WORD_START.sub("_", bare).lower()
