"""Execution without isolation, at the user's request: only resource limits and a process group."""

import contextlib
import math
import os
import selectors
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

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
_OUT_OF_MEMORY = 137
_BASELINE = 64 << 20
_CHUNK = 1 << 16
_EXIT_SECONDS = 2.0
"""Seconds to wait until a killed process has gone."""


def run_unsafe(job: SandboxJob) -> SandboxResult:
    """Run a program with the user's own rights. A malicious program can do harm."""
    with tempfile.TemporaryFile() as stdin:
        stdin.write(encode(job.stdin))
        stdin.seek(0)
        return _run(job, stdin.fileno(), None)


def run_unsafe_connected(first: SandboxJob, second: SandboxJob) -> tuple[SandboxResult, SandboxResult]:
    """Run two programs with the user's own rights, each reading the other's output."""
    (there_reader, there), (back_reader, back) = os.pipe(), os.pipe()
    with ThreadPoolExecutor(2) as threads:
        pair = [threads.submit(_run, first, back_reader, there), threads.submit(_run, second, there_reader, back)]
        return pair[0].result(), pair[1].result()


def _run(job: SandboxJob, stdin: int, stdout: int | None) -> SandboxResult:
    """Run a program whose output goes to the file `stdout`, or is captured if it is None; both files are closed here."""
    limits = job.limits
    with tempfile.TemporaryDirectory(prefix="corral-program-", ignore_cleanup_errors=True) as folder:
        path = os.path.join(folder, "program.py")
        with open(path, "wb") as file:
            file.write(encode(job.code))
        numbers = [(limits.memory_mb << 20) + _BASELINE, math.ceil(limits.timeout) + 1, limits.file_size]
        started = time.monotonic()
        try:
            process = subprocess.Popen(
                [interpreter(), "-I", "-S", "-B", "-c", _RUN, *map(str, numbers), path],
                stdin=stdin,
                stdout=subprocess.PIPE if stdout is None else stdout,
                stderr=subprocess.PIPE,
                env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
                cwd=folder,
                start_new_session=True,
            )
        finally:
            if stdout is not None:
                os.close(stdin)
                os.close(stdout)
        try:
            reason, texts = _collect(process, started + limits.timeout, limits.output)
        finally:
            _end(process)
    return SandboxResult(reason or _status(process.returncode), texts[0], texts[1], time.monotonic() - started)


def _collect(process: subprocess.Popen[bytes], deadline: float, output: int) -> tuple[SandboxStatus | None, list[str]]:
    """Read both streams until the program ends or has to be killed. Daemons that keep the streams open are not awaited."""
    written = {stream.fileno(): bytearray() for stream in (process.stdout, process.stderr) if stream is not None}
    reason: SandboxStatus | None = None
    with selectors.DefaultSelector() as selector:
        for file in written:
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map() and reason is None:
            ended = process.poll() is not None
            ready = selector.select(0.0 if ended else min(0.05, max(0.0, deadline - time.monotonic())))
            if ended and not ready:
                break
            for key, _ in ready:
                data = os.read(key.fd, _CHUNK)
                written[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
                if len(written[key.fd]) > output:
                    reason = "output"
            if not ended and time.monotonic() > deadline:
                reason = "timeout"
    if reason is None:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            reason = "timeout"
    texts = [bytes(data[:output]).decode("utf-8", "replace") for data in written.values()]
    return reason, texts if len(texts) == 2 else ["", *texts]


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # one that the kernel itself holds dies when it can
        process.wait(_EXIT_SECONDS)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _status(code: int | None) -> SandboxStatus:
    if code == _OUT_OF_MEMORY:
        return "memory"
    if code == -signal.SIGXCPU:
        return "timeout"
    return "ok" if code == 0 else "error"
