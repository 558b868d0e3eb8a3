"""Times on a CPU, for benchmarks that compare two ways or three of computing one thing."""

import statistics
import time
from collections.abc import Callable
from typing import Any


def milliseconds(*runs: Callable[[], Any], repeats: int) -> list[float]:
    """Median time of each, taken in turns so that whatever else the machine does falls on all alike."""
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(1 + repeats):
        for run, taken in zip(runs, seconds, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return [1e3 * statistics.median(taken[1:]) for taken in seconds]  # the first run is a warm-up
