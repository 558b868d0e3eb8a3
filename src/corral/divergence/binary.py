"""Divergences of the two-way distribution "the sampled token or any other", from the sampled token's log-probabilities."""

import torch
from jaxtyping import Float
from torch import Tensor

from corral.divergence.categorical import abs_difference, kl_elements
from corral.numerics import NEAR, at_least_float32, log1mexp, require_tensors


def binary_kl(logp_p: Float[Tensor, "*#b"], logp_q: Float[Tensor, "*#b"]) -> Float[Tensor, "*b"]:
    """KL between the two-way distributions (p, 1 − p) and (q, 1 − q): the sampled token or any other token.

        KL = p log(p/q) + (1 − p) log((1 − p)/(1 − q))

    Args:
        logp_p, logp_q: log-probabilities of the sampled token [*].
    Returns:
        KL in nats [*]; a lower bound on the KL of the whole distributions.
    Ref:
        Qi et al. 2026, arXiv:2602.04879, eq. 14. Invariant: KL(½‖½ ± x) = −½ log(1 − 4x²).
    """
    require_tensors("binary_kl", logp_p=logp_p, logp_q=logp_q)
    logp_p, logp_q = at_least_float32(logp_p), at_least_float32(logp_q)
    rest_p, rest_q = log1mexp(logp_p), log1mexp(logp_q)
    this = kl_elements(logp_p, logp_q, logp_q - logp_p)
    return this + kl_elements(rest_p, rest_q, _rest_gap(logp_p, logp_q, rest_q - rest_p))


def binary_tv(logp_p: Float[Tensor, "*#b"], logp_q: Float[Tensor, "*#b"]) -> Float[Tensor, "*b"]:
    """Total variation between the two-way distributions (p, 1 − p) and (q, 1 − q), which is |p − q|.

    Args:
        logp_p, logp_q: log-probabilities of the sampled token [*].
    Returns:
        TV [*]; a lower bound on the TV of the whole distributions.
    Ref:
        Qi et al. 2026, arXiv:2602.04879, eq. 13. Invariant: binary_tv² ≤ binary_kl / 2.
    """
    require_tensors("binary_tv", logp_p=logp_p, logp_q=logp_q)
    return abs_difference(logp_p, logp_q)


def _rest_gap(logp_p: Tensor, logp_q: Tensor, gap: Tensor) -> Tensor:
    """Compute log (1 − q)/(1 − p), the log-ratio of the probabilities of "any other token".

    A small value is computed from the sampled token's log-ratio, since `gap`, a difference of two logarithms, cancels:
    1 − q = (1 − p) − p (e^(log q − log p) − 1), so the ratio is 1 − p expm1(log q − log p) / (1 − p).
    """
    step = logp_q - logp_p
    near = (gap.abs() < NEAR) & (step.abs() < NEAR)  # further apart nothing cancels, and e^step may overflow
    p, step = torch.where(near, logp_p, -1.0), torch.where(near, step, 0.0)
    return torch.where(near, torch.log1p(p.exp() * torch.expm1(step) / torch.expm1(p)), gap)
