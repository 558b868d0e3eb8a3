"""Execution of a program from fork to exit: limits, streams, system-call filter, exit status."""

import _signal  # the functions without the enumerations around them
import atexit
import contextlib
import errno
import io
import math
import os
import resource
import signal
import sys
import threading
import types
from typing import Any

from corral.lab.sandbox.inside import filter, kernel

OUT_OF_MEMORY = signal.SIGRTMAX
"""Signal with which a program ends itself after a MemoryError. A forged signal gains nothing."""

_SPARE = 16 << 20
"""Bytes of address space kept free for reporting that memory has run out."""

ENVIRONMENT = {"HOME": "/tmp", "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "TMPDIR": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}

_NAME = "<program>"

# Kept from before the program ran: what it puts in their place is its own affair.
_exit, _setrlimit, _getrlimit, _ADDRESS_SPACE = os._exit, resource.setrlimit, resource.getrlimit, resource.RLIMIT_AS


def warm_up() -> None:
    """Before the fork, open the standard streams and load the types of Python's compiler, so that no program has to do it."""
    reader, writer = os.pipe()
    source = os.memfd_create("input")
    for number, file in enumerate((source, writer, writer)):  # of the kind that programs get: Python asks when it opens them
        os.dup2(file, number)
    for file in (reader, writer, source):
        os.close(file)
    _open_stream("stdin", 0, "r", "surrogateescape")
    _open_stream("stdout", 1, "w", "surrogateescape")
    _open_stream("stderr", 2, "w", "backslashreplace", line_buffering=True)
    exec(compile("", _NAME, "exec", dont_inherit=True), {})


def _open_stream(name: str, number: int, mode: str, errors: str, line_buffering: bool = False) -> None:
    """Make an open file a standard stream under both names in `sys`, such as `stdin` and `__stdin__`."""
    binary = open(number, mode + "b", closefd=False)  # noqa: SIM115 - the program's for as long as it runs
    stream = io.TextIOWrapper(binary, encoding="utf-8", errors=errors, line_buffering=line_buffering)
    for attribute in (name, f"__{name}__"):
        setattr(sys, attribute, stream)


class LaunchPlan:
    """Resource limits and mount options of a program, computed before the fork to avoid copying memory pages."""

    def __init__(self, limits: dict[str, Any], address_space: int) -> None:
        memory = int(limits["memory_mb"]) << 20
        folder = min(limits["folder_size"], memory)
        self.timeout = limits["timeout"]
        self.memory = memory + _SPARE
        """Limit on the memory of all processes of the program together, in bytes."""
        self.folder = f"size={folder},nr_inodes={limits['folder_files']},mode=700"
        cpu, address_space = math.ceil(self.timeout) + 1, address_space + memory
        self.limits = [
            _at_most(kind, soft, hard)
            for kind, soft, hard in (
                (resource.RLIMIT_AS, address_space, address_space + _SPARE),
                (resource.RLIMIT_CPU, cpu, cpu + 1),
                (resource.RLIMIT_FSIZE, limits["file_size"], limits["file_size"]),
                (resource.RLIMIT_NPROC, limits["processes"], limits["processes"]),
                (resource.RLIMIT_NOFILE, limits["files"], limits["files"]),
                (resource.RLIMIT_STACK, 64 << 20, 64 << 20),
                (resource.RLIMIT_SIGPENDING, 256, 256),
                (resource.RLIMIT_CORE, 0, 0),
                (resource.RLIMIT_MEMLOCK, 0, 0),
                (resource.RLIMIT_MSGQUEUE, 0, 0),
            )
        ]
        """Limits that the kernel enforces per process or per user. The program cannot raise these limits."""


def _at_most(kind: int, soft: int, hard: int) -> tuple[int, tuple[int, int]]:
    """Lower a new resource limit to the limit in force if that is smaller."""
    _, most = resource.getrlimit(kind)
    return kind, (soft, hard) if most == resource.RLIM_INFINITY else (min(soft, most), min(hard, most))


def prepare(plan: LaunchPlan, code: int, streams: list[int], rules: filter.Filter, proc: int) -> bytes:
    """Prepare the forked process (tmpfs, limits, descriptors, capabilities, filter). Returns the program's text."""
    kernel.write_at(proc, "self/oom_score_adj", "1000")
    kernel.unshare(kernel.NEW_MOUNTS)
    kernel.mount_memory("/tmp", kernel.NO_SETUID | kernel.NO_DEVICES | kernel.NO_EXEC, plan.folder)
    os.chdir("/tmp")
    os.umask(0o077)
    os.setsid()
    source = os.pread(code, os.fstat(code).st_size, 0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    for kind, values in plan.limits:
        _setrlimit(kind, values)
    kernel.drop_capabilities()
    kernel.hide_memory(True)
    rules.install()
    kernel.close_files_from(3)
    return source


def run(source: bytes) -> None:
    """Run `source` as `python program.py` would, including the exit status. Does not return."""
    sys.argv = ["program.py"]
    # A new number for the main thread, else it is the worker's, as the machine outside counts; private, so typeshed lacks it.
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    for name in [name for name in sys.modules if name.partition(".")[0] == "corral"]:
        del sys.modules[name]  # of no use to a program, and not what it would get elsewhere
    code = 0
    try:
        exec(compile(source, _NAME, "exec", dont_inherit=True), main.__dict__)
    except MemoryError as error:
        code = _out_of_memory(error, main)
    except OSError as error:
        code = _out_of_memory(error, main) if error.errno == errno.ENOMEM else _report_failure(error)
    except BaseException as error:
        code = _report_failure(error)
    _exit(_finish(main) or code)


def _report_failure(error: BaseException) -> int:
    """Report an exception as the interpreter does, and return the exit status."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        with contextlib.suppress(BaseException):
            sys.stderr.write(f"{error.code}\n")
    else:
        trace = error.__traceback__
        error.__traceback__ = trace.tb_next if trace else None  # without the line that ran it
        _report(error)
    return 1


def _report(error: BaseException) -> None:
    """Report an exception with `sys.excepthook`, which the program may have set. Errors of the hook are ignored."""
    with contextlib.suppress(BaseException):
        sys.excepthook(type(error), error, error.__traceback__)


def _out_of_memory(error: BaseException, main: types.ModuleType) -> int:
    """Free memory, report a MemoryError, and end this process with the signal OUT_OF_MEMORY."""
    _setrlimit(_ADDRESS_SPACE, (_getrlimit(_ADDRESS_SPACE)[1],) * 2)
    error.__traceback__ = None
    main.__dict__.clear()
    _report(error)
    _finish(main)
    signal.signal(OUT_OF_MEMORY, signal.SIG_DFL)
    os.kill(os.getpid(), OUT_OF_MEMORY)
    return 1


def _finish(main: types.ModuleType) -> int:
    """Wait for threads, run exit handlers, release the program's objects, and flush. Returns 120 if output is lost.

    The interpreter returns 120 in this case too. It is not shut down, which takes longer than most programs.
    """
    code = 0
    wait_for_threads = threading._shutdown  # type: ignore[attr-defined]  # private: the interpreter's own way at its end
    for step in (wait_for_threads, atexit._run_exitfuncs, main.__dict__.clear):
        try:
            step()
        except BaseException as error:
            _report_failure(error)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # the program may have closed it, or put anything there
            code = 0 if getattr(stream, "closed", True) else 120
    return code
