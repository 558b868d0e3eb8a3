"""Memory use of all processes of a program together, read from /proc. The kernel limits each process alone."""

import _socket
import os

from corral.lab.sandbox.inside import kernel

_PAGE = os.sysconf("SC_PAGE_SIZE")

_PAGES_PER_PAGE_OF_MAPS = 16
"""Number of address-space pages counted as one page of kernel memory, which stores about 230 bytes per map."""


class Memory:
    """Reader of memory use from an open folder /proc, which has no path inside the sandbox."""

    def __init__(self, proc: int, events: int | None) -> None:
        self.proc, self.events = proc, events
        self.baseline = self._pages("self")[0] * _PAGE
        """Bytes of address space of this process at its start, which every program inherits."""
        _, resident, shared = self._pages("self")
        self._shared = resident - shared  # pages that a child shares with us until it writes to them
        self._kills = self._out_of_memory_kills()
        one, other = _socket.socketpair()
        self._socket = 3 * one.getsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF) // 2  # the last message may be half as large
        one.close()
        other.close()
        self.usage()  # what cannot be read here should show now, not in the middle of a program

    def usage(self) -> int:
        """Bytes that a program's processes, sockets and memory maps use beyond the baseline.

        The kernel's own memory for maps cannot be read for each process. So as much is counted as it would be if every page of
        the address space were a map; but not of the largest process, whose address space is limited by itself.
        """
        total, queue, spaces = 0, self._children("self"), [0]
        while queue:
            number = queue.pop()
            try:
                size, resident, shared = self._pages(number)
                total += max(0, resident - shared - self._shared)
                spaces.append(max(0, size - self.baseline // _PAGE))
                queue += self._children(number)
            except OSError:  # it has ended meanwhile
                continue
        total += (sum(spaces) - max(spaces)) // _PAGES_PER_PAGE_OF_MAPS
        sockets = self._read("self/net/unix").count("\n") - 1  # those of this network namespace, below a line of titles
        return total * _PAGE + sockets * self._socket

    def ran_out(self) -> bool:
        """True if the kernel has killed a process for lack of memory since the last call of this method.

        With a cgroup, only its processes count.
        """
        before, self._kills = self._kills, self._out_of_memory_kills()
        return self._kills > before

    def group_ran_out(self) -> bool:
        """True if the kernel has killed a process in the cgroup for lack of memory. False without a cgroup."""
        return self.events is not None and self.ran_out()

    def _children(self, number: str) -> list[str]:
        return [
            child for task in self._names(f"{number}/task") for child in self._read(f"{number}/task/{task}/children").split()
        ]

    def _pages(self, number: str) -> tuple[int, int, int]:
        size, resident, shared, *_ = map(int, self._read(f"{number}/statm").split())
        return size, resident, shared

    def _out_of_memory_kills(self) -> int:
        text = self._read("vmstat") if self.events is None else os.pread(self.events, 4096, 0).decode()
        lines = text.splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def _names(self, path: str) -> list[str]:
        folder = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.proc)
        try:
            return os.listdir(folder)
        finally:
            os.close(folder)

    def _read(self, path: str) -> str:
        return kernel.read_at(self.proc, path)
