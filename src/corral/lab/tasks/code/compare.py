"""Comparison of a program's output, or a function's result, with the expected one."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from corral.lab.tasks.code.value import decode, loads, same


def _lines(text: str) -> list[str]:
    """Lines without the spaces at their ends, without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def same_output(got: str, expected: str, tolerance: float) -> bool:
    """Equal lines; with a tolerance, equal words on lines that are not empty, where numbers with a decimal point may differ."""
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
    """APPS' equality: a tuple equals a list of the same items, and x is right where [x] is expected."""
    got = _tuples_to_lists(got)
    wrapped = isinstance(expected, list) and len(expected) == 1 and same(got, expected[0], tolerance)
    return wrapped or same(got, expected, tolerance)


def _tuples_to_lists(value: object) -> object:
    return [_tuples_to_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _as_sets(got: Any, expected: Any, tolerance: float) -> bool:
    """EvalPlus' equality for some functions: equal sets of elements, in any order and number."""
    try:
        return set(got) == set(expected)
    except TypeError:  # not a collection, or of things that no set can hold
        return False


def _presence(got: object, expected: object, tolerance: float) -> bool:
    """EvalPlus' equality for matches of patterns: whether there is a result at all. Booleans are compared as they are."""
    return got == expected if isinstance(got, bool) else expected == (got is not None)


COMPARISONS: dict[str, Callable[[Any, Any, float], bool]] = {
    "same": same, "apps": _as_apps, "sets": _as_sets, "presence": _presence,
}  # fmt: skip


def count_right(how: str, tolerance: float, output: str, expected: Sequence[str]) -> float:
    """Number of expected results among those that the harness wrote for a function, one line per call.

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
