"""Divergences of Gaussians from Cholesky factors, with separate parts for the mean and the covariance."""

import math
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from corral.numerics import NEAR, at_least_float32, expm1_minus, in_one_dtype, require_tensors, without_autocast

WassersteinForm = Literal["commuting", "bures"]
Mean = Float[Tensor, "*#b D"]
"""Type of a tensor with means of Gaussians [*b D]."""
Chol = Float[Tensor, "... D"]
"""Type of a tensor with lower Cholesky factors of covariances [*c D D], or with standard deviations [*c D]."""


class GaussianDistance(NamedTuple):
    """Divergence of two Gaussians, split into a part for the means and a part for the covariances."""

    mean: Tensor
    """Part of the divergence caused by the difference of the means [*b]."""
    cov: Tensor
    """Part of the divergence caused by the difference of the covariances [*c]. A shared covariance gives a single number."""

    @property
    def total(self) -> Tensor:
        """Total divergence [*]: the sum of its mean part and its covariance part."""
        return self.mean + self.cov


def gaussian_kl(mean_p: Mean, chol_p: Chol, mean_q: Mean, chol_q: Chol, *, diagonal: bool = False) -> GaussianDistance:
    """Compute KL(p‖q) of two Gaussians, as a sum in which no digits cancel.

        mean  ½ |L_q⁻¹ (μ_p − μ_q)|²
        cov   ½ (tr A − D − log det A) = ½ [Σ_i (b_ii² − 1 − log b_ii²) + Σ_{i>j} b_ij²]     B = L_q⁻¹ L_p,  A = B Bᵀ

    Every term of the last sum is ≥ 0 and keeps its digits as p → q, where trace and determinant would cancel.

    Args:
        mean_p, mean_q: [*, D].
        chol_p, chol_q: lower Cholesky factors [*, D, D]; with `diagonal`, standard deviations [*, D].
    Returns:
        Both parts in nats, differentiable in everything.
    Ref:
        Invariant: an invertible affine map of both Gaussians changes neither part.
    """
    mean_p, chol_p, mean_q, chol_q = _tensors("gaussian_kl", mean_p=mean_p, chol_p=chol_p, mean_q=mean_q, chol_q=chol_q)
    return GaussianDistance(0.5 * mahalanobis(mean_p - mean_q, chol_q, diagonal), kl_of_covariances(chol_p, chol_q, diagonal))


@without_autocast
def gaussian_wasserstein(
    mean_p: Mean,
    chol_p: Chol,
    mean_q: Mean,
    chol_q: Chol,
    *,
    form: WassersteinForm = "bures",
    scaled: bool = False,
    diagonal: bool = False,
) -> GaussianDistance:
    """Squared Wasserstein-2 distance of two Gaussians, with separate parts for mean and covariance.

        mean        |μ_p − μ_q|²
        bures       tr Σ_p + tr Σ_q − 2 tr (L_qᵀ Σ_p L_q)^½          exact
        commuting   |R_p − R_q|²   with symmetric roots R = Σ^½      exact where Σ_p Σ_q = Σ_q Σ_p, above it elsewhere

    `scaled` measures in units of q: |L_q⁻¹ (μ_p − μ_q)|², |(L_q⁻¹ Σ_p L_q⁻ᵀ)^½ − I|² and |R_p R_q⁻¹ − I|².

    Args:
        mean_p, mean_q: [*, D].
        chol_p, chol_q: lower Cholesky factors [*, D, D]; with `diagonal`, standard deviations [*, D].
        form: "bures", or "commuting" for the form that trust-region layers use.
    Returns:
        Both parts, differentiable in everything, once.
    Ref:
        Givens and Shortt 1984; the commuting form: Otto et al. 2021, arXiv:2101.09207. Invariant: bures ≤ commuting.
    """
    mean_p, chol_p, mean_q, chol_q = _tensors(
        "gaussian_wasserstein", mean_p=mean_p, chol_p=chol_p, mean_q=mean_q, chol_q=chol_q
    )
    gap = mean_p - mean_q
    mean = mahalanobis(gap, chol_q, diagonal) if scaled else gap.square().sum(-1)
    return GaussianDistance(mean, wasserstein_line(chol_p, chol_q, form, scaled, diagonal).distance)


@without_autocast
def gaussian_frobenius(mean_p: Mean, chol_p: Chol, mean_q: Mean, chol_q: Chol, *, diagonal: bool = False) -> GaussianDistance:
    """Squared Frobenius distance of the covariances, and squared Mahalanobis distance of the means under q.

        mean  |L_q⁻¹ (μ_p − μ_q)|²          cov  |Σ_p − Σ_q|²

    Args:
        mean_p, mean_q: [*, D].
        chol_p, chol_q: lower Cholesky factors [*, D, D]; with `diagonal`, standard deviations [*, D].
    Returns:
        Both parts, differentiable in everything. The covariance's has the units of the covariance, squared.
    Ref:
        Otto et al. 2021, arXiv:2101.09207. Invariant: cov is symmetric in p and q.
    """
    mean_p, chol_p, mean_q, chol_q = _tensors("gaussian_frobenius", mean_p=mean_p, chol_p=chol_p, mean_q=mean_q, chol_q=chol_q)
    cov = covariance_gap(chol_p, chol_q, diagonal).square().sum(-1 if diagonal else (-2, -1))
    return GaussianDistance(mahalanobis(mean_p - mean_q, chol_q, diagonal), cov)


def gaussian_entropy(chol: Chol, *, diagonal: bool = False) -> Float[Tensor, "*c"]:
    """Differential entropy of a Gaussian.

        H = ½ D log 2πe + Σ_i log l_ii

    Args:
        chol: lower Cholesky factor [*, D, D]; with `diagonal`, standard deviations [*, D].
    Returns:
        H in nats [*], NaN where a diagonal entry is negative.
    Ref:
        Cover and Thomas 2006, theorem 8.4.1. Invariant: scaling the factor by c adds D log c.
    """
    require_tensors("gaussian_entropy", chol=chol)
    std = at_least_float32(chol) if diagonal else at_least_float32(chol).diagonal(dim1=-2, dim2=-1)
    return 0.5 * math.log(2 * math.pi * math.e) * std.shape[-1] + std.log().sum(-1)


# ---------------------------------------------------------------------------------------------------- parts


def _tensors(where: str, **given: Tensor) -> tuple[Tensor, ...]:
    """Convert the arguments to one dtype. Raises a ValueError that names the first argument that is not a tensor."""
    require_tensors(where, **given)
    return in_one_dtype(*given.values())


def mahalanobis(gap: Tensor, chol: Tensor, diagonal: bool) -> Tensor:
    """Squared Mahalanobis length |L⁻¹ gap|² [*] of the vector `gap`, where L is the Cholesky factor of a covariance."""
    if diagonal:
        white = gap / chol
    elif chol.ndim == 2:  # one factor serves all rows in a single solve
        white = torch.linalg.solve_triangular(chol, gap.reshape(-1, gap.shape[-1]).mT, upper=False).mT.reshape(gap.shape)
    else:
        white = torch.linalg.solve_triangular(chol, gap[..., None], upper=False).squeeze(-1)
    return white.square().sum(-1)


def kl_of_covariances(chol_p: Tensor, chol_q: Tensor, diagonal: bool) -> Tensor:
    """Covariance part of the KL between Gaussians, ½ (tr A − D − log det A) with A = Σ_q⁻¹ Σ_p [*].

    It is NaN where a factor has a negative diagonal entry, and inf where p's has a zero.
    """
    # F = B − I, from the difference of the factors: what is small stays small instead of being what is left of I − I.
    if diagonal:
        gap = (chol_p - chol_q) / chol_q
        ratio, below = chol_p / chol_q, gap.new_zeros(())
    else:
        f = torch.linalg.solve_triangular(chol_q, chol_p - chol_q, upper=False)
        gap = f.diagonal(dim1=-2, dim2=-1)
        ratio = chol_p.diagonal(dim1=-2, dim2=-1) / chol_q.diagonal(dim1=-2, dim2=-1)
        below = f.tril(-1).square().sum((-2, -1))
    near = gap.abs() < NEAR
    log_ratio = torch.where(near, torch.where(near, gap, 0.0).log1p(), torch.where(near, 1.0, ratio).log())
    return 0.5 * (expm1_minus(2 * log_ratio).sum(-1) + below)


def covariance_gap(chol_p: Tensor, chol_q: Tensor, diagonal: bool) -> Tensor:
    """Compute the difference of two covariances, Σ_p − Σ_q [*, D, D]. For diagonal covariances, compute its diagonal [*, D].

    From the difference F = L_p − L_q of the factors it is F L_qᵀ + L_q Fᵀ + F Fᵀ, which avoids cancellation.
    """
    f = chol_p - chol_q
    if diagonal:
        return f * (chol_p + chol_q)
    cross = f @ chol_q.mT
    return cross + cross.mT + f @ f.mT


class _WassersteinLine(NamedTuple):
    """Straight line between square roots of two covariances. The covariance at t is F_t F_tᵀ with F_t = F_q + t (F_p − F_q)."""

    start: Tensor
    """Square root F_q of the covariance at which the straight line starts, in the line's coordinates."""
    step: Tensor
    """Difference F_p − F_q of the covariances' square roots, in the line's coordinates."""
    distance: Tensor
    """Squared length [*] of the straight line between the covariances' square roots.
    The part up to position t has t² times this squared length."""


def wasserstein_line(chol_p: Tensor, chol_q: Tensor, form: WassersteinForm, scaled: bool, diagonal: bool) -> _WassersteinLine:
    """Build the straight line between square roots of two covariances, whose length is the covariances' Wasserstein distance.

    With "bures" and `scaled` its start is I, in the frame of q.

    The optimal map from q to p is T = L_q⁻ᵀ (L_qᵀ Σ_p L_q)^½ L_q⁻¹, so T L_q is a root of Σ_p, and |(T − I) L_q|² is the
    squared distance: the Bures geodesic is the straight line from L_q to T L_q.
    """
    if form not in get_args(WassersteinForm):
        raise ValueError(f"Wasserstein distance: `form` is one of {', '.join(get_args(WassersteinForm))}; got {form!r}.")
    if diagonal:  # all forms are one
        step = chol_p - chol_q
        return _WassersteinLine(chol_q, step, (step / chol_q if scaled else step).square().sum(-1))
    if form == "commuting":
        start = symmetric_root(chol_q)
        step = symmetric_root(chol_p) - start
        # R_q and L_q differ by a rotation, which a norm does not see: |X R_q⁻¹| = |X L_q⁻ᵀ|.
        measured = torch.linalg.solve_triangular(chol_q.mT, step, upper=True, left=False) if scaled else step
    elif scaled:
        start = torch.eye(chol_q.shape[-1], dtype=chol_q.dtype, device=chol_q.device)
        measured = step = symmetric_root(torch.linalg.solve_triangular(chol_q, chol_p, upper=False)) - start
    else:
        start = chol_q
        end = torch.linalg.solve_triangular(chol_q.mT, symmetric_root(chol_q.mT @ chol_p), upper=True)
        measured = step = end - start
    return _WassersteinLine(start, step, measured.square().sum((-2, -1)))


def symmetric_root(factor: Tensor) -> Tensor:
    """Symmetric positive square root (F Fᵀ)^½ [*, D, D] of F Fᵀ for any square matrix F. NaN on rows that are not finite."""
    finite = factor.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    safe = torch.where(finite, factor, torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device))
    root, _, _ = _SymmetricRoot.apply(safe)  # LAPACK refuses a whole batch for one NaN
    return torch.where(finite, root, torch.nan)


class _SymmetricRoot(torch.autograd.Function):
    """Autograd function for the symmetric square root R = U S Uᵀ of F Fᵀ, from the singular value decomposition F = U S Vᵀ.

    It does not square F's condition number.

    Gradient. R R = F Fᵀ, so R dR + dR R = dF Fᵀ + F dFᵀ, which in the basis U is (σ_i + σ_j) dR_ij on the left. With
    Z_ij = Ḡ_ij / (σ_i + σ_j) in that basis, Ḡ symmetrised, ⟨Ḡ, dR⟩ = ⟨Z, dF Fᵀ + F dFᵀ⟩ = ⟨2 Z F, dF⟩. Sums of singular
    values are divided by, never differences.
    """

    @staticmethod
    def forward(factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u, sigma, _ = torch.linalg.svd(factor)
        return (u * sigma[..., None, :]) @ u.mT, u, sigma

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, u, sigma = output
        ctx.mark_non_differentiable(u, sigma)
        ctx.save_for_backward(inputs[0], u, sigma)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Tensor:
        factor, u, sigma = ctx.saved_tensors
        inner = u.mT @ (grad + grad.mT) @ u
        z = inner / (sigma[..., :, None] + sigma[..., None, :])
        return u @ z @ u.mT @ factor  # the symmetrising half and the 2 cancel
