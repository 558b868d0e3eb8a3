"""PPO: a pessimistic clip of the sampled token's ratio, with the presets clip-higher and dual clip."""

import torch

from corral.objective.config import PPOClipConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import clamp_log_ratio, clip_surrogate, credit, log_ratio
from corral.tensors import ObjectiveOutput, TokenBatch


def ppo_clip(batch: TokenBatch, config: PPOClipConfig) -> ObjectiveOutput:
    """Clipped surrogate of the token's ratio.

        L_t = − min(ρ_t Â_t, clip(ρ_t, 1 − ε_low, 1 + ε_high) Â_t)          ρ_t = π(a_t) / π_old(a_t)
        and with dual clip, where Â_t < 0:  L_t = − max(that minimum, c Â_t)

    A clipped token has no gradient.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the clip range, and the dual clip's constant.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Schulman et al. 2017, arXiv:1707.06347, eq. 7; clip-higher: Yu et al. 2025, arXiv:2503.14476; dual clip: Ye et al.
        2019, arXiv:1912.09729. Invariant: the gradient of dppo with divergence="ratio".
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    ratio = clamp_log_ratio(log_rho).exp()
    surrogate, acted = clip_surrogate(ratio, advantages, 1 - config.clip_low, 1 + config.clip_high, config.dual_clip)
    return ObjectiveOutput(torch.where(batch.mask, -surrogate, 0.0), region_metrics(batch, log_rho, acted), acted)
