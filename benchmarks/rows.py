"""Raw rows of the benchmarks: one JSON object a line in benchmarks/results, each with its machine, date and code."""

import argparse
import datetime
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import corral
from corral.lab.run.files import write_whole

FOLDER = Path(__file__).with_name("results")
MEASURED = ("head", "trl", "objective", "projection", "robot", "lab")
"""Packages of corral whose speed is measured."""
Row = dict[str, Any]


def arguments(description: str, **options: Any) -> argparse.ArgumentParser:
    """A benchmark's parser with its options: name → default, a list for several values; and `--save`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in options.items():
        several = isinstance(default, list)
        kind = type(default[0] if several else default)
        parser.add_argument(f"--{name}", type=kind, nargs="+" if several else None, default=default, help=f"{default}")
    parser.add_argument("--save", action="store_true", help="keep the rows in benchmarks/results")
    return parser


def stamp() -> Row:
    """Machine, date and code of a measurement."""
    code = hashlib.sha256()
    for path in sorted(path for part in MEASURED for path in Path(corral.__file__).with_name(part).rglob("*.py")):
        code.update(path.read_bytes())
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    where = {"gpu": gpu, "threads": torch.get_num_threads(), "torch": torch.__version__}
    return {**where, "date": datetime.date.today().isoformat(), "code": code.hexdigest()[:12]}


def rounded(value: Any) -> Any:
    """Four digits of a float."""
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else value


def read_rows(path: Path) -> list[Row]:
    """Read a file's rows; a missing file has none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace a file; it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_whole(path, lambda beside: beside.write_text(text))


def finish(benchmark: str, rows: Sequence[Row], save: bool) -> None:
    """Print a benchmark's rows as a table, and keep them where asked to."""
    print(table(rows))
    if save:
        where = stamp()
        short = [{name: rounded(value) for name, value in row.items()} for row in rows]
        write_rows(FOLDER / f"{benchmark}.jsonl", ({**where, **row} for row in short))


def table(rows: Sequence[Row]) -> str:
    """Columns for a terminal, a name above each; what a row lacks stays empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([str(rounded(row.get(name, ""))) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
