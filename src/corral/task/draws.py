"""Procedural tasks: problems drawn by random seed, and a held-out split that never leaks."""

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import islice
from typing import ClassVar

_HELD_OUT_SHARE = 10
"""One problem in this many is held out."""

MAX_MISSES = 100_000
"""Draws without a problem of the wanted kind after which there is none; below 1 in 10,000 drawing would be hopeless anyway."""


class ProceduralTask(ABC):
    """A task that draws its problems: training and held-out ones by seed, each with an answer."""

    name: ClassVar[str]
    NO_PROBLEM: ClassVar[str] = "Try other settings."
    """What to do where none is found."""

    def train_prompts(self, count: int, seed: int) -> list[str]:
        """`count` prompts to learn from, drawn with replacement."""
        return [prompt for prompt, _ in self.demonstrations(count, seed)]

    def held_out_prompts(self, count: int, seed: int) -> list[str]:
        """`count` prompts to evaluate on, which training never sees in any form."""
        return [prompt for prompt, _ in islice(self._draw(seed, held_out=True), require_count(self.name, count))]

    def demonstrations(self, count: int, seed: int) -> list[tuple[str, str]]:
        """`train_prompts(count, seed)`, each with a right answer."""
        return list(islice(self._draw(seed, held_out=False), require_count(self.name, count)))

    @abstractmethod
    def verify(self, prompt: str, completion: str) -> float:
        """1.0 iff `completion` is a right answer; 0.0 for any other text.

        Args:
            prompt: as drawn by this task; anything else is a ValueError, since a reward of 0 would hide the mistake.
            completion: any text at all, without the tokens that end it.
        """

    def _draw(self, seed: int, *, held_out: bool) -> Iterator[tuple[str, str]]:
        """Endless (prompt, answer) of one split."""
        draw, misses = uniform(self.name, seed, held_out=held_out), 0
        while misses < MAX_MISSES:
            misses += 1
            problem = self._propose(draw, lambda text: in_held_out_share(text) is held_out)
            if problem is not None:
                yield problem
                misses = 0
        raise ValueError(
            f"{self}: no {'held-out' if held_out else 'training'} problem in {MAX_MISSES} draws. {self.NO_PROBLEM}"
        )

    @abstractmethod
    def _propose(self, draw: Callable[[], float], wanted: Callable[[str], bool]) -> tuple[str, str] | None:
        """One (prompt, answer), or None where what was drawn is no problem or of the other split.

        Args:
            draw: random numbers in 0..1.
            wanted: whether a problem, written in one way only, is of the split that is drawn from.
        """


def uniform(task: str, seed: int, *, held_out: bool) -> Callable[[], float]:
    """Numbers in 0..1, the same for the same task, split and seed on every machine."""
    # A text seeds through SHA-512, and random() alone is promised to give the same numbers in every Python version.
    return random.Random(f"{task} {'held out' if held_out else 'train'} {seed}").random


def in_held_out_share(text: str, share: int = _HELD_OUT_SHARE) -> bool:
    """Whether a problem, written in one way only, is for evaluation only. It depends on nothing else."""
    return digest(text) % share == 0


def digest(text: str) -> int:
    """64 bits that stand for a text; lone surrogates, which no UTF-8 has, are a text too."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def permutation(count: int, draw: Callable[[], float]) -> list[int]:
    """0 to count − 1 in a random order."""
    keys = [draw() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)


def require_count(task: str, count: int) -> int:
    """A number of prompts, or the reason why it is none."""
    if count < 0:
        raise ValueError(f"{task}: `count` is a number of prompts and cannot be negative; got {count}.")
    return count


def quote(prompt: str, length: int = 60) -> str:
    """A prompt as an error quotes it."""
    return repr(prompt if len(prompt) <= length else prompt[:length] + "…")
