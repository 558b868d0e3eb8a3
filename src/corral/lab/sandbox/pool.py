"""Pool of sandboxed interpreters that runs several programs at a time, with a deadline for every wait."""

import logging
import os
import sys
from functools import cache

from corral.cores import cores
from corral.lab.sandbox.backend import BACKENDS, refusal
from corral.lab.sandbox.result import SandboxJob, SandboxResult
from corral.lab.sandbox.unsafe import run_unsafe, run_unsafe_connected
from corral.lab.sandbox.view import SandboxUnavailable
from corral.lab.sandbox.worker import SandboxWorker, run_connected
from corral.lab.workers import WorkerLost, WorkerPool

_LOG = logging.getLogger("corral.task")

USES = 2000
"""Number of programs after which a sandbox worker is replaced."""

CGROUP = "memory bounded by a cgroup"
POLLING = "memory bounded by limits, polling all processes every 20 ms, and the filter: no cgroup is delegated"


@cache
def _probe(backend: str) -> tuple[str, str]:
    """Try a backend with an empty program. Returns the reason for a failure (else ""), and the mechanism that bounds memory."""
    try:
        with SandboxWorker(backend) as worker:
            worker.run(SandboxJob(code=""))
            return "", CGROUP if worker.group else POLLING
    except (SandboxUnavailable, WorkerLost, OSError) as error:
        return str(error).removeprefix("sandbox: ").removeprefix(f"{backend}: "), ""


def why_not(backend: str) -> str:
    """Return the reason why a backend does not work on this system, or "" if the backend works."""
    return _probe(backend)[0]


def memory_bound(backend: str) -> str:
    """Return the name of the mechanism that bounds the total memory of a program's processes, for a working backend."""
    return _probe(backend)[1]


def available_backend(backend: str | None = None) -> str:
    """Return the given backend, or the first backend that works. Raises SandboxUnavailable with the reasons if none works."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"sandbox: `backend` is one of {', '.join(BACKENDS)}, or None for the best there is; got {backend!r}.")
    if not sys.platform.startswith("linux"):
        raise refusal(f"it runs {sys.platform}")
    reasons = []
    for name in (backend,) if backend else BACKENDS:
        if not (reason := why_not(name)):
            return name
        reasons.append(f"{name}: {reason}")
    raise refusal("; ".join(reasons))


class SandboxPool(WorkerPool[SandboxWorker]):
    """Pool of workers that run untrusted programs, as a context manager: `pool.map(pool.run_one, jobs)`.

    A program whose worker died is run once more, since it may not have been its fault; one whose worker hung counts as timed
    out.

    Args:
        workers: programs at a time, or pairs of programs that talk; None for one per core that this process may use.
        backend: "bwrap" or "unshare"; None takes the first that works.
        unsafe_code_execution: where neither works, run programs as the user, with limits and no isolation, instead of refusing.
    """

    def __init__(self, workers: int | None = None, *, backend: str | None = None, unsafe_code_execution: bool = False) -> None:
        size = cores() if workers is None else workers
        if type(size) is not int or size < 1:
            raise ValueError(f"pool: `workers` is a whole number above 0, or None for one per core; got {workers!r}.")
        self.backend: str | None
        try:
            self.backend = available_backend(backend)
        except SandboxUnavailable:
            if not unsafe_code_execution:
                raise
            self.backend = None
        super().__init__(size, USES)

    def _start(self) -> SandboxWorker:
        assert self.backend is not None
        return SandboxWorker(self.backend)

    def run_one(self, job: SandboxJob) -> SandboxResult:
        """Run one program in a sandbox, and return the result when the program has ended."""
        if self.backend is None:
            return run_unsafe(job)
        try:
            return self.use(lambda worker: worker.run(job))
        except WorkerLost as lost:
            return _result_of_lost(lost, job)

    def run_connected(self, first: SandboxJob, second: SandboxJob) -> tuple[SandboxResult, SandboxResult]:
        """Run two programs at the same time, each in its own sandbox and reading the other's output."""
        if self.backend is None:
            return run_unsafe_connected(first, second)
        try:
            return self.use(lambda one, other: run_connected((one, other), first, second), count=2)
        except WorkerLost as lost:
            return _result_of_lost(lost, first), _result_of_lost(lost, second)


def _result_of_lost(lost: WorkerLost, job: SandboxJob) -> SandboxResult:
    _LOG.warning("%s The program counts as %s.", lost, "timed out" if lost.hung else "failed")
    if lost.hung:
        return SandboxResult("timeout", "", str(lost), job.limits.timeout)
    return SandboxResult("error", "", str(lost), 0.0)


@cache
def _shared(owner: int, workers: int | None, backend: str | None, unsafe_code_execution: bool) -> SandboxPool:
    return SandboxPool(workers, backend=backend, unsafe_code_execution=unsafe_code_execution)


def shared_pool(workers: int | None = None, *, backend: str | None = None, unsafe_code_execution: bool = False) -> SandboxPool:
    """Return the calling process's pool with these settings, which opens at the first call and closes when the process ends."""
    return _shared(os.getpid(), workers, backend, unsafe_code_execution)
