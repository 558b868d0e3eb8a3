"""PPO: a pessimistic clip of the sampled token's ratio. With two presets: clip-higher and dual clip."""

from dataclasses import dataclass

import torch

from corral.objective.config import NO_LOWER_CLIP, ObjectiveConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import clamp_log_ratio, clip_surrogate, credit, log_ratio
from corral.tensors import ObjectiveOutput, TokenBatch
from corral.validate import require


@dataclass(frozen=True, kw_only=True)
class PPOClipConfig(ObjectiveConfig):
    clip_low: float = 0.2
    """ε_low: ratios below 1 − ε_low earn nothing more for a negative advantage."""
    clip_high: float = 0.2
    """ε_high: ratios above 1 + ε_high earn nothing more for a positive advantage."""
    dual_clip: float | None = None
    """c > 1: with a negative advantage the loss is cut off at c|Â|, so that a ratio above c has no gradient."""

    def __post_init__(self) -> None:
        require(self, "clip_low", at_least=0, at_most=1, what="a distance from ratio 1", note=NO_LOWER_CLIP)
        require(self, "clip_high", at_least=0, what="a distance from ratio 1")
        require(self, "dual_clip", above=1, optional=True, what="a ratio")

    @property
    def bounds(self) -> tuple[float, float]:
        return self.clip_low, self.clip_high


@dataclass(frozen=True, kw_only=True)
class ClipHigherConfig(PPOClipConfig):
    clip_high: float = 0.28
    """ε_high, wider than ε_low so that unlikely tokens can rise."""


@dataclass(frozen=True, kw_only=True)
class DualClipConfig(PPOClipConfig):
    dual_clip: float | None = 3.0
    """c > 1: with a negative advantage the loss is cut off at c|Â|, so that a ratio above c has no gradient."""


def ppo_clip(batch: TokenBatch, config: PPOClipConfig) -> ObjectiveOutput:
    """Clipped surrogate.

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
    surrogate, acted = clip_surrogate(ratio, advantages, 1 - config.clip_low, 1 + config.clip_high)
    if config.dual_clip is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, config.dual_clip * advantages), surrogate)
        acted = acted | ((ratio > config.dual_clip) & (advantages < 0))
    return ObjectiveOutput(torch.where(batch.mask, -surrogate, 0.0), region_metrics(batch, log_rho, acted), acted)
