"""Addition, subtraction and multiplication with a checked scratchpad: one place of the second number at a time."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from corral.task.countdown import OPERATIONS
from corral.task.draws import ProceduralTask, quote
from corral.validate import require

_PROMPT = re.compile(r"([1-9][0-9]{0,5})([+*-])([1-9][0-9]{0,5}):")
_CHAIN = re.compile(r"([+-])([1-9][0-9]*)=(0|[1-9][0-9]*)")
_EQUATION = re.compile(r"(0|[1-9][0-9]*)([+*])(0|[1-9][0-9]*)=(0|[1-9][0-9]*)")


@dataclass(frozen=True, kw_only=True)
class Arithmetic(ProceduralTask):
    """Compute a+b, a-b or a*b, and write down every step.

        prompt      "47+85:"   completion  "47+80=127+5=132"                       the places of b, in any order
        prompt      "85-47:"   completion  "85-40=45-7=38"
        prompt      "23*47:"   completion  "23*40=920,23*7=161,920+161=1081"       products in any order, then their running sum

    The reward is 1 iff the format, every step's arithmetic and the result are right; else 0. A place that is 0 has no step.
    """

    name: ClassVar[str] = "arithmetic"

    operations: str = "+-*"
    """Which of + - * occur."""
    digits: int = 2
    """Digits of the longest operand; operands are drawn uniformly from 1 to the largest such number."""

    def __post_init__(self) -> None:
        require(self, "digits", at_least=1, at_most=6, integer=True)
        given = self.operations
        if not isinstance(given, str) or not given or len(set(given)) < len(given) or not set(given) <= set("+-*"):
            raise ValueError(f"arithmetic: `operations` is one or more of + - *, each once; got {given!r}.")

    @property
    def max_prompt_length(self) -> int:
        """Characters of the longest prompt: two operands, the sign and ":"."""
        return 2 * self.digits + 2

    @property
    def max_completion_length(self) -> int:
        """Characters of the longest right answer: every number in it is as long as can be for 99+99, 99*99 and 99-11."""
        largest, ones = 10**self.digits - 1, int("1" * self.digits)
        return max(len(_solution(largest, sign, ones if sign == "-" else largest)) for sign in self.operations)

    def verify(self, prompt: str, completion: str) -> float:
        """1.0 iff `completion` is a right answer to `prompt`, to the letter; 0.0 for any other text."""
        left, operation, right = self.parse_prompt(prompt)
        if len(completion) > self.max_completion_length:  # nothing below reads an enormous number
            return 0.0
        steps = _product_steps(left, completion) if operation == "*" else _chain_steps(left, operation, completion)
        return float(steps is not None and sorted(steps) == sorted(places(right)))

    def parse_prompt(self, prompt: str) -> tuple[int, str, int]:
        """a, the operation and b; ValueError where these settings could not have drawn it."""
        match = _PROMPT.fullmatch(prompt)
        if match is None:
            raise ValueError(f"arithmetic: a prompt looks like '47+85:'; got {quote(prompt)}. Is it another task's?")
        left, operation, right = int(match[1]), match[2], int(match[3])
        if operation not in self.operations or max(left, right) >= 10**self.digits or (operation == "-" and left < right):
            raise ValueError(f"arithmetic: {prompt!r} is no problem of {self}. Was it drawn with other settings?")
        return left, operation, right

    def _propose(self, draw: Callable[[], float], wanted: Callable[[str], bool]) -> tuple[str, str] | None:
        """Uniform operands; the answer takes places from the highest to the lowest. a+b is held out together with b+a."""
        operation = self.operations[int(draw() * len(self.operations))]
        left, right = (1 + int(draw() * (10**self.digits - 1)) for _ in range(2))
        low, high = sorted((left, right))
        if operation == "-":
            left, right = high, low  # nothing is negative
        if not wanted(f"{low}{operation}{high}"):
            return None
        return f"{left}{operation}{right}:", _solution(left, operation, right)


def places(number: int) -> list[int]:
    """473 → 400, 70, 3; places that are 0 are left out."""
    digits = str(number)
    return [int(digit) * 10 ** (len(digits) - 1 - at) for at, digit in enumerate(digits) if digit != "0"]


def _solution(left: int, operation: str, right: int) -> str:
    """The answer with every step, places from the highest to the lowest."""
    if operation != "*":
        text, value = str(left), left
        for place in places(right):
            value = OPERATIONS[operation](value, place)
            text += f"{operation}{place}={value}"
        return text
    products = [left * place for place in places(right)]
    lines = [f"{left}*{place}={product}" for place, product in zip(places(right), products, strict=True)]
    total = products[0]
    for product in products[1:]:
        lines.append(f"{total}+{product}={total + product}")
        total += product
    return ",".join(lines)


def _chain_steps(left: int, operation: str, text: str) -> list[int] | None:
    """What "47+80=127+5=132" adds to 47, or subtracts from it; None where a step or the format is wrong."""
    if not text.startswith(str(left)):
        return None
    taken, value, at = [], left, len(str(left))
    while step := _CHAIN.match(text, at):
        taken.append(int(step[2]))
        value = OPERATIONS[operation](value, taken[-1])
        if step[1] != operation or step[3] != str(value):
            return None
        at = step.end()
    return taken if at == len(text) else None


def _product_steps(left: int, text: str) -> list[int] | None:
    """What "23*40=920,23*7=161,920+161=1081" multiplies 23 by; None where a step, the sum or the format is wrong."""
    steps = [_EQUATION.fullmatch(part) for part in text.split(",")]
    if not all(step and step[4] == str(OPERATIONS[step[2]](int(step[1]), int(step[3]))) for step in steps):
        return None
    products = [step for step in steps if step and step[2] == "*"]
    sums = [step for step in steps[len(products) :] if step and step[2] == "+"]
    if len(products) + len(sums) < len(steps) or len(sums) != len(products) - 1:
        return None
    if any(int(step[1]) != left for step in products):
        return None
    totals = [products[0][4], *(step[4] for step in sums)]
    if any((total, product[4]) != (step[1], step[3]) for total, product, step in zip(totals, products[1:], sums, strict=False)):
        return None
    return [int(step[3]) for step in products]
