"""Projection of a Gaussian policy into a ball around the old policy, with separate bounds for mean and covariance.

The ball is of the KL (TCE's core), of Wasserstein's distance, or of Frobenius' norm. In all three the mean moves on a straight
line; the covariance's path differs.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from corral.divergence.gaussian import (
    Chol,
    Mean,
    WassersteinForm,
    covariance_gap,
    kl_of_covariances,
    mahalanobis,
    wasserstein_line,
)
from corral.numerics import expm1_minus, in_one_dtype, require_tensors, without_autocast
from corral.projection.factor import RelativePrecision, factor_of, relative_precision, tilted_factor
from corral.projection.root import find_root
from corral.validate import number_in

Bound = float | Float[Tensor, "..."]
"""Bound on a divergence: one number for all Gaussians of a batch, or one number for each."""

TOLERANCE = 0.01
"""Largest relative difference between a projection's KL and its bound at which the projection counts as converged."""

_MAX_STEPS = 64
"""Largest number of solver steps. A few steps are enough for bounds of up to one nat; larger bounds may need bisection."""


@dataclass(frozen=True, eq=False)
class GaussianProjection:
    """Projected Gaussian policy, with the solver's status for each row of the batch.

    Means have rows *b and covariances rows *c: a covariance that all means share is projected once, and stays one.
    """

    mean: Float[Tensor, "*b D"]
    """Mean μ̃ of the projected Gaussian, differentiable in the new policy's mean."""
    chol: Float[Tensor, "... D"]
    """Projected Cholesky factor L̃ [*c, D, D], or standard deviations [*c, D]; differentiable in the new policy's factor."""
    dual_mean: Float[Tensor, "*b"]
    """Lagrange multiplier η ≥ 0 of the bound on the mean: 0 where the new mean is inside, inf where μ̃ is the old mean."""
    dual_cov: Float[Tensor, "*c"]
    """Lagrange multiplier of the bound on the covariance: 0 where the new one is inside, inf where the old one is returned."""
    active_mean: Bool[Tensor, "*b"]
    """True where the new mean lay outside the bound on the mean."""
    active_cov: Bool[Tensor, "*c"]
    """True where the new covariance lay outside the bound on the covariance."""
    before_mean: Float[Tensor, "*b"]
    """Distance of the new mean from the old mean before the projection, as KL, Wasserstein or Mahalanobis distance."""
    before_cov: Float[Tensor, "*c"]
    """Distance of the new covariance from the old covariance before projecting, as KL, Wasserstein or Frobenius distance."""
    after_mean: Float[Tensor, "*b"]
    """Distance of the projected mean from the old mean. It equals the bound where the new mean lay outside."""
    after_cov: Float[Tensor, "*c"]
    """Distance of the projected covariance from the old covariance."""
    converged: Bool[Tensor, "*d"]
    """True for rows whose mean and covariance both converged. False if an input was not a Gaussian or the solver stopped early.
    For KL also False where rounding keeps the result from its bound; `after_…` then has the actual value."""


class _Gaussians(NamedTuple):
    """Validated inputs of a Gaussian projection, converted to one dtype. The old policy's values carry no gradient.

    Factors and their bound share the rows *c.
    """

    mean: Tensor
    chol: Tensor
    old_mean: Tensor
    old_chol: Tensor
    mean_bound: Tensor
    cov_bound: Tensor
    shared_old_chol: Tensor
    """Old Cholesky factor with its original batch axes, so that a single shared factor whitens all means in one solve."""
    diagonal: bool

    @property
    def entries(self) -> tuple[Any, ...]:
        """Index that makes values per row [*c] broadcast over the entries of the Cholesky factors."""
        return (..., None) if self.diagonal else (..., None, None)


# ---------------------------------------------------------------------------------------------------- steps


class _Part(NamedTuple):
    """Result of projecting either the mean or the covariance."""

    value: Tensor
    t: Tensor
    """Position on the path from the old policy (t = 0) to the new policy (t = 1)."""
    active: Tensor
    before: Tensor
    after: Tensor
    converged: Tensor


def _join(mean: _Part, cov: _Part) -> GaussianProjection:
    """Combine the projections of mean and covariance into one result."""
    return GaussianProjection(
        mean.value, cov.value, (1 - mean.t) / mean.t, (1 - cov.t) / cov.t, mean.active, cov.active,
        mean.before, cov.before, mean.after, cov.after, mean.converged & cov.converged,
    )  # fmt: skip


def _radial(distance: Tensor, bound: Tensor) -> _Part:
    """Find the position t at which a straight line of squared length `distance` reaches the bound.

        t = √(ε / distance)  where distance > ε,  else 1

    t is 0, and not converged, where the distance overflowed, and 1 where it is NaN. `value` is t with its gradient.
    """
    with torch.no_grad():
        active = distance > bound
        reachable = active & distance.isfinite()
    # sqrt(ε / distance) would divide 0 by 0 in the gradient where ε = 0.
    t = bound.sqrt() * torch.where(reachable, distance, 1.0).rsqrt()
    t = torch.where(reachable, t, torch.where(active, 0.0, 1.0))
    fixed, before = t.detach(), distance.detach()
    after = torch.where(reachable, fixed**2 * before, torch.where(active, 0.0, before))
    return _Part(t, fixed, active, before, after, before.isfinite())


def _step_mean(g: _Gaussians, distance: Tensor) -> _Part:
    """Compute the projected mean μ̃ = μ_o + t (μ − μ_o), the nearest mean to μ within the bound.

    `distance` is differentiable in the mean, so that at the bound μ̃ moves along the ellipsoid and not further out.
    """
    step = _radial(distance, g.mean_bound)
    gap = torch.where((step.t > 0)[..., None], g.mean - g.old_mean, 0.0)
    moved = g.old_mean + step.value[..., None] * gap
    return step._replace(value=torch.where(step.active[..., None], moved, g.mean))


def _move_covariance(g: _Gaussians, step: _Part, moved: Tensor) -> _Part:
    """Choose each row's covariance factor: the new factor inside the bound, `moved` outside, and the old factor where t = 0."""
    reached = (step.active & (step.t > 0))[g.entries]
    return step._replace(value=torch.where(step.active[g.entries], torch.where(reached, moved, g.old_chol), g.chol))


def _lower_factor(factor: Tensor) -> Tensor:
    """Compute the Cholesky factor L of F Fᵀ for any F [*, D, ≥ D], by F = L Q, without computing the product F Fᵀ."""
    lower = torch.linalg.qr(factor.mT).R.mT
    return lower * torch.where(lower.detach().diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)[..., None, :]


# ---------------------------------------------------------------------------------------------------- Kullback-Leibler


@without_autocast
def project_gaussian_kl(
    mean: Mean, chol: Chol, old_mean: Mean, old_chol: Chol, *, mean_bound: Bound, cov_bound: Bound, diagonal: bool = False
) -> GaussianProjection:
    """Project the new Gaussian policy onto KL balls around the old policy, with separate bounds for mean and covariance.

        μ̃ = μ_o + t (μ − μ_o)                 ½ |L_o⁻¹ (μ̃ − μ_o)|² ≤ ε_μ
        Σ̃ = ((1 − t) Σ_o⁻¹ + t Σ⁻¹)⁻¹         ½ (tr Σ_o⁻¹Σ̃ − D − log det Σ_o⁻¹Σ̃) ≤ ε_Σ          t = 1 / (1 + η) ∈ (0, 1]

    the minimisers of the same two terms with the new policy in the old one's place. μ̃'s t is √(ε_μ/before). With q_i the
    eigenvalues of Q = L_oᵀ Σ⁻¹ L_o − I and s_i = 1/(1 + t q_i), the covariance's is the one root of

        K(t) = ½ Σ (s_i − 1 − log s_i) = ε_Σ

    which rises from 0 at slope K′ = t/2 Σ (q_i s_i)²; Newton's method on K^−½ as a function of η finds it.

    Gradients flow to `mean` and `chol` alone, exact by the implicit function theorem; eigenvectors are never computed, so
    equal eigenvalues are like any others. Rows inside the ball are returned unchanged.

    Args:
        mean, old_mean: [*b, D].
        chol, old_chol: lower Cholesky factors [*c, D, D], *c broadcasting with *b; one [D, D] is projected once for all
            means. With `diagonal`, standard deviations [*c, D].
        mean_bound, cov_bound: ε_μ, ε_Σ ≥ 0 in nats, one for all rows or one per row; inf switches that part off.
        diagonal: whether the factors are vectors. [D, D] could be read both ways, so it is said and not guessed.
    Returns:
        GaussianProjection in float32 or better, distances in nats. A part with a NaN, or whose factor has an infinite
        entry or a negative diagonal, comes back as it is; one whose distance overflows (a mean of inf, a zero on the new
        diagonal) becomes the old policy's, dual = inf, gradient 0. Both have converged = False. So has a part around an old
        policy so ill-conditioned that numbers of this dtype are too coarse to keep it to its bound within 1 %: it comes back
        as found, with `after` as measured.
    Ref:
        Otto et al. 2021, arXiv:2101.09207. Invariant: commutes with invertible affine maps of both policies.
    """
    g = _check_gaussians("project_gaussian_kl", mean, chol, old_mean, old_chol, mean_bound, cov_bound, diagonal)
    moved = _step_mean(g, 0.5 * mahalanobis(g.mean - g.old_mean, g.shared_old_chol, diagonal))
    with torch.no_grad():
        error = whitening_error(g.shared_old_chol, diagonal)
        measured = 0.5 * mahalanobis(moved.value - g.old_mean, g.shared_old_chol, diagonal)
    return _join(_confirm(moved, measured, g.mean_bound, error), _step_covariance_kl(g, error))


def _step_covariance_kl(g: _Gaussians, error: Tensor) -> _Part:
    """Project the covariance onto its KL ball. Only rows outside the ball need the solver, and most rows are inside."""
    chol, bound = g.chol, g.cov_bound
    with torch.no_grad():
        before = kl_of_covariances(chol, g.old_chol, g.diagonal)
        active = before > bound
    t, after, converged = torch.ones_like(before), before.clone(), ~before.isnan()
    if not bool(active.any()):
        return _confirm(_Part(chol, t, active, before, after, converged), before, bound, error)
    rows = chol[active], g.old_chol[active]
    with torch.no_grad():
        precision = relative_precision(*rows, g.diagonal)
        t[active], after[active], converged[active] = solve_tilt(precision, bound[active])
    tilted = tilted_factor(*rows, precision, t[active], torch.zeros_like(t[active]), g.diagonal)
    out, measured = chol.clone(), after.clone()
    out[active] = tilted
    # Rounding moves a KL of ε by about eps κ D / √ε of itself: mostly nothing, and then nobody has to measure it.
    if bool((error * chol.shape[-1] > TOLERANCE / 100 * bound.sqrt())[active].any()):
        measured[active] = kl_of_covariances(tilted.detach(), rows[1], g.diagonal)
    return _confirm(_Part(out, t, active, before, after, converged), measured, bound, error)


def solve_tilt(precision: RelativePrecision, bound: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the position t at which the KL equals the bound, on rows outside the KL ball. Returns t, the KL and convergence.

    In formulas, K(t) = ε.

    With δ_i = s_i − 1 = −q_i / (1 + q_i + η), a term s − 1 − log s is at most δ²/2 if s > 1, and δ²/2s if s < 1; both are
    at most q²/2η². So K(η) ≤ Σ q² / 4η², and the root lies below η₀ = √(Σ q² / 4ε). For η ≫ |q| the inequality is an
    equation, K^−½ a straight line in η, and Newton's method from η₀ exact. K′(η) = −Σ δ² / 2(1 + η).
    """
    q = precision.values
    size = q.norm(dim=-1)
    finite = precision.finite & size.isfinite()
    binding = finite & (bound > 0) & (size > 0)
    epsilon = torch.where(binding, bound, 1.0)
    upper = torch.where(binding, size / (2 * epsilon.sqrt()), 1.0)

    def divergence(eta: Tensor) -> tuple[Tensor, Tensor]:
        log_s = -torch.log1p(q / (1 + eta[..., None]))
        return 0.5 * expm1_minus(log_s).sum(-1), -0.5 * torch.expm1(log_s).square().sum(-1) / (1 + eta)

    def excess(x: Tensor) -> tuple[Tensor, Tensor]:
        kl, slope = divergence(x * upper)
        root = (epsilon / kl).sqrt()
        return torch.where(binding, root - 1, 0.0), -0.5 * root * slope / kl * upper

    ones = torch.ones_like(epsilon)
    found = find_root(excess, ones, scale=ones, max_steps=_MAX_STEPS)
    eta = found.x * upper
    t = torch.where(binding, 1 / (1 + eta), 0.0)
    return t, torch.where(binding, divergence(eta)[0], 0.0), found.converged & finite


def _confirm(step: _Part, measured: Tensor, bound: Tensor, error: Tensor) -> _Part:
    """Mark a projection as not converged unless its distance equals the bound up to `TOLERANCE`, including rounding errors.

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
    """Relative rounding error [*] of |L⁻¹ x|² when L⁻¹ x is computed by substitution.

    Substitution solves (L + ΔL) x̂ = x with |ΔL| ~ eps |L|.

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


# ---------------------------------------------------------------------------------------------------- Wasserstein


@without_autocast
def project_gaussian_wasserstein(
    mean: Mean,
    chol: Chol,
    old_mean: Mean,
    old_chol: Chol,
    *,
    mean_bound: Bound,
    cov_bound: Bound,
    form: WassersteinForm = "commuting",
    scaled: bool = True,
    diagonal: bool = False,
) -> GaussianProjection:
    """Project the new Gaussian policy onto Wasserstein-2 balls around the old policy, for the mean and for the covariance.

    The bounds are on squared distances, and separate for mean and covariance.

        μ̃ = μ_o + t (μ − μ_o)          t = √(ε_μ / before_mean)
        F̃ = F_o + t (F − F_o)          t = √(ε_Σ / before_cov),  Σ̃ = F̃ F̃ᵀ

        commuting   F = Σ^½, the symmetric root: the published form
        bures       F_o = L_o, F = T L_o with T the optimal map from old to new: the geodesic, and the exact distance

    Both are straight lines between square roots of the covariances, so the bound is met in closed form. In "commuting" the
    distance is an upper bound of Wasserstein's, equal to it where the covariances commute. `scaled` measures everything in
    units of the old policy (see `gaussian_wasserstein`), as published; without it, distances have the units of the mean,
    squared. All forms are one for diagonal covariances.

    Gradients flow to `mean` and `chol` alone, through t too; the symmetric root's divides by sums of singular values, never
    by differences. Rows inside the ball are returned unchanged.

    Args:
        mean, old_mean, chol, old_chol, diagonal: as in `project_gaussian_kl`.
        mean_bound, cov_bound: ε_μ, ε_Σ ≥ 0, squared distances without a factor ½; inf switches that part off.
    Returns:
        GaussianProjection, as `project_gaussian_kl` has it, with squared distances in the place of KLs.
    Ref:
        Otto et al. 2021, arXiv:2101.09207. Invariant: t of the way is t² of the squared distance.
    """
    g = _check_gaussians("project_gaussian_wasserstein", mean, chol, old_mean, old_chol, mean_bound, cov_bound, diagonal)
    gap = g.mean - g.old_mean
    moved = _step_mean(g, mahalanobis(gap, g.shared_old_chol, diagonal) if scaled else gap.square().sum(-1))
    line = wasserstein_line(g.chol, g.old_chol, form, scaled, diagonal)
    step = _radial(line.distance, g.cov_bound)
    reached = (step.active & (step.t > 0))[g.entries]
    # Rows that do not move would still be factorised and differentiated: they go through as old, and come out unused.
    factor = line.start + step.value[g.entries] * torch.where(reached, line.step, 0.0)
    if not diagonal:
        factor = _lower_factor(g.old_chol @ factor if form == "bures" and scaled else factor)
    return _join(moved, _move_covariance(g, step, factor))


# ---------------------------------------------------------------------------------------------------- Frobenius


@without_autocast
def project_gaussian_frobenius(
    mean: Mean, chol: Chol, old_mean: Mean, old_chol: Chol, *, mean_bound: Bound, cov_bound: Bound, diagonal: bool = False
) -> GaussianProjection:
    """Project the new Gaussian policy onto balls around the old policy: Mahalanobis for the mean, Frobenius for the covariance.

        μ̃ = μ_o + t (μ − μ_o)          |L_o⁻¹ (μ̃ − μ_o)|² ≤ ε_μ
        Σ̃ = Σ_o + t (Σ − Σ_o)          |Σ̃ − Σ_o|² ≤ ε_Σ               t = √(ε / before)

    Σ̃ lies between two positive matrices, so it is one. The bound has the units of the covariance, squared: it must be
    chosen for each task.

    Gradients flow to `mean` and `chol` alone, through t too. Rows inside the ball are returned unchanged.

    Args:
        mean, old_mean, chol, old_chol, diagonal: as in `project_gaussian_kl`.
        mean_bound, cov_bound: ε_μ, ε_Σ ≥ 0, squared distances without a factor ½; inf switches that part off.
    Returns:
        GaussianProjection, as `project_gaussian_kl` has it, with squared distances in the place of KLs.
    Ref:
        Otto et al. 2021, arXiv:2101.09207. Invariant: t of the way is t² of the squared distance.
    """
    g = _check_gaussians("project_gaussian_frobenius", mean, chol, old_mean, old_chol, mean_bound, cov_bound, diagonal)
    moved = _step_mean(g, mahalanobis(g.mean - g.old_mean, g.shared_old_chol, diagonal))
    gap = covariance_gap(g.chol, g.old_chol, diagonal)
    step = _radial(gap.square().sum(-1 if diagonal else (-2, -1)), g.cov_bound)
    reached = (step.active & (step.t > 0))[g.entries]
    move = torch.where(reached, step.value[g.entries] * torch.where(reached, gap, 0.0), 0.0)
    if diagonal:
        return _join(moved, _move_covariance(g, step, (g.old_chol.square() + move).sqrt()))
    with torch.no_grad():  # Σ̃ = F Fᵀ with F = (√(1 − t) L_o, √t L), which nothing makes indefinite
        t = step.t[g.entries]
        factor = _lower_factor(
            torch.cat([(1 - t).sqrt() * g.old_chol, t.sqrt() * torch.where(reached, g.chol, g.old_chol)], -1)
        )
    return _join(moved, _move_covariance(g, step, factor_of(move, factor)))


# ---------------------------------------------------------------------------------------------------- inputs


def _check_gaussians(
    name: str, mean: Tensor, chol: Tensor, old_mean: Tensor, old_chol: Tensor, mean_bound: Any, cov_bound: Any, diagonal: bool
) -> _Gaussians:
    """Validate the inputs of a projection, and convert them to one dtype and common rows. Raises ValueError if invalid."""
    require_tensors(name, mean=mean, chol=chol, old_mean=old_mean, old_chol=old_chol)
    for key, x in (("mean", mean), ("old_mean", old_mean)):
        _check_floating(name, key, x)
    dimension = mean.shape[-1] if mean.ndim else 0
    if not dimension or old_mean.shape[-1:] != mean.shape[-1:]:
        got = f"{list(mean.shape)} and {list(old_mean.shape)}"
        raise ValueError(f"{name}: both means need the same last axis, of at least one dimension; got {got}.")
    check_factor(name, "chol", chol, dimension, diagonal)
    check_factor(name, "old_chol", old_chol, dimension, diagonal)
    mean, chol, old_mean, old_chol = in_one_dtype(mean, chol, old_mean.detach(), old_chol.detach())
    mean_bound, cov_bound = check_bound(name, "mean_bound", mean_bound, mean), check_bound(name, "cov_bound", cov_bound, chol)
    axes = 1 if diagonal else 2
    old_rows, matrix = old_chol.shape[:-axes], chol.shape[-axes:]
    cov_rows = broadcast_rows(name, chol=chol.shape[:-axes], old_chol=old_rows, cov_bound=cov_bound.shape)
    means = {"mean": mean.shape[:-1], "old_mean": old_mean.shape[:-1], "mean_bound": mean_bound.shape}
    mean_rows = broadcast_rows(name, **means, old_chol=old_rows)
    broadcast_rows(name, means=mean_rows, covariances=cov_rows)
    mean, old_mean = (x.expand(*mean_rows, -1) for x in (mean, old_mean))
    chol, old = (x.expand(*cov_rows, *matrix) for x in (chol, old_chol))
    return _Gaussians(mean, chol, old_mean, old, mean_bound.expand(mean_rows), cov_bound.expand(cov_rows), old_chol, diagonal)


def broadcast_rows(name: str, **shapes: torch.Size) -> torch.Size:
    """Return the common shape of the tensors' leading axes. Raises ValueError with all shapes if there is none."""
    try:
        return torch.broadcast_shapes(*shapes.values())
    except RuntimeError:
        listed = ", ".join(f"{key} {list(shape)}" for key, shape in shapes.items())
        raise ValueError(f"{name}: leading axes do not fit together: {listed}. Is `diagonal` what the factors are?") from None


def _check_floating(name: str, key: str, x: Tensor) -> None:
    if not x.is_floating_point():
        raise ValueError(f"{name}: `{key}` must hold floating-point numbers; got dtype {x.dtype}.")


def check_factor(name: str, key: str, chol: Tensor, dimension: int, diagonal: bool) -> None:
    """Raise an error unless a Cholesky factor is [*, D, D] and lower triangular. With `diagonal`, it must be [*, D]."""
    _check_floating(name, key, chol)
    wanted = (dimension,) if diagonal else (dimension, dimension)
    if chol.shape[-len(wanted) :] != wanted:
        shape = "standard deviations [*, D]" if diagonal else "a lower Cholesky factor [*, D, D]"
        raise ValueError(f"{name}: `{key}` is {shape} with D = {dimension}, diagonal={diagonal}; got {list(chol.shape)}.")
    if not diagonal and bool((chol.triu(1) != 0).any()):
        raise ValueError(
            f"{name}: `{key}` has entries above its diagonal, so it is no lower Cholesky factor. "
            "Was a covariance passed? Use torch.linalg.cholesky(cov)."
        )


def check_bound(name: str, key: str, bound: Bound, like: Tensor) -> Tensor:
    """Convert a bound to a tensor ≥ 0 without gradient."""
    valid = bool((bound >= 0).all()) if isinstance(bound, Tensor) else number_in(bound, 0)
    if not valid:
        worst = bound.min().item() if isinstance(bound, Tensor) else bound
        raise ValueError(f"{name}: `{key}` is a distance and must be ≥ 0 (inf switches it off); got {worst}.")
    return torch.as_tensor(bound, dtype=like.dtype, device=like.device).detach()
