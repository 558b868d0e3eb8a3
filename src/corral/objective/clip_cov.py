"""Clip-Cov: PPO's clip, and a few of the tokens that narrow the policy most go without a gradient."""

from dataclasses import dataclass

import torch

from corral.objective.config import NO_LOWER_CLIP, JointConfig
from corral.objective.kl_cov import share_count, token_covariance
from corral.objective.metrics import region_metrics
from corral.objective.ratio import clamp_log_ratio, clip_surrogate, credit, log_ratio
from corral.tensors import ObjectiveOutput, TokenBatch
from corral.validate import number_in, require


@dataclass(frozen=True, kw_only=True)
class ClipCovConfig(JointConfig):
    clip_low: float = 0.2
    """ε_low: ratios below 1 − ε_low earn nothing more for a negative advantage."""
    clip_high: float = 0.2
    """ε_high: ratios above 1 + ε_high earn nothing more for a positive advantage."""
    share: float = 2e-4
    """Share of the call's tokens that lose their gradient, at least one, if there are as many to choose from."""
    cov_low: float = 1.0
    """Covariance above which a token may be chosen."""
    cov_high: float = 5.0
    """Covariance below which a token may be chosen."""

    def __post_init__(self) -> None:
        require(self, "clip_low", at_least=0, at_most=1, what="a distance from ratio 1", note=NO_LOWER_CLIP)
        require(self, "clip_high", at_least=0, what="a distance from ratio 1")
        require(self, "share", above=0, at_most=1, what="a share of the tokens")
        if not (number_in(self.cov_low, 0) and number_in(self.cov_high, self.cov_low)):
            raise ValueError(
                f"clip_cov: covariances lie in (`cov_low`, `cov_high`) with 0 ≤ cov_low ≤ cov_high; got ({self.cov_low!r}, "
                f"{self.cov_high!r})."
            )

    @property
    def bounds(self) -> tuple[float, float]:
        return self.clip_low, self.clip_high


def clip_cov(batch: TokenBatch, config: ClipCovConfig) -> ObjectiveOutput:
    """Clipped surrogate without a random few of the tokens with a large covariance.

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
