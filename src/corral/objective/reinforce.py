"""REINFORCE with importance weights: the policy gradient with no trust region at all."""

import torch

from corral.objective.config import ReinforceConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import capped_ratio, credit, log_ratio
from corral.tensors import ObjectiveOutput, TokenBatch


def reinforce(batch: TokenBatch, config: ReinforceConfig) -> ObjectiveOutput:
    """Importance-weighted policy gradient, unconstrained.

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
