"""Data classes of the sandbox: a job (program and input), its resource limits, and its result."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from corral.validate import Checked, limited

SandboxStatus = Literal["ok", "error", "timeout", "memory", "output"]

MAX_TIMEOUT = 86_400.0
"""Largest time limit of a program in seconds: a day."""


@dataclass(frozen=True)
class SandboxResult:
    """Outcome of a program that ran in the sandbox: its status, output and errors."""

    status: SandboxStatus
    """Outcome: `ok` for exit status 0; `timeout`, `memory` or `output` for an exceeded limit; `error` for any other end."""
    stdout: str
    stderr: str
    """Standard error, decoded like `stdout` as UTF-8 with U+FFFD for invalid bytes, and cut at the output limit."""
    seconds: float
    """Wall time of the program, in seconds."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits(Checked):
    """Resource limits of a program, for all its processes together unless stated otherwise."""

    name: ClassVar[str] = "sandbox"
    """Name of the sandbox in error messages."""

    timeout: float = limited(5.0, above=0, at_most=MAX_TIMEOUT, what="a number of seconds")
    """Time limit in seconds of wall time."""
    memory_mb: int = limited(512, at_least=1, at_most=1 << 20, what="a number of MiB")
    """Memory limit in MiB, in addition to the interpreter's own memory."""
    output: int = limited(1 << 20, at_least=1)
    """Largest number of bytes on standard output. Standard error has the same limit."""
    processes: int = limited(64, at_least=1)
    """Largest number of processes and threads."""
    files: int = limited(64, at_least=1)
    """Largest number of open files per process."""
    file_size: int = limited(32 << 20, at_least=1)
    """Largest size of one file in bytes."""
    folder_size: int = limited(64 << 20, at_least=1)
    """Largest size in bytes of the temporary folder, which is in memory."""
    folder_files: int = limited(4096, at_least=1)
    """Largest number of files in the temporary folder."""


@dataclass(frozen=True, kw_only=True)
class SandboxJob:
    """A program to run in the sandbox, with its standard input and its resource limits."""

    code: str
    stdin: str = ""
    limits: SandboxLimits = SandboxLimits()

    def __post_init__(self) -> None:
        for name, value in (("code", self.code), ("stdin", self.stdin)):
            if not isinstance(value, str):
                raise TypeError(f"sandbox: `{name}` is text (str); got {type(value).__name__}.")


def encode(text: str) -> bytes:
    """Encode a text as UTF-8 for a program. A lone surrogate, which is no character, becomes invalid UTF-8."""
    return text.encode("utf-8", "surrogatepass")
