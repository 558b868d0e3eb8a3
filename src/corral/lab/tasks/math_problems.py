"""Tasks with word problems and competition problems: GSM8K, ASDiv, MAWPS, SVAMP, AMC, AIME, MATH-500 and DAPO."""

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar, Literal

from corral.lab.tasks.dataset import Hub, Malformed, Row, Rows, conversation, find_split, read_file, read_hub, text_column
from corral.lab.tasks.math import MathTask, last_box, one_number, same_number
from corral.lab.tasks.procedural import digest

# -------------------------------------------------------------------------------------------------------- word problems


@dataclass(frozen=True, kw_only=True)
class GSM8K(MathTask):
    r"""Word problems of GSM8K from the hub (`openai/gsm8k`), or from a folder with train.jsonl and test.jsonl.

    7,473 problems are for training and 1,319 are held out.

    A row has `question` and `answer`, whose last line is "#### 72". A completion is right iff its answer is one number, exactly
    that one; nothing is computed, so this needs no grader. Where in a completion it is found: corral.lab.tasks.math.

    Ref: arXiv:2110.14168.
    """

    name: ClassVar[str] = "gsm8k"
    HUB: ClassVar[Hub | None] = Hub("openai/gsm8k", "main", train="train", held_out="test")

    max_completion_length: int = 512
    """Largest number of tokens that a correct completion may need. The TROLL paper allows 2,048 tokens."""

    def problem(self, row: Row) -> tuple[str, str]:
        """Read a row of GSM8K. The prompt is the question, and the answer is the number after ####."""
        question, solution = text_column(row, "question"), text_column(row, "answer")
        _, mark, answer = solution.rpartition("####")
        if not mark or one_number(answer) is None:
            raise Malformed(f"`answer` should end in #### and a number; got {solution[-60:]!r}")
        return question, answer.strip()

    def right(self, golds: Sequence[str], answers: Sequence[str]) -> list[bool]:
        """True for each answer that is a single number equal to the reference."""
        return list(map(same_number, golds, answers))


_SOURCES = {
    "asdiv": ("MU-NLPC/Calc-asdiv_a", "test"),
    "mawps": ("MU-NLPC/Calc-mawps", "train"),
    "svamp": ("MU-NLPC/Calc-svamp", "test"),
}
"""Data sets of the task `words`: file name → (data set, split) on the Hugging Face Hub. SVAMP is held out."""

_DECIMALS = 4
"""Largest number of decimals in an answer. A longer answer is a truncated fraction, which no completion would match."""


@dataclass(frozen=True, kw_only=True)
class WordProblems(GSM8K):
    """Word problems of ASDiv and MAWPS, with SVAMP held out, from the hub or a folder with asdiv, mawps and svamp.

    SVAMP was written after ASDiv, so a training problem that has the words of a held-out one, whatever its numbers, is left
    out; so is one with the words and numbers of an earlier one, and one whose answer is not one number (a name, a time, ⅔ as a
    decimal). ASDiv is for non-commercial use. A single file as `path` is split by `held_out`, like any other.

    Ref: Miao et al. 2020; Koncel-Kedziorski et al. 2016; Patel et al. 2021, arXiv:2103.07191.
    """

    name: ClassVar[str] = "words"
    HUB: ClassVar[Hub | None] = None  # there are three, named above

    part: Literal["all", "sft", "rl"] = "all"
    """Training problems to use: all, or one of two halves, so that supervised warm-up and RL share no problem."""
    max_completion_length: int = 128
    """Largest number of tokens that a correct completion may need."""

    @classmethod
    def hub_names(cls) -> tuple[str, ...]:
        return tuple(hub for hub, _ in _SOURCES.values())

    def problem(self, row: Row) -> tuple[str, str]:
        """Read a row. The prompt is the story with its question, and the answer is a number. Units in brackets are dropped."""
        row = {str(key).lower(): value for key, value in row.items()}
        if "body" in row:  # without a full stop now and then
            body, question = text_column(row, "body").strip(), text_column(row, "question").strip()
            prompt = f"{body}{'' if body[-1] in '.,?!;:' else ','} {question}"
        else:
            prompt = text_column(row, "input", "question").strip()
        answer = text_column(row, "answer", "target", "result").partition("(")[0].strip()
        if one_number(answer) is None or len(answer.partition(".")[2]) > _DECIMALS:
            raise Malformed(f"the answer should be one number of at most {_DECIMALS} decimals; got {answer[:60]!r}")
        return prompt, answer

    def _rows(self, split: Literal["train", "test"]) -> Rows | None:
        if self.path is not None and Path(self.path).expanduser().is_file():
            return super()._rows(split)
        if self.held_out is not None:
            raise ValueError(f"words: SVAMP is held out, and `held_out` is for a single file as `path`; got {self.held_out!r}.")
        held_out = self._read("svamp")
        if split == "test":
            return held_out
        leaked = {words(self.problem(row)[0], numbers=False) for _, row in held_out if not isinstance(row, Malformed)}
        return self._distinct(chain(self._read("asdiv"), self._read("mawps")), leaked)

    def _read(self, name: str) -> Rows:
        """Read the rows of one of the three data sets: asdiv, mawps or svamp."""
        if self.path is None:
            hub, split = _SOURCES[name]
            return read_hub(hub, None, split, self.name)
        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            raise ValueError(f"words: {folder} should be a folder with asdiv, mawps and svamp, or a file; it is neither.")
        return read_file(find_split(folder, name, self.name), self.name)

    def _distinct(self, rows: Rows, leaked: Container[str]) -> Iterator[tuple[str, Row | Malformed]]:
        """Drop training rows without a numeric answer, of the other half, or with the words of a previous or held-out row."""
        seen = set()
        for place, row in rows:
            if not isinstance(row, Malformed):
                try:
                    prompt = self.problem(row)[0]
                except Malformed:
                    continue  # a name or a time: no defect of the data
                same = words(prompt, numbers=True)  # two ways of writing one problem are in the same half
                in_part = self.part == "all" or digest(same) % 2 == (self.part == "rl")
                if same in seen or words(prompt, numbers=False) in leaked or not in_part:
                    continue
                seen.add(same)
            yield place, row


def words(text: str, *, numbers: bool) -> str:
    """Return a problem's words in lower case, without punctuation. Unless `numbers` is true, every number becomes `#`."""
    found = re.findall(r"[a-z]+|\d+(?:[.,]\d+)*", text.lower())
    return " ".join(word if numbers or not word[0].isdigit() else "#" for word in found)


# --------------------------------------------------------------------------------------------------------- competitions


@dataclass(frozen=True, kw_only=True)
class _Evaluation(MathTask):
    r"""Base class of tasks for evaluation on competition problems.

    A row has `problem` or `question`, and `answer` or a `solution` with a last \boxed{…}.
    """

    held_out: str | float | int | None = 1.0
    """File of held-out problems, or share of the problems in `path` to hold out. By default, all problems are held out."""
    max_completion_length: int = 4096
    """Largest number of tokens that a correct completion may need."""

    def problem(self, row: Row) -> tuple[str, str]:
        """Read a row. The prompt is the problem, and the answer is in column `answer` or in the last box in `solution`."""
        row = {str(key).lower(): value for key, value in row.items()}
        prompt = text_column(row, "problem", "question")
        if row.get("answer") is not None:
            return prompt, text_column(row, "answer").strip()
        box = last_box(text_column(row, "solution"))
        if not box:
            raise Malformed(r"there is neither `answer` nor a \boxed{…} in `solution`")
        return prompt, box


class MATH500(_Evaluation):
    """500 problems of the benchmark MATH (Hendrycks et al. 2021; Lightman et al. 2023), from `HuggingFaceH4/MATH-500`."""

    name: ClassVar[str] = "math500"
    HUB: ClassVar[Hub | None] = Hub("HuggingFaceH4/MATH-500", train="test")


class AIME24(_Evaluation):
    """The 30 problems of AIME 2024, from `HuggingFaceH4/aime_2024`. Answers are whole numbers from 0 to 999."""

    name: ClassVar[str] = "aime24"
    HUB: ClassVar[Hub | None] = Hub("HuggingFaceH4/aime_2024", train="train")


class AIME25(_Evaluation):
    """The 30 problems of AIME 2025, from `math-ai/aime25`. Answers are whole numbers from 0 to 999."""

    name: ClassVar[str] = "aime25"
    HUB: ClassVar[Hub | None] = Hub("math-ai/aime25", train="test")


class AMC(_Evaluation):
    """83 problems of AMC 12 of 2022 and 2023, from `AI-MO/aimo-validation-amc`. An answer 142.0 is read as 142."""

    name: ClassVar[str] = "amc"
    HUB: ClassVar[Hub | None] = Hub("AI-MO/aimo-validation-amc", train="train")


DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


@dataclass(frozen=True, kw_only=True)
class DAPOMath(MathTask):
    """About 17,000 problems with whole numbers as answers (Yu et al. 2025), from `BytedTsinghua-SIA/DAPO-Math-17k`.

    A row has `prompt`, a chat of one user's message or a text, and the answer in `reward_model["ground_truth"]`, or in
    `solution` as the processed copies have it. DAPO's own instruction around the problem is taken off: the run's `instruction`
    is what the model reads. The hub's copy repeats every problem about a hundred times; each is used once, and that is said.

    Ref: arXiv:2503.14476.
    """

    name: ClassVar[str] = "dapo_math"
    HUB: ClassVar[Hub | None] = Hub("BytedTsinghua-SIA/DAPO-Math-17k", train="train")

    held_out: str | float | int | None = 0.06
    """File of held-out problems, or share of the problems to hold out. The TROLL paper holds out 1,024 of 17,917 problems."""
    max_completion_length: int = 4096
    """Largest number of tokens that a correct completion may need, as in the TROLL paper."""

    def problem(self, row: Row) -> tuple[str, str]:
        """Read a row. The prompt is the problem without DAPO's instruction, and the answer is the ground truth."""
        prompt, messages = conversation(row.get("prompt"), "prompt")
        if len(messages) > 1:
            raise Malformed(f"`prompt` should be one message of the user's; got {str(messages)[:60]!r}")
        if prompt.startswith(DAPO_BEFORE) and prompt.endswith(DAPO_AFTER):
            prompt = prompt[len(DAPO_BEFORE) : -len(DAPO_AFTER)]
        graded = row.get("reward_model")
        if isinstance(graded, dict) and "ground_truth" in graded:
            return prompt, text_column(graded, "ground_truth").strip()
        return prompt, text_column(row, "solution", "answer").strip()
