"""JSON lines of any number and size, one at a time: constant memory, and a sentence for what is no JSON."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from corral.audit.dump.record import DumpRecord
from corral.validate import RunError

_LONGEST = 1 << 28
"""Bytes of a line: 256 MB, a hundred times the longest completion that is trained on today."""


@dataclass
class FilePlace:
    """How far a file was read."""

    bytes: int = 0
    lines: int = 0
    size: int = -1
    """Of a file that is read as a whole, when it was last looked at: it is complete once that no longer changes."""


def read_lines(
    path: Path,
    progress: Callable[[int], object],
    note: Callable[[str], object],
    place: FilePlace | None = None,
    *,
    growing: bool = False,
) -> Iterator[DumpRecord]:
    """Each object of a file of JSON lines.

    Args:
        progress: told how many bytes a line had.
        note: told, by name, of what was left out: a last line that is cut off, as in a file that is still being written.
        place: where to go on; it is moved along. None: at the beginning.
        growing: whether a last line without its end is left for the next time.
    """
    place = FilePlace() if place is None else place
    for data in _raw_lines(path, place.bytes):
        if growing and not data.endswith(b"\n"):
            return
        place.bytes, place.lines = place.bytes + len(data), place.lines + 1
        progress(len(data))
        if not data.strip():
            continue
        where = f"{path}, line {place.lines}"
        try:
            content = json.loads(data)
        except RecursionError:
            raise RunError(f"{where}: is nested too deeply to be a completion.") from None
        except ValueError as error:
            if not data.endswith(b"\n"):
                note("unfinished last lines")
                return
            raise RunError(f"{where}: is no JSON ({_reason(error)}).") from None
        yield DumpRecord(content, where)


def _raw_lines(path: Path, start: int) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(start)
            while data := file.readline(_LONGEST + 1):
                if len(data) > _LONGEST:
                    raise RunError(f"{path} has a line of more than {_LONGEST >> 20} MB; one completion has a line.")
                yield data
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from error


def _reason(error: ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return str(error) if isinstance(error, json.JSONDecodeError) else "a number has too many digits"
