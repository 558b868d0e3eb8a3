"""SPO: a quadratic penalty on the ratio in place of a clip."""

import torch

from corral.objective.config import SPOConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import clamp_log_ratio, credit, log_ratio
from corral.tensors import ObjectiveOutput, TokenBatch


def spo(batch: TokenBatch, config: SPOConfig) -> ObjectiveOutput:
    """Penalised surrogate, with its optimum at the edge of the region.

        L_t = − ρ_t Â_t + |Â_t| (ρ_t − 1)² / (2 ε)          ρ_t = π(a_t) / π_old(a_t)

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the ratio range ε.
    Returns:
        Unreduced loss [B T] and metrics; `tr/active_frac` counts tokens beyond 1 ± ε along their advantage.
    Ref:
        Xie et al. 2025, arXiv:2401.16025 (v7 and later). Invariant: the gradient vanishes at ρ = 1 + sgn(Â) ε.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    excess = torch.expm1(clamp_log_ratio(log_rho))
    loss = -(1 + excess) * advantages + advantages.abs() * excess**2 / (2 * config.epsilon)
    acted = excess * advantages.sign() > config.epsilon
    return ObjectiveOutput(torch.where(batch.mask, loss, 0.0), region_metrics(batch, log_rho, acted), acted)
