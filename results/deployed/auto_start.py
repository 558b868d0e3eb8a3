"""What the first batches pay for a learning rate that is found automatically: training reward of batches 1 to 5, three arms.

    OMP_NUM_THREADS=1 python -m results.deployed.auto_start --out benchmarks/deployed/auto-start.jsonl
    OMP_NUM_THREADS=1 python -m results.deployed.auto_start --out benchmarks/deployed/auto-start.jsonl --table

- `auto`: `learning_rate="auto"`, whose rate is found on the first batch.
- `from 1e-3`: the same bound and schedule, started at 1e-3 without a search.
- `grid`: the rate with the largest area under held-out success in docs/deployed.md and docs/results/llm.md, unheld.

All arms of a seed draw the same first batch. Runs that the file already has are skipped. The file also has runs of a search
that aimed at other multiples of the bound: `auto, aim .5`, `auto, aim .85` and, with four passes, `auto, aim 2`. On a GPU
pretrained models do the same: `--setting smollm2` (after `python -m results.evidence.starts smollm2`), and
`--setting qwen` with Qwen2.5-Coder-0.5B-Instruct in runs/pretrained/qwen, GSM8K in runs/gsm8k and vLLM.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from scipy import stats
from transformers.utils import logging as transformers_logging

from corral.llm.settings import read_recipe, resolve
from corral.llm.train import train
from corral.run.files import append_line
from corral.run.folder import RunFolder

BATCHES = 5
ARMS = ("auto", "from 1e-3", "grid")
BOUND = {1: 0.03, 4: 0.01}
"""`deployed_bound` by passes, as "auto" has it."""
GRID = {
    "demo": {("ppo_clip", 1): 4e-4, ("troll", 1): 4e-4, ("ppo_clip", 4): 2e-4, ("troll", 4): 2e-4},
    "smollm2": {("ppo_clip", 1): 3e-5, ("troll", 1): 3e-5, ("ppo_clip", 4): 3e-5, ("troll", 4): 1e-5},
    "qwen": {("troll", 1): 3e-6, ("ppo_clip", 1): 3e-6},
}
"""The rate of the largest mean area, by model, objective and passes. Qwen's is the only one that was tried."""
LAYERS: dict[str, dict[str, Any]] = {
    "demo": {"recipe": "demo", "device": "cpu", "eval_size": 8},
    "smollm2": {"recipe": "evidence-b", "model": "runs/pretrained/smollm2", "device": "cuda"},
    "qwen": {
        "recipe": "gsm8k", "model": "runs/pretrained/qwen", "device": "cuda", "task_config": {"path": "runs/gsm8k"},
        "per_device_train_batch_size": 32, "gradient_accumulation_steps": 2, "steps_per_generation": 16,
        "max_completion_length": 400, "gradient_checkpointing": False, "use_vllm": True, "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.25, "eval_size": 128,
    },
}  # fmt: skip
SEEDS = tuple(range(501, 509))
"""Nothing was chosen on these."""
KEPT = {
    "reward": "reward", "rate": "learning_rate", "kl": "tr/deployed_kl_mean", "share": "tr/step_share",
    "trials": "tr/rate_trials",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One run of five batches."""

    setting: str
    objective: str
    passes: int
    arm: str
    seed: int

    def layers(self) -> list[dict[str, Any]]:
        """A recipe, and settings on top of it."""
        given = dict(LAYERS[self.setting])
        recipe = read_recipe(given.pop("recipe"))
        held: dict[str, Any] = {
            "auto": {"learning_rate": "auto"},
            "from 1e-3": {"learning_rate": 1e-3, "deployed_bound": BOUND[self.passes]},
            "grid": {"learning_rate": GRID[self.setting][self.objective, self.passes], "deployed_bound": float("inf")},
        }[self.arm]
        given |= {"objective": self.objective, "num_iterations": self.passes, "seed": self.seed, "steps": BATCHES}
        return [recipe, given | held | {"lr_scheduler_type": "constant", "eval_every": BATCHES, "checkpoint_every": BATCHES}]

    def measure(self) -> dict[str, Any]:
        """The line of raw data: numbers of each batch, to six digits."""
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "run"
            train(resolve(self.layers()), out=folder, quiet=True)
            lines = RunFolder(folder).lines()[1:]
        assert len(lines) == BATCHES
        found = {name: [float(f"{line[key]:.6g}") for line in lines if key in line] for name, key in KEPT.items()}
        return asdict(self) | {name: numbers for name, numbers in found.items() if numbers}


def plan(setting: str, seeds: list[int], arms: list[str], passes: list[int]) -> Iterator[Run]:
    """Every run, seeds outermost."""
    for seed in seeds:
        for objective, often in GRID[setting]:
            for arm in arms:
                if often in passes:
                    yield Run(setting, objective, often, arm, seed)


def read(file: Path) -> dict[Run, dict[str, Any]]:
    """Lines of raw data by run."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {Run(*(line[name] for name in Run.__dataclass_fields__)): line for line in lines}


def table(found: dict[Run, dict[str, Any]]) -> str:
    """A row for each objective and number of passes: mean reward of the batches, and `auto` less each other arm."""
    rows = ["| model | objective | passes | auto | from 1e-3 | grid | auto − from 1e-3 | auto − grid |", "|---" * 8 + "|"]
    for about in dict.fromkeys((run.setting, run.objective, run.passes) for run in found):
        means: dict[str, dict[int, float]] = {arm: {} for arm in ARMS}
        for run, line in found.items():
            if (run.setting, run.objective, run.passes) == about and run.arm in ARMS:
                means[run.arm][run.seed] = fmean(line["reward"])
        cells = [f"{fmean(by_seed.values()):.3f}" if by_seed else "–" for by_seed in means.values()]
        cells += [difference(means["auto"], means[arm]) for arm in ARMS[1:]]
        rows.append(f"| {' | '.join([*map(str, about), *cells])} |")
    return "\n".join(rows)


def difference(one: dict[int, float], other: dict[int, float]) -> str:
    """Mean difference in points over the seeds that both have, with its 95 % Student interval."""
    points = [100 * (one[seed] - other[seed]) for seed in one.keys() & other.keys()]
    if len(points) < 3:  # an interval of two says nothing
        return f"{fmean(points):+.2f} ({len(points)} seeds)".replace("-", "−") if points else "–"
    low, high = stats.t.interval(0.95, len(points) - 1, loc=fmean(points), scale=stats.sem(points))
    return f"{fmean(points):+.2f} ({low:+.2f} to {high:+.2f}; {len(points)} seeds)".replace("-", "−")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=LAYERS, default="demo")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--arms", choices=ARMS, nargs="+", default=list(ARMS))
    parser.add_argument("--passes", type=int, choices=(1, 4), nargs="+", default=[1, 4])
    parser.add_argument("--out", type=Path, required=True, help="file of raw data, one line for each run")
    parser.add_argument("--table", action="store_true", help="print what the file has; train nothing")
    options = parser.parse_args()
    if options.table:
        print(table(read(options.out)))
        return
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    have = read(options.out)
    for run in plan(options.setting, options.seeds, options.arms, options.passes):
        if run not in have:
            line = run.measure()
            append_line(options.out, line)
            print(run, line["reward"], flush=True)


if __name__ == "__main__":
    main()
