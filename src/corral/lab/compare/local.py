"""Runs of a comparison as processes on this machine, and the interface that all engines share."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from corral.cores import cores
from corral.lab.compare.record import open_log
from corral.lab.run.text import count
from corral.validate import RunError


@runtime_checkable
class Engine(Protocol):
    """Interface of an engine, which starts, polls and ends the jobs of a comparison without blocking."""

    slots: int
    """Number of jobs that the engine runs at a time."""
    threads: int | None
    """Number of threads of each job; None leaves the number to the job."""
    about: str
    """Description of the engine for people: `2 at a time on 2 cores, 1 thread each`."""

    def start(self, folder: Path, arguments: Sequence[str]) -> None:
        """Start `corral` with `arguments` as the job of the run in `folder`. The folder's name identifies the job."""

    def poll(self) -> Mapping[str, int]:
        """Return exit statuses by job name, for jobs that ended since the last call. A killed job has a negative status."""

    def stop(self, name: str) -> None:
        """Request that a job ends after its current training step, with a checkpoint."""

    def kill(self, name: str) -> None:
        """Kill a job at once, without waiting for a checkpoint."""

    def close(self) -> None:
        """Kill the remaining jobs, and release all resources of the engine."""


PROGRAM = (sys.executable, "-m", "corral.lab.cli")


class LocalEngine:
    """Engine that runs a comparison's jobs as processes on this machine.

    On CPUs a job has `threads` threads, one unless told: small jobs side by side are faster than threads that wait for each
    other. On GPUs each job sees one, the one with the fewest jobs.
    """

    def __init__(
        self, *, jobs: int | None = None, threads: int | None = None, gpus: Sequence[str] = (), program: Sequence[str] = PROGRAM
    ) -> None:
        self.threads, self.gpus, self.program = threads, tuple(gpus), tuple(program)
        self.slots = jobs if jobs is not None else len(self.gpus) or max(1, cores() // (threads or 1))
        self.started: dict[str, tuple[subprocess.Popen[bytes], str | None]] = {}
        """Mapping from job name to the job's process and GPU."""
        each = "" if threads is None else f", {count(threads, 'thread')} each"
        where = f"GPU {', '.join(self.gpus)}" if self.gpus else f"{count(cores(), 'core')}{each}"
        self.about = f"{self.slots} at a time on {where}"

    def start(self, folder: Path, arguments: Sequence[str]) -> None:
        in_use = Counter(gpu for _, gpu in self.started.values())
        gpu = min(self.gpus, key=lambda name: in_use[name]) if self.gpus else None
        try:
            process = start_process([*self.program, *arguments], folder, environment(self.threads, gpu))
        except OSError as error:
            raise RunError(f"no process could be started: {error}") from error
        self.started[folder.name] = process, gpu

    def poll(self) -> Mapping[str, int]:
        found = {name: status for name, (process, _) in self.started.items() if (status := process.poll()) is not None}
        for name in found:
            del self.started[name]
        return found

    def stop(self, name: str) -> None:
        self.started[name][0].terminate()  # the process forwards the signal to its children

    def kill(self, name: str) -> None:
        process = self.started[name][0]
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        for name, (process, _) in self.started.items():
            self.kill(name)
            process.wait()
        self.started.clear()


def start_process(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], cwd: str | None = None
) -> subprocess.Popen[bytes]:
    """Start a process whose output goes to the log in a run's folder.

    It has its own session, so that Ctrl-C reaches only the scheduler, which forwards it.
    """
    with os.fdopen(open_log(folder), "ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )


def environment(threads: int | None, gpu: str | None) -> dict[str, str]:
    """Return the environment variables of a job, which set its number of threads and its visible GPU."""
    given = {"OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": gpu}
    return {**os.environ, **{name: str(value) for name, value in given.items() if value is not None}}


def visible_gpus() -> list[str]:
    """List the GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES or numbered from 0."""
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]
