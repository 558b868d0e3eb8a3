"""BAPO: widen PPO's clip range until positive advantages have a set share of the batch's surrogate."""

import math

import torch
from torch import Tensor

from corral.objective.config import BAPOConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import clamp_log_ratio, clip_surrogate, credit, log_ratio
from corral.tensors import ObjectiveOutput, TokenBatch

_STEP = 0.05
"""Step by which the upper bound is raised, as in the authors' code."""


def bapo(batch: TokenBatch, config: BAPOConfig) -> ObjectiveOutput:
    """Clipped surrogate whose clip range is computed anew for every call.

        L_t = − min(ρ_t Â_t, clip(ρ_t, l, h) Â_t), and where Â_t < 0 at most c |Â_t|          ρ_t = π(a_t) / π_old(a_t)
        P(h) = Σ_{Â > 0} min(ρ_t, h) Â_t,   N(l) = Σ_{Â < 0} max(ρ_t, l) |Â_t|,   balanced:  (1 − ρ₀) P ≥ ρ₀ N

    l and h start at `low` and `high`. Unless that is balanced l is `low_end`, and h rises by 0.05 until it is, or to
    `high_end`. The bounds are constants for autograd, and those of the tokens that are given: in training, of a micro-batch.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the share, and where the bounds may lie.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Xi et al. 2025, arXiv:2510.18927, and the authors' code. Invariant: ppo_clip where the batch is balanced.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    ratio = clamp_log_ratio(log_rho).exp()
    low, high = _find_bounds(ratio.detach(), advantages, config)
    surrogate, acted = clip_surrogate(ratio, advantages, low, high, config.dual_clip)
    return ObjectiveOutput(torch.where(batch.mask, -surrogate, 0.0), region_metrics(batch, log_rho, acted), acted)


def _find_bounds(ratio: Tensor, advantages: Tensor, config: BAPOConfig) -> tuple[Tensor, Tensor]:
    """Find the bounds l and h. Raising l only raises N and never balances a batch, so that l is one of its two ends."""
    steps = math.ceil((config.high_end - config.high) / _STEP - 1e-9)  # the last one may be short
    highs = ratio.new_tensor([min(config.high + _STEP * i, config.high_end) for i in range(steps + 1)])
    positive = (torch.minimum(ratio.flatten(), highs[:, None]) * advantages.clamp(min=0).flatten()).sum(-1)

    def balanced(low: float) -> Tensor:
        return (1 - config.share) * positive >= config.share * (ratio.clamp(min=low) * -advantages.clamp(max=0)).sum()

    start, end = balanced(config.low)[0], balanced(config.low_end)
    found = torch.where(start, 0, torch.where(end.any(), end.int().argmax(), steps))
    lows = ratio.new_tensor([config.low, config.low_end])
    return torch.where(start, lows[0], lows[1]), torch.take(highs, found)
