"""One JSON object of a dump: its fields read with their types checked, and a sentence for each that is wrong."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.validate import RunError

_LARGEST_ID = 2**31 - 1
_LARGEST = 1e100
_LOWEST_LOGP = -1e4
"""Below it no softmax has a log-probability: engines write such numbers where they mean −inf."""

_ROUNDING = 1e-3
"""How far above 0 rounding may put a log-probability."""


class DumpRecord:
    """Fields of one completion. Numbers that are null, not finite or beyond 1e100 are NaN; their tokens are left out later."""

    def __init__(self, content: Any, where: str) -> None:
        self.where = where
        if not isinstance(content, dict):
            raise self.error(f"should be a JSON object with the fields of one completion; it is {_kind(content)}.")
        self.content: Mapping[str, Any] = content

    def error(self, sentence: str) -> RunError:
        """What is wrong here, and where."""
        return RunError(f"{self.where}: {sentence}")

    def has(self, name: str) -> bool:
        """Whether a field is there and not null."""
        return self.content.get(name) is not None

    def numbers(self, name: str, length: int | None = None) -> NDArray[np.float64]:
        """A list of numbers, NaN where it holds null, NaN, or what no sum could hold."""
        values = self._list(name, length)
        kinds = set(map(type, values))
        if not kinds <= {float, int, type(None)}:
            self._refuse_item(name, values, (float, int, type(None)), "numbers")
        if type(None) in kinds:
            values = [np.nan if value is None else value for value in values]
        try:
            found = np.array(values, dtype=np.float64)
        except OverflowError:
            raise self.error(f"`{name}` holds an integer that no floating-point number can hold.") from None
        found[np.abs(found) > _LARGEST] = np.nan
        return found

    def log_probs(self, name: str, length: int | None = None) -> NDArray[np.float64]:
        """Log-probabilities: at most 0, up to rounding; NaN also where one stands for −inf."""
        found = self.numbers(name, length)
        found[found < _LOWEST_LOGP] = np.nan
        above = np.flatnonzero(found > _ROUNDING)
        if len(above):
            raise self.error(
                f"`{name}` holds {found[above[0]]:.4g} at token {above[0]}, and a log-probability is at most 0. Are these "
                f"logits or probabilities?"
            )
        return np.minimum(found, 0.0)

    def ids(self, name: str, length: int | None = None) -> NDArray[np.int64]:
        """Token ids."""
        values = self._list(name, length)
        if not set(map(type, values)) <= {int}:
            self._refuse_item(name, values, (int,), "token ids, whole numbers")
        wrong = next((value for value in values if not -1 <= value <= _LARGEST_ID), None)
        if wrong is not None:
            raise self.error(f"`{name}` holds {_short(wrong)}, which is no token id.")
        return np.array(values, dtype=np.int64)

    def flags(self, name: str, length: int | None = None) -> NDArray[np.bool_]:
        """A mask: true or false, 1 or 0; null is false."""
        values = self._list(name, length)
        wrong = [value for value in values if value not in (0, 1, None)]
        if wrong:
            raise self.error(f"`{name}` holds {_short(wrong[0])}; a mask holds true and false, or 1 and 0.")
        return np.array([bool(value) for value in values], dtype=np.bool_)

    def rows(self, name: str, length: int) -> list["DumpRecord"]:
        """A list of objects, each as a record of its own."""
        return [DumpRecord(item, f"{self.where}, `{name}`") for item in self._list(name, length)]

    def table(self, name: str, length: int) -> NDArray[np.float64]:
        """A list of equally long lists of numbers, [length, K]."""
        lines = self._list(name, length)
        widths = {len(line) if isinstance(line, list) else 0 for line in lines}
        if len(widths) != 1 or 0 in widths:
            raise self.error(f"`{name}` should hold one list per token, all equally long.")
        flat = DumpRecord({name: [value for line in lines for value in line]}, self.where)
        return flat.numbers(name).reshape(length, -1)

    def number(self, name: str) -> float | None:
        """One number; None where it is missing, null or not finite."""
        value = self.content.get(name)
        if value is None:
            return None
        found = DumpRecord({name: [value]}, self.where).numbers(name)[0]
        return None if np.isnan(found) else float(found)

    def whole(self, name: str, default: int | None = None) -> int | None:
        """One whole number of at most 18 digits."""
        value = self.content.get(name)
        if value is None:
            return default
        if type(value) is not int or abs(value) >= 10**18:
            raise self.error(f"`{name}` is a whole number; got {_short(value)}.")
        return value

    def text(self, name: str) -> str:
        """A text."""
        value = self.content.get(name)
        if not isinstance(value, str):
            raise self.error(f"`{name}` is a text; got {_short(value)}.")
        return value

    def _list(self, name: str, length: int | None) -> list[Any]:
        value = self.content.get(name)
        if not isinstance(value, list):
            found = "it is missing" if name not in self.content else f"it is {_kind(value)}"
            raise self.error(f"`{name}` should be a list with one entry per token; {found}.")
        if length is not None and len(value) != length:
            raise self.error(f"`{name}` has {len(value)} entries and the completion {length} tokens. Was one shifted twice?")
        return value

    def _refuse_item(self, name: str, values: list[Any], allowed: tuple[type, ...], what: str) -> None:
        place = next(index for index, value in enumerate(values) if type(value) not in allowed)
        raise self.error(f"`{name}` should hold {what}; at token {place} it holds {_short(values[place])}.")


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def _short(value: Any) -> str:
    """The beginning of a value from a file, safe for a terminal."""
    if isinstance(value, dict | list):
        return _kind(value)
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a number with more than 30 digits"
    return text if len(text) <= 40 else f"{text[:40]}…"
