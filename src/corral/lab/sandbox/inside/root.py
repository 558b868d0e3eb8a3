"""Set-up of a root file system with nothing but a Python interpreter, in new namespaces, as bubblewrap does."""

import _socket
import os
from typing import Any

from corral.lab.sandbox.inside import kernel

_NOBODY = 65534
"""Number of the user that programs run as. This user owns no files."""

HOST = "sandbox"
"""Host name inside the sandbox."""

_ALL_NAMESPACES = kernel.NEW_MOUNTS | kernel.NEW_NETWORK | kernel.NEW_IPC | kernel.NEW_HOSTNAME | kernel.NEW_CGROUP


def leave_host(view: dict[str, list[Any]], proc: int) -> None:
    """Enter new namespaces (mounts, network and others, but not PID), and change to a new root file system.

    Root needs no user namespace for this, and should not use one: a process that is root outside has no limit on its number
    of processes. Everyone else gets one, in which they may mount; so does a root that may not mount, as in many containers,
    after becoming nobody.

    Args:
        view: what stays visible; see corral.lab.sandbox.view.
        proc: an open folder /proc.
    """
    with_power = os.geteuid() == 0
    if with_power:
        try:
            kernel.unshare(_ALL_NAMESPACES)
        except PermissionError:
            with_power = False
    if not with_power:
        _become_nobody()
        uid, gid = os.geteuid(), os.getegid()
        kernel.unshare(_ALL_NAMESPACES | kernel.NEW_USER)
        kernel.map_user(proc, uid, uid, gid)
    _socket.sethostname(HOST)
    _mount_root(view)
    if not with_power:
        kernel.keep_no_capabilities()
        kernel.drop_capabilities()


def _mount_root(view: dict[str, list[Any]]) -> None:
    """Mount the visible files under a new folder, and make this folder the root."""
    kernel.keep_mounts_private()
    quiet = kernel.READ_ONLY | kernel.NO_SETUID
    trees = [(path, kernel.clone_mount(path, quiet | kernel.NO_DEVICES)) for path in view["paths"]]
    trees += [(path, kernel.clone_mount(path, quiet | kernel.NO_EXEC)) for path in view["devices"]]
    base = "/tmp"  # everything has been picked up before this covers it
    kernel.mount_memory(base, kernel.NO_SETUID | kernel.NO_DEVICES, "mode=755,size=1m,nr_inodes=1k")
    for target, link in view["links"]:
        os.makedirs(os.path.dirname(base + link), exist_ok=True)
        os.symlink(target, base + link)
    for path, tree in trees:
        _make_mount_point(base + path, os.stat(tree).st_mode & 0o170000 == 0o040000)
        kernel.attach_mount(tree, base + path)
    for path in view["hidden"]:
        kernel.mount_memory(base + path, quiet | kernel.NO_DEVICES | kernel.NO_EXEC, "mode=755,size=4k,nr_inodes=2")
    os.mkdir(base + "/tmp")
    kernel.enter_root(base)
    _make_read_only()


def _make_read_only() -> None:
    """Make all mounts read-only. Devices can still be written to, but their nodes cannot be changed."""
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    kernel.restrict_mount(root, kernel.READ_ONLY | kernel.NO_SETUID)
    os.close(root)


def _make_mount_point(path: str, folder: bool) -> None:
    """Create an empty folder or file at `path` to mount on, unless it exists."""
    os.makedirs(path if folder else os.path.dirname(path), exist_ok=True)
    if not folder and not os.path.lexists(path):
        os.close(os.open(path, os.O_CREAT | os.O_CLOEXEC, 0o444))


def _become_nobody() -> None:
    """Change from root to nobody, and forbid new privileges. Other users keep their identity."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    kernel.forbid_new_privileges()
    kernel.hide_memory(False)  # a change of user hides /proc/self, where the next namespace's users are written


def enter_user_namespace(proc: int) -> None:
    """Become PID 1 of a new user and PID namespace, whose only user is nobody.

    The mounts made so far are locked there, read-only as they are. Processes are counted there, whoever else is nobody outside.
    Its capabilities end there, and programs get none of them.

    Args:
        proc: an open folder /proc.
    """
    _become_nobody()
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(kernel.NEW_USER | kernel.NEW_PIDS | kernel.NEW_MOUNTS)
    kernel.map_user(proc, _NOBODY, uid, gid)
    _make_read_only()  # bubblewrap can have a device in use or read-only, not both
    kernel.keep_no_capabilities()
    kernel.write_at(proc, "self/oom_score_adj", "500")  # where memory runs out, one of us goes, and programs before this
    if child := os.fork():
        kernel.close_files_from(3)  # the pipe ends of the world inside must close with it
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    kernel.die_with_parent()
