"""ASPO: invert the ratio where the advantage is positive, so that tokens which have become unlikely count for more."""

import torch

from corral.objective.config import ASPOConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import clamp_log_ratio, credit, log_ratio, own_gradient
from corral.tensors import ObjectiveOutput, TokenBatch


def aspo(batch: TokenBatch, config: ASPOConfig) -> ObjectiveOutput:
    """Policy gradient with asymmetric importance weights: the ratio where Â < 0, its inverse where Â > 0.

        L_t = − m_t w_t Â_t ρ_t / sg[ρ_t]          ρ_t = π(a_t) / π_old(a_t)
        w_t = sg[min(1/ρ_t, c)] where Â_t > 0,  sg[min(ρ_t, c)] where Â_t < 0
        m_t = 0  iff  ρ_t > 1 + ε_high and Â_t > 0,  or  ρ_t < 1 − ε_low and Â_t < 0

    Weight and mask are constants for autograd: a masked token has no gradient, a capped one c ∇ log π.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the clip range, and the cap on the weight.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Wang et al. 2025, arXiv:2510.06062. Invariant: where Â < 0 and ρ ≤ c, the gradient of ppo_clip.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    with torch.no_grad():
        ratio = clamp_log_ratio(log_rho).exp()
        blocked = ((ratio > 1 + config.clip_high) & (advantages > 0)) | ((ratio < 1 - config.clip_low) & (advantages < 0))
        weight = clamp_log_ratio(torch.where(advantages > 0, -log_rho, log_rho)).exp()
        acted = blocked | ((weight > config.cap) & (advantages != 0))
    loss = -weight.clamp(max=config.cap) * advantages * own_gradient(log_rho)
    return ObjectiveOutput(torch.where(batch.mask & ~blocked, loss, 0.0), region_metrics(batch, log_rho, acted), acted)
