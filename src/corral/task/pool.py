"""Many programs, several at a time: a warm interpreter behind the wall per worker, results in order, no wait without an end."""

import atexit
import collections
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import TracebackType
from typing import Any, TypeVar, cast

from corral.run.cores import cores
from corral.task.sandbox.result import Job, SandboxResult
from corral.task.sandbox.unsafe import run_unsafe, run_unsafe_connected
from corral.task.sandbox.view import SandboxUnavailable
from corral.task.sandbox.worker import Worker, WorkerLost, available_backend, run_connected

LOG = logging.getLogger("corral.task")

USES = 2000
"""Programs after which a worker is replaced, so that nothing in it can grow without end."""

Result = TypeVar("Result")


class Pool:
    """Workers that run programs of unknown origin; a context manager.

    A worker is started when it is first needed. One that dies or hangs is replaced: a program that was under way when a worker
    died is run once more, since it may not have been its fault; one whose worker hung counts as timed out.

    Args:
        workers: programs at a time, or pairs of programs that talk; None for one per core that this process may use.
        backend: "bwrap" or "unshare"; None takes the first that works.
        unsafe_code_execution: where neither works, run programs as the user, with limits and no wall, instead of refusing.
    """

    def __init__(self, workers: int | None = None, *, backend: str | None = None, unsafe_code_execution: bool = False) -> None:
        self.size = cores() if workers is None else workers
        if type(self.size) is not int or self.size < 1:
            raise ValueError(f"pool: `workers` is a whole number above 0, or None for one per core; got {workers!r}.")
        self.backend: str | None
        try:
            self.backend = available_backend(backend)
        except SandboxUnavailable:
            if not unsafe_code_execution:
                raise
            self.backend = None
        self._owner = os.getpid()
        self._idle: list[tuple[Worker, int]] = []
        self._lock = threading.Lock()
        self._closed = False
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="corral-pool")
        _open_pools.add(self)

    def run(self, jobs: Iterable[Job]) -> list[SandboxResult]:
        """Run every program; results in the order of the jobs."""
        return self.map(self.run_one, list(jobs))

    def run_one(self, job: Job) -> SandboxResult:
        """Run one program, in this thread."""
        if self.backend is None:
            return run_unsafe(job)
        (result,) = self._with_workers(1, lambda workers: (workers[0].run(job),))
        return result

    def run_connected(self, first: Job, second: Job) -> tuple[SandboxResult, SandboxResult]:
        """Run two programs side by side, each in a worker of its own and reading what the other writes, in this thread."""
        if self.backend is None:
            return run_unsafe_connected(first, second)
        one, other = self._with_workers(2, lambda workers: run_connected((workers[0], workers[1]), first, second))
        return one, other

    def map(self, function: Callable[..., Result], *items: Sequence[Any]) -> list[Result]:
        """`function` of every item, several at a time, in order; it may call `run_one` and `run_connected`."""
        self._check()
        rows = list(zip(*items, strict=True))
        if len(rows) <= 1:
            return [function(*row) for row in rows]
        results: list[Result | None] = [None] * len(rows)
        todo = collections.deque(enumerate(rows))

        def work() -> None:  # many rows per thread: to wake another one for each of them takes its time
            while todo:
                try:
                    index, row = todo.popleft()
                except IndexError:  # someone else has the last one
                    return
                try:
                    results[index] = function(*row)
                except BaseException:
                    todo.clear()
                    raise

        try:
            for thread in [self._threads.submit(work) for _ in range(min(self.size, len(rows)))]:
                thread.result()
        finally:
            todo.clear()  # after Ctrl-C here the threads would go on to the last row, and the process wait for them
        return cast(list[Result], results)

    def _with_workers(self, count: int, use: Callable[[list[Worker]], tuple[SandboxResult, ...]]) -> tuple[SandboxResult, ...]:
        """Borrow workers, for a program each; replace them where one fails."""
        for last in (False, True):
            borrowed: list[tuple[Worker, int]] = []
            try:
                while len(borrowed) < count:
                    borrowed.append(self._take())
                results = use([worker for worker, _ in borrowed])
            except WorkerLost as lost:
                self._discard(borrowed)
                if lost.hung or last:
                    LOG.warning("%s The program counts as %s.", lost, "timed out" if lost.hung else "failed")
                    return (SandboxResult("timeout" if lost.hung else "error", "", str(lost), 0.0),) * count
            except BaseException:
                self._discard(borrowed)
                raise
            else:
                for worker, uses in borrowed:
                    self._put(worker, uses + 1)
                return results
        raise AssertionError("unreachable")

    def _check(self) -> None:
        """Refuse what would hang: a fork has neither the threads nor, alone, the workers, and copies a lock as it was."""
        if self._owner != os.getpid():
            raise RuntimeError("pool: it belongs to the process that opened it; open another one after a fork.")
        if self._closed:
            raise RuntimeError("pool: it has been closed.")

    def _take(self) -> tuple[Worker, int]:
        self._check()
        with self._lock:
            if self._idle:
                return self._idle.pop()
        assert self.backend is not None
        return Worker(self.backend), 0

    def _put(self, worker: Worker, uses: int) -> None:
        with self._lock:
            if not self._closed and uses < USES:
                self._idle.append((worker, uses))
                return
        worker.close()

    def _discard(self, borrowed: list[tuple[Worker, int]]) -> None:
        for worker, _ in borrowed:
            worker.kill()
            worker.close()

    def close(self) -> None:
        """Wait for what is under way, which its time limits bound, and end every worker. A second call does nothing, nor does
        one in a forked process, whose they are not."""
        if self._owner != os.getpid():
            return
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker, _ in idle:
            worker.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


_open_pools: "weakref.WeakSet[Pool]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_open_pools):
        pool.close()


@cache
def _shared(owner: int, workers: int | None, backend: str | None, unsafe_code_execution: bool) -> Pool:
    return Pool(workers, backend=backend, unsafe_code_execution=unsafe_code_execution)


def shared_pool(workers: int | None = None, *, backend: str | None = None, unsafe_code_execution: bool = False) -> Pool:
    """The pool of this process with these settings: opened at the first call, closed when the process ends."""
    return _shared(os.getpid(), workers, backend, unsafe_code_execution)
