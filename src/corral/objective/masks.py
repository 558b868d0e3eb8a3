"""Objectives that remove the gradient of some tokens: DPPO and its variants, Clip-Cov and KL-Cov."""

import torch
from jaxtyping import Float
from torch import Tensor

from corral.divergence import binary_tv, categorical_kl, categorical_tv
from corral.objective.config import ClipCovConfig, CPPOConfig, DPPOConfig, KLCovConfig, M2POConfig
from corral.objective.metrics import masked_mean, region_metrics
from corral.objective.ratio import capped_ratio, clamp_log_ratio, clip_surrogate, credit, log_ratio, sampled_kl, zero_padding
from corral.tensors import ObjectiveOutput, TokenBatch


def dppo(batch: TokenBatch, config: DPPOConfig) -> ObjectiveOutput:
    """Importance-weighted policy gradient with a trust region on a divergence (DPPO): tokens outside may not move further.

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
    """Divergence D_t between old and new policy, 0 at padding. Estimates on fewer tokens are smaller: binary ≤ topk ≤ full."""
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
        rest = torch.maximum(old, new)[..., -1]
        if not torch.compiler.is_compiling() and bool((mask & (rest > -torch.inf)).any()):
            raise ValueError(
                f"dppo: estimator='full' needs a support with nothing left over, but up to {rest[mask].max().exp():.3g} of the "
                f"probability is outside it. Build it with top_k_support(logp, tokens, k=V), or use estimator='topk'."
            )
    categorical = categorical_tv if config.divergence == "tv" else categorical_kl
    return categorical(zero_padding(old, mask), zero_padding(new, mask))


def _rise(batch: TokenBatch, config: DPPOConfig) -> Float[Tensor, "B T"]:
    """Derivative dD/ds of the divergence along the step z ← z + s (e_a − π), which makes the sampled token a more likely.

    It is taken on the support, whose tail counts as one token. Then d log π_j = e_a,j − π_j − π_a + Σ_k π_k². KL(old‖new)
    changes by −Σ_j μ_j d log π_j, the total variation by ½ Σ_j sgn(π_j − μ_j) π_j d log π_j.
    """
    assert batch.dist_old is not None
    assert batch.dist_new is not None
    old, new = (zero_padding(dist.with_rest(), batch.mask).exp() for dist in (batch.dist_old, batch.dist_new))
    change = (new**2).sum(-1, keepdim=True) - new - new[..., :1]
    change[..., 0] += 1  # slot 0 is the sampled token
    each = -old if config.divergence == "kl" else 0.5 * (new - old).sign() * new
    return (each * change).sum(-1)


def cppo(batch: TokenBatch, config: CPPOConfig) -> ObjectiveOutput:
    """Importance-weighted policy gradient with a trust region that depends on the previous tokens of the sequence (CPPO).

        L_t = − m_t ρ_t Â_t          ρ_t = π(a_t) / π_old(a_t)
        m_t = 0  iff  w_t D_t > min(δ, δ + b Σ_{s<t} w_s − Σ_{s<t} w_s D_s)  and  (ρ_t − 1) Â_t > 0

    D is the total variation, of the sampled token against all others or of a support and its tail; w falls linearly from 1 at a
    sequence's first unmasked token to `weight_last` at its last; b is the 90th percentile of the sequence's D, between δ_b and
    2 δ_b. The mask is a constant for autograd.

    Args:
        batch: log-probs, advantages and mask, all [B T], tokens in the order in which they were sampled; for "topk" both
            policies on one support.
        config: bound, weights and budget.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Mao et al. 2026, arXiv:2606.10968, eqs. 8–11 and 22. Invariant: dppo with equal weights, no budget.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    with torch.no_grad():
        moved = divergence(batch, log_rho, DPPOConfig(estimator=config.estimator))
        place, last = batch.mask.cumsum(-1) - 1, (batch.mask.sum(-1, keepdim=True) - 1).clamp(min=1)
        weight = torch.where(batch.mask, 1 - (1 - config.weight_last) * place / last, 0.0)
        spent, earned = (x.cumsum(-1) - x for x in (weight * moved, weight))  # of the tokens before
        percentile = torch.nanquantile(torch.where(batch.mask, moved, torch.nan), 0.9, dim=-1, keepdim=True)
        budget = percentile.clamp(config.budget, 2 * config.budget)
        left = torch.where(earned > 0, budget * earned - spent, 0.0)  # inf · 0 at the first token
        excess = weight * moved - config.bound - left.clamp(max=0)  # meaningless at padding
        blocked = (excess > 0) & (log_rho * advantages > 0)
    loss = torch.where(batch.mask & ~blocked, -capped_ratio(log_rho, None) * advantages, 0.0)
    return ObjectiveOutput(loss, region_metrics(batch, log_rho, blocked), blocked)


def m2po(batch: TokenBatch, config: M2POConfig) -> ObjectiveOutput:
    """Importance-weighted policy gradient that masks the tokens whose ratios moved farthest along their advantage (M2PO).

        L_t = − m_t ρ_t Â_t          ρ_t = π(a_t) / π_old(a_t)
        O = {t : (ρ_t − 1) Â_t > 0};   m_t = 0 on the largest (log ρ_t)² of O, the fewest whose removal leaves a mean ≤ τ

    Selects among the tokens it is given, which in training are those of a micro-batch: their number matters. Of tokens with
    equal ratios all are masked or none. The mask is a constant for autograd.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the bound τ on the second moment.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Zheng et al. 2025, arXiv:2510.01161, algorithm 1. Invariant: M2PO = REINFORCE as τ → ∞.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    with torch.no_grad():
        outward = log_rho * advantages > 0
        moment = torch.where(outward, log_rho**2, torch.inf)
        ascending = moment.flatten().sort().values
        mean = ascending.cumsum(0) / torch.arange(1, ascending.numel() + 1, device=ascending.device)
        blocked = outward & (moment >= torch.where(mean > config.bound, ascending, torch.inf).amin())
    loss = torch.where(batch.mask & ~blocked, -capped_ratio(log_rho, None) * advantages, 0.0)
    return ObjectiveOutput(loss, region_metrics(batch, log_rho, blocked), blocked)


def clip_cov(batch: TokenBatch, config: ClipCovConfig) -> ObjectiveOutput:
    """PPO's clipped surrogate loss without a few random tokens whose advantage and log-prob covary strongly (Clip-Cov).

        L_t = − m_t min(ρ_t Â_t, clip(ρ_t, 1 − ε_low, 1 + ε_high) Â_t)          ρ_t = π(a_t) / π_old(a_t)
        m_t = 0 on a share of all tokens, drawn from those that the clip leaves alone and  c_low < c_t < c_high

    with kl_cov's covariance c_t. Selects among the tokens it is given, which in training are those of a micro-batch. A token's
    lot is what follows the third decimal of c_t, so a draw is repeatable. The mask is a constant for autograd, and acts at
    π = π_old too.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the clip range, how many tokens are drawn, and from which.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Cui et al. 2025, arXiv:2505.22617, section 4. Invariant: ppo_clip where no covariance lies in the window.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    surrogate, clipped = clip_surrogate(clamp_log_ratio(log_rho).exp(), advantages, 1 - config.clip_low, 1 + config.clip_high)
    with torch.no_grad():
        covariance = token_covariance(batch)
        open_ = (covariance > config.cov_low) & (covariance < config.cov_high) & ~clipped
        lots = torch.where(open_, torch.remainder(1e3 * covariance, 1.0), torch.inf).flatten()
        rank = lots.argsort(stable=True).argsort().view_as(open_)
        drawn = open_ & (rank < share_count(batch, config.share))
    loss = torch.where(batch.mask & ~drawn, -surrogate, 0.0)
    return ObjectiveOutput(loss, region_metrics(batch, log_rho, acted := clipped | drawn), acted)


def kl_cov(batch: TokenBatch, config: KLCovConfig) -> ObjectiveOutput:
    """Importance-weighted policy gradient with a penalty on tokens whose advantage and log-prob covary most (KL-Cov).

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
    """Covariance of each token, (Â_t − mean Â)(log π_t − mean log π). It is a constant for autograd, and −inf at padding.

    The means are over the call's unmasked tokens.
    """
    each = (credit(batch).detach(), zero_padding(batch.logp_new.detach(), batch.mask))
    advantages, logp = (x - masked_mean(x, batch.mask) for x in each)
    return torch.where(batch.mask, advantages * logp, -torch.inf)


def share_count(batch: TokenBatch, share: float) -> Tensor:
    """Convert a share of the unmasked tokens to a number of tokens, rounded down and at least 1. Returns a scalar tensor."""
    return (batch.mask.sum().double() * share).long().clamp(min=1)
