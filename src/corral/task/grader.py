"""Graders that may hang, in processes of their own: a real time limit in any thread of any process.

math-verify and some scorers of reasoning-gym hand text to sympy, which can compute for years. Their own limits are alarms: they
work in the main thread alone, and not inside a long call into C. Here a worker that takes too long is killed and another one
started; the answer it had is wrong, and counted.
"""

import atexit
import logging
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

LOG = logging.getLogger("corral.task")
SCRIPT = Path(__file__).with_name("grader_worker.py")

START_SECONDS = 300.0
"""After so long a worker that has not said that it is ready never will; importing sympy takes one or two seconds."""

WALL_FACTOR = 4.0
"""A worker has `seconds` of processor time, and this many times as long on the clock."""

Status = Literal["graded", "timeout", "error", "died"]


@dataclass(frozen=True)
class Verdict:
    """What came of one question; the score is 0 unless it was graded."""

    status: Status
    score: float = 0.0


class Worker:
    """One process that grades, one question at a time."""

    def __init__(self, kind: str) -> None:
        # -P: the folder of the script has a math.py, which must not stand in for Python's own.
        command = [sys.executable, "-P", str(SCRIPT), kind]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, start_new_session=True, bufsize=0)
        self.read = b""
        if self._line(START_SECONDS) != "ready":
            self.close()
            raise RuntimeError(f"the grader's process does not start: {' '.join(command)} says why.")

    def ask(self, arguments: tuple[Any, ...], seconds: float) -> Verdict:
        """The verdict on one question. After anything but "graded" or "error" the worker is gone."""
        question = pickle.dumps((seconds, arguments))
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(len(question).to_bytes(8, "big") + question)
        except OSError:
            return Verdict("died")
        line = self._line(WALL_FACTOR * seconds)
        if line is None:
            return Verdict("timeout")
        status, _, value = line.partition(" ")
        if status == "score":
            return Verdict("graded", float(value))
        if status == "error":
            return Verdict("error")
        # The end of the pipe: the limit on processor time ended it, or something worse.
        return Verdict("timeout" if self.process.wait() == -signal.SIGPROF else "died")

    def close(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _line(self, seconds: float) -> str | None:
        """The next line; None if it does not come in time, "" if it never will."""
        deadline = time.monotonic() + seconds
        assert self.process.stdout is not None
        while b"\n" not in self.read:
            ready, _, _ = select.select([self.process.stdout], [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                return None
            piece = os.read(self.process.stdout.fileno(), 4096)
            if not piece:
                return ""
            self.read += piece
        line, _, self.read = self.read.partition(b"\n")
        return line.decode()


class Pool:
    """Workers of one kind, started when they are needed. Any thread may ask."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.size, self.owner = kind, size, os.getpid()
        self.counts: Counter[str] = Counter()
        self.idle: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self.idle.put(None)

    def grade(self, questions: Sequence[tuple[Any, ...]], seconds: float) -> list[Verdict]:
        """A verdict for each; what hangs, fails or kills its worker is wrong and counted."""
        if len(questions) < 2:
            return [self._one(question, seconds) for question in questions]
        with ThreadPoolExecutor(min(self.size, len(questions))) as threads:
            return list(threads.map(lambda question: self._one(question, seconds), questions))

    def _one(self, question: tuple[Any, ...], seconds: float) -> Verdict:
        verdict = self._asked(question, seconds)
        if verdict.status == "died":
            verdict = self._asked(question, seconds)  # someone else may have killed it; a deadly answer kills twice
        self._count(verdict.status)
        return verdict

    def _asked(self, question: tuple[Any, ...], seconds: float) -> Verdict:
        worker, verdict = self.idle.get(), None
        try:
            worker = worker or Worker(self.kind)
            verdict = worker.ask(question, seconds)
            return verdict
        finally:
            if worker is not None and (verdict is None or verdict.status in ("timeout", "died")):
                worker.close()
                worker = None
            self.idle.put(worker)

    def _count(self, status: Status) -> None:
        self.counts[status] += 1
        number = self.counts[status]
        if status != "graded" and str(number).strip("0") == "1":  # 1, 10, 100, …
            LOG.warning("grader %s: %s, %d so far; such answers count as wrong.", self.kind, status, number)

    def close(self) -> None:
        """End all workers, once they are idle, unless they are another process's from which this one was forked."""
        if self.owner != os.getpid():
            return
        for worker in [self.idle.get() for _ in range(self.size)]:
            if worker is not None:
                worker.close()
            self.idle.put(None)


_POOLS: dict[tuple[int, str], Pool] = {}


def pool(kind: str) -> Pool:
    """This process's pool of a kind; a process that was forked has its own."""
    key = (os.getpid(), kind)
    if key not in _POOLS:
        _POOLS[key] = Pool(kind, min(4, len(os.sched_getaffinity(0))))
        atexit.register(_POOLS[key].close)
    return _POOLS[key]


def grader_counts() -> dict[str, dict[str, int]]:
    """How many answers were graded, hung, failed or killed their grader, by kind of grader, in this process."""
    return {kind: dict(one.counts) for (process, kind), one in _POOLS.items() if process == os.getpid()}
