"""SAPO: a soft gate on the ratio instead of a clip."""

import torch

from corral.objective.config import SAPOConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import clamp_log_ratio, credit, log_ratio
from corral.tensors import ObjectiveOutput, TokenBatch


def sapo(batch: TokenBatch, config: SAPOConfig) -> ObjectiveOutput:
    """Soft-gated surrogate.

        L_t = − (4/τ) σ(τ (ρ_t − 1)) Â_t          τ = τ⁺ where Â_t > 0, τ⁻ elsewhere
        its gradient weight: 4 σ (1 − σ) ρ_t, which is 1 on-policy and fades smoothly on both sides

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the two temperatures.
    Returns:
        Unreduced loss [B T] and metrics; `tr/active_frac` counts tokens whose gate has closed to less than a half.
    Ref:
        Gao et al. 2025, arXiv:2511.20347. Invariant: reinforce's gradient at π = π_old.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    tau = torch.full_like(advantages, config.tau_negative).masked_fill(advantages > 0, config.tau_positive)
    gate = torch.sigmoid(tau * torch.expm1(clamp_log_ratio(log_rho)))
    acted = (4 * gate * (1 - gate) < 0.5) & (advantages != 0)
    loss = torch.where(batch.mask, -4 / tau * gate * advantages, 0.0)
    return ObjectiveOutput(loss, region_metrics(batch, log_rho, acted), acted)
