"""`corral bench NAME`: run a benchmark again, on this machine, from a source checkout."""

import argparse
import subprocess
import sys
from pathlib import Path

from corral.cli import refuse
from corral.naming import nearest

_FOLDER = Path(__file__).parents[3] / "benchmarks"
BENCHMARKS = {
    "gpu": ("everything_on_gpu.py", "everything on docs/performance.md that needs a GPU, as far as the minutes reach"),
    "head": ("head_vs_naive.py", "the language-model head: time, memory and accuracy against full logits and fused heads"),
    "projection": ("projection_steps.py", "the KL projection: evaluations, time and accuracy against bracketing"),
    "walk": ("tune_walk.py", "the streamed product's way through its tiles: finds the fastest on this GPU, and remembers it"),
}
"""Name → script, and what it measures."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One name; everything else goes to the script."""
    listed = "; ".join(f"{name}: {what}" for name, (_, what) in BENCHMARKS.items())
    parser.add_argument("name", metavar="NAME", nargs="?", help=f"{listed}. Further arguments go to the script, --help too")
    parser.add_argument("further", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Run the script in a process of its own; its status is ours."""
    if arguments.name is None:
        sys.stdout.write("".join(f"{name:<12} {what}\n" for name, (_, what) in BENCHMARKS.items()))
        return 0
    if arguments.name not in BENCHMARKS:
        return refuse(f"there is no benchmark {arguments.name!r}.{nearest(arguments.name, BENCHMARKS)}")
    script = _FOLDER / BENCHMARKS[arguments.name][0]
    if not script.exists():
        return refuse(
            f"bench runs from a source checkout, and there is no {script}. Benchmarks are not part of the installed package: "
            "clone the repository and `pip install -e .` in it.",
            status=1,
        )
    return subprocess.run([sys.executable, str(script), *rest, *arguments.further], check=False).returncode
