"""Benchmark of the categorical projection: evaluations of the distribution, time and error.

Against bracketing as the published solver is configured (8 trial points per round on η ∈ [1e-7, 100], at most 20 rounds,
until the bracket is narrower than 1e-5; rebuilt from that, since the solver's source was not at hand), in float32, on four
kinds of disagreement between the policies, and on the usual batch, in which 1 % of the rows lie outside the ball. Error is
|KL(r‖old) − ε| / ε, evaluated in float64, at its worst row.

    python benchmarks/projection_steps.py [--rows 4096] [--categories 65] [--bound 0.05 …] [--save]
"""

from typing import Any
from unittest import mock

import torch
from rows import arguments, finish
from timing import in_turns
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
    ways = {"newton": lambda: newton(new, old, bound), "bracketing": lambda: bracketing(new, old, bound)}
    ms, ms_bracketing = in_turns(ways, rounds=7).values()
    return {
        "family": name, "bound": bound, "projected": len(ours), "evaluations_mean": ours.double().mean().item(),
        "evaluations_max": int(ours.max()), "evaluations_bracketing": theirs,
        "error": error(newton(new, old, bound), new, old, bound), "error_bracketing": error(logp_bracketing, new, old, bound),
        "ms": ms, "ms_bracketing": ms_bracketing, "speedup": ms_bracketing / ms,
    }  # fmt: skip


@torch.no_grad()
def main() -> None:
    args = arguments(__doc__, rows=4096, categories=65, bound=[0.05]).parse_args()
    print(f"{args.rows} rows of {args.categories} categories, {torch.get_num_threads()} threads")
    problems = [(bound, *family) for bound in args.bound for family in families(args.rows, args.categories).items()]
    rows = [
        measure(name, new, old, bound)
        for bound, name, (new, old) in problems
        if (categorical_kl(new.log_softmax(-1), old.log_softmax(-1)) > bound).any()  # else there is nothing to project
    ]
    finish("projection_steps", rows, args.save)


if __name__ == "__main__":
    main()
