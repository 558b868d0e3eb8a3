"""DPPO: stop a token's gradient once its distribution has left the trust region along its advantage."""

import torch
from jaxtyping import Float
from torch import Tensor

from corral.divergence import binary_tv, categorical_kl, categorical_tv
from corral.objective.config import DPPOConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import capped_ratio, clamp_log_ratio, credit, log_ratio, sampled_kl, zero_padding
from corral.tensors import ObjectiveOutput, TokenBatch


def dppo(batch: TokenBatch, config: DPPOConfig) -> ObjectiveOutput:
    """Importance-weighted policy gradient inside a divergence trust region.

        L_t = − m_t ρ_t Â_t          ρ_t = π(a_t) / π_old(a_t)
        m_t = 0  iff  D_t > δ  and  (ρ_t − 1) Â_t > 0

    The mask is a constant for autograd: no gradient flows through D. Both inequalities are strict, moves back towards the
    old policy are never blocked, and tokens without advantage are never counted. With mask="symmetric" the second condition
    is Â_t ≠ 0, with "predictive" it is that D_t rises along the token's own gradient step.

    Args:
        batch: log-probs, advantages and mask, all [B T]; for "topk" and "full" both policies on one support.
        config: which divergence, on what, and how far.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Qi et al. 2026, arXiv:2602.04879, eqs. 12–16. Invariant: DPPO = REINFORCE as δ → ∞.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    low, high = config.bounds
    with torch.no_grad():
        moved = divergence(batch, log_rho, config)
        outside = torch.where(advantages > 0, moved > high, moved > low)
        if config.mask == "predictive":
            blocked = outside & (_rise(batch, config) * advantages > 0)
        else:
            blocked = outside & (log_rho * advantages > 0 if config.mask == "outward" else advantages != 0)
    loss = torch.where(batch.mask & ~blocked, -capped_ratio(log_rho, config.ratio_cap) * advantages, 0.0)
    return ObjectiveOutput(loss, region_metrics(batch, log_rho, blocked), blocked)


def divergence(batch: TokenBatch, log_rho: Float[Tensor, "B T"], config: DPPOConfig) -> Float[Tensor, "B T"]:
    """Divergence D_t between old and new policy, 0 at padding. Merging tokens can only lower it: binary ≤ topk ≤ full."""
    mask = batch.mask
    if config.divergence == "ratio":
        return torch.expm1(clamp_log_ratio(log_rho)).abs()
    if config.estimator == "binary":
        tv = config.divergence == "tv"
        return binary_tv(zero_padding(batch.logp_old, mask), zero_padding(batch.logp_new, mask)) if tv else sampled_kl(batch)
    assert batch.dist_old is not None
    assert batch.dist_new is not None
    old, new = batch.dist_old.with_rest(), batch.dist_new.with_rest()
    if config.estimator == "full":
        _check_nothing_left(mask, torch.maximum(old, new)[..., -1])
    categorical = categorical_tv if config.divergence == "tv" else categorical_kl
    return categorical(zero_padding(old, mask), zero_padding(new, mask))


def _rise(batch: TokenBatch, config: DPPOConfig) -> Float[Tensor, "B T"]:
    """Derivative dD/ds along z ← z + s (e_a − π), a step that makes the sampled token likelier.

    It is taken on the support, whose tail counts as one token.


    Then d log π_j = e_a,j − π_j − π_a + Σ_k π_k², and KL(old‖new) changes by −Σ_j μ_j d log π_j, the total variation by
    ½ Σ_j sgn(π_j − μ_j) π_j d log π_j.
    """
    assert batch.dist_old is not None
    assert batch.dist_new is not None
    old, new = (zero_padding(dist.with_rest(), batch.mask).exp() for dist in (batch.dist_old, batch.dist_new))
    change = (new**2).sum(-1, keepdim=True) - new - new[..., :1]
    change[..., 0] += 1  # slot 0 is the sampled token
    each = -old if config.divergence == "kl" else 0.5 * (new - old).sign() * new
    return (each * change).sum(-1)


def _check_nothing_left(mask: Tensor, rest: Tensor) -> None:
    if not torch.compiler.is_compiling() and bool((mask & (rest > -torch.inf)).any()):
        raise ValueError(
            f"dppo: estimator='full' needs a support with nothing left over, but up to {rest[mask].max().exp():.3g} of the "
            f"probability is outside it. Build it with top_k_support(logp, tokens, k=V), or use estimator='topk'."
        )
