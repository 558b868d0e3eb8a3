"""TCE's core: the Gaussian nearest to the new policy inside a KL ball around the old one, mean and covariance apart."""

import torch
from jaxtyping import Float
from torch import Tensor

from corral.divergence.gaussian import kl_of_covariances, mahalanobis
from corral.numerics import expm1_minus, without_autocast
from corral.projection.gaussian import (
    TOLERANCE,
    GaussianProjection,
    Step,
    check_gaussians,
    confirm_step,
    join_steps,
    step_mean,
    whitening_error,
)
from corral.projection.gaussian_tilt import RelativePrecision, relative_precision, tilted_factor
from corral.projection.root import find_root

_MAX_STEPS = 64
"""A handful is enough up to bounds of a nat. Beyond, the root may lie 2⁻⁴⁰ of the bracket from 0 and be found by halving."""


@without_autocast
def project_gaussian_kl(
    mean: Float[Tensor, "*#b D"],
    chol: Float[Tensor, "... D"],
    old_mean: Float[Tensor, "*#b D"],
    old_chol: Float[Tensor, "... D"],
    *,
    mean_bound: float | Float[Tensor, "*#b"],
    cov_bound: float | Float[Tensor, "..."],
    diagonal: bool = False,
) -> GaussianProjection:
    """Project the new policy onto the KL ball around the old one, its mean and its covariance each within their own bound.

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
    g = check_gaussians("project_gaussian_kl", mean, chol, old_mean, old_chol, mean_bound, cov_bound, diagonal)
    distance = 0.5 * mahalanobis(g.mean - g.old_mean, g.shared_old_chol, diagonal)
    moved = step_mean(g.mean, g.old_mean, distance, g.mean_bound)
    with torch.no_grad():
        error = whitening_error(g.shared_old_chol, diagonal)
        measured = 0.5 * mahalanobis(moved.value - g.old_mean, g.shared_old_chol, diagonal)
    spread = _step_covariance(g.chol, g.old_chol, g.cov_bound, error, diagonal)
    return join_steps(confirm_step(moved, measured, g.mean_bound, error), spread)


def _step_covariance(chol: Tensor, old: Tensor, bound: Tensor, error: Tensor, diagonal: bool) -> Step:
    with torch.no_grad():
        before = kl_of_covariances(chol, old, diagonal)
        active = before > bound
    t, after, converged = torch.ones_like(before), before.clone(), ~before.isnan()
    if not bool(active.any()):
        return confirm_step(Step(chol, t, active, before, after, converged), before, bound, error)
    rows = chol[active], old[active]  # few may be outside: solve those only
    with torch.no_grad():
        precision = relative_precision(*rows, diagonal)
        t[active], after[active], converged[active] = solve_tilt(precision, bound[active])
    tilted = tilted_factor(*rows, precision, t[active], torch.zeros_like(t[active]), diagonal)
    out, measured = chol.clone(), after.clone()
    out[active] = tilted
    # Rounding moves a KL of ε by about eps κ D / √ε of itself: mostly nothing, and then nobody has to measure it.
    if bool((error * chol.shape[-1] > TOLERANCE / 100 * bound.sqrt())[active].any()):
        measured[active] = kl_of_covariances(tilted.detach(), rows[1], diagonal)
    return confirm_step(Step(out, t, active, before, after, converged), measured, bound, error)


def solve_tilt(precision: RelativePrecision, bound: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The t at which K(t) = ε, K(t) and converged, on rows outside the ball.

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
