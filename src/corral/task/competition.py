r"""Competition mathematics as published on the hub: MATH500, AIME 2024 and 2025, AMC, DAPO-Math.

All are graded by math-verify. The first four are for evaluation, so all of their problems are held out unless `held_out` says
otherwise: to train on MATH and evaluate on MATH500, give MATH's training file as `path` and MATH500's as `held_out`.
"""

from dataclasses import dataclass
from typing import ClassVar

from corral.task.answer import last_box
from corral.task.dataset import Hub
from corral.task.math import MathTask
from corral.task.messages import chat_text
from corral.task.rows import Malformed, Row, text_column

DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


@dataclass(frozen=True, kw_only=True)
class _Evaluation(MathTask):
    r"""A row has `problem` (or `question`) and `answer`; without an answer, the last \boxed{…} of `solution` is it."""

    held_out: str | float | int | None = 1.0
    """A file of held-out problems, or the share of `path`'s problems that is held out: by default all of them."""
    max_completion_length: int = 4096
    """Tokens that a right completion may need."""

    def problem(self, row: Row) -> tuple[str, str]:
        """The problem and its answer."""
        row = {str(key).lower(): value for key, value in row.items()}
        prompt = text_column(row, "problem", "question")
        if row.get("answer") is not None:
            return prompt, text_column(row, "answer").strip()
        box = last_box(text_column(row, "solution"))
        if not box:
            raise Malformed(r"there is neither `answer` nor a \boxed{…} in `solution`")
        return prompt, box


@dataclass(frozen=True, kw_only=True)
class MATH500(_Evaluation):
    """500 problems of MATH (Hendrycks et al. 2021; Lightman et al. 2023): `HuggingFaceH4/MATH-500`."""

    name: ClassVar[str] = "math500"
    HUB: ClassVar[Hub | None] = Hub("HuggingFaceH4/MATH-500", train="test")


@dataclass(frozen=True, kw_only=True)
class AIME24(_Evaluation):
    """The 30 problems of AIME 2024, whole numbers from 0 to 999: `HuggingFaceH4/aime_2024`."""

    name: ClassVar[str] = "aime24"
    HUB: ClassVar[Hub | None] = Hub("HuggingFaceH4/aime_2024", train="train")


@dataclass(frozen=True, kw_only=True)
class AIME25(_Evaluation):
    """The 30 problems of AIME 2025, whole numbers from 0 to 999: `math-ai/aime25`."""

    name: ClassVar[str] = "aime25"
    HUB: ClassVar[Hub | None] = Hub("math-ai/aime25", train="test")


@dataclass(frozen=True, kw_only=True)
class AMC(_Evaluation):
    """83 problems of AMC 12, 2022 and 2023: `AI-MO/aimo-validation-amc`. Answers may be floats: 142.0 is 142."""

    name: ClassVar[str] = "amc"
    HUB: ClassVar[Hub | None] = Hub("AI-MO/aimo-validation-amc", train="train")


@dataclass(frozen=True, kw_only=True)
class DAPOMath(MathTask):
    """About 17,000 problems whose answers are whole numbers (Yu et al. 2025): `BytedTsinghua-SIA/DAPO-Math-17k`.

    A row has `prompt`, a chat of one user's message or a text, and the answer in `reward_model["ground_truth"]`, or in
    `solution` as the processed copies have it. DAPO's own instruction around the problem is taken off: the run's `instruction`
    is what the model reads. The hub's copy repeats every problem about a hundred times; each is used once, and that is said.

    Ref: arXiv:2503.14476.
    """

    name: ClassVar[str] = "dapo_math"
    HUB: ClassVar[Hub | None] = Hub("BytedTsinghua-SIA/DAPO-Math-17k", train="train")

    held_out: str | float | int | None = 0.06
    """A file of held-out problems, or the share that is held out; the paper of TROLL holds out 1,024 of 17,917."""
    max_completion_length: int = 4096
    """Tokens that a right completion may need, as in the paper of TROLL."""

    def problem(self, row: Row) -> tuple[str, str]:
        """The problem without DAPO's instruction, and the ground truth."""
        prompt = chat_text(row.get("prompt"))
        if prompt.startswith(DAPO_BEFORE) and prompt.endswith(DAPO_AFTER):
            prompt = prompt[len(DAPO_BEFORE) : -len(DAPO_AFTER)]
        graded = row.get("reward_model")
        if isinstance(graded, dict) and "ground_truth" in graded:
            return prompt, text_column(graded, "ground_truth").strip()
        return prompt, text_column(row, "solution", "answer").strip()
