"""A warm interpreter that forks once per program: each gets its own processes, users, mounts and temporary folder.

Three generations. This process takes orders from a socket, and keeps time. Each order is forked into new namespaces, whose
first process only waits: when it ends, the kernel ends all that is left inside. The program is that one's child. What a
program is, reads and writes goes through files that are handed on unread, so that nothing of one program is in the memory
from which the next is copied.
"""

import array
import gc
import importlib
import json
import os
import select
import signal
import site
import socket
import struct
import time

from corral.task.sandbox.inside import filter, kernel, program, root
from corral.task.sandbox.inside.memory import Memory

COMMON = "bisect collections copy functools heapq itertools math operator random re string typing"
"""Modules that programs ask for most: they find them loaded."""

TICK = 0.02
"""Seconds between two looks at the memory of running programs."""


class Job:  # not a dataclass: importing those would add a quarter to what every program is forked from
    """A program that runs: its first process, where its end is told, and why it was ended early if it was."""

    def __init__(self, id: int, pid: int, told: int, started: float, limits: dict) -> None:
        self.id, self.pid, self.told, self.started = id, pid, told, started
        self.deadline = started + limits["timeout"]
        self.memory = limits["memory"]
        self.reason = ""

    def kill(self, reason: str) -> None:
        """End it; the first reason stands."""
        self.reason = self.reason or reason
        os.kill(self.pid, signal.SIGKILL)


def main(config: dict[str, object]) -> None:
    """Leave the outside, say so, and serve until the other end of the socket closes."""
    control = socket.socket(fileno=config["control"])
    for name in COMMON.split():
        importlib.import_module(name)
    site.setquit()  # exit() and quit()
    try:
        if config["mode"] == "unshare":
            root.leave(config["view"], config["proc"])
        root.become_nobody()
        if config["mode"] == "unshare":
            kernel.die_with_parent()
        instructions = filter.build(kernel.MACHINE)
    except (OSError, ValueError) as error:
        send(control, {"failed": str(error)})
        os._exit(1)
    os.environ.clear()
    os.environ.update(program.ENVIRONMENT)
    gc.collect()
    gc.freeze()
    serve(control, config["proc"], instructions)
    os._exit(0)


def send(control: socket.socket, message: dict[str, object]) -> None:
    """One message to the outside, which may have gone."""
    try:
        control.send(json.dumps(message).encode())
    except OSError:
        os._exit(0)


def serve(control: socket.socket, proc: int, instructions: bytes) -> None:
    """Start, watch and end programs as told."""
    memory = Memory(proc)
    jobs: dict[int, Job] = {}
    waiting = select.poll()
    waiting.register(control, select.POLLIN)
    send(control, {"ready": True})
    while True:
        for file, _ in waiting.poll(patience(jobs)):
            if file in jobs:
                waiting.unregister(file)
                send(control, finish(jobs.pop(file), memory))
                continue
            order, files = receive(control)
            if order is None:
                for job in jobs.values():
                    job.kill("gone")
                return
            if "kill" in order:
                for job in jobs.values():
                    if job.id == order["kill"]:
                        job.kill("killed")
                continue
            try:
                job = start(order, files, proc, memory.baseline, instructions)
            except OSError as error:  # no more processes or namespaces for this user
                send(control, {"done": order["run"], "status": "failed", "why": str(error), "seconds": 0.0})
                continue
            jobs[job.told] = job
            waiting.register(job.told, select.POLLIN)
        now = time.monotonic()
        for job in jobs.values():
            if job.reason:
                continue  # it is on its way out
            if now > job.deadline:
                job.kill("timeout")
            elif now > job.started + TICK and memory.used_by(job.pid) > job.memory + program.SPARE:
                job.kill("memory")


def patience(jobs: dict[int, Job]) -> float | None:
    """Milliseconds until someone has to be looked at."""
    if not jobs:
        return None
    return 1000 * max(0.001, min(TICK, min(job.deadline for job in jobs.values()) - time.monotonic() + 0.001))


def receive(control: socket.socket) -> tuple[dict[str, object] | None, list[int]]:
    """An order and the files that come with it; None when the other end has closed."""
    files = array.array("i")
    text, extra, _, _ = control.recvmsg(4096, socket.CMSG_SPACE(4 * files.itemsize))
    for _, _, data in extra:
        files.frombytes(data)
    return (json.loads(text) if text else None), list(files)


def start(order: dict, files: list[int], proc: int, baseline: int, instructions: bytes) -> Job:
    """Fork a program into its own namespaces."""
    limits = order["limits"]
    memory = limits["memory_mb"] << 20
    limits.update(memory=memory, address_space=memory + baseline)
    user = os.geteuid(), os.getegid()
    told, tell = os.pipe()
    started = time.monotonic()
    try:
        pid = kernel.fork_into(kernel.NEW_USER | kernel.NEW_PIDS | kernel.NEW_MOUNTS)
    except OSError:
        close(*files, tell, told)
        raise
    if pid == 0:
        leave = os._exit
        try:
            first_process(limits, files, proc, user, tell, instructions)
        finally:
            leave(70)  # whatever happens in there, the way back here is closed
    close(*files, tell)
    return Job(order["run"], pid, told, started, limits)


def close(*files: int) -> None:
    """Close all of them."""
    for file in files:
        os.close(file)


def first_process(limits: dict, files: list[int], proc: int, user: tuple[int, int], tell: int, instructions: bytes) -> None:
    """Fit out the new world, start the program, wait for its end and tell it. In the program's process: run it."""
    try:
        kernel.map_user(proc, root.NOBODY, *user)
        room = f"size={min(limits['folder_size'], limits['memory'])},nr_inodes={limits['folder_files']}"
        owner = f"mode=700,uid={root.NOBODY},gid={root.NOBODY}"
        kernel.mount_memory("/tmp", kernel.NO_SETUID | kernel.NO_DEVICES | kernel.NO_EXEC, f"{room},{owner}")
        kernel.write_at(proc, "self/oom_score_adj", "1000")
        os.setsid()
        kernel.drop_privileges()
        kernel.hide_memory(True)
        kernel.die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # with no handler left, no signal from inside reaches a first process
        child = os.fork()
        source = None if child else program.prepare(limits, files[0], files[1:], instructions)
    except BaseException as error:
        os.write(tell, b"!" + f"{type(error).__name__}: {error}".encode()[:1000])
        os._exit(70)
    if source is not None:
        program.run(source)
    os.dup2(tell, 0)
    kernel.close_files_from(1)
    while (ended := os.wait())[0] != child:
        pass
    os.write(0, struct.pack("=i", ended[1]))
    os._exit(0)


def finish(job: Job, memory: Memory) -> dict[str, object]:
    """Read how a program ended, and wait until nothing of it is left."""
    told = os.read(job.told, 4096)
    os.close(job.told)
    seconds = time.monotonic() - job.started
    os.waitpid(job.pid, 0)
    memory.forget(job.pid)
    if told[:1] == b"!" and not job.reason:
        return {"done": job.id, "status": "failed", "why": told[1:].decode(errors="replace"), "seconds": seconds}
    return {"done": job.id, "status": job.reason or verdict(told, memory), "seconds": seconds}


def verdict(told: bytes, memory: Memory) -> str:
    """A status from what the first process saw."""
    if len(told) != 4:
        return "error"  # the first process went before it could tell
    code = os.waitstatus_to_exitcode(struct.unpack("=i", told)[0])
    if code == -program.OUT_OF_MEMORY or (code == -signal.SIGKILL and memory.ran_out()):
        return "memory"
    if code == -signal.SIGXCPU:
        return "timeout"
    return "ok" if code == 0 else "error"
