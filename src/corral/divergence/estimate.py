"""Estimates of KL(p‖q) for metrics, from the log-probabilities of tokens that were sampled from p."""

from jaxtyping import Float
from torch import Tensor

from corral.numerics import at_least_float32, expm1_minus, require_tensors


def kl_k1(logp_p: Float[Tensor, "*#b"], logp_q: Float[Tensor, "*#b"]) -> Float[Tensor, "*b"]:
    """KL estimate k1 = log p − log q: unbiased, but often negative.

    Ref:
        Schulman 2020, "Approximating KL divergence".
    """
    require_tensors("kl_k1", logp_p=logp_p, logp_q=logp_q)
    return at_least_float32(logp_p) - at_least_float32(logp_q)


def kl_k2(logp_p: Float[Tensor, "*#b"], logp_q: Float[Tensor, "*#b"]) -> Float[Tensor, "*b"]:
    """KL estimate k2 = ½ (log p − log q)²: never negative, with a bias of third order.

    Ref:
        Schulman 2020, "Approximating KL divergence".
    """
    require_tensors("kl_k2", logp_p=logp_p, logp_q=logp_q)
    return 0.5 * kl_k1(logp_p, logp_q) ** 2


def kl_k3(logp_p: Float[Tensor, "*#b"], logp_q: Float[Tensor, "*#b"]) -> Float[Tensor, "*b"]:
    """KL estimate k3 = q/p − 1 − log(q/p): never negative, and unbiased if q's support lies in p's support.

    Ref:
        Schulman 2020, "Approximating KL divergence". Invariant: its mean under p is KL(p‖q), term by term.
    """
    require_tensors("kl_k3", logp_p=logp_p, logp_q=logp_q)
    return expm1_minus(-kl_k1(logp_p, logp_q))
