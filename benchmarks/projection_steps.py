"""How many evaluations of the distribution does one projection need, and how long does it take?

Against bracketing as the published solver is configured (8 trial points per round on η ∈ [1e-7, 100], at most 20 rounds,
until the bracket is narrower than 1e-5; rebuilt from that, since the solver's source was not at hand), in float32, on four
kinds of disagreement between the policies, and on the usual batch, in which 1 % of the rows lie outside the ball. Error is
|KL(r‖old) − ε| / ε, evaluated in float64, at its worst row.

    python benchmarks/projection_steps.py [--rows 4096] [--categories 65] [--bound 0.05 …] [--save]
"""

import argparse
from typing import Any
from unittest import mock

import torch
from results import save_results
from timing import milliseconds
from torch import Tensor

from corral import categorical_kl, project_categorical_kl
from corral.projection import categorical_kl as solver
from corral.projection.root import Root, find_root

POINTS, ROUNDS, WIDTH, LOWER, UPPER = 8, 20, 1e-5, 1e-7, 1e2


def families(rows: int, categories: int) -> dict[str, tuple[Tensor, Tensor]]:
    """New and old logits [N, K]."""
    torch.manual_seed(0)
    a, b = torch.randn(2, rows, categories)
    first, second = torch.eye(categories)[:2]
    outside = torch.arange(rows)[:, None] % 100 == 0
    return {
        "smooth": (a + 2 * b, a),
        "wild": (5 * b, 5 * a),
        "peaked": (a + 12 * first + 3 * b, a + 12 * first),
        "switch": (b + 15 * second, a + 15 * first),
        "1 % active": (torch.where(outside, a + 2 * b, a + 0.01 * b), a),
    }


def newton(new: Tensor, old: Tensor, bound: float) -> Tensor:
    return project_categorical_kl(new, old, bound).logp


def bracketing(new: Tensor, old: Tensor, bound: float) -> tuple[Tensor, int]:
    """log r, and how many evaluations each projected row took: η is bracketed by linearly spaced trial points."""
    new, old = new.log_softmax(-1), old.log_softmax(-1)
    logp = new.clone()
    active = (new.exp() * (new - old)).sum(-1) > bound
    q, p = new[active][:, None], old[active][:, None]  # [n, 1, K]
    low, high = torch.full((len(q), 1), LOWER), torch.full((len(q), 1), UPPER)
    fractions = torch.arange(POINTS + 2) / (POINTS + 1)

    def tilted(eta: Tensor) -> Tensor:
        return ((q + eta[..., None] * p) / (1 + eta[..., None])).log_softmax(-1)

    taken = 0
    while taken < ROUNDS and (high - low).max() > WIDTH:
        grid = low + (high - low) * fractions  # [n, 10], both ends included
        trial = tilted(grid[:, 1:-1])
        outside = (trial.exp() * (trial - p)).sum(-1) > bound  # KL falls as η rises: true, …, true, false, …
        last_outside = outside.sum(-1, keepdim=True)
        low, high = grid.gather(-1, last_outside), grid.gather(-1, last_outside + 1)
        taken += 1
    logp[active] = tilted((low + high) / 2).squeeze(1)
    return logp, POINTS * taken + 1


def newton_evaluations(new: Tensor, old: Tensor, bound: float) -> Tensor:
    """Evaluations of each projected row: those of the search, one before it and one after."""
    roots: list[Root] = []
    with mock.patch.object(solver, "find_root", lambda *a, **k: roots.append(find_root(*a, **k)) or roots[-1]):
        newton(new, old, bound)
    return roots[0].steps + 2


def error(logp: Tensor, new: Tensor, old: Tensor, bound: float) -> float:
    old = old.double().log_softmax(-1)
    active = categorical_kl(new.double().log_softmax(-1), old) > bound
    kl = categorical_kl(logp.double().log_softmax(-1), old)[active]
    return ((kl - bound).abs() / bound).max().item()


def measure(name: str, new: Tensor, old: Tensor, bound: float) -> dict[str, Any]:
    ours = newton_evaluations(new, old, bound)
    logp_bracketing, theirs = bracketing(new, old, bound)
    ms, ms_bracketing = milliseconds(lambda: newton(new, old, bound), lambda: bracketing(new, old, bound), repeats=7)
    return {
        "family": name,
        "bound": bound,
        "projected": len(ours),
        "evaluations_mean": round(ours.double().mean().item(), 2),
        "evaluations_max": int(ours.max()),
        "evaluations_bracketing": theirs,
        "error": float(f"{error(newton(new, old, bound), new, old, bound):.2g}"),
        "error_bracketing": float(f"{error(logp_bracketing, new, old, bound):.2g}"),
        "ms": round(ms, 2),
        "ms_bracketing": round(ms_bracketing, 2),
        "speedup": round(ms_bracketing / ms, 2),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--categories", type=int, default=65)
    parser.add_argument("--bound", type=float, nargs="+", default=[0.05])
    parser.add_argument("--save", action="store_true", help="write the rows to benchmarks/results.json")
    args = parser.parse_args()

    print(f"{args.rows} rows of {args.categories} categories, {torch.get_num_threads()} threads; bracketing in brackets")
    print("family      bound  projected  evaluations (mean, max)  worst |KL − ε|/ε      ms                times faster")
    rows = []
    for bound in args.bound:
        for name, (new, old) in families(args.rows, args.categories).items():
            if not (categorical_kl(new.log_softmax(-1), old.log_softmax(-1)) > bound).any():
                continue  # nothing to project
            r = measure(name, new, old, bound)
            print(
                f"{name:10s}  {bound:5g}  {r['projected']:9d}  {r['evaluations_mean']:5.2f}, {r['evaluations_max']:2d}"
                f" [{r['evaluations_bracketing']:3d}]          {r['error']:7.1e} [{r['error_bracketing']:7.1e}]"
                f"  {r['ms']:7.1f} [{r['ms_bracketing']:7.1f}]  {r['speedup']:7.1f}"
            )
            rows.append(r)
    if args.save:
        save_results("projection_steps", rows)


if __name__ == "__main__":
    main()
