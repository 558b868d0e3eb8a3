"""Policy-improvement bound from the DPPO paper: a guaranteed gain in expected reward, for a finite horizon."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from corral.divergence import binary_tv, categorical_tv
from corral.numerics import at_least_float32
from corral.objective.check import check_batch
from corral.objective.config import NEEDS_SUPPORT
from corral.objective.ratio import clamp_log_ratio, log_ratio, zero_padding
from corral.tensors import TokenBatch
from corral.validate import number_in


@dataclass(frozen=True, eq=False)
class ImprovementBound:
    """Terms of the policy-improvement bound J(π) − J(π_old) ≥ surrogate − min(penalty_max, penalty_mean)."""

    surrogate: Float[Tensor, ""]
    """First-order gain in expected reward, L′ = E[R Σ_t (ρ_t − 1)]."""
    penalty_max: Float[Tensor, ""]
    """Penalty from the largest total variation, 2 ξ T (T − 1) max_s TV(s)². It grows with the squares of TV and horizon T."""
    penalty_mean: Float[Tensor, ""]
    """Penalty from the expected sum of total variations, 4 ξ E[Σ_t TV_t]. It grows linearly with the total variation."""

    @property
    def bound(self) -> Float[Tensor, ""]:
        """Lower bound on J(π) − J(π_old), the gain in expected reward: the larger of two lower bounds."""
        return self.surrogate - torch.minimum(self.penalty_max, self.penalty_mean)


def improvement_bound(
    batch: TokenBatch,
    *,
    reward_max: float | None = None,
    horizon: int | None = None,
    weights: Float[Tensor, " B"] | None = None,
    check: bool = True,
) -> ImprovementBound:
    """Lower bound on the improvement of the expected terminal reward R(y), for γ = 1 and horizon T.

        J(π) − J(π_old) ≥ L′ − min(2 ξ T (T−1) max_s TV(s)², 4 ξ E[Σ_t TV_t])          ξ = max_y |R(y)|

    A theorem when the expectation is exact, every state is in the batch and TV is the full one. From a sample, from a
    support (whose TV is a lower bound) or from sampled tokens alone (a lower one still) it is an estimate. At T ~ 10⁴ and
    TV ~ 0.1 the penalties exceed 2ξ, the most that J can change, and the bound says nothing.

    Args:
        batch: rewards R(y) as `advantages` [B]; TV from `dist_*` where the batch has them, else |Δp| of the sampled token.
        reward_max: ξ, at least the largest |R| in the batch, which None takes.
        horizon: T, at least the longest sequence's number of unmasked tokens, which None takes.
        weights: probability of each sequence under the old policy [B], summing to 1; None weighs equally those that have an
            unmasked token.
        check: refuse numbers that are no log-probabilities, as objectives do.
    Returns:
        ImprovementBound with the surrogate and both penalties.
    Ref:
        Qi et al. 2026, arXiv:2602.04879, theorems 3.1 and 3.2. Invariant: all three are 0 at π = π_old.
    """
    has_support = batch.dist_new is not None or batch.dist_old is not None
    check_batch("improvement_bound", batch, NEEDS_SUPPORT if has_support else frozenset(), check=check)
    if batch.advantages.ndim != 1:
        raise ValueError(
            f"improvement_bound: R(y) is one reward per sequence, so `advantages` must be [B]; got "
            f"{list(batch.advantages.shape)}."
        )
    mask = batch.mask
    alive = mask.any(-1)
    rewards = torch.where(alive, at_least_float32(batch.advantages), 0.0)
    largest = _at_least("reward_max", reward_max, rewards.abs().max(), torch.finfo(batch.advantages.dtype).eps)
    steps = _at_least("horizon", horizon, mask.sum(-1).max())
    if weights is None:
        weights = alive.to(rewards.dtype) / alive.sum()
    elif weights.shape != rewards.shape:
        raise ValueError(
            f"improvement_bound: `weights` has one probability per sequence, [{len(rewards)}]; got {list(weights.shape)}."
        )
    elif not (weights.is_floating_point() and bool((weights >= 0).all()) and abs(weights.sum().item() - 1) < 1e-3):
        raise ValueError(f"improvement_bound: `weights` are probabilities of the sequences and sum to 1; got {weights}.")
    if batch.dist_new is not None and batch.dist_old is not None:
        moved = categorical_tv(zero_padding(batch.dist_new.with_rest(), mask), zero_padding(batch.dist_old.with_rest(), mask))
    else:
        moved = binary_tv(zero_padding(batch.logp_new, mask), zero_padding(batch.logp_old, mask))
    moved = torch.where(mask, moved, 0.0)
    gain = torch.expm1(clamp_log_ratio(log_ratio(batch))).sum(-1)
    return ImprovementBound(
        surrogate=(weights * rewards * gain).sum(),
        penalty_max=2 * largest * steps * (steps - 1) * moved.max() ** 2,
        penalty_mean=4 * largest * (weights * moved.sum(-1)).sum(),
    )


def _at_least(name: str, value: float | None, own: Tensor, rounding: float = 0.0) -> Tensor | float:
    """Validate that `value` is at least the batch's own value, or the bound would not hold. None takes the batch's value."""
    if value is None:
        return own
    if not (number_in(value, own.item() * (1 - rounding)) and value < torch.inf):
        raise ValueError(
            f"improvement_bound: `{name}` must be at least the batch's own, {own:.6g}, and finite, or None for that; got "
            f"{value!r}."
        )
    return value
