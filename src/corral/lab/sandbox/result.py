"""Jobs, limits and results of the sandbox."""

from dataclasses import dataclass
from typing import Literal

from corral.validate import require

SandboxStatus = Literal["ok", "error", "timeout", "memory", "output"]

MAX_TIMEOUT = 86_400.0
"""Largest time limit of a program in seconds: a day."""


@dataclass(frozen=True)
class SandboxResult:
    """Outcome of a program: its status, output and errors."""

    status: SandboxStatus
    """ok: exit status 0. error: any other end. timeout, memory, output: killed beyond that limit."""
    stdout: str
    stderr: str
    """Both streams decoded as UTF-8, with U+FFFD for invalid bytes, cut at the output limit."""
    seconds: float
    """Wall time of the program."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Resource limits of a program, for all its processes together unless stated otherwise."""

    timeout: float = 5.0
    """Seconds of wall time."""
    memory_mb: int = 512
    """Memory in MiB in addition to that of the bare interpreter."""
    output: int = 1 << 20
    """Bytes of standard output; standard error has an equal limit."""
    processes: int = 64
    """Processes and threads."""
    files: int = 64
    """Open files, per process."""
    file_size: int = 32 << 20
    """Bytes of one file."""
    folder_size: int = 64 << 20
    """Bytes of the temporary folder, which is in memory."""
    folder_files: int = 4096
    """Number of files in the temporary folder."""

    def __post_init__(self) -> None:
        require(self, "timeout", above=0, at_most=MAX_TIMEOUT, what="a number of seconds", name="sandbox")
        require(self, "memory_mb", at_least=1, at_most=1 << 20, integer=True, what="a number of MiB", name="sandbox")
        counts = ("output", "processes", "files", "file_size", "folder_size", "folder_files")
        require(self, *counts, at_least=1, integer=True, name="sandbox")


@dataclass(frozen=True, kw_only=True)
class SandboxJob:
    """A program, its input and its limits."""

    code: str
    stdin: str = ""
    limits: SandboxLimits = SandboxLimits()

    def __post_init__(self) -> None:
        for name, value in (("code", self.code), ("stdin", self.stdin)):
            if not isinstance(value, str):
                raise TypeError(f"sandbox: `{name}` is text (str); got {type(value).__name__}.")


def encode(text: str) -> bytes:
    """Text as bytes for a program; a lone surrogate becomes invalid UTF-8, since it is no character."""
    return text.encode("utf-8", "surrogatepass")
