"""Cholesky factors of projected covariances, and their gradients. Projected covariances lie between old and new covariances."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class RelativePrecision(NamedTuple):
    """Difference of new and old precision matrix, Q = L_oᵀ Σ⁻¹ L_o − I, in coordinates where the old precision matrix is I."""

    gap: Tensor
    """Difference Q of new and old precision matrix [*, D, D], or its diagonal [*, D]. It is 0 on rows with NaN or inf."""
    values: Tensor
    """Eigenvalues q [*, D] of the difference Q of new and old precision matrix. All are ≥ −1."""
    finite: Tensor
    """True for rows [*] in which all values of the covariances are finite."""


def relative_precision(chol: Tensor, old: Tensor, diagonal: bool) -> RelativePrecision:
    """Compute the difference Q of new and old precision matrix and its eigenvalues, without cancellation for close policies.

    Q comes from G = L⁻¹ (L_o − L), so that no digits cancel where both policies are close.

    The precision and not the covariance: a projection needs r_i = 1 + t q_i, and t max|q| is of the order of √ε however
    ill-conditioned the policies are. Rounding Q by eps |Q| rounds r by eps.
    """
    if diagonal:
        g = (old - chol) / chol
        gap = g * (g + 2)
        finite = gap.isfinite().all(-1)
        gap = torch.where(finite[..., None], gap, 0.0)
        return RelativePrecision(gap, gap.clamp(min=-1), finite)
    g = torch.linalg.solve_triangular(chol, old - chol, upper=False)
    gap = g + g.mT + g.mT @ g
    finite = gap.isfinite().all(-1).all(-1)
    gap = torch.where(finite[..., None, None], gap, 0.0)  # LAPACK refuses a whole batch for one NaN
    return RelativePrecision(gap, torch.linalg.eigvalsh(gap).clamp(min=-1), finite)


def tilted_factor(
    chol: Tensor, old: Tensor, precision: RelativePrecision, t: Tensor, log_scale: Tensor, diagonal: bool
) -> Tensor:
    """Compute the Cholesky factor of the projected covariance c ((1 − t) Σ_o⁻¹ + t Σ⁻¹)⁻¹ on rows [n].

    Gradients flow through the constraints that determine t and c.

    KL(Σ̃‖Σ_o) is held, and det Σ̃ where log c = `log_scale` > 0; t = 0 has gradient 0.
    """
    function = _DiagonalTilt if diagonal else _Tilt
    return function.apply(chol, old, precision.gap, t, log_scale)[0]


class _Tilt(torch.autograd.Function):
    """Autograd function that maps the new Cholesky factor L [n, D, D] to the projected factor L̃ [n, D, D].

    With c = 1:

    Forward.   R = I + t Q and Σ̃ = L_o R⁻¹ L_oᵀ. Write R = W Wᵀ with W upper triangular (a Cholesky factor, taken from the
               last row to the first); N = W⁻ᵀ is lower, R⁻¹ = N Nᵀ, and L̃ = L_o N.

    Backward.  Let Ḡ be the gradient in L̃.
    1. L̃ is the Cholesky factor of Σ̃: ⟨Ḡ, dL̃⟩ = ⟨Ψ, L̃⁻¹ dΣ̃ L̃⁻ᵀ⟩, where Ψ is the symmetric part of the lower triangle of
       L̃ᵀ Ḡ, its diagonal halved.
    2. dΣ̃ = −L_o R⁻¹ dR R⁻¹ L_oᵀ, so L̃⁻¹ dΣ̃ L̃⁻ᵀ = −Nᵀ dR N =: −Y.
    3. dR = t dQ + Q dt, so Y = t Nᵀ dQ N + H dt with H = Nᵀ Q N. K = ½ (tr R⁻¹ − D + log det R) stays at ε, and
       dK = ½ tr((R⁻¹ − R⁻²) dR) = t/2 tr(R⁻¹ Q R⁻¹ dR) = t/2 ⟨H, Y⟩, because R − I = t Q. So ⟨H, Y⟩ = 0, and all that dt
       does is to take out of t Nᵀ dQ N its part along H: Y = t P(Nᵀ dQ N), P the orthogonal projection onto H's complement.
       P is symmetric, so it may act on Ψ instead.
    4. Q = CᵀC − I with C = L⁻¹ L_o and dC = −L⁻¹ dL C. With V = C N = L⁻¹ L̃, −Nᵀ dQ N = Vᵀ (L⁻¹ dL) V + its transpose.
    5. Together ⟨Ḡ, dL̃⟩ = 2t ⟨V P(Ψ) Vᵀ, L⁻¹ dL⟩: the gradient is the lower triangle of 2t L⁻ᵀ V P(Ψ) Vᵀ.

    With c > 1, N becomes √c N and R becomes R/c, so 2t becomes 2t/c. The held determinant asks for tr Y = 0, and dc adds a
    multiple of NᵀRN ∝ I to Y: P takes out I as well. Nothing here divides by a difference of eigenvalues.
    """

    @staticmethod
    def forward(chol: Tensor, old: Tensor, gap: Tensor, t: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
        eye = torch.eye(old.shape[-1], dtype=old.dtype, device=old.device)
        r = eye + t[:, None, None] * gap
        w = torch.linalg.cholesky_ex(r.flip(-2, -1)).L.flip(-2, -1)
        n = torch.linalg.solve_triangular(w.mT, eye.expand_as(r), upper=False)
        return (0.5 * log_scale).exp()[:, None, None] * (old @ n), n.mT @ gap @ n

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        chol, _, _, t, log_scale = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(chol, *output, t, log_scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        chol, projected, h, t, log_scale = ctx.saved_tensors
        psi = _factor_pullback(projected, grad)
        eye = torch.eye(h.shape[-1], dtype=h.dtype, device=h.device).expand_as(h)
        tangent = _tangent(psi.flatten(1), h.flatten(1), eye.flatten(1), log_scale).view_as(psi)
        v = torch.linalg.solve_triangular(chol, projected, upper=False)
        inner = 2 * (t * (-log_scale).exp())[:, None, None] * (v @ tangent @ v.mT)
        grad_chol = torch.linalg.solve_triangular(chol.mT, inner, upper=True).tril()
        return torch.where((t > 0)[:, None, None], grad_chol, 0.0), None, None, None, None


class _DiagonalTilt(torch.autograd.Function):
    """Autograd function that maps new to projected standard deviations [n, D], for diagonal covariances."""

    @staticmethod
    def forward(std: Tensor, old: Tensor, gap: Tensor, t: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
        r = 1 + t[:, None] * gap
        return (0.5 * log_scale).exp()[:, None] * old * r.rsqrt(), gap / r

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        _Tilt.setup_context(ctx, inputs, output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        std, projected, h, t, log_scale = ctx.saved_tensors
        tangent = _tangent(0.5 * projected * grad, h, torch.ones_like(h), log_scale)
        grad_std = 2 * (t * (-log_scale).exp())[:, None] * (projected / std).square() * tangent / std
        return torch.where((t > 0)[:, None], grad_std, 0.0), None, None, None, None


def _factor_pullback(factor: Tensor, grad: Tensor) -> Tensor:
    """Compute Ψ from a Cholesky factor L and its gradient Ḡ, with ⟨Ḡ, dL⟩ = ⟨Ψ, L⁻¹ dΣ L⁻ᵀ⟩. This is step 1 of `_Tilt`."""
    lower = (factor.mT @ grad).tril()
    return 0.5 * (lower + lower.mT - torch.diag_embed(lower.diagonal(dim1=-2, dim2=-1)))


def _tangent(psi: Tensor, h: Tensor, eye: Tensor, log_scale: Tensor) -> Tensor:
    """Remove from the gradient Ψ the directions that would change each row's constraints.

    The directions are H, and I if log c > 0. All are [n, entries].
    """
    held = (log_scale > 0)[:, None]
    size = eye.sum(-1, keepdim=True)
    psi = torch.where(held, psi - eye * (psi * eye).sum(-1, keepdim=True) / size, psi)
    direction = torch.where(held, h - eye * (h * eye).sum(-1, keepdim=True) / size, h)
    length = direction.square().sum(-1, keepdim=True)
    # H ∝ I leaves rounding alone, and nothing to take out that I did not.
    binds = length > (16 * torch.finfo(h.dtype).eps) ** 2 * h.square().sum(-1, keepdim=True)
    along = (psi * direction).sum(-1, keepdim=True) / torch.where(binds, length, 1.0)
    return torch.where(binds, psi - along * direction, psi)


def factor_of(move: Tensor, factor: Tensor) -> Tensor:
    """Return `factor` with a gradient that flows to `move`. `factor` is the Cholesky factor of a constant plus `move`."""
    out: Tensor = _FactorOf.apply(move, factor)
    return out


class _FactorOf(torch.autograd.Function):
    """Autograd function that returns `factor` and passes the gradient of a Cholesky factor on to `move`.

    In formulas: ⟨Ψ, L̃⁻¹ dΣ̃ L̃⁻ᵀ⟩ = ⟨Ḡ, dL̃⟩.
    """

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
        half = torch.linalg.solve_triangular(factor.mT, _factor_pullback(factor, grad), upper=True)
        return torch.linalg.solve_triangular(factor, half, upper=False, left=False), None
