"""Batched root finding for increasing functions, with Newton's method inside a bracket."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Root:
    """Root of one function for each row of a batch, with the number of solver steps and convergence."""

    x: Float[Tensor, "*b"]
    converged: Bool[Tensor, "*b"]
    steps: Int[Tensor, "*b"]
    """Number of function evaluations for each row of the batch."""


def find_root(
    function: Callable[[Tensor], tuple[Tensor, Tensor]],
    start: Float[Tensor, "*b"],
    *,
    scale: Float[Tensor, "*b"],
    max_steps: int = 24,
) -> Root:
    """Find the root of an increasing function on (0, 1], for every row of a batch.

        x ← x − f(x)/f′(x),   or the middle of the bracket where that step would leave it, or would not
                              be half as long as the last but one: a row may otherwise jump to and fro for ever

    Newton's method squares the error, so a row is done, after one last step, once a step is shorter than eps^⅔ x: what is
    left is below the rounding of f. Done rows are frozen, for by then rounding may have put the root outside the bracket.

    Args:
        function: x [*] → f(x), f′(x); negative at 0 and positive at 1 on every row.
        start: first guess [*], inside (0, 1].
        scale: size of f's own terms [*]; a row is also done once |f| is rounding at that scale.
        max_steps: evaluations after which a row counts as not converged.
    Returns:
        Root with the status of each row; nothing is raised.
    Ref:
        Press et al. 2007, Numerical Recipes §9.4 (rtsafe). Invariant: x stays inside the bracket, which only shrinks.
    """
    eps = torch.finfo(start.dtype).eps
    x, low, high = start, torch.zeros_like(start), torch.ones_like(start)
    last = older = torch.ones_like(start)
    done = torch.zeros_like(start, dtype=torch.bool)
    steps = torch.zeros_like(start, dtype=torch.int32)
    for _ in range(max_steps):
        value, slope = function(x)
        steps = steps + ~done
        low = torch.where(value < 0, torch.maximum(low, x), low)
        high = torch.where(value > 0, torch.minimum(high, x), high)
        newton = x - value / slope
        # The kernel in head/triton/loss.py stops by the same two limits, in float32.
        exact = value.abs() <= 4 * eps * scale
        short = (newton - x).abs() <= eps ** (2 / 3) * x
        good = (newton > low) & (newton < high) & ((newton - x).abs() <= 0.5 * older)  # NaN and inf are not
        proposal = torch.where(good, newton, torch.where(short, x, 0.5 * (low + high)))
        last, older = (proposal - x).abs(), last
        x = torch.where(done | exact, x, proposal)
        done = done | exact | short
        # A traced graph cannot branch on data: it takes every step, on frozen rows.
        if not torch.compiler.is_compiling() and bool(done.all()):
            break
    return Root(x, done, steps)
