"""Task for a user's own problems: a file of prompts and answers, and a verifier chosen by name."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from corral.lab.sandbox import SandboxLimits
from corral.lab.sandbox.pool import shared_pool
from corral.lab.tasks.code.problem import grade_all
from corral.lab.tasks.code.task import problem_from_tests
from corral.lab.tasks.dataset import Malformed, Row, conversation, text_column
from corral.lab.tasks.imports import by_path
from corral.lab.tasks.math import MathTask, one_number, same_number
from corral.lab.tasks.messages import Message
from corral.validate import limited, nearest

_VERIFIERS = ("math", "number", "exact", "code")
_HOW = "`verifier` is math, number, exact, code or module:function"


@dataclass(frozen=True, kw_only=True)
class Jsonl(MathTask):
    """Problems from a file (.jsonl, .json, .parquet). Each row has a prompt and an answer, in columns named by the user.

    `verifier` says what is right:
        math              math-verify finds the extracted answer equal to the row's
        number            the extracted answer is one number, the same as the row's
        exact             the completion is the row's answer, to the letter but for spaces and line ends around it
        code              the completion is a program that passes the row's tests, in the sandbox
        module:function   function(prompt, completion, answer) → a number from 0 to 1, called in the trainer's own process
    """

    name: ClassVar[str] = "jsonl"

    held_out: str | float | int | None = 0.1
    """File of held-out problems, or share of the problems in `path` to hold out."""
    verifier: str = "math"
    """Verifier of answers: math, number, exact, code, or module:function."""
    prompt_column: str = "prompt"
    """Name of the prompt's column. A prompt is a text, or a chat that ends with a user message."""
    answer_column: str = "answer"
    """Name of the answer's column. It holds a text or a number, tests for `code`, or any JSON for a verifier of your own."""
    unsafe_code_execution: bool = limited(False, one_of=(True, False))
    """True to run programs (verifier `code`) as yourself if the system offers no sandbox. See docs/safety.md."""

    def __post_init__(self) -> None:
        if ":" in self.verifier:
            by_path(self.verifier, _HOW)  # now, and not at the first completion
        elif self.verifier not in _VERIFIERS:
            raise ValueError(
                f"jsonl: there is no verifier {self.verifier!r}.{nearest(self.verifier, _VERIFIERS)} Or module:function."
            )
        if self.verifier not in ("math", "number") and self.format_weight:
            raise ValueError(f"jsonl: `format_weight` is for the verifiers math and number; got {self.verifier!r}.")
        super().__post_init__()

    def problem(self, row: Row) -> tuple[str, Any]:
        """Read a row's prompt and answer from the columns that the settings name."""
        for column in (self.prompt_column, self.answer_column):
            if column not in row:
                raise Malformed(f"there is no `{column}`; the row has {', '.join(map(str, row)) or 'nothing'}")
        prompt, _ = conversation(row[self.prompt_column], self.prompt_column)
        if self.verifier == "code":
            return prompt, problem_from_tests(row[self.answer_column])
        if ":" in self.verifier:
            return prompt, row[self.answer_column]
        answer = text_column(row, self.answer_column).strip()
        if self.verifier == "number" and one_number(answer) is None:
            raise Malformed(f"`{self.answer_column}` should be one number; got {answer[:60]!r}")
        return prompt, answer

    def messages(self, prompt: str) -> list[Message]:
        """Return the prompt as a chat, with all messages of the data row."""
        return conversation(self.row(prompt)[self.prompt_column], self.prompt_column)[1]

    def right(self, golds: Sequence[str], answers: Sequence[str]) -> list[bool]:
        """True for each correct answer, as judged by math-verify or, with the verifier `number`, by equal numbers."""
        return super().right(golds, answers) if self.verifier == "math" else list(map(same_number, golds, answers))

    def verify_all(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """Return the rewards of many completions, computed by the verifier that the settings name."""
        if self.verifier in ("math", "number"):
            return super().verify_all(prompts, completions)
        answers = [self.answer(prompt) for prompt in prompts]
        if self.verifier == "exact":
            return [float(text.strip() == answer) for text, answer in zip(completions, answers, strict=True)]
        if self.verifier == "code":
            pool = shared_pool(None, unsafe_code_execution=self.unsafe_code_execution)
            return grade_all(answers, completions, pool, SandboxLimits(), partial=False) if answers else []
        function = by_path(self.verifier, _HOW)
        rows = zip(prompts, completions, answers, strict=True)
        return [read_reward(self.verifier, function(*row)) for row in rows]


def read_reward(name: str, value: Any) -> float:
    """Convert a reward (bool, NumPy or torch number) to a float from 0 to 1. Raises ValueError for any other value."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one is torch's, for more than one element
        number = math.nan
    if not 0 <= number <= 1:
        raise ValueError(f"the verifier {name} gave {value!r}. A task's reward is a number from 0 to 1.")
    return number
