"""GSPO: clip the ratio of the whole sequence, normalised by its length."""

import torch

from corral.objective.config import GSPOConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import clip_surrogate, credit, log_ratio, sequence_log_ratio
from corral.tensors import ObjectiveOutput, TokenBatch


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
