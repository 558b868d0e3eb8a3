"""Sandbox, the only package that runs programs written by a model. docs/safety.md lists its guarantees and their limits."""

from corral.lab.sandbox.pool import SandboxPool, available_backend, memory_bound
from corral.lab.sandbox.result import SandboxJob, SandboxLimits, SandboxResult, SandboxStatus
from corral.lab.sandbox.view import SandboxUnavailable
from corral.lab.sandbox.worker import SandboxWorker

__all__ = [
    "SandboxJob", "SandboxLimits", "SandboxPool", "SandboxResult", "SandboxStatus", "SandboxUnavailable", "SandboxWorker",
    "available_backend", "memory_bound", "run_python",
]  # fmt: skip


def run_python(
    code: str,
    stdin: str = "",
    timeout: float = 5.0,
    memory_mb: int = 512,
    *,
    backend: str | None = None,
    unsafe_code_execution: bool = False,
) -> SandboxResult:
    """Run an untrusted program in a fresh sandbox.

    Args:
        code: Python, standard library only.
        stdin: what it reads; it writes to `stdout` and `stderr`, at most 1 MiB each.
        timeout: seconds of wall time.
        memory_mb: memory beyond the bare interpreter's, in MiB, all its processes together.
        backend: "bwrap" or "unshare"; None takes the first that works.
        unsafe_code_execution: where neither works, run it as the user, with limits and no isolation, instead of refusing.
    Returns:
        How it ended, and what it wrote. Never raises for what the program does.
    """
    job = SandboxJob(code=code, stdin=stdin, limits=SandboxLimits(timeout=timeout, memory_mb=memory_mb))
    with SandboxPool(1, backend=backend, unsafe_code_execution=unsafe_code_execution) as pool:
        return pool.run_one(job)
