"""How fast, how small and how exact is the language-model head, against full logits and against the heads that others ship?

All contenders of a shape run in one process and in turns, so that whatever else the machine does, and its temperature, fall on
all alike. "cool" pauses before each run; "sustained" puts three milliseconds of matrix products before each instead, as the
layers of a model do, and no pause. Either way a GPU's host starts ahead of the device, as it is in training: launches count
only where they hold the device up. Memory is what is held at the worst moment beyond the inputs, gradients included. Errors are
against float64, on some of the rows: of log-probs, and of dH relative to its norm.

    python benchmarks/head_vs_naive.py [--device cuda] [--quick] [--others] [--save]          corral bench head […]
"""

import argparse
import importlib.util
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from head_contenders import BRIEF, OTHERS, PRODUCTS, STEADY, TROLL, Contender, contenders, overshoot
from head_errors import Reference
from head_problem import make_problem
from head_tables import shape_of
from head_timing import interleaved, peak_mebibytes, sustained
from results import HEAD, save_results, saved_rows

CHECKED = 64
"""Rows whose results are compared with float64."""
CPU_SHAPES = [(512, 49152, 576), (2048, 49152, 576), (512, 151936, 896)]
GPU_SHAPES = [(n, v, h) for h in (896, 4096) for n in (2048, 8192, 16384) for v in (32000, 151936, 262144)]
USUAL = [(8192, 151936, h) for h in (4096, 896)]


class Case(NamedTuple):
    """One comparison; a brief one has few contenders and few runs."""

    shape: tuple[int, int, int]
    k: int
    policy: str
    dtype: torch.dtype
    brief: bool

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells its rows from those of others."""
        return *self.shape, self.k, self.policy, str(self.dtype).removeprefix("torch.")


def cases(device: str, quick: bool) -> list[Case]:
    """Everybody takes part at the usual shapes of a GPU; the other policies and K appear at these only, and briefly."""
    if device == "cpu":
        shapes = CPU_SHAPES[:1] if quick else CPU_SHAPES
        return [Case(shape, 64, "medium", dtype, False) for shape in shapes for dtype in (torch.float32, torch.bfloat16)]
    full = [Case(shape, 64, policy, torch.bfloat16, False) for policy in ("peaked", "flat") for shape in USUAL]
    listed = [(shape, 64, "medium") for shape in USUAL] + [(shape, k, "peaked") for k in (16, 256) for shape in USUAL]
    listed += [(shape, 64, "peaked") for shape in GPU_SHAPES if shape not in USUAL]
    return full if quick else full + [Case(*each, torch.bfloat16, True) for each in listed]


def measure(case: Case, device: str, rounds: int, only: str = "", once: bool = False) -> list[dict[str, Any]]:
    """One row per contender, of those whose names match; those that cannot run say why. `once` times nothing."""
    p = make_problem(*case.shape, case.k, case.policy, device, case.dtype).with_support()
    reference = Reference(p.first(CHECKED))
    about = dict(zip(("N", "V", "H", "K", "policy", "dtype"), case.key, strict=True))
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    runs: dict[tuple[str, str], Callable[[], Any]] = {}
    for (task, name), contender in contenders(device, case.dtype, case.policy).items():
        if (case.brief and name not in BRIEF) or not re.search(only, name):
            continue
        rows[task, name] = row = {**about, "task": task, "name": name}
        run = bound(contender, p)
        why = refusal(name, run, row, reference if task != PRODUCTS else None)
        if why is not None:
            row["status"] = why
        elif not once:
            row["mib"] = peak_mebibytes(run, device)
            runs[task, name] = run
        if task == TROLL and name in ("corral, torch", "corral, triton"):
            row["kl_error"] = overshoot(p, name.removeprefix("corral, "))
    if not once:
        pause = 0.0 if device == "cpu" else 0.02 if case.brief else 0.1
        for key, value in interleaved(runs, device, min(rounds, 3) if case.brief else rounds, pause).items():
            rows[key]["ms"] = value
        for key, run in runs.items():
            if device != "cpu" and (not case.brief or key in STEADY):
                rows[key]["ms_sustained"] = sustained(run, 0.1 if case.brief else 0.3)
    for row in rows.values():
        print(line(row), flush=True)
    return [{key: rounded(value) for key, value in row.items()} for row in rows.values()]


def bound(contender: Contender, p: Any) -> Callable[[], Any]:
    return lambda: contender(p)


def refusal(name: str, run: Callable[[], Any], row: dict[str, Any], reference: Reference | None) -> str | None:
    """Why a contender cannot run; None if it can, with its errors in the row. This first run compiles, too."""
    package = OTHERS.get(name, ("torch", None))[0]
    if importlib.util.find_spec(package) is None:
        return "not installed"
    if package == "torch" and name in OTHERS and not hasattr(F, name.removeprefix("torch F.")):
        return f"not in torch {torch.__version__}"
    try:
        output = run()
        if reference is not None and "cross" not in name and "GRPO" not in name:  # another loss has another gradient
            row |= reference.errors(row["task"], output)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "out of memory"
    except Exception as error:  # other people's code, at another version, may fail in any way; ours may not
        if name not in OTHERS:
            raise
        return f"{type(error).__name__}: {error}"[:160]
    return None


def rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else value


def line(row: dict[str, Any]) -> str:
    """One row for the terminal."""
    start = f"N={row['N']:<6d}V={row['V']:<7d}H={row['H']:<5d}K={row['K']:<4d}{row['policy']:7s}{row['dtype']:9s}"
    if "ms" not in row:
        return f"{start}{row['task']:13s}{row['name']:32s}{row.get('status', 'ran')}"
    error = next((f"{key} {row[key]:.1e}" for key in ("logp_error", "gradient_error") if key in row), "")
    hot = f"{row['ms_sustained']:9.2f}" if "ms_sustained" in row else ""
    return f"{start}{row['task']:13s}{row['name']:32s}{row['ms']:9.2f} ms{hot}  {row['mib']:9.1f} MiB  {error}"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of a CPU")
    parser.add_argument("--quick", action="store_true", help="a few shapes")
    parser.add_argument("--others", action="store_true", help="a GPU's other shapes, briefly")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each contender; the median counts")
    parser.add_argument("--only", default="", metavar="PATTERN", help="contenders whose names match")
    parser.add_argument("--once", action="store_true", help="run everybody once: compiles, checks, and times nothing")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N parts of the shapes")
    parser.add_argument("--save", action="store_true", help="keep the rows")
    parser.add_argument("--resume", action="store_true", help="measure the shapes that the file does not hold yet")
    parser.add_argument("--file", type=Path, default=HEAD, help="where to; benchmarks/results/head.json")
    return parser


def main() -> None:
    parser = arguments()
    args = parser.parse_args()
    if args.save and (args.only or args.once):
        parser.error("--save keeps the times of all contenders: not with --only, which leaves some out, nor with --once.")
    torch.set_num_threads(args.threads)
    listed = [case for case in cases(args.device, args.quick) if case.brief == args.others]
    if not listed:
        parser.error("the other shapes are a GPU's, and not among the few of --quick.")
    part, parts = (int(number) for number in args.part.split("/"))
    length = -(-len(listed) // parts)
    name = title(args.device, args.threads, args.others)
    rows = saved_rows(name, args.file) if args.resume else []
    there = {shape_of(row) for row in rows}
    for case in listed[(part - 1) * length : part * length]:
        if case.key in there:
            continue
        rows += measure(case, args.device, args.rounds, args.only, args.once)
        if args.save:  # after every shape: a long run that is cut short keeps what it has
            save_results(name, rows, args.file)


def title(device: str, threads: int, others: bool) -> str:
    """Under which name the rows are kept: what was measured with more threads stands beside what was with fewer."""
    where = device if device != "cpu" else f"cpu, {threads} thread{'s' if threads > 1 else ''}"
    return f"head on {where}{', other shapes' if others else ''}"


if __name__ == "__main__":
    main()
