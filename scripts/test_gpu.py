"""Kernels, the TRL door and robots' learners on a CUDA device, in shards of at most eight minutes.

    make test-gpu                                       every shard, in .venv
    make test-gpu SHARD=trainer                         one of them
    make test-gpu RUN=python3 PYTHONPATH=packages       another Python and a folder of unpacked wheels; nothing is installed

A shard that has not ended in time is ended, and has failed. What needs no GPU, Triton's interpreter and processes that talk
through gloo, is a shard too, in which none is seen.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SECONDS = 480
WORKERS = 6
"""They share the card: models and problems are small, and most of the time is the host's."""

SHARDS: dict[str, tuple[str, ...]] = {
    "kernels": ("tests/head", "tests/test_cuda.py"),
    "head": ("tests/head/test_triton_gpu.py", "tests/head/test_triton_head.py", "tests/head/test_head_shapes.py"),
    "trainer": ("tests/corral_trl/test_trainer.py", "tests/corral_trl/test_trainer_head.py"),
    "deployed": (
        "tests/deployed",
        "tests/head/test_head_kl.py",
        "tests/corral_trl/test_deployed.py",
        "tests/corral_trl/test_deployed_precision.py",
        "tests/corral_trl/test_reuse.py",
    ),
    "door": ("tests/corral_trl",),
    "robot": (
        "tests/lab/baselines/test_baseline.py",
        "tests/robot/test_learner_device.py",
        "tests/robot/test_prodmp.py",
        "tests/lab/environments/test_warp_batch.py",
    ),
    "interpreter": (
        "tests/head/test_parallel.py",
        "tests/corral_trl/test_trainer_distributed.py",
        "tests/corral_trl/test_trainer_waits.py",
    ),
}
"""Files and folders of each; a folder is without the files that another shard names."""

CPU_ONLY = {"interpreter": {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}}


class Result(NamedTuple):
    """Outcome of a shard."""

    passed: int
    failed: int
    skipped: int
    seconds: float

    @property
    def good(self) -> bool:
        return self.passed > 0 and not self.failed

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped in {self.seconds:.0f} s"


def command(shard: str, workers: int, report: Path) -> list[str]:
    """The line of pytest that runs a shard and writes its report."""
    others = [path for name, paths in SHARDS.items() if name != shard for path in paths if path.endswith(".py")]
    return [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", f"--junitxml={report}",
        f"--numprocesses={workers}", "--dist=worksteal", "--timeout=300", "--timeout-method=thread",
        "--jaxtyping-packages", "corral,typecheck.checked",
        *SHARDS[shard], *(f"--ignore={path}" for path in others if path not in SHARDS[shard]),
    ]  # fmt: skip


def environment(shard: str) -> dict[str, str]:
    """This one, with corral's own source first and every path whole: tests start programs in other folders."""
    paths = [str(ROOT / "src"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    whole = os.pathsep.join(str(Path(path).resolve()) for path in paths)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": whole, **CPU_ONLY.get(shard, {})}


def run(shard: str, workers: int) -> Result | str:
    """Run a shard; returns its result, or the reason why there is none. pytest's output is printed as it comes."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        process = subprocess.Popen(command(shard, workers, report), cwd=ROOT, env=environment(shard), start_new_session=True)
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return f"not at an end after {SECONDS} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with its workers
                process.wait()
        if not report.is_file():
            return f"pytest ended with status {process.returncode} and wrote no report"
        return read(report, time.monotonic() - started)


def read(report: Path, seconds: float) -> Result:
    """Read pytest's report on a shard."""
    suites = list(ElementTree.parse(report).iter("testsuite"))
    tests, failures, errors, skipped = (
        sum(int(suite.attrib[name]) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    return Result(tests - failures - errors - skipped, failures + errors, skipped, seconds)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="*", metavar="shard", help=f"of {', '.join(SHARDS)}; all of them unless named")
    parser.add_argument("--workers", type=int, default=WORKERS)
    given = parser.parse_args(arguments)
    for name in given.shards:
        if name not in SHARDS:
            parser.error(f"there is no shard {name!r}; there are {', '.join(SHARDS)}")
    import torch  # it takes seconds, and --help does not need it

    shards = given.shards or list(SHARDS)
    if not torch.cuda.is_available() and set(shards) - set(CPU_ONLY):
        parser.error("torch finds no CUDA device. Without one, `make test` runs the kernels in Triton's interpreter")
    results = {shard: run(shard, given.workers) for shard in shards}
    good = {shard: isinstance(result, Result) and result.good for shard, result in results.items()}
    for shard, result in results.items():
        sys.stdout.write(f"{'ok  ' if good[shard] else 'FAIL'} {shard:12} {result}\n")
    return 0 if all(good.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
