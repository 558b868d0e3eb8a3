"""CISPO: clip the importance weight and keep every token's gradient."""

import torch

from corral.objective.config import CISPOConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import clamp_log_ratio, credit, log_ratio, zero_padding
from corral.tensors import ObjectiveOutput, TokenBatch


def cispo(batch: TokenBatch, config: CISPOConfig) -> ObjectiveOutput:
    """Policy gradient with a clipped weight.

        L_t = − sg[clip(ρ_t, low, high)] Â_t log π(a_t)          ρ_t = π(a_t) / π_old(a_t)

    The weight is a constant for autograd, so no token is ever without gradient.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the range of the weight.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        MiniMax 2025, arXiv:2506.13585, eqs. 4–5. Invariant: reinforce's gradient while ρ stays within the range.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    ratio = clamp_log_ratio(log_rho.detach()).exp()
    loss = -ratio.clamp(config.cap_low, config.cap_high) * advantages * zero_padding(batch.logp_new, batch.mask)
    acted = ((ratio < config.cap_low) | (ratio > config.cap_high)) & (advantages != 0)
    return ObjectiveOutput(torch.where(batch.mask, loss, 0.0), region_metrics(batch, log_rho, acted), acted)
