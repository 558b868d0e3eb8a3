"""How fast is the trainer's update phase, and how long a micro-batch fits, with TROLL on, against stock TRL?

An update is forward, backward and optimizer step of one micro-batch, metrics included; nothing is sampled meanwhile. All
contenders of a model run in one process and in turns; the median counts. The models are described in update_problem.py.

The longest micro-batch is what fits into a given memory beyond the weights and the optimizer's state: gradients, activations
and the head's own. What is known is saved at once, so nothing is lost where time runs out.

    python benchmarks/update_phase.py [--models "8B, 4 of 36 layers" …] [--save] [--resume]
"""

import argparse
import copy
import gc
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from results import UPDATES, Rows, save_results, saved_rows
from torch import Tensor
from transformers import PreTrainedModel
from update_problem import COMPLETION, MODELS, MOVED, PROMPT, Update, draw_rollouts, make_model
from update_tables import CONTENDERS, OWN, ROUNDS, SHAPES, finished, policies_of, section

GIBIBYTES = 8
"""Beyond weights and optimizer, that the longest micro-batch may take."""


def seconds(run: Callable[[], None], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak(update: Update, sequences: int) -> float:
    """MiB that an update takes beyond what is held before it; infinite where they cannot be had."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        update(update.repeated(sequences))
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        update.optimizer.zero_grad(set_to_none=True)
        return math.inf
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def longest(update: Update, known: int) -> tuple[int, int]:
    """Most sequences of a micro-batch that fit, and the fewest that do not, an eighth apart; `known` are known to fit."""
    good, bad = known, 0
    while not bad or bad - good > good // 8:
        tried = (good + bad) // 2 if bad else 2 * good
        if peak(update, tried) < math.inf:
            good = tried
        else:
            bad = tried
    return good, bad


Save = Callable[[], None]


def measure(
    about: dict[str, Any], model: PreTrainedModel, prompts: Tensor, rows: Rows, save: Save, rounds: int
) -> dict[str, Update]:
    """Times and memory of every contender, in turns; a row for each, saved as they come in."""
    device, start = model.device.type, time.perf_counter()
    ids = draw_rollouts(model, about["tokens"], prompts, about["policy"])
    say("rollouts", start)
    mine: dict[str, dict[str, Any]] = {contender: {**about, "contender": contender} for contender in CONTENDERS}
    rows += mine.values()
    updates: dict[str, Update] = {}
    for contender in CONTENDERS:
        start = time.perf_counter()
        updates[contender] = update = Update(
            contender, copy.deepcopy(model), ids, prompts.shape[1], device, MOVED[about["policy"]]
        )
        update()  # compiles, and fills the optimizer's state
        update.log()
        update()  # a policy that is flat compiles more
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            update()
            mine[contender]["mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        say(f"{contender}: first updates", start)
        save()
    taken: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for i in range(rounds):
        for contender, update in updates.items():
            taken[contender].append(seconds(update, device))
            middle = statistics.median(taken[contender])
            mine[contender] |= {"ms": 1e3 * middle, "tokens_per_s": ids.numel() / middle, "rounds": i + 1}
        save()
    for contender, update in updates.items():
        metrics = update.trainer._metrics["train"]
        for metric in ("head/dense_share", "head/dropped_max", "tr/active_frac", "tr/rest_mass", "entropy"):
            if metrics.get(metric):
                mine[contender][metric] = statistics.mean(metrics[metric])
        print(
            {key: round(value, 4) if isinstance(value, float) else value for key, value in mine[contender].items()}, flush=True
        )
    save()
    return updates


def find_longest(updates: dict[str, Update], rows: Rows, save: Save) -> None:
    """One contender at a time: the process may take so much more than what it holds already."""
    total = torch.cuda.get_device_properties(0).total_memory
    for row in rows:
        update, start = updates.pop(row["contender"]), time.perf_counter()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + GIBIBYTES * 2**30) / total)
        row["longest"], row["too_long"] = longest(update, row["sequences"])
        row["within_gib"] = GIBIBYTES
        torch.cuda.set_per_process_memory_fraction(1.0)
        say(f"{row['contender']}: {row['longest']} sequences within {GIBIBYTES} GiB", start)
        save()


def measure_whole(about: dict[str, Any], device: str, rows: Rows, save: Save, rounds: int, *, memory: bool) -> None:
    """One model and policy: times, and on a GPU the longest micro-batch; a peaked policy's is longer than a flat one's."""
    model, prompts = make_model(about["model"], about["policy"], device, about["sequences"], min(PROMPT, about["tokens"]))
    updates = measure(about, model, prompts, rows, save, rounds)
    del model
    if memory and device == "cuda" and about["policy"] != "peaked":
        find_longest(updates, rows[-len(CONTENDERS) :], save)


def say(what: str, start: float) -> None:
    print(f"  {what}, {time.perf_counter() - start:.1f} s", flush=True)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*MODELS, OWN]
    parser.add_argument(
        "--models", nargs="+", choices=names, metavar="MODEL", default=SHAPES, help=f"of {names}; the last needs `make smollm2`"
    )
    parser.add_argument("--policies", nargs="+", choices=["peaked", "flat"], default=["peaked", "flat"])
    parser.add_argument("--sequences", type=int, default=128, help="of a micro-batch")
    parser.add_argument("--tokens", type=int, default=COMPLETION, help="of a completion")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="updates of each contender; the median counts")
    parser.add_argument("--no-memory", action="store_true", help="do not look for the longest micro-batch")
    parser.add_argument("--save", action="store_true", help="keep the rows")
    parser.add_argument("--resume", action="store_true", help="measure what the file does not hold yet")
    parser.add_argument("--file", type=Path, default=UPDATES, help=f"where to; benchmarks/results/{UPDATES.name}")
    return parser


def main() -> None:
    args, begun = arguments().parse_args(), time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in args.models:
        rows = saved_rows(section(name, device), args.file) if args.resume else []
        save: Save = partial(save_results, section(name, device), rows, args.file) if args.save else lambda: None
        for policy in policies_of(name, args.policies):
            if finished(rows, policy):
                continue
            rows[:] = [row for row in rows if row["policy"] != policy]
            print(f"{name}, {policy}, after {time.perf_counter() - begun:.0f} s", flush=True)
            about = {"model": name, "policy": policy, "sequences": args.sequences, "tokens": args.tokens}
            try:
                measure_whole(about, device, rows, save, args.rounds, memory=not args.no_memory)
            except torch.OutOfMemoryError:
                print(f"  out of memory: {name} is too large for this GPU", flush=True)
            gc.collect()


if __name__ == "__main__":
    main()
