"""Number of CPU cores that this process may use."""

import math
import os
from pathlib import Path


def cores() -> int:
    """Number of usable CPU cores: the process's CPU affinity, limited by the CPU quota of its control group (cgroup)."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS has no affinity
    return max(1, math.floor(min(allowed, share_of_time())))


def share_of_time(own: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> float:
    """CPU quota in cores: the smallest limit (cpu.max) of the process's control groups (cgroup v2). It is inf without a limit.

    A container that sees 64 cores and has the time of two would else start 64 programs, of which all but two wait: their time
    limits, which count by the clock, would end them.
    """
    found = math.inf
    try:
        (line,) = (line for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, ValueError):  # not Linux, or cgroup v1 alone
        return found
    group = groups / line.removeprefix("0::").lstrip("/")
    for folder in (group, *group.parents):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
            found = min(found, int(quota) / int(period))
        except (OSError, ValueError):  # no limit here: the file is missing, as at the root, or says "max"
            continue
    return found
