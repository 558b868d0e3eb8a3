"""Where does the head's time on a GPU go? The device's own time in each kernel, of one run of an old pass and of updates.

python benchmarks/head_kernels.py [--save] [--resume]
"""

import argparse
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from head_contenders import OLD, TROLL, Contender, contenders
from head_problem import Problem, make_problem
from head_tables import figure, markdown
from head_vs_naive import USUAL, rounded
from results import HEAD, save_results, saved_rows
from torch.profiler import ProfilerActivity, profile

NAME = "kernels on cuda"
RUNS = [
    ("old pass", "peaked", (OLD, "corral, triton")),
    ("TROLL, peaked", "peaked", (TROLL, "corral, triton")),
    ("exact TROLL, flat", "flat", (TROLL, "corral, triton, exact")),
]
PARTS = {
    "the streamed product": ("stream",),
    "other products": ("nvjet", "gemm", "splitk", "cutlass"),
    "tiles made again": ("_tile_kernel",),
    "supports": ("_own_kernel", "_given_kernel", "_marks_kernel"),
    "a few dense rows": ("_logit_kernel",),
    "dH and dW": ("_hidden_kernel", "_weight_kernel", "_piece_kernel", "sort"),
}
"""What kernels do, by what their names contain."""
REST = "everything else"


def kernels_of(run: Contender, p: Problem) -> dict[str, float]:
    """Milliseconds of the device in each part."""
    for _ in range(3):
        run(p)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        run(p)
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    for event in record.key_averages():
        spent[part_of(event.key)] += event.self_device_time_total / 1e3
    return dict(spent)


def part_of(kernel: str) -> str:
    name = kernel.lower()
    return next((part for part, words in PARTS.items() if any(word in name for word in words)), REST)


def kernels(results: dict[str, Any]) -> str:
    """A column per run, a line per part."""
    if NAME not in results:
        return "Not measured yet.\n"
    rows = results[NAME]["rows"]
    head = ["ms of the device", *(f"H = {row['H']}: {row['run']}" for row in rows)]
    parts = [part for part in (*PARTS, REST) if any(part in row["ms"] for row in rows)]
    lines = [[part, *(figure(row["ms"].get(part, 0.0)) for row in rows)] for part in parts]
    return markdown(head, [*lines, ["in all", *(figure(sum(row["ms"].values())) for row in rows)]])


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="keep the rows")
    parser.add_argument("--resume", action="store_true", help="measure the runs that the file does not hold yet")
    parser.add_argument("--file", type=Path, default=HEAD, help="where to; benchmarks/results/head.json")
    return parser


def main() -> None:
    parser = arguments()
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("kernels run on a GPU, and there is none here.")
    rows = saved_rows(NAME, args.file) if args.resume else []
    there = {(row["H"], row["run"]) for row in rows}
    for shape, (run, policy, key) in itertools.product(USUAL, RUNS):
        if (shape[2], run) in there:
            continue
        problem = make_problem(*shape, 64, policy, "cuda", torch.bfloat16).with_support()
        spent = kernels_of(contenders("cuda", torch.bfloat16, policy)[key], problem)
        rows.append({"H": shape[2], "run": run, "ms": {part: rounded(ms) for part, ms in spent.items()}})
        print(rows[-1], flush=True)
        if args.save:
            save_results(NAME, rows, args.file)


if __name__ == "__main__":
    main()
