"""Benchmark of the projection of covariances onto a KL ball: time, error and gradient.

Against one solve per matrix as a general optimiser does it: SciPy's L-BFGS-B on the convex dual of the same problem,
min over η ≥ 0 of η ε − η/2 log det Σ_o + (1 + η)/2 log det Σ̃(η), each evaluation a fresh Cholesky factor in NumPy, and the
gradient by the closed form of the implicit function theorem on that matrix's eigenvectors. Times are CPU times of one
thread, which a busy machine stretches little. Error is |KL(Σ̃‖Σ_o) − ε| / ε, evaluated in float64, at its worst matrix;
agreement is the largest difference of the two gradients over the largest entry of the second, at the worst matrix.

    OMP_NUM_THREADS=1 python benchmarks/gaussian_projection.py [--matrices 160] [--dimension 63] [--bound 0.0005 …] [--save]
"""

import statistics
import time
from typing import Any

import numpy as np
import scipy.linalg
import scipy.optimize
import torch
from rows import arguments, finish
from torch import Tensor

from corral import gaussian_kl, project_gaussian_kl


def policies(matrices: int, dimension: int) -> tuple[Tensor, Tensor, Tensor]:
    """New and old factors [N, D, D] a few gradient steps apart, and the gradient that arrives at the projection."""
    torch.manual_seed(0)
    noise = torch.randn(matrices, dimension, dimension, dtype=torch.float64)
    old = torch.linalg.cholesky(noise @ noise.mT / dimension + 0.1 * torch.eye(dimension))
    relative = 0.1 * torch.randn_like(old).tril() / dimension**0.5
    return old @ (torch.eye(dimension) + relative), old, torch.randn_like(old).tril()


def batched(new: Tensor, old: Tensor, upstream: Tensor, bound: float) -> tuple[Tensor, Tensor, float, float]:
    """L̃ and the gradient in L, CPU seconds forward and backward."""
    chol = new.clone().requires_grad_()
    mean = new.new_zeros(new.shape[-1])
    start = time.process_time()
    out = project_gaussian_kl(mean, chol, mean, old, mean_bound=1.0, cov_bound=bound)
    middle = time.process_time()
    (gradient,) = torch.autograd.grad(out.chol, chol, upstream)
    end = time.process_time()
    assert out.active_cov.all()
    assert out.converged.all()
    return out.chol.detach(), gradient, middle - start, end - middle


def one_by_one(new: Tensor, old: Tensor, upstream: Tensor, bound: float) -> tuple[Tensor, Tensor, float, float]:
    """Project one matrix at a time; results as those of `batched`."""
    factors, gradients, forward, backward = [], [], 0.0, 0.0
    for chol, old_chol, v in zip(new.numpy(), old.numpy(), upstream.numpy(), strict=True):
        start = time.process_time()
        eta, factor = solve_dual(chol, old_chol, bound)
        middle = time.process_time()
        gradients.append(torch.from_numpy(pull_back(chol, old_chol, factor, eta, v)))
        factors.append(torch.from_numpy(factor))
        forward, backward = forward + middle - start, backward + time.process_time() - middle
    return torch.stack(factors), torch.stack(gradients), forward, backward


def solve_dual(chol: np.ndarray, old: np.ndarray, bound: float) -> tuple[float, np.ndarray]:
    """η, and the factor of Σ̃(η) = (1 + η) (Σ⁻¹ + η Σ_o⁻¹)⁻¹."""
    eye = np.eye(len(chol))
    precision, old_precision = scipy.linalg.cho_solve((chol, True), eye), scipy.linalg.cho_solve((old, True), eye)
    old_logdet = 2 * np.log(np.diag(old)).sum()

    def dual(x: np.ndarray) -> tuple[float, np.ndarray]:
        eta = float(x[0])
        r = scipy.linalg.cholesky((precision + eta * old_precision) / (1 + eta), lower=True)
        logdet = -2 * np.log(np.diag(r)).sum()
        trace = (scipy.linalg.solve_triangular(r, scipy.linalg.solve_triangular(old, eye, lower=True).T, lower=True) ** 2).sum()
        kl = 0.5 * (trace - len(chol) - logdet + old_logdet)
        return eta * bound - 0.5 * eta * old_logdet + 0.5 * (1 + eta) * logdet, np.array([bound - kl])

    options = {"ftol": 1e-15, "gtol": 1e-9 * bound, "maxiter": 200}
    found = scipy.optimize.minimize(dual, [1.0], jac=True, method="L-BFGS-B", bounds=[(0.0, None)], options=options)
    eta = float(found.x[0])
    covariance = scipy.linalg.inv((precision + eta * old_precision) / (1 + eta))
    return eta, scipy.linalg.cholesky(0.5 * (covariance + covariance.T), lower=True)


def pull_back(chol: np.ndarray, old: np.ndarray, factor: np.ndarray, eta: float, upstream: np.ndarray) -> np.ndarray:
    """vᵀ ∂L̃/∂L by way of the covariances. With A = L_o⁻¹ Σ L_o⁻ᵀ, M = (I + ηA)⁻¹, S = (1 + η) A M, G the gradient in S:

    gradient in A = (1 + η) M G M − ⟨G, (A − A²) M²⟩ / K′(η) · ½ (1 + η) M (I − S⁻¹) M
    """
    solve = scipy.linalg.solve_triangular
    lower = np.tril(factor.T @ upstream)
    psi = 0.5 * (lower + lower.T) - 0.5 * np.diag(np.diag(lower))
    in_cov = solve(factor, solve(factor, psi, lower=True, trans=1).T, lower=True, trans=1)
    g = old.T @ in_cov @ old
    relative = solve(old, chol, lower=True)
    a, u = scipy.linalg.eigh(relative @ relative.T)
    m, s = 1 / (1 + eta * a), (1 + eta) * a / (1 + eta * a)
    g = u.T @ g @ u
    slope = -0.5 * ((s - 1) ** 2).sum() / (1 + eta)
    along = (np.diag(g) * (a - a**2) * m**2).sum() / slope
    in_a = (1 + eta) * m[:, None] * g * m - np.diag(along * 0.5 * (1 + eta) * m**2 * (1 - 1 / s))
    in_new_cov = solve(old, solve(old, u @ in_a @ u.T, lower=True, trans=1).T, lower=True, trans=1)
    return np.tril(2 * in_new_cov @ chol)


def measure(new: Tensor, old: Tensor, upstream: Tensor, bound: float, repeats: int) -> dict[str, Any]:
    """Medians, the two taken in turns so that whatever else the machine does falls on both alike."""
    ours, anchor = [], []
    for _ in range(1 + max(repeats, 32 // len(new))):
        ours.append(batched(new, old, upstream, bound))
        anchor.append(one_by_one(new, old, upstream, bound))
    chol, gradient, *_ = ours[0]
    anchor_chol, anchor_gradient, *_ = anchor[0]
    zero = new.new_zeros(new.shape[-1])
    errors = [((gaussian_kl(zero, x, zero, old).cov - bound).abs() / bound).max().item() for x in (chol, anchor_chol)]
    size = anchor_gradient.abs().amax((-2, -1))
    ms = [[1e3 * statistics.median(run[i] for run in runs[1:]) for i in (2, 3)] for runs in (ours, anchor)]
    return {
        "matrices": len(new), "dimension": new.shape[-1], "bound": bound, "ms_forward": ms[0][0], "ms_backward": ms[0][1],
        "ms_forward_one_by_one": ms[1][0], "ms_backward_one_by_one": ms[1][1], "speedup": sum(ms[1]) / sum(ms[0]),
        "error": errors[0], "error_one_by_one": errors[1],
        "gradient_agreement": ((gradient - anchor_gradient).abs().amax((-2, -1)) / size).max().item(),
    }  # fmt: skip


def main() -> None:
    args = arguments(__doc__, matrices=[1, 160], dimension=63, bound=[5e-4, 0.05], repeats=3).parse_args()
    torch.set_num_threads(1)
    problems = [policies(matrices, args.dimension) for matrices in args.matrices]
    rows = [measure(*problem, bound, args.repeats) for problem in problems for bound in args.bound]
    finish("gaussian_projection", rows, args.save)


if __name__ == "__main__":
    main()
