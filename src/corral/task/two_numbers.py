"""Word problems with two numbers: a pretrained model of a hundred million parameters learns them within a few steps."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from corral.task.draws import ProceduralTask, quote
from corral.validate import require

_STORIES: tuple[tuple[str, Callable[[int, int], int]], ...] = (
    ("A shelf holds {a} books, and {b} more are put on it. How many books does it hold now?", operator.add),
    ("Mia picks {a} plums and Tom picks {b}. How many plums do they pick together?", operator.add),
    ("A bus has {a} passengers, and {b} more get on. How many passengers does it have now?", operator.add),
    ("A pen costs {a} cents and a ruler costs {b}. How many cents do both cost?", operator.add),
    ("Of {a} apples in a crate, {b} are sold. How many apples are left?", operator.sub),
    ("Ben has {a} stamps and gives {b} of them away. How many stamps does he keep?", operator.sub),
    ("A rope is {a} metres long, and {b} metres are cut off. How many metres are left?", operator.sub),
    ("Anna is {a} years old and Leo is {b}. How many years older is Anna?", operator.sub),
    ("There are {a} boxes with {b} pencils in each. How many pencils are there?", operator.mul),
    ("A train has {a} cars with {b} seats each. How many seats does it have?", operator.mul),
    ("Each of {a} children brings {b} flowers. How many flowers are there?", operator.mul),
    ("A garden has {a} rows of {b} trees. How many trees does it have?", operator.mul),
)
"""Text, and what to compute; a is the larger number, so that nothing is negative."""
_PATTERNS = [re.compile(re.escape(text).replace(r"\{a\}", "([0-9]+)").replace(r"\{b\}", "([0-9]+)")) for text, _ in _STORIES]
_NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True, kw_only=True)
class TwoNumbers(ProceduralTask):
    """Add, subtract or multiply two numbers of a sentence. The last whole number of the answer counts.

        prompt      "Of 81 apples in a crate, 27 are sold. How many apples are left?"   completion  "There are 54 apples left."

    The reward is 1 iff that number is the result, else 0; commas within it are left out, a sign before it too.
    """

    name: ClassVar[str] = "two_numbers"

    number_max: int = 99
    """The largest number that is added or subtracted; the smallest is 2."""
    factor_max: int = 12
    """The largest factor."""

    def __post_init__(self) -> None:
        require(self, "number_max", "factor_max", at_least=2, at_most=999, integer=True)

    @property
    def max_prompt_length(self) -> int:
        """Characters of the longest prompt: a number is no longer than its place, {a} or {b}."""
        return max(len(text) for text, _ in _STORIES)

    @property
    def max_completion_length(self) -> int:
        """Tokens of a short sentence."""
        return 24

    def verify(self, prompt: str, completion: str) -> float:
        """1.0 iff the last whole number in `completion` is the result."""
        compute, a, b = self._parse(prompt)
        numbers = _NUMBER.findall(completion.replace(",", ""))
        return float(bool(numbers) and numbers[-1] == str(compute(a, b)))

    def _parse(self, prompt: str) -> tuple[Callable[[int, int], int], int, int]:
        """What to compute of which numbers; ValueError where these settings could not have drawn it."""
        for pattern, (_, compute) in zip(_PATTERNS, _STORIES, strict=True):
            if found := pattern.fullmatch(prompt):
                a, b = int(found[1]), int(found[2])
                if prompt in (text.format(a=a, b=b) for text, _ in _STORIES) and 2 <= b <= a <= self._largest(compute):
                    return compute, a, b
        raise ValueError(f"two_numbers: {quote(prompt)} is no problem of {self}. Is it another task's, or of other settings?")

    def _largest(self, compute: Callable[[int, int], int]) -> int:
        return self.factor_max if compute is operator.mul else self.number_max

    def _propose(self, draw: Callable[[], float], wanted: Callable[[str], bool]) -> tuple[str, str] | None:
        text, compute = _STORIES[int(draw() * len(_STORIES))]
        b, a = sorted(2 + int(draw() * (self._largest(compute) - 1)) for _ in range(2))
        problem = text.format(a=a, b=b)
        return (problem, str(compute(a, b))) if wanted(problem) else None
