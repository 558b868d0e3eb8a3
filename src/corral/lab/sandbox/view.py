"""Files visible to a sandboxed program: the Python interpreter, its libraries and four devices, but no user's files."""

import os
import site
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from glob import glob
from pathlib import Path

_DEVICES = ("/dev/null", "/dev/full", "/dev/urandom", "/dev/random")
"""Devices visible in the sandbox. Excluded is /dev/zero, because a shared mapping of it is memory of no process."""
_LIBRARIES = (
    "/lib", "/lib32", "/lib64", "/libx32", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32", "/nix/store", "/gnu/store",
)  # fmt: skip
_TEMPORARY = "/tmp"


class SandboxUnavailable(RuntimeError):
    """Raised when this system cannot isolate a program from its user. The message has reasons and advice."""


@dataclass(frozen=True, kw_only=True)
class FileView:
    """Files that a sandboxed program can read: absolute paths, with outer folders before inner folders."""

    paths: list[str]
    """Files and folders that have the same path outside and inside the sandbox."""
    links: list[tuple[str, str]]
    """Symbolic links inside the sandbox, as pairs (target, path of the link)."""
    hidden: list[str]
    """Folders below `paths` that appear empty inside the sandbox: installed packages, among them corral with tasks' answers."""
    devices: list[str]


def interpreter() -> str:
    """Path of the Python interpreter itself, not of a virtual environment's link to it."""
    path = getattr(sys, "_base_executable", None) or sys.executable  # undocumented, and missing where Python is embedded
    if not path:
        raise SandboxUnavailable("sandbox: this Python does not know its own executable (sys.executable is empty).")
    return os.path.realpath(path)


@cache
def file_view() -> FileView:
    """Return the files that the Python interpreter needs, its executable and its libraries, and no other files."""
    python = interpreter()
    prefixes = {os.path.realpath(prefix) for prefix in (sys.base_prefix, sys.base_exec_prefix)}
    own = {os.path.join(prefix, folder) for prefix in prefixes for folder in ("lib", "lib64", sys.platlibdir)}
    own.add(os.path.realpath(sysconfig.get_path("stdlib")))
    links, paths = [("/tmp", "/dev/shm")], {python}
    for path in sorted({*_LIBRARIES, *own, "/etc/ld.so.cache", "/usr/share/zoneinfo"}):
        if os.path.islink(path) and os.path.dirname(path) == "/":
            links.append((os.readlink(path), path))
        elif os.path.exists(path):
            paths.add(os.path.realpath(path))
    paths = {path for path in paths if not any(is_inside(path, other) for other in paths if other != path)}
    for path in paths:
        if is_inside(path, _TEMPORARY):
            raise SandboxUnavailable(
                f"sandbox: the interpreter uses {path}, and programs get a {_TEMPORARY} of their own. Move it elsewhere."
            )
    return FileView(
        paths=sorted(paths),
        links=links,
        hidden=sorted(path for path in _package_folders(prefixes) if any(is_inside(path, other) for other in paths)),
        devices=[path for path in _DEVICES if os.path.exists(path)],
    )


def _package_folders(prefixes: set[str]) -> set[str]:
    """Return every folder of installed Python packages, and the folder of this package."""
    found = {*site.getsitepackages(), site.getusersitepackages(), *(path for path in sys.path if path.endswith("-packages"))}
    for prefix in (*prefixes, "/usr", "/usr/local"):
        for folder in ("lib", "lib64"):
            found |= set(glob(f"{prefix}/{folder}/python3*/*-packages"))
    found = {os.path.realpath(path) for path in found if os.path.isdir(path)}
    ours = str(Path(__file__).resolve().parents[2])
    return found if any(is_inside(ours, path) for path in found) else {*found, ours}


def is_inside(path: str, folder: str) -> bool:
    """True if `path` is `folder` or lies below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")
