"""Objectives without a trust region, and objectives that only limit the importance weights of tokens or sequences."""

import torch

from corral.objective.config import CISPOConfig, ReinforceConfig, TOPRConfig, VESPOConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import capped_ratio, clamp_log_ratio, credit, log_ratio, zero_padding
from corral.tensors import ObjectiveOutput, TokenBatch


def reinforce(batch: TokenBatch, config: ReinforceConfig) -> ObjectiveOutput:
    """Importance-weighted policy gradient (REINFORCE) without a trust region.

        L_t = − ρ_t Â_t          ρ_t = π(a_t) / π_old(a_t)

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: an optional cap on the weight, min(ρ, C), through which no gradient flows.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Williams 1992, with the ratio of off-policy policy gradients. Invariant: every other objective has this gradient at
        π = π_old.
    """
    log_rho = log_ratio(batch)
    loss = -capped_ratio(log_rho, config.ratio_cap) * credit(batch)
    nowhere = torch.zeros_like(batch.mask)
    return ObjectiveOutput(torch.where(batch.mask, loss, 0.0), region_metrics(batch, log_rho, nowhere), nowhere)


def cispo(batch: TokenBatch, config: CISPOConfig) -> ObjectiveOutput:
    """Policy gradient with a clipped importance weight that is a constant for autograd (CISPO).

        L_t = − sg[clip(ρ_t, low, high)] Â_t log π(a_t)          ρ_t = π(a_t) / π_old(a_t)

    The weight is a constant for autograd, so no token is ever without gradient.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the range of the weight.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        MiniMax 2025, arXiv:2506.13585, eqs. 4–5. Invariant: reinforce's gradient while ρ stays within the range.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    ratio = clamp_log_ratio(log_rho.detach()).exp()
    loss = -ratio.clamp(config.cap_low, config.cap_high) * advantages * zero_padding(batch.logp_new, batch.mask)
    acted = ((ratio < config.cap_low) | (ratio > config.cap_high)) & (advantages != 0)
    return ObjectiveOutput(torch.where(batch.mask, loss, 0.0), region_metrics(batch, log_rho, acted), acted)


def topr(batch: TokenBatch, config: TOPRConfig) -> ObjectiveOutput:
    """Off-policy REINFORCE (TOPR): sequences with a negative advantage have a capped importance weight.

        L_t = − w Â_t log π(a_t)          w = 1 where Â_t ≥ 0,  sg[min(Π_s ρ_s, c)] where Â_t < 0

    The product runs over the whole sequence, ρ_s = π(a_s) / π_old(a_s), without a norm for its length. The weight is a constant
    for autograd: no token is ever without gradient, but a bad answer that has become unlikely counts for next to nothing.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the cap on the weight.
    Returns:
        Unreduced loss [B T] and metrics; `tr/active_frac` counts tokens whose weight is below one half.
    Ref:
        Le Roux et al. 2025, arXiv:2503.14286. Invariant: at positive advantages the ratio does not matter.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    product = clamp_log_ratio(log_rho.detach().sum(-1, keepdim=True)).exp()
    weight = torch.where(advantages < 0, product.clamp(max=config.cap), 1.0)
    loss = -weight * advantages * zero_padding(batch.logp_new, batch.mask)
    acted = weight < 0.5
    return ObjectiveOutput(torch.where(batch.mask, loss, 0.0), region_metrics(batch, log_rho, acted), acted)


def vespo(batch: TokenBatch, config: VESPOConfig) -> ObjectiveOutput:
    """Policy gradient with a smooth, gamma-shaped weight on each sequence's probability ratio (VESPO).

        L_t = − sg[φ(W)] Â_t log π(a_t)          φ(W) = W^k e^{λ (1 − W)},  W = Π_s π(a_s) / π_old(a_s)

    The product runs over the whole sequence, without a norm for its length; k and λ go by the advantage's sign. φ(1) = 1, and
    φ is largest at W = k/λ. It is a constant for autograd.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the two exponents for each sign.
    Returns:
        Unreduced loss [B T] and metrics; `tr/active_frac` counts tokens whose weight is below one half.
    Ref:
        Shen et al. 2026, arXiv:2602.10693. Invariant: with k = λ = 0, cispo with weights of exactly 1.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    log_w = clamp_log_ratio(log_rho.detach().sum(-1, keepdim=True))
    positive, negative = (
        (k * log_w - decay * torch.expm1(log_w)).exp()
        for k, decay in ((config.k_positive, config.lambda_positive), (config.k_negative, config.lambda_negative))
    )
    weight = torch.where(advantages < 0, negative, positive)
    loss = -weight * advantages * zero_padding(batch.logp_new, batch.mask)
    acted = (weight < 0.5) & (advantages != 0)
    return ObjectiveOutput(torch.where(batch.mask, loss, 0.0), region_metrics(batch, log_rho, acted), acted)
