"""RIPO: a clip range that is wider for unlikely tokens, so that every token may move as far in Fisher's metric."""

import torch

from corral.objective.config import RIPOConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import clamp_log_ratio, clip_surrogate, credit, log_ratio, zero_padding
from corral.tensors import ObjectiveOutput, TokenBatch


def ripo(batch: TokenBatch, config: RIPOConfig) -> ObjectiveOutput:
    """Clipped surrogate with a range of its own for every token.

        L_t = − min(ρ_t Â_t, clip(ρ_t, 1 − ε_t, 1 + ε_t) Â_t)          ε_t = √(δ / π_old(a_t)),  ρ_t = π(a_t) / π_old(a_t)

    |ρ − 1| ≤ ε_t says π_old (ρ − 1)² ≤ δ: this token's term of χ²(π‖π_old), twice the second-order KL. A clipped token has no
    gradient.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the bound δ, by the advantage's sign.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Cai et al. 2026, arXiv:2607.10169, eq. 15. Invariant: a token with π_old = 1 has ppo_clip's loss with ε = √δ.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    ratio = clamp_log_ratio(log_rho).exp()
    spread = (-0.5 * zero_padding(batch.logp_old.detach(), batch.mask)).exp()  # 1/√π_old
    low, high = 1 - config.bound_low**0.5 * spread, 1 + config.bound_high**0.5 * spread
    surrogate, acted = clip_surrogate(ratio, advantages, low, high)
    return ObjectiveOutput(torch.where(batch.mask, -surrogate, 0.0), region_metrics(batch, log_rho, acted), acted)
