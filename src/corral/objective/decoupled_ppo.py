"""Decoupled PPO: clip against the recomputed policy, weigh by the sampler's."""

import torch

from corral.objective.config import DecoupledPPOConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import clamp_log_ratio, clip_surrogate, credit, log_ratio, zero_padding
from corral.tensors import ObjectiveOutput, TokenBatch


def decoupled_ppo(batch: TokenBatch, config: DecoupledPPOConfig) -> ObjectiveOutput:
    """Clipped surrogate around a proximal policy, with importance weights of the behaviour policy.

        L_t = − b_t min(ρ_t Â_t, clip(ρ_t, 1 − ε_low, 1 + ε_high) Â_t)
        ρ_t = π(a_t) / π_old(a_t)          b_t = π_old(a_t) / π_rollout(a_t)

    b is a constant for autograd, and has no cap but e²⁰. A clipped token has no gradient.

    Args:
        batch: log-probs, advantages and mask, all [B T], with what the sampler reported as `logp_rollout`.
        config: the clip range.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Hilton et al. 2021, arXiv:2110.00641. Invariant: ppo_clip where the sampler is the old policy.
    """
    assert batch.logp_rollout is not None
    advantages, log_rho = credit(batch), log_ratio(batch)
    old, rollout = (zero_padding(x.detach(), batch.mask) for x in (batch.logp_old, batch.logp_rollout))
    ratio = clamp_log_ratio(log_rho).exp()
    surrogate, acted = clip_surrogate(ratio, advantages, 1 - config.clip_low, 1 + config.clip_high)
    loss = -clamp_log_ratio(old - rollout).exp() * surrogate
    return ObjectiveOutput(torch.where(batch.mask, loss, 0.0), region_metrics(batch, log_rho, acted), acted)
