"""Procedural tasks: countdown, expressions, arithmetic and word problems with two numbers, drawn by seed."""

import ast
import hashlib
import operator
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from corral.validate import require

_HELD_OUT_SHARE = 10
"""One problem in this many is held out."""

MAX_MISSES = 100_000
"""Draws without a problem of the wanted kind after which there is none; below 1 in 10,000 drawing would be hopeless anyway."""


class ProceduralTask(ABC):
    """A task that draws its problems: training and held-out ones by seed, each with an answer."""

    name: ClassVar[str]
    NO_PROBLEM: ClassVar[str] = "Try other settings."
    """What to do where none is found."""

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
    """Whether a problem, written in one way only, is for evaluation only. It depends on nothing else."""
    return digest(text) % share == 0


def digest(text: str) -> int:
    """64 bits that stand for a text; lone surrogates, which no UTF-8 has, are a text too."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def permutation(count: int, draw: Callable[[], float]) -> list[int]:
    """0 to count − 1 in a random order."""
    keys = [draw() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)


def require_count(task: str, count: int) -> int:
    """A number of prompts, or the reason why it is none."""
    if count < 0:
        raise ValueError(f"{task}: `count` is a number of prompts and cannot be negative; got {count}.")
    return count


def quote(prompt: str, length: int = 60) -> str:
    """A prompt as an error quotes it."""
    return repr(prompt if len(prompt) <= length else prompt[:length] + "…")


OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERATORS = "".join(OPERATIONS)

# Numbers carry no leading zeros: they read as people write them, are shorter than two-digit fields (11.9 characters an
# answer instead of 14 at the default settings), and completions differ in length, as they do in every real task. The result
# of a step is the left operand of the next without being written twice. Digits are ASCII: \d would also take "٣".
_NUMBER = re.compile(r"[1-9][0-9]*")
_COUNTDOWN_PROMPT = re.compile(r"([1-9][0-9]{0,4}(?: [1-9][0-9]{0,4})+)>(0|[1-9][0-9]{0,4}):")
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
        match = _COUNTDOWN_PROMPT.fullmatch(prompt)
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


_EXPRESSION_PROMPT = re.compile(r"[1-9]>-?[0-9]{1,4}(?: [1-9]>-?[0-9]{1,4})*:")
_ALLOWED = re.compile(r"(?:[0-9]{1,4}|x|//|[-+*%()])*")
BOUND = 9999
"""The largest absolute value of anything on the way."""

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
"""What expressions are drawn from: operators 0, 1 and 2, constants a and b."""


@dataclass(frozen=True, kw_only=True)
class Expression(ProceduralTask):
    """Complete `f = lambda x: …`, given f(1), f(2), …

        prompt      "1>3 2>5 3>7 4>9:"      inputs, always 1 to `pairs`, and outputs
        completion  "2*x+1"                 any expression that gives them: whole numbers, x, + - * // % and brackets, no spaces

    The reward is 1 iff the expression maps every input to its output, as Python would compute it, with nothing on the way
    beyond ±9999; else 0. The text is parsed with `ast`, checked against this grammar and evaluated here: it is never run.
    """

    name: ClassVar[str] = "expression"

    pairs: int = 4
    """How many inputs are shown."""
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
        if tree is None:
            return 0.0
        return float(all(evaluate(tree, x) == output for x, output in enumerate(outputs, 1)))

    def parse_prompt(self, prompt: str) -> list[int]:
        """f(1), f(2), …; ValueError where these settings could not have drawn it."""
        if _EXPRESSION_PROMPT.fullmatch(prompt) is None:
            raise ValueError(f"expression: a prompt looks like '1>3 2>5 3>7 4>9:'; got {quote(prompt)}. Is it another task's?")
        pairs = [pair.split(">") for pair in prompt[:-1].split(" ")]
        outputs = [int(output) for _, output in pairs]
        if prompt != format_prompt(outputs) or len(outputs) != self.pairs or max(map(abs, outputs)) > self.value_max:
            raise ValueError(f"expression: {quote(prompt)} is no problem of {self}. Was it drawn with other settings?")
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
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    if isinstance(node, ast.Name):
        return node.id == "x"
    return isinstance(node, (ast.BinOp, ast.UnaryOp, ast.USub, ast.Load, *_OPERATIONS))


def evaluate(tree: ast.expr, x: int) -> int | None:
    """The value of a tree that `parse` allowed; None where it divides by zero or leaves ±BOUND."""
    if isinstance(tree, ast.Constant):
        assert isinstance(tree.value, int)
        value = tree.value
    elif isinstance(tree, ast.Name):
        value = x
    elif isinstance(tree, ast.UnaryOp):
        inner = evaluate(tree.operand, x)
        if inner is None:
            return None
        value = -inner
    else:
        assert isinstance(tree, ast.BinOp)
        left, right = evaluate(tree.left, x), evaluate(tree.right, x)
        if left is None or right is None:
            return None
        try:
            value = _OPERATIONS[type(tree.op)](left, right)
        except ZeroDivisionError:
            return None
    return value if abs(value) <= BOUND else None


_ARITHMETIC_PROMPT = re.compile(r"([1-9][0-9]{0,5})([+*-])([1-9][0-9]{0,5}):")
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
        match = _ARITHMETIC_PROMPT.fullmatch(prompt)
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
