"""Estimates of KL(p‖q) from the log-probabilities of tokens drawn from p, for metrics."""

from jaxtyping import Float
from torch import Tensor

from corral.numerics import at_least_float32, expm1_minus, require_tensors


def kl_k1(logp_p: Float[Tensor, "*#b"], logp_q: Float[Tensor, "*#b"]) -> Float[Tensor, "*b"]:
    """Estimate k1 = log p − log q: unbiased, but often negative.

    Ref:
        Schulman 2020, "Approximating KL divergence".
    """
    require_tensors("kl_k1", logp_p=logp_p, logp_q=logp_q)
    return at_least_float32(logp_p) - at_least_float32(logp_q)


def kl_k2(logp_p: Float[Tensor, "*#b"], logp_q: Float[Tensor, "*#b"]) -> Float[Tensor, "*b"]:
    """Estimate k2 = ½ (log p − log q)²: never negative, biased at third order.

    Ref:
        Schulman 2020, "Approximating KL divergence".
    """
    require_tensors("kl_k2", logp_p=logp_p, logp_q=logp_q)
    return 0.5 * kl_k1(logp_p, logp_q) ** 2


def kl_k3(logp_p: Float[Tensor, "*#b"], logp_q: Float[Tensor, "*#b"]) -> Float[Tensor, "*b"]:
    """Estimate k3 = q/p − 1 − log(q/p): unbiased if q's support lies in p's, and never negative.

    Ref:
        Schulman 2020, "Approximating KL divergence". Invariant: its mean under p is KL(p‖q), term by term.
    """
    require_tensors("kl_k3", logp_p=logp_p, logp_q=logp_q)
    return expm1_minus(-kl_k1(logp_p, logp_q))
