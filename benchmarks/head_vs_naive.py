"""How fast, how small and how exact is the language-model head, against full logits and against the heads that others ship?

All contenders of a shape run in one process and in turns, so that whatever else the machine does, and its temperature, fall on
all alike. "cool" pauses before each run; "sustained" runs back to back. On a GPU the host starts some milliseconds ahead of the
device, as it is in training, where the rest of the model lies before the head: launches count only where they hold the device
up. Memory is what is held at the worst moment beyond the
inputs, gradients included. Errors are against float64, on some of the rows: of log-probs, and of dH relative to its norm.

    python benchmarks/head_vs_naive.py [--device cuda] [--quick] [--save]          corral bench head […]
"""

import argparse
import gc
import importlib.util
import itertools
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from head_contenders import BRIEF, CLIP, OLD, OTHERS, PRODUCTS, Contender, contenders, objective_loss
from head_problem import Problem, make_problem
from results import save_results
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import corral

FILE = Path(__file__).with_name("results") / "head.json"
AHEAD = 6_000_000
"""Cycles of the device, about 3 ms, by which the host is ahead."""
CHECKED = 64
"""Rows whose results are compared with float64."""
CPU_SHAPES = [(512, 49152, 576), (2048, 49152, 576), (512, 151936, 896)]
GPU_SHAPES = [(n, v, h) for h in (896, 4096) for n in (2048, 8192, 16384) for v in (32000, 151936, 262144)]
Case = tuple[tuple[int, int, int], int, str, torch.dtype, bool]


def cases(device: str, quick: bool) -> list[Case]:
    """Shape, K, policy and dtype of each comparison, and whether it is a brief one.

    The other policies and K appear at one shape per width. Everybody takes part at the usual shapes; brief comparisons have
    few contenders and few runs.
    """
    if device == "cpu":
        shapes = CPU_SHAPES[:1] if quick else CPU_SHAPES
        return [(shape, 64, "medium", dtype, False) for shape in shapes for dtype in (torch.float32, torch.bfloat16)]
    usual = [(8192, 151936, h) for h in (4096, 896)]
    full = [(shape, 64, policy, torch.bfloat16, False) for policy in ("peaked", "flat") for shape in usual]
    listed = [(shape, 64, policy) for policy in ("peaked", "flat", "medium") for shape in usual]
    listed += [(shape, k, "peaked") for k, shape in itertools.product((16, 256), usual)]
    listed += [(shape, 64, "peaked") for shape in GPU_SHAPES if shape not in usual]
    return full if quick else full + [(*each, torch.bfloat16, True) for each in listed]


def milliseconds(run: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        # One thread's own time is not disturbed by other processes; several threads wait for one another.
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        run()
        return 1e3 * (clock() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def interleaved(runs: dict[Any, Callable[[], Any]], device: str, rounds: int, pause: float) -> dict[Any, float]:
    """Median time of each, one after the other, round by round."""
    taken: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(pause)
            taken[name].append(milliseconds(run, device))
    return {name: statistics.median(times) for name, times in taken.items()}


def sustained(run: Callable[[], Any], device: str, seconds: float = 0.3) -> float:
    """Median of the second half of a long row of runs: by then the clock has settled."""
    taken, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until or len(taken) < 4:
        taken.append(milliseconds(run, device))
    return statistics.median(taken[len(taken) // 2 :])


def peak_mebibytes(run: Callable[[], Any], device: str) -> float:
    """Most memory held during a run, beyond what was held before."""
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    changes = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = itertools.accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns()))
    return max(held, default=0) / 2**20


def errors(task: str, contender: Contender, p: Problem) -> dict[str, float]:
    """Against float64: the largest error of a log-prob, or the error of dH relative to its norm."""
    if task == PRODUCTS:
        return {}
    p = p.first(CHECKED)
    hidden = (p.hidden_old if task == OLD else p.hidden_new).double()
    logp = (hidden @ p.weight.double().T).log_softmax(-1)
    if task == OLD:
        got, dist = contender(p)
        exact = logp.gather(-1, p.tokens[:, None]).squeeze(-1)
        largest = {"logp_error": (got - exact).abs().max().item()}
        if dist is not None:
            kept = torch.where(dist.ids < 0, 0.0, dist.logp - logp.gather(-1, dist.ids.clamp(min=0)))
            largest["support_error"] = kept.abs().max().item()
            left_out = logp.scatter(-1, dist.ids.clamp(min=0), -torch.inf).amax(-1)
            least = torch.where(dist.ids[:, 1:] < 0, torch.inf, dist.logp[:, 1:]).amin(-1)
            largest["missed_by"] = (left_out - least).clamp(min=0).max().item()
        return largest
    dh, _ = contender(p)
    wanted = reference_gradient(task, p)
    if wanted is None:
        return {}
    return {"gradient_error": ((dh - wanted).norm() / wanted.norm()).item()}


def reference_gradient(task: str, p: Problem) -> Tensor:
    """dH in float64, from full logits; rows within 1e-3 of a threshold are equal in all but rounding and stay in."""
    weight = p.weight.double()

    def loss(hidden: Tensor, _: Tensor) -> Tensor:
        logp = (hidden.double() @ weight.T).log_softmax(-1)
        sampled = logp.gather(-1, p.tokens[:, None]).squeeze(-1)
        if task == CLIP:
            return objective_loss(p, "ppo_clip", sampled)
        assert p.old is not None
        dist = corral.gather_support(logp, p.old.ids)
        return objective_loss(p, "troll", sampled, dist.logp, dist.rest)

    hidden = p.hidden_new.double().requires_grad_()
    return torch.autograd.grad(loss(hidden, weight), hidden)[0]


def measure(case: Case, device: str, rounds: int) -> list[dict[str, Any]]:
    """One row per contender; those that cannot run say why."""
    (tokens, vocabulary, width), k, policy, dtype, brief = case
    p = make_problem(tokens, vocabulary, width, k, policy, device, dtype).with_support()
    about = {"N": tokens, "V": vocabulary, "H": width, "K": k, "policy": policy, "dtype": str(dtype).removeprefix("torch.")}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    runs: dict[tuple[str, str], Callable[[], Any]] = {}
    for (task, name), contender in contenders(device, dtype).items():
        if brief and name not in BRIEF:
            continue
        rows[task, name] = row = {**about, "task": task, "name": name}
        package = OTHERS.get(name, ("torch", None))[0]
        if importlib.util.find_spec(package) is None:
            row["status"] = "not installed"
            continue
        try:
            row["mib"] = peak_mebibytes(lambda contender=contender: contender(p), device)
            if "cross" not in name and "GRPO" not in name:  # another loss: its gradient cannot be compared
                row |= errors(task, contender, p)
        except torch.OutOfMemoryError:
            row["status"] = "out of memory"
            torch.cuda.empty_cache()
            continue
        except Exception as error:  # other people's code, at another version, may fail in any way; ours may not
            if name not in OTHERS:
                raise
            row["status"] = f"{type(error).__name__}: {error}"[:160]
            continue
        runs[task, name] = lambda contender=contender: contender(p)
    pause = 0.0 if device == "cpu" else 0.03 if brief else 0.1
    for key, value in interleaved(runs, device, min(rounds, 3) if brief else rounds, pause).items():
        rows[key]["ms"] = value
    if device != "cpu" and not brief:
        for key, run in runs.items():
            rows[key]["ms_sustained"] = sustained(run, device)
    for row in rows.values():
        print(line(row), flush=True)
    return [{key: rounded(value) for key, value in row.items()} for row in rows.values()]


def rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else value


def line(row: dict[str, Any]) -> str:
    """One row for the terminal."""
    start = f"N={row['N']:<6d}V={row['V']:<7d}H={row['H']:<5d}K={row['K']:<4d}{row['policy']:7s}{row['dtype']:9s}"
    if "status" in row:
        return f"{start}{row['task']:13s}{row['name']:32s}{row['status']}"
    error = next((f"{key} {row[key]:.1e}" for key in ("logp_error", "gradient_error") if key in row), "")
    hot = f"{row['ms_sustained']:9.2f}" if "ms_sustained" in row else ""
    return f"{start}{row['task']:13s}{row['name']:32s}{row['ms']:9.2f} ms{hot}  {row['mib']:9.1f} MiB  {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a few shapes")
    parser.add_argument("--others", action="store_true", help="a GPU's other shapes, briefly")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each contender; the median counts")
    parser.add_argument("--save", action="store_true", help="keep the rows in benchmarks/results/head.json")
    args = parser.parse_args()
    rows, name = [], f"head on {args.device}{', other shapes' if args.others else ''}"
    for case in cases(args.device, args.quick):
        if args.others != case[-1]:
            continue
        rows += measure(case, args.device, args.rounds)
        if args.save:  # after every shape: a long run that is cut short keeps what it has
            FILE.parent.mkdir(exist_ok=True)
            save_results(name, rows, FILE)


if __name__ == "__main__":
    main()
