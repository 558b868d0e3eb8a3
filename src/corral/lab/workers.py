"""Pool of worker processes: idle workers take jobs, dead or hung workers are replaced, and results keep their order."""

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

EXIT_SECONDS = 2.0
"""Seconds in which a process may exit by itself, and within which a killed process must be gone."""


class WorkerLost(RuntimeError):
    """Raised when a worker process has died or hangs; `hung` is True for a worker that hangs."""

    def __init__(self, message: str, *, hung: bool) -> None:
        super().__init__(message)
        self.hung = hung


class WorkerProcess:
    """A worker process that does one job at a time, and the socket to it. It leads its own process group.

    A job that the process cannot do to its end raises WorkerLost.
    """

    process: subprocess.Popen[bytes]
    control: socket.socket

    def kill(self) -> None:
        """Kill the process and its process group at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that the kernel itself holds dies when it can
            self.process.wait(EXIT_SECONDS)

    def close(self) -> None:
        """Shut down the socket, which ends the process, and wait for its exit."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)  # it sees this even if a forked process has the socket too
        try:
            self.process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self.control.close()


_Worker = TypeVar("_Worker", bound=WorkerProcess)
_Result = TypeVar("_Result")
_Pool = TypeVar("_Pool", bound="WorkerPool[Any]")


class WorkerPool(ABC, Generic[_Worker]):
    """Pool of identical worker processes, each started on first use and usable from any thread. A context manager.

    Args:
        size: jobs of `map` at a time, whoever calls it.
        uses: jobs after which a worker is replaced, so that nothing in it can grow without end; None for never.
    """

    def __init__(self, size: int, uses: int | None = None) -> None:
        self.size, self._uses = size, uses
        self._owner = os.getpid()
        self._idle: list[tuple[_Worker, int]] = []
        self._lock = threading.Lock()
        self._closed = False
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="corral-pool")
        _open_pools.add(self)

    @abstractmethod
    def _start(self) -> _Worker:
        """Start a worker process."""

    def map(self, function: Callable[..., _Result], *items: Sequence[Any]) -> list[_Result]:
        """Apply `function` to every item on the pool's threads; results are in order. `function` may call `use` but not
        `map`."""
        self._check()
        return list(self._threads.map(function, *items))  # on an error, or Ctrl-C here, it cancels what has not begun

    def use(self, job: Callable[..., _Result], count: int = 1) -> _Result:
        """Run `job(*workers)` with `count` workers in the calling thread, and return its result.

        Where one died the job is done once more, on other workers, since it may not have been its fault. WorkerLost where one
        died again, or hung.
        """
        is_last = False
        while True:
            borrowed: list[tuple[_Worker, int]] = []
            try:
                while len(borrowed) < count:
                    borrowed.append(self._take())
                result = job(*(worker for worker, _ in borrowed))
            except BaseException as error:
                for worker, _ in borrowed:
                    worker.kill()
                    worker.close()
                if is_last or not isinstance(error, WorkerLost) or error.hung:
                    raise
                is_last = True
                continue
            for worker, uses in borrowed:
                self._put(worker, uses + 1)
            return result

    def _check(self) -> None:
        """Refuse a closed pool, and a pool inherited by a forked process, which lacks the threads and copies the locks'
        states."""
        if self._owner != os.getpid():
            raise RuntimeError("pool: it belongs to the process that opened it; open another one after a fork.")
        if self._closed:
            raise RuntimeError("pool: it has been closed.")

    def _take(self) -> tuple[_Worker, int]:
        self._check()
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._start(), 0

    def _put(self, worker: _Worker, uses: int) -> None:
        with self._lock:
            if not self._closed and (self._uses is None or uses < self._uses):
                self._idle.append((worker, uses))
                return
        worker.close()

    def close(self) -> None:
        """Wait for running jobs, bounded by their time limits, and end every worker. A second call, or one in a fork, does
        nothing."""
        if self._owner != os.getpid():
            return
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker, _ in idle:
            worker.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self: _Pool) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_open_pools: "weakref.WeakSet[WorkerPool[Any]]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_open_pools):
        pool.close()
