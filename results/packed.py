"""Raw rows of the studies, packed: Parquet files with a row for each run.

    python -m results.packed results/evidence/runs.parquet runs/evidence/*.jsonl    adds lines of JSON to a file

What a row lacks is null in the file, and missing again when it is read.
"""

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from corral.lab.run.files import write_whole

FOLDER = Path(__file__).parent
Row = dict[str, Any]


def read(*places: Path) -> list[Row]:
    """Rows of Parquet files, of files of JSON lines, and of folders of such lines; a place that is not there has none."""
    files = [file for place in places for file in (sorted(place.rglob("*.jsonl")) if place.is_dir() else [place])]
    return [row for file in files if file.exists() for row in (_unpack(file) if file.suffix == ".parquet" else _lines(file))]


def write(path: Path, rows: Sequence[Row]) -> None:
    """Replace a Parquet file; it is there whole or not at all."""
    columns, texts = {}, []
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError):  # values of several types, as a learning rate of 1e-3 or "auto"
            columns[name] = pa.array([None if value is None else json.dumps(value) for value in values])
            texts.append(name)
    table = pa.table(columns).replace_schema_metadata({"json": json.dumps(texts)})
    write_whole(path, lambda beside: pq.write_table(table, beside, compression="zstd", compression_level=19))


def add(path: Path, rows: Iterable[Row], *keys: str) -> int:
    """Add rows to a file, in place of those with equal `keys`; how many it has then. Rows without keys are all kept."""
    new = list(rows)
    replaced = {tuple(row.get(key) for key in keys) for row in new} if keys else set()
    kept = [row for row in read(path) if tuple(row.get(key) for key in keys) not in replaced]
    write(path, [*kept, *new])
    return len(kept) + len(new)


def _unpack(file: Path) -> list[Row]:
    table = pq.read_table(file)
    texts = json.loads(table.schema.metadata[b"json"])
    rows: list[Row] = [_present(row) for row in table.to_pylist()]
    return [row | {name: json.loads(row[name]) for name in texts if name in row} for row in rows]


def _present(value: Any) -> Any:
    """Dictionaries without what is null in them."""
    if isinstance(value, dict):
        return {name: _present(one) for name, one in value.items() if one is not None}
    return [_present(one) for one in value] if isinstance(value, list) else value


def _lines(file: Path) -> list[Row]:
    """Rows of JSON lines, which have no number for infinity."""
    rows = (_present(json.loads(line)) for line in file.read_text().splitlines())
    return [{name: math.inf if value == "inf" else value for name, value in row.items()} for row in rows]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="of results/")
    parser.add_argument("lines", type=Path, nargs="+", help="files of JSON lines, or folders of them")
    parser.add_argument("--keys", nargs="*", default=[], help="columns that tell rows apart: of equal ones the last stays")
    given = parser.parse_args()
    print(f"{add(given.file, read(*given.lines), *given.keys)} rows in {given.file}, {given.file.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
