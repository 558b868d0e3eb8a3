"""DRPO: a quadratic penalty on the change of the sampled token's probability in place of DPPO's mask."""

import torch

from corral.objective.config import DRPOConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import clamp_log_ratio, credit, log_ratio, zero_padding
from corral.tensors import ObjectiveOutput, TokenBatch


def drpo(batch: TokenBatch, config: DRPOConfig) -> ObjectiveOutput:
    """Penalised surrogate, with its optimum at the edge of the sampled token's total-variation ball.

        L_t = − ρ_t Â_t + |Â_t| π_old(a_t) (ρ_t − 1)² / (2 δ)          ρ_t = π(a_t) / π_old(a_t)

    π_old (ρ − 1) = π − π_old: it is spo with ε = δ / π_old(a_t), wide for unlikely tokens and narrow for likely ones.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the bound δ on |π − π_old|.
    Returns:
        Unreduced loss [B T] and metrics; `tr/active_frac` counts tokens beyond δ along their advantage.
    Ref:
        Yao et al. 2026, arXiv:2606.09821, eq. 9. Invariant: the gradient vanishes at π = π_old + sgn(Â) δ.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    excess = torch.expm1(clamp_log_ratio(log_rho))
    moved = zero_padding(batch.logp_old.detach(), batch.mask).exp() * excess
    loss = -(1 + excess) * advantages + advantages.abs() * excess * moved / (2 * config.bound)
    acted = moved * advantages.sign() > config.bound
    return ObjectiveOutput(torch.where(batch.mask, loss, 0.0), region_metrics(batch, log_rho, acted), acted)
