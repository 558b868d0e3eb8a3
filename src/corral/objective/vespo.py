"""VESPO: a smooth weight of the whole sequence's ratio, largest near 1 and vanishing on both sides."""

import torch

from corral.objective.config import VESPOConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import clamp_log_ratio, credit, log_ratio, zero_padding
from corral.tensors import ObjectiveOutput, TokenBatch


def vespo(batch: TokenBatch, config: VESPOConfig) -> ObjectiveOutput:
    """Policy gradient with a gamma-shaped weight of the sequence ratio.

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
