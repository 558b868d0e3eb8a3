"""Grading of mathematics: extract a completion's final answer, and compare it with the reference, using math-verify."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

from corral.lab.tasks.dataset import FiniteTask
from corral.lab.tasks.grader import grader_pool
from corral.validate import limited, pip_install

# ------------------------------------------------------------------------------------------------- where is the answer?

AnswerForm = Literal["boxed", "####", "number"]

LONGEST = 1000
"""Length of the longest answer that is graded, in characters. Data sets have answers of up to about 150 characters."""

_LONGEST_NUMBER = 60
"""Length of the longest number that is parsed, in characters."""

_BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_POWER = r"(?:[eE][-+]?[0-9]{1,2})?"
# Not a number, but the beginning of something else: 1.2.3, 0x10, 5x10, 1_000, 1e100, 4².
_GOES_ON = r"\.?[0-9]|[eExX_][-+]?[0-9]|[\u00b2\u00b3\u00b9\u2070-\u2079]"
_NUMBER = re.compile(rf"(?:(?<![\w.,)\]}}])[-+])?(?<![A-Za-z0-9_.])(?:{_DIGITS}){_POWER}(?:\s?/\s?[0-9]+)?(?!{_GOES_ON})")
_NUMBER_START = re.compile(r"(?<![A-Za-z0-9_.,])[0-9]")
_CHANGES_NUMBER = re.compile(r"[√±]|\\(?:sqrt|pm|log|ln|sin|cos|tan)(?![A-Za-z])")
"""Pattern of signs and functions that change the number after them, such as √, or make two numbers of it, such as ±."""
_FRACTION = re.compile(r"(-?)\\[dt]?frac\s*(?:\{\s*(-?)([0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))")
_SEPARATORS = str.maketrans({"\u2212": "-", "\ufe63": "-", "\uff0d": "-", "\uff0c": ",", "\uff0e": ".", "\uff05": "%"})
"""Unicode characters that people and models write for - , . and %, each with its ASCII replacement."""


@dataclass(frozen=True)
class Answer:
    """Answer extracted from a completion, and the answer's form: boxed, after ####, or a bare number."""

    text: str
    form: AnswerForm


def extract(completion: str) -> Answer | None:
    """Extract a completion's answer: the last LaTeX box, else the text after the last ####, else the last number, else None."""
    text = ascii_digits(completion)
    box = last_box(text)
    if box is not None:
        return Answer(box.strip(), "boxed")
    _, mark, after = text.rpartition("####")
    if mark:
        return Answer(after.partition("\n")[0].strip(), "####")
    numbers = [number[0] for number in _NUMBER.finditer(text)]
    return Answer(numbers[-1], "number") if numbers else None


def last_box(text: str) -> str | None:
    r"""Content of the last \boxed{…} in a text, or None. A box that holds nothing but another box is unwrapped."""
    boxes = [(opening, closing) for opening, closing in match_braces(text)[0] if len(opening[0]) > 1]
    if not boxes:
        return None
    opening, closing = boxes[-1]
    found = text[opening.end() : closing.start()].strip()
    while len(found) <= LONGEST and (inside := match_braces(found)[0]):
        opening, closing = inside[-1]
        if len(opening[0]) == 1 or (opening.start(), closing.end()) != (0, len(found)):
            break
        found = found[opening.end() : closing.start()].strip()
    return found


def match_braces(text: str) -> tuple[list[tuple[re.Match[str], re.Match[str]]], bool]:
    r"""Find all pairs of matching braces, in the order of the closing braces, and whether every brace has a partner.

    An opening brace is { or \boxed{. Neither \{ nor \} is a brace.
    """
    opened, pairs, balanced = list[re.Match[str]](), [], True
    for token in _BRACE.finditer(text):
        if token[0] == "}":
            if opened:
                pairs.append((opened.pop(), token))
            else:
                balanced = False
        elif token[0][-1] == "{" and token[0] != r"\{":
            opened.append(token)
    return pairs, balanced and not opened


def ascii_digits(text: str) -> str:
    """Replace the decimal digits of every script by 0 to 9, and minus signs by -. Superscripts stay unchanged."""
    if text.isascii():
        return text
    digits = {ord(letter): str(unicodedata.decimal(letter)) for letter in set(text) if letter.isdecimal()}
    return text.translate(digits).translate(_SEPARATORS)


def one_number(answer: str) -> Fraction | None:
    r"""Parse an answer that contains exactly one number. Returns None for any other answer.

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
    whole, _, under = re.sub(r"[\s,]", "", found[0][0]).partition("/")
    return Fraction(whole) / int(under or "1") if int(under or "1") else None


def _with_slash(fraction: re.Match[str]) -> str:
    r"""Rewrite a matched LaTeX fraction with a slash: -\frac{1}{2} becomes -1/2."""
    before, inside, over, over_digit, under, under_digit = fraction.groups()
    return f" {'-' if before != (inside or '') else ''}{over or over_digit}/{under or under_digit} "


# --------------------------------------------------------------------------------------------------------- is it right?


def same_number(gold: str, answer: str) -> bool:
    """True if both texts have one number each, and the numbers are equal: 1,234.50 equals 1234.5, and 50% equals 50."""
    right = _gold_number(gold)
    return right is not None and one_number(answer) == right


_gold_number = lru_cache(maxsize=10_000)(one_number)


VERDICTS: dict[tuple[str, str, float], bool] = {}
"""Cache of math-verify's verdicts, since completions of the same prompt often have the same answer.

Timeouts and dead graders are not cached: the machine may have been to blame.
"""
MAX_VERDICTS = 100_000


def same_mathematics(golds: Sequence[str], answers: Sequence[str], seconds: float) -> list[bool]:
    """True for each answer that math-verify finds equal to its reference. An answer that takes too long to parse is wrong.

    Whole numbers and texts that agree to the letter need no grader. An answer longer than `answer.LONGEST`, or one whose braces
    do not match, or with a box inside, is wrong, and so is one that contradicts itself (see `_contradicts`). A full stop at the
    end is not part of it. The more answers have run out of time beside the same gold, the less time the next ones get.
    """
    stripped = ([text.strip().removesuffix(".").rstrip() for text in texts] for texts in (golds, answers))
    pairs = [(gold, answer, seconds) for gold, answer in zip(*stripped, strict=True)]
    known = {pair: _without_grader(*pair[:2]) for pair in pairs}
    known |= {pair: VERDICTS.get(pair) for pair, verdict in known.items() if verdict is None}
    requests = [pair for pair, verdict in known.items() if verdict is None]
    if requests and find_spec("math_verify") is None:
        raise ValueError(f"grading mathematics needs math-verify. Install it: {pip_install('task')}.")
    if requests:
        questions = [(gold, answer) for gold, answer, _ in requests]
        verdicts = grader_pool("math").grade(questions, seconds, problems=[gold for gold, _ in questions])
        if len(VERDICTS) + len(requests) > MAX_VERDICTS:
            VERDICTS.clear()
        for pair, verdict in zip(requests, verdicts, strict=True):
            known[pair] = verdict.score == 1.0
            if verdict.status in ("graded", "error"):
                VERDICTS[pair] = verdict.score == 1.0
    return [bool(known[pair]) for pair in pairs]


def _without_grader(gold: str, answer: str) -> bool | None:
    """Compare a simple answer with its reference without math-verify. Returns None if math-verify is needed."""
    # A brace without its partner could close the box around the answer from inside.
    if not answer or len(answer) > LONGEST or r"\boxed" in answer or not match_braces(answer)[1]:
        return False
    if gold == answer:
        return True
    whole = [text.removeprefix("-") for text in (gold, answer)]
    if all(text.isascii() and text.isdecimal() and len(text) <= 60 for text in whole):
        return int(gold) == int(answer)
    if _contradicts(gold, answer):
        return False
    if _PERCENT.search(answer) and gold.removeprefix("-").isdecimal():
        return same_number(gold, answer)
    return None


_DENIAL = re.compile(r"(?<![A-Za-z\\])(?:not|no|never|wrong|false|incorrect|untrue|isn't)(?![A-Za-z])", re.IGNORECASE)
_PERCENT = re.compile(r"\\?%")
_WHOLE = re.compile(r"-?[0-9]{1,60}")
_SPACING = re.compile(r"\\left|\\right|\\[,;! ]|\s")


def _contradicts(gold: str, answer: str) -> bool:
    r"""True if an answer contradicts itself in a way that math-verify ignores.

    It denies what it says ("42 \text{ not}") although the gold has no such word, has two different whole numbers as sides of an
    equation ("43 = 42"), or is a set where the gold is a pair or an interval, or the other way round.
    """
    if _DENIAL.search(answer) and not _DENIAL.search(gold):
        return True
    sides = {int(side) for side in map(str.strip, answer.split("=")) if _WHOLE.fullmatch(side)}
    return len(sides) > 1 or {_brackets(gold), _brackets(answer)} == {"set", "ordered"}


def _brackets(text: str) -> str:
    """Classify a text by its brackets: "set", "ordered" (a pair or an interval), or "". Only an equation's last side counts."""
    last = re.split(r"=|\\in(?![A-Za-z])", _SPACING.sub("", text))[-1]
    if last.startswith(r"\{") and last.endswith(r"\}"):
        return "set"
    return "ordered" if "," in last and last[0] in "([" and last[-1] in ")]" else ""


# ------------------------------------------------------------------------------------------------------------- the task


@dataclass(frozen=True, kw_only=True)
class MathTask(FiniteTask):
    r"""Base class of mathematical tasks. The reward is (1 − w)·[correct] + w·[in the required form], with w = `format_weight`.

    "In the required form" is an answer, right or wrong, that stands in \boxed{…} (or behind ####) and is not empty. Where it is
    extracted from otherwise: corral.lab.tasks.math.
    """

    form: Literal["boxed", "####"] = "boxed"
    """Form in which the instruction asks for the answer: in a LaTeX box, or after ####."""
    format_weight: float = limited(0.0, at_least=0, at_most=1)
    """Share of the reward, 0 to 1, for giving the answer in `form`. With 0, only correctness counts, in any form."""
    time_limit: float = limited(2.0, above=0, at_most=3600, what="a number of seconds")
    """Seconds of processor time for one answer. A slower answer is wrong; ordinary answers take milliseconds."""

    def right(self, golds: Sequence[str], answers: Sequence[str]) -> list[bool]:
        """True for each correct answer, judged by math-verify unless a subclass overrides this method."""
        return same_mathematics(golds, answers, self.time_limit)

    def verify_all(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """Return the rewards of many completions, graded by several processes in parallel."""
        golds = [self.answer(prompt) for prompt in prompts]
        found = [extract(completion) for completion in completions]
        right = self.right(golds, ["" if answer is None else answer.text for answer in found])
        in_form = [answer is not None and answer.form == self.form and answer.text != "" for answer in found]
        return [(1 - self.format_weight) * ok + self.format_weight * form for ok, form in zip(right, in_form, strict=True)]
