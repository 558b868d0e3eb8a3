"""Execution of programs without isolation, at the user's request, with nothing but resource limits and a process group."""

import contextlib
import math
import os
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import IO

from corral.lab.sandbox.result import SandboxJob, SandboxResult, SandboxStatus, encode
from corral.lab.sandbox.view import interpreter

# The program is an argument of the interpreter's; limits are set by its first lines, in its own process.
_RUN = """
import resource, sys
memory, cpu, file_size = map(int, sys.argv[1:4])
for kind, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, cpu), (resource.RLIMIT_FSIZE, file_size)):
    try:
        resource.setrlimit(kind, (value, value))
    except (OSError, ValueError):
        pass  # not every system has each of them
with open(sys.argv[4], "rb") as file:
    source = file.read()
sys.argv[:] = ["program.py"]
try:
    exec(compile(source, "<program>", "exec", dont_inherit=True), {"__name__": "__main__"})
except MemoryError:
    sys.exit(137)
"""
_ENDS: dict[int, SandboxStatus] = {137: "memory", -signal.SIGXCPU: "timeout"}
"""Exit statuses of the interpreter that mean an exceeded limit, with the limit's name."""
_BASELINE = 64 << 20
_EXIT_SECONDS = 2.0
"""Seconds to wait until a killed process has ended."""


def run_unsafe(job: SandboxJob) -> SandboxResult:
    """Run a program with the user's own rights. A malicious program can do harm."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
        stdin.write(encode(job.stdin))
        stdin.seek(0)
        return _run(job, stdin, stdout, captured=True)


def run_unsafe_connected(first: SandboxJob, second: SandboxJob) -> tuple[SandboxResult, SandboxResult]:
    """Run two programs with the user's own rights, each reading the other's output."""
    there, back = ((open(reader, "rb"), open(writer, "wb")) for reader, writer in (os.pipe(), os.pipe()))  # noqa: SIM115
    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(_run, first, back[0], there[1], captured=False)
        other = threads.submit(_run, second, there[0], back[1], captured=False)
        return one.result(), other.result()


def _run(job: SandboxJob, stdin: IO[bytes], stdout: IO[bytes], *, captured: bool) -> SandboxResult:
    """Run a program with the given files as standard streams. `captured` puts the program's output into the result.

    The files are closed.
    """
    limits = job.limits
    with (
        stdin,
        stdout,
        tempfile.TemporaryFile() as stderr,
        tempfile.TemporaryDirectory(prefix="corral-program-", ignore_cleanup_errors=True) as folder,
    ):
        path = os.path.join(folder, "program.py")
        with open(path, "wb") as file:
            file.write(encode(job.code))
        file_size = max(limits.file_size, limits.output + 1)  # since the output is a file too
        numbers = [(limits.memory_mb << 20) + _BASELINE, math.ceil(limits.timeout) + 1, file_size]
        started = time.monotonic()
        process = subprocess.Popen(
            [interpreter(), "-I", "-S", "-B", "-c", _RUN, *map(str, numbers), path],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
            cwd=folder,
            start_new_session=True,
        )
        if not captured:  # else neither program would see the end of the other
            stdin.close()
            stdout.close()
        written: tuple[IO[bytes], ...] = (stdout, stderr) if captured else (stderr,)
        status: SandboxStatus = "timeout"
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = _ENDS.get(code := process.wait(limits.timeout), "error" if code else "ok")
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started too
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that the kernel itself holds dies when it can
                process.wait(_EXIT_SECONDS)
        seconds = time.monotonic() - started
        if any(os.fstat(stream.fileno()).st_size > limits.output for stream in written):
            status = "output"
        texts = []
        for stream in written:
            stream.seek(0)
            texts.append(stream.read(limits.output).decode("utf-8", "replace"))
    return SandboxResult(status, texts[0] if captured else "", texts[-1], seconds)
