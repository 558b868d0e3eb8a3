"""How many trivial programs are graded per second, one by one and in the pool?

Against a bare interpreter, started once per program with no sandbox at all, timed in the same process in turns: a machine that
is busy with other things slows all of them alike. "per core" divides by the workers.

    python benchmarks/sandbox_rate.py [--programs 400] [--workers 1 2] [--rounds 5] [--save]
"""

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

from results import save_results

from corral.task.pool import Pool
from corral.task.sandbox import Job, run_python
from corral.task.sandbox.backend import BACKENDS
from corral.task.sandbox.view import interpreter
from corral.task.sandbox.worker import why_not

PROGRAM, STDIN, STDOUT = "print(sum(map(int, input().split())))", "1 2 3\n", "6\n"


def bare(count: int) -> None:
    for _ in range(count):
        subprocess.run([interpreter(), "-I", "-c", "pass"], check=True)


def one_by_one(count: int, backend: str) -> None:
    for _ in range(count):
        assert run_python(PROGRAM, STDIN, backend=backend).stdout == STDOUT


def pooled(count: int, pool: Pool) -> None:
    results = pool.run([Job(code=PROGRAM, stdin=STDIN)] * count)
    assert all(result.stdout == STDOUT for result in results)


def rates(runs: dict[str, tuple[int, Callable[[int], None]]], rounds: int) -> dict[str, float]:
    """Programs per second of each, the median of rounds taken in turns."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(1 + rounds):
        for name, (count, run) in runs.items():
            start = time.perf_counter()
            run(count)
            taken[name].append(count / (time.perf_counter() - start))
    return {name: statistics.median(values[1:]) for name, values in taken.items()}  # the first round is a warm-up


def measure(backend: str, programs: int, workers: int, rounds: int) -> dict[str, Any]:
    few = max(1, programs // 20)
    with Pool(workers, backend=backend) as pool:
        found = rates(
            {
                "bare": (few, bare),
                "run_python": (few, lambda count: one_by_one(count, backend)),
                "pool": (programs, lambda count: pooled(count, pool)),
            },
            rounds,
        )
    return {
        "backend": backend,
        "workers": workers,
        "bare_per_second": round(found["bare"], 1),
        "run_python_per_second": round(found["run_python"], 1),
        "pool_per_second": round(found["pool"], 1),
        "pool_per_second_per_core": round(found["pool"] / workers, 1),
        "pool_over_bare": round(found["pool"] / found["bare"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=400)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write the rows to benchmarks/results.json")
    args = parser.parse_args()

    print(f"{args.programs} programs: {PROGRAM}")
    print("backend  workers  bare python/s  run_python/s  pool/s  per core  times bare")
    rows = []
    for backend in BACKENDS:
        if reason := why_not(backend):
            print(f"{backend:7s}  not here: {reason}")
            continue
        for workers in args.workers:
            r = measure(backend, args.programs, workers, args.rounds)
            print(
                f"{backend:7s}  {workers:7d}  {r['bare_per_second']:13.1f}  {r['run_python_per_second']:12.1f}"
                f"  {r['pool_per_second']:6.1f}  {r['pool_per_second_per_core']:8.1f}  {r['pool_over_bare']:10.2f}"
            )
            rows.append(r)
    if args.save:
        save_results("sandbox_rate", rows)


if __name__ == "__main__":
    main()
