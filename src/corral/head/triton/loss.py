"""Per-token losses and their gradients in Triton, for objectives with weights, clipping, masks, penalties or projections."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

import corral.numerics as numerics
from corral.head.packed import has_token_shapes
from corral.head.rows import Upstream
from corral.head.triton.gemm_stats import lanes
from corral.objective import Objective
from corral.objective.config import ProjectionRule, TokenRule
from corral.projection import categorical_kl as reference
from corral.support import ANCHOR_TOLERANCE, LogpTolerance
from corral.tensors import ObjectiveOutput, TokenBatch

RULED_OUT, LOG_RATIO_MAX, CERTAIN, TOLERATED = (
    tl.constexpr(x) for x in (reference.RULED_OUT, numerics.LOG_RATIO_MAX, numerics.CERTAIN, ANCHOR_TOLERANCE)
)
UNCHECKED = LogpTolerance()
"""Limits that accept every log-prob, for a batch whose log-probs have been validated before.
The new policy comes from the LM head, and the old policy has been checked."""

FIELDS = LOSS, LOG_RHO, ACTED, KL_MEAN, KL_MAX, KL_AFTER, DUAL, CONVERGED, MISMATCH, FLAWED, REGRESSION = tuple(
    map(tl.constexpr, range(11))
)
"""Indices of the per-token results in the tensor `LossRows.fields`.
Without top-k tokens, KL_MEAN and KL_MAX use two different estimates."""
REST_MAX_RATIO, HIDDEN_KL_MAX = tl.constexpr(11), tl.constexpr(12)
"""Indices of two more metrics in the output of the metrics kernel, after the metrics from `LossRows.fields`."""
LANES = 256
"""Number of elements (rows times top-k slots) that one Triton program processes."""


@triton.jit
def log_softmax(x):
    """Compute the log-softmax x − log Σ eˣ of a vector."""
    top = tl.max(x, 0)
    return x - (top + tl.log(tl.sum(tl.exp(x - top), 0)))


@triton.jit
def kl_term(p, q, gap):
    """Compute one term of a KL, p (eˣ − 1 − x) for x = log q − log p, without cancellation if x is small.

    A series is used if x is small, and q − p − p x elsewhere.
    """
    # A KL near 0 is a sum of such terms, each of second order: as q − p − p x its digits would cancel. The series has as many
    # terms as float32 can tell apart for |x| < ½, and Horner's form needs no powers.
    near = tl.abs(gap) < 0.5
    x = tl.where(near, gap, 0.0)
    series = 1 / 40320 + x * (1 / 362880)
    series = 1 / 120 + x * (1 / 720 + x * (1 / 5040 + x * series))
    series = 0.5 + x * (1 / 6 + x * (1 / 24 + x * series))
    return tl.where(near, p * x * x * series, q - p - p * gap)


@triton.jit
def kl_elements(log_p, log_q):
    """Compute the terms of KL(p‖q), one per category: q where p = 0, inf where only q is 0."""
    both = (log_p > -float("inf")) & (log_q > -float("inf"))
    term = kl_term(tl.exp(log_p), tl.exp(log_q), tl.where(both, log_q - log_p, 1.0))
    return tl.where((log_p > -float("inf")) & (log_q == -float("inf")), float("inf"), term)


@triton.jit
def expm1(x):
    """Compute eˣ − 1, as a series if x is small."""
    near = tl.abs(x) < 0.5
    y = tl.where(near, x, 0.0)
    series = 1 / 5040 + y * (1 / 40320 + y * (1 / 362880 + y * (1 / 3628800)))
    series = 1.0 + y * (0.5 + y * (1 / 6 + y * (1 / 24 + y * (1 / 120 + y * (1 / 720 + y * series)))))
    return tl.where(near, y * series, tl.exp(x) - 1.0)


@triton.jit
def log1p(x):
    """Compute log(1 + x), with a correction for the rounding of 1 + x."""
    # What rounding did to 1 + x it did to the denominator too, and the quotient undoes it (Kahan; Goldberg 1991, theorem 4).
    one_more = 1.0 + x
    off = tl.where(one_more == 1.0, 1.0, one_more - 1.0)
    return tl.where(one_more == 1.0, x, tl.log(one_more) * (x / off))


@triton.jit
def abs_difference(log_p, log_q):
    """Compute |p − q| from log p and log q, as max(p, q) (1 − e^−|log p − log q|)."""
    neither = (log_p == -float("inf")) & (log_q == -float("inf"))
    gap = tl.where(neither, 0.0, log_p) - tl.where(neither, 0.0, log_q)
    return tl.exp(tl.maximum(log_p, log_q)) * -expm1(-tl.abs(gap))


@triton.jit
def binary_kl(log_p, log_q):
    """Compute the KL between the two-way distributions (p, 1 − p) and (q, 1 − q), like `divergence.binary_kl`."""
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
def tilt(t, log_old, p, d, common):
    """Compute the tilted policy r ∝ old · e^{t d}: its log-probs, KL(r‖old), and the variance of d under r.

    d is log new − log old, up to a constant.
    """
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
def project(new, old, bound):
    """Project one token's distribution onto the KL ball around the old policy, with Newton's method.

    Returns log r, t, whether the bound binds, KL(r‖old), and whether the iteration converged.

    Fuses `find_root` and `_project_rows` of the PyTorch projection.
    """
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

    # Find t in (0, 1) with KL(r_t‖old) = slack. √(2 KL) is nearly linear in t, so that Newton's method needs two or three steps
    # from √(slack / KL(1)); where the KL rises steeply its logarithm is the better line. Every step keeps a bracket, and
    # bisects if Newton leaves it or shrinks too slowly, so that 24 steps are enough for any row. d KL / dt = t Var.
    target = tl.sqrt(2.0 * tl.maximum(slack, 0.0))
    x = tl.where(binding, tl.sqrt(slack / kl_common), 1.0)
    low, high, last, older = x * 0.0, x * 0.0 + 1.0, x * 0.0 + 1.0, x * 0.0 + 1.0
    todo = tl.where(binding, 24, 0)  # a program has one row, and stops as soon as that one has converged
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


@dataclass(frozen=True, eq=False, kw_only=True)
class LossRows(Upstream):
    """Losses of N packed tokens, with their gradients with respect to the LM head's results."""

    SHARED: ClassVar[tuple[str, ...]] = ("fields",)

    fields: Tensor
    """Results of each token, such as loss and log-ratio, in the order of FIELDS [11, N].
    LOSS is policy + regression, LOG_RHO the log-ratio, and so on."""
    rest_old: Tensor | None
    """Log tail mass of the old policy [N], without the tokens that a union took out of the tail; None without top-k tokens."""

    def field(self, which: tl.constexpr) -> Tensor:
        """Return one result for all tokens [N]; the result is chosen by its index in FIELDS."""
        return self.fields[which.value]

    def output(self, rule: TokenRule | ProjectionRule, metrics: dict[str, Tensor]) -> ObjectiveOutput:
        """Convert the kernel's results to an ObjectiveOutput for packed tokens [1 N]."""
        out = ObjectiveOutput(self.field(LOSS)[None], metrics, self.field(ACTED)[None] > 0)
        if isinstance(rule, TokenRule):
            return out
        return replace(out, kl_after=self.field(KL_AFTER)[None], regression=self.field(REGRESSION)[None])

    @classmethod
    def cat(cls, parts: Sequence["LossRows"], dim: int = 0) -> "LossRows":
        """Concatenate the losses of several parts of a batch along the token axis N.

        It is the second axis of `fields`.
        """
        return replace(super().cat(parts, dim), fields=torch.cat([part.fields for part in parts], dim + 1))


def kernel_rule(objective: Any, batch: TokenBatch) -> TokenRule | ProjectionRule | None:
    """Return the Triton kernel's rule for an objective. Returns None if no kernel can compute the objective on this batch.

    Custom functions have none, and the batch may lack a required field.
    """
    if not isinstance(objective, Objective) or not has_token_shapes(batch):
        return None
    lacks_support = "dist_old" in objective.needs and batch.dist_old is None
    lacks_rollout = "logp_rollout" in objective.needs and batch.logp_rollout is None
    return None if lacks_support or lacks_rollout else objective.kernel


def row_losses(
    rule: TokenRule | ProjectionRule,
    batch: TokenBatch,
    policy_weights: Tensor | None = None,
    limits: LogpTolerance = UNCHECKED,
) -> LossRows:
    """Compute the losses of N packed tokens [1 N] and their gradients in one Triton kernel.

    A projection rule gives L = − (π̃(a) / π_old(a)) Â + α KL(π‖sg[π̃]), a token rule what its name says. Tokens beyond `limits`
    are marked invalid.
    """
    new, old, logp = batch.dist_new, batch.dist_old, batch.logp_new[0]
    count, device = len(logp), logp.device
    slots, anchor = (0, (None, None)) if old is None else (old.logp.shape[-1], (old.logp, old.rest))
    fields = torch.empty(len(FIELDS), count, device=device)
    given = *anchor, batch.logp_old, batch.logp_rollout, batch.advantages, policy_weights, fields
    rest_old = None if old is None else old.rest[0]
    width = lanes(slots + 1)  # the tail is one more category, in lane `slots`
    if isinstance(rule, ProjectionRule):
        assert new is not None  # it has a support
        g_kept, g_rest = torch.empty(count, slots, device=device), torch.empty(count, device=device)
        # One warp per row: the Newton steps of the projection are short and serial, and rows are many.
        _troll_kernel[(count,)](
            new.logp, new.rest, *given, g_kept, g_rest, count, slots, new.logp.stride(-2), *limits, rule.bound, rule.regression,
            rule.ratio_cap, GRADIENT=rule.gradient, OUTWARD=rule.outward, SLOTS=width, num_warps=1,
        )  # fmt: skip
        return LossRows(fields=fields, kept=g_kept, rest=g_rest, rest_old=rest_old)
    g_logp, block = torch.empty(count, device=device), max(1, LANES // width)
    kept, rest, stride = (None, None, 0) if new is None else (new.logp, new.rest, new.logp.stride(-2))
    _token_kernel[(triton.cdiv(count, block),)](
        logp, kept, rest, *given, g_logp, count, slots, logp.stride(0), stride, *limits, rule.low, rule.high, rule.cap,
        RULE=rule.rule, MEASURE=rule.measure, SYMMETRIC=rule.symmetric, DECOUPLED=rule.decoupled, SLOTS=width, ROWS=block,
        num_warps=1,
    )  # fmt: skip
    return LossRows(fields=fields, logp=g_logp, rest_old=rest_old)


def summarize(
    rule: TokenRule | ProjectionRule,
    batch: TokenBatch,
    loss: LossRows,
    weights: Tensor | None = None,
    policy_weights: Tensor | None = None,
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Compute the objective's metrics, the weighted sum of all token losses, and the number of invalid tokens.

    The sum is Σ w (c · policy + regression).
    """
    new, old, (_, count) = batch.dist_new, batch.dist_old, loss.fields.shape
    out = torch.empty(len(FIELDS) + 2, device=loss.fields.device)
    tail: tuple[Tensor, Tensor, Tensor] | tuple[None, None, None] = (None, None, None)
    if new is not None and old is not None and new.rest_max is not None and old.rest_max is not None:
        tail = new.rest, new.rest_max, old.rest_max
    _metrics_kernel[(1,)](
        loss.fields, loss.rest_old, *tail, weights, policy_weights, out, count,
        BLOCK=min(2048, triton.next_power_of_2(count)), num_warps=8,
    )  # fmt: skip
    names = {"tr/active_frac": ACTED, "tr/ratio_max": LOG_RHO, "tr/kl_before": KL_MEAN, "tr/kl_max": KL_MAX}
    if old is not None:
        names["tr/rest_mass"] = LOSS  # in the place of the mean loss, which is no metric
    if isinstance(rule, ProjectionRule):
        names |= {"tr/kl_after": KL_AFTER, "tr/dual": DUAL, "tr/unconverged": CONVERGED}
    if batch.logp_rollout is not None:
        names["tr/mismatch"] = MISMATCH
    if tail[0] is not None:
        names |= {"tr/rest_max_ratio": REST_MAX_RATIO, "tr/hidden_kl_max": HIDDEN_KL_MAX}
    found = out.unbind()
    return {name: found[place] for name, place in names.items()}, found[REGRESSION], found[FLAWED]


@triton.jit
def disagree(own, anchor):
    """True if the old policy's top-k tokens and `logp_old` disagree on the sampled token's log-probability.

    The objective is then called, and refuses the batch.
    """
    return ~(tl.abs(own - anchor) <= 1.001 * TOLERATED)


@triton.jit
def no_distribution(mass, slack):
    """True if a distribution does not sum to 1, with a looser tolerance than in the objective's own check.

    The objective is then called, and checks the batch.
    """
    return tl.abs(mass - 1.0) > 1.001 * slack


@triton.jit
def _metrics_kernel(fields, rest, rest_new, max_new, max_old, weights, policy_weights, out, count, BLOCK: tl.constexpr):
    """Compute all metrics of a batch in one Triton program, so that the result is deterministic."""
    zero = tl.zeros((BLOCK,), tl.float32)
    tail_gap, hidden = zero - float("inf"), zero
    acted, kl, after, dual, projected = zero, zero, zero, zero, zero
    unconverged, mismatch, flawed, mass, total = zero, zero, zero, zero, zero
    log_rho, most = zero - float("inf"), zero - float("inf")
    # One sum per lane, added up at the end: the order of the additions does not depend on the device. Fields are [field, row],
    # so that lanes read neighbours; 11 numbers per row are little enough for a single program.
    for begin in range(0, count, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        valid = row < count
        here = fields + row
        log_rho = tl.maximum(log_rho, tl.load(here + count * LOG_RHO, mask=valid, other=-float("inf")))
        on = tl.load(here + count * ACTED, mask=valid, other=0.0)
        acted += on
        kl += tl.load(here + count * KL_MEAN, mask=valid, other=0.0)
        most = tl.maximum(most, tl.load(here + count * KL_MAX, mask=valid, other=-float("inf")))
        after += tl.load(here + count * KL_AFTER, mask=valid, other=0.0)
        eta = tl.load(here + count * DUAL, mask=valid, other=0.0)
        finite = (on > 0.0) & (eta < float("inf"))
        dual += tl.where(finite, eta, 0.0)
        projected += tl.where(finite, 1.0, 0.0)
        unconverged += 1.0 - tl.load(here + count * CONVERGED, mask=valid, other=1.0)
        mismatch += tl.load(here + count * MISMATCH, mask=valid, other=0.0)
        flawed += tl.load(here + count * FLAWED, mask=valid, other=0.0)
        if weights is not None:
            weight = tl.load(weights + row, mask=valid, other=0.0).to(tl.float32)
            pull = tl.load(here + count * REGRESSION, mask=valid, other=0.0)
            policy = tl.load(here, mask=valid, other=0.0) - pull
            if policy_weights is not None:
                c = tl.load(policy_weights + row, mask=valid, other=0.0).to(tl.float32)
                policy = tl.where(c == 0.0, 0.0, policy * c)
            total += tl.where(weight == 0.0, 0.0, weight * (policy + pull))
        if rest is not None:
            mass += tl.exp(tl.load(rest + row, mask=valid, other=-float("inf")).to(tl.float32))
        if max_old is not None:  # `support.tail_gap` and `support.hidden_kl`
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
    tl.store(out + LOSS, tl.sum(mass, 0) / count)
    tl.store(out + LOG_RHO, tl.exp(tl.minimum(tl.max(log_rho, 0), LOG_RATIO_MAX)))
    tl.store(out + ACTED, tl.sum(acted, 0) / count)
    tl.store(out + KL_MEAN, tl.sum(kl, 0) / count)
    tl.store(out + KL_MAX, tl.max(most, 0))
    tl.store(out + KL_AFTER, tl.sum(after, 0) / count)
    tl.store(out + DUAL, tl.sum(dual, 0) / tl.maximum(tl.sum(projected, 0), 1.0))
    tl.store(out + CONVERGED, tl.sum(unconverged, 0))
    tl.store(out + MISMATCH, tl.sum(mismatch, 0) / count)
    tl.store(out + FLAWED, tl.sum(flawed, 0))
    tl.store(out + REGRESSION, tl.sum(total, 0))
    if max_old is not None:
        tl.store(out + REST_MAX_RATIO, tl.exp(tl.minimum(tl.max(tail_gap, 0), 20.0)))
        tl.store(out + HIDDEN_KL_MAX, tl.max(hidden, 0))


@triton.jit
def _token_kernel(
    logp, kept, rest, kept_old, rest_old, logp_old, rollout, advantages, policy_weights, fields, out_own, count, slots, stride,
    stride_kept, highest, slack, low, high, cap, RULE: tl.constexpr, MEASURE: tl.constexpr, SYMMETRIC: tl.constexpr,
    DECOUPLED: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # Several rows per warp where supports are small, so that all lanes have work. RULE and MEASURE are compiled in: one variant
    # holds one objective's formula, and no branch.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < count
    new = tl.load(logp + row * stride, mask=there, other=0.0)
    old = tl.load(logp_old + row, mask=there, other=0.0).to(tl.float32)
    advantage = tl.load(advantages + row, mask=there, other=0.0).to(tl.float32)
    log_rho = new - old
    flawed = ~(tl.abs(log_rho) < float("inf"))  # checked here: the smaller of NaN and a number is the number
    # Looser than the objective's own check by 1/1000: exp and sums round otherwise here, and what it accepts must pass. What is
    # flagged is given to the objective, which words the error.
    flawed = flawed | (new > 1.001 * highest) | (old > 1.001 * highest)
    bounded = tl.minimum(log_rho, LOG_RATIO_MAX)
    ratio = tl.exp(bounded)
    inside = log_rho <= LOG_RATIO_MAX  # beyond it the ratio is a constant: no gradient flows
    excess = expm1(bounded)

    # How far the policy has moved, in every measure that this variant compiles: the rest is removed as dead code.
    kl_mean = kl_term(tl.exp(bounded * 0.0), ratio, bounded)
    sampled_kl = binary_kl(tl.minimum(old, CERTAIN), tl.minimum(new, CERTAIN))
    kl_max = sampled_kl
    moved = tl.abs(excess)
    if MEASURE == "binary_tv":
        moved = abs_difference(old, new)
    if MEASURE == "binary_kl":
        moved = sampled_kl
    if kept_old is not None:
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
        if MEASURE == "support_tv":
            moved = 0.5 * tl.sum(abs_difference(q, p), 1)
        if MEASURE == "support_kl":
            moved = tl.sum(kl_elements(q, p), 1)

    # The loss, its derivative with respect to log π, and whether the region acted.
    plain = ratio * advantage
    least, most = low, high
    if MEASURE == "chi_square":
        spread = tl.exp(-0.5 * old)  # 1/√π_old
        least, most = 1.0 - low * spread, 1.0 + high * spread
    beyond = ((ratio > most) & (advantage > 0.0)) | ((ratio < least) & (advantage < 0.0))
    if RULE == "clip":
        clipped = tl.minimum(tl.maximum(ratio, least), most) * advantage
        surrogate = tl.minimum(plain, clipped)
        flows = (plain <= clipped) & inside
        acted = beyond
        if cap is not None:
            cut = (advantage < 0.0) & (surrogate < cap * advantage)
            surrogate = tl.where(cut, cap * advantage, surrogate)
            flows = flows & ~cut
            acted = acted | ((ratio > cap) & (advantage < 0.0))
        loss, own = -surrogate, tl.where(flows, -plain, 0.0)
    elif RULE == "mask":
        blocks = log_rho * advantage > 0.0
        if SYMMETRIC:
            blocks = advantage != 0.0
        acted = (moved > tl.where(advantage > 0.0, high, low)) & blocks
        if cap is not None:
            loss = -tl.minimum(ratio, cap) * advantage
            own = loss
        else:
            loss = -plain
            own = tl.where(inside, loss, 0.0)
        loss, own = tl.where(acted, 0.0, loss), tl.where(acted, 0.0, own)
    elif RULE == "weight":
        own = -tl.minimum(tl.maximum(ratio, low), high) * advantage
        loss = own * new
        acted = ((ratio < low) | (ratio > high)) & (advantage != 0.0)
    elif RULE == "gate":
        tau = tl.where(advantage > 0.0, high, low)
        gate = 1.0 / (1.0 + tl.exp(-tau * excess))
        slope = 4.0 * gate * (1.0 - gate)
        loss = -4.0 / tau * gate * advantage
        own = tl.where(inside, -slope * plain, 0.0)
        acted = (slope < 0.5) & (advantage != 0.0)
    elif RULE == "flip":
        weight = tl.exp(tl.minimum(tl.where(advantage > 0.0, -log_rho, log_rho), LOG_RATIO_MAX))
        loss = tl.where(beyond, 0.0, -tl.minimum(weight, cap) * advantage)
        own = loss
        acted = beyond | ((weight > cap) & (advantage != 0.0))
    else:
        moved = excess
        if MEASURE == "binary_tv":
            moved = tl.exp(old) * excess
        loss = -(1.0 + excess) * advantage + tl.abs(advantage) * excess * moved / (2.0 * low)
        own = tl.where(inside, ratio * (-advantage + tl.abs(advantage) * moved / low), 0.0)
        sign = tl.where(advantage > 0.0, 1.0, tl.where(advantage < 0.0, -1.0, 0.0))
        acted = moved * sign > low

    gap = 0.0 * ratio
    if rollout is not None:
        sampled = tl.load(rollout + row, mask=there, other=0.0).to(tl.float32)
        gap = abs_difference(sampled, old)
        flawed = flawed | ~(tl.abs(sampled) < float("inf")) | (sampled > 1.001 * highest)
        if DECOUPLED:
            weight = tl.exp(tl.minimum(old - sampled, LOG_RATIO_MAX))
            loss, own = loss * weight, own * weight
    flawed = flawed | ~(tl.abs(loss) < float("inf"))
    if policy_weights is not None:
        c = tl.load(policy_weights + row, mask=there, other=0.0).to(tl.float32)
        own = tl.where(c == 0.0, 0.0, own * c)
    none = 0.0 * ratio
    results = loss, log_rho, acted, kl_mean, kl_max, none, none, none + 1.0, gap, flawed, none
    _store(fields + row, count, there, results)
    tl.store(out_own + row, own, mask=there)


@triton.jit
def _store(at, count, mask, results):
    """Write the loss kernel's results for some tokens into `LossRows.fields`; `results` are in the order of FIELDS."""
    for i in tl.static_range(len(results)):
        tl.store(at + count * i, results[i].to(tl.float32), mask=mask)


@triton.jit
def _troll_kernel(
    kept, rest, kept_old, rest_old, logp_old, rollout, advantages, policy_weights, fields, g_kept, g_rest, count, slots, stride,
    highest, slack, bound, regression, cap, GRADIENT: tl.constexpr, OUTWARD: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    # One row per program: the iteration of `project` takes as many steps as its own row needs, and not as the worst of several.
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    here = slot < slots
    # The tail is one more category, in the lane behind the last slot. All sums below are over a distribution that is complete.
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
    # Both sum to 1 up to rounding; the projection reads them up to a constant, and wants none of that error.
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
    if active:  # a branch of the whole program, one row: rows inside the region skip the iteration
        log_r, t, binding, kl_after, converged = project(new, old, bound)

    own_r = tl.sum(tl.where(first, log_r, 0.0), 0)
    # Inside the region the log-probs' own difference: equal policies have a ratio of exactly 1.
    log_rho = plain if GRADIENT == "unprojected" else tl.where(active, own_r - own_old, plain)
    ratio = tl.exp(tl.minimum(log_rho, LOG_RATIO_MAX))
    if cap is not None:
        ratio = tl.minimum(ratio, cap)
        u = -ratio * advantage
    else:
        u = tl.where(log_rho <= LOG_RATIO_MAX, -ratio * advantage, 0.0)
    loss = -ratio * advantage
    if policy_weights is not None:
        c = tl.load(policy_weights + row).to(tl.float32)
        u = tl.where(c == 0.0, 0.0, u * c)

    # The implicit gradient of the projection, for which no step of the iteration is stored.
    # d log r_a / d log new, in closed form: t (δ − r (1 + z_a z)) where the bound acts, δ where it does not.
    r = tl.exp(log_r)
    g = tl.where(first, u, 0.0)
    if GRADIENT != "unprojected":  # noqa: SIM102 (the first is a constexpr, the second a runtime condition)
        if active:
            common = (new > RULED_OUT) & (old > RULED_OUT)
            d = tl.where(common, new - old, 0.0)
            centred = tl.where(common, d - tl.sum(r * d, 0), 0.0)
            radial = 0.0 * t
            if GRADIENT == "exact":
                variance = tl.where(binding, tl.sum(r * centred * centred, 0), 1.0)
                radial = tl.where(binding, u * tl.sum(tl.where(first, centred, 0.0), 0) / variance, 0.0)
            g = t * (g - r * (u + radial * centred))
    pull = 0.0 * loss
    if active & (regression > 0.0):
        pull = regression * tl.sum(kl_elements(tl.where(new > RULED_OUT, new, -float("inf")), log_r), 0)
        g += regression * tl.where(p > 0.0, p * (new - log_r), 0.0)
    # Through log-softmax, since the inputs were normalised above: g − p Σ g.
    g = tl.where(new > -float("inf"), g - p * tl.sum(g, 0), 0.0)

    loss += pull

    # Both: the smaller of NaN and a number is the number, and so the loss is one where the ratio is none.
    flawed = flawed | ~(log_rho < float("inf")) | ~(tl.abs(loss) < float("inf"))
    gap = 0.0 * t
    if rollout is not None:
        sampled = tl.load(rollout + row).to(tl.float32)
        gap = abs_difference(sampled, anchor)
        flawed = flawed | ~(tl.abs(sampled) < float("inf")) | (sampled > 1.001 * highest)
    eta = (1.0 - t) / t
    results = loss, log_rho, active, kl_before, kl_before, kl_after, eta, converged, gap, flawed, pull
    _store(fields + row, count, None, results)
    tl.store(g_kept + row * slots + slot, g, mask=here)
    tl.store(g_rest + row, tl.sum(tl.where(slot == slots, g, 0.0), 0))
