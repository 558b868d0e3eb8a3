"""What objectives report: tensors without gradients, over live tokens only."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from corral.divergence import binary_tv, categorical_kl
from corral.numerics import expm1_minus
from corral.objective.ratio import bounded, live, sampled_kl
from corral.support import hidden_kl, tail_gap
from corral.types import TokenBatch


def fraction(part: Bool[Tensor, "B T"], whole: Bool[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Share of the live tokens that are in `part`."""
    return (part & whole).sum() / whole.sum().clamp(min=1)


def live_mean(x: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Mean over the live tokens, 0 if there are none."""
    return torch.where(mask, x.detach(), 0.0).sum() / mask.sum().clamp(min=1)


def live_max(x: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Largest value among the live tokens."""
    return torch.where(mask, x.detach(), -torch.inf).amax()


@torch.no_grad()
def token_kl(batch: TokenBatch) -> Float[Tensor, "B T"]:
    """How far each token's distribution has moved, 0 at padding: KL(new‖old) on the shared support.

    Where the batch has none, KL(old‖new) of "the sampled token or any other", which is a lower bound.
    """
    if batch.dist_new is None or batch.dist_old is None:
        return sampled_kl(batch)
    return categorical_kl(live(batch.dist_new.with_rest(), batch.mask), live(batch.dist_old.with_rest(), batch.mask))


@torch.no_grad()
def region_metrics(
    batch: TokenBatch,
    log_rho: Float[Tensor, "B T"],
    acted: Bool[Tensor, "B T"],
    kl: Float[Tensor, "B T"] | None = None,
) -> dict[str, Float[Tensor, ""]]:
    """How far the policy has moved, and on how many tokens the region acted.

    `kl` is KL(new‖old) where the objective has it, else it is taken on the shared support. Where the batch has none, from
    the sampled tokens alone: KL(old‖new), its mean by the k3 estimate, its maximum by the two-way KL, a lower bound.
    """
    mask = batch.mask
    metrics = {"tr/active_frac": fraction(acted, mask), "tr/ratio_max": live_max(bounded(log_rho), mask).exp()}
    if batch.dist_new is not None and batch.dist_old is not None:
        metrics["tr/rest_mass"] = live_mean(live(batch.dist_old.rest, mask).exp(), mask)
        new, old = batch.dist_new, batch.dist_old
        if new.rest_max is not None and old.rest_max is not None:
            metrics["tr/rest_max_ratio"] = live_max(bounded(tail_gap(new.rest_max, old.rest_max)), mask).exp()
            metrics["tr/hidden_kl_max"] = live_max(hidden_kl(new.rest, new.rest_max, old.rest, old.rest_max), mask)
        kl = token_kl(batch) if kl is None else kl
    if kl is not None:
        metrics |= {"tr/kl_before": live_mean(kl, mask), "tr/kl_max": live_max(kl, mask)}
    else:
        mean = live_mean(expm1_minus(bounded(log_rho)), mask)
        metrics |= {"tr/kl_before": mean, "tr/kl_max": live_max(token_kl(batch), mask)}
    if batch.logp_rollout is not None:
        gap = binary_tv(live(batch.logp_rollout, mask), live(batch.logp_old, mask))
        metrics["tr/mismatch"] = live_mean(gap, mask)
    return metrics
