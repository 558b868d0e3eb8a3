"""PPO's clip, lifted for rare tokens: an ablation of DPPO's paper, as an objective of this study alone."""

from dataclasses import dataclass

import torch

from corral import ObjectiveConfig, ObjectiveOutput, TokenBatch
from corral.objective.metrics import region_metrics
from corral.objective.ratio import clamp_log_ratio, clip_surrogate, credit, log_ratio
from corral.validate import require


@dataclass(frozen=True, kw_only=True)
class RareClipConfig(ObjectiveConfig):
    clip: float = 0.2
    """ε: ratios outside 1 ± ε earn nothing more."""
    rare: float = 0.1
    """Tokens whose old probability is below this are not clipped; 0 clips all."""

    def __post_init__(self) -> None:
        require(self, "clip", at_least=0, what="a distance from ratio 1")
        require(self, "rare", at_least=0, at_most=1, what="a probability")


def rare_clip(batch: TokenBatch, config: RareClipConfig) -> ObjectiveOutput:
    """Clipped surrogate, unclipped on both sides for tokens that were rare.

        L_t = − ρ_t Â_t                                          where π_old(a_t) < rare
        L_t = − min(ρ_t Â_t, clip(ρ_t, 1 − ε, 1 + ε) Â_t)        elsewhere

    A clipped token has no gradient.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the clip range, and below which old probability it is lifted.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Qi et al. 2026, arXiv:2602.04879, "relax both". Invariant: ppo_clip at rare = 0.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    ratio, rare = clamp_log_ratio(log_rho).exp(), batch.logp_old.exp() < config.rare
    clipped, acted = clip_surrogate(ratio, advantages, 1 - config.clip, 1 + config.clip)
    surrogate, acted = torch.where(rare, ratio * advantages, clipped), acted & ~rare
    return ObjectiveOutput(torch.where(batch.mask, -surrogate, 0.0), region_metrics(batch, log_rho, acted), acted)
