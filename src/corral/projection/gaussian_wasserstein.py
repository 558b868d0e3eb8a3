"""The Gaussian nearest to the new policy inside a Wasserstein ball around the old one, mean and covariance apart."""

import torch
from jaxtyping import Float
from torch import Tensor

from corral.divergence.gaussian import WassersteinForm, mahalanobis, wasserstein_line
from corral.numerics import without_autocast
from corral.projection.gaussian import GaussianProjection, Step, check_gaussians, join_steps, lower_factor, radial, step_mean


@without_autocast
def project_gaussian_wasserstein(
    mean: Float[Tensor, "*#b D"],
    chol: Float[Tensor, "... D"],
    old_mean: Float[Tensor, "*#b D"],
    old_chol: Float[Tensor, "... D"],
    *,
    mean_bound: float | Float[Tensor, "*#b"],
    cov_bound: float | Float[Tensor, "..."],
    form: WassersteinForm = "commuting",
    scaled: bool = True,
    diagonal: bool = False,
) -> GaussianProjection:
    """Project the new policy onto the squared Wasserstein-2 ball around the old one, its mean and its covariance apart.

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
        mean, old_mean: [*b, D].
        chol, old_chol: lower Cholesky factors [*c, D, D], *c broadcasting with *b; with `diagonal`, standard deviations
            [*c, D].
        mean_bound, cov_bound: ε_μ, ε_Σ ≥ 0, squared distances without a factor ½; inf switches that part off.
    Returns:
        GaussianProjection, as `project_gaussian_kl` has it, with squared distances in the place of KLs.
    Ref:
        Otto et al. 2021, arXiv:2101.09207. Invariant: t of the way is t² of the squared distance.
    """
    g = check_gaussians("project_gaussian_wasserstein", mean, chol, old_mean, old_chol, mean_bound, cov_bound, diagonal)
    gap = g.mean - g.old_mean
    distance = mahalanobis(gap, g.shared_old_chol, diagonal) if scaled else gap.square().sum(-1)
    moved = step_mean(g.mean, g.old_mean, distance, g.mean_bound)
    return join_steps(moved, _step_covariance(g.chol, g.old_chol, g.cov_bound, form, scaled, diagonal))


def _step_covariance(chol: Tensor, old: Tensor, bound: Tensor, form: WassersteinForm, scaled: bool, diagonal: bool) -> Step:
    line = wasserstein_line(chol, old, form, scaled, diagonal)
    step = radial(line.distance, bound)
    axes = (..., None) if diagonal else (..., None, None)
    reached = (step.active & (step.t > 0))[axes]
    # Rows that do not move would still be factorised and differentiated: they go through as old, and come out unused.
    factor = line.start + step.value[axes] * torch.where(reached, line.step, 0.0)
    if not diagonal:
        factor = lower_factor(old @ factor if form == "bures" and scaled else factor)
    moved = torch.where(reached, factor, old)
    return step._replace(value=torch.where(step.active[axes], moved, chol))
