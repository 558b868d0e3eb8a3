"""GSM8K: grade-school mathematics in words, with one number for an answer (Cobbe et al. 2021; MIT licence)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from corral.task.answer import one_number
from corral.task.dataset import Hub
from corral.task.math import MathTask, same_number
from corral.task.rows import Malformed, Row, text_column


@dataclass(frozen=True, kw_only=True)
class GSM8K(MathTask):
    r"""7,473 problems to train on and 1,319 held out: `openai/gsm8k` on the hub, or a folder with train.jsonl and test.jsonl.

    A row has `question` and `answer`, whose last line is "#### 72". A completion is right iff its answer is one number, exactly
    that one; nothing is computed, so this needs no grader. Where in a completion it is found: corral.task.answer.

    Ref: arXiv:2110.14168.
    """

    name: ClassVar[str] = "gsm8k"
    HUB: ClassVar[Hub | None] = Hub("openai/gsm8k", "main", train="train", held_out="test")

    max_completion_length: int = 512
    """Tokens that a right completion may need. The paper of TROLL allows 2,048."""

    def problem(self, row: Row) -> tuple[str, str]:
        """The question, and the number after ####."""
        question, solution = text_column(row, "question"), text_column(row, "answer")
        _, mark, answer = solution.rpartition("####")
        if not mark or one_number(answer) is None:
            raise Malformed(f"`answer` should end in #### and a number; got {solution[-60:]!r}")
        return question, answer.strip()

    def right(self, golds: Sequence[str], answers: Sequence[str]) -> list[bool]:
        """One number, the same."""
        return [same_number(gold, answer) for gold, answer in zip(golds, answers, strict=True)]
