"""What the starts can do before any reinforcement learning: held-out success by temperature, one JSON line each.

    OMP_NUM_THREADS=1 python -m results.deployed.start_success --out runs/starts.jsonl

Training sharpens a policy, and what sampling at another temperature, or greedily, does for nothing is not owed to it. Starts
that are not there (runs/starts), that have a line already, or that are pretrained are left out.
"""

import argparse
import json
import os
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from corral.lab.jobs.llm.evaluate import EvalSettings
from corral.lab.run.files import append_line
from results.deployed.shipped_run import measure  # after the environment
from results.deployed.spec import STARTS

TEMPERATURES = (1.0, 0.7, 0.5, 0.3, 0.1)
PROBLEMS, SEED = 4096, 400


def starts_to_measure(file: Path) -> list[str]:
    """Starts that are there and have no line in `file`."""
    done = {json.loads(line)["start"] for line in file.read_text().splitlines()} if file.exists() else set()
    models = {name: str(start.get("model", "tiny")) for name, start in STARTS.items() if name not in done}
    return [name for name, model in models.items() if model == "tiny" or ("/" in model and Path(model).exists())]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--problems", type=int, default=PROBLEMS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    for name in starts_to_measure(options.out):
        start = STARTS[name]
        settings = EvalSettings(
            model=start.get("model", "tiny"),
            task=start.get("task", "countdown"),
            task_config=start.get("task_config", {}),
            problems=options.problems,
            seed=SEED,
            device=options.device,
        )
        found = measure(settings, TEMPERATURES, greedy=options.problems)
        line = {"start": name, "problems": options.problems, "seed": SEED, "device": options.device}
        append_line(options.out, line | {"success": {f"{temperature:g}": value for temperature, value in found.items()}})
        print(name, found, flush=True)


if __name__ == "__main__":
    main()
