"""Benchmark of the sandbox: trivial programs graded per second, one by one and in the pool.

Against a bare interpreter, started once per program with no sandbox at all, timed in the same process in turns: a machine that
is busy with other things slows all of them alike. "per core" divides by the workers. "per processor second" divides by the time
that cores were at work for it, this process's own and the kernel's included: waiting for a busy machine does not count there.

    python benchmarks/sandbox_rate.py [--programs 300] [--workers 1 2] [--rounds 5] [--save]
"""

import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rows import arguments, finish

from corral.lab.sandbox import SandboxJob, run_python
from corral.lab.sandbox.backend import BACKENDS
from corral.lab.sandbox.pool import USES, SandboxPool, why_not
from corral.lab.sandbox.view import interpreter

PROGRAM, STDIN, STDOUT = "print(sum(map(int, input().split())))", "1 2 3\n", "6\n"


def bare(count: int) -> None:
    for _ in range(count):
        subprocess.run([interpreter(), "-I", "-c", "pass"], check=True)


def one_by_one(count: int, backend: str) -> None:
    for _ in range(count):
        assert run_python(PROGRAM, STDIN, backend=backend).stdout == STDOUT


def pooled(count: int, pool: SandboxPool) -> None:
    results = pool.map(pool.run_one, [SandboxJob(code=PROGRAM, stdin=STDIN)] * count)
    assert all(result.stdout == STDOUT for result in results)


def processor_seconds(pool: SandboxPool) -> float:
    """Processor seconds of this process, the pool's workers, and all programs that they have run."""
    workers = {worker.process.pid for worker, _ in pool._idle}
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[2]) in workers:  # its group
            ticks += sum(map(int, fields[11:15]))  # own and ended children's, in user and kernel mode
    own = os.times()
    return own.user + own.system + ticks / os.sysconf("SC_CLK_TCK")


def rates(runs: dict[str, tuple[int, Callable[[int], None]]], pool: SandboxPool, rounds: int) -> dict[str, float]:
    """Programs per second of each, the median of rounds taken in turns; and per processor second, of the pool."""
    taken: dict[str, list[float]] = {name: [] for name in (*runs, "processor")}
    for _ in range(1 + rounds):
        for name, (count, run) in runs.items():
            used, start = processor_seconds(pool), time.perf_counter()
            run(count)
            taken[name].append(count / (time.perf_counter() - start))
        taken["processor"].append(count / (processor_seconds(pool) - used))  # the pool comes last
    return {name: statistics.median(values[1:]) for name, values in taken.items()}  # the first round is a warm-up


def measure(backend: str, programs: int, workers: int, rounds: int) -> dict[str, Any]:
    few = max(1, programs // 20)
    with SandboxPool(workers, backend=backend) as pool:
        ways: dict[str, tuple[int, Callable[[int], None]]] = {
            "bare": (few, bare),
            "run_python": (few, lambda count: one_by_one(count, backend)),
            "pool": (programs, lambda count: pooled(count, pool)),
        }
        found = rates(ways, pool, rounds)
    return {
        "backend": backend, "workers": workers, **{f"{name}_per_second": found[name] for name in ways},
        "pool_per_second_per_core": found["pool"] / workers, "pool_per_processor_second": found["processor"],
        "pool_over_bare": found["pool"] / found["bare"],
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__, programs=300, workers=[1, 2], rounds=5)
    args = parser.parse_args()
    print(f"{args.programs} programs: {PROGRAM}")
    if args.programs * (args.rounds + 1) >= USES:
        parser.error(f"a worker is replaced after {USES} programs, which would be measured too: ask for fewer.")
    rows = []
    for backend in BACKENDS:
        if reason := why_not(backend):
            print(f"{backend}: not here, {reason}")
        else:
            rows += [measure(backend, args.programs, workers, args.rounds) for workers in args.workers]
    finish("sandbox_rate", rows, args.save)


if __name__ == "__main__":
    main()
