"""Command `corral bench NAME`: run one of the repository's benchmarks on this machine, from a source checkout."""

import argparse
import subprocess
import sys
from pathlib import Path

from corral.lab.cli import refuse
from corral.validate import nearest

_FOLDER = Path(__file__).parents[4] / "benchmarks"
BENCHMARKS = {
    "head": ("head.py", "the language-model head: time, memory and errors against full logits, fused heads and another tree"),
    "update": ("update.py", "old pass and updates of a trainer: stock TRL against corral padded, packed and compiled"),
    "projection": ("projection_steps.py", "the KL projection: evaluations, time and accuracy against bracketing"),
}
"""Benchmarks keyed by name, each with its script and a description."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name of the benchmark to the parser. All other arguments go to the benchmark's script."""
    listed = "; ".join(f"{name}: {what}" for name, (_, what) in BENCHMARKS.items())
    parser.add_argument("name", metavar="NAME", nargs="?", help=f"{listed}. Further arguments go to the script, --help too")
    parser.add_argument("further", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Run the benchmark's script in a new process and return its exit status."""
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
