"""Countdown with a checked scratchpad: reach a target with every number once, and write down each step."""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from corral.task.draws import ProceduralTask, quote
from corral.validate import require

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERATORS = "".join(OPERATIONS)

# Numbers carry no leading zeros: they read as people write them, are shorter than two-digit fields (11.9 characters an
# answer instead of 14 at the default settings), and completions differ in length, as they do in every real task. The result
# of a step is the left operand of the next without being written twice. Digits are ASCII: \d would also take "٣".
_NUMBER = re.compile(r"[1-9][0-9]*")
_PROMPT = re.compile(r"([1-9][0-9]{0,4}(?: [1-9][0-9]{0,4})+)>(0|[1-9][0-9]{0,4}):")
_STEP = re.compile(r"([+*-])([1-9][0-9]*)=(0|[1-9][0-9]*)")


@dataclass(frozen=True, kw_only=True)
class Countdown(ProceduralTask):
    """Combine n numbers into a target, left to right, with + − and *, using every number exactly once.

        prompt      "3 7 12>22:"         the numbers in any order, and the target
        completion  "3+7=10+12=22"       3+7=10, then 10+12=22; then the end of the sequence

    The reward is 1 iff the format, every step's arithmetic, the multiset of the numbers and the target are right, and no result
    leaves 0..value_max; else 0. Every prompt has a solution. The defaults have 12,041 problems, of which 1/10 are held out.
    """

    name: ClassVar[str] = "countdown"
    NO_PROBLEM: ClassVar[str] = "Try a smaller `n` or a larger `value_max`."

    n: int = 3
    """How many numbers there are; a completion has n − 1 steps."""
    n_max: int = 19
    """The largest of the numbers, which are drawn uniformly from 1..n_max."""
    value_max: int = 99
    """The largest result of any step, the target included; none is negative."""

    def __post_init__(self) -> None:
        require(self, "n", at_least=2, at_most=9, integer=True)
        require(self, "n_max", at_least=5, at_most=999, integer=True)
        require(self, "value_max", at_least=self.n_max, at_most=99_999, integer=True, note="no less than `n_max`")

    @property
    def max_prompt_length(self) -> int:
        """Characters of the longest prompt: n numbers, each followed by a space or ">", the target and ":"."""
        return self.n * (len(str(self.n_max)) + 1) + len(str(self.value_max)) + 1

    @property
    def max_completion_length(self) -> int:
        """Characters of the longest answer: a number, then an operator, a number, "=" and a result for every step."""
        number, value = len(str(self.n_max)), len(str(self.value_max))
        return number + (self.n - 1) * (1 + number + 1 + value)

    def verify(self, prompt: str, completion: str) -> float:
        """1.0 iff `completion` is a right answer to `prompt`, to the letter; 0.0 for any other text.

        Neither spaces nor line ends are forgiven, nor leading zeros, signs or digits of other scripts: what a policy is
        paid for should be one thing. A string does not show whether the end of the sequence was reached; nothing that was cut
        off after `max_completion_length` + 1 tokens can be right.
        """
        numbers, target = self.parse_prompt(prompt)
        first = _NUMBER.match(completion)
        if first is None or len(completion) > self.max_completion_length:  # nothing below reads an enormous number
            return 0.0
        used, value, at = [int(first[0])], int(first[0]), first.end()
        while step := _STEP.match(completion, at):
            sign, number, result = step.groups()
            used.append(int(number))
            value = OPERATIONS[sign](value, used[-1])
            if result != str(value) or value > self.value_max:
                return 0.0
            at = step.end()
        return float(at == len(completion) and sorted(used) == sorted(numbers) and value == target)

    def parse_prompt(self, prompt: str) -> tuple[list[int], int]:
        """The numbers and the target of a prompt; ValueError where these settings could not have drawn it."""
        match = _PROMPT.fullmatch(prompt)
        if match is None:
            raise ValueError(f"countdown: a prompt looks like '3 7 12>22:'; got {quote(prompt)}. Is it another task's?")
        numbers, target = [int(number) for number in match[1].split(" ")], int(match[2])
        if len(numbers) != self.n or max(numbers) > self.n_max or target > self.value_max:
            raise ValueError(f"countdown: {prompt!r} is no problem of {self}. Was it drawn with other settings?")
        return numbers, target

    def _propose(self, draw: Callable[[], float], wanted: Callable[[str], bool]) -> tuple[str, str] | None:
        """Uniform numbers and operators, where all fits; so an answer is drawn uniformly from all that reach its target."""
        numbers = [1 + int(draw() * self.n_max) for _ in range(self.n)]
        value, answer = numbers[0], str(numbers[0])
        for number in numbers[1:]:
            sign = OPERATORS[int(draw() * len(OPERATORS))]
            value = OPERATIONS[sign](value, number)
            if not 0 <= value <= self.value_max:
                return None
            answer += f"{sign}{number}={value}"
        if not wanted(canonical(numbers, value)):
            return None
        numbers.sort(key=lambda _: draw())  # the order of the numbers must not give the answer away
        return f"{' '.join(map(str, numbers))}>{value}:", answer


def canonical(numbers: Sequence[int], target: int) -> str:
    """A problem written in one way only, whatever the numbers' order: it decides, on any machine, what is held out."""
    return f"{' '.join(map(str, sorted(numbers)))}>{target}"
