"""What the loss kernels leave of each token, and the metrics of a batch made of it: one kernel for all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.rows import HeadRows
from corral.kernels.triton.loss.project import LOG_RATIO_MAX
from corral.support import ANCHOR_TOLERANCE, LogpTolerance

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
