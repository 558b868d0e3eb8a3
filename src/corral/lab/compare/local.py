"""Runs of a comparison as processes on this machine, behind the interface that engines share."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from corral.cores import cores
from corral.lab.compare.folder import open_log, place_log
from corral.lab.run.text import count
from corral.validate import RunError


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
        """Start a job, whose output goes to the run's log."""

    def poll(self) -> Mapping[str, int]:
        """Exit statuses of jobs that ended since the last call, by name; that of a killed one is minus the signal."""

    def stop(self, name: str) -> None:
        """Ask a job to end after its step, with a checkpoint."""

    def kill(self, name: str) -> None:
        """End a job at once."""

    def close(self) -> None:
        """End what still runs, and release all resources."""


PROGRAM = (sys.executable, "-m", "corral.lab.cli")


@dataclass
class _RunningJob:
    """A job and its process."""

    job: RunJob
    process: subprocess.Popen[bytes]
    gpu: str | None


class LocalEngine:
    """Runs jobs on this machine.

    On CPUs a job has `threads` threads, one unless told: small jobs side by side are faster than threads that wait for each
    other. On GPUs each job sees one, the one with the fewest jobs.
    """

    def __init__(
        self,
        *,
        jobs: int | None = None,
        threads: int | None = None,
        gpus: Sequence[str] = (),
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self.threads, self.gpus, self.program = threads, tuple(gpus), tuple(program)
        self.slots = jobs if jobs is not None else len(self.gpus) or max(1, cores() // (threads or 1))
        self.started: dict[str, _RunningJob] = {}

    @property
    def about(self) -> str:
        """The engine in words: cores or GPUs, and jobs at a time."""
        if self.gpus:
            return f"{self.slots} at a time on GPU {', '.join(self.gpus)}"
        each = "" if self.threads is None else f", {count(self.threads, 'thread')} each"
        return f"{self.slots} at a time on {count(cores(), 'core')}{each}"

    def start(self, job: RunJob) -> None:
        in_use = Counter(started.gpu for started in self.started.values())
        gpu = min(self.gpus, key=lambda name: in_use[name]) if self.gpus else None
        try:
            process = start_process([*self.program, *job.arguments], job.folder, environment(self.threads, gpu))
        except OSError as error:
            raise RunError(f"no process could be started: {error}") from error
        self.started[job.name] = _RunningJob(job, process, gpu)

    def poll(self) -> Mapping[str, int]:
        found = {}
        for name, started in list(self.started.items()):
            status = started.process.poll()
            place_log(started.job.folder, ended=status is not None)
            if status is not None:
                found[name] = status
                del self.started[name]
        return found

    def stop(self, name: str) -> None:
        self._signal(name, signal.SIGTERM)

    def kill(self, name: str) -> None:
        self._signal(name, signal.SIGKILL)

    def close(self) -> None:
        for name, started in self.started.items():
            self.kill(name)
            started.process.wait()
            place_log(started.job.folder, ended=True)
        self.started.clear()

    def _signal(self, name: str, number: signal.Signals) -> None:
        """Signal a job: SIGTERM goes to the process alone, which tells its children; SIGKILL to its whole session."""
        started = self.started.get(name)
        if started is None or started.process.poll() is not None:
            return
        if number == signal.SIGKILL:
            os.killpg(started.process.pid, number)
        else:
            started.process.send_signal(number)


def start_process(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], cwd: str | None = None
) -> subprocess.Popen[bytes]:
    """A process that logs to the run's folder, in a session of its own: Ctrl-C is for the schedule, which passes it on."""
    log = open_log(folder)
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )
    finally:
        os.close(log)


def environment(threads: int | None, gpu: str | None) -> dict[str, str]:
    """A job's environment: threads, and the GPU that it sees."""
    found = dict(os.environ)
    if threads is not None:
        found["OMP_NUM_THREADS"] = str(threads)
    if gpu is not None:
        found["CUDA_VISIBLE_DEVICES"] = gpu
    return found


def visible_gpus() -> list[str]:
    """GPUs as CUDA_VISIBLE_DEVICES names them; torch counts those that this process may use."""
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]
