"""Divergences of categorical distributions, from log-probabilities, over the last axis."""

import torch
from jaxtyping import Float
from torch import Tensor

from corral.numerics import NEAR, at_least_float32, expm1_minus_series, require_tensors


def categorical_kl(logp_p: Float[Tensor, "*#b K"], logp_q: Float[Tensor, "*#b K"]) -> Float[Tensor, "*b"]:
    """Compute KL(p‖q) as a sum of nonnegative terms, so that no digits cancel.

        KL(p‖q) = Σ p (log p − log q) = Σ p (eˣ − 1 − x)          x = log q − log p

    The two sums are equal because Σ p = Σ q = 1. Every term of the second is ≥ 0 and keeps its digits as q → p, and an
    error in the normalisation of p or q enters only squared. 0 · log 0 is 0; p > 0 = q gives inf.

    Args:
        logp_p, logp_q: normalised log-probabilities [*, K], −inf allowed.
    Returns:
        KL in nats [*], ≥ 0, differentiable in both.
    Ref:
        Schulman 2020, "Approximating KL divergence" (the term is its k3). Invariant: 0 iff p = q.
    """
    _check_categories("categorical_kl", logp_p, logp_q)
    logp_p, logp_q = at_least_float32(logp_p), at_least_float32(logp_q)
    return kl_elements(logp_p, logp_q, logp_q - logp_p).sum(-1)


def kl_elements(logp_p: Tensor, logp_q: Tensor, gap: Tensor) -> Tensor:
    """Compute the terms of KL(p‖q), one per category: q where p = 0, and inf where only q is 0. Log-probs may be −inf."""
    # −inf on either side leaves no usable gap, and any far one will do: the term of p = 0 is then q.
    both = (logp_p > -torch.inf) & (logp_q > -torch.inf)
    term = kl_terms(logp_p.exp(), logp_q.exp(), torch.where(both, gap, 1.0))
    return torch.where((logp_p > -torch.inf) & (logp_q == -torch.inf), torch.inf, term)


def kl_terms(p: Tensor, q: Tensor, gap: Tensor) -> Tensor:
    """Compute the terms p (eˣ − 1 − x) of KL(p‖q), given the log-ratio `gap`, x = log q − log p.

    `gap` may be more exact than the difference of rounded logarithms.
    """
    near = gap.abs() < NEAR
    # eˣ overflows where p underflows; far apart nothing cancels, so the term is multiplied out to q − p − p x.
    return torch.where(near, p * expm1_minus_series(torch.where(near, gap, 0.0)), q - p - p * gap)


def categorical_tv(logp_p: Float[Tensor, "*#b K"], logp_q: Float[Tensor, "*#b K"]) -> Float[Tensor, "*b"]:
    """Total variation ½ Σ |p − q|, in [0, 1].

    Args:
        logp_p, logp_q: normalised log-probabilities [*, K], −inf allowed.
    Returns:
        TV [*].
    Ref:
        Qi et al. 2026, arXiv:2602.04879, eq. 15. Invariant: TV² ≤ KL/2 (Pinsker).
    """
    _check_categories("categorical_tv", logp_p, logp_q)
    return 0.5 * abs_difference(logp_p, logp_q).sum(-1)


def abs_difference(logp_p: Tensor, logp_q: Tensor) -> Tensor:
    """Compute |p − q| elementwise from log-probabilities, without loss of digits where p ≈ q.

    The formula is max(p, q)·(1 − e^−|log p − log q|).
    """
    logp_p, logp_q = at_least_float32(logp_p), at_least_float32(logp_q)
    neither = (logp_p == -torch.inf) & (logp_q == -torch.inf)
    gap = torch.where(neither, 0.0, logp_p) - torch.where(neither, 0.0, logp_q)
    return torch.maximum(logp_p, logp_q).exp() * -torch.expm1(-gap.abs())


def _check_categories(where: str, logp_p: Tensor, logp_q: Tensor) -> None:
    """Raise an error if two policies have different numbers of categories, because the last axis is never broadcast."""
    require_tensors(where, logp_p=logp_p, logp_q=logp_q)
    if logp_p.shape[-1:] != logp_q.shape[-1:]:
        raise ValueError(
            f"{where}: both policies need the same categories on the last axis; got {list(logp_p.shape)} and "
            f"{list(logp_q.shape)}."
        )
