"""Procedural tasks: countdown, expressions, arithmetic and word problems with two numbers, drawn from a random seed."""

import ast
import hashlib
import math
import operator
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice
from typing import ClassVar, TypeVar

from corral.validate import Checked, limited, require

# ------------------------------------------------------------------------------------------------------ drawing by seed

_Item = TypeVar("_Item")

_HELD_OUT_SHARE = 10
"""Reciprocal of the share of problems held out for evaluation: one problem in 10."""

MAX_MISSES = 100_000
"""Number of successive draws without a usable problem after which drawing stops with an error.

With fewer usable problems than 1 in 10,000, drawing would be hopeless.
"""


class SeededTask(Checked, ABC):
    """Base class of tasks whose prompts are drawn from a random seed.

    Subclasses define `_prompts`, and `verify` or `verify_all`.
    """

    name: ClassVar[str]

    @abstractmethod
    def _prompts(self, seed: int, *, held_out: bool) -> Iterator[str]:
        """Yield the prompts of one split (training or held out) in order."""

    def _first(self, number: int, drawn: Iterator[_Item]) -> list[_Item]:
        if number < 0:
            raise ValueError(f"{self.name}: `count` is a number of prompts and cannot be negative; got {number}.")
        return list(islice(drawn, number))

    def train_prompts(self, count: int, seed: int) -> list[str]:
        """Draw `count` prompts for training."""
        return self._first(count, self._prompts(seed, held_out=False))

    def held_out_prompts(self, count: int, seed: int) -> list[str]:
        """Draw `count` prompts for evaluation, or fewer if the task has fewer. No such problem is in training in any form."""
        return self._first(count, self._prompts(seed, held_out=True))

    def verify(self, prompt: str, completion: str) -> float:
        """Reward of a completion, which may be any text. Raises ValueError for a prompt of another task."""
        return self.verify_all([prompt], [completion])[0]

    def verify_all(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """Return the rewards of many completions. Some tasks grade completions in parallel."""
        return [self.verify(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]

    def foreign(self, prompt: str) -> ValueError:
        """Make the ValueError for a prompt of another task, because a reward of 0 would hide the mistake."""
        quoted = repr(prompt if len(prompt) <= 60 else prompt[:60] + "…")
        return ValueError(
            f"{self.name}: {quoted} is no prompt of this task. Is it another task's, or drawn with other settings than {self}?"
        )


class ProceduralTask(SeededTask):
    """Base class of tasks that generate problems with answers, drawn with replacement."""

    NO_PROBLEM: ClassVar[str] = "Try other settings."
    """Advice at the end of the error that is raised when no problem is found."""

    def _prompts(self, seed: int, *, held_out: bool) -> Iterator[str]:
        return (prompt for prompt, _ in self._draw(seed, held_out=held_out))

    def demonstrations(self, count: int, seed: int) -> list[tuple[str, str]]:
        """Draw the prompts of `train_prompts(count, seed)`, each with a correct answer."""
        return self._first(count, self._draw(seed, held_out=False))

    def _draw(self, seed: int, *, held_out: bool) -> Iterator[tuple[str, str]]:
        """Yield pairs (prompt, answer) of the training or the held-out problems, without end."""
        draw, misses = uniform(self.name, seed, held_out=held_out), 0
        while misses < MAX_MISSES:
            misses += 1
            problem = self._propose(draw, held_out)
            if problem is not None:
                yield problem
                misses = 0
        raise ValueError(
            f"{self}: no {'held-out' if held_out else 'training'} problem in {MAX_MISSES} draws. {self.NO_PROBLEM}"
        )

    @abstractmethod
    def _propose(self, draw: Callable[[], float], held_out: bool) -> tuple[str, str] | None:
        """Draw one pair (prompt, answer), or None if the draw is unusable or belongs to the other split.

        Args:
            draw: random numbers in 0..1.
            held_out: the split, which `in_held_out_share` decides for each problem.
        """


def uniform(task: str, seed: int, *, held_out: bool) -> Callable[[], float]:
    """Return a function that draws random numbers in [0, 1). The numbers depend only on task, split and seed."""
    # A text seeds through SHA-512, and random() alone is promised to give the same numbers in every Python version.
    return random.Random(f"{task} {'held out' if held_out else 'train'} {seed}").random


def in_held_out_share(text: str, share: int = _HELD_OUT_SHARE) -> bool:
    """True if the problem with this canonical text is held out, which only the text's hash decides."""
    return digest(text) % share == 0


def digest(text: str) -> int:
    """Hash a text to 64 bits. Lone surrogates, which UTF-8 cannot encode, are accepted."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def shuffled(items: Iterable[_Item], task: str, seed: int, *, held_out: bool) -> list[_Item]:
    """Shuffle `items`. Equal task, split and seed give an equal order on every machine."""
    draw = uniform(task, seed, held_out=held_out)
    return sorted(items, key=lambda _: draw())


def epochs(items: Sequence[_Item], task: str, seed: int) -> Iterator[_Item]:
    """Yield all training items again and again, in a new order on every pass."""
    return (item for epoch in count() for item in shuffled(items, f"{task} {epoch}", seed, held_out=False))


# ------------------------------------------------------------------------------------------------------------ countdown

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERATORS = "".join(OPERATIONS)


def chain(first: int, steps: Iterable[tuple[str, int]], largest: float) -> str:
    """Write a calculation as text, such as "3+7=10+12=22" for 3, (+, 7), (+, 12); "" if a result is not in 0..largest."""
    text, value = str(first), first
    for sign, number in steps:
        value = OPERATIONS[sign](value, number)
        if not 0 <= value <= largest:
            return ""
        text += f"{sign}{number}={value}"
    return text


# Numbers carry no leading zeros: they read as people write them, are shorter than two-digit fields (11.9 characters an
# answer instead of 14 at the default settings), and completions differ in length, as they do in every real task. The result
# of a step is the left operand of the next without being written twice. Digits are ASCII: \d would also take "٣".
_COUNTDOWN = re.compile(r"([1-9][0-9]{0,4}(?: [1-9][0-9]{0,4})+)>(0|[1-9][0-9]{0,4}):")
_OPERAND = re.compile(r"(?<![0-9=])[1-9][0-9]*")
_SIGN = re.compile(r"[+*-]")


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

    n: int = limited(3, at_least=2, at_most=9)
    """Count of the numbers in a problem. A completion has n − 1 steps."""
    n_max: int = limited(19, at_least=5, at_most=999)
    """Largest number in a problem. Numbers are drawn uniformly from 1..n_max."""
    value_max: int = 99
    """Largest result of any step, including the target. No result is negative."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "value_max", at_least=self.n_max, at_most=99_999, integer=True, note="no less than `n_max`")

    @property
    def max_completion_length(self) -> int:
        """Length of the longest correct answer, in characters.

        It is a number, then an operator, a number, "=" and a result for every step.
        """
        number, value = len(str(self.n_max)), len(str(self.value_max))
        return number + (self.n - 1) * (1 + number + 1 + value)

    def verify(self, prompt: str, completion: str) -> float:
        """Return the reward: 1.0 if the completion is exactly, character by character, a correct answer, else 0.0.

        Neither spaces nor line ends are forgiven, nor leading zeros, signs or digits of other scripts: what a policy is
        paid for should be one thing. A string does not show whether the end of the sequence was reached; nothing that was cut
        off after `max_completion_length` + 1 tokens can be right.
        """
        found = _COUNTDOWN.fullmatch(prompt)
        numbers = sorted(map(int, found[1].split(" "))) if found else []
        if not found or len(numbers) != self.n or numbers[-1] > self.n_max or int(found[2]) > self.value_max:
            raise self.foreign(prompt)
        if len(completion) > self.max_completion_length:  # nothing below reads an enormous number
            return 0.0
        # An answer is its numbers and signs: it is right iff it is what they give, written anew.
        operands = [*map(int, _OPERAND.findall(completion))]
        if sorted(operands) != numbers:
            return 0.0
        written = chain(operands[0], zip(_SIGN.findall(completion), operands[1:], strict=False), self.value_max)
        return float(completion == written and completion.endswith(f"={found[2]}"))

    def _propose(self, draw: Callable[[], float], held_out: bool) -> tuple[str, str] | None:
        """Draw a problem with uniform numbers and operators. Returns None if the problem is unusable or in the other split.

        Answers are thus uniform among all that reach their target.
        """
        numbers = [1 + int(draw() * self.n_max) for _ in range(self.n)]
        steps = ((OPERATORS[int(draw() * len(OPERATORS))], number) for number in numbers[1:])
        if not (answer := chain(numbers[0], steps, self.value_max)):
            return None
        target = answer.rpartition("=")[2]
        if in_held_out_share(f"{' '.join(map(str, sorted(numbers)))}>{target}") is not held_out:  # in whatever order
            return None
        numbers.sort(key=lambda _: draw())  # the order of the numbers must not give the answer away
        return f"{' '.join(map(str, numbers))}>{target}:", answer


# ---------------------------------------------------------------------------------------------------------- expressions

_EXPRESSION = re.compile(r"[1-9]>-?[0-9]{1,4}(?: [1-9]>-?[0-9]{1,4})*:")
_ALLOWED = re.compile(r"(?:[0-9]{1,4}|x|//|[-+*%()])*")
BOUND = 9999
"""Largest absolute value of an intermediate result in an expression."""

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_SIGNS = ("+", "-", "*", "//", "%")
_SHAPES = (
    "x{0}{a}", "{a}{0}x", "x{0}x{1}{a}", "x{0}{a}{1}{b}", "{a}{0}x{1}{b}", "(x{0}{a}){1}{b}", "(x{0}{a}){1}x",
    "x{0}x{1}{a}{2}{b}", "x{0}{a}{1}x{2}{b}", "(x{0}{a}){1}(x{2}{b})", "(x{0}{a}){1}x{2}{b}", "{a}{0}x{1}x{2}{b}",
)  # fmt: skip
"""Templates of expressions in x, with {0}, {1} and {2} for operators, and {a} and {b} for constants."""


@dataclass(frozen=True, kw_only=True)
class Expression(ProceduralTask):
    """Find an expression for f(x) from the values f(1), f(2), … The completion continues `f = lambda x: `.

        prompt      "1>3 2>5 3>7 4>9:"      inputs, always 1 to `pairs`, and outputs
        completion  "2*x+1"                 any expression that gives them: whole numbers, x, + - * // % and brackets, no spaces

    The reward is 1 iff the expression maps every input to its output, as Python would compute it, with nothing on the way
    beyond ±9999; else 0. The text is parsed with `ast`, checked against this grammar and evaluated here: it is never run.
    """

    name: ClassVar[str] = "expression"

    pairs: int = limited(4, at_least=2, at_most=9)
    """Number of pairs of input and output in the prompt."""
    constant_max: int = limited(9, at_least=1, at_most=99)
    """Largest constant in generated expressions. A model's answer may have larger constants."""
    value_max: int = limited(99, at_least=9, at_most=BOUND)
    """Largest absolute value of an output f(x)."""
    max_length: int = limited(16, at_least=9, at_most=64)
    """Length of the longest answer that is parsed, in characters."""

    @property
    def max_completion_length(self) -> int:
        """Length of the longest expression that is parsed, in characters."""
        return self.max_length

    def verify(self, prompt: str, completion: str) -> float:
        """Return the reward: 1.0 if the completion is an expression that gives every output in the prompt, else 0.0."""
        outputs = [int(pair.partition(">")[2]) for pair in prompt[:-1].split(" ")] if _EXPRESSION.fullmatch(prompt) else []
        if len(outputs) != self.pairs or max(map(abs, outputs)) > self.value_max or prompt != format_prompt(outputs):
            raise self.foreign(prompt)
        return float(self.outputs(completion) == outputs)

    def outputs(self, text: str) -> list[int] | None:
        """Evaluate an expression at x = 1, 2, … Returns None for a text outside the grammar, or if a value does not exist."""
        # Length and characters first: a short text of these alone can neither exhaust the parser nor make it warn.
        if len(text) > self.max_length or not _ALLOWED.fullmatch(text) or re.search(r"[0-9x]x|x[0-9]", text):
            return None
        try:
            tree = ast.parse(text, mode="eval").body
            return [_value(tree, x) for x in range(1, self.pairs + 1)]
        except (SyntaxError, ValueError, ArithmeticError, MemoryError, RecursionError):
            return None

    def _propose(self, draw: Callable[[], float], held_out: bool) -> tuple[str, str] | None:
        """Draw an expression from a template with random operators and constants, or return None if it makes no usable problem.

        Inputs never vary, so whatever gives the same outputs is the same problem, and held out with it.
        """
        a, b = (1 + int(draw() * self.constant_max) for _ in range(2))
        shape = _SHAPES[int(draw() * len(_SHAPES))]
        text = shape.format(*(_SIGNS[int(draw() * len(_SIGNS))] for _ in range(3)), a=a, b=b)
        outputs = self.outputs(text)
        # A constant says nothing of x.
        if outputs is None or max(map(abs, outputs)) > self.value_max or len(set(outputs)) == 1:
            return None
        prompt = format_prompt(outputs)
        return (prompt, text) if in_held_out_share(prompt) is held_out else None


def format_prompt(outputs: list[int]) -> str:
    """Format the prompt of an expression problem from its outputs f(1), f(2), …: "1>3 2>5 3>7:"."""
    return " ".join(f"{x}>{output}" for x, output in enumerate(outputs, 1)) + ":"


def _value(tree: ast.expr, x: int) -> int:
    """Evaluate a parsed expression at x.

    Raises ArithmeticError for division by zero or beyond ±BOUND, ValueError outside the grammar.
    """
    match tree:
        case ast.Constant(value=int(value)):
            pass
        case ast.Name():  # `_ALLOWED` has no other name than x
            value = x
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            value = -_value(inner, x)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            value = _OPERATIONS[type(operation)](_value(left, x), _value(right, x))
        case _:
            raise ValueError("not in the grammar")
    if abs(value) > BOUND:
        raise OverflowError
    return value


# ----------------------------------------------------------------------------------------------------------- arithmetic

_ARITHMETIC = re.compile(r"([1-9][0-9]{0,5})([+*-])([1-9][0-9]{0,5}):")
_STEP = re.compile(r"([+*-])([1-9][0-9]*)=")


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
    """Operations that occur in problems: one or more of + - *."""
    digits: int = limited(2, at_least=1, at_most=6)
    """Number of digits of the longest operand. Operands are drawn uniformly from 1 to 10^digits − 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.operations
        if not isinstance(given, str) or not given or len(set(given)) < len(given) or not set(given) <= set(OPERATORS):
            raise ValueError(f"arithmetic: `operations` is one or more of + - *, each once; got {given!r}.")

    @property
    def max_completion_length(self) -> int:
        """Length of the longest correct answer, in characters. Operands such as 99+99, 99*99 and 99-11 need this length."""
        largest, ones = 10**self.digits - 1, int("1" * self.digits)
        return max(len(_solution(largest, sign, places(ones if sign == "-" else largest))) for sign in self.operations)

    def verify(self, prompt: str, completion: str) -> float:
        """Return the reward: 1.0 if the completion is exactly, character by character, a correct answer, else 0.0."""
        found = _ARITHMETIC.fullmatch(prompt)
        left, operation, right = (int(found[1]), found[2], int(found[3])) if found else (0, "", 0)
        known = operation and operation in self.operations and max(left, right) < 10**self.digits
        if not known or (operation == "-" and left < right):
            raise self.foreign(prompt)
        if len(completion) > self.max_completion_length:  # nothing below reads an enormous number
            return 0.0
        order = [int(number) for sign, number in _STEP.findall(completion) if sign == operation]
        return float(sorted(order) == sorted(places(right)) and completion == _solution(left, operation, order))

    def _propose(self, draw: Callable[[], float], held_out: bool) -> tuple[str, str] | None:
        """Draw a problem with uniform operands, and write its answer. Problems a+b and b+a are in the same split.

        The answer adds places from highest to lowest.
        """
        operation = self.operations[int(draw() * len(self.operations))]
        left, right = (1 + int(draw() * (10**self.digits - 1)) for _ in range(2))
        low, high = sorted((left, right))
        if in_held_out_share(f"{low}{operation}{high}") is not held_out:
            return None
        if operation == "-":
            left, right = high, low  # nothing is negative
        return f"{left}{operation}{right}:", _solution(left, operation, places(right))


def places(number: int) -> list[int]:
    """Split a number into its decimal places: 473 → 400, 70, 3. Zeros are left out."""
    digits = str(number)
    return [int(digit) * 10 ** (len(digits) - 1 - at) for at, digit in enumerate(digits) if digit != "0"]


def _solution(left: int, operation: str, order: Sequence[int]) -> str:
    """Write an arithmetic answer with every step, taking the right operand's decimal places in the given order."""
    if operation != "*":
        return chain(left, [(operation, place) for place in order], math.inf)
    products = [left * place for place in order]
    lines = [f"{left}*{place}={product}" for place, product in zip(order, products, strict=True)]
    totals = accumulate(products)
    lines += [f"{total}+{product}={total + product}" for total, product in zip(totals, products[1:], strict=False)]
    return ",".join(lines)


# -------------------------------------------------------------------------------------------- two numbers in a sentence

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
"""Texts of the word problems, each with its operation. {a} is the larger number, so that no result is negative."""


@dataclass(frozen=True, kw_only=True)
class TwoNumbers(ProceduralTask):
    """Add, subtract or multiply two numbers in a word problem. The last whole number in the completion is the answer.

        prompt      "Of 81 apples in a crate, 27 are sold. How many apples are left?"   completion  "There are 54 apples left."

    The reward is 1 iff that number is the result, else 0; commas within it are left out, a sign before it too.
    """

    name: ClassVar[str] = "two_numbers"

    number_max: int = limited(99, at_least=2, at_most=999)
    """Largest number in problems with addition or subtraction. The smallest number is 2."""
    factor_max: int = limited(12, at_least=2, at_most=999)
    """Largest factor in a multiplication."""

    @property
    def max_completion_length(self) -> int:
        """Number of tokens for an answer in a short sentence."""
        return 24

    def verify(self, prompt: str, completion: str) -> float:
        """Return the reward: 1.0 if the last whole number in the completion is the correct result, else 0.0."""
        a, b = map(int, [*re.findall(r"[0-9]+", prompt[:200]), 0, 0][:2])
        results = [
            compute(a, b) for text, compute in _STORIES if prompt == text.format(a=a, b=b) and b <= a <= self._largest(compute)
        ]
        if not results or b < 2:
            raise self.foreign(prompt)
        numbers = re.findall(r"[0-9]+", completion.replace(",", ""))
        return float(bool(numbers) and numbers[-1] == str(results[0]))

    def _largest(self, compute: Callable[[int, int], int]) -> int:
        return self.factor_max if compute is operator.mul else self.number_max

    def _propose(self, draw: Callable[[], float], held_out: bool) -> tuple[str, str] | None:
        text, compute = _STORIES[int(draw() * len(_STORIES))]
        b, a = sorted(2 + int(draw() * (self._largest(compute) - 1)) for _ in range(2))
        problem = text.format(a=a, b=b)
        return (problem, str(compute(a, b))) if in_held_out_share(problem) is held_out else None
