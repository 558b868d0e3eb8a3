"""Checks of settings: `require` for the fields of a dataclass, `number_in` for single numbers."""

import math
import re
from collections.abc import Iterable

_WORD_START = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def number_in(value: object, low: float, high: float = math.inf) -> bool:
    """Whether `value` is a number in [low, high]; NaN, booleans and everything else are not."""
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
    optional: bool = False,
    what: str = "",
    note: str = "",
    name: str | None = None,
    error: type[Exception] = ValueError,
) -> None:
    """Raise unless each of the named fields is what it must be: a number in a range, or one of some values.

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
        optional: None is allowed too.
        what: what the field is, with its article.
        note: anything more to say, in brackets.
        name: who complains; by default `owner.name`, else its class: `DPPOConfig` is dppo, other classes as they are called.
        error: the exception to raise.
    """
    choices = None if one_of is None else list(one_of)
    for field in fields:
        value = getattr(owner, field)  # the caller names its own fields
        if optional and value is None:
            continue
        if choices is not None:
            fits = any(type(value) is type(choice) and value == choice for choice in choices)
            must = f"is one of {', '.join(map(str, choices))}"
        else:
            fits = number_in(value, -math.inf) and not (
                (integer and not isinstance(value, int))
                or (finite and not math.isfinite(value))
                or (at_least is not None and value < at_least)
                or (above is not None and value <= above)
                or (at_most is not None and value > at_most)
                or (below is not None and value >= below)
            )
            limits = _limits(at_least, above, at_most, below)
            kind = f"a whole number {limits}" if integer else " and ".join(filter(None, ["finite" * finite, limits]))
            must = f"{f'is {what} and ' if what else ''}must be {kind.strip() or 'a number'}"
        if not fits:
            who = _name(owner) if name is None else name
            more = (", or None" if optional else "") + (f" ({note})" if note else "")
            raise error(f"{f'{who}: ' if who else ''}`{field}` {must}{more}; got {value!r}.")


def _limits(at_least: float | None, above: float | None, at_most: float | None, below: float | None) -> str:
    """ "in (0, 1]", "≥ 1", or nothing."""
    low, high = at_least if above is None else above, at_most if below is None else below
    if low is not None and high is not None:
        return f"in {'[' if above is None else '('}{low}, {high}{']' if below is None else ')'}"
    if low is not None:
        return f"{'≥' if above is None else '>'} {low}"
    return "" if high is None else f"{'≤' if below is None else '<'} {high}"


def _name(owner: object) -> str:
    """`owner.name` where there is one, else the class: `PPOClipConfig` is ppo_clip, `ProDMP` is itself."""
    given = getattr(owner, "name", None)  # tasks have a name; most settings do not
    if isinstance(given, str):
        return given
    called = type(owner).__name__
    bare = called.removesuffix("Config")
    return called if bare == called else _WORD_START.sub("_", bare).lower()
