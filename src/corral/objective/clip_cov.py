"""Clip-Cov: PPO's clip, with no gradient for a few of the tokens that lower the entropy most."""

import torch

from corral.objective.config import ClipCovConfig
from corral.objective.kl_cov import share_count, token_covariance
from corral.objective.metrics import region_metrics
from corral.objective.ratio import clamp_log_ratio, clip_surrogate, credit, log_ratio
from corral.tensors import ObjectiveOutput, TokenBatch


def clip_cov(batch: TokenBatch, config: ClipCovConfig) -> ObjectiveOutput:
    """Clipped surrogate that leaves out a random few of the tokens with a large covariance.

        L_t = − m_t min(ρ_t Â_t, clip(ρ_t, 1 − ε_low, 1 + ε_high) Â_t)          ρ_t = π(a_t) / π_old(a_t)
        m_t = 0 on a share of all tokens, drawn from those that the clip leaves alone and  c_low < c_t < c_high

    with kl_cov's covariance c_t. Selects among the tokens it is given, which in training are those of a micro-batch. A token's
    lot is what follows the third decimal of c_t, so a draw is repeatable. The mask is a constant for autograd, and acts at
    π = π_old too.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the clip range, how many tokens are drawn, and from which.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Cui et al. 2025, arXiv:2505.22617, section 4. Invariant: ppo_clip where no covariance lies in the window.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    surrogate, clipped = clip_surrogate(clamp_log_ratio(log_rho).exp(), advantages, 1 - config.clip_low, 1 + config.clip_high)
    with torch.no_grad():
        covariance = token_covariance(batch)
        open_ = (covariance > config.cov_low) & (covariance < config.cov_high) & ~clipped
        lots = torch.where(open_, torch.remainder(1e3 * covariance, 1.0), torch.inf).flatten()
        rank = lots.argsort(stable=True).argsort().view_as(open_)
        drawn = open_ & (rank < share_count(batch, config.share))
    loss = torch.where(batch.mask & ~drawn, -surrogate, 0.0)
    return ObjectiveOutput(loss, region_metrics(batch, log_rho, acted := clipped | drawn), acted)
