"""GMPO: the geometric mean of clipped token ratios."""

import torch

from corral.objective.config import GMPOConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import credit, log_ratio, sequence_log_ratio
from corral.tensors import ObjectiveOutput, TokenBatch


def gmpo(batch: TokenBatch, config: GMPOConfig) -> ObjectiveOutput:
    """Surrogate of the geometric mean of token ratios, each clipped pessimistically.

        L = − Â exp((1/|o|) Σ_t z_t)          z_t = min(log ρ_t, ε) where Â_t > 0, max(log ρ_t, −ε) where Â_t < 0

    The sequence's value stands on every unmasked token with a straight-through gradient, so that reduction
    "seq-mean-token-mean" gives the paper's gradient. A clipped token has none.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the clip of the log-ratio.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Zhao et al. 2025, arXiv:2507.20673, eqs. 3–4. Invariant: with clip = inf it is gspo without a clip.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    acted = ((log_rho > config.clip) & (advantages > 0)) | ((log_rho < -config.clip) & (advantages < 0))
    clipped = torch.where(acted, log_rho.detach().clamp(-config.clip, config.clip), log_rho)
    ratio = sequence_log_ratio(clipped, batch.mask).exp()
    return ObjectiveOutput(torch.where(batch.mask, -ratio * advantages, 0.0), region_metrics(batch, log_rho, acted), acted)
