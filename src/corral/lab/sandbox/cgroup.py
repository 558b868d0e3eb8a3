"""Memory control groups (cgroups), one per worker, in which the kernel limits the memory of all processes of a program.

They need a cgroup that is delegated to this user.

Its own memory on their behalf is counted too: pages that a fork has copied, page tables, pipes, sockets, locks. Where none
is delegated (an ordinary login, most containers) the limits of each process, polling all of them, and the filter remain.
"""

import contextlib
import fcntl
import os
import time
from functools import cache
from pathlib import Path

from corral.lab.sandbox.result import SandboxLimits

PREFIX = "corral-"
_LIMIT_AND_EVENTS = {1: ("memory.limit_in_bytes", "memory.oom_control"), 2: ("memory.max", "memory.events")}
"""Names of two files of a cgroup, by cgroup version: the memory limit, and the events with the line `oom_kill`."""
_NO_SWAP = {1: ("memory.swappiness", "0"), 2: ("memory.swap.max", "0")}

_WORKER_BYTES = 48 << 20
"""Bytes of memory that a cgroup's limit adds for the worker itself and for a program's last error message."""
_PROCESS_BYTES = 2 << 20
"""Bytes of memory that a cgroup's limit adds per process, for pages that a fork copies and the kernel's page tables."""
_TRIES = 5
_EXIT_SECONDS = 2.0
"""Seconds to wait for the last process to leave a cgroup."""


class MemoryCgroup:
    """Memory cgroup for one worker, created below the cgroup `parent`. Raises OSError if it cannot be created.

    Its folder is locked for as long as this process lives: one that is not was left by a process that was killed.
    """

    def __init__(self, parent: Path, version: int) -> None:
        sweep(parent)
        self.path, self._bound = parent / f"{PREFIX}{os.urandom(8).hex()}", 0
        self._files: list[int] = []
        limit, events = _LIMIT_AND_EVENTS[version]
        self.limit = self.path / limit
        self.path.mkdir()
        try:
            fcntl.flock(self._open("", os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.members, self.events = self._open("cgroup.procs", os.O_WRONLY), self._open(events, os.O_RDONLY)
            self.set_limit(SandboxLimits())
            swap, value = _NO_SWAP[version]
            if (self.path / swap).exists():  # not where the kernel counts no swap
                (self.path / swap).write_text(value)
        except OSError:
            self.close()
            raise

    def set_limit(self, limits: SandboxLimits) -> None:
        """Set the cgroup's memory limit for the next program.

        Polling normally stops a program earlier, unless its growth is fast or charged to no process.
        """
        memory = limits.memory_mb << 20
        total = memory + min(limits.folder_size, memory) + limits.processes * _PROCESS_BYTES + _WORKER_BYTES
        if total != self._bound:
            self.limit.write_text(str(total))
            self._bound = total

    def close(self) -> None:
        """Remove the cgroup when its last process has ended. A cgroup that cannot be removed is left to the next `sweep`."""
        while self._files:
            os.close(self._files.pop())
        deadline = time.monotonic() + _EXIT_SECONDS
        while self.path.exists():
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)

    def _open(self, name: str, flags: int) -> int:
        self._files.append(os.open(self.path / name, flags | os.O_CLOEXEC))
        return self._files[-1]


def sweep(parent: Path) -> None:
    """Remove those cgroups below `parent` whose worker has been killed."""
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # locked, so someone's; or gone
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.rmdir()
            finally:
                os.close(folder)


@cache
def find_cgroup_parent() -> tuple[Path, int] | None:
    """Find a cgroup in which this user may create cgroups. Returns its path and its cgroup version, or None."""
    for place in places(Path("/proc/self/cgroup"), Path("/proc/self/mountinfo")):
        if group := make_cgroup(*place):
            group.close()
            return place
    return None


def make_cgroup(parent: Path, version: int) -> MemoryCgroup | None:
    """Create a memory cgroup for a worker, or return None if this is not possible.

    Retries, because another process may remove a new group before it is locked.
    """
    for _ in range(_TRIES):
        with contextlib.suppress(OSError):
            return MemoryCgroup(parent, version)
    return None


def places(membership: Path, mounts: Path) -> list[tuple[Path, int]]:
    """List the folders, each with its cgroup version, in which cgroups with a memory limit may be created.

    In version 1 that is below this process's own. In version 2 no group but the root has both processes and groups with limits
    below it, so beside it is the next try; either must pass the memory controller on.
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
        table = [line.partition(" - ") for line in mounts.read_text().splitlines()]
    except OSError:
        return []
    own = {"cgroup" if names else "cgroup2": path for _, names, path in lines if not names or "memory" in names.split(",")}
    found = []
    for left, _, right in table:
        (root, where), (kind, _, options) = left.split()[3:5], right.split()[:3]
        if kind not in own or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        if not (own[kind] + "/").startswith(root.rstrip("/") + "/"):
            continue
        folder = Path(where, own[kind][len(root.rstrip("/")) :].lstrip("/"))
        if kind == "cgroup":
            found.append((folder, 1))
        else:
            found += [(one, 2) for one in (folder, folder.parent) if one.is_relative_to(where) and _delegates_memory(one)]
    return found


def _delegates_memory(folder: Path) -> bool:
    """True if cgroups below this folder can have a memory limit."""
    try:
        return "memory" in (folder / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False
