"""Objectives that clip a probability ratio: PPO and its variants."""

import math

import torch

from corral.objective.config import (
    ASPOConfig,
    BAPOConfig,
    DecoupledPPOConfig,
    GMPOConfig,
    GSPOConfig,
    PPOClipConfig,
    RIPOConfig,
)
from corral.objective.metrics import region_metrics
from corral.objective.ratio import (
    clamp_log_ratio,
    clip_surrogate,
    credit,
    log_ratio,
    own_gradient,
    sequence_log_ratio,
    zero_padding,
)
from corral.tensors import ObjectiveOutput, TokenBatch


def ppo_clip(batch: TokenBatch, config: PPOClipConfig) -> ObjectiveOutput:
    """PPO's clipped surrogate loss, with one probability ratio per token.

        L_t = − min(ρ_t Â_t, clip(ρ_t, 1 − ε_low, 1 + ε_high) Â_t)          ρ_t = π(a_t) / π_old(a_t)
        and with dual clip, where Â_t < 0:  L_t = − max(that minimum, c Â_t)

    A clipped token has no gradient.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the clip range, and the dual clip's constant.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Schulman et al. 2017, arXiv:1707.06347, eq. 7; clip-higher: Yu et al. 2025, arXiv:2503.14476; dual clip: Ye et al.
        2019, arXiv:1912.09729. Invariant: the gradient of dppo with divergence="ratio".
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    ratio = clamp_log_ratio(log_rho).exp()
    surrogate, acted = clip_surrogate(ratio, advantages, 1 - config.clip_low, 1 + config.clip_high, config.dual_clip)
    return ObjectiveOutput(torch.where(batch.mask, -surrogate, 0.0), region_metrics(batch, log_rho, acted), acted)


def decoupled_ppo(batch: TokenBatch, config: DecoupledPPOConfig) -> ObjectiveOutput:
    """Clipped surrogate loss around a proximal policy, with importance weights for the behaviour policy (decoupled PPO).

        L_t = − b_t min(ρ_t Â_t, clip(ρ_t, 1 − ε_low, 1 + ε_high) Â_t)
        ρ_t = π(a_t) / π_old(a_t)          b_t = π_old(a_t) / π_rollout(a_t)

    b is a constant for autograd, and has no cap but e²⁰. A clipped token has no gradient.

    Args:
        batch: log-probs, advantages and mask, all [B T], with what the sampler reported as `logp_rollout`.
        config: the clip range.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Hilton et al. 2021, arXiv:2110.00641. Invariant: ppo_clip where the sampler is the old policy.
    """
    assert batch.logp_rollout is not None
    advantages, log_rho = credit(batch), log_ratio(batch)
    old, rollout = (zero_padding(x.detach(), batch.mask) for x in (batch.logp_old, batch.logp_rollout))
    ratio = clamp_log_ratio(log_rho).exp()
    surrogate, acted = clip_surrogate(ratio, advantages, 1 - config.clip_low, 1 + config.clip_high)
    loss = -clamp_log_ratio(old - rollout).exp() * surrogate
    return ObjectiveOutput(torch.where(batch.mask, loss, 0.0), region_metrics(batch, log_rho, acted), acted)


def aspo(batch: TokenBatch, config: ASPOConfig) -> ObjectiveOutput:
    """Policy gradient with asymmetric importance weights (ASPO): the ratio where Â < 0, the inverse ratio where Â > 0.

        L_t = − m_t w_t Â_t ρ_t / sg[ρ_t]          ρ_t = π(a_t) / π_old(a_t)
        w_t = sg[min(1/ρ_t, c)] where Â_t > 0,  sg[min(ρ_t, c)] where Â_t < 0
        m_t = 0  iff  ρ_t > 1 + ε_high and Â_t > 0,  or  ρ_t < 1 − ε_low and Â_t < 0

    Weight and mask are constants for autograd: a masked token has no gradient, a capped one c ∇ log π.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the clip range, and the cap on the weight.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Wang et al. 2025, arXiv:2510.06062. Invariant: where Â < 0 and ρ ≤ c, the gradient of ppo_clip.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    with torch.no_grad():
        ratio = clamp_log_ratio(log_rho).exp()
        blocked = ((ratio > 1 + config.clip_high) & (advantages > 0)) | ((ratio < 1 - config.clip_low) & (advantages < 0))
        weight = clamp_log_ratio(torch.where(advantages > 0, -log_rho, log_rho)).exp()
        acted = blocked | ((weight > config.cap) & (advantages != 0))
    loss = -weight.clamp(max=config.cap) * advantages * own_gradient(log_rho)
    return ObjectiveOutput(torch.where(batch.mask & ~blocked, loss, 0.0), region_metrics(batch, log_rho, acted), acted)


def gspo(batch: TokenBatch, config: GSPOConfig) -> ObjectiveOutput:
    """PPO's clipped surrogate loss, with one length-normalised probability ratio per sequence (GSPO).

        L = − min(s Â, clip(s, 1 − ε_low, 1 + ε_high) Â)          s = exp((1/|o|) Σ_t log ρ_t)

    The sequence's value stands on every unmasked token with a straight-through gradient, s ∇ log π(a_t), so that reduction
    "seq-mean-token-mean" gives the paper's gradient. Per-token advantages give its GSPO-token variant.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the clip range of s.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Zheng et al. 2025, arXiv:2507.18071, eqs. 5–7 and 13. Invariant: on one-token sequences it is ppo_clip.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    ratio = sequence_log_ratio(log_rho, batch.mask).exp()
    surrogate, acted = clip_surrogate(ratio, advantages, 1 - config.clip_low, 1 + config.clip_high)
    return ObjectiveOutput(torch.where(batch.mask, -surrogate, 0.0), region_metrics(batch, log_rho, acted), acted)


def gmpo(batch: TokenBatch, config: GMPOConfig) -> ObjectiveOutput:
    """Surrogate loss with the geometric mean of a sequence's token ratios (GMPO). Ratios far along the advantage are clipped.

        L = − Â exp((1/|o|) Σ_t z_t)          z_t = min(log ρ_t, ε) where Â_t > 0, max(log ρ_t, −ε) where Â_t < 0

    The sequence's value stands on every unmasked token with a straight-through gradient, so that reduction
    "seq-mean-token-mean" gives the paper's gradient. A clipped token has none.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the clip of the log-ratio.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Zhao et al. 2025, arXiv:2507.20673, eqs. 3–4. Invariant: with clip = inf it is gspo without a clip.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    acted = ((log_rho > config.clip) & (advantages > 0)) | ((log_rho < -config.clip) & (advantages < 0))
    clipped = torch.where(acted, log_rho.detach().clamp(-config.clip, config.clip), log_rho)
    ratio = sequence_log_ratio(clipped, batch.mask).exp()
    return ObjectiveOutput(torch.where(batch.mask, -ratio * advantages, 0.0), region_metrics(batch, log_rho, acted), acted)


def ripo(batch: TokenBatch, config: RIPOConfig) -> ObjectiveOutput:
    """Clipped surrogate loss with a separate clip range for every token (RIPO): wider for tokens that are unlikely.

        L_t = − min(ρ_t Â_t, clip(ρ_t, 1 − ε_t, 1 + ε_t) Â_t)          ε_t = √(δ / π_old(a_t)),  ρ_t = π(a_t) / π_old(a_t)

    |ρ − 1| ≤ ε_t says π_old (ρ − 1)² ≤ δ: this token's term of χ²(π‖π_old), twice the second-order KL. A clipped token has no
    gradient.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the bound δ, by the advantage's sign.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Cai et al. 2026, arXiv:2607.10169, eq. 15. Invariant: a token with π_old = 1 has ppo_clip's loss with ε = √δ.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    ratio = clamp_log_ratio(log_rho).exp()
    spread = (-0.5 * zero_padding(batch.logp_old.detach(), batch.mask)).exp()  # 1/√π_old
    low, high = 1 - config.bound_low**0.5 * spread, 1 + config.bound_high**0.5 * spread
    surrogate, acted = clip_surrogate(ratio, advantages, low, high)
    return ObjectiveOutput(torch.where(batch.mask, -surrogate, 0.0), region_metrics(batch, log_rho, acted), acted)


_STEP = 0.05
"""Step size with which BAPO raises the upper clip bound, as in the code of the BAPO authors."""


def bapo(batch: TokenBatch, config: BAPOConfig) -> ObjectiveOutput:
    """Clipped surrogate loss whose clip range is adapted in every call (BAPO), to balance positive and negative advantages.

        L_t = − min(ρ_t Â_t, clip(ρ_t, l, h) Â_t), and where Â_t < 0 at most c |Â_t|          ρ_t = π(a_t) / π_old(a_t)
        P(h) = Σ_{Â > 0} min(ρ_t, h) Â_t,   N(l) = Σ_{Â < 0} max(ρ_t, l) |Â_t|,   balanced:  (1 − ρ₀) P ≥ ρ₀ N

    l and h start at `low` and `high`. Unless that is balanced l is `low_end`, and h rises by 0.05 until it is, or to
    `high_end`. The bounds are constants for autograd, and those of the tokens that are given: in training, of a micro-batch.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the share, and where the bounds may lie.
    Returns:
        Unreduced loss [B T] and metrics.
    Ref:
        Xi et al. 2025, arXiv:2510.18927, and the authors' code. Invariant: ppo_clip where the batch is balanced.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    ratio = clamp_log_ratio(log_rho).exp()
    with torch.no_grad():
        steps = math.ceil((config.high_end - config.high) / _STEP - 1e-9)  # the last one may be short
        highs = ratio.new_tensor([min(config.high + _STEP * i, config.high_end) for i in range(steps + 1)])
        positive = (torch.minimum(ratio.flatten(), highs[:, None]) * advantages.clamp(min=0).flatten()).sum(-1)
        lows = (config.low, config.low_end)  # raising l never brings balance, so l is one of two
        negative = [(ratio.clamp(min=low) * -advantages.clamp(max=0)).sum() for low in lows]
        start, end = ((1 - config.share) * positive >= config.share * x for x in negative)
        found = torch.where(start[0], 0, torch.where(end.any(), end.int().argmax(), steps))
        ends = ratio.new_tensor(lows)
        low, high = torch.where(start[0], ends[0], ends[1]), torch.take(highs, found)
    surrogate, acted = clip_surrogate(ratio, advantages, low, high, config.dual_clip)
    return ObjectiveOutput(torch.where(batch.mask, -surrogate, 0.0), region_metrics(batch, log_rho, acted), acted)
