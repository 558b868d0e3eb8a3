"""The Gaussian nearest to the new policy inside a Frobenius ball around the old one, mean and covariance apart."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from corral.divergence.gaussian import covariance_gap, mahalanobis
from corral.numerics import without_autocast
from corral.projection.gaussian import GaussianProjection, Step, check_gaussians, join_steps, lower_factor, radial, step_mean
from corral.projection.gaussian_tilt import factor_pullback


@without_autocast
def project_gaussian_frobenius(
    mean: Float[Tensor, "*#b D"],
    chol: Float[Tensor, "... D"],
    old_mean: Float[Tensor, "*#b D"],
    old_chol: Float[Tensor, "... D"],
    *,
    mean_bound: float | Float[Tensor, "*#b"],
    cov_bound: float | Float[Tensor, "..."],
    diagonal: bool = False,
) -> GaussianProjection:
    """Project the new policy onto balls around the old one: Mahalanobis for the mean, Frobenius for the covariance.

        μ̃ = μ_o + t (μ − μ_o)          |L_o⁻¹ (μ̃ − μ_o)|² ≤ ε_μ
        Σ̃ = Σ_o + t (Σ − Σ_o)          |Σ̃ − Σ_o|² ≤ ε_Σ               t = √(ε / before)

    Σ̃ lies between two positive matrices, so it is one. The bound has the units of the covariance, squared: it must be
    chosen for each task.

    Gradients flow to `mean` and `chol` alone, through t too. Rows inside the ball are returned unchanged.

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
    g = check_gaussians("project_gaussian_frobenius", mean, chol, old_mean, old_chol, mean_bound, cov_bound, diagonal)
    distance = mahalanobis(g.mean - g.old_mean, g.shared_old_chol, diagonal)
    moved = step_mean(g.mean, g.old_mean, distance, g.mean_bound)
    return join_steps(moved, _step_covariance(g.chol, g.old_chol, g.cov_bound, diagonal))


def _step_covariance(chol: Tensor, old: Tensor, bound: Tensor, diagonal: bool) -> Step:
    gap = covariance_gap(chol, old, diagonal)
    step = radial(gap.square().sum(-1 if diagonal else (-2, -1)), bound)
    axes = (..., None) if diagonal else (..., None, None)
    reached = (step.active & (step.t > 0))[axes]
    move = torch.where(reached, step.value[axes] * torch.where(reached, gap, 0.0), 0.0)
    if diagonal:
        moved = (old.square() + move).sqrt()
    else:
        with torch.no_grad():  # Σ̃ = F Fᵀ with F = (√(1 − t) L_o, √t L), which nothing makes indefinite
            t = step.t[axes]
            factor = lower_factor(torch.cat([(1 - t).sqrt() * old, t.sqrt() * torch.where(reached, chol, old)], -1))
        moved = _FactorOf.apply(move, factor)
    return step._replace(value=torch.where(step.active[axes], torch.where(reached, moved, old), chol))


class _FactorOf(torch.autograd.Function):
    """The Cholesky factor of a constant plus `move`, found beforehand; here is its gradient, ⟨Ψ, L̃⁻¹ dΣ̃ L̃⁻ᵀ⟩ = ⟨Ḡ, dL̃⟩."""

    @staticmethod
    def forward(move: Tensor, factor: Tensor) -> Tensor:
        return factor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        half = torch.linalg.solve_triangular(factor.mT, factor_pullback(factor, grad), upper=True)
        return torch.linalg.solve_triangular(factor, half, upper=False, left=False), None
