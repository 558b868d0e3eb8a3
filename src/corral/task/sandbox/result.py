"""What is asked of the sandbox, and what comes back."""

from dataclasses import dataclass
from typing import Literal

SandboxStatus = Literal["ok", "error", "timeout", "memory", "output"]

LONGEST = 86_400.0
"""Seconds that a program may be given: a day."""


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended, and what it wrote."""

    status: SandboxStatus
    """ok: exit status 0. error: any other end. timeout, memory, output: it went beyond that limit and was ended."""
    stdout: str
    stderr: str
    """Both as UTF-8, with U+FFFD for what is none; cut at the output limit."""
    seconds: float
    """Wall time of the program."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What one program may use, all its processes together unless said otherwise."""

    timeout: float = 5.0
    """Seconds of wall time."""
    memory_mb: int = 512
    """Memory beyond the bare interpreter's, in MiB."""
    output: int = 1 << 20
    """Bytes of standard output, and as many of standard error."""
    processes: int = 64
    """Processes and threads."""
    files: int = 64
    """Open files, per process."""
    file_size: int = 32 << 20
    """Bytes of one file."""
    folder_size: int = 64 << 20
    """Bytes of the temporary folder, which is in memory."""
    folder_files: int = 4096
    """Files in it."""

    def __post_init__(self) -> None:
        if not isinstance(self.timeout, int | float) or not 0 < self.timeout <= LONGEST:
            raise ValueError(f"sandbox: `timeout` is a number of seconds above 0, at most a day; got {self.timeout!r}.")
        if type(self.memory_mb) is not int or not 1 <= self.memory_mb <= 1 << 20:
            raise ValueError(f"sandbox: `memory_mb` is a whole number of MiB in 1..{1 << 20}; got {self.memory_mb!r}.")
        for name in ("output", "processes", "files", "file_size", "folder_size", "folder_files"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"sandbox: `{name}` is a whole number above 0; got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class SandboxJob:
    """A program, its input and its limits."""

    code: str
    stdin: str = ""
    limits: SandboxLimits = SandboxLimits()

    def __post_init__(self) -> None:
        for name in ("code", "stdin"):
            if not isinstance(value := getattr(self, name), str):
                raise TypeError(f"sandbox: `{name}` is text (str); got {type(value).__name__}.")


def encode(text: str) -> bytes:
    """Text as a program gets it; a lone surrogate becomes bytes that are no UTF-8, as it is no character."""
    return text.encode("utf-8", "surrogatepass")
