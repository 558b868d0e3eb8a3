"""Metrics of objectives, computed over unmasked tokens as detached tensors."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from corral.divergence import binary_tv, categorical_kl
from corral.numerics import expm1_minus
from corral.objective.ratio import clamp_log_ratio, sampled_kl, zero_padding
from corral.projection import CategoricalProjection
from corral.support import hidden_kl, tail_gap
from corral.tensors import TokenBatch


def masked_mean(x: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Mean of `x` over the unmasked tokens, or 0 if there are none."""
    return torch.where(mask, x.detach(), 0.0).sum() / mask.sum().clamp(min=1)


def masked_max(x: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Largest value of `x` among the unmasked tokens."""
    return torch.where(mask, x.detach(), -torch.inf).amax()


@torch.no_grad()
def token_kl(batch: TokenBatch) -> Float[Tensor, "B T"]:
    """KL(new‖old) of each token, on the shared support and tail of both policies, 0 at padding.

    Where the batch has none, KL(old‖new) of "the sampled token or any other", which is a lower bound.
    """
    if batch.dist_new is None or batch.dist_old is None:
        return sampled_kl(batch)
    return categorical_kl(
        zero_padding(batch.dist_new.with_rest(), batch.mask), zero_padding(batch.dist_old.with_rest(), batch.mask)
    )


@torch.no_grad()
def region_metrics(
    batch: TokenBatch, log_rho: Float[Tensor, "B T"], acted: Bool[Tensor, "B T"], kl: Float[Tensor, "B T"] | None = None
) -> dict[str, Float[Tensor, ""]]:
    """Compute the `tr/` metrics that all objectives share: KL, ratios, tail mass, and the share of active tokens.

    `kl` is KL(new‖old) where the objective has it, else it is taken on the shared support. Where the batch has none, from
    the sampled tokens alone: KL(old‖new), its mean by the k3 estimate, its maximum by the two-way KL, a lower bound.
    """
    mask = batch.mask
    active = (acted & mask).sum() / mask.sum().clamp(min=1)
    metrics = {"tr/active_frac": active, "tr/ratio_max": masked_max(clamp_log_ratio(log_rho), mask).exp()}
    if batch.dist_new is not None and batch.dist_old is not None:
        metrics["tr/rest_mass"] = masked_mean(zero_padding(batch.dist_old.rest, mask).exp(), mask)
        new, old = batch.dist_new, batch.dist_old
        if new.rest_max is not None and old.rest_max is not None:
            metrics["tr/rest_max_ratio"] = masked_max(clamp_log_ratio(tail_gap(new.rest_max, old.rest_max)), mask).exp()
            metrics["tr/hidden_kl_max"] = masked_max(hidden_kl(new.rest, new.rest_max, old.rest, old.rest_max), mask)
        kl = token_kl(batch) if kl is None else kl
    if kl is not None:
        metrics |= {"tr/kl_before": masked_mean(kl, mask), "tr/kl_max": masked_max(kl, mask)}
    else:
        mean = masked_mean(expm1_minus(clamp_log_ratio(log_rho)), mask)
        metrics |= {"tr/kl_before": mean, "tr/kl_max": masked_max(token_kl(batch), mask)}
    if batch.logp_rollout is not None:
        gap = binary_tv(zero_padding(batch.logp_rollout, mask), zero_padding(batch.logp_old, mask))
        metrics["tr/mismatch"] = masked_mean(gap, mask)
    return metrics


@torch.no_grad()
def projection_metrics(projection: CategoricalProjection, mask: Bool[Tensor, "B T"]) -> dict[str, Float[Tensor, ""]]:
    """Compute the `tr/` metrics of objectives that project: KL after the projection, multiplier, tokens without a solution."""
    acted = projection.active & mask & projection.dual.isfinite()
    return {
        "tr/kl_after": masked_mean(projection.kl_after, mask),
        "tr/dual": masked_mean(projection.dual, acted),
        "tr/unconverged": (mask & ~projection.converged).sum(),
    }
