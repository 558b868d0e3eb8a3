"""What do real rollouts ask of the head: how many tokens hold the mass, how often may a backward be sparse, how fast is it?

In two halves, which may run on two machines. `collect` samples from SmolLM2 (`make smollm2`) before and after reinforcement
learning, see head_sampling.py, and writes hidden states and the head's weight into a file of some 40 MB; it needs no GPU.
`measure` reads it and keeps its rows after every set. Timed runs repeat a set's rows; errors are against float64, from the same
weight.

    python benchmarks/head_rollouts.py collect [runs/rollouts.pt]
    python benchmarks/head_rollouts.py measure [runs/rollouts.pt] [--save] [--resume]
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from head_contenders import CLIP, OLD, PRODUCTS, TROLL, contenders
from head_errors import Reference
from head_problem import Problem
from head_sampling import CONTEXTS, MASS, K, collect, weight_of
from head_timing import interleaved, peak_mebibytes, sustained
from head_vs_naive import rounded
from results import ROLLOUTS, save_results, saved_rows
from torch import Tensor

import corral
from corral.kernels.policy_loss import TOLERANCE

ROOT = Path(__file__).parents[1]
DRAWN, QUESTIONS = ROOT / "runs/rollouts.pt", ROOT / "tests/task/gsm8k/test.jsonl"
STEPS = 80
CHECKED = 256
"""Rows whose results are compared with float64."""
WANTED = {
    (PRODUCTS, "one product"), (PRODUCTS, "three products"), (OLD, "full logits"), (OLD, "corral, triton"),
    (TROLL, "full logits"), (TROLL, "corral, triton"), (TROLL, "corral, triton, exact"),
    (CLIP, "full logits"), (CLIP, "corral, triton"), (CLIP, "corral, triton, exact"),
}  # fmt: skip


def statistics_of(p: Problem) -> dict[str, float]:
    """How flat the policy that drew the rows is."""
    logp = (p.hidden_old.double() @ p.weight.double().T).log_softmax(-1)
    mass = logp.exp().sort(-1, descending=True).values.cumsum(-1)
    needed = (mass < MASS).sum(-1) + 1
    outside = 1 - mass[:, K - 1]
    return {
        "entropy": -(logp.exp() * logp).sum(-1).mean().item(), "support_median": needed.double().median().item(),
        "support_fits": (needed <= K).double().mean().item(), "outside_mean": outside.mean().item(),
        "outside_median": outside.median().item(), "outside_90": outside.quantile(0.9).item(),
    }  # fmt: skip


def routing_of(p: Problem) -> dict[str, float]:
    """How many rows a TROLL update cannot have sparse, by the bound on what is left out, and how far the policy has moved."""
    assert p.old is not None
    head = corral.lm_head(p.hidden_new.float(), p.weight.float(), p.tokens, ids=p.old.ids, impl="torch")
    assert head.dist is not None
    kept, rest = (x.detach().requires_grad_() for x in (head.dist.logp, head.dist.rest))
    out = corral.make_objective("troll")(
        p.batch_with(corral.HeadOutput(kept[:, 0], None, corral.SparseDist(p.old.ids, kept, rest)))
    )
    g_kept, g_rest = torch.autograd.grad(out.loss.sum(), (kept, rest))
    total = g_kept.sum(-1) + g_rest
    off = (g_rest - rest.exp() * total).abs()
    size = (g_kept - kept.exp() * total[:, None]).abs().sum(-1) + off
    live = size > 0
    dense = off > TOLERANCE * torch.maximum(size, size[live].mean())
    return {
        "dense_share": dense[live].double().mean().item(), "active": out.metrics["tr/active_frac"].item(),
        "kl": out.metrics["tr/kl_before"].item(),
    }  # fmt: skip


def routed(p: Problem) -> dict[str, float]:
    """What the fused update says of its own routing: the share of rows made dense, and the most that a sparse one left out."""
    objective, hidden = corral.make_objective("troll"), p.hidden_new.detach().requires_grad_()
    out = corral.policy_loss_from_hidden(hidden[None], p.weight, p.tokens[None], p.batch, objective, weights=p.weights)
    out.loss.sum().backward()
    return {"made_dense": out.metrics["head/dense_share"].item(), "dropped": out.metrics["head/dropped"].item()}


def problem_of(given: dict[str, Tensor], weight: Tensor, tokens: int | None = None) -> Problem:
    """A set as the head's benchmark has its problems; `tokens` repeats its rows to so many."""
    device, rows = weight.device, len(given["tokens"])
    times = 1 if tokens is None else -(-tokens // rows)
    old, new, sampled = (
        given[key].to(device).repeat(times, *[1] * (given[key].ndim - 1))[:tokens] for key in ("old", "new", "tokens")
    )
    # The same advantages for a row's copies, so that a set is the same however often it is repeated.
    advantages = torch.randn(rows, generator=torch.Generator().manual_seed(0)).to(device).repeat(times)[:tokens]
    return Problem(
        hidden_old=old, hidden_new=new, weight=weight, tokens=sampled.long(), advantages=advantages, k=K
    ).with_support()


def measure(name: str, p: Problem, wide: Problem, device: str, rounds: int) -> list[dict[str, Any]]:
    """A row of statistics, and one per contender: errors, and on a GPU times."""
    rows: dict[Any, dict[str, Any]] = {"about": {"set": name, "rows": len(p.tokens), **statistics_of(p), **routing_of(p)}}
    reference, runs = Reference(p.first(CHECKED)), {}
    for key, contender in contenders(device, torch.bfloat16).items():
        if device == "cuda" and key not in WANTED:
            continue
        runs[key] = partial(contender, wide)
        rows[key] = {"set": name, "task": key[0], "name": key[1], "N": len(wide.tokens)}
        output = runs[key]()
        if key[0] != PRODUCTS:
            rows[key] |= reference.errors(key[0], output)
        del output
    if device == "cuda":
        rows["about"] |= routed(wide)
        for key, value in interleaved(runs, device, rounds, 0.05).items():
            rows[key] |= {"ms": value, "ms_sustained": sustained(runs[key], 0.1), "mib": peak_mebibytes(runs[key], device)}
    for row in rows.values():
        print({key: rounded(value) for key, value in row.items()}, flush=True)
    return [{key: rounded(value) for key, value in row.items()} for row in rows.values()]


def measure_all(args: argparse.Namespace) -> None:
    """Every set of a file, or the first few; rows are kept after each, if they are to be."""
    stored, kept_as = torch.load(args.rollouts), f"rollouts on {args.device}"
    rows = [row for row in saved_rows(kept_as, args.file) if "set" in row] if args.resume else []
    there = {row["set"] for row in rows}
    weight = weight_of(stored).bfloat16().to(args.device)
    about = {"rewards": [round(reward, 3) for reward in stored["rewards"]]}
    for name, given in list(stored["sets"].items())[: args.sets]:
        if name in there:
            continue
        wide = problem_of(given, weight, args.tokens if args.device == "cuda" else CHECKED)
        rows += measure(name, problem_of(given, weight), wide, args.device, args.rounds)
        if args.save:
            save_results(kept_as, [about, *rows], args.file)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["collect", "measure"])
    parser.add_argument("rollouts", nargs="?", type=Path, default=DRAWN, help="what `collect` writes and `measure` reads")
    parser.add_argument("--questions", type=Path, default=QUESTIONS, help="GSM8K, one question per line of JSON")
    parser.add_argument("--steps", type=int, default=STEPS, help="of learning")
    parser.add_argument(
        "--every", type=int, default=20, help="steps after which sets are drawn; the first and the last are kept"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--rows", type=int, default=320, help="tokens of each set")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=8192, help="rows of a timed run: those of the set, repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sets", type=int, help="measure so many; all")
    parser.add_argument("--save", action="store_true", help="keep the rows")
    parser.add_argument("--resume", action="store_true", help="measure the sets that the file does not hold yet")
    parser.add_argument("--file", type=Path, default=ROLLOUTS, help=f"where to; benchmarks/results/{ROLLOUTS.name}")
    return parser


def main() -> None:
    parser = arguments()
    args = parser.parse_args()
    if args.command == "collect":
        asked = [json.loads(line)["question"] for line in args.questions.read_text().splitlines()[:CONTEXTS]]
        collect(args.rollouts, asked, args.steps, args.every, args.rows, args.learning_rate)
    elif args.rollouts.exists():
        measure_all(args)
    else:
        parser.error(f"there is no {args.rollouts}. `collect` makes it, here or on another machine.")


if __name__ == "__main__":
    main()
