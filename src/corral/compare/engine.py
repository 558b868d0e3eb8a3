"""The interface of engines, which run jobs on this machine or on a Ray cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """A process to start: `corral` with these arguments, for the run in this folder."""

    arguments: Sequence[str]
    folder: Path

    @property
    def name(self) -> str:
        """Tells jobs apart."""
        return self.folder.name


@runtime_checkable
class Engine(Protocol):
    """Starts, polls and ends processes, without blocking."""

    slots: int
    """How many run at a time."""
    threads: int | None
    """Of each; None leaves that to the process."""

    @property
    def about(self) -> str:
        """`2 at a time on 2 cores, 1 thread each`."""

    def start(self, job: RunJob) -> None:
        """Begin; its output goes to the run's log."""

    def poll(self) -> Mapping[str, int]:
        """Exit statuses of jobs that ended since the last call, by name; that of a killed one is minus the signal."""

    def stop(self, name: str) -> None:
        """Ask a job to end after its step, with a checkpoint."""

    def kill(self, name: str) -> None:
        """End a job at once."""

    def close(self) -> None:
        """End what still runs, and release all resources."""
