"""Benchmark of the language-model head: time, memory and errors, in named sections with an anchor each.

All contenders of a case run in one process and in turns; medians count, and "×" is the time over the anchor's: one GEMM of the
same shape, or stock TRL's update. "sustained" puts three milliseconds of GEMMs before each run, as the layers of a model do,
instead of a pause. Memory is what is held at the worst moment beyond the inputs, gradients included. Errors: against float64.

    PYTHONPATH=src python3 benchmarks/head.py                                       everything that this machine can measure
    … --section usual update --minutes 4                                            some of it; no case begins after that
    … --out benchmarks/results/head.jsonl --resume                                  rows kept case by case, and those left out
    … --section usual --against OTHER/src                                           this tree's corral against another tree's
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from head_against import Comparison
from head_cases import SECTIONS, About, Section
from rows import Row, read_rows, rounded, stamp, table, write_rows
from timing import free_memory, in_turns, peak_mebibytes, sustained

LABELS = ("section", "model", "N", "V", "H", "K", "policy", "dtype", "sequences", "tokens", "task", "name", "gpu")
"""What tells a row from all others; on a CPU the number of threads, too."""


def measure(section: Section, about: About, rounds: int | None = None) -> list[Row]:
    """Measure a case: a row per contender with times, memory and errors, or the reason why it cannot run."""
    device = section.device
    prepared = section.prepare(about, device)
    rows: dict[Any, Row] = {key: {**about, "task": key[0], "name": key[1]} for key in prepared.runs}
    runs = dict(prepared.runs)
    for key, run in prepared.runs.items():
        try:
            rows[key] |= prepared.check(key, run())  # compiles, too
            rows[key]["mib"] = peak_mebibytes(run, device)
        except Exception as error:  # other people's code, at another version, may fail in any way; ours may not
            if ("corral" in key[1] or key == prepared.anchor) and not isinstance(error, torch.OutOfMemoryError):
                raise
            missing = isinstance(error, ImportError)
            rows[key]["status"] = "not installed" if missing else f"{type(error).__name__}: {error}"[:120]
            del runs[key]
    taken = {"": in_turns(runs, rounds or section.rounds, device, wall=prepared.wall, pause=section.pause)}
    if section.sustained and device == "cuda":
        taken["_sustained"] = {key: sustained(run, section.sustained) for key, run in runs.items()}
    for when, times in taken.items():
        for key, ms in times.items():
            rows[key] |= {f"ms{when}": ms, f"x{when}": ms / times[prepared.anchor]}
    return [{key: rounded(value) for key, value in row.items()} for row in rows.values()]


def label(row: Row) -> tuple[Any, ...]:
    return *(row.get(name) for name in LABELS), None if row.get("gpu") else row.get("threads")


def holds(rows: list[Row], name: str, about: About, here: Row) -> bool:
    """True if a case was measured already, on this machine and this state of the code."""
    wanted = {"section": name, **about} | {key: here[key] for key in ("gpu", "threads", "torch", "code")}
    return any(wanted.items() <= row.items() for row in rows)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed = "; ".join(f"{name}: {section.question}" for name, section in SECTIONS.items())
    parser.add_argument("--section", nargs="+", choices=SECTIONS, metavar="NAME", help=f"{listed}")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no case is begun")
    parser.add_argument("--rounds", type=int, help="runs of each contender")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of a CPU")
    parser.add_argument("--out", type=Path, help="a file of JSON lines: rows are added, those of the same case replaced")
    parser.add_argument("--resume", action="store_true", help="leave out what --out holds of this machine and this code")
    parser.add_argument("--against", type=Path, metavar="SRC", help="another tree's source folder, measured in turns with this")
    return parser


def main() -> None:
    parser = arguments()
    args = parser.parse_args()
    if args.resume and not args.out:
        parser.error("--resume goes on with the rows of a file: name it with --out.")
    torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    usual = [name for name, section in SECTIONS.items() if section.device == device and not name.startswith("smoke")]
    until = time.monotonic() + 60 * args.minutes
    trees = Comparison(args.against) if args.against else None
    try:
        for name in args.section or usual:
            if why := SECTIONS[name].missing():
                print(f"{name}: not measured, {why}", flush=True)
            else:
                measure_section(name, args, until, trees)
    finally:
        if trees:
            trees.close()


def measure_section(name: str, args: argparse.Namespace, until: float, trees: Comparison | None) -> None:
    """Case by case; rows are printed and kept after each."""
    section, saved_as = SECTIONS[name], f"{name}, against" if trees else name
    here = stamp() | ({} if section.device == "cuda" else {"gpu": None})
    for about in section.cases:
        kept = read_rows(args.out) if args.out else []
        if args.resume and holds(kept, saved_as, about, here):
            continue
        if time.monotonic() > until:
            print(f"{name}: not measured, the minutes are over: {about}", flush=True)
            continue
        found = trees.measure(name, about, args.rounds) if trees else measure(section, about, args.rounds)
        print(f"\n{name}: {about}\n{table([{k: v for k, v in row.items() if k not in about} for row in found])}", flush=True)
        rows = [{"section": saved_as, **row, **here} for row in found]
        if args.out:
            new = {label(row) for row in rows}
            write_rows(args.out, [*(row for row in kept if label(row) not in new), *rows])
        free_memory()


if __name__ == "__main__":
    main()
