"""Shared parts of the Gaussian projections: the result, checked inputs, and the step of the mean."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from corral.numerics import in_one_dtype, require_tensors
from corral.validate import number_in

TOLERANCE = 0.01
"""How far from its bound a KL projection may be and still count as converged, as a share of the bound."""


@dataclass(frozen=True, eq=False)
class GaussianProjection:
    """The projected policy, and what the projection did to each row.

    Means have rows *b and covariances rows *c: a covariance that all means share is projected once, and stays one.
    """

    mean: Float[Tensor, "*b D"]
    """μ̃, differentiable in the new policy's mean."""
    chol: Float[Tensor, "... D"]
    """L̃ [*c, D, D], or standard deviations [*c, D]; differentiable in the new policy's factor."""
    dual_mean: Float[Tensor, "*b"]
    """η ≥ 0, the multiplier of the mean's bound: 0 where it does not bind, inf where μ̃ is the old mean."""
    dual_cov: Float[Tensor, "*c"]
    """The same for the covariance."""
    active_mean: Bool[Tensor, "*b"]
    """True where the new mean lay outside its bound."""
    active_cov: Bool[Tensor, "*c"]
    """True where the new covariance lay outside its bound."""
    before_mean: Float[Tensor, "*b"]
    """The mean's part of the distance from the old policy, in the projection's own measure."""
    before_cov: Float[Tensor, "*c"]
    """The covariance's part."""
    after_mean: Float[Tensor, "*b"]
    """The mean's part after the projection, equal to the bound where it binds."""
    after_cov: Float[Tensor, "*c"]
    """The covariance's part after the projection."""
    converged: Bool[Tensor, "*d"]
    """Over the rows of both: False where an input was not a Gaussian, or the solver stopped short of the bound; in KL also
    where rounding keeps the result from its bound, and `after_…` is then what was measured."""


class Step(NamedTuple):
    """One part of a projection."""

    value: Tensor
    t: Tensor
    """How far from old (0) to new (1)."""
    active: Tensor
    before: Tensor
    after: Tensor
    converged: Tensor


class _Gaussians(NamedTuple):
    """Checked inputs in one dtype. Factors and their bound have the rows *c in common; nothing old carries a gradient."""

    mean: Tensor
    chol: Tensor
    old_mean: Tensor
    old_chol: Tensor
    mean_bound: Tensor
    cov_bound: Tensor
    shared_old_chol: Tensor
    """`old_chol` with the rows that it came with: one factor whitens all means in one solve."""


def join_steps(mean: Step, cov: Step) -> GaussianProjection:
    """Both parts as one result."""
    return GaussianProjection(
        mean.value, cov.value, (1 - mean.t) / mean.t, (1 - cov.t) / cov.t, mean.active, cov.active,
        mean.before, cov.before, mean.after, cov.after, mean.converged & cov.converged,
    )  # fmt: skip


def radial(distance: Tensor, bound: Tensor) -> Step:
    """Step length t along a straight line of squared length `distance` up to the bound; `value` is t with its gradient.

        t = √(ε / distance)  where distance > ε,  else 1

    0, and not converged, where the distance overflowed; 1 where it is NaN.
    """
    with torch.no_grad():
        active = distance > bound
        reachable = active & distance.isfinite()
    # sqrt(ε / distance) would divide 0 by 0 in the gradient where ε = 0.
    t = bound.sqrt() * torch.where(reachable, distance, 1.0).rsqrt()
    t = torch.where(reachable, t, torch.where(active, 0.0, 1.0))
    fixed, before = t.detach(), distance.detach()
    after = torch.where(reachable, fixed**2 * before, torch.where(active, 0.0, before))
    return Step(t, fixed, active, before, after, before.isfinite())


def step_mean(mean: Tensor, old_mean: Tensor, distance: Tensor, bound: Tensor) -> Step:
    """μ̃ = μ_o + t (μ − μ_o), which minimises the distance to μ within the bound whatever the quadratic form.

    `distance` is differentiable in the mean, so that at the bound μ̃ moves along the ellipsoid and not further out.
    """
    step = radial(distance, bound)
    gap = torch.where((step.t > 0)[..., None], mean - old_mean, 0.0)
    moved = old_mean + step.value[..., None] * gap
    return step._replace(value=torch.where(step.active[..., None], moved, mean))


def confirm_step(step: Step, measured: Tensor, bound: Tensor, error: Tensor) -> Step:
    """The step, converged only where its value is known to lie where it should, to within `TOLERANCE` of the bound.

    Args:
        measured: distance [*] of `step.value` from the old policy, taken from the value itself: rounding a factor by eps moves
            it by eps κ in the old policy's frame, whatever the equation that t solves.
        error: relative error [*] of such a measurement.
    """
    miss = torch.where(step.active, (measured - bound).abs(), 0.0)
    kept = miss + error * measured <= TOLERANCE * bound  # NaN is not
    after = torch.where(step.converged & ~kept, measured, step.after)
    return step._replace(after=after, converged=step.converged & kept)


def whitening_error(chol: Tensor, diagonal: bool) -> Tensor:
    """Relative error [*] of |L⁻¹ x|² by substitution, which solves (L + ΔL) x̂ = x with |ΔL| ~ eps |L|.

        (1 + eps κ)² − 1          κ = max_i (|L⁻¹| |L| 1)_i, Skeel's condition number, or a bound on it if all are small

    κ does not see the scales of the rows: standard deviations alone, however far apart, have κ = 1.

    Ref:
        Higham 2002, Accuracy and Stability of Numerical Algorithms, theorem 8.5. Invariant: κ(D L) = κ(L) for diagonal D.
    """
    eps = torch.finfo(chol.dtype).eps
    if diagonal:
        return chol.new_full(chol.shape[:-1], eps * (2 + eps))
    size = chol.abs()
    sums = size.sum(-1, keepdim=True)
    # |L⁻¹| ≤ M⁻¹, where M is |L| with all but the diagonal negative: one solve instead of an inverse, mostly good enough.
    comparison = 2 * size.diagonal(dim1=-2, dim2=-1).diag_embed() - size
    loss = eps * torch.linalg.solve_triangular(comparison, sums, upper=False).amax((-2, -1))
    if not bool((loss <= TOLERANCE / 100).all()):
        eye = torch.eye(chol.shape[-1], dtype=chol.dtype, device=chol.device)
        inverse = torch.linalg.solve_triangular(chol, eye.expand_as(chol), upper=False)
        loss = eps * (inverse.abs() @ sums).amax((-2, -1))
    return loss * (2 + loss)


def lower_factor(factor: Tensor) -> Tensor:
    """L with L Lᵀ = F Fᵀ, lower and with a positive diagonal, from any F [*, D, ≥ D]: F = L Q, so F Fᵀ is never formed."""
    lower = torch.linalg.qr(factor.mT).R.mT
    return lower * torch.where(lower.detach().diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)[..., None, :]


# ---------------------------------------------------------------------------------------------------- inputs


def check_gaussians(
    name: str,
    mean: Tensor,
    chol: Tensor,
    old_mean: Tensor,
    old_chol: Tensor,
    mean_bound: float | Tensor,
    cov_bound: float | Tensor,
    diagonal: bool,
) -> _Gaussians:
    """Checked inputs in one dtype and on one set of rows; `ValueError` for what no projection can read."""
    tensors = {"mean": mean, "chol": chol, "old_mean": old_mean, "old_chol": old_chol}
    require_tensors(name, **tensors)
    for key, x in tensors.items():
        if not x.is_floating_point():
            raise ValueError(f"{name}: `{key}` must hold floating-point numbers; got dtype {x.dtype}.")
    dimension = mean.shape[-1] if mean.ndim else 0
    if not dimension or old_mean.shape[-1:] != mean.shape[-1:]:
        raise ValueError(
            f"{name}: both means need the same last axis, of at least one dimension; "
            f"got {list(mean.shape)} and {list(old_mean.shape)}."
        )
    for key in ("chol", "old_chol"):
        check_factor(name, key, tensors[key], dimension, diagonal)
    mean, chol, old_mean, old_chol = in_one_dtype(mean, chol, old_mean.detach(), old_chol.detach())
    row_mean_bound = check_bound(name, "mean_bound", mean_bound, mean)
    row_cov_bound = check_bound(name, "cov_bound", cov_bound, chol)
    axes = 1 if diagonal else 2
    try:
        cov_rows = torch.broadcast_shapes(chol.shape[:-axes], old_chol.shape[:-axes], row_cov_bound.shape)
        mean_rows = torch.broadcast_shapes(mean.shape[:-1], old_mean.shape[:-1], row_mean_bound.shape, old_chol.shape[:-axes])
        torch.broadcast_shapes(cov_rows, mean_rows)
    except RuntimeError:
        raise ValueError(
            f"{name}: leading axes do not fit together: mean {list(mean.shape)}, chol {list(chol.shape)}, old_mean "
            f"{list(old_mean.shape)}, old_chol {list(old_chol.shape)}, mean_bound {list(row_mean_bound.shape)}, cov_bound "
            f"{list(row_cov_bound.shape)}; `diagonal` is {diagonal}."
        ) from None
    matrix = chol.shape[-axes:]
    return _Gaussians(
        mean.expand(*mean_rows, -1),
        chol.expand(*cov_rows, *matrix),
        old_mean.expand(*mean_rows, -1),
        old_chol.expand(*cov_rows, *matrix),
        row_mean_bound.expand(mean_rows),
        row_cov_bound.expand(cov_rows),
        old_chol,
    )


def check_factor(name: str, key: str, chol: Tensor, dimension: int, diagonal: bool) -> None:
    """A factor is [*, D, D] and lower triangular; a diagonal one is [*, D]."""
    wanted = (dimension,) if diagonal else (dimension, dimension)
    if chol.shape[-len(wanted) :] != wanted:
        shape = "standard deviations [*, D]" if diagonal else "a lower Cholesky factor [*, D, D]"
        raise ValueError(f"{name}: `{key}` is {shape} with D = {dimension}, diagonal={diagonal}; got {list(chol.shape)}.")
    if not diagonal and bool((chol.triu(1) != 0).any()):
        raise ValueError(
            f"{name}: `{key}` has entries above its diagonal, so it is no lower Cholesky factor. "
            "Was a covariance passed? Use torch.linalg.cholesky(cov)."
        )


def check_bound(name: str, key: str, bound: float | Tensor, like: Tensor) -> Tensor:
    """The bound as a tensor without gradient, ≥ 0."""
    valid = bool((bound >= 0).all()) if isinstance(bound, Tensor) else number_in(bound, 0)
    if not valid:
        worst = bound.min().item() if isinstance(bound, Tensor) else bound
        raise ValueError(f"{name}: `{key}` is a distance and must be ≥ 0 (inf switches it off); got {worst}.")
    return torch.as_tensor(bound, dtype=like.dtype, device=like.device).detach()
