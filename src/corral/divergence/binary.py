"""Divergences of "this token or any other", from two sampled-token log-probabilities."""

import torch
from jaxtyping import Float
from torch import Tensor

from corral.divergence.categorical import abs_difference, categorical_kl
from corral.numerics import at_least_float32, log1mexp


def binary_kl(logp_p: Float[Tensor, "*#b"], logp_q: Float[Tensor, "*#b"]) -> Float[Tensor, "*b"]:
    """KL between the two-way distributions (p, 1 − p) and (q, 1 − q).

        KL = p log(p/q) + (1 − p) log((1 − p)/(1 − q))

    Args:
        logp_p, logp_q: log-probabilities of the sampled token [*].
    Returns:
        KL in nats [*]; a lower bound on the KL of the whole distributions.
    Ref:
        Qi et al. 2026, arXiv:2602.04879, eq. 14. Invariant: KL(½‖½ ± x) = −½ log(1 − 4x²).
    """
    return categorical_kl(_two_way(logp_p), _two_way(logp_q))


def binary_tv(logp_p: Float[Tensor, "*#b"], logp_q: Float[Tensor, "*#b"]) -> Float[Tensor, "*b"]:
    """Total variation of (p, 1 − p) and (q, 1 − q), which is |p − q|.

    Args:
        logp_p, logp_q: log-probabilities of the sampled token [*].
    Returns:
        TV [*]; a lower bound on the TV of the whole distributions.
    Ref:
        Qi et al. 2026, arXiv:2602.04879, eq. 13. Invariant: binary_tv² ≤ binary_kl / 2.
    """
    return abs_difference(logp_p, logp_q)


def _two_way(logp: Tensor) -> Tensor:
    logp = at_least_float32(logp)
    return torch.stack([logp, log1mexp(logp)], dim=-1)
