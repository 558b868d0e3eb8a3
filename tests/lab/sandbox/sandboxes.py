"""Sandboxes for the tests: every backend that works here; the others are skipped, with their reason."""

import functools
import os
import sys
import time
from pathlib import Path

import pytest

from corral.lab.sandbox import SandboxJob, SandboxLimits, SandboxResult
from corral.lab.sandbox.backend import BACKENDS
from corral.lab.sandbox.pool import SandboxPool, why_not


def reason(backend: str) -> str:
    """Why a backend cannot be tested here; "" where it can."""
    return why_not(backend) if sys.platform.startswith("linux") else f"this is {sys.platform}"


EVERY_BACKEND = [
    pytest.param(name, marks=pytest.mark.skipif(bool(reason(name)), reason=f"{name}: {reason(name)}")) for name in BACKENDS
]
NONE_WORKS = all(reason(name) for name in BACKENDS)
needs_a_sandbox = pytest.mark.skipif(NONE_WORKS, reason="; ".join(f"{name}: {reason(name)}" for name in BACKENDS))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@functools.cache
def pool(backend: str) -> SandboxPool:
    """One warm worker per backend, for all tests of a process; closed when it ends."""
    return SandboxPool(1, backend=backend)


def run(backend: str, code: str, stdin: str = "", timeout: float = 5.0, memory_mb: int = 256, **limits: int) -> SandboxResult:
    """One program in that worker."""
    return pool(backend).run_one(
        SandboxJob(code=code, stdin=stdin, limits=SandboxLimits(timeout=timeout, memory_mb=memory_mb, **limits))
    )


def group(leader: int) -> list[str]:
    """Live members of a process group."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, _, number = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(number) == leader and state != "Z":
            found.append(name)
    return found


def alive_after_a_while(leader: int) -> list[str]:
    """Members of a process group that are still there after some seconds."""
    deadline = time.monotonic() + 10
    while group(leader) and time.monotonic() < deadline:
        time.sleep(0.05)
    return group(leader)
