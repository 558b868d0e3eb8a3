"""Program of a grading process, which reads requests from standard input and writes one line with a verdict for each.

This file is run as a script, by its path: it imports nothing of corral that imports torch. A request is
eight bytes of length and a pickle of (seconds, arguments); a verdict is "graded 0.5", "error" or "timeout".

A fork answers, and the process itself waits: it answers where the fork has run out of time, and forks again.
"""

import gc
import math
import os
import pickle
import resource
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MEMORY = 4 * 2**30
"""Limit on a grading process's address space, in bytes, so that a huge power such as 9^9^9 ends in MemoryError."""


def _load_math() -> Callable[..., float]:
    """Load math-verify, and return a function (reference, answer) → 1.0 if both are equal, else 0.0."""
    from math_verify import LatexExtractionConfig, parse, verify

    latex = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(text: str) -> Any:
        # The time limit is ours: math-verify's own is an alarm that it would set for itself.
        return parse(rf"\boxed{{{text}}}", latex, fallback_mode="no_fallback", parsing_timeout=None)

    def score(gold: str, answer: str) -> float:
        return float(verify(read(gold), read(answer), timeout_seconds=None, raise_on_error=True))

    score("1", r"\frac{2}{2}")  # the parser's tables are made at its first use, which every fork would do again
    return score


def _load_reasoning_gym() -> Callable[..., float]:
    """Load reasoning-gym, and return a function (generator, settings, entry, answer) → the generator's score."""
    import reasoning_gym

    made: dict[str, Any] = {}

    def score(generator: str, settings: dict[str, Any], entry: dict[str, Any], answer: str) -> float:
        key = repr((generator, settings))
        if key not in made:
            made[key] = reasoning_gym.create_dataset(generator, **settings, seed=0, size=1)
        return float(made[key].score_answer(answer, entry))

    return score


def _load_code() -> Callable[..., float]:
    """Return a function (comparison, tolerance, output, expected results) → number of correct results."""
    # By its path: the packages around it import torch.
    count_right: Callable[..., float] = runpy.run_path(str(Path(__file__).with_name("code") / "value.py"))["count_right"]
    return count_right


LOADERS: dict[str, Callable[[], Callable[..., float]]] = {
    "math": _load_math, "reasoning_gym": _load_reasoning_gym, "code": _load_code,
}  # fmt: skip


def main(kind: str) -> None:
    """Load a grader of one kind, and answer requests in a forked process, which is replaced after every timeout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which still has a step to finish
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a library that prints must not answer, be it in C
    score = LOADERS[kind]()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers.write("ready\n")
    gc.collect()
    gc.freeze()
    while child := os.fork():
        _, status = os.waitpid(child, 0)
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF):
            return
        answers.write("timeout\n")  # a new fork takes milliseconds, and loading sympy anew seconds
    questions = sys.stdin.buffer
    while len(header := questions.read(8)) == 8:  # this is the fork, which answers until the input or its time ends
        seconds, arguments = pickle.loads(questions.read(int.from_bytes(header, "big")))
        # Processor time, so that a busy machine grades as an idle one does. SIGPROF ends the process, whatever it is doing.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            number = float(score(*arguments))
            line = f"graded {number!r}" if math.isfinite(number) else "error"
        except BaseException:  # anything at all that a grader raises is an answer
            line = "error"
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(line + "\n")
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
