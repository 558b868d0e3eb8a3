"""The zygote: a Python interpreter, already started, that forks into new namespaces once per program.

This process is PID 1 of its namespace, takes orders from a socket, keeps time, and runs one program at a time. For each
it starts a first process that only waits, and forks the program into the namespace of that: when the program has ended, so is
the first process, and with it, by the kernel, all that is left inside. What a program is, reads and writes goes through files
that are handed on unread, so that nothing of one program is in the memory from which the next is copied.
"""

import _socket  # without the enumerations around it, which every program would be forked with
import array
import contextlib
import gc
import importlib
import json
import os
import random
import select
import signal
import site
import time
from typing import Any

from corral.lab.sandbox.inside import filter, kernel, program, root
from corral.lab.sandbox.inside.memory import Memory

_COMMON_MODULES = "bisect collections copy functools heapq itertools math operator random re string typing"
"""Modules that programs import most often, loaded in advance."""

_TICK = 0.02
"""Seconds between two measurements of the program's memory."""


def main(socket: int, proc: int, view: dict[str, list[Any]] | None, group: list[int]) -> None:
    """Enter the sandbox's namespaces, report readiness, and run programs until the host closes the socket.

    Args:
        socket: an open socket for orders.
        proc: an open folder /proc.
        view: files that stay visible (corral.lab.sandbox.view); None if bubblewrap has set up the root already.
        group: open files with members and events of the cgroup to enter; empty without a cgroup.
    """
    control = _socket.socket(fileno=socket)
    events = None
    if group:
        members, counted = group
        with contextlib.suppress(OSError):  # the kernel may refuse
            os.write(members, b"0")
            events = counted
    for name in _COMMON_MODULES.split():
        importlib.import_module(name)
    site.setquit()  # exit() and quit()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # first processes have copies of our handlers, and must have none
    try:
        if view is not None:
            root.leave_host(view, proc)
        root.enter_user_namespace(proc)
        zygote = _Zygote(control, Memory(proc, events))
    except (OSError, ValueError) as error:
        _send(control, {"failed": str(error)})
        os._exit(1)
    os.environ.clear()
    os.environ.update(program.ENVIRONMENT)
    program.warm_up()
    gc.collect()
    gc.freeze()
    _send(control, {"ready": True, "grouped": events is not None})
    zygote.serve()
    os._exit(0)


def _send(control: _socket.socket, message: dict[str, object]) -> None:
    """Send a message to the host. If the host has ended, this process ends too."""
    try:
        control.send(json.dumps(message).encode())
    except OSError:
        os._exit(0)


class _Zygote:
    """Server that starts, watches and kills programs, one at a time, as the host orders."""

    def __init__(self, control: _socket.socket, memory: Memory) -> None:
        self.control = control
        self.memory = memory
        self.first = 0
        """PID of the first process in the running program's namespace; 0 if no program runs."""
        self.rules = filter.Filter(filter.build(kernel.MACHINE))
        self.home = os.pidfd_open(os.getpid())
        self.complaints, self.complain = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        """Pipe for errors that occur after the fork and before the program starts."""

    def serve(self) -> None:
        """Run programs until the host has closed the socket."""
        while True:
            files = array.array("i")
            limits, extra, _, _ = self.control.recvmsg(4096, _socket.CMSG_SPACE(4 * files.itemsize))
            if not limits:
                return
            for _, _, data in extra:
                files.frombytes(data)
            if files:  # else it is a late order to end a program that has ended
                _send(self.control, self.run(json.loads(limits), list(files)))

    def run(self, limits: dict[str, Any], files: list[int]) -> dict[str, object]:
        """Run one program until all its processes have ended. Returns its status and its wall time in seconds.

        Args:
            limits: fields of SandboxLimits.
            files: open files with the program's text and for its three standard streams.
        """
        started, child, handles = time.monotonic(), 0, []
        self.first = 0
        try:
            plan = program.LaunchPlan(limits, self.memory.baseline)
            kernel.children_go_to(self.home)
            self.first = kernel.first_process()
            handles.append(os.pidfd_open(self.first))
            kernel.children_go_to(handles[0])
            child = self.fork(plan, files)
            handles.append(os.pidfd_open(child))
            _close(files)  # the program has them
            reason = self.watch(handles[1], started, plan)
        except OSError as error:  # no more processes or namespaces for this user
            return {"status": "failed", "why": str(error), "seconds": 0.0}
        finally:
            statuses = _end(self.first)
            _close(files + handles)
        return {**self.verdict(reason, statuses[child]), "seconds": time.monotonic() - started}

    def fork(self, plan: program.LaunchPlan, files: list[int]) -> int:
        """Fork a process that runs the program, and return its PID in this namespace."""
        random.seed()  # else all programs would draw the same numbers
        if child := kernel.fork():
            return child
        leave = os._exit
        try:
            source = program.prepare(plan, files[0], files[1:], self.rules, self.memory.proc)
        except BaseException as error:
            os.write(self.complain, f"{type(error).__name__}: {error}".encode()[:1000])
            leave(1)
        vars(self).clear()  # frames lead here: numbers of processes count those of the programs before
        try:
            program.run(source)
        finally:
            leave(1)  # whatever happens in there, the way back here is closed

    def watch(self, handle: int, started: float, plan: program.LaunchPlan) -> str:
        """Wait until the program ends and return "", or return the reason to kill the program."""
        waiting = select.poll()
        waiting.register(handle, select.POLLIN)
        waiting.register(self.control, select.POLLIN)
        deadline = started + plan.timeout
        while True:
            patience = min(_TICK, deadline - time.monotonic())
            ready = [file for file, _ in waiting.poll(1000 * max(0.001, patience))]
            if handle in ready:
                return ""
            if ready:
                self.control.recv(4096)
                return "killed"  # the host orders it, or has closed the socket
            now = time.monotonic()
            if now > deadline:
                return "timeout"
            if now > started + _TICK and (self.memory.usage() > plan.memory or self.memory.group_ran_out()):
                return "memory"

    def verdict(self, reason: str, status: int) -> dict[str, object]:
        """Return a program's status, from the reason for killing the program or from its exit status."""
        if self.memory.group_ran_out():
            reason = "memory"  # whichever of its processes the kernel chose
        if status == 0:
            return {"status": reason or "ok"}
        try:
            return {"status": "failed", "why": os.read(self.complaints, 4096).decode(errors="replace")}
        except BlockingIOError:  # there is none: the program ran
            if reason:
                return {"status": reason}
        code = os.waitstatus_to_exitcode(status)
        if code == -program.OUT_OF_MEMORY or (code == -signal.SIGKILL and self.memory.ran_out()):
            return {"status": "memory"}
        return {"status": "timeout" if code == -signal.SIGXCPU else "error"}


def _end(first: int) -> dict[int, int]:
    """Kill a program's PID 1 and with it its whole PID namespace. Returns the wait status of each child of this process."""
    statuses: dict[int, int] = {}
    if first:
        os.kill(first, signal.SIGKILL)
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return statuses
        statuses[pid] = status


def _close(files: list[int]) -> None:
    """Close the file descriptors in a list, and empty the list."""
    while files:
        os.close(files.pop())
