"""TOPR: weigh completions with a negative advantage by the sequence's ratio, at most 1, and leave the others unweighed."""

import torch

from corral.objective.config import TOPRConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import clamp_log_ratio, credit, log_ratio, zero_padding
from corral.tensors import ObjectiveOutput, TokenBatch


def topr(batch: TokenBatch, config: TOPRConfig) -> ObjectiveOutput:
    """Off-policy REINFORCE with tapered importance weights.

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
