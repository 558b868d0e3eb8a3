"""Serialization across the sandbox: JSON that tells a list from a tuple. What comes back is plain data, whatever it was inside.

This file is also run inside the sandbox, before `harness.py`; it needs the standard library alone.
"""

import json
import math
from typing import Any

_CONTAINERS: dict[str, type[Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class Opaque:
    """A value that cannot be serialized: it equals nothing."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        return False


def encode(value: Any) -> Any:
    """A value as plain JSON data. Instances of subclasses become their base type by its methods, not their own."""
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
    """The value that `encode` was given. For what it never gives, anything may be raised, and a forged set may take for ever:
    what a program wrote is decoded where that costs the program's own reward and no more."""
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
    """A value as one line of JSON."""
    return json.dumps(encode(value))


def loads(line: str | bytes) -> Any:
    """The value in a line that `dumps` made."""
    return decode(json.loads(line))


def same(got: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Equality as Python's ==, except that a float may differ by `tolerance`, absolute or relative.

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
