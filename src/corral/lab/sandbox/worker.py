"""The host's side of the sandbox: starts a warm interpreter, hands over programs, collects their output.

Every wait has a deadline. The interpreter inside keeps time; should it hang itself, it is ended from here, with all it holds.
"""

import array
import contextlib
import json
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import FileIO
from typing import Any, NamedTuple

from corral.lab.sandbox.backend import ENVIRONMENT, command, payload, refusal
from corral.lab.sandbox.cgroup import find_cgroup_parent, make_cgroup
from corral.lab.sandbox.result import SandboxJob, SandboxResult, SandboxStatus, encode
from corral.lab.sandbox.view import SandboxUnavailable, file_view
from corral.lab.workers import WorkerLost, WorkerProcess

_START_SECONDS = 30.0
"""Seconds within which a sandboxed interpreter must have started, even on a busy machine."""
GRACE = 5.0
"""Seconds after a program's own limit until its worker counts as hung."""
_CHUNK = 1 << 16


def memory_file(data: bytes) -> FileIO:
    """A read-only open file with `data` that exists in memory only."""
    with open(os.memfd_create("input", os.MFD_CLOEXEC), "wb") as file:
        file.write(data)
        file.flush()
        return FileIO(f"/proc/self/fd/{file.fileno()}")


class Pipe(NamedTuple):
    """The two ends of a pipe."""

    reader: FileIO
    writer: FileIO


@contextlib.contextmanager
def open_pipe() -> Iterator[Pipe]:
    """A pipe whose ends are closed at the latest on leaving the context."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    with FileIO(reader) as readable, FileIO(writer, "w") as writable:
        yield Pipe(readable, writable)


class SandboxWorker(WorkerProcess, contextlib.AbstractContextManager["SandboxWorker"]):
    """A warm sandboxed interpreter that forks once per program; a context manager for one program and one thread at a time."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        interpreter, view = command(backend), asdict(file_view()) if backend == "unshare" else None
        place = find_cgroup_parent()
        self.group = make_cgroup(*place) if place else None
        """The cgroup that limits the memory of programs; None if no cgroup is delegated."""
        passed = [self.group.members, self.group.events] if self.group else []
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._log = FileIO(os.memfd_create("log"), "r+")
        config = payload({"socket": theirs.fileno(), "proc": proc, "view": view, "group": passed})
        try:
            with theirs, memory_file(config) as config_file:
                self.process = subprocess.Popen(
                    [*interpreter, str(config_file.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._log,
                    env=ENVIRONMENT,
                    cwd="/",
                    pass_fds=(theirs.fileno(), proc, config_file.fileno(), *passed),
                    start_new_session=True,
                )
        except BaseException:
            self._release()
            raise
        finally:
            os.close(proc)
        self.control.settimeout(_START_SECONDS)
        try:
            message = json.loads(self.control.recv(_CHUNK) or b"{}")
        except TimeoutError:
            message = {"failed": f"it did not start within {_START_SECONDS:g} s"}
        except OSError:
            message = {}
        if "ready" not in message:
            log = os.pread(self._log.fileno(), _CHUNK, 0).decode(errors="replace").strip()
            self.close()
            raise SandboxUnavailable(message.get("failed") or (log.splitlines() or ["it ended at once"])[-1])
        if self.group and not message["grouped"]:
            self.group.close()
            self.group = None

    def run(self, job: SandboxJob) -> SandboxResult:
        """Run one program to its end."""
        with memory_file(encode(job.stdin)) as stdin, open_pipe() as out, open_pipe() as err:
            return collect(self.start(job, stdin, out, err, capture=(out, err)))[0]

    def start(self, job: SandboxJob, stdin: FileIO, out: Pipe, err: Pipe, capture: tuple[Pipe, ...]) -> "RunningProgram":
        """Start a program after the previous program has ended. `collect` reads the pipes in `capture`."""
        id = os.urandom(8).hex()  # the program can find it, and a number would tell how many there were before
        order = json.dumps({"run": id, "limits": vars(job.limits)}).encode()
        try:
            if self.group:
                self.group.set_limit(job.limits)
            self.control.settimeout(GRACE)
            with memory_file(encode(job.code)) as code:
                files = array.array("i", [file.fileno() for file in (code, stdin, out.writer, err.writer)])
                self.control.sendmsg([order], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        except OSError as error:
            raise WorkerLost(f"sandbox: the worker has gone ({error}).", hung=isinstance(error, TimeoutError)) from error
        for pipe in capture:
            pipe.writer.close()
        return RunningProgram(worker=self, id=id, job=job, streams={pipe.reader.fileno(): bytearray() for pipe in capture})

    def close(self) -> None:
        """End the interpreter inside with all its processes, and wait until they have gone. A second call does nothing."""
        super().close()
        self._release()

    def _release(self) -> None:
        self.control.close()
        self._log.close()
        if self.group:
            self.group.close()

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(kw_only=True)
class RunningProgram:
    """A running program: its output so far, by file, and its outcome."""

    worker: SandboxWorker
    id: str
    job: SandboxJob
    streams: dict[int, bytearray]
    report: dict[str, Any] | None = None

    def note(self) -> None:
        """Receive a message of the worker: the end of the program, or a failure."""
        text = self.worker.control.recv(_CHUNK)
        if not text:
            raise ConnectionError("it has closed its socket")
        message = json.loads(text)
        if message["status"] == "failed":
            raise refusal(f"{self.worker.backend}: {message['why']}")
        self.report = message

    def read(self, file: int) -> bool:
        """Read available output; False at the end of the stream. A program beyond its output limit is killed."""
        data, received, most = os.read(file, _CHUNK), self.streams[file], self.job.limits.output
        if len(received) <= most:
            received += data
            if len(received) > most:
                self.worker.control.send(json.dumps({"kill": self.id}).encode())
        return bool(data)

    def result(self) -> SandboxResult:
        """The result of a finished program."""
        assert self.report is not None
        most = self.job.limits.output
        overflowed = any(len(data) > most for data in self.streams.values())
        *stdout, stderr = (bytes(data[:most]).decode("utf-8", "replace") for data in self.streams.values())
        status: SandboxStatus = "output" if overflowed else self.report["status"]
        return SandboxResult(status, "".join(stdout), stderr, self.report["seconds"])


def collect(*programs: RunningProgram) -> list[SandboxResult]:
    """Read until every program has ended and all output has been read; returns their results.

    By then its last process has gone, so what is not in the pipes never will be. Their end is not waited for: a process that
    another thread forks meanwhile has copies of them, for as long as it lives.
    """
    deadline = time.monotonic() + max(one.job.limits.timeout for one in programs) + GRACE
    with selectors.DefaultSelector() as selector:
        for one in programs:
            for file in (one.worker.control.fileno(), *one.streams):
                selector.register(file, selectors.EVENT_READ, one)
        while selector.get_map():
            ended = all(one.report is not None for one in programs)
            ready = selector.select(0.0 if ended else max(0.0, deadline - time.monotonic()))
            if ended and not ready:
                break
            if not ended and time.monotonic() >= deadline:  # even if there is more to read: a program may go on for ever
                raise WorkerLost("sandbox: the worker does not answer.", hung=True)
            try:
                for key, _ in ready:
                    if key.fd not in key.data.streams:
                        key.data.note()
                    elif key.data.read(key.fd):
                        continue
                    selector.unregister(key.fd)
            except OSError as error:
                raise WorkerLost(f"sandbox: the worker has gone ({error}).", hung=False) from error
    return [one.result() for one in programs]


def run_connected(
    workers: tuple[SandboxWorker, SandboxWorker], first: SandboxJob, second: SandboxJob
) -> tuple[SandboxResult, SandboxResult]:
    """Run two programs side by side, each reading the other's output; their own `stdin` is not used."""
    with open_pipe() as there, open_pipe() as back, open_pipe() as err_first, open_pipe() as err_second:
        pair = (
            workers[0].start(first, back.reader, there, err_first, capture=(err_first,)),
            workers[1].start(second, there.reader, back, err_second, capture=(err_second,)),
        )
        for end in (*there, *back):
            end.close()  # else neither would see the other's end
        results = collect(*pair)
    return results[0], results[1]
