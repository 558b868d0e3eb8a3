r"""Base of mathematics tasks: graded by math-verify, with a share of the reward for the answer's format."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

from corral.naming import pip_install
from corral.task.answer import LONGEST, Answer, extract, is_balanced, one_number
from corral.task.dataset import FiniteTask
from corral.task.grader import Verdict, grader_pool
from corral.validate import require

VERDICTS: dict[tuple[str, str, float], bool] = {}
"""Verdicts of math-verify so far: completions of a group often agree. Where time ran out, or the grader died, the machine may
have been to blame: those are graded again."""
MAX_VERDICTS = 100_000


@dataclass(frozen=True, kw_only=True)
class MathTask(FiniteTask):
    r"""A finite task whose answers are mathematics: (1 − w)·[right] + w·[in the required form], with w = `format_weight`.

    "In the required form" is an answer, right or wrong, that stands in \boxed{…} (or behind ####) and is not empty. Where it is
    extracted from otherwise: corral.task.answer.
    """

    form: Literal["boxed", "####"] = "boxed"
    """The form that the instruction asks for."""
    format_weight: float = 0.0
    """The share of the reward for the form alone, 0 to 1. With 0, any form will do."""
    time_limit: float = 2.0
    """Seconds of processor time for one answer; whatever takes longer is wrong. Ordinary ones take milliseconds."""

    def __post_init__(self) -> None:
        require(self, "form", one_of=("boxed", "####"))
        require(self, "format_weight", at_least=0, at_most=1)
        require(self, "time_limit", above=0, at_most=3600, what="a number of seconds")
        super().__post_init__()

    def right(self, golds: Sequence[str], answers: Sequence[str]) -> list[bool]:
        """Whether each answer is right: by math-verify, unless a task knows better."""
        return same_mathematics(golds, answers, self.time_limit)

    def verify(self, prompt: str, completion: str) -> float:
        """The reward of a completion, which may be any text; ValueError where the prompt is not this task's."""
        return self.verify_all([prompt], [completion])[0]

    def verify_all(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """`verify` of many at once, by several graders beside each other."""
        golds = [self.answer(prompt) for prompt in prompts]
        found = [extract(completion) for completion in completions]
        right = self.right(golds, ["" if answer is None else answer.text for answer in found])
        return [self._reward(answer, ok) for answer, ok in zip(found, right, strict=True)]

    def _reward(self, answer: Answer | None, right: bool) -> float:
        in_form = answer is not None and answer.form == self.form and answer.text != ""
        return (1 - self.format_weight) * right + self.format_weight * in_form


def same_number(gold: str, answer: str) -> bool:
    """Whether both are one number, and the same, exactly: 1,234.50 is 1234.5, and 50% is 50."""
    right = _gold_number(gold)
    return right is not None and one_number(answer) == right


def same_mathematics(golds: Sequence[str], answers: Sequence[str], seconds: float) -> list[bool]:
    """Whether math-verify finds each answer equal to its gold. What it cannot read, or not in time, is wrong.

    Whole numbers and texts that agree to the letter need no grader. An answer longer than `answer.LONGEST`, or one whose braces
    do not match, or with a box inside, is wrong, and so is one that contradicts itself (see `_contradicts`). A full stop at the
    end is not part of it. The more answers have run out of time beside the same gold, the less time the next ones get.
    """
    pairs = [(_strip(gold), _strip(answer), seconds) for gold, answer in zip(golds, answers, strict=True)]
    quick = {pair: _without_grader(*pair[:2]) for pair in pairs}
    known = {pair: VERDICTS.get(pair) if verdict is None else verdict for pair, verdict in quick.items()}
    requests = [pair for pair, verdict in known.items() if verdict is None]
    verdicts = dict(zip(requests, _grade(requests, seconds), strict=True))
    graded = {pair: verdict.score == 1.0 for pair, verdict in verdicts.items()}
    if len(VERDICTS) + len(graded) > MAX_VERDICTS:
        VERDICTS.clear()
    VERDICTS.update((pair, graded[pair]) for pair, verdict in verdicts.items() if verdict.status in ("graded", "error"))
    return [bool(graded[pair] if known[pair] is None else known[pair]) for pair in pairs]


def _strip(text: str) -> str:
    return text.strip().removesuffix(".").rstrip()


def _grade(pairs: Sequence[tuple[str, str, float]], seconds: float) -> list[Verdict]:
    if not pairs:
        return []
    if find_spec("math_verify") is None:
        raise ValueError(f"grading mathematics needs math-verify. Install it: {pip_install('task')}.")
    questions = [(gold, answer) for gold, answer, _ in pairs]
    return grader_pool("math").grade(questions, seconds, problems=[gold for gold, _, _ in pairs])


def _without_grader(gold: str, answer: str) -> bool | None:
    """The verdict where it is plain; None where math-verify is needed."""
    if not answer or len(answer) > LONGEST or r"\boxed" in answer or not is_balanced(answer):
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
    r"""Whether an answer takes itself back, in ways that math-verify passes over.

    It denies what it says ("42 \text{ not}") although the gold has no such word, has two different whole numbers as sides of an
    equation ("43 = 42"), or is a set where the gold is a pair or an interval, or the other way round.
    """
    if _DENIAL.search(answer) and not _DENIAL.search(gold):
        return True
    sides = {int(side) for side in map(str.strip, answer.split("=")) if _WHOLE.fullmatch(side)}
    return len(sides) > 1 or {_brackets(gold), _brackets(answer)} == {"set", "ordered"}


def _brackets(text: str) -> str:
    """Whether the last side of a text is written as a set, or as a pair or interval; "" for neither."""
    last = re.split(r"=|\\in(?![A-Za-z])", _SPACING.sub("", text))[-1]
    if last.startswith(r"\{") and last.endswith(r"\}"):
        return "set"
    return "ordered" if "," in last and last[0] in "([" and last[-1] in ")]" else ""


@lru_cache(maxsize=10_000)
def _gold_number(gold: str) -> object:
    return one_number(gold)
