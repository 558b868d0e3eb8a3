"""Per-token losses in kernels: read a batch's rows, project, and write loss and gradient factors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

import corral.numerics as numerics
from corral.head.rows import HeadRows
from corral.objective import Objective
from corral.objective.config import ProjectionRule, TokenRule
from corral.projection import categorical_kl as reference
from corral.support import ANCHOR_TOLERANCE, LogpTolerance

RULED_OUT: tl.constexpr = tl.constexpr(reference.RULED_OUT)
LOG_RATIO_MAX: tl.constexpr = tl.constexpr(numerics.LOG_RATIO_MAX)
CERTAIN: tl.constexpr = tl.constexpr(numerics.CERTAIN)


@triton.jit
@no_type_check
def log_softmax(x):
    """x − log Σ eˣ."""
    top = tl.max(x, 0)
    return x - (top + tl.log(tl.sum(tl.exp(x - top), 0)))


@triton.jit
@no_type_check
def kl_term(p, q, gap):
    """p (eˣ − 1 − x) for x = log q − log p: by its series where that is small, as q − p − p x elsewhere."""
    near = tl.abs(gap) < 0.5
    x = tl.where(near, gap, 0.0)
    series = 1 / 40320 + x * (1 / 362880)
    series = 1 / 120 + x * (1 / 720 + x * (1 / 5040 + x * series))
    series = 0.5 + x * (1 / 6 + x * (1 / 24 + x * series))
    return tl.where(near, p * x * x * series, q - p - p * gap)


@triton.jit
@no_type_check
def kl_elements(log_p, log_q):
    """The terms of KL(p‖q): q where p = 0, inf where only q is."""
    both = (log_p > -float("inf")) & (log_q > -float("inf"))
    term = kl_term(tl.exp(log_p), tl.exp(log_q), tl.where(both, log_q - log_p, 1.0))
    return tl.where((log_p > -float("inf")) & (log_q == -float("inf")), float("inf"), term)


@triton.jit
@no_type_check
def expm1(x):
    """eˣ − 1, by its series where that is small."""
    near = tl.abs(x) < 0.5
    y = tl.where(near, x, 0.0)
    series = 1 / 5040 + y * (1 / 40320 + y * (1 / 362880 + y * (1 / 3628800)))
    series = 1.0 + y * (0.5 + y * (1 / 6 + y * (1 / 24 + y * (1 / 120 + y * (1 / 720 + y * series)))))
    return tl.where(near, y * series, tl.exp(x) - 1.0)


@triton.jit
@no_type_check
def log1p(x):
    """log(1 + x), with the rounding of 1 + x undone."""
    one_more = 1.0 + x
    off = tl.where(one_more == 1.0, 1.0, one_more - 1.0)
    return tl.where(one_more == 1.0, x, tl.log(one_more) * (x / off))


@triton.jit
@no_type_check
def abs_difference(log_p, log_q):
    """|p − q| as max(p, q) (1 − e^−|log p − log q|)."""
    neither = (log_p == -float("inf")) & (log_q == -float("inf"))
    gap = tl.where(neither, 0.0, log_p) - tl.where(neither, 0.0, log_q)
    return tl.exp(tl.maximum(log_p, log_q)) * -expm1(-tl.abs(gap))


@triton.jit
@no_type_check
def binary_kl(log_p, log_q):
    """KL between (p, 1 − p) and (q, 1 − q), as `divergence.binary_kl` has it."""
    sure_p, sure_q = log_p >= 0.0, log_q >= 0.0
    rest_p = tl.where(sure_p, -float("inf"), tl.log(-expm1(tl.where(sure_p, -1.0, log_p))))
    rest_q = tl.where(sure_q, -float("inf"), tl.log(-expm1(tl.where(sure_q, -1.0, log_q))))
    both = (rest_p > -float("inf")) & (rest_q > -float("inf"))
    gap = tl.where(both, rest_q - rest_p, 1.0)
    step = log_q - log_p
    near = both & (tl.abs(gap) < 0.5) & (tl.abs(step) < 0.5)  # further apart nothing cancels, and e^step may overflow
    p = tl.where(near, log_p, -1.0)
    step = tl.where(near, step, 0.0)
    gap = tl.where(near, log1p(tl.exp(p) * expm1(step) / expm1(p)), gap)
    other = kl_term(tl.exp(rest_p), tl.exp(rest_q), gap)
    other = tl.where((rest_p > -float("inf")) & (rest_q == -float("inf")), float("inf"), other)
    return kl_elements(log_p, log_q) + other


@triton.jit
@no_type_check
def tilt(t, log_old, p, d, common):
    """r_t ∝ old · e^{t d}: log r, KL(r‖old) and Var_r(d)."""
    step = t * d
    x = tl.where(common, log_old + step, -float("inf"))
    top = tl.max(x, 0)
    log_normaliser = top + tl.log(tl.sum(tl.exp(x - top), 0))
    gap = tl.where(common, log_normaliser - step, 0.0)
    log_r = tl.where(common, log_old - gap, -float("inf"))
    r = tl.exp(log_r)
    mean = tl.sum(r * d, 0)
    return log_r, tl.sum(kl_term(r, p, gap), 0), tl.sum(r * (d - mean) * (d - mean), 0)


@triton.jit
@no_type_check
def project(new, old, bound):
    """The row's projection: log r, t, whether the bound binds, KL(r‖old), converged. `find_root` and `_project_rows` in one."""
    common = (new > RULED_OUT) & (old > RULED_OUT)
    overlap = tl.max(common.to(tl.int32), 0) > 0
    lost = tl.max(((old > RULED_OUT) & ~common).to(tl.int32), 0) > 0
    old_common = tl.where(common, old, -float("inf"))
    top = tl.where(overlap, tl.max(old_common, 0), 0.0)
    held = top + tl.log(tl.sum(tl.exp(old_common - top), 0))
    cost = tl.where(lost, -held, 0.0)
    slack = bound - cost
    log_old = tl.where(common, old - held, -float("inf"))
    p = tl.exp(log_old)
    d = tl.where(common, new - old, 0.0)
    # Less a likely token's, as the reference does it, or the mean of several that are equally likely.
    guess = tl.where(common, log_old + d / 8, -float("inf"))
    likeliest = guess == tl.max(guess, 0)
    d = tl.where(common, d - tl.sum(tl.where(likeliest, d, 0.0), 0) / tl.sum(likeliest.to(tl.float32), 0), 0.0)
    _end_r, kl_common, _end_variance = tilt(1.0, log_old, p, d, common)
    fits = kl_common <= slack
    binding = overlap & (slack > 0.0) & (kl_common > slack)

    target = tl.sqrt(2.0 * tl.maximum(slack, 0.0))
    x = tl.where(binding, tl.sqrt(slack / kl_common), 1.0)
    low, high, last, older = x * 0.0, x * 0.0 + 1.0, x * 0.0 + 1.0, x * 0.0 + 1.0
    todo = tl.where(binding, 24, 0)
    converged = ~binding
    while todo > 0:
        _trial_r, kl, variance = tilt(x, log_old, p, d, common)
        log_slope = x * variance / kl
        root_kl = tl.sqrt(2.0 * kl)
        steep = log_slope * x > 4.0
        value = tl.where(steep, 0.5 * target * tl.log(kl / slack), root_kl - target)
        slope = tl.where(steep, 0.5 * target * log_slope, 0.5 * root_kl * log_slope)
        low = tl.where(value < 0.0, tl.maximum(low, x), low)
        high = tl.where(value > 0.0, tl.minimum(high, x), high)
        newton = x - value / slope
        exact = tl.abs(value) <= 4 * 1.1920929e-07 * target
        short = tl.abs(newton - x) <= 2.4222e-05 * x  # eps^⅔
        good = (newton > low) & (newton < high) & (tl.abs(newton - x) <= 0.5 * older)
        proposal = tl.where(good, newton, tl.where(short, x, 0.5 * (low + high)))
        older = last
        last = tl.abs(proposal - x)
        x = tl.where(exact, x, proposal)
        converged = exact | short
        todo = tl.where(converged, 0, todo - 1)

    t = tl.where(binding, x, tl.where(fits & overlap, 1.0, 0.0))
    log_r, kl_after, _last_variance = tilt(t, log_old, p, d, common)
    log_r = tl.where(overlap, log_r, old)
    return log_r, t, binding, tl.where(overlap, kl_after + cost, 0.0), converged & overlap & (slack >= 0.0)


LOSS, LOG_RHO, ACTED, KL_MEAN, KL_MAX, KL_AFTER, DUAL, CONVERGED, MISMATCH, FLAWED, REGRESSION = range(11)
"""Rows of `LossRows.fields`. The mean and the largest KL are of two estimates where there is no support."""
FIELDS = 11
TOLERATED: tl.constexpr = tl.constexpr(ANCHOR_TOLERANCE)
UNCHECKED = LogpTolerance()
"""For a new policy that a head has just computed, and an old one that has been inspected."""


@dataclass(frozen=True, eq=False)
class OldRows:
    """The old policy at N packed tokens, and what they were worth."""

    logp: Tensor
    """Log-probability of the sampled token [N]."""
    kept: Tensor | None
    rest: Tensor | None
    """On its support [N, K], whose slot 0 is the sampled token, and outside it [N]."""
    advantages: Tensor
    rollout: Tensor | None
    """What the sampler reported [N]."""
    rest_max: Tensor | None = None
    """Largest log-probability outside the support [N], where it is known."""
    policy_weights: Tensor | None = None
    """c: what the policy term is multiplied with [N]; 1 where None."""
    ids: Tensor | None = None
    place: Tensor | None = None
    """With a union of supports: its support [N, K], and which of the old hidden states is each token's [N]; −1 for none."""

    def each(self, pick: Callable[[Tensor], Tensor]) -> "OldRows":
        """Something done to every field."""
        optional = (self.kept, self.rest, self.rollout, self.rest_max, self.policy_weights, self.ids, self.place)
        kept, rest, *others = (None if x is None else pick(x) for x in optional)
        return OldRows(pick(self.logp), kept, rest, pick(self.advantages), *others)


@dataclass(frozen=True, eq=False)
class LossRows:
    """Losses of N packed tokens, and the gradients of c · policy + regression with respect to log-probs."""

    fields: Tensor
    """[FIELDS, N]; the loss is policy + regression."""
    own: Tensor | None
    """d / d log π of the sampled token [N]."""
    kept: Tensor | None
    rest: Tensor | None
    """d / d log π on the support [N, K], and of the tail mass [N]."""
    rest_old: Tensor | None = None
    """Log mass of the old policy's tail, where a union of supports has taken from it [N]."""

    @classmethod
    def join(cls, parts: list["LossRows"]) -> "LossRows":
        """Tokens one behind the other."""
        if len(parts) == 1:
            return parts[0]
        gradients = ([getattr(x, name) for x in parts] for name in ("own", "kept", "rest", "rest_old"))
        return cls(torch.cat([x.fields for x in parts], 1), *(None if x[0] is None else torch.cat(x) for x in gradients))


def blank_fields(like: Tensor) -> Tensor:
    """Memory for the fields of as many tokens as `like` has."""
    return torch.empty(FIELDS, len(like), device=like.device)


def summarize(
    loss: LossRows, rows: HeadRows, old: OldRows, weights: Tensor | None = None, *, projects: bool
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """What the objective reports, Σ w (c · policy + regression), and how many tokens are flawed."""
    out = torch.empty(FIELDS + 2, device=rows.lse.device)
    support, tail, count = old.rest is not None, old.rest is not None and old.rest_max is not None, len(rows.lse)
    _metrics_kernel[(1,)](
        loss.fields, old.rest, rows.rest, rows.rest_max, old.rest_max, weights, old.policy_weights, out, count,
        SUPPORT=support, TAIL=tail, WEIGHTS=weights is not None, POLICY=old.policy_weights is not None,
        BLOCK=min(2048, triton.next_power_of_2(count)), num_warps=8,
    )  # fmt: skip
    names = {"tr/active_frac": ACTED, "tr/ratio_max": LOG_RHO, "tr/kl_before": KL_MEAN, "tr/kl_max": KL_MAX}
    if support:
        names["tr/rest_mass"] = LOSS  # whose own mean is no metric
    if projects:
        names |= {"tr/kl_after": KL_AFTER, "tr/dual": DUAL, "tr/unconverged": CONVERGED}
    if old.rollout is not None:
        names["tr/mismatch"] = MISMATCH
    if tail:
        names |= {"tr/rest_max_ratio": FIELDS, "tr/hidden_kl_max": FIELDS + 1}
    found = out.unbind()
    return {name: found[place] for name, place in names.items()}, found[REGRESSION], found[FLAWED]


@triton.jit
@no_type_check
def disagree(own, anchor):
    """Whether an old policy's support says something else of the sampled token; the objective, called then, says so too."""
    return ~(tl.abs(own - anchor) <= 1.001 * TOLERATED)


@triton.jit
@no_type_check
def no_distribution(mass, slack):
    """Whether a mass is not 1; a little less strict than the objective, which is called then, and says so too."""
    return tl.abs(mass - 1.0) > 1.001 * slack


@triton.jit
@no_type_check
def _metrics_kernel(
    fields, rest, rest_new, max_new, max_old, weights, policy_weights, out, count, SUPPORT: tl.constexpr, TAIL: tl.constexpr,
    WEIGHTS: tl.constexpr, POLICY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program, so that the sums are the same every time."""
    zero = tl.zeros((BLOCK,), tl.float32)
    tail_gap, hidden = zero - float("inf"), zero
    acted, kl, after, dual, projected = zero, zero, zero, zero, zero
    unconverged, mismatch, flawed, mass, total = zero, zero, zero, zero, zero
    log_rho, most = zero - float("inf"), zero - float("inf")
    for begin in range(0, count, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        valid = row < count
        here = fields + row
        log_rho = tl.maximum(log_rho, tl.load(here + 1 * count, mask=valid, other=-float("inf")))
        on = tl.load(here + 2 * count, mask=valid, other=0.0)
        acted += on
        kl += tl.load(here + 3 * count, mask=valid, other=0.0)
        most = tl.maximum(most, tl.load(here + 4 * count, mask=valid, other=-float("inf")))
        after += tl.load(here + 5 * count, mask=valid, other=0.0)
        eta = tl.load(here + 6 * count, mask=valid, other=0.0)
        finite = (on > 0.0) & (eta < float("inf"))
        dual += tl.where(finite, eta, 0.0)
        projected += tl.where(finite, 1.0, 0.0)
        unconverged += 1.0 - tl.load(here + 7 * count, mask=valid, other=1.0)
        mismatch += tl.load(here + 8 * count, mask=valid, other=0.0)
        flawed += tl.load(here + 9 * count, mask=valid, other=0.0)
        if WEIGHTS:
            weight = tl.load(weights + row, mask=valid, other=0.0).to(tl.float32)
            pull = tl.load(here + 10 * count, mask=valid, other=0.0)
            policy = tl.load(here, mask=valid, other=0.0) - pull
            if POLICY:
                c = tl.load(policy_weights + row, mask=valid, other=0.0).to(tl.float32)
                policy = tl.where(c == 0.0, 0.0, policy * c)
            total += tl.where(weight == 0.0, 0.0, weight * (policy + pull))
        if SUPPORT:
            mass += tl.exp(tl.load(rest + row, mask=valid, other=-float("inf")).to(tl.float32))
        if TAIL:  # `support.tail_gap` and `support.hidden_kl`
            new = tl.load(max_new + row, mask=valid, other=-float("inf")).to(tl.float32)
            old = tl.load(max_old + row, mask=valid, other=float("inf")).to(tl.float32)
            empty = (new == -float("inf")) & (old == -float("inf"))
            tail_gap = tl.maximum(tail_gap, tl.where(empty, 0.0, new - old))
            left_new = tl.load(rest_new + row, mask=valid, other=0.0).to(tl.float32)
            log_q, log_b = new - left_new, old - tl.load(rest + row, mask=valid, other=0.0).to(tl.float32)
            moved = log_q > log_b
            log_q, log_b = tl.where(moved, log_q, 0.0), tl.where(moved, log_b, 0.0)
            unseen = tl.exp(left_new) * (tl.exp(log_q) * (log_q - log_b - 1.0) + tl.exp(log_b))
            hidden = tl.maximum(hidden, tl.where(moved, unseen, 0.0))
    tl.store(out + 0, tl.sum(mass, 0) / count)
    tl.store(out + 1, tl.exp(tl.minimum(tl.max(log_rho, 0), LOG_RATIO_MAX)))
    tl.store(out + 2, tl.sum(acted, 0) / count)
    tl.store(out + 3, tl.sum(kl, 0) / count)
    tl.store(out + 4, tl.max(most, 0))
    tl.store(out + 5, tl.sum(after, 0) / count)
    tl.store(out + 6, tl.sum(dual, 0) / tl.maximum(tl.sum(projected, 0), 1.0))
    tl.store(out + 7, tl.sum(unconverged, 0))
    tl.store(out + 8, tl.sum(mismatch, 0) / count)
    tl.store(out + 9, tl.sum(flawed, 0))
    tl.store(out + 10, tl.sum(total, 0))
    if TAIL:
        tl.store(out + 11, tl.exp(tl.minimum(tl.max(tail_gap, 0), 20.0)))
        tl.store(out + 12, tl.max(hidden, 0))


CLIP, MASK, WEIGHT, GATE, PENALTY, FLIP = range(6)
RATIO, BINARY_TV, BINARY_KL, SUPPORT_TV, SUPPORT_KL, CHI_SQUARE = range(6)
"""What a clip, a mask or a penalty measures."""
_RULES = {"clip": CLIP, "mask": MASK, "weight": WEIGHT, "gate": GATE, "penalty": PENALTY, "flip": FLIP}
_MEASURES = {
    "ratio": RATIO, "binary_tv": BINARY_TV, "binary_kl": BINARY_KL,
    "support_tv": SUPPORT_TV, "support_kl": SUPPORT_KL, "chi_square": CHI_SQUARE,
}  # fmt: skip
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
        """The loss that an objective declares, or None if it declares no such rule."""
        rule = objective.kernel if isinstance(objective, Objective) else None  # any function of a batch is an objective
        if not isinstance(rule, TokenRule):
            return None
        return cls(**vars(rule) | {"rule": _RULES[rule.rule], "measure": _MEASURES[rule.measure]})

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


EXACT, CONSTANT_DUAL, UNPROJECTED = 0, 1, 2
GRADIENTS = {"exact": EXACT, "constant_dual": CONSTANT_DUAL, "unprojected": UNPROJECTED}


@dataclass(frozen=True, kw_only=True)
class TrollLoss:
    """The settings of `troll` that the kernel reads; a function of new and old rows."""

    projects: ClassVar[bool] = True
    needs_support: ClassVar[bool] = True
    needs_rollout: ClassVar[bool] = False

    bound: float
    regression: float
    gradient: str
    ratio_cap: float | None
    outward: bool
    """Leave tokens alone whose own step leads back."""

    @classmethod
    def of(cls, objective: Any) -> "TrollLoss | None":
        """The settings that an objective declares, or None if it declares no such rule."""
        rule = objective.kernel if isinstance(objective, Objective) else None  # any function of a batch is an objective
        return cls(**vars(rule)) if isinstance(rule, ProjectionRule) else None

    def __call__(self, rows: HeadRows, old: OldRows, limits: LogpTolerance = UNCHECKED) -> LossRows:
        """L = − (π̃(a) / π_old(a)) Â + α KL(π‖sg[π̃]) of N packed tokens; flawed are those beyond the limits too."""
        assert old.kept is not None
        assert old.rest is not None
        count, slots = rows.kept.shape
        fields, g_rest = blank_fields(rows.lse), torch.empty_like(rows.lse)
        g_kept = torch.empty(count, slots, device=g_rest.device)
        _troll_kernel[(count,)](
            rows.kept, rows.rest, old.kept, old.rest, old.logp, old.rollout, old.advantages, old.policy_weights, fields,
            g_kept, g_rest,
            count, slots, rows.kept.stride(0), *limits, self.bound, self.regression, self.ratio_cap or 0.0,
            CAPPED=self.ratio_cap is not None, GRADIENT=GRADIENTS[self.gradient], ROLLOUT=old.rollout is not None,
            POLICY=old.policy_weights is not None, OUTWARD=self.outward,
            SLOTS=max(2, triton.next_power_of_2(slots + 1)), num_warps=1,
        )  # fmt: skip
        return LossRows(fields, None, g_kept, g_rest)


@triton.jit
@no_type_check
def _troll_kernel(
    kept, rest, kept_old, rest_old, logp_old, rollout, advantages, policy_weights, fields, g_kept, g_rest, count, slots,
    stride, highest, slack, bound, regression, cap, CAPPED: tl.constexpr, GRADIENT: tl.constexpr, ROLLOUT: tl.constexpr,
    POLICY: tl.constexpr, OUTWARD: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    here = slot < slots
    new = tl.load(kept + row * stride + slot, mask=here, other=-float("inf"))
    new = tl.where(slot == slots, tl.load(rest + row), new)
    old = tl.load(kept_old + row * slots + slot, mask=here, other=-float("inf")).to(tl.float32)
    old = tl.where(slot == slots, tl.load(rest_old + row).to(tl.float32), old)
    advantage = tl.load(advantages + row).to(tl.float32)
    first = slot == 0
    flawed = (tl.max(tl.where(new < float("inf"), 0, 1), 0) > 0) | ~(
        tl.abs(tl.sum(tl.where(first, new, 0.0), 0)) < float("inf")
    )
    anchor = tl.load(logp_old + row).to(tl.float32)
    flawed = flawed | disagree(tl.sum(tl.where(first, old, 0.0), 0), anchor) | (anchor > 1.001 * highest)
    flawed = flawed | no_distribution(tl.sum(tl.exp(new), 0), slack) | no_distribution(tl.sum(tl.exp(old), 0), slack)

    plain = tl.sum(tl.where(first, new, 0.0), 0) - tl.sum(tl.where(first, old, 0.0), 0)
    new, old = log_softmax(new), log_softmax(old)
    own_old = tl.sum(tl.where(first, old, 0.0), 0)
    p = tl.exp(new)
    kl_before = tl.sum(kl_elements(new, old), 0)
    active = kl_before > bound
    if OUTWARD:  # dKL/ds along z ← z + s Â (e_a − π), as the reference has it
        shared = (new > RULED_OUT) & (old > RULED_OUT)
        force = tl.where(shared, p * (tl.where(shared, new - old, 0.0) - kl_before), 0.0)
        rise = tl.sum(tl.where(first, force, 0.0), 0) - tl.sum(p * force, 0)
        active = active & ~((kl_before < float("inf")) & (rise * advantage < 0.0))
    log_r, t, binding, kl_after = new, tl.full((), 1.0, tl.float32), active, kl_before
    converged = kl_before == kl_before
    if active:
        log_r, t, binding, kl_after, converged = project(new, old, bound)

    own_r = tl.sum(tl.where(first, log_r, 0.0), 0)
    # Inside the region the log-probs' own difference: equal policies have a ratio of exactly 1.
    log_rho = plain if GRADIENT == 2 else tl.where(active, own_r - own_old, plain)
    ratio = tl.exp(tl.minimum(log_rho, LOG_RATIO_MAX))
    if CAPPED:
        ratio = tl.minimum(ratio, cap)
        u = -ratio * advantage
    else:
        u = tl.where(log_rho <= LOG_RATIO_MAX, -ratio * advantage, 0.0)
    loss = -ratio * advantage
    if POLICY:
        c = tl.load(policy_weights + row).to(tl.float32)
        u = tl.where(c == 0.0, 0.0, u * c)

    # d log r_a / d log new, in closed form: t (δ − r (1 + z_a z)) where the bound acts, δ where it does not.
    r = tl.exp(log_r)
    g = tl.where(first, u, 0.0)
    if GRADIENT != 2:  # noqa: SIM102 (decided when compiling, and the other when running)
        if active:
            common = (new > RULED_OUT) & (old > RULED_OUT)
            d = tl.where(common, new - old, 0.0)
            centred = tl.where(common, d - tl.sum(r * d, 0), 0.0)
            radial = 0.0 * t
            if GRADIENT == 0:
                variance = tl.where(binding, tl.sum(r * centred * centred, 0), 1.0)
                radial = tl.where(binding, u * tl.sum(tl.where(first, centred, 0.0), 0) / variance, 0.0)
            g = t * (g - r * (u + radial * centred))
    pull = 0.0 * loss
    if active & (regression > 0.0):
        pull = regression * tl.sum(kl_elements(tl.where(new > RULED_OUT, new, -float("inf")), log_r), 0)
        g += regression * tl.where(p > 0.0, p * (new - log_r), 0.0)
    g = tl.where(new > -float("inf"), g - p * tl.sum(g, 0), 0.0)

    loss += pull

    # Both: the smaller of NaN and a number is the number, and so the loss is one where the ratio is none.
    flawed = flawed | ~(log_rho < float("inf")) | ~(tl.abs(loss) < float("inf"))
    at = fields + row
    tl.store(at, loss)
    tl.store(at + 1 * count, log_rho)
    tl.store(at + 2 * count, active.to(tl.float32))
    tl.store(at + 3 * count, kl_before)
    tl.store(at + 4 * count, kl_before)
    tl.store(at + 5 * count, kl_after)
    tl.store(at + 6 * count, (1.0 - t) / t)
    tl.store(at + 7 * count, converged.to(tl.float32))
    gap = 0.0 * t
    if ROLLOUT:
        sampled = tl.load(rollout + row).to(tl.float32)
        gap = abs_difference(sampled, anchor)
        flawed = flawed | ~(tl.abs(sampled) < float("inf")) | (sampled > 1.001 * highest)
    tl.store(at + 8 * count, gap)
    tl.store(at + 9 * count, flawed.to(tl.float32))
    tl.store(at + 10 * count, pull)
    tl.store(g_kept + row * slots + slot, g, mask=here)
    tl.store(g_rest + row, tl.sum(tl.where(slot == slots, g, 0.0), 0))


LossRule = TrollLoss | TokenLoss


def rule_of(objective: Any) -> LossRule | None:
    """The kernel that computes an objective's loss of a token, if there is one."""
    return TrollLoss.of(objective) or TokenLoss.of(objective)
