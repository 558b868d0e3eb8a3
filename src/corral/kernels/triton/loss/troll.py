"""TROLL's projection, loss and gradient of the support in one kernel a row: what takes torch some three hundred launches.

`objective.troll` is the reference, and says what is wrong with a bad batch; this is the same, fast.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, no_type_check

import torch
import triton
import triton.language as tl

from corral.kernels.rows import HeadRows
from corral.kernels.triton.loss.project import LOG_RATIO_MAX, RULED_OUT, abs_difference, kl_elements, log_softmax, project
from corral.kernels.triton.loss.rows import UNCHECKED, LossRows, OldRows, blank_fields, disagree, no_distribution
from corral.support import LogpTolerance

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
        """Those of an objective; None where the kernel does not compute it. Names are never taken twice: they identify it."""
        if getattr(objective, "name", None) != "troll":  # any function of a batch is an objective
            return None
        config = objective.config
        if config.tail != "bucket" or config.level != "token" or config.centre != "old":
            return None
        return cls(
            bound=config.bound, regression=config.regression, gradient=config.gradient, ratio_cap=config.ratio_cap,
            outward=config.project == "outward",
        )  # fmt: skip

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
