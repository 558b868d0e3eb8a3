"""File descriptors passed into the sandbox: a program, its input, and the pipes it writes to."""

import os

from corral.lab.sandbox.result import encode


class Pipe:
    """A pipe whose ends are each closed once, at the latest on leaving the context."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)

    def close_writer(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        self.close_writer()
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1

    def __enter__(self) -> "Pipe":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Input:
    """A program's input as an open file. All of it is there from the start, whatever its size."""

    def __init__(self, text: str) -> None:
        self.file = memory_file(encode(text))

    def __enter__(self) -> int:
        return self.file

    def __exit__(self, *_: object) -> None:
        os.close(self.file)


def memory_file(data: bytes) -> int:
    """A read-only open file with `data` that exists in memory only."""
    written = os.memfd_create("input", os.MFD_CLOEXEC)
    try:
        view_left = memoryview(data)
        while view_left:
            view_left = view_left[os.write(written, view_left) :]
        return os.open(f"/proc/self/fd/{written}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(written)
