"""Pairs of Gaussian policies that the projection tests share, and what the textbook says of them."""

from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor

from corral.projection.gaussian import GaussianProjection
from tolerance import assert_close

real = partial(torch.tensor, dtype=torch.float64)
Policies = tuple[Tensor, Tensor, Tensor, Tensor]
"""mean, chol, old_mean, old_chol"""


def factor_of(root: Tensor) -> Tensor:
    """The lower factor of F Fᵀ without squaring F."""
    lower = torch.linalg.qr(root.mT).R.mT
    return (lower * lower.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]).tril()


def rotation(*rows: int, dimension: int) -> Tensor:
    return torch.linalg.qr(torch.randn(*rows, dimension, dimension, dtype=torch.float64)).Q


def policies(rows: int = 8, dimension: int = 4, spread: float = 1.0, step: float = 1.0) -> Policies:
    """Random policies; L_o⁻¹ Σ L_o⁻ᵀ has eigenvalues e^{spread · normal}, and old means are `step` away per dimension."""
    torch.manual_seed(0)
    noise = torch.randn(rows, dimension, dimension, dtype=torch.float64)
    old = torch.linalg.cholesky(noise @ noise.mT / dimension + 0.1 * torch.eye(dimension))
    sizes = (0.5 * spread * torch.randn(rows, 1, dimension, dtype=torch.float64)).exp()
    new = factor_of(old @ (rotation(rows, dimension=dimension) * sizes))
    mean, old_mean = torch.randn(2, rows, dimension, dtype=torch.float64)
    return old_mean + step * mean, new, old_mean, old


def with_eigenvalues(values: list[float], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """New and old factors such that L_o⁻¹ Σ L_o⁻ᵀ has just these eigenvalues."""
    dimension = len(values)
    _, _, _, old = policies(1, dimension)
    new = factor_of(old[0] @ (rotation(dimension=dimension) * real(values).sqrt()))
    return new.to(dtype), old[0].to(dtype)


def kl_cov(chol: Tensor, old: Tensor) -> Tensor:
    """½ (tr Σ_o⁻¹Σ − D − log det Σ_o⁻¹Σ) by the textbook."""
    relative = torch.linalg.solve_triangular(old, chol, upper=False)
    logdet = 2 * relative.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return 0.5 * (relative.square().sum((-2, -1)) - chol.shape[-1] - logdet)


def kl_mean(mean: Tensor, old_mean: Tensor, old: Tensor) -> Tensor:
    gap = (mean - old_mean)[..., None]
    return 0.5 * (gap.mT @ torch.linalg.solve(old @ old.mT, gap))[..., 0, 0]


def cov(chol: Tensor) -> Tensor:
    return chol @ chol.mT


def row_of(out: GaussianProjection, i: int) -> GaussianProjection:
    return GaussianProjection(*(x[i] for x in vars(out).values()))


def assert_fields_close(a: GaussianProjection, b: GaussianProjection) -> None:
    for name, value in vars(a).items():
        if value.is_floating_point():
            assert_close(value, getattr(b, name))
        else:
            assert torch.equal(value, getattr(b, name)), name


@st.composite
def problems(draw) -> tuple[Policies, float]:
    """One pair of policies of a few dimensions, near or far from each other, and a bound."""
    dimension = draw(st.integers(1, 4))
    entries = st.lists(st.floats(-2, 2), min_size=dimension, max_size=dimension)
    scales = st.lists(st.floats(-2, 2), min_size=dimension, max_size=dimension)

    def policy() -> tuple[Tensor, Tensor]:
        below = real([draw(entries) for _ in range(dimension)]).tril(-1)
        return real(draw(entries)), below + torch.diag(real(draw(scales)).exp())

    (mean, chol), (old_mean, old_chol) = policy(), policy()
    return (mean, chol, old_mean, old_chol), 10 ** draw(st.floats(-5, 0.5))
