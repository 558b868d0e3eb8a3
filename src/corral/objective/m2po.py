"""M2PO: mask the tokens with the largest squared log-ratios until the batch's mean is within a bound."""

import torch

from corral.objective.config import M2POConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import capped_ratio, credit, log_ratio
from corral.tensors import ObjectiveOutput, TokenBatch


def m2po(batch: TokenBatch, config: M2POConfig) -> ObjectiveOutput:
    """Importance-weighted policy gradient without the outliers among the tokens that have moved along their advantage.

        L_t = − m_t ρ_t Â_t          ρ_t = π(a_t) / π_old(a_t)
        O = {t : (ρ_t − 1) Â_t > 0};   m_t = 0 on the largest (log ρ_t)² of O, the fewest whose removal leaves a mean ≤ τ

    Selects among the tokens it is given, which in training are those of a micro-batch: their number matters. Of tokens with
    equal ratios all are masked or none. The mask is a constant for autograd.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the bound τ on the second moment.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Zheng et al. 2025, arXiv:2510.01161, algorithm 1. Invariant: M2PO = REINFORCE as τ → ∞.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    with torch.no_grad():
        outward = log_rho * advantages > 0
        moment = torch.where(outward, log_rho**2, torch.inf)
        ascending = moment.flatten().sort().values
        mean = ascending.cumsum(0) / torch.arange(1, ascending.numel() + 1, device=ascending.device)
        blocked = outward & (moment >= torch.where(mean > config.bound, ascending, torch.inf).amin())
    loss = torch.where(batch.mask & ~blocked, -capped_ratio(log_rho, None) * advantages, 0.0)
    return ObjectiveOutput(loss, region_metrics(batch, log_rho, blocked), blocked)
