"""Word problems with two numbers for a pretrained model: few of its samples are right, nor are most of its greedy answers."""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from corral.task.draws import ProceduralTask

_KINDS: tuple[tuple[str, Callable[[int, int], int], int], ...] = (
    ("A shelf holds {a} books, and {b} more are put on it. How many books does it hold now?", operator.add, 99),
    ("Of {a} apples in a crate, {b} are sold. How many apples are left?", operator.sub, 99),
    ("There are {a} boxes with {b} pencils in each. How many pencils are there?", operator.mul, 12),
)
"""Text, what to compute, and the largest number in it."""
_PATTERNS = [re.compile(re.escape(text).replace(r"\{a\}", r"(\d+)").replace(r"\{b\}", r"(\d+)")) for text, _, _ in _KINDS]


@dataclass(frozen=True, kw_only=True)
class WordProblems(ProceduralTask):
    """Add, subtract or multiply two numbers in a sentence; the last whole number of the answer is the result."""

    name: ClassVar[str] = "word_problems"

    @property
    def max_prompt_length(self) -> int:
        """Characters of the longest prompt."""
        return max(len(text) for text, _, _ in _KINDS)  # numbers are no longer than their places {a} and {b}

    @property
    def max_completion_length(self) -> int:
        """Tokens of a short sentence."""
        return 24

    def verify(self, prompt: str, completion: str) -> float:
        """1.0 iff the last whole number in `completion` is the result."""
        for pattern, (_, compute, _) in zip(_PATTERNS, _KINDS, strict=True):
            if found := pattern.fullmatch(prompt):
                numbers = re.findall(r"\d{1,9}", completion.replace(",", ""))
                return float(bool(numbers) and int(numbers[-1]) == compute(int(found[1]), int(found[2])))
        raise ValueError(f"word_problems: {prompt!r} is none of its problems.")

    def _propose(self, draw: Callable[[], float], wanted: Callable[[str], bool]) -> tuple[str, str] | None:
        text, compute, largest = _KINDS[int(draw() * len(_KINDS))]
        a, b = sorted((2 + int(draw() * (largest - 1)) for _ in range(2)), reverse=True)  # nothing is negative
        problem = text.format(a=a, b=b)
        return (problem, str(compute(a, b))) if wanted(problem) else None
