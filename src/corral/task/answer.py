r"""Answer extraction: the one answer of a completion, and the one number of an answer.

The first form that occurs counts, and of that form the last occurrence:

    1. \boxed{…}   the outermost box that was closed last; braces nest, \{ and \} are not braces
    2. #### …      the rest of the line
    3. a number    with its sign, thousands separators, decimals, power of ten (1e5), or as a fraction a/b

So there is one answer and one chance: a list of all numbers is graded by its last, and several boxes by the last box. Text is
not LaTeX that is compiled: a box counts wherever it stands, in code blocks and behind % too. A box that is empty is an empty
answer, whatever stands elsewhere; one that is never closed is no box.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Literal

AnswerForm = Literal["boxed", "####", "number"]

LONGEST = 1000
"""Characters of the longest answer that is looked at. The longest of the known data sets have about 150."""

_LONGEST_NUMBER = 60
"""Characters of the longest number that is read."""

_BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_POWER = r"(?:[eE][-+]?[0-9]{1,2})?"
# Not a number, but the beginning of something else: 1.2.3, 0x10, 5x10, 1_000, 1e100, 4².
_GOES_ON = r"\.?[0-9]|[eExX_][-+]?[0-9]|[\u00b2\u00b3\u00b9\u2070-\u2079]"
_NUMBER = re.compile(rf"(?:(?<![\w.,)\]}}])[-+])?(?<![A-Za-z0-9_.])(?:{_DIGITS}){_POWER}(?:\s?/\s?[0-9]+)?(?!{_GOES_ON})")
_NUMBER_START = re.compile(r"(?<![A-Za-z0-9_.,])[0-9]")
_CHANGES_NUMBER = re.compile(r"[√±]|\\(?:sqrt|pm|log|ln|sin|cos|tan)(?![A-Za-z])")
"""What makes another number of the one behind it, or two."""
_FRACTION = re.compile(r"(-?)\\[dt]?frac\s*(?:\{\s*(-?)([0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))")
_SEPARATORS = str.maketrans({"\u2212": "-", "\ufe63": "-", "\uff0d": "-", "\uff0c": ",", "\uff0e": ".", "\uff05": "%"})
"""Characters that people and models write for - , . and %."""


@dataclass(frozen=True)
class Answer:
    """An extracted answer, and the form in which it was given."""

    text: str
    form: AnswerForm


def extract(completion: str) -> Answer | None:
    """The answer of a completion, by the order above; None where there is none at all. Linear in the text's length."""
    text = ascii_digits(completion)
    box = last_box(text)
    if box is not None:
        return Answer(box.strip(), "boxed")
    _, mark, after = text.rpartition("####")
    if mark:
        return Answer(after.partition("\n")[0].strip(), "####")
    number = None
    for number in _NUMBER.finditer(text):  # noqa: B007 (the last one is wanted)
        pass
    return None if number is None else Answer(number[0], "number")


def last_box(text: str) -> str | None:
    r"""The content of the outermost \boxed{…} that was closed last; a box that holds but a box is that box."""
    opened: list[re.Match[str]] = []
    closed: tuple[int, int] | None = None
    for step, token in _braces(text):
        if step > 0:
            opened.append(token)
        elif opened:
            start = opened.pop()
            if len(start[0]) > 1:  # a box's
                closed = (start.end(), token.start())
    if closed is None:
        return None
    found = text[slice(*closed)].strip()
    while (inner := re.match(r"\\boxed\s*\{", found)) and len(found) <= LONGEST and _closes_at_end(found):
        found = found[inner.end() : -1].strip()
    return found


def _braces(text: str) -> Iterator[tuple[int, re.Match[str]]]:
    r"""+1 for every { or \boxed{, −1 for every }, each with its place; \{ and \} are not braces."""
    for token in _BRACE.finditer(text):
        if token[0] == "}":
            yield -1, token
        elif token[0][-1] == "{" and token[0] != r"\{":
            yield 1, token


def ascii_digits(text: str) -> str:
    """`text` with the decimal digits of every script as 0 to 9, and minus signs as -. Superscripts stay what they are."""
    if text.isascii():
        return text
    digits = {ord(letter): str(unicodedata.decimal(letter)) for letter in set(text) if letter.isdecimal()}
    return text.translate(digits).translate(_SEPARATORS)


def is_balanced(text: str) -> bool:
    """Whether every brace of an answer has its partner, so that nothing that is put around it can be closed from inside."""
    depths = list(accumulate((step for step, _ in _braces(text)), initial=0))
    return min(depths) == depths[-1] == 0


def one_number(answer: str) -> Fraction | None:
    r"""The number of an answer, where there is exactly one.

    Words, units, currency and percent signs around it are passed over: "42 apples", "$1,234.50", "x = 42", "50\%" is 50.
    "42 or 43", "6*7" and "3 1/2" have several and so are none; nothing is computed, so neither is \sqrt{16} or 4².
    """
    if len(answer) > LONGEST or _CHANGES_NUMBER.search(answer):
        return None
    text = ascii_digits(answer)
    for noise in (r"\$", "$", r"\!", r"\,", r"\;", r"\%"):
        text = text.replace(noise, "")
    text = _FRACTION.sub(_with_slash, text.replace("{,}", ","))
    text = re.sub(r"(?<=[A-Za-z}])\^(?:[0-9]|\{[0-9]\})", "", text)  # cm^2
    found = list(_NUMBER.finditer(text))
    if len(found) != 1 or len(found[0][0]) > _LONGEST_NUMBER:
        return None
    if any(digit.start() not in range(*found[0].span()) for digit in _NUMBER_START.finditer(text)):  # of what is no number: 4²
        return None
    return _as_fraction(found[0][0])


def _as_fraction(number: str) -> Fraction | None:
    """A matched number as an exact fraction; None for a division by zero."""
    whole, _, under = re.sub(r"[\s,]", "", number).partition("/")
    if under and int(under) == 0:
        return None
    return Fraction(whole) / (int(under) if under else 1)


def _with_slash(fraction: re.Match[str]) -> str:
    r"""-\frac{1}{2} → -1/2."""
    before, inside, over, over_digit, under, under_digit = fraction.groups()
    return f" {'-' if before != (inside or '') else ''}{over or over_digit}/{under or under_digit} "


def _closes_at_end(text: str) -> bool:
    r"""Whether the box that begins `text` is closed by its last character."""
    depth = 0
    for step, token in _braces(text):
        depth += step
        if depth == 0:
            return token.end() == len(text)
    return False
