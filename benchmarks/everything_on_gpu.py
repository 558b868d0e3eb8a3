"""Everything on docs/performance.md that needs a GPU: the most important first, as far as the minutes reach.

Kernels of what is to come are compiled first, by several processes at once. Then one part at a time is measured, each under a
limit of its own. Rows are kept as they come in, so that `--resume` goes on with what is missing, now or on another day; what is
missing is said at the end. Once all of a table is there, it goes into benchmarks/results, and the page is written anew. The
rows of a folder are of one GPU and one state of the code.

    python benchmarks/everything_on_gpu.py [--minutes 10] [--resume] [--folder runs/bench-gpu]          make bench-gpu
    python benchmarks/everything_on_gpu.py --prepare                       what needs no GPU: rollouts are drawn
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import head_page
import torch
from gpu_parts import Part, parts_of
from results import FOLDER, machine, read_results, write_results

import corral
from corral.run.files import write_json

ROOT = Path(__file__).parents[1]
MEASURED = ("kernels", "llm", "objective", "projection")
"""Parts of corral whose speed is measured."""
COMPILING = 120.0
"""Seconds after which the first part begins, whatever is compiled by then."""
EACH = 12 * 2**30
"""Bytes of a GPU that a process which compiles may take."""
TOO_LATE = 20.0
"""Seconds with which nothing new is begun."""
ENVIRONMENT = {"TRITON_CACHE_AUTOTUNING": "1", "PYTHONUNBUFFERED": "1"}
"""What other people's kernels are tuned to is kept, too."""


def begin(folder: Path, resume: bool) -> str | None:
    """Write down what is measured in a folder, or say why it is not gone on with: a table is of one state of the code."""
    code = hashlib.sha256()
    for path in sorted(path for part in MEASURED for path in Path(corral.__file__).with_name(part).rglob("*.py")):
        code.update(path.read_bytes())
    begun, here = folder / "begun.json", {key: machine()[key] for key in ("gpu", "torch")} | {"code": code.hexdigest()[:12]}
    if not begun.exists():
        write_json(begun, here)
    elif not resume:
        return "holds rows already: --resume goes on with them; to measure anew, delete it or name another folder."
    elif (there := json.loads(begun.read_text())) != here:
        return f"was begun with {there}, and this is {here}: delete it, or name another folder, and measure anew."
    return None


def run_within(command: list[str], seconds: float, output: Path | None = None, **environment: str) -> str:
    """Run a program, and end it with everything that it has started after so many seconds; what became of it."""
    if seconds <= 0:
        return "not begun"
    with open(output or os.devnull, "w") as log:
        given = {"stdout": log, "stderr": subprocess.STDOUT} if output else {}
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | ENVIRONMENT | environment, start_new_session=True, **given
        )
    try:
        status = process.wait(seconds)
    except BaseException as ended:  # by the clock, or by somebody who wants all of this to end
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(ended, subprocess.TimeoutExpired):
            raise
        return f"cut short after {seconds:.0f} s"
    return "done" if status == 0 else f"failed with status {status}"


def compile_all(parts: Iterable[Part], seconds: float, workers: int, logs: Path) -> None:
    """The kernels of all parts, the first ones' first. One that fails here is compiled where it is measured, or fails there."""
    commands, until = [command for part in parts for command in part.compiling], time.monotonic() + seconds

    def compile_one(number: int, command: list[str]) -> str:
        log = logs / f"compile-{number}.log"
        became = run_within(command, until - time.monotonic(), log, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
        return became if became == "done" else f"{became}; see {log}"

    with ThreadPoolExecutor(workers) as pool:
        for command, became in zip(commands, pool.map(compile_one, range(len(commands)), commands), strict=True):
            print(f"compiled: {' '.join(command[1:])}: {became}", flush=True)


def drive(parts: list[Part], seconds: float, logs: Path) -> bool:
    """Compile and measure what can be measured here, within so many seconds; whether nothing has failed."""
    until, workers = time.monotonic() + seconds, os.cpu_count() or 1
    if torch.cuda.is_available():
        workers = max(1, min(workers, torch.cuda.get_device_properties(0).total_memory // EACH))
    ready = [part for part in parts if part.lacks() and not part.blocked()]
    compile_all(ready, min(COMPILING, seconds / 3), workers, logs)
    return measure_all(parts, until)


def measure_all(parts: list[Part], until: float) -> bool:
    """Part by part, those without a GPU last; whether none has failed. One that was cut short has not failed."""
    well, begun = True, set()
    while (left := until - time.monotonic()) >= TOO_LATE:
        ready = [part for part in parts if part.name not in begun and part.lacks() and not part.blocked()]
        if not ready:
            break
        part = min(ready, key=lambda part: not part.gpu)
        begun.add(part.name)
        print(f"== {part.name}, {left:.0f} s left", flush=True)
        became = run_within(part.command, min(part.seconds, left))
        print(f"== {part.name}: {became}", flush=True)
        well = well and not became.startswith("failed")
    return well


def publish(parts: Iterable[Part], folder: Path) -> list[str]:
    """Put the sections that are whole in the place of older ones, and name them."""
    published = []
    for part in parts:
        if part.file is None:
            continue
        whole = [name for name, missing in part.missing().items() if not missing]
        mine, kept = read_results(part.file), folder / part.file.name
        if whole:
            write_results(read_results(kept) | {name: mine[name] for name in whole}, kept)
        published += whole
    return published


def say_missing(parts: Iterable[Part]) -> None:
    for part in parts:
        if lacks := part.lacks():
            why = part.blocked()
            print(f"missing: {part.name}{f' ({why})' if why else ''}: {'; '.join(lacks)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="to take at the most")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/bench-gpu", help="where rows are kept until they are whole")
    parser.add_argument("--resume", action="store_true", help="go on with what the folder holds")
    parser.add_argument("--prepare", action="store_true", help="only what needs no GPU, for an hour at the most")
    args = parser.parse_args()
    folder = args.folder.absolute()
    parts = [part for part in parts_of(folder) if not (args.prepare and part.gpu)]
    if not args.prepare and not torch.cuda.is_available():
        parser.error("there is no GPU here; --prepare makes what needs none.")
    folder.mkdir(parents=True, exist_ok=True)
    if not args.prepare and (why := begin(folder, args.resume)):
        parser.error(f"{folder} {why}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # with what it has started
    try:
        well = drive(parts, float("inf") if args.prepare else 60 * args.minutes, folder)
    finally:
        say_missing(parts)
        if published := publish(parts, FOLDER):
            print(f"whole, and written into {FOLDER} and the pages: {'; '.join(published)}", flush=True)
            head_page.main()
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
