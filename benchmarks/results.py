"""The latest rows of every benchmark, in one file: benchmarks/results.json."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).with_name("results.json")


def save_results(benchmark: str, rows: list[dict[str, Any]], path: Path = RESULTS) -> None:
    """Replace one benchmark's rows and keep the others'; the file is written whole or not at all."""
    results = json.loads(path.read_text()) if path.exists() else {}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    results[benchmark] = {
        "machine": {"cpu": platform.machine(), "threads": torch.get_num_threads(), "gpu": gpu, "torch": torch.__version__},
        "rows": rows,
    }
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    os.replace(partial, path)
