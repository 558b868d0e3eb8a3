"""Two processes on the CPU that talk through gloo and meet in a file: no port to race for, and no wait without an end."""

import faulthandler
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.multiprocessing as mp

from device import CPU_ONLY

SECONDS = 600.0
"""After so long both are ended."""
MESSAGE_SECONDS = 60
"""How long one of them waits for the other."""


def run_two(work: Callable[[int, Path], None], folder: Path) -> None:
    """`work(rank, folder)` in two processes; an error in one is raised here, with where both stand if they hang.

    Neither sees a GPU, of which there may be one alone, and Triton interprets its kernels there. Both are forked from a server
    that has imported what this process has, once for all tests: TRL alone takes five seconds.
    """
    mp.set_forkserver_preload([name for name in ("torch", "trl.trainer.grpo_trainer", "peft") if name in sys.modules])
    with mock.patch.dict(os.environ, CPU_ONLY):  # read when torch and Triton are imported
        context = mp.start_processes(_one, (work, folder), nprocs=2, join=False, start_method="forkserver")
    end = time.monotonic() + SECONDS
    try:
        while not context.join(timeout=max(end - time.monotonic(), 0.0)):
            if time.monotonic() >= end:
                raise TimeoutError(f"two processes still run after {SECONDS:g} s.\n{_stacks(folder)}")
    except mp.ProcessExitedException as error:
        raise RuntimeError(f"{error}.\n{_stacks(folder)}") from error
    finally:
        for process in context.processes:
            process.kill()


def _one(rank: int, work: Callable[[int, Path], None], folder: Path) -> None:
    with _stack_file(folder, rank).open("w") as file:
        faulthandler.enable(file)
        faulthandler.dump_traceback_later(0.9 * SECONDS, file=file)
        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ["OMP_NUM_THREADS"] = "1"
        wait = timedelta(seconds=MESSAGE_SECONDS)
        torch.distributed.init_process_group("gloo", f"file://{folder}/meeting", wait, world_size=2, rank=rank)
        work(rank, folder)
        torch.distributed.barrier()
        # The group lives to the end: taken down, it may wait, holding Python's lock, for a thread of its own that waits for
        # the lock to let go of a tensor (torch 2.13).
        os._exit(0)


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack of rank {rank}.txt"


def _stacks(folder: Path) -> str:
    """Where each of them stood shortly before; nothing is known of one that has not started or has left Python."""
    files = [_stack_file(folder, rank) for rank in range(2)]
    return "\n".join(f"{file.stem}:\n{file.read_text() if file.exists() else ''}" for file in files)
