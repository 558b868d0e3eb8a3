"""Rows of a data set, each with the place it stands at: files of JSON lines, JSON or Parquet, or a data set on the hub."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corral.run.files import read_regular, require_regular
from corral.task.imports import library

Row = dict[str, Any]


_MOST = 2**36
"""Bytes of a file of rows that are read at once."""


class Malformed(ValueError):
    """A row that cannot be used; the message says why."""


def read_file(path: Path, owner: str) -> Iterator[tuple[str, Row | Malformed]]:
    """(place, row) of a file, by its ending: .parquet, .json (one list), else JSON lines. A file without a row is refused."""
    rows = _file_rows(path, owner)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{owner}: {path} is empty: there is no problem in it.")
    yield first
    yield from rows


def _file_rows(path: Path, owner: str) -> Iterator[tuple[str, Row | Malformed]]:
    """(place, row) of a file. Empty lines are no rows."""
    if path.suffix == ".parquet":
        yield from _parquet(path, owner)
        return
    try:
        lines = read_regular(path, _MOST).removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise ValueError(f"{owner}: {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"{owner}: {path} cannot be read: {error}") from error
    if path.suffix == ".json":
        yield from _json_list(path, lines, owner)
        return
    for number, line in enumerate(lines.split(b"\n"), 1):
        if line.strip():
            yield f"{path.name}, line {number}", _json_row(line)


def read_hub(name: str, config: str | None, split: str, owner: str) -> Iterator[tuple[str, Row | Malformed]]:
    """(place, row) of a split of a data set on the hub, or in its cache."""
    datasets = library("datasets", owner)
    try:
        rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # no network, no such name, no permission, no space: it has an error for each
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"{owner}: {name} ({split}) cannot be loaded from the hub: {type(error).__name__}: {reason}. "
            f"Without a network, get its files elsewhere and give them as `path`: --set task_config.path=FOLDER."
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"{name} {split}, row {number}", row


def find_split(folder: Path, split: str, owner: str) -> Path:
    """The one file of a split in a folder: train.jsonl, test.parquet, or as the hub names them, test-00000-of-00001.parquet."""
    kinds = (".jsonl", ".json", ".parquet")
    found = sorted(path for path in folder.iterdir() if path.suffix in kinds and path.stem.partition("-")[0] == split)
    if len(found) != 1:
        there = ", ".join(path.name for path in found) or "none"
        raise ValueError(
            f"{owner}: {folder} should hold one file {split}.jsonl, {split}.json or {split}.parquet; there is {there}."
        )
    return found[0]


def text_column(row: Row, *names: str) -> str:
    """The text in the first of these columns that there is. Numbers are texts too, and 142.0 is 142."""
    for name in names:
        if name in row:
            value = row[name]
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                value = str(value)
            if not isinstance(value, str) or not value.strip():
                raise Malformed(f"`{name}` should be a text that is not empty; got {str(value)[:60]!r}")
            return value
    raise Malformed(f"there is no `{'` or `'.join(names)}`; the row has {', '.join(map(str, row)) or 'nothing'}")


def _parquet(path: Path, owner: str) -> Iterator[tuple[str, Row | Malformed]]:
    parquet = library("pyarrow.parquet", owner)
    try:
        require_regular(path)
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise ValueError(f"{owner}: {path} cannot be read: {error}.") from error
    yield from ((f"{path.name}, row {number}", row) for number, row in enumerate(rows, 1))


def _json_row(line: bytes) -> Row | Malformed:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON
        return Malformed(f"this is not JSON: {error}")
    return row if isinstance(row, dict) else Malformed(f"a row is an object, {{…}}; got {line[:60].decode(errors='replace')!r}")


def _json_list(path: Path, content: bytes, owner: str) -> Iterator[tuple[str, Row | Malformed]]:
    try:
        rows = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{owner}: {path} is not JSON: {error}. A file of one row per line is named .jsonl.") from error
    if not isinstance(rows, list):
        raise ValueError(f"{owner}: {path} should hold a list of rows, [{{…}}, …]; got {type(rows).__name__}.")
    for number, row in enumerate(rows, 1):
        yield f"{path.name}, row {number}", row if isinstance(row, dict) else Malformed(f"a row is an object; got {row!r:.60}")
