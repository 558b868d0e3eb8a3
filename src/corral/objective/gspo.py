"""GSPO: clip the ratio of the whole sequence, normalised by its length."""

from dataclasses import dataclass

import torch

from corral.objective.config import NO_LOWER_CLIP, ObjectiveConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import clip_surrogate, credit, log_ratio, sequence_log_ratio
from corral.tensors import ObjectiveOutput, TokenBatch
from corral.validate import require


@dataclass(frozen=True, kw_only=True)
class GSPOConfig(ObjectiveConfig):
    clip_low: float = 3e-4
    """ε_low on the sequence ratio, which averages over tokens and so stays far closer to 1 than a token's."""
    clip_high: float = 4e-4
    """ε_high on the sequence ratio."""

    def __post_init__(self) -> None:
        require(self, "clip_low", at_least=0, at_most=1, what="a distance from ratio 1", note=NO_LOWER_CLIP)
        require(self, "clip_high", at_least=0, what="a distance from ratio 1")

    @property
    def tokenwise(self) -> bool:
        return False

    @property
    def bounds(self) -> tuple[float, float]:
        return self.clip_low, self.clip_high


def gspo(batch: TokenBatch, config: GSPOConfig) -> ObjectiveOutput:
    """Clipped surrogate of the sequence ratio.

        L = − min(s Â, clip(s, 1 − ε_low, 1 + ε_high) Â)          s = exp((1/|o|) Σ_t log ρ_t)

    The sequence's value stands on every unmasked token with a straight-through gradient, s ∇ log π(a_t), so that reduction
    "seq-mean-token-mean" gives the paper's gradient. Per-token advantages give its GSPO-token variant.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the clip range of s.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Zheng et al. 2025, arXiv:2507.18071, eqs. 5–7 and 13. Invariant: on one-token sequences it is ppo_clip.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    ratio = sequence_log_ratio(log_rho, batch.mask).exp()
    surrogate, acted = clip_surrogate(ratio, advantages, 1 - config.clip_low, 1 + config.clip_high)
    return ObjectiveOutput(torch.where(batch.mask, -surrogate, 0.0), region_metrics(batch, log_rho, acted), acted)
