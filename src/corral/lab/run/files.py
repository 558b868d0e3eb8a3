"""Atomic file writes, folder locks, and error messages for a full or read-only disk."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from corral.provenance import plain
from corral.validate import RunError

_FULL = {errno.ENOSPC, errno.EDQUOT}
DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
"""Operating-system error numbers for a path that may not be read or written."""


_MOST = 2**28
"""Largest size in bytes of a settings or results file that is read. Runs write smaller files."""


MOST_METRICS = 2**32
"""Largest size in bytes of a metrics.jsonl that is read, enough for a million steps."""


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: `write` fills a temporary file beside `path`, which is synced to disk and then renamed."""
    if "\0" in str(path):
        raise RunError(f"{str(path)!r} is no file's name.")
    beside = path.absolute().with_name(f".{path.name[:200]}.{os.getpid()}.part")  # pyarrow takes `a:b/c` for a URI
    try:
        with disk_errors(path):
            if path.exists() and not path.is_file():
                kinds = {"a folder": path.is_dir(), "a pipe": path.is_fifo(), "a socket": path.is_socket(), "a device": True}
                kind = next(name for name, found in kinds.items() if found)
                raise RunError(f"{path} is no file but {kind}, which is not replaced: choose another place.")
            write(beside)
            sync(beside)
            os.replace(beside, path)
            sync(path.parent)
    finally:
        with suppress(OSError):  # a read-only disk refuses this too, and would hide why the file was not written
            beside.unlink(missing_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON atomically. NaN becomes null and infinities become text, since JSON has no such numbers."""
    text = json.dumps(plain(content), indent=2, allow_nan=False) + "\n"
    write_whole(path, lambda beside: beside.write_text(text))


def append_line(path: Path, content: dict[str, Any]) -> None:
    """Append one line of JSON in a single write. If the write fails, the file is cut back to its old length."""
    data = (json.dumps(plain(content), allow_nan=False) + "\n").encode()
    with disk_errors(path), path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            if os.write(file.fileno(), data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise


def read_regular(path: Path, most: int = _MOST) -> bytes:
    """Read a regular file. Raises ValueError for a pipe, a device, or a file of more than `most` bytes.

    A stranger's run may have a pipe or a link to a device under any name, and reading one may never end.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # or opening a pipe would wait for its writer
    with os.fdopen(file, "rb") as opened:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a regular file.")
        if found.st_size > most:
            raise ValueError(f"it has {found.st_size:,} bytes, and at most {most:,} are read.")
        return opened.read()


def require_regular(path: Path) -> None:
    """Raise a ValueError if a path exists but is not a regular file, before another library opens the path."""
    if path.exists() and not path.is_file():
        raise ValueError("it is not a regular file.")


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises ValueError or OSError if the file cannot be read."""
    try:
        return json.loads(read_regular(path))
    except RecursionError:
        raise ValueError("its values are nested too deep.") from None


def read_settings(path: Path, writer: str) -> dict[str, Any]:
    """Read a JSON file of settings. Raises RunError if it lacks the structure of a file that `writer`, such as a run, wrote."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("settings"), dict):
        raise RunError(f"{path} is not what {writer} writes: it has no table `settings`.")
    return content


def sync(path: Path) -> None:
    """Flush a file or folder from the operating system's cache to disk with fsync."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def digest(path: Path) -> str:
    """Compute the SHA-256 digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def reached_limit(error: BaseException | None) -> Literal["disk", "file size"] | None:
    """Return which limit stopped a write (disk space or largest file size), or None if the error has another cause.
    It is read from the error and its causes."""
    found: Literal["disk"] | None = None
    while error is not None:
        number, text = error.errno if isinstance(error, OSError) else None, str(error)
        if number == errno.EFBIG or "File too large" in text:
            return "file size"
        torch_says = isinstance(error, RuntimeError) and "inline_container.cc" in text and "unexpected pos" in text
        if number in _FULL or "No space left" in text or torch_says:
            found = "disk"
        error = error.__cause__ or error.__context__
    return found


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Context that turns a disk error while writing `path` into a RunError with advice to the user."""
    try:
        yield
    except Exception as error:  # torch, safetensors and Python have one each for a full disk
        if isinstance(error, RunError) or not (isinstance(error, OSError) or reached_limit(error)):
            raise
        raise RunError(disk_sentence(error, path)) from error


def disk_sentence(error: BaseException, path: Path) -> str:
    """Describe a disk error in a sentence, with advice to the user."""
    limit = reached_limit(error)
    if limit == "file size":
        return f"{path} could not be written: it is beyond the limit on the size of a file (ulimit -f). Raise it, then resume."
    if limit == "disk":
        there = next(parent for parent in path.absolute().parents if parent.exists())
        free = shutil.disk_usage(there).free / 1e6
        return f"the disk is full ({free:,.0f} MB left) and {path} could not be written. Free some space, then resume the run."
    if isinstance(error, OSError) and error.errno in DENIED:
        return f"{path} cannot be written: {error.strerror}. Choose another folder with --out."
    return f"{path} could not be written: {error}"


def lock(folder: Path) -> int:
    """Lock a folder exclusively. The lock ends with the process, however the process ends."""
    file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise RunError(f"another process is writing the run in {folder}. Wait for it, or stop it first.") from error
    return file


class LockedFolder:
    """Base class of folders for runs, audits and comparisons, to which only one process at a time can write."""

    _lock: int | None = None

    def hold(self, path: Path) -> None:
        """Lock the folder. Raises RunError if another process holds the lock."""
        self._lock = lock(path)

    def close(self) -> None:
        """Release the folder's lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
