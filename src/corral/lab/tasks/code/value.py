"""Serialization of function results as JSON that keeps Python's types, and comparison with expected results.

This file is also run inside the sandbox, before `harness.py`, and by graders: it needs the standard library alone.
"""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

# -------------------------------------------------------------------------------------------------------- serialization

_CONTAINERS: dict[str, type[Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class Opaque:
    """Placeholder for a value that cannot be serialized. It equals nothing, not even itself."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        return False


def encode(value: Any) -> Any:
    """Encode a value as plain JSON data. An instance of a subclass is encoded by the methods of its built-in base type."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return ["int", int.__format__(value, "x")]  # hexadecimal has no limit on its digits
    if isinstance(value, float):
        return float.__add__(value, 0.0)
    if isinstance(value, dict):
        return ["dict", *([encode(key), encode(item)] for key, item in dict.items(value))]
    if isinstance(value, complex):
        value = complex.__pos__(value)  # without the attributes of a subclass
        return ["complex", value.real, value.imag]
    if isinstance(value, bytes):
        return ["bytes", bytes.hex(value)]
    for name, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            return [name, *(encode(item) for item in kind.__iter__(value))]
    return ["other", f"{type(value).__name__} object"]


def decode(data: Any) -> Any:
    """Decode the output of `encode`. Forged data may raise any exception or run forever.

    So text written by a tested program must be decoded only where a failure or a timeout costs nothing but that program's
    reward.
    """
    if not isinstance(data, list):
        return data
    name, *items = data
    if name in _CONTAINERS:
        return _CONTAINERS[name](decode(item) for item in items)
    if name == "int":
        return int(items[0], 16)
    if name == "dict":
        return {decode(key): decode(item) for key, item in items}
    if name == "complex":
        return complex(*items)
    if name == "bytes":
        return bytes.fromhex(items[0])
    return Opaque(str(items))


def dumps(value: Any) -> str:
    """Encode a value as one line of JSON."""
    return json.dumps(encode(value))


def loads(line: str | bytes) -> Any:
    """Decode a value from a line that `dumps` wrote."""
    return decode(json.loads(line))


# ----------------------------------------------------------------------------------------------------------- comparison


def same(got: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Compare two values as == does, but allow floats to differ by `tolerance`, absolute or relative.

    Nothing that overrides == gets here: both are what `decode` makes. NaN is NaN.
    """
    if isinstance(got, float | int) and isinstance(expected, float | int) and float in (type(got), type(expected)):
        try:
            if math.isnan(got) or math.isnan(expected):
                return math.isnan(got) and math.isnan(expected)
            return got == expected or math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance)
        except OverflowError:  # an int that no float can hold
            return False
    if isinstance(expected, list | tuple):
        same_kind = type(got) is type(expected) and len(got) == len(expected)
        return same_kind and all(same(a, b, tolerance) for a, b in zip(got, expected, strict=True))
    if isinstance(expected, dict):
        return (
            isinstance(got, dict)
            and got.keys() == expected.keys()
            and all(same(got[k], expected[k], tolerance) for k in expected)
        )
    return bool(got == expected)


def _lines(text: str) -> list[str]:
    """Split a text into lines without trailing spaces, and drop empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def same_output(got: str, expected: str, tolerance: float) -> bool:
    """Compare two outputs line by line. With a tolerance, numbers with a decimal point may differ, and spacing is ignored."""
    if _lines(got) == _lines(expected):
        return True
    if not tolerance:
        return False
    ours, theirs = ([line.split() for line in text.split("\n") if line.strip()] for text in (got, expected))
    return [len(line) for line in ours] == [len(line) for line in theirs] and all(
        a == b or _close(a, b, tolerance)
        for line, other in zip(ours, theirs, strict=True)
        for a, b in zip(line, other, strict=True)
    )


def _close(got: str, expected: str, tolerance: float) -> bool:
    if expected.lstrip("+-").isdecimal():
        return False  # whole numbers are counted, not measured
    try:
        pair = float(got), float(expected)
    except ValueError:
        return False
    return all(map(math.isfinite, pair)) and math.isclose(*pair, rel_tol=tolerance, abs_tol=tolerance)


def _as_apps(got: object, expected: object, tolerance: float) -> bool:
    """Compare results as APPS does: a tuple equals a list of the same items, and x is correct if [x] is expected."""
    got = _tuples_to_lists(got)
    wrapped = isinstance(expected, list) and len(expected) == 1 and same(got, expected[0], tolerance)
    return wrapped or same(got, expected, tolerance)


def _tuples_to_lists(value: object) -> object:
    return [_tuples_to_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _as_sets(got: Any, expected: Any, tolerance: float) -> bool:
    """Compare results as sets, as EvalPlus does for some functions: order and repetition are ignored."""
    try:
        return set(got) == set(expected)
    except TypeError:  # not a collection, or of things that no set can hold
        return False


def _presence(got: object, expected: object, tolerance: float) -> bool:
    """Reduce a result to whether it is not None, as EvalPlus does for regex matches. Booleans stay as they are."""
    return got == expected if isinstance(got, bool) else expected == (got is not None)


COMPARISONS: dict[str, Callable[[Any, Any, float], bool]] = {
    "same": same, "apps": _as_apps, "sets": _as_sets, "presence": _presence,
}  # fmt: skip


def count_right(how: str, tolerance: float, output: str, expected: Sequence[str]) -> float:
    """Count the correct results in the output of a function under test, which has one line per call.

    The function may have written the lines itself. So this runs in a grader's process, which has limits of its own: whatever
    a line provokes is wrong, and a line that takes for ever costs no more than the reward of the program that wrote it.
    """
    right = 0
    for line, wanted in zip(output.splitlines(), expected, strict=False):
        want = loads(wanted)
        try:
            right += COMPARISONS[how](decode(json.loads(line)["value"]), want, tolerance)
        except Exception:  # whatever it is, it is the line's doing: `want` has been read
            continue
    return float(right)
