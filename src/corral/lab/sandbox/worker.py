"""Host side of the sandbox: it starts an interpreter in advance, sends it programs, and collects the programs' output.

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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from io import FileIO
from typing import Any

from corral.lab.sandbox.backend import ENVIRONMENT, command, payload, refusal
from corral.lab.sandbox.cgroup import find_cgroup_parent, make_cgroup
from corral.lab.sandbox.result import SandboxJob, SandboxResult, SandboxStatus, encode
from corral.lab.sandbox.view import SandboxUnavailable, file_view
from corral.lab.workers import WorkerLost, WorkerProcess

_START_SECONDS = 30.0
"""Seconds within which a sandboxed interpreter must have started, even on a busy machine."""
GRACE = 5.0
"""Seconds after a program's time limit until its worker counts as hung."""
_CHUNK = 1 << 16


def memory_file(data: bytes) -> FileIO:
    """Open a read-only file that contains `data` and exists in memory only."""
    with open(os.memfd_create("input", os.MFD_CLOEXEC), "wb") as file:
        file.write(data)
        file.flush()
        return FileIO(f"/proc/self/fd/{file.fileno()}")


@contextlib.contextmanager
def open_pipe() -> Iterator[tuple[FileIO, FileIO]]:
    """Open a pipe and yield its reading and writing ends. Both are closed at the end of the context."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    with FileIO(reader) as readable, FileIO(writer, "w") as writable:
        yield readable, writable


class SandboxWorker(WorkerProcess, contextlib.AbstractContextManager["SandboxWorker"]):
    """Sandboxed interpreter that is already started and forks once per program. A context manager, for one thread at a time."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        interpreter, view = command(backend), asdict(file_view()) if backend == "unshare" else None
        place = find_cgroup_parent()
        self.group = make_cgroup(*place) if place else None
        """Cgroup that limits the memory of programs, or None if this user may not create cgroups."""
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
        """Run one program to its end, and return its result."""
        with memory_file(encode(job.stdin)) as stdin, open_pipe() as (stdout, out), open_pipe() as (stderr, err):
            self.start(job, stdin, out, err)
            out.close()
            err.close()
            return self.finish(job, stdout, stderr)

    def start(self, job: SandboxJob, *streams: FileIO) -> None:
        """Start a program on its three standard streams, after the previous program has ended."""
        try:
            if self.group:
                self.group.set_limit(job.limits)
            self.control.settimeout(GRACE)
            with memory_file(encode(job.code)) as code:
                files = array.array("i", [file.fileno() for file in (code, *streams)])
                order = json.dumps(vars(job.limits)).encode()
                self.control.sendmsg([order], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        except OSError as error:
            raise WorkerLost(f"sandbox: the worker has gone ({error}).", hung=isinstance(error, TimeoutError)) from error

    def finish(self, job: SandboxJob, *outputs: FileIO) -> SandboxResult:
        """Wait until the program has ended, and read all its output. A program beyond its output limit is killed.

        By then its last process has gone, so what is not in the pipes never will be. Their end is not waited for: a process
        that another thread forks meanwhile has copies of them, for as long as it lives.

        Args:
            job: the program.
            outputs: the ends to read of its standard error, which comes last, and of its standard output, if that is wanted.
        """
        deadline, most = time.monotonic() + job.limits.timeout + GRACE, job.limits.output
        received = {file.fileno(): bytearray() for file in outputs}
        report: dict[str, Any] = {}
        with selectors.DefaultSelector() as selector:
            for file in (self.control.fileno(), *received):
                selector.register(file, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(0.0 if report else max(0.0, deadline - time.monotonic()))
                if report and not ready:
                    break
                if not report and time.monotonic() >= deadline:  # even if there is more to read: a program may go on for ever
                    raise WorkerLost("sandbox: the worker does not answer.", hung=True)
                try:
                    for key, _ in ready:
                        if key.fd in received:
                            data, before = os.read(key.fd, _CHUNK), received[key.fd]
                            if len(before) <= most < len(before) + len(data):
                                self.control.send(b"kill")
                            before += data if len(before) <= most else b""
                            if data:
                                continue
                        else:
                            report = json.loads(self.control.recv(_CHUNK) or b"{}")
                            if not report:
                                raise ConnectionError("it has closed its socket")
                        selector.unregister(key.fd)
                except OSError as error:
                    raise WorkerLost(f"sandbox: the worker has gone ({error}).", hung=False) from error
        if report["status"] == "failed":
            raise refusal(f"{self.backend}: {report['why']}")
        overflowed = any(len(data) > most for data in received.values())
        *stdout, stderr = (bytes(data[:most]).decode("utf-8", "replace") for data in received.values())
        status: SandboxStatus = "output" if overflowed else report["status"]
        return SandboxResult(status, "".join(stdout), stderr, report["seconds"])

    def close(self) -> None:
        """End the sandboxed interpreter with all its processes, and wait until they have ended. A second call does nothing."""
        super().close()
        self._release()

    def _release(self) -> None:
        self.control.close()
        self._log.close()
        if self.group:
            self.group.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def run_connected(
    workers: tuple[SandboxWorker, SandboxWorker], first: SandboxJob, second: SandboxJob
) -> tuple[SandboxResult, SandboxResult]:
    """Run two programs at the same time, each reading the other's output. The jobs' own `stdin` is not used."""
    one, other = workers
    with open_pipe() as there, open_pipe() as back, open_pipe() as one_errors, open_pipe() as other_errors:
        one.start(first, back[0], there[1], one_errors[1])
        other.start(second, there[0], back[1], other_errors[1])
        for end in (*there, *back, one_errors[1], other_errors[1]):
            end.close()  # else neither would see the other's end
        with ThreadPoolExecutor(1) as thread:
            beside = thread.submit(other.finish, second, other_errors[0])
            return one.finish(first, one_errors[0]), beside.result()
