"""TROLL's projection, loss and gradient of the support in one kernel a row: what takes torch some three hundred launches.

`objective.troll` is the reference, and says what is wrong with a bad batch; this is the same, fast.
"""

from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from corral.kernels.project_row import kl_elements, log_softmax, project
from corral.types import SparseDist

EXACT, CONSTANT_DUAL, UNPROJECTED = 0, 1, 2
GRADIENTS = {"exact": EXACT, "constant_dual": CONSTANT_DUAL, "unprojected": UNPROJECTED}
ANCHOR_TOLERANCE = 1e-3
"""How far `dist_old` and `logp_old` may disagree on the sampled token before the objective is asked to say so."""


@dataclass(frozen=True, kw_only=True)
class TrollSettings:
    """The settings of `troll` that the kernel reads."""

    bound: float
    regression: float
    gradient: str
    ratio_cap: float | None

    @classmethod
    def of(cls, objective: Any) -> "TrollSettings | None":
        """Those of an objective; None where the kernel does not compute it. Names are never taken twice: they identify it."""
        if getattr(objective, "name", None) != "troll":  # any function of a batch is an objective
            return None
        config = objective.config
        if config.tail != "bucket" or config.level != "token":
            return None
        return cls(bound=config.bound, regression=config.regression, gradient=config.gradient, ratio_cap=config.ratio_cap)


@dataclass(frozen=True, eq=False)
class TrollRows:
    """Loss of N live tokens, and what the projection did to each of them [N]."""

    loss: Tensor
    log_rho: Tensor
    kl_before: Tensor
    kl_after: Tensor
    dual: Tensor
    active: Tensor
    converged: Tensor
    flawed: Tensor
    """True where a value is not finite, or the two policies disagree on the sampled token."""

    def metrics(self, rest_old: Float[Tensor, " N"]) -> dict[str, Tensor]:
        """What `troll` reports."""
        acted = self.active & self.dual.isfinite()
        return {
            "tr/active_frac": self.active.float().mean(),
            "tr/ratio_max": self.log_rho.clamp(max=20.0).amax().exp(),
            "tr/rest_mass": rest_old.exp().mean(),
            "tr/kl_before": self.kl_before.mean(),
            "tr/kl_max": self.kl_before.amax(),
            "tr/kl_after": self.kl_after.mean(),
            "tr/dual": torch.where(acted, self.dual, 0.0).sum() / acted.sum().clamp(min=1),
            "tr/unconverged": (~self.converged).sum(),
        }


def troll_loss(
    new: SparseDist, old: SparseDist, logp_old: Float[Tensor, " N"], advantages: Float[Tensor, " N"], settings: TrollSettings
) -> TrollRows:
    """L = − (π̃(a) / π_old(a)) Â + α KL(π‖sg[π̃]) of N live tokens, differentiable in `new`; slot 0 is the sampled token."""
    return TrollRows(*_TrollLoss.apply(new.logp, new.rest, old.logp, old.rest, logp_old, advantages, settings))


class _TrollLoss(torch.autograd.Function):
    """The gradient of every row is its own, so it is formed in the forward pass and scaled in the backward."""

    @staticmethod
    def forward(
        ctx: Any, kept: Tensor, rest: Tensor, kept_old: Tensor, rest_old: Tensor, logp_old: Tensor, advantages: Tensor, how: Any
    ) -> tuple[Tensor, ...]:
        count, slots = kept.shape
        floats = [torch.empty(count, device=kept.device) for _ in range(6)]
        flags = [torch.empty(count, dtype=torch.bool, device=kept.device) for _ in range(3)]
        g_kept = torch.empty(count, slots, device=kept.device)
        inputs = [x.float().contiguous() for x in (kept, rest, kept_old, rest_old, logp_old, advantages)]
        _troll_kernel[(count,)](
            *inputs, *floats, *flags, g_kept, slots, how.bound, how.regression, how.ratio_cap or 0.0,
            CAPPED=how.ratio_cap is not None, GRADIENT=GRADIENTS[how.gradient], TOLERANCE=ANCHOR_TOLERANCE,
            SLOTS=max(2, triton.next_power_of_2(slots + 1)), num_warps=1,
        )  # fmt: skip
        *values, g_rest = floats
        ctx.save_for_backward(g_kept, g_rest)
        ctx.mark_non_differentiable(*values[1:], *flags)
        return *values, *flags

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Any, ...]:
        g_kept, g_rest = ctx.saved_tensors
        return g_kept * upstream[:, None], g_rest * upstream, None, None, None, None, None


@triton.jit
@no_type_check
def _troll_kernel(
    kept, rest, kept_old, rest_old, logp_old, advantages, out_loss, out_log_rho, out_before, out_after, out_dual, g_rest,
    out_active, out_converged, out_flawed, g_kept, slots, bound, regression, cap,
    CAPPED: tl.constexpr, GRADIENT: tl.constexpr, TOLERANCE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    here = slot < slots
    new = tl.load(kept + row * slots + slot, mask=here, other=-float("inf"))
    new = tl.where(slot == slots, tl.load(rest + row), new)
    old = tl.load(kept_old + row * slots + slot, mask=here, other=-float("inf"))
    old = tl.where(slot == slots, tl.load(rest_old + row), old)
    advantage, anchor = tl.load(advantages + row), tl.load(logp_old + row)
    first = slot == 0
    own_old = tl.sum(tl.where(first, old, 0.0), 0)
    own_new = tl.sum(tl.where(first, new, 0.0), 0)
    flawed = ~(tl.abs(own_old - anchor) <= TOLERANCE) | ~(tl.abs(advantage) < float("inf")) | ~(tl.abs(own_new) < float("inf"))
    flawed = (
        flawed | ~(tl.max(tl.where(new < float("inf"), 0, 1), 0) == 0) | ~(tl.max(tl.where(old < float("inf"), 0, 1), 0) == 0)
    )

    new, old = log_softmax(new), log_softmax(old)
    own_old = tl.sum(tl.where(first, old, 0.0), 0)
    own_new = tl.sum(tl.where(first, new, 0.0), 0)
    p = tl.exp(new)
    kl_before = tl.sum(kl_elements(new, old), 0)
    active = kl_before > bound
    log_r, t, binding, kl_after = new, tl.full((), 1.0, tl.float32), active, kl_before
    converged = kl_before == kl_before
    if active:
        log_r, t, binding, kl_after, converged = project(new, old, bound)

    own_r = tl.sum(tl.where(first, log_r, 0.0), 0)
    log_rho = (own_new if GRADIENT == 2 else own_r) - own_old
    ratio = tl.exp(tl.minimum(log_rho, 20.0))
    if CAPPED:
        ratio = tl.minimum(ratio, cap)
        u = -ratio * advantage
    else:
        u = tl.where(log_rho <= 20.0, -ratio * advantage, 0.0)
    loss = -ratio * advantage

    # d log r_a / d log new, in closed form: t (δ − r (1 + z_a z)) where the bound acts, δ where it does not.
    r = tl.exp(log_r)
    g = tl.where(first, u, 0.0)
    if GRADIENT != 2:  # noqa: SIM102 (decided when compiling, and the other when running)
        if active:
            alive = (new > -float("inf")) & (old > -float("inf"))
            d = tl.where(alive, new - old, 0.0)
            centred = tl.where(alive, d - tl.sum(r * d, 0), 0.0)
            radial = 0.0 * t
            if GRADIENT == 0:
                variance = tl.where(binding, tl.sum(r * centred * centred, 0), 1.0)
                radial = tl.where(binding, u * tl.sum(tl.where(first, centred, 0.0), 0) / variance, 0.0)
            g = t * (g - r * (u + radial * centred))
    if active & (regression > 0.0):
        loss += regression * tl.sum(kl_elements(new, log_r), 0)
        g += regression * tl.where(p > 0.0, p * (new - log_r), 0.0)
    g = tl.where(new > -float("inf"), g - p * tl.sum(g, 0), 0.0)

    flawed = flawed | ~(tl.abs(loss) < float("inf"))
    tl.store(out_loss + row, loss)
    tl.store(out_log_rho + row, log_rho)
    tl.store(out_before + row, kl_before)
    tl.store(out_after + row, kl_after)
    tl.store(out_dual + row, (1.0 - t) / t)
    tl.store(out_active + row, active)
    tl.store(out_converged + row, converged)
    tl.store(out_flawed + row, flawed)
    tl.store(g_kept + row * slots + slot, g, mask=here)
    tl.store(g_rest + row, tl.sum(tl.where(slot == slots, g, 0.0), 0))
