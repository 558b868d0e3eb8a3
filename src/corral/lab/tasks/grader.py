"""Worker processes that grade answers, so that a grader that hangs can be killed.

Any thread of any process can use them.

math-verify and some scorers of reasoning-gym hand text to sympy, which can compute for years. Their own limits are alarms: they
work in the main thread alone, and not inside a long call into C. Results of functions under test are read and compared here
too, since the functions may have forged them. A worker that takes too long is killed and another one started; the answer it had
is wrong, and counted. Every wait has a deadline.
"""

import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from corral.cores import cores
from corral.lab.workers import WorkerLost, WorkerPool, WorkerProcess

_LOG = logging.getLogger("corral.task")
SCRIPT = Path(__file__).with_name("grader_worker.py")

_START_SECONDS = 300.0
"""Time limit for the start of a grading process, in seconds. Importing sympy takes one or two seconds."""

_WALL_FACTOR = 4.0
"""Ratio of a grading process's wall-clock limit to its limit on processor time."""
_LEAST_WALL_SECONDS = 2.0
"""Smallest wall-clock limit of a grading process, in seconds. It is generous, since a killed process must be restarted."""

_LEAST_SECONDS = 0.25
"""Smallest limit on the processor time for grading one answer, in seconds.

The limit falls for problems whose answers keep timing out; ordinary answers need far less.
"""

_MAX_PROBLEMS = 10_000
"""Largest number of problems whose timed-out answers are counted."""

MAX_WORKERS = 4
"""Largest number of grading processes of each kind. It is small, since a grading process may hold all of sympy in memory."""

GraderStatus = Literal["graded", "timeout", "error", "died"]


@dataclass(frozen=True)
class Verdict:
    """Outcome of grading one answer. The score is 0 if the answer could not be graded."""

    status: GraderStatus
    score: float = 0.0


class GraderWorker(WorkerProcess):
    """A worker process that grades one answer at a time."""

    def __init__(self, kind: str) -> None:
        # -P: the folder of the script has a math.py, which must not stand in for Python's own.
        command = [sys.executable, "-P", str(SCRIPT), kind]
        self.control, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL, start_new_session=True
            )
        self.control.settimeout(_START_SECONDS)
        ready = b""
        with contextlib.suppress(OSError):
            ready = self.control.recv(4096)
        if ready != b"ready\n":
            self.close()
            raise RuntimeError(f"the grader's process does not start: {' '.join(command)} says why.")

    def ask(self, arguments: tuple[Any, ...], seconds: float) -> Verdict:
        """Send one answer to the grading process and return the verdict. Raises WorkerLost if the process hangs or dies."""
        question = pickle.dumps((seconds, arguments))
        self.control.settimeout(max(_WALL_FACTOR * seconds, _LEAST_WALL_SECONDS))  # a worker that has stopped reads nothing
        try:
            self.control.sendall(len(question).to_bytes(8, "big") + question)
            status, _, value = self.control.recv(4096).decode().strip().partition(" ")  # a line, which it wrote at once
        except OSError as error:
            raise WorkerLost(f"grader: its process does not answer ({error}).", hung=isinstance(error, TimeoutError)) from error
        if status not in ("graded", "error", "timeout"):
            raise WorkerLost("grader: its process has ended.", hung=False)
        return Verdict(cast(GraderStatus, status), float(value or 0.0))


class GraderPool(WorkerPool[GraderWorker]):
    """Pool of grading processes of one kind, which start when needed and can be used from any thread."""

    def __init__(self, kind: str, size: int) -> None:
        super().__init__(size)
        self.kind = kind
        self.counts: Counter[str] = Counter()
        self._bombs: Counter[str] = Counter()
        """Number of timed-out answers to each problem."""

    def _start(self) -> GraderWorker:
        return GraderWorker(self.kind)

    def grade(
        self, questions: Sequence[tuple[Any, ...]], seconds: float, problems: Sequence[str] | None = None
    ) -> list[Verdict]:
        """Grade all answers and return their verdicts in order. Answers that hang, fail or kill their grader score 0.

        With `problems`, the problem of each question, every answer that runs out of time halves the time of the next answers to
        that problem, down to a quarter of a second.
        """
        names = [""] * len(questions) if problems is None else problems
        return self.map(lambda question, problem: self._grade_one(question, problem, seconds), questions, names)

    def _grade_one(self, question: tuple[Any, ...], problem: str, seconds: float) -> Verdict:
        patience = max(seconds / 2 ** min(self._bombs[problem], 16), min(seconds, _LEAST_SECONDS))
        try:
            verdict = self.use(lambda worker: worker.ask(question, patience))
        except WorkerLost as lost:  # where it died, a second time: someone else may have killed the first
            verdict = Verdict("timeout" if lost.hung else "died")
        if problem and verdict.status == "timeout":
            with self._lock:
                if len(self._bombs) >= _MAX_PROBLEMS:
                    self._bombs.clear()
                self._bombs[problem] += 1
        self.count(verdict.status)
        return verdict

    def count(self, status: GraderStatus) -> None:
        """Count a grading outcome, and warn at the 1st, 10th, 100th … answer that could not be graded."""
        with self._lock:
            self.counts[status] += 1
            number = self.counts[status]
        if status != "graded" and str(number).strip("0") == "1":  # 1, 10, 100, …
            _LOG.warning("grader %s: %s, %d so far; such answers count as wrong.", self.kind, status, number)


_POOLS: dict[tuple[int, str], GraderPool] = {}


def grader_pool(kind: str) -> GraderPool:
    """Return the calling process's pool of graders of one kind. A forked process gets a pool of its own."""
    key = (os.getpid(), kind)
    if key not in _POOLS:
        _POOLS.setdefault(key, GraderPool(kind, min(MAX_WORKERS, cores())))  # of two threads, the first one's is everyone's
    return _POOLS[key]


def grader_counts() -> dict[str, dict[str, int]]:
    """Return this process's counts of grading outcomes (graded, timeout, error, died), for each kind of grader."""
    return {kind: dict(one.counts) for (process, kind), one in list(_POOLS.items()) if process == os.getpid()}
