"""Objectives with a smooth penalty or a soft gate in place of a clip."""

import torch

from corral.objective.config import DRPOConfig, SAPOConfig, SPOConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import clamp_log_ratio, credit, log_ratio, zero_padding
from corral.tensors import ObjectiveOutput, TokenBatch


def spo(batch: TokenBatch, config: SPOConfig) -> ObjectiveOutput:
    """Policy-gradient loss with a penalty on the ratio (SPO). The optimum lies at the edge of the trust region.

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


def drpo(batch: TokenBatch, config: DRPOConfig) -> ObjectiveOutput:
    """Policy-gradient loss with a penalty on the sampled token's change in probability (DRPO). Its optimum lies at the bound.

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


def sapo(batch: TokenBatch, config: SAPOConfig) -> ObjectiveOutput:
    """Policy-gradient loss with a soft gate on the ratio in place of a clip (SAPO).

        L_t = − (4/τ) σ(τ (ρ_t − 1)) Â_t          τ = τ⁺ where Â_t > 0, τ⁻ elsewhere
        its gradient weight: 4 σ (1 − σ) ρ_t, which is 1 on-policy and fades smoothly on both sides

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the two temperatures.
    Returns:
        Unreduced loss [B T] and metrics; `tr/active_frac` counts tokens whose gate has closed to less than a half.
    Ref:
        Gao et al. 2025, arXiv:2511.20347. Invariant: reinforce's gradient at π = π_old.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    tau = torch.full_like(advantages, config.tau_negative).masked_fill(advantages > 0, config.tau_positive)
    gate = torch.sigmoid(tau * torch.expm1(clamp_log_ratio(log_rho)))
    acted = (4 * gate * (1 - gate) < 0.5) & (advantages != 0)
    loss = torch.where(batch.mask, -4 / tau * gate * advantages, 0.0)
    return ObjectiveOutput(loss, region_metrics(batch, log_rho, acted), acted)
