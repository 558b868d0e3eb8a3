"""System calls that Python does not wrap: namespaces, mounts, capabilities, and limits that no child can raise."""

import _signal  # the functions without the enumerations around them
import ctypes
import functools
import io
import os
import struct

MACHINE = os.uname().machine
_NUMBERS_BY_MACHINE = {"x86_64": {"pivot_root": 155, "capset": 126}, "aarch64": {"pivot_root": 41, "capset": 91}}
_NUMBERS = {
    **_NUMBERS_BY_MACHINE.get(MACHINE, {}),  # those below have one number everywhere
    "open_tree": 428, "move_mount": 429, "close_range": 436, "mount_setattr": 442,
}  # fmt: skip

NEW_MOUNTS, NEW_CGROUP, NEW_HOSTNAME, NEW_IPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEW_USER, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_SHARE_MEMORY, _SHARE_FILES = 0x00000100, 0x00000400

READ_ONLY, NO_SETUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
"""Mount flags that have equal values in mount(2) and mount_setattr(2)."""

_AT_CWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_CLONE_TREE, _CLOSE_ON_EXEC, _MOVE_FROM_EMPTY_PATH = 1, 0o2000000, 4
_MS_REC, _MS_SLAVE, _DETACH = 16384, 1 << 19, 2
_PR_SET_DEATH_SIGNAL, _PR_SET_DUMPABLE, _PR_NO_NEW_PRIVILEGES, _PR_AMBIENT, _PR_SET_SECUREBITS = 1, 4, 38, 47, 28

# PyDLL keeps the interpreter's lock: a child that Python has not been told of must not have to take it again.
_libc = ctypes.PyDLL(None, use_errno=True)


def _syscall(name: str, *arguments: int | bytes) -> int:
    """Make a system call by name. Raises OSError with the call's name if the call fails."""
    number = _NUMBERS[name]
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _check(name, _libc.syscall(ctypes.c_long(number), *wide))


def _check(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def prctl(option: int, *arguments: int) -> int:
    """Call prctl(2), with 0 for missing arguments."""
    padded = [*arguments, 0, 0, 0, 0][:4]
    return _check(f"prctl {option}", _libc.prctl(option, *[ctypes.c_ulong(value) for value in padded]))


def unshare(flags: int) -> None:
    """Give this process new namespaces of the kinds in `flags`."""
    _check("unshare", _libc.unshare(flags))


_stack = ctypes.create_string_buffer(1 << 14)
_top = ctypes.c_void_p(ctypes.addressof(_stack) + len(_stack) & ~15)


def first_process() -> int:
    """Start PID 1 of a new PID namespace and return its PID in this namespace.

    If it dies, the kernel kills all processes there.

    It runs nothing but libc's pause(), on a stack of its own in this process's memory, with this process's open files: nothing
    is copied for it. This process must have no signal handlers, since they would be its too: without any, the kernel keeps from
    it every signal from inside its namespace. It ignores SIGCHLD, so that orphans that end do not stay as zombies. Call this
    with no other child running, whose end would be lost in the same way.
    """
    before = _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)  # it gets a copy of our handlers
    try:
        flags = ctypes.c_int(_SHARE_MEMORY | _SHARE_FILES | NEW_PIDS | _signal.SIGCHLD)
        return _check("clone", _libc.clone(_libc.pause, _top, flags, None))
    finally:
        _signal.signal(_signal.SIGCHLD, before)


def children_go_to(process: int) -> None:
    """Start this process's next children in the PID namespace of `process`, which is given as a pidfd.

    The process is in this namespace or below.
    """
    _check("setns", _libc.setns(process, NEW_PIDS))


def fork() -> int:
    """Fork without Python's hooks. Returns 0 in the child and the child's PID in the parent.

    Its hooks give every module that has one a chance to reset locks and generators, which takes as long as a small program. A
    process with one thread holds no locks that anyone else would free.
    """
    return _check("fork", _libc.fork())


def map_user(proc: int, inside: int, uid: int, gid: int) -> None:
    """Write the uid and gid maps of a fresh user namespace, in which only the user and the group `inside` exist.

    Args:
        proc: an open folder /proc of this or an outer namespace.
        inside: the number in the namespace.
        uid, gid: the numbers outside of it.
    """
    for file, text in (("setgroups", "deny"), ("uid_map", f"{inside} {uid} 1"), ("gid_map", f"{inside} {gid} 1")):
        write_at(proc, f"self/{file}", text)


def write_at(folder: int, path: str, text: str) -> None:
    """Write a short text to an existing file below the open folder `folder`."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def read_at(folder: int, path: str) -> str:
    """Read the whole text of a file below the open folder `folder`."""
    with io.FileIO(path, opener=functools.partial(os.open, dir_fd=folder)) as file:
        return file.readall().decode()


def clone_mount(path: str, flags: int) -> int:
    """Make a detached bind mount of `path` and all below it, with `flags` on every mount."""
    tree = _syscall("open_tree", _AT_CWD, os.fsencode(path), _CLONE_TREE | _CLOSE_ON_EXEC | _AT_RECURSIVE)
    restrict_mount(tree, flags)
    return tree


def restrict_mount(mount: int, flags: int) -> None:
    """Add `flags` to a mount and all mounts below it."""
    attributes = struct.pack("=QQQQ", flags, 0, 0, 0)
    _syscall("mount_setattr", mount, b"", _AT_EMPTY_PATH | _AT_RECURSIVE, attributes, len(attributes))


def attach_mount(mount: int, path: str) -> None:
    """Attach a detached mount at `path`."""
    _syscall("move_mount", mount, b"", _AT_CWD, os.fsencode(path), _MOVE_FROM_EMPTY_PATH)
    os.close(mount)


def mount_memory(path: str, flags: int, options: str) -> None:
    """Mount a file system in memory (tmpfs) at `path`."""
    _check("mount tmpfs", _libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", ctypes.c_ulong(flags), options.encode()))


def keep_mounts_private() -> None:
    """Stop mounts in this namespace from propagating to the host."""
    _check("mount", _libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None))


def enter_root(path: str) -> None:
    """Change the root to `path`, a mount point, by pivot_root(2), and unmount the old root."""
    os.chdir(path)
    _syscall("pivot_root", b".", b".")
    _check("umount", _libc.umount2(b".", _DETACH))
    os.chdir("/")


_CAPABILITIES = struct.pack("=II", 0x20080522, 0), bytes(24)
"""Arguments of capset(2): a header of version 3, and three empty capability sets."""


def drop_capabilities() -> None:
    """Drop all capabilities of this process. With no_new_privs, programs executed later do not regain them."""
    _syscall("capset", *_CAPABILITIES)


def keep_no_capabilities() -> None:
    """Lock this process so that no user id and no change of user id gives it capabilities."""
    prctl(_PR_AMBIENT, 4)  # clear all
    prctl(_PR_SET_SECUREBITS, 0b101111)
    forbid_new_privileges()


def forbid_new_privileges() -> None:
    """Set no_new_privs, so that set-uid programs never give privileges to this process or its children."""
    prctl(_PR_NO_NEW_PRIVILEGES, 1)


def hide_memory(hidden: bool) -> None:
    """Set or clear PR_SET_DUMPABLE. Other processes of the user cannot read a hidden process's memory and /proc files."""
    prctl(_PR_SET_DUMPABLE, 0 if hidden else 1)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    prctl(_PR_SET_DEATH_SIGNAL, 9)


def close_files_from(first: int) -> None:
    """Close all open file descriptors from the number `first` on."""
    _syscall("close_range", first, 0xFFFFFFFF, 0)
