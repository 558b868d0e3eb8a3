"""Projection of a categorical policy onto a KL ball around the old policy: the core of the objective TROLL."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from corral.divergence.categorical import categorical_kl, kl_terms
from corral.numerics import in_one_dtype, logsumexp, require_tensors
from corral.projection.root import find_root
from corral.validate import number_in

_Gradient = Literal["exact", "constant_dual"]

RULED_OUT = -1e4
"""Log-probability below which a token counts as impossible. Logit masks use −1e9 or the smallest float32 instead of −inf."""


@dataclass(frozen=True, eq=False)
class CategoricalProjection:
    """Projected policy r, with the solver's status for each row. A row is one distribution."""

    logp: Float[Tensor, "*b K"]
    """Log-probs of the projected policy r. Gradients flow to the new policy's log-probs `logp_new` only."""
    dual: Float[Tensor, "*b"]
    """Lagrange multiplier η ≥ 0 of the KL bound: 0 where the new policy is inside the ball, inf where r is the old policy."""
    active: Bool[Tensor, "*b"]
    """True where the new policy lay outside the KL ball."""
    kl_before: Float[Tensor, "*b"]
    """KL(new‖old) of the new policy, before the projection."""
    kl_after: Float[Tensor, "*b"]
    """KL(r‖old) of the projected policy r. It equals the bound where the new policy was outside the KL ball."""
    converged: Bool[Tensor, "*b"]
    """False where no policy satisfies the KL bound, or where rounding stopped the solver before it reached the bound."""


def project_categorical_kl(
    logp_new: Float[Tensor, "*#b K"],
    logp_old: Float[Tensor, "*#b K"],
    bound: float | Float[Tensor, "*#b"],
    *,
    gradient: _Gradient = "exact",
    strict: bool = False,
) -> CategoricalProjection:
    """Project the new policy onto the KL ball around the old policy.

        r = argmin_r KL(r‖new)  s.t.  KL(r‖old) ≤ ε
          ∝ exp((log new + η log old) / (1 + η)) = old^(1−t) new^t          t = 1 / (1 + η) ∈ (0, 1]

    With d = log new − log old, K(t) = KL(r_t‖old) rises from 0 to KL(new‖old) at slope K′ = t·Var_r(d); where that ends
    above ε, Newton's method on √(2K) finds the one t with K(t) = ε.

    Gradients flow to `logp_new` alone, by the implicit function theorem: with z = (d − E_r d)/√Var_r(d),

        ∂ log r_i / ∂ logit_j = t (δ_ij − r_j (1 + z_i z_j))

    so a policy at the boundary moves along it and not further out. Rows inside the ball are returned unchanged.

    Args:
        logp_new, logp_old: log-probabilities up to a constant per row [*, K]; any category may be a tail's bucket. Where a row
            is projected, what is below −1e4 counts as −inf: no policy means it, a logit mask does. Values that are all ≥ 0 and
            sum to 1 in every row are probabilities, and refused.
        bound: ε ≥ 0, one for all rows or one per row; inf switches the projection off.
        gradient: "exact", or "constant_dual" to treat η as a constant: t (δ_ij − r_j), which still pushes outward.
        strict: raise on the worst row instead of reporting it in `converged`.
    Returns:
        CategoricalProjection, in float32 or better. Where no policy on the common support reaches the bound, r is the old
        policy renormalised there (the old policy itself if nothing is common), dual = inf, converged = False, gradient 0.
    Ref:
        Becker et al. 2025, arXiv:2510.03817. Invariant: projecting twice is projecting once.
    """
    if gradient not in get_args(_Gradient):
        raise ValueError(f"project_categorical_kl: `gradient` is one of {', '.join(get_args(_Gradient))}; got {gradient!r}.")
    require_tensors("project_categorical_kl", logp_new=logp_new, logp_old=logp_old)
    for name, x in (("logp_new", logp_new), ("logp_old", logp_old)):
        if not x.is_floating_point():
            raise ValueError(f"project_categorical_kl: `{name}` holds log-probabilities; got dtype {x.dtype}.")
    if logp_new.shape[-1:] != logp_old.shape[-1:] or not logp_new.ndim or not logp_new.shape[-1]:
        raise ValueError(
            f"project_categorical_kl: both policies need the same categories on the last axis, at least one; "
            f"got {list(logp_new.shape)} and {list(logp_old.shape)}."
        )
    new, old = in_one_dtype(logp_new, logp_old.detach())
    if not isinstance(bound, Tensor):
        _check_bound(bound, number_in(bound, 0))
    row_bound = torch.as_tensor(bound, dtype=new.dtype, device=new.device).detach()
    try:
        shape = torch.broadcast_shapes(new.shape[:-1], old.shape[:-1], row_bound.shape)
    except RuntimeError:
        raise ValueError(
            f"project_categorical_kl: one bound per row of the policies, or one for all; got bound {list(row_bound.shape)} and "
            f"policies {list(logp_new.shape)} and {list(logp_old.shape)}."
        ) from None
    # Both policies are normalised, in one dtype and shape.
    new, old = (x.expand(*shape, -1).log_softmax(-1) for x in (new, old))
    row_bound = row_bound.expand(shape)
    mistaken = torch.stack([_are_probabilities(logp_new), _are_probabilities(logp_old)])
    logp, t, _, active, kl_before, kl_after, converged = _Projection.apply(new, old, row_bound, mistaken, gradient == "exact")
    if strict and not bool(converged.all()):
        excess = torch.where(converged, -torch.inf, (kl_after - row_bound).nan_to_num(nan=torch.inf))
        worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        raise RuntimeError(
            f"project_categorical_kl: {int((~converged).sum())} of {converged.numel()} rows did not converge. Worst is row "
            f"{worst}: bound {row_bound[worst]:.3g}, KL before {kl_before[worst]:.3g}, after {kl_after[worst]:.3g}. A bound "
            f"that cannot be met means that the new policy rules out tokens that the old one needs: use the same logit masks "
            f"for both."
        )
    return CategoricalProjection(logp, (1 - t) / t, active, kl_before, kl_after, converged)


@torch.no_grad()
def _are_probabilities(policy: Tensor) -> Tensor:
    """True if every row contains probabilities instead of log-probabilities: all ≥ 0, with a sum of 1 up to rounding.

    The flag stays on the device, and is read with the bound.

    Rows of nothing but 0 and 1 may be logits that somebody wrote by hand, and are read as such.
    """
    if policy.shape[-1] == 1 or not policy.numel():
        return torch.zeros((), dtype=torch.bool, device=policy.device)
    rounding = max(1e-5, torch.finfo(policy.dtype).eps)
    between = ((policy > 0) & (policy < 1)).any()
    return between & (policy >= 0).all() & ((policy.sum(-1, dtype=torch.float32) - 1).abs() <= rounding).all()


def _check_bound(bound: object, valid: bool) -> None:
    if not valid:
        raise ValueError(
            f"project_categorical_kl: `bound` is a KL in nats and must be ≥ 0 (inf switches it off); got {bound!r}."
        )


class _Projection(torch.autograd.Function):
    """Autograd function that projects rows [*, K] onto the KL ball, with the implicit gradient in closed form."""

    @staticmethod
    def forward(new: Tensor, old: Tensor, bound: Tensor, mistaken: Tensor, exact: bool) -> tuple[Tensor, ...]:
        kl_before = categorical_kl(new, old)
        active = kl_before > bound
        inside = (new.clone(), torch.ones_like(bound), torch.zeros_like(active), kl_before.clone(), ~kl_before.isnan())
        if torch.compiler.is_compiling():  # a traced graph solves every row and keeps the active ones
            solved = _project_rows(new, old, bound)
            rows = [
                torch.where(active.view(*active.shape, *[1] * (a.ndim - active.ndim)), b, a)
                for a, b in zip(inside, solved, strict=True)
            ]
        else:
            # One transfer for all flags. Under vmap `mistaken` has leading axes.
            *wrong, valid = torch.cat([mistaken.reshape(-1, 2).any(0), (bound >= 0).all()[None]]).tolist()
            for name, found in zip(("logp_new", "logp_old"), wrong, strict=True):
                if found:
                    raise ValueError(
                        f"project_categorical_kl: `{name}` holds probabilities: every row is ≥ 0 and sums to 1. It takes their "
                        f"logarithms: p.log(), or the logits themselves."
                    )
            _check_bound(bound.min().item() if bound.numel() else 0.0, valid)
            rows = list(inside)
            if bool(active.any()):  # few rows are: solve those only
                solved = _project_rows(new[active], old[active], bound[active])
                for whole, part in zip(rows, solved, strict=True):
                    whole[active] = part
        logp, t, binding, kl_after, converged = rows
        return logp, t, binding, active, kl_before, kl_after, converged

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        new, old, _, _, ctx.exact = inputs
        logp, t, binding, active, *status = output
        ctx.mark_non_differentiable(t, binding, active, *status)
        ctx.save_for_backward(new, old, logp, t, binding, active)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        """Compute the implicit gradient of the projection: t [v_j − r_j (Σ v + z_j Σ v z)] in projected rows, v_j elsewhere.

        This takes three reductions and no solver.
        """
        new, old, logp, t, binding, active = ctx.saved_tensors
        with torch.no_grad():
            common = (new > RULED_OUT) & (old > RULED_OUT)
            v = torch.where(logp > -torch.inf, grad, 0.0)
            r = logp.exp()
            d = torch.where(common, new - old, 0.0)
            centred = torch.where(common, d - (r * d).sum(-1, keepdim=True), 0.0)
            variance = torch.where(binding, (r * centred**2).sum(-1), 1.0)
            radial = torch.where(binding, (v * centred).sum(-1) / variance, 0.0) if ctx.exact else torch.zeros_like(t)
            tangent = t[..., None] * (v - r * (v.sum(-1, keepdim=True) + radial[..., None] * centred))
            grad_new = torch.where(active[..., None], tangent, v)
        if not torch.compiler.is_compiling():  # a compiled graph refuses second derivatives by itself
            grad_new = _NoSecondDerivative.apply(grad_new, grad, new)
        return grad_new, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        """Apply the projection under torch's vmap: rows are independent, so the mapped axis becomes one more leading axis."""
        *tensors, exact = inputs
        front = [
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(tensors, in_dims[:-1], strict=True)
        ]
        outputs = _Projection.apply(*front, exact)
        return outputs, (0,) * len(outputs)


class _NoSecondDerivative(torch.autograd.Function):
    """Identity of the first argument whose derivative raises an error, because second derivatives are not supported."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad_new: Tensor, *depends_on: Tensor) -> Tensor:
        return grad_new.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            "project_categorical_kl has a first derivative only. Drop `create_graph=True`, or detach the "
            "projected log-probs before differentiating a second time."
        )


def _project_rows(new: Tensor, old: Tensor, bound: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Project each row onto the KL ball. Returns log r, t, whether the bound binds, KL(r‖old) and convergence.

    r vanishes wherever either policy does, for one of its two KLs would be infinite otherwise. On what is left the old
    policy holds mass e^−c, so KL(r‖old) = KL(r‖old renormalised) + c, and the bound is spent down to ε − c.
    """
    common = (new > RULED_OUT) & (old > RULED_OUT)
    overlap = common.any(-1)
    lost = ((old > RULED_OUT) & ~common).any(-1)
    cost = torch.where(lost, -logsumexp(torch.where(common, old, -torch.inf)), 0.0)
    slack = bound - cost

    centre = torch.where(common, old, -torch.inf).log_softmax(-1)
    p = torch.where(common, centre.exp(), 0.0)
    d = torch.where(common, new - old, 0.0)
    # A constant in d cancels in r. Without that of the likeliest token an eighth of the way to the new policy, t d − A(t)
    # below is small where r is near the old one; and a token that is all but ruled out takes no digits from the others.
    likeliest = torch.where(common, centre + d / 8, -torch.inf).argmax(-1, keepdim=True)
    d = torch.where(common, d - d.gather(-1, likeliest), 0.0)

    def tilt(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate the tilted policy r_t ∝ old · e^{t d}. Returns log r_t [*, K], KL(r_t‖old) [*] and Var_r(d) [*].

        The variance is Var_r(d) = K′(t)/t, with K(t) = KL(r_t‖old).
        """
        step = t[..., None] * d
        log_normaliser = logsumexp(torch.where(common, centre + step, -torch.inf))
        gap = torch.where(common, log_normaliser[..., None] - step, 0.0)  # log old − log r, before it is rounded
        log_r = centre - gap
        r = torch.where(common, log_r.exp(), 0.0)
        mean = (r * d).sum(-1, keepdim=True)
        return log_r, kl_terms(r, p, gap).sum(-1), (r * (d - mean) ** 2).sum(-1)

    kl_common = tilt(torch.ones_like(bound))[1]
    fits = kl_common <= slack
    binding = overlap & (slack > 0) & ~fits
    target = (2 * slack.clamp(min=0)).sqrt()

    def excess(t: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate value and slope of a function whose root is the t with KL(r_t‖old) = `slack`.

        √(2K) is a straight line where K is quadratic, and Newton's method exact. Between two peaked policies K rises
        exponentially instead, and log K is the straight line. d log K / d log t tells which: 2 in the first case.
        """
        _, kl, variance = tilt(t)
        log_slope = t * variance / kl
        root_kl = (2 * kl).sqrt()
        steep = log_slope * t > 4
        # Scaled by √(ε/2), log K has the value and slope of √(2K) at the root.
        value = torch.where(steep, 0.5 * target * (kl / slack).log(), root_kl - target)
        slope = torch.where(steep, 0.5 * target * log_slope, 0.5 * root_kl * log_slope)
        return torch.where(binding, value, 0.0), slope

    root = find_root(excess, torch.where(binding, (slack / kl_common).sqrt(), 1.0), scale=target)
    t = torch.where(binding, root.x, torch.where(fits & overlap, 1.0, 0.0))
    log_weight, kl, _ = tilt(t)
    logp = torch.where(common, log_weight, -torch.inf)
    logp = torch.where(overlap[..., None], logp, old)
    kl_after = torch.where(overlap, kl + cost, 0.0)
    return logp, t, binding, kl_after, root.converged & overlap & (slack >= 0)
