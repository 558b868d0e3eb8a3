"""KL-Cov: penalise the few tokens that lower the entropy most for moving, and leave all others free."""

import torch
from jaxtyping import Float
from torch import Tensor

from corral.objective.config import KLCovConfig
from corral.objective.metrics import masked_mean, region_metrics
from corral.objective.ratio import capped_ratio, credit, log_ratio, zero_padding
from corral.tensors import ObjectiveOutput, TokenBatch


def kl_cov(batch: TokenBatch, config: KLCovConfig) -> ObjectiveOutput:
    """Importance-weighted policy gradient, with a penalty on the tokens whose covariance is largest.

        L_t = − ρ_t Â_t + β |log ρ_t| 1[t ∈ S]          ρ_t = π(a_t) / π_old(a_t)
        S: the largest  c_t = (Â_t − mean Â)(log π(a_t) − mean log π)  that are above 0, a given share of all tokens

    Selects among the tokens it is given, which in training are those of a micro-batch: their number matters. The selection is a
    constant for autograd; of tokens with equal covariances all are held or none.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: how many tokens are held, and how strongly.
    Returns:
        Unreduced loss [B T] and metrics; `tr/active_frac` counts held tokens that have moved.
    Ref:
        Cui et al. 2025, arXiv:2505.22617. Invariant: reinforce where β = 0.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    with torch.no_grad():
        covariance = token_covariance(batch)
        least = torch.take(covariance.flatten().sort(descending=True).values, share_count(batch, config.share) - 1)
        held = batch.mask & (covariance >= least) & (covariance > 0)
    loss = -capped_ratio(log_rho, None) * advantages + torch.where(held, config.penalty * log_rho.abs(), 0.0)
    acted = held & (log_rho != 0)
    return ObjectiveOutput(torch.where(batch.mask, loss, 0.0), region_metrics(batch, log_rho, acted), acted)


def token_covariance(batch: TokenBatch) -> Float[Tensor, "B T"]:
    """Covariance of each token, (Â_t − mean Â)(log π_t − mean log π), a constant for autograd; −inf at padding.

    The means are over the call's unmasked tokens.
    """
    each = (credit(batch).detach(), zero_padding(batch.logp_new.detach(), batch.mask))
    advantages, logp = (x - masked_mean(x, batch.mask) for x in each)
    return torch.where(batch.mask, advantages * logp, -torch.inf)


def share_count(batch: TokenBatch, share: float) -> Tensor:
    """Number of tokens in a share of the unmasked tokens, rounded down and at least 1; a scalar on the device."""
    return (batch.mask.sum().double() * share).long().clamp(min=1)
