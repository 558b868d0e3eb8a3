"""Word problems of one or two steps, for models of 100 to 300 M parameters: train on ASDiv and MAWPS, evaluate on SVAMP."""

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar, Literal, get_args

from corral.task.answer import one_number
from corral.task.dataset import Hub, Rows
from corral.task.draws import digest
from corral.task.gsm8k import GSM8K
from corral.task.rows import Malformed, Row, find_split, read_file, read_hub, text_column
from corral.validate import require

_Part = Literal["all", "sft", "rl"]

TRAIN = {"asdiv": ("MU-NLPC/Calc-asdiv_a", "test"), "mawps": ("MU-NLPC/Calc-mawps", "train")}
HELD_OUT = {"svamp": ("MU-NLPC/Calc-svamp", "test")}
"""Files of a folder by name, and where the same problems are on the hub: data set and split."""

_DECIMALS = 4
"""Of an answer: one with more is a fraction cut off, and no completion would be right to the letter."""


@dataclass(frozen=True, kw_only=True)
class WordProblems(GSM8K):
    """ASDiv and MAWPS to train on, SVAMP held out: from the hub, or a folder with asdiv, mawps and svamp (.jsonl, .json, …).

    SVAMP was written after ASDiv, so a training problem that has the words of a held-out one, whatever its numbers, is left
    out; so is one with the words and numbers of an earlier one, and one whose answer is not one number (a name, a time, ⅔ as a
    decimal). ASDiv is for non-commercial use. A single file as `path` is split by `held_out`, like any other.

    Ref: Miao et al. 2020; Koncel-Kedziorski et al. 2016; Patel et al. 2021, arXiv:2103.07191.
    """

    name: ClassVar[str] = "words"
    HUB: ClassVar[Hub | None] = None  # there are three, named above

    part: _Part = "all"
    """Of the training problems: all, or one of two halves, so that a supervised warm-up and reinforcement share none."""
    max_completion_length: int = 128
    """Tokens that a right completion may need."""

    @classmethod
    def hub_names(cls) -> tuple[str, ...]:
        return tuple(hub for hub, _ in (*TRAIN.values(), *HELD_OUT.values()))

    def __post_init__(self) -> None:
        require(self, "part", one_of=get_args(_Part))
        super().__post_init__()

    def problem(self, row: Row) -> tuple[str, str]:
        """The story with its question, and the number; the unit that ASDiv gives in brackets is dropped."""
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

    def _sources(self) -> tuple[Rows | None, Rows | None]:
        if self.path is not None and Path(self.path).expanduser().is_file():
            return super()._sources()
        if self.held_out is not None:
            raise ValueError(f"words: SVAMP is held out, and `held_out` is for a single file as `path`; got {self.held_out!r}.")
        held_out = list(chain.from_iterable(self._read(name, *where) for name, where in HELD_OUT.items()))
        leaked = {words(self.problem(row)[0], numbers=False) for _, row in held_out if not isinstance(row, Malformed)}
        rows = chain.from_iterable(self._read(name, *where) for name, where in TRAIN.items())
        return self._distinct(rows, leaked), held_out

    def _read(self, name: str, hub: str, split: str) -> Rows:
        """Rows of one of the three data sets."""
        if self.path is None:
            return read_hub(hub, None, split, self.name)
        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            raise ValueError(f"words: {folder} should be a folder with asdiv, mawps and svamp, or a file; it is neither.")
        return read_file(find_split(folder, name, self.name), self.name)

    def _distinct(self, rows: Rows, leaked: Container[str]) -> Iterator[tuple[str, Row | Malformed]]:
        """Training rows whose answer is a number, each once, none with the words of a held-out one, of the part asked for."""
        seen = set()
        for place, row in rows:
            if not isinstance(row, Malformed):
                try:
                    prompt = self.problem(row)[0]
                except Malformed:
                    continue  # a name or a time: no defect of the data
                same = words(prompt, numbers=True)
                if same in seen or words(prompt, numbers=False) in leaked or not self._in_part(same):
                    continue
                seen.add(same)
            yield place, row

    def _in_part(self, same: str) -> bool:
        """By the words: two ways of writing one problem are in the same half."""
        return self.part == "all" or digest(same) % 2 == (self.part == "rl")


def words(text: str, *, numbers: bool) -> str:
    """A problem's words without case and punctuation; without `numbers`, every number is the same one."""
    found = re.findall(r"[a-z]+|\d+(?:[.,]\d+)*", text.lower())
    return " ".join(word if numbers or not word[0].isdigit() else "#" for word in found)
