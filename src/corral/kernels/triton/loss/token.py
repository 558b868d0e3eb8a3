"""Objectives that act on the sampled token's ratio, in one kernel: clip, mask, weight, gate, penalty or flip.

The files of the same names in `objective` are the reference; this is the same, fast.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, no_type_check

import torch
import triton
import triton.language as tl

from corral.kernels.rows import HeadRows
from corral.kernels.triton.loss.project import CERTAIN, LOG_RATIO_MAX, abs_difference, binary_kl, expm1, kl_elements, kl_term
from corral.kernels.triton.loss.rows import UNCHECKED, LossRows, OldRows, blank_fields, disagree, no_distribution
from corral.support import LogpTolerance

CLIP, MASK, WEIGHT, GATE, PENALTY, FLIP = range(6)
RATIO, BINARY_TV, BINARY_KL, SUPPORT_TV, SUPPORT_KL, CHI_SQUARE = range(6)
"""What a clip, a mask or a penalty measures."""
INFINITY = float("inf")
LANES = 256
"""Rows times slots of one program."""


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """A rule and its constants; a function of new and old rows."""

    projects: ClassVar[bool] = False

    rule: int
    low: float
    high: float
    cap: float | None = None
    """Largest weight, or the dual clip's constant."""
    measure: int = RATIO
    symmetric: bool = False
    """A mask that looks at how far alone, not at which way."""
    decoupled: bool = False
    """Weigh the loss by old policy over sampler."""

    @property
    def needs_rollout(self) -> bool:
        return self.decoupled

    @property
    def needs_support(self) -> bool:
        return self.measure in (SUPPORT_TV, SUPPORT_KL)

    @classmethod
    def of(cls, objective: Any) -> "TokenLoss | None":
        """That of an objective; None where the kernel does not compute it. Names are never taken twice: they identify it."""
        name = getattr(objective, "name", None)  # any function of a batch is an objective
        make = _RULES.get(name) if isinstance(name, str) else None
        return None if make is None else make(objective.config)

    def __call__(self, rows: HeadRows, old: OldRows, limits: LogpTolerance = UNCHECKED) -> LossRows:
        """Losses of N packed tokens; flawed are those beyond the limits too."""
        fields, own = blank_fields(rows.lse), torch.empty_like(rows.lse)
        support = old.kept is not None
        slots = old.kept.shape[1] if old.kept is not None else 0
        lanes = max(2, triton.next_power_of_2(slots + 1))
        block = max(1, LANES // lanes)
        _token_kernel[(triton.cdiv(len(own), block),)](
            rows.logp, rows.kept, rows.rest, old.kept, old.rest, old.logp, old.rollout, old.advantages, old.policy_weights,
            fields, own,
            len(own), slots, rows.logp.stride(0), rows.kept.stride(0), *limits, self.low, self.high,
            self.cap if self.cap is not None else 0.0, CAPPED=self.cap is not None, RULE=self.rule, MEASURE=self.measure,
            SYMMETRIC=self.symmetric, DECOUPLED=self.decoupled, SUPPORT=support, ROLLOUT=old.rollout is not None,
            POLICY=old.policy_weights is not None, SLOTS=lanes, ROWS=block, num_warps=1,
        )  # fmt: skip
        return LossRows(fields, own, None, None)


def _masked(config: Any) -> TokenLoss | None:
    measures = {
        ("ratio", "binary"): RATIO, ("tv", "binary"): BINARY_TV, ("kl", "binary"): BINARY_KL,
        ("tv", "topk"): SUPPORT_TV, ("kl", "topk"): SUPPORT_KL,
    }  # fmt: skip
    measure = measures.get((config.divergence, config.estimator))  # "full" has more to check
    if measure is None or config.mask == "predictive":
        return None
    low, high = config.bounds
    symmetric = config.mask == "symmetric"
    return TokenLoss(rule=MASK, low=low, high=high, cap=config.ratio_cap, measure=measure, symmetric=symmetric)


def _clipped(config: Any) -> TokenLoss:
    return TokenLoss(rule=CLIP, low=1 - config.clip_low, high=1 + config.clip_high, cap=config.dual_clip)


def _decoupled(config: Any) -> TokenLoss:
    return TokenLoss(rule=CLIP, low=1 - config.clip_low, high=1 + config.clip_high, decoupled=True)


def _isometric(config: Any) -> TokenLoss:
    return TokenLoss(rule=CLIP, low=config.bound_low**0.5, high=config.bound_high**0.5, measure=CHI_SQUARE)


_RULES = {
    "ppo_clip": _clipped, "clip_higher": _clipped, "dual_clip": _clipped, "dppo": _masked,
    "decoupled_ppo": _decoupled, "ripo": _isometric,
    "aspo": lambda config: TokenLoss(rule=FLIP, low=1 - config.clip_low, high=1 + config.clip_high, cap=config.cap),
    "reinforce": lambda config: TokenLoss(rule=MASK, low=INFINITY, high=INFINITY, cap=config.ratio_cap),
    "cispo": lambda config: TokenLoss(rule=WEIGHT, low=config.cap_low, high=config.cap_high),
    "sapo": lambda config: TokenLoss(rule=GATE, low=config.tau_negative, high=config.tau_positive),
    "drpo": lambda config: TokenLoss(rule=PENALTY, low=config.bound, high=config.bound, measure=BINARY_TV),
    "spo": lambda config: TokenLoss(rule=PENALTY, low=config.epsilon, high=config.epsilon),
}  # fmt: skip


@triton.jit
@no_type_check
def _token_kernel(
    logp, kept, rest, kept_old, rest_old, logp_old, rollout, advantages, policy_weights, fields, out_own, count, slots,
    stride, stride_kept, highest, slack, low, high, cap, CAPPED: tl.constexpr, RULE: tl.constexpr, MEASURE: tl.constexpr,
    SYMMETRIC: tl.constexpr, DECOUPLED: tl.constexpr, SUPPORT: tl.constexpr, ROLLOUT: tl.constexpr, POLICY: tl.constexpr,
    SLOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < count
    new = tl.load(logp + row * stride, mask=there, other=0.0)
    old = tl.load(logp_old + row, mask=there, other=0.0).to(tl.float32)
    advantage = tl.load(advantages + row, mask=there, other=0.0).to(tl.float32)
    log_rho = new - old
    flawed = ~(tl.abs(log_rho) < float("inf"))  # checked here: the smaller of NaN and a number is the number
    flawed = flawed | (new > 1.001 * highest) | (old > 1.001 * highest)
    bounded = tl.minimum(log_rho, LOG_RATIO_MAX)
    ratio = tl.exp(bounded)
    inside = log_rho <= LOG_RATIO_MAX
    excess = expm1(bounded)

    # How far the policy has moved.
    kl_mean = kl_term(tl.exp(bounded * 0.0), ratio, bounded)
    sampled_kl = binary_kl(tl.minimum(old, CERTAIN), tl.minimum(new, CERTAIN))
    kl_max = sampled_kl
    tv = 0.0 * ratio
    reverse = 0.0 * ratio
    if SUPPORT:
        slot = tl.arange(0, SLOTS)[None, :]
        at, each = row[:, None], there[:, None]
        p = tl.load(kept + at * stride_kept + slot, mask=each & (slot < slots), other=-float("inf"))
        p = tl.where(slot == slots, tl.load(rest + at, mask=each, other=0.0), p)
        q = tl.load(kept_old + at * slots + slot, mask=each & (slot < slots), other=-float("inf")).to(tl.float32)
        q = tl.where(slot == slots, tl.load(rest_old + at, mask=each, other=0.0).to(tl.float32), q)
        flawed = flawed | (tl.max(tl.where((p < float("inf")) & (q < float("inf")), 0, 1), 1) > 0)
        flawed = flawed | disagree(tl.sum(tl.where(slot == 0, q, 0.0), 1), old)
        flawed = flawed | no_distribution(tl.sum(tl.exp(p), 1), slack) | no_distribution(tl.sum(tl.exp(q), 1), slack)
        kl_mean = tl.sum(kl_elements(p, q), 1)
        kl_max = kl_mean
        if MEASURE == 3:
            tv = 0.5 * tl.sum(abs_difference(q, p), 1)
        if MEASURE == 4:
            reverse = tl.sum(kl_elements(q, p), 1)

    # The loss, its derivative with respect to log π, and whether the region acted.
    plain = ratio * advantage
    least, most = low, high
    if MEASURE == 5:
        spread = tl.exp(-0.5 * old)  # 1/√π_old
        least, most = 1.0 - low * spread, 1.0 + high * spread
    beyond = ((ratio > most) & (advantage > 0.0)) | ((ratio < least) & (advantage < 0.0))
    if RULE == 0:
        clipped = tl.minimum(tl.maximum(ratio, least), most) * advantage
        surrogate = tl.minimum(plain, clipped)
        flows = (plain <= clipped) & inside
        acted = beyond
        if CAPPED:
            cut = (advantage < 0.0) & (surrogate < cap * advantage)
            surrogate = tl.where(cut, cap * advantage, surrogate)
            flows = flows & ~cut
            acted = acted | ((ratio > cap) & (advantage < 0.0))
        loss, own = -surrogate, tl.where(flows, -plain, 0.0)
    elif RULE == 1:
        moved = tl.abs(excess)
        if MEASURE == 1:
            moved = abs_difference(old, new)
        if MEASURE == 2:
            moved = sampled_kl
        if MEASURE == 3:
            moved = tv
        if MEASURE == 4:
            moved = reverse
        blocks = log_rho * advantage > 0.0
        if SYMMETRIC:
            blocks = advantage != 0.0
        acted = (moved > tl.where(advantage > 0.0, high, low)) & blocks
        if CAPPED:
            loss = -tl.minimum(ratio, cap) * advantage
            own = loss
        else:
            loss = -plain
            own = tl.where(inside, loss, 0.0)
        loss, own = tl.where(acted, 0.0, loss), tl.where(acted, 0.0, own)
    elif RULE == 2:
        own = -tl.minimum(tl.maximum(ratio, low), high) * advantage
        loss = own * new
        acted = ((ratio < low) | (ratio > high)) & (advantage != 0.0)
    elif RULE == 3:
        tau = tl.where(advantage > 0.0, high, low)
        gate = 1.0 / (1.0 + tl.exp(-tau * excess))
        slope = 4.0 * gate * (1.0 - gate)
        loss = -4.0 / tau * gate * advantage
        own = tl.where(inside, -slope * plain, 0.0)
        acted = (slope < 0.5) & (advantage != 0.0)
    elif RULE == 5:
        weight = tl.exp(tl.minimum(tl.where(advantage > 0.0, -log_rho, log_rho), LOG_RATIO_MAX))
        loss = tl.where(beyond, 0.0, -tl.minimum(weight, cap) * advantage)
        own = loss
        acted = beyond | ((weight > cap) & (advantage != 0.0))
    else:
        moved = excess
        if MEASURE == 1:
            moved = tl.exp(old) * excess
        loss = -(1.0 + excess) * advantage + tl.abs(advantage) * excess * moved / (2.0 * low)
        own = tl.where(inside, ratio * (-advantage + tl.abs(advantage) * moved / low), 0.0)
        sign = tl.where(advantage > 0.0, 1.0, tl.where(advantage < 0.0, -1.0, 0.0))
        acted = moved * sign > low

    gap = 0.0 * ratio
    if ROLLOUT:
        sampled = tl.load(rollout + row, mask=there, other=0.0).to(tl.float32)
        gap = abs_difference(sampled, old)
        flawed = flawed | ~(tl.abs(sampled) < float("inf")) | (sampled > 1.001 * highest)
        if DECOUPLED:
            weight = tl.exp(tl.minimum(old - sampled, LOG_RATIO_MAX))
            loss, own = loss * weight, own * weight
    flawed = flawed | ~(tl.abs(loss) < float("inf"))
    if POLICY:
        c = tl.load(policy_weights + row, mask=there, other=0.0).to(tl.float32)
        own = tl.where(c == 0.0, 0.0, own * c)
    field = fields + row
    tl.store(field, loss, mask=there)
    tl.store(field + 1 * count, log_rho, mask=there)
    tl.store(field + 2 * count, acted.to(tl.float32), mask=there)
    tl.store(field + 3 * count, kl_mean, mask=there)
    tl.store(field + 4 * count, kl_max, mask=there)
    tl.store(field + 5 * count, 0.0 * ratio, mask=there)
    tl.store(field + 6 * count, 0.0 * ratio, mask=there)
    tl.store(field + 7 * count, 0.0 * ratio + 1.0, mask=there)
    tl.store(field + 8 * count, gap, mask=there)
    tl.store(field + 9 * count, flawed.to(tl.float32), mask=there)
    tl.store(field + 10 * count, 0.0 * ratio, mask=there)
    tl.store(out_own + row, own, mask=there)
