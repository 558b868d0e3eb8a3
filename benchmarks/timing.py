"""Time and memory of one run, on a CPU or a GPU, and medians of runs taken in turns.

On a GPU events count, with the host ahead of the device as in training: launches count only where they hold the device up.
"""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Run = Callable[[], Any]
Name = TypeVar("Name")
AHEAD = 6_000_000
"""Cycles of the device, about 3 ms, by which the host is ahead."""
LAYERS = 10
"""GEMMs before each run where the device is to stay busy; of this size they take about 3 ms of an H200."""
ENOUGH = 1500.0
"""Milliseconds of a contender's runs on a GPU after which it needs no more of them."""


def milliseconds(run: Run, device: str = "cpu", *, wall: bool = False, busy: bool = False) -> float:
    """Time of one run. `busy` puts GEMMs before it instead of a wait: the clock is then what training leaves of it."""
    if device == "cpu" or wall:
        return _clocked(run, device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if busy:
        x, w, y = _layer()
        for _ in range(LAYERS):
            torch.mm(x, w, out=y)
    else:
        torch.cuda._sleep(AHEAD)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _clocked(run: Run, device: str) -> float:
    # One thread's own time is not disturbed by other processes; several threads wait for one another.
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = clock()
    run()
    wait()
    return 1e3 * (clock() - start)


@cache
def _layer() -> tuple[Tensor, Tensor, Tensor]:
    """Random operands, since GEMMs of zeros take less power."""
    x, w = (torch.randn(n, 4096, device="cuda").bfloat16() for n in (8192, 4096))
    return x, w, torch.empty_like(x)


def in_turns(
    runs: Mapping[Name, Run], rounds: int, device: str = "cpu", *, wall: bool = False, pause: float = 0.0
) -> dict[Name, float]:
    """Median milliseconds of each, one after the other, so that whatever else the machine does falls on all alike.

    Every run is warmed up once. On a GPU the slow ones need fewer rounds.
    """
    taken: dict[Name, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            if device == "cpu" or sum(taken[name]) < ENOUGH:
                time.sleep(pause)
                taken[name].append(milliseconds(run, device, wall=wall))
    return {name: statistics.median(times) for name, times in taken.items()}


def sustained(run: Run, seconds: float) -> float:
    """Median of the second half of a long row of runs on a busy GPU: by then the clock has settled."""
    taken, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until or len(taken) < 4:
        taken.append(milliseconds(run, "cuda", busy=True))
    return statistics.median(taken[len(taken) // 2 :])


def free_memory() -> None:
    """Give back what nobody refers to, cycles among it, so that another process may have it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_mebibytes(run: Run, device: str) -> float:
    """Peak memory of a run in MiB, beyond the memory held before it."""
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    changes = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = itertools.accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns()))
    return max(held, default=0) / 2**20
