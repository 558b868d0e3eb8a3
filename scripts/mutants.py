"""Apply each defect of tests/mutants.toml in a copy of the tree and run the tests nearest to it: which go unnoticed?

python scripts/mutants.py [--only TEXT] [--jobs N]
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("src", "tests", "benchmarks", "results", "docs", "examples", "scripts", "pyproject.toml", "README.md", "CHANGELOG.md")
SECONDS = 900
"""Tests that take longer count as failed: a defect may make a loop endless."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    file: str
    """Relative to src/corral."""
    old: str
    new: str
    tests: list[str]
    """Relative to tests."""

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()}  →  {self.new.strip() or '(nothing)'}"


def read_mutants() -> list[Mutant]:
    return [Mutant(**entry) for entry in tomllib.loads((ROOT / "tests/mutants.toml").read_text())["mutant"]]


def make_copy(folder: Path) -> Path:
    """The tree, as it is now, in a folder of its own."""
    for name in COPIED:
        source, ignored = ROOT / name, shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, folder / name, ignore=ignored) if source.is_dir() else shutil.copy(source, folder / name)
    return folder


def run_tests(tree: Path, tests: list[str]) -> subprocess.CompletedProcess[str] | None:
    """Run tests in this tree; None if they do not end in time."""
    # Compiled files are told apart by size and time alone: a mutant may have those of the file before it.
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    command += [f"tests/{test}" for test in tests]
    try:
        return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return None


def is_noticed(mutant: Mutant, tree: Path) -> bool:
    """True if a test fails with the defect in the tree. The tree is restored afterwards."""
    file = tree / "src/corral" / mutant.file
    whole = file.read_text()
    if whole.count(mutant.old) != 1:
        raise SystemExit(f"mutants: `old` must stand once in its file, and stands {whole.count(mutant.old)} times: {mutant}")
    file.write_text(whole.replace(mutant.old, mutant.new))
    try:
        done = run_tests(tree, mutant.tests)
    finally:
        file.write_text(whole)
    if done is not None and done.returncode > 2:  # 1: a test failed, 2: it could not even be imported
        raise SystemExit(f"mutants: the tests of {mutant} did not run.\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done is None or done.returncode > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants with this text in their file or lines")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="copies that are tested at once")
    given = parser.parse_args()
    mutants = [mutant for mutant in read_mutants() if given.only in str(mutant)]
    if not mutants:
        raise SystemExit(f"mutants: none has {given.only!r} in it.")
    with tempfile.TemporaryDirectory(prefix="corral-mutants-") as folder:
        trees: Queue[Path] = Queue()
        for job in range(given.jobs):
            trees.put(make_copy(Path(folder) / str(job)))

        def borrow(mutant: Mutant) -> tuple[Mutant, bool, float]:
            tree, start = trees.get(), time.monotonic()
            try:
                return mutant, is_noticed(mutant, tree), time.monotonic() - start
            finally:
                trees.put(tree)

        tree = trees.get()
        before = run_tests(tree, sorted({test for mutant in mutants for test in mutant.tests}))
        trees.put(tree)
        if before is None or before.returncode:
            raise SystemExit(f"mutants: the tests fail without any mutant.\n{'' if before is None else before.stdout[-3000:]}")
        survivors = []
        with ThreadPoolExecutor(given.jobs) as pool:
            for mutant, noticed, seconds in pool.map(borrow, mutants):
                print(f"{'noticed ' if noticed else 'SURVIVES'} {seconds:5.0f} s  {mutant}", flush=True)
                survivors += [] if noticed else [mutant]
    print(f"\n{len(mutants) - len(survivors)} of {len(mutants)} mutants are noticed.")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
