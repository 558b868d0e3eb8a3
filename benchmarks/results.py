"""The latest rows of every benchmark: benchmarks/results.json, and the head's and the trainer's in files of their own."""

import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from corral.run.files import write_whole

RESULTS = Path(__file__).with_name("results.json")
FOLDER = Path(__file__).with_name("results")
HEAD, ROLLOUTS, UPDATES = (FOLDER / name for name in ("head.json", "head_rollouts.json", "update_phase.json"))

Rows = list[dict[str, Any]]


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Benchmark → the machine, and the rows; nothing where there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def save_results(benchmark: str, rows: Rows, path: Path = RESULTS) -> None:
    """Replace one benchmark's rows and keep the others'; the file is written whole or not at all."""
    write_results({**read_results(path), benchmark: {"machine": machine(), "rows": rows}}, path)


def write_results(results: dict[str, dict[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1, sort_keys=True) + "\n"
    write_whole(path, lambda beside: beside.write_text(text))


def saved_rows(benchmark: str, path: Path) -> Rows:
    """What a file holds of a benchmark, to go on from. Rows of another GPU or torch do not stand beside those of this one."""
    found = read_results(path).get(benchmark)
    if found is None:
        return []
    was, now = (tuple(where[key] for key in ("gpu", "torch")) for where in (found["machine"], machine()))
    if was != now:
        sys.exit(f"{path}: {benchmark!r} was measured with {was}, and here is {now}. Measure it anew, without --resume.")
    return found["rows"]


def machine() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": platform.machine(), "threads": torch.get_num_threads(), "gpu": gpu, "torch": torch.__version__}
