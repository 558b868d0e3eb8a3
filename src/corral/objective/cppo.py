"""CPPO: DPPO's mask with a bound that is tighter for early tokens, and for tokens after a prefix that has drifted."""

import torch
from torch import Tensor

from corral.objective.config import CPPOConfig, DPPOConfig
from corral.objective.dppo import divergence
from corral.objective.metrics import region_metrics
from corral.objective.ratio import capped_ratio, credit, log_ratio
from corral.tensors import ObjectiveOutput, TokenBatch


def cppo(batch: TokenBatch, config: CPPOConfig) -> ObjectiveOutput:
    """Importance-weighted policy gradient inside a trust region that remembers the prefix.

        L_t = − m_t ρ_t Â_t          ρ_t = π(a_t) / π_old(a_t)
        m_t = 0  iff  w_t D_t > min(δ, δ + b Σ_{s<t} w_s − Σ_{s<t} w_s D_s)  and  (ρ_t − 1) Â_t > 0

    D is the total variation, of the sampled token against all others or of a support and its tail; w falls linearly from 1 at a
    sequence's first unmasked token to `weight_last` at its last; b is the 90th percentile of the sequence's D, between δ_b and
    2 δ_b. The mask is a constant for autograd.

    Args:
        batch: log-probs, advantages and mask, all [B T], tokens in the order in which they were sampled; for "topk" both
            policies on one support.
        config: bound, weights and budget.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Mao et al. 2026, arXiv:2606.10968, eqs. 8–11 and 22. Invariant: dppo with equal weights, no budget.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    with torch.no_grad():
        excess = _excess(divergence(batch, log_rho, DPPOConfig(estimator=config.estimator)), batch.mask, config)
        blocked = (excess > 0) & (log_rho * advantages > 0)
    loss = torch.where(batch.mask & ~blocked, -capped_ratio(log_rho, None) * advantages, 0.0)
    return ObjectiveOutput(loss, region_metrics(batch, log_rho, blocked), blocked)


def _excess(moved: Tensor, mask: Tensor, config: CPPOConfig) -> Tensor:
    """Excess of w_t D_t over its bound [B T], from D [B T]; meaningless at padding."""
    place, last = mask.cumsum(-1) - 1, (mask.sum(-1, keepdim=True) - 1).clamp(min=1)
    weight = torch.where(mask, 1 - (1 - config.weight_last) * place / last, 0.0)
    spent, earned = (x.cumsum(-1) - x for x in (weight * moved, weight))  # of the tokens before
    percentile = torch.nanquantile(torch.where(mask, moved, torch.nan), 0.9, dim=-1, keepdim=True)
    budget = percentile.clamp(config.budget, 2 * config.budget)
    left = torch.where(earned > 0, budget * earned - spent, 0.0)  # inf · 0 at the first token
    return weight * moved - config.bound - left.clamp(max=0)
