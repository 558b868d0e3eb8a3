"""Ray engine: a comparison's jobs as tasks of a Ray cluster with a shared file system, or of a Ray on this machine."""

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corral.cores import cores
from corral.lab.compare.local import PROGRAM, environment, start_process
from corral.lab.run.folder import LOG
from corral.validate import RunError, pip_install

try:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    import ray
except ImportError as missing:
    raise RunError(f"--engine ray needs ray. Install it: {pip_install('ray')}.") from missing

_PAUSE = 0.2
"""Seconds between two polls of a job's process."""

_PATIENCE = 20.0
"""Seconds that Ray tasks get to end their processes when the engine is closed."""


class RayEngine:
    """Engine that runs a comparison's jobs on the Ray cluster in RAY_ADDRESS, or on a Ray of this machine.

    Every node must see the comparison's folder under the same path, and have corral installed.
    """

    def __init__(
        self, *, jobs: int | None = None, threads: int | None = None, gpus: bool = False, program: Sequence[str] | None = None
    ) -> None:
        self.program = program
        self.ours = not ray.is_initialized()
        where = _connect() if self.ours else "the Ray cluster of this process"
        there = ray.cluster_resources()
        self.gpus = int(there.get("GPU", 0)) if gpus else 0
        self.threads = threads if threads is not None or self.gpus else 1
        self.slots = jobs if jobs is not None else self.gpus or max(1, int(there.get("CPU", 1)) // (self.threads or 1))
        self.started: dict[str, tuple[Path, Any]] = {}
        self.about = f"{self.slots} at a time on {where}" + (f", a GPU each of {self.gpus}" if self.gpus else "")

    def start(self, folder: Path, arguments: Sequence[str]) -> None:
        """Start a Ray task that supervises the job's process. Ray chooses the node, and possibly starts the task later."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        stop_file(folder).unlink(missing_ok=True)
        options = {"num_cpus": self.threads or 1, "num_gpus": 1 if self.gpus else 0, "max_retries": 0}
        task = ray.remote(_watch).options(name=folder.name, **options)
        reference = task.remote(list(arguments), folder.absolute(), self.threads, os.getcwd(), self.program)
        self.started[folder.name] = folder, reference

    def poll(self) -> Mapping[str, int]:
        if not self.started:
            return {}
        names = {reference: name for name, (_, reference) in self.started.items()}
        ready, _ = ray.wait(list(names), num_returns=len(names), timeout=0)
        return {names[reference]: self._status(names[reference]) for reference in ready}

    def stop(self, name: str) -> None:
        stop_file(self.started[name][0]).touch()

    def kill(self, name: str) -> None:
        ray.cancel(self.started[name][1], force=False)  # a task that is killed could not end its process

    def close(self) -> None:
        for name in self.started:
            self.kill(name)
        references = [reference for _, reference in self.started.values()]
        if references:
            ray.wait(references, num_returns=len(references), timeout=_PATIENCE)
        for name in list(self.started):
            self._status(name, timeout=0.0)
        if self.ours and ray.is_initialized():
            ray.shutdown()

    def _status(self, name: str, timeout: float | None = None) -> int:
        """Return the exit status of a job's Ray task. If Ray lost the task, the error goes to the run's log."""
        folder, reference = self.started.pop(name)
        stop_file(folder).unlink(missing_ok=True)
        try:
            return int(ray.get(reference, timeout=timeout))
        except ray.exceptions.TaskCancelledError:
            return -signal.SIGKILL
        except (ray.exceptions.RayError, TimeoutError) as error:
            folder.mkdir(exist_ok=True)
            with (folder / LOG).open("a") as log:
                log.write(f"the Ray task was lost: {(str(error).strip() or repr(error)).splitlines()[0]}\n")
            return 1


def _connect() -> str:
    """Connect to the Ray cluster in RAY_ADDRESS, or start a Ray on this machine. Returns a description of the cluster."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        ray.init(address="local", num_cpus=cores(), include_dashboard=False, **quiet)
        return f"a local Ray of {cores()} CPUs"
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise RunError(
            f"the Ray cluster that RAY_ADDRESS names ({address}) cannot be joined: {error}. Is it running, and is this its "
            f"RAY_AUTH_TOKEN? Without RAY_ADDRESS, a local Ray is started."
        ) from error
    return f"the Ray cluster at {address}"


def stop_file(folder: Path) -> Path:
    """Return the path of the file whose existence requests a job to end after its training step."""
    return folder.with_name(f".{folder.name}.stop")


def _watch(arguments: list[str], folder: Path, threads: int | None, cwd: str, program: Sequence[str] | None) -> int:
    """Run a job as a Ray task on any node: start a process, forward a stop request, and kill the process if cancelled."""
    given = environment(threads, None)  # Ray has chosen the GPU
    process = start_process([*(program or PROGRAM), *arguments], folder, given, cwd)
    stop_requested = False
    try:
        while process.poll() is None:
            if not stop_requested and stop_file(folder).exists():
                stop_requested = True
                process.send_signal(signal.SIGTERM)
            time.sleep(_PAUSE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode
