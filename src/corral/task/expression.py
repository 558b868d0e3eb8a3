"""One-expression code completion: find a Python expression in x from what it gives. Nothing is executed."""

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from corral.task.draws import ProceduralTask, quote
from corral.validate import require

_PROMPT = re.compile(r"[1-9]>-?[0-9]{1,4}(?: [1-9]>-?[0-9]{1,4})*:")
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
        if _PROMPT.fullmatch(prompt) is None:
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
