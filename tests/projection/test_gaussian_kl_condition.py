"""The Gaussian KL projection around ill-conditioned policies: whatever is said to have converged lies where it should.

Rounding a factor by eps moves the policy by eps κ in the frame of the old one, so that from some condition number on no factor
of this dtype meets the bound. The oracle is exact: every float is a fraction, and so is what substitution makes of it.
"""

import math
from fractions import Fraction

import pytest
import torch
from gaussian_policies import factor_of, real
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from corral.divergence import gaussian_entropy
from corral.projection import GaussianProjection, project_entropy_floor, project_gaussian_kl
from corral.projection.gaussian import TOLERANCE, whitening_error
from tolerance import assert_close

DIGITS = {torch.float64: 16, torch.float32: 8}
"""Condition numbers of the factors go up to ten to the power of this: 1/eps for them is 1/eps² for covariances."""


def project(mean: Tensor, chol: Tensor, old_mean: Tensor, old: Tensor, bound: float, **options) -> GaussianProjection:
    return project_gaussian_kl(mean, chol, old_mean, old, mean_bound=bound, cov_bound=bound, **options)


def rotated(generator: torch.Generator, dimension: int) -> Tensor:
    return torch.linalg.qr(torch.randn(dimension, dimension, dtype=torch.float64, generator=generator)).Q


def around(exponent: float, dimension: int, seed: int, spread: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Two policies, the old one's factor of condition number 10^exponent, the new one `spread` away from it in its frame."""
    generator = torch.Generator().manual_seed(seed)
    old = factor_of(rotated(generator, dimension) * torch.logspace(0, -exponent, dimension, dtype=torch.float64))
    sizes, step, old_mean = torch.randn(3, dimension, dtype=torch.float64, generator=generator)
    chol = factor_of(old @ (rotated(generator, dimension) * (spread * sizes).exp()))
    return tuple(x.to(dtype) for x in (old_mean + old @ (spread * step), chol, old_mean, old))


def whitened(x: list[Fraction], old: list[list[Fraction]]) -> list[Fraction]:
    """L_o⁻¹ x, exactly."""
    solved: list[Fraction] = []
    for row, value in zip(old, x, strict=True):
        solved.append((value - sum(a * b for a, b in zip(row, solved, strict=False))) / row[len(solved)])
    return solved


def fractions(factor: Tensor) -> list[list[Fraction]]:
    return [list(map(Fraction, row)) for row in factor.tolist()]


def exact_kl_of_covariances(chol: Tensor, old: Tensor) -> float:
    """½ Σ b_ij² − ½ Σ_i (1 + log b_ii²) with B = L_o⁻¹ L̃."""
    factor, total = fractions(old), Fraction(0)
    for i, column in enumerate(fractions(chol.mT)):
        b = whitened(column, factor)
        excess = float(b[i] ** 2 - 1)
        log = math.log1p(excess) if excess > -0.5 else 2 * math.log(b[i])
        total += sum(x**2 for x in b) - b[i] ** 2 + Fraction(excess - log)
    return float(total) / 2


def exact_kl(out: GaussianProjection, old_mean: Tensor, old: Tensor) -> tuple[float, float]:
    """KL(projected‖old) of the mean and of the covariance."""
    gap = [Fraction(a) - Fraction(b) for a, b in zip(out.mean.tolist(), old_mean.tolist(), strict=True)]
    return float(sum(x**2 for x in whitened(gap, fractions(old)))) / 2, exact_kl_of_covariances(out.chol, old)


def assert_where_it_should_be(out: GaussianProjection, old_mean: Tensor, old: Tensor, bound: float) -> None:
    for kl, active in zip(exact_kl(out, old_mean, old), (out.active_mean, out.active_cov), strict=True):
        assert kl <= (1 + TOLERANCE) * bound
        assert not active or kl >= (1 - TOLERANCE) * bound


# ---------------------------------------------------------------------------------------------------- property

POLICIES = {
    "share": st.floats(0, 1), "dimension": st.integers(1, 4), "seed": st.integers(0, 10**6), "spread": st.floats(-3, 0.5),
    "bound": st.floats(-5, 0.5),
}  # fmt: skip
"""Share of all digits that the condition number takes, size, draw, and powers of ten of the distance and of the bound."""


@pytest.mark.parametrize("dtype", DIGITS)
@settings(max_examples=200)
@given(**POLICIES, near=st.none() | st.floats(0.9, 1.3))
def test_what_has_converged_lies_where_it_should(dtype, share, dimension, seed, spread, bound, near):
    policies = around(share * DIGITS[dtype], dimension, seed, 10**spread, dtype)
    # A bound near the new policy's own distance: what is inside by mistake is returned as it is.
    size = 10**bound if near is None else near * project(*policies, math.inf).before_cov.item()
    assume(size < math.inf)
    out = project(*policies, size)
    if out.converged:
        assert_where_it_should_be(out, *policies[2:], size)


@pytest.mark.parametrize("bound", [5e-4, 0.05])
@pytest.mark.parametrize(
    ("dtype", "exponent"), [(torch.float64, e) for e in range(17)] + [(torch.float32, e) for e in range(9)]
)
def test_every_condition_number(dtype, exponent, bound):
    # The miss is about eps κ / √ε: convergence is lost somewhere between 1e11 and 1e15, or 1e3 and 1e7, and never before.
    found = []
    for seed in range(10):
        mean, chol, old_mean, old = around(exponent, 4, seed, 1.0, dtype)
        out = project(mean, chol, old_mean, old, bound)
        found.append(bool(out.converged))
        if out.converged:
            assert_where_it_should_be(out, old_mean, old, bound)
    digits = DIGITS[dtype] - exponent
    assert all(found) or digits < 5
    assert not any(found) or digits > 1


@pytest.mark.parametrize("dtype", DIGITS)
@settings(max_examples=200)
@given(**POLICIES, rise=st.floats(-2, 0.5))
def test_with_a_floor_for_the_entropy_too(dtype, share, dimension, seed, spread, bound, rise):
    _, chol, _, old = around(share * DIGITS[dtype], dimension, seed, 10**spread, dtype)
    floor = gaussian_entropy(old).item() + rise
    out = project_entropy_floor(chol, floor, old_chol=old, cov_bound=10**bound)
    if out.converged:
        assert exact_kl_of_covariances(out.chol, old) <= (1 + TOLERANCE) * 10**bound


# ---------------------------------------------------------------------------------------------------- what is said of the rest


@pytest.mark.parametrize("dtype", DIGITS)
def test_a_row_that_misses_its_bound_says_by_how_much(dtype):
    # Up to 1e3 times the bound, measured to a few per cent.
    worst = 0.0
    for seed in range(10):
        mean, chol, old_mean, old = around(DIGITS[dtype] - 1, 4, seed, 1.0, dtype)
        out = project(mean, chol, old_mean, old, 5e-4)
        assert not out.converged
        kl_mean, kl_cov = exact_kl(out, old_mean, old)
        worst = max(worst, kl_mean, kl_cov)
        assert_close(out.after_mean.double(), real(kl_mean), rtol=0.3)
        assert_close(out.after_cov.double(), real(kl_cov), rtol=0.3)
    assert worst > 5 * 5e-4  # 8 to 12 by machine


@pytest.mark.parametrize("dtype", DIGITS)
def test_a_bad_row_spoils_no_other(dtype):
    rows = [around(e, 3, 0, 1.0, dtype) for e in (0, DIGITS[dtype], 1)]
    out = project(*(torch.stack(x) for x in zip(*rows, strict=True)), 0.05)
    assert out.converged.tolist() == [True, False, True]
    alone = project(*rows[2], 0.05)
    assert torch.equal(out.chol[2], alone.chol)
    assert torch.equal(out.after_cov[2], alone.after_cov)


@pytest.mark.parametrize("dtype", DIGITS)
def test_inside_is_not_believed_where_nothing_can_be_measured(dtype):
    # L⁻¹ x is known to 100 % of itself: 0 is 0, a hundredth of the bound might be all of it, a billionth is far inside.
    mean, chol, old_mean, old = around(DIGITS[dtype] + 0.5, 4, 0, 1.0, dtype)
    assert project(old_mean, old, old_mean, old, 0.05).converged
    out = project(mean, chol, old_mean, old, math.inf)
    assert out.converged  # whatever it is, it is no more than inf
    before = out.before_cov.item()
    inside = project(old_mean, chol, old_mean, old, 1.5 * before)
    assert not inside.active_cov
    assert not inside.converged
    assert torch.equal(inside.chol, chol)
    assert project(old_mean, chol, old_mean, old, 1e9 * before).converged


@pytest.mark.parametrize("dtype", DIGITS)
def test_scales_alone_cost_nothing(dtype):
    # Standard deviations from 1 to 1/eps, with correlations or without: κ does not see them.
    scales = torch.logspace(0, -DIGITS[dtype], 3, dtype=torch.float64)[:, None]
    old = (scales * real([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [0.3, -0.4, 0.9]])).to(dtype)
    zero = torch.zeros(3, dtype=dtype)
    for factor in (old, old.diagonal().diag()):
        out = project(zero, 1.5 * factor, zero, factor, 0.005)
        assert out.active_cov
        assert out.converged
        assert_where_it_should_be(out, zero, factor, 0.005)
    assert project(zero, 1.5 * old.diagonal(), zero, old.diagonal(), 0.005, diagonal=True).converged


def test_golden_a_mean_that_no_float32_holds():
    # Near 2²⁰ float32 counts in eighths. With σ = ⅛ and ε = ½ · 0.3², μ̃ = 2²⁰ + 0.3 σ rounds to 2²⁰: KL 0, not ε.
    centre, old = torch.tensor([2.0**20]), torch.tensor([[0.125]])
    out = project_gaussian_kl(centre + 1, old, centre, old, mean_bound=0.045, cov_bound=1.0)
    assert out.mean == centre
    assert out.after_mean == 0
    assert not out.converged
    exact = project_gaussian_kl(centre.double() + 1, old, centre.double(), old, mean_bound=0.045, cov_bound=1.0)
    assert exact.converged
    assert_close(exact.after_mean, real(0.045))


# ---------------------------------------------------------------------------------------------------- the error's own size


def test_golden_skeels_condition_number():
    # L = [[1, 0], [1, d]], L⁻¹ = [[1, 0], [−1/d, 1/d]]: the second row of |L⁻¹| |L| 1 is 1/d + (1 + d)/d = 2/d + 1.
    chol = real([[1.0, 0.0], [1.0, 2.0**-10]])
    loss = torch.finfo(torch.float64).eps * (2**11 + 1)
    assert_close(whitening_error(chol, False), real((1 + loss) ** 2 - 1), rtol=1e-9, atol=0)
    scaled = real([[2.0**40], [2.0**-40]]) * chol
    assert torch.equal(whitening_error(scaled, False), whitening_error(chol, False))
    assert_close(whitening_error(torch.stack([chol, scaled]), False), whitening_error(chol, False).expand(2))
    assert_close(whitening_error(chol.diagonal(), True), whitening_error(chol.diagonal().diag(), False), atol=0)
