"""Task with the questions and the scorer of any generator in the library reasoning-gym (Stojanovski et al. 2025).

The library's licence is Apache-2.0.
"""

import ast
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from corral.lab.tasks.grader import grader_pool
from corral.lab.tasks.imports import library
from corral.lab.tasks.procedural import SeededTask, digest, epochs, in_held_out_share
from corral.validate import limited, nearest

LITERALS = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
"""Generators whose scorers pass the answer to eval(). Only literals and correct answers reach these scorers."""
FORMULAS = {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
"""Generators whose scorers pass the answer to sympy's parser, and so to eval(). Only formulas reach these scorers."""

_FORMULA = re.compile(r"(?:[A-Za-z]+|[0-9]+\.?[0-9]*|[-+*/^() \t])*")
_WORDS = {
    *("sqrt", "exp", "log", "ln", "pi", "Abs", "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
}
"""Names allowed in a formula besides single letters. Without this list, sympy's parser would accept eval and exec."""

_NOT_A_NUMBER = re.compile(r"(?<![a-z])nan(?![a-hk-z])", re.IGNORECASE)
"""Pattern of nan, also in complex numbers (nani, nanj). A scorer that compares distances with < could accept nan."""

_CHUNK = 32
"""Number of questions made by one instance of a generator, each from the next seed."""
HALF = 2**31
"""Smallest seed of questions for evaluation. Questions for training have smaller seeds."""
_SHARE = 4
"""Reciprocal of the held-out share: one question in 4 is held out. The question's text decides, since seeds repeat texts."""
MAX_MISSES = 500
"""Number of successive draws without a new question after which no further question is expected."""
_MAX_ANSWER = 10_000
"""Length of the longest answer that is scored, in characters."""


@dataclass(frozen=True, kw_only=True)
class ReasoningGym(SeededTask):
    """Questions of a reasoning-gym generator: `corral train --task reasoning_gym --set task_config.generator=chain_sum`.

    The answer is what stands in the last <answer>…</answer>, else the whole completion without the space around it. The reward
    is the generator's own score of it, cut to 0..1; many give a little for a wrong answer. Scorers run under a time limit in
    processes of their own, and never get text that they would execute.

    Ref: arXiv:2505.24760.
    """

    name: ClassVar[str] = "reasoning_gym"

    generator: str = "chain_sum"
    """Name of a generator in reasoning_gym.factory.DATASETS: chain_sum, spell_backward, basic_arithmetic, …"""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the generator itself, such as {"min_terms": 2}. The task chooses `seed` and `size`."""
    max_completion_length: int = limited(512, at_least=1, at_most=1_000_000)
    """Largest number of tokens that a correct completion may need."""
    time_limit: float = limited(2.0, above=0, at_most=3600, what="a number of seconds")
    """Seconds of processor time for one answer. A slower answer scores 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = library("reasoning_gym.factory", "the task reasoning_gym").DATASETS
        if self.generator not in known:
            raise ValueError(f"reasoning_gym: there is no generator {self.generator!r}.{nearest(self.generator, known)}")
        if taken := {"seed", "size"} & set(self.settings):
            raise ValueError(f"reasoning_gym: `{taken.pop()}` is decided by the task; the run's seed draws the problems.")
        try:
            next(self._entries(0))
        except Exception as error:  # its own checks are assertions and TypeErrors
            raise ValueError(
                f"reasoning_gym: {self.generator} refuses {self.settings}: {type(error).__name__}: {error}"
            ) from error

    @cached_property
    def _drawn(self) -> dict[str, dict[str, Any]]:
        """Map from each drawn question to the generator's entry, which the scorer needs.

        It is no field of the dataclass, and so no setting.
        """
        return {}

    def _prompts(self, seed: int, *, held_out: bool) -> Iterator[str]:
        """Yield distinct questions of one split until no new question comes. Training questions then repeat in other orders."""
        start = digest(f"{self.generator} {seed}") % (HALF // _CHUNK) * _CHUNK
        seen, misses, chunk = dict[str, None](), 0, 0
        while misses <= MAX_MISSES:
            for entry in self._entries((start + chunk * _CHUNK) % HALF + HALF * held_out):
                question = entry["question"]
                misses += 1
                if question not in seen and in_held_out_share(question, _SHARE) is held_out:
                    seen[question], misses = None, 0
                    self._drawn.setdefault(question, entry)
                    yield question
            chunk += 1
        if held_out:
            return
        if not seen:
            raise ValueError(f"reasoning_gym: {self.generator} with {self.settings} has no question to train on.")
        yield from epochs(list(seen), self.name, seed)

    def verify_all(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """Return scores from 0 to 1 by the generator's scorer, in parallel. Raises ValueError for a prompt never drawn."""
        if unknown := [prompt for prompt in prompts if prompt not in self._drawn]:
            raise self.foreign(unknown[0])
        entries = [self._drawn[prompt] for prompt in prompts]
        answers = [answer_of(completion) for completion in completions]
        harmless = [is_harmless(one, entry, self.generator) for one, entry in zip(answers, entries, strict=True)]
        rows = zip(entries, answers, harmless, strict=True)
        requests = [(self.generator, self.settings, entry, answer) for entry, answer, ok in rows if ok]
        scores = iter(grader_pool("reasoning_gym").grade(requests, self.time_limit) if requests else ())
        return [min(max(next(scores).score, 0.0), 1.0) if ok else 0.0 for ok in harmless]

    def _entries(self, seed: int) -> Iterator[dict[str, Any]]:
        """Yield the entries (question, answer, metadata) of the generator for the seeds `seed` to `seed` + _CHUNK − 1."""
        make = library("reasoning_gym", "the task reasoning_gym").create_dataset
        made = make(self.generator, **self.settings, seed=seed, size=_CHUNK)
        for index in range(_CHUNK):
            state = random.getstate()
            random.seed(seed + index)  # some generators draw from Python's global random state
            try:
                entry = made[index]
            finally:
                random.setstate(state)
            yield entry


def answer_of(completion: str) -> str:
    """Text in the last <answer>…</answer> of a completion, or else the whole completion, without surrounding space."""
    before, end, _ = completion.rpartition("</answer>")
    _, start, inside = before.rpartition("<answer>")
    return (inside if end and start else completion).strip()


def is_harmless(answer: str, entry: dict[str, Any], generator: str) -> bool:
    """True if an answer is safe for its scorer: not too long, no NaN, and nothing that eval() could run.

    A text without brackets is no literal yet: a comprehension can make exec the method that an index calls, and the name of a
    scorer's own variable is the right answer.
    """
    if len(answer) > _MAX_ANSWER:
        return False
    metadata = entry.get("metadata", {})
    if answer == str(entry["answer"]).strip() or answer in (metadata.get("valid_answers") or ()):
        return True
    if _NOT_A_NUMBER.search(answer):
        return False
    source = metadata.get("source_dataset", generator)
    if {source, generator} & LITERALS:
        try:
            ast.literal_eval(answer)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return False
        return True
    if not {source, generator} & FORMULAS:
        return True
    words = re.findall(r"[A-Za-z]+", answer)
    return _FORMULA.fullmatch(answer) is not None and all(len(word) == 1 or word in _WORDS for word in words)
