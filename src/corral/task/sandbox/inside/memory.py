"""How much memory all processes of a program hold together: the kernel's own limit counts each of them alone."""

import os

from corral.task.sandbox.inside import kernel

PAGE = os.sysconf("SC_PAGE_SIZE")


class Memory:
    """Readings of /proc, by an open folder: inside, no path leads there."""

    def __init__(self, proc: int) -> None:
        self.proc = proc
        self.baseline = self._pages("self")[0] * PAGE
        """Address space of this process, which every program starts with."""
        self._shared = self._private("self")  # pages that a child shares with us until it writes to them
        self._kills = self._out_of_memory_kills()

    def used_by(self, handles: list[int]) -> int:
        """Bytes held by processes, given as open pidfds, and everything they have started, beyond what they were born with."""
        total, queue = 0, [self._number(handle) for handle in handles]
        while queue:
            number = queue.pop()
            try:
                total += max(0, self._private(number) - self._shared)
                for task in self._names(f"{number}/task"):
                    queue += self._read(f"{number}/task/{task}/children").split()
            except OSError:  # it has ended meanwhile
                continue
        return total * PAGE

    def ran_out(self) -> bool:
        """Whether the kernel has killed anything for want of memory since the last question."""
        before, self._kills = self._kills, self._out_of_memory_kills()
        return self._kills > before

    def _number(self, handle: int) -> str:
        """The number of a process as this /proc shows it, which may belong to an outer namespace."""
        lines = self._read(f"self/fdinfo/{handle}").splitlines()
        return next(line.split()[1] for line in lines if line.startswith("Pid:"))

    def _private(self, number: str) -> int:
        _, resident, shared = self._pages(number)
        return resident - shared

    def _pages(self, number: str) -> tuple[int, int, int]:
        size, resident, shared, *_ = map(int, self._read(f"{number}/statm").split())
        return size, resident, shared

    def _out_of_memory_kills(self) -> int:
        lines = self._read("vmstat").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def _names(self, path: str) -> list[str]:
        folder = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.proc)
        try:
            return os.listdir(folder)
        finally:
            os.close(folder)

    def _read(self, path: str) -> str:
        return kernel.read_at(self.proc, path)
