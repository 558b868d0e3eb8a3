"""A grader's process for tests of the pool: the real one, with a grader that does what it is told, good or bad."""

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "src" / "corral" / "lab" / "tasks" / "grader_worker.py"


def obey(what: str) -> float:
    """Spin, sleep, die, print an answer, fall silent, exhaust the memory, raise; or give the number that stands there."""
    if what == "spin":
        while True:
            pass
    if what == "sleep":
        time.sleep(3600)
    if what == "die":
        os._exit(3)
    if what == "print":
        print("graded 1.0", flush=True)  # noqa: T201
        os.write(1, b"graded 1.0\n")  # as a library in C would
    if what == "hang up":
        os.closerange(3, 100)  # the pipe of the answers among them
        time.sleep(3600)
    if what == "memory":
        return float(len(bytearray(2**40)))
    if what == "exit":
        raise SystemExit
    if what == "pid":
        return float(os.getpid())
    return float(what)


def load() -> Callable[..., float]:
    return obey


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("grader_worker", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    worker.LOADERS["test"] = load
    worker.main(sys.argv[1])
