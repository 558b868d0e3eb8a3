"""Procedural tasks: countdown, expressions, arithmetic and word problems with two numbers, drawn by seed."""

import ast
import hashlib
import math
import operator
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import ClassVar, TypeVar

from corral.validate import require

# ------------------------------------------------------------------------------------------------------ drawing by seed

_Item = TypeVar("_Item")

_HELD_OUT_SHARE = 10
"""One problem in this many is held out."""

MAX_MISSES = 100_000
"""Draws without a problem of the wanted kind after which there is none; below 1 in 10,000 drawing would be hopeless anyway."""


class ProceduralTask(ABC):
    """A task that draws its problems: training and held-out ones by seed, each with an answer."""

    name: ClassVar[str]
    NO_PROBLEM: ClassVar[str] = "Try other settings."
    """Advice where no problem is found."""
    PROMPT: ClassVar[re.Pattern[str]]
    """Form of a prompt, of any settings."""
    EXAMPLE: ClassVar[str]
    """A prompt, for the message about a text that is none."""

    def train_prompts(self, count: int, seed: int) -> list[str]:
        """`count` prompts to learn from, drawn with replacement."""
        return [prompt for prompt, _ in self.demonstrations(count, seed)]

    def held_out_prompts(self, count: int, seed: int) -> list[str]:
        """`count` prompts to evaluate on, which training never sees in any form."""
        return [prompt for prompt, _ in islice(self._draw(seed, held_out=True), require_count(self.name, count))]

    def demonstrations(self, count: int, seed: int) -> list[tuple[str, str]]:
        """`train_prompts(count, seed)`, each with a right answer."""
        return list(islice(self._draw(seed, held_out=False), require_count(self.name, count)))

    @abstractmethod
    def verify(self, prompt: str, completion: str) -> float:
        """1.0 iff `completion` is a right answer; 0.0 for any other text.

        Args:
            prompt: as drawn by this task; anything else is a ValueError, since a reward of 0 would hide the mistake.
            completion: any text at all, without the tokens that end it.
        """

    def _match(self, prompt: str) -> re.Match[str]:
        """The parts of a prompt; ValueError for a text that has another form."""
        found = self.PROMPT.fullmatch(prompt)
        if found is None:
            raise ValueError(f"{self.name}: a prompt looks like {self.EXAMPLE!r}; got {quote(prompt)}. Is it another task's?")
        return found

    def _not_drawn(self, prompt: str) -> ValueError:
        """The error about a prompt that these settings cannot have drawn."""
        return ValueError(f"{self.name}: {quote(prompt)} is no problem of {self}. Was it drawn with other settings?")

    def _draw(self, seed: int, *, held_out: bool) -> Iterator[tuple[str, str]]:
        """Endless (prompt, answer) of one split."""
        draw, misses = uniform(self.name, seed, held_out=held_out), 0
        while misses < MAX_MISSES:
            misses += 1
            problem = self._propose(draw, lambda text: in_held_out_share(text) is held_out)
            if problem is not None:
                yield problem
                misses = 0
        raise ValueError(
            f"{self}: no {'held-out' if held_out else 'training'} problem in {MAX_MISSES} draws. {self.NO_PROBLEM}"
        )

    @abstractmethod
    def _propose(self, draw: Callable[[], float], wanted: Callable[[str], bool]) -> tuple[str, str] | None:
        """One (prompt, answer), or None where what was drawn is no problem or of the other split.

        Args:
            draw: random numbers in 0..1.
            wanted: whether a problem, written in one way only, is of the split that is drawn from.
        """


def uniform(task: str, seed: int, *, held_out: bool) -> Callable[[], float]:
    """Numbers in 0..1, the same for the same task, split and seed on every machine."""
    # A text seeds through SHA-512, and random() alone is promised to give the same numbers in every Python version.
    return random.Random(f"{task} {'held out' if held_out else 'train'} {seed}").random


def in_held_out_share(text: str, share: int = _HELD_OUT_SHARE) -> bool:
    """True if a problem, written in one way only, is for evaluation only. It depends on nothing else."""
    return digest(text) % share == 0


def digest(text: str) -> int:
    """64 bits that stand for a text; lone surrogates, which no UTF-8 has, are a text too."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def shuffled(items: Sequence[_Item], task: str, seed: int, *, held_out: bool) -> list[_Item]:
    """`items` in a random order, the same for the same task, split and seed on every machine."""
    draw = uniform(task, seed, held_out=held_out)
    return sorted(items, key=lambda _: draw())


def require_count(task: str, count: int) -> int:
    """A number of prompts, or the reason why it is none."""
    if count < 0:
        raise ValueError(f"{task}: `count` is a number of prompts and cannot be negative; got {count}.")
    return count


def quote(prompt: str, length: int = 60) -> str:
    """A prompt as an error quotes it."""
    return repr(prompt if len(prompt) <= length else prompt[:length] + "…")


# ------------------------------------------------------------------------------------------------------------ countdown

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERATORS = "".join(OPERATIONS)


def chain(first: int, steps: Iterable[tuple[str, int]], largest: float = math.inf) -> str | None:
    """3, (+, 7), (+, 12) → "3+7=10+12=22"; None as soon as a result leaves 0..largest."""
    text, value = str(first), first
    for sign, number in steps:
        value = OPERATIONS[sign](value, number)
        if not 0 <= value <= largest:
            return None
        text += f"{sign}{number}={value}"
    return text


# Numbers carry no leading zeros: they read as people write them, are shorter than two-digit fields (11.9 characters an
# answer instead of 14 at the default settings), and completions differ in length, as they do in every real task. The result
# of a step is the left operand of the next without being written twice. Digits are ASCII: \d would also take "٣".
_NUMBER = re.compile(r"[1-9][0-9]*")
_STEP = re.compile(r"([+*-])([1-9][0-9]*)=")


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
    PROMPT: ClassVar[re.Pattern[str]] = re.compile(r"([1-9][0-9]{0,4}(?: [1-9][0-9]{0,4})+)>(0|[1-9][0-9]{0,4}):")
    EXAMPLE: ClassVar[str] = "3 7 12>22:"

    n: int = 3
    """Number of numbers; a completion has n − 1 steps."""
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
        # An answer is its numbers and signs: it is right iff it is what they give, written anew.
        start, steps = int(first[0]), [(sign, int(number)) for sign, number in _STEP.findall(completion)]
        same_numbers = sorted([start, *(number for _, number in steps)]) == sorted(numbers)
        written = same_numbers and completion == chain(start, steps, self.value_max)
        return float(written and completion.endswith(f"={target}"))

    def parse_prompt(self, prompt: str) -> tuple[list[int], int]:
        """The numbers and the target of a prompt; ValueError where these settings could not have drawn it."""
        found = self._match(prompt)
        numbers, target = [int(number) for number in found[1].split(" ")], int(found[2])
        if len(numbers) != self.n or max(numbers) > self.n_max or target > self.value_max:
            raise self._not_drawn(prompt)
        return numbers, target

    def _propose(self, draw: Callable[[], float], wanted: Callable[[str], bool]) -> tuple[str, str] | None:
        """Uniform numbers and operators, where all fits; so an answer is drawn uniformly from all that reach its target."""
        numbers = [1 + int(draw() * self.n_max) for _ in range(self.n)]
        steps = ((OPERATORS[int(draw() * len(OPERATORS))], number) for number in numbers[1:])
        answer = chain(numbers[0], steps, self.value_max)
        if answer is None or not wanted(canonical(numbers, target := int(answer.rpartition("=")[2]))):
            return None
        numbers.sort(key=lambda _: draw())  # the order of the numbers must not give the answer away
        return f"{' '.join(map(str, numbers))}>{target}:", answer


def canonical(numbers: Sequence[int], target: int) -> str:
    """A problem written in one way only, whatever the numbers' order: it decides, on any machine, what is held out."""
    return f"{' '.join(map(str, sorted(numbers)))}>{target}"


# ---------------------------------------------------------------------------------------------------------- expressions

_ALLOWED = re.compile(r"(?:[0-9]{1,4}|x|//|[-+*%()])*")
BOUND = 9999
"""Largest absolute value of an intermediate result."""

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
"""Templates of expressions, with operators 0, 1 and 2 and constants a and b."""


@dataclass(frozen=True, kw_only=True)
class Expression(ProceduralTask):
    """Complete `f = lambda x: …`, given f(1), f(2), …

        prompt      "1>3 2>5 3>7 4>9:"      inputs, always 1 to `pairs`, and outputs
        completion  "2*x+1"                 any expression that gives them: whole numbers, x, + - * // % and brackets, no spaces

    The reward is 1 iff the expression maps every input to its output, as Python would compute it, with nothing on the way
    beyond ±9999; else 0. The text is parsed with `ast`, checked against this grammar and evaluated here: it is never run.
    """

    name: ClassVar[str] = "expression"
    PROMPT: ClassVar[re.Pattern[str]] = re.compile(r"[1-9]>-?[0-9]{1,4}(?: [1-9]>-?[0-9]{1,4})*:")
    EXAMPLE: ClassVar[str] = "1>3 2>5 3>7 4>9:"

    pairs: int = 4
    """Number of inputs shown."""
    constant_max: int = 9
    """The largest constant of the expressions that problems are made from; an answer may have larger ones."""
    value_max: int = 99
    """The largest absolute value of an output."""
    max_length: int = 16
    """Characters of the longest expression that is read."""

    def __post_init__(self) -> None:
        require(self, "pairs", at_least=2, at_most=9, integer=True)
        require(self, "constant_max", at_least=1, at_most=99, integer=True)
        require(self, "value_max", at_least=9, at_most=BOUND, integer=True)
        require(self, "max_length", at_least=9, at_most=64, integer=True)

    @property
    def max_prompt_length(self) -> int:
        """Characters of the longest prompt: an input, ">", an output with its sign, and a space or ":" for every pair."""
        return self.pairs * (1 + 1 + 1 + len(str(self.value_max)) + 1)

    @property
    def max_completion_length(self) -> int:
        """Characters of the longest expression that is read."""
        return self.max_length

    def verify(self, prompt: str, completion: str) -> float:
        """1.0 iff `completion` is an expression that gives every output of `prompt`; 0.0 for any other text."""
        outputs = self.parse_prompt(prompt)
        tree = parse(completion, self.max_length)
        return float(tree is not None and [evaluate(tree, x) for x in range(1, self.pairs + 1)] == outputs)

    def parse_prompt(self, prompt: str) -> list[int]:
        """f(1), f(2), …; ValueError where these settings could not have drawn it."""
        self._match(prompt)
        outputs = [int(pair.partition(">")[2]) for pair in prompt[:-1].split(" ")]
        if prompt != format_prompt(outputs) or len(outputs) != self.pairs or max(map(abs, outputs)) > self.value_max:
            raise self._not_drawn(prompt)
        return outputs

    def _propose(self, draw: Callable[[], float], wanted: Callable[[str], bool]) -> tuple[str, str] | None:
        """A shape, operators and constants, where all fits.

        Inputs never vary, so whatever gives the same outputs is the same problem, and held out with it.
        """
        a, b = (1 + int(draw() * self.constant_max) for _ in range(2))
        shape = _SHAPES[int(draw() * len(_SHAPES))]
        text = shape.format(*(_SIGNS[int(draw() * len(_SIGNS))] for _ in range(3)), a=a, b=b)
        tree = parse(text, self.max_length)
        outputs = [None if tree is None else evaluate(tree, x) for x in range(1, self.pairs + 1)]
        found = [value for value in outputs if value is not None and abs(value) <= self.value_max]
        if len(found) < self.pairs or len(set(found)) == 1:  # a constant says nothing of x
            return None
        prompt = format_prompt(found)
        return (prompt, text) if wanted(prompt) else None


def format_prompt(outputs: list[int]) -> str:
    """The prompt that shows f(1), f(2), …"""
    return " ".join(f"{x}>{output}" for x, output in enumerate(outputs, 1)) + ":"


def parse(text: str, max_length: int) -> ast.expr | None:
    """The tree of an expression of the grammar; None for any other text."""
    # Length and characters first: a short text of these alone can neither exhaust the parser nor make it warn.
    if len(text) > max_length or not _ALLOWED.fullmatch(text) or re.search(r"[0-9x]x|x[0-9]", text):
        return None
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    return tree if all(map(_is_allowed, ast.walk(tree))) else None


def _is_allowed(node: ast.AST) -> bool:
    """True if a node of a tree is a whole number, x, an operation of the grammar or a minus sign."""
    match node:
        case ast.Constant(value=value):
            return type(value) is int
        case ast.Name(id=name):
            return name == "x"
    return isinstance(node, (ast.BinOp, ast.UnaryOp, ast.USub, ast.Load, *_OPERATIONS))


def evaluate(tree: ast.expr, x: int) -> int | None:
    """The value of a tree that `parse` allowed; None where it divides by zero or leaves ±BOUND."""
    try:
        return _value(tree, x)
    except ArithmeticError:
        return None


def _value(tree: ast.expr, x: int) -> int:
    """The value of a tree; an ArithmeticError where there is none."""
    match tree:
        case ast.Constant(value=int(value)):
            pass
        case ast.UnaryOp(operand=inner):
            value = -_value(inner, x)
        case ast.BinOp(left=left, op=operation, right=right):
            value = _OPERATIONS[type(operation)](_value(left, x), _value(right, x))
        case _:
            value = x
    if abs(value) > BOUND:
        raise OverflowError
    return value


# ----------------------------------------------------------------------------------------------------------- arithmetic


@dataclass(frozen=True, kw_only=True)
class Arithmetic(ProceduralTask):
    """Compute a+b, a-b or a*b, and write down every step.

        prompt      "47+85:"   completion  "47+80=127+5=132"                       the places of b, in any order
        prompt      "85-47:"   completion  "85-40=45-7=38"
        prompt      "23*47:"   completion  "23*40=920,23*7=161,920+161=1081"       products in any order, then their running sum

    The reward is 1 iff the format, every step's arithmetic and the result are right; else 0. A place that is 0 has no step.
    """

    name: ClassVar[str] = "arithmetic"
    PROMPT: ClassVar[re.Pattern[str]] = re.compile(r"([1-9][0-9]{0,5})([+*-])([1-9][0-9]{0,5}):")
    EXAMPLE: ClassVar[str] = "47+85:"

    operations: str = "+-*"
    """The operations that occur, of + - *."""
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
        return max(len(_solution(largest, sign, places(ones if sign == "-" else largest))) for sign in self.operations)

    def verify(self, prompt: str, completion: str) -> float:
        """1.0 iff `completion` is a right answer to `prompt`, to the letter; 0.0 for any other text."""
        left, operation, right = self.parse_prompt(prompt)
        if len(completion) > self.max_completion_length:  # nothing below reads an enormous number
            return 0.0
        order = [int(number) for sign, number in _STEP.findall(completion) if sign == operation]
        return float(sorted(order) == sorted(places(right)) and completion == _solution(left, operation, order))

    def parse_prompt(self, prompt: str) -> tuple[int, str, int]:
        """a, the operation and b; ValueError where these settings could not have drawn it."""
        found = self._match(prompt)
        left, operation, right = int(found[1]), found[2], int(found[3])
        if operation not in self.operations or max(left, right) >= 10**self.digits or (operation == "-" and left < right):
            raise self._not_drawn(prompt)
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
        return f"{left}{operation}{right}:", _solution(left, operation, places(right))


def places(number: int) -> list[int]:
    """473 → 400, 70, 3; places that are 0 are left out."""
    digits = str(number)
    return [int(digit) * 10 ** (len(digits) - 1 - at) for at, digit in enumerate(digits) if digit != "0"]


def _solution(left: int, operation: str, order: Sequence[int]) -> str:
    """The answer with every step, for the places of the right operand in this order."""
    if operation != "*":
        text = chain(left, ((operation, place) for place in order))
        assert text is not None  # a is no smaller than b, so no difference is negative
        return text
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
"""Text, and what to compute; a is the larger number, so that nothing is negative."""
_PATTERNS = [re.compile(re.escape(text).replace(r"\{a\}", "([0-9]+)").replace(r"\{b\}", "([0-9]+)")) for text, _ in _STORIES]
_WRITTEN_NUMBER = re.compile(r"[0-9]+")


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
        numbers = _WRITTEN_NUMBER.findall(completion.replace(",", ""))
        return float(bool(numbers) and numbers[-1] == str(compute(a, b)))

    def _parse(self, prompt: str) -> tuple[Callable[[int, int], int], int, int]:
        """The operation and the two numbers of a prompt; ValueError where these settings could not have drawn it."""
        for pattern, (text, compute) in zip(_PATTERNS, _STORIES, strict=True):
            if found := pattern.fullmatch(prompt):
                a, b = int(found[1]), int(found[2])
                if prompt == text.format(a=a, b=b) and 2 <= b <= a <= self._largest(compute):
                    return compute, a, b
        raise ValueError(f"two_numbers: {quote(prompt)} is no problem of {self}. Is it another task's, or of other settings?")

    def _largest(self, compute: Callable[[int, int], int]) -> int:
        return self.factor_max if compute is operator.mul else self.number_max

    def _propose(self, draw: Callable[[], float], wanted: Callable[[str], bool]) -> tuple[str, str] | None:
        text, compute = _STORIES[int(draw() * len(_STORIES))]
        b, a = sorted(2 + int(draw() * (self._largest(compute) - 1)) for _ in range(2))
        problem = text.format(a=a, b=b)
        return (problem, str(compute(a, b))) if wanted(problem) else None
