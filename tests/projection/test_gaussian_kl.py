"""The Gaussian KL projection: closed forms, its conditions of optimality, slow oracles, every edge of its contract."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.optimize
import torch
from gaussian_policies import (
    Policies,
    assert_fields_close,
    cov,
    factor_of,
    kl_cov,
    kl_mean,
    policies,
    problems,
    real,
    row_of,
    with_eigenvalues,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from corral.projection import (
    GaussianProjection,
    project_entropy_floor,
    project_gaussian_frobenius,
    project_gaussian_kl,
    project_gaussian_wasserstein,
)
from corral.projection.root import Root, find_root
from tolerance import assert_close

INF, NAN = math.inf, math.nan
BOUNDS = [5e-5, 5e-4, 0.05, 0.5]
DTYPES = [torch.float32, torch.float64]


def project(problem: Policies, mean_bound: float | Tensor = 0.05, cov_bound: float | Tensor = 0.005, **options):
    return project_gaussian_kl(*problem, mean_bound=mean_bound, cov_bound=cov_bound, **options)


def project_cov(chol: Tensor, old: Tensor, bound: float | Tensor, **options) -> GaussianProjection:
    """With both means 0."""
    zero = chol.new_zeros(chol.shape[-1])
    return project_gaussian_kl(zero, chol, zero, old, mean_bound=1.0, cov_bound=bound, **options)


# ---------------------------------------------------------------------------------------------------- golden


@pytest.mark.parametrize("new", [4.0, 100.0, 1e8])
def test_golden_one_dimension(new):
    # Old N(0, 1). The variance s grows until ½ (s − 1 − ln s) = ε; for s = 2 that is ½ (1 − ln 2) = 0.15342640972002736.
    # 1/s = 1 + t (1/new − 1) gives t = ½ / (1 − 1/new): for new = 4, t = ⅔ and η = ½. The mean stops at ½ μ² = 0.02, μ = 0.2.
    out = project(([real([m]) for m in (3.0,)] + [real([[new**0.5]]), real([0.0]), real([[1.0]])]), 0.02, 0.15342640972002736)
    assert_close(out.chol, real([[2**0.5]]))
    assert_close(out.dual_cov, real(2 * (1 - 1 / new) - 1))
    assert_close(out.before_cov, real(0.5 * (new - 1 - math.log(new))))
    assert_close(out.after_cov, real(0.15342640972002736))
    assert_close(out.mean, real([0.2]))
    assert_close(out.dual_mean, real(3 / 0.2 - 1))  # μ̃ = t μ
    assert_close(out.before_mean, real(4.5))
    assert_close(out.after_mean, real(0.02))
    assert out.active_mean
    assert out.active_cov
    assert out.converged


@pytest.mark.parametrize("full", [False, True])
def test_golden_two_dimensions(full):
    # Variances new (4, ½), old (1, 1), t = ½: precisions ½ (1 + ¼) = ⅝ and ½ (1 + 2) = 3/2, so variances 8/5 and ⅔.
    # ε = ½ (8/5 + ⅔ − 2 − ln 16/15) = 0.10106415…; η = 1.
    bound = 0.5 * (8 / 5 + 2 / 3 - 2 - math.log(16 / 15))
    new, old, expected = real([4.0, 0.5]).sqrt(), real([1.0, 1.0]), real([8 / 5, 2 / 3]).sqrt()
    if full:
        new, old, expected = new.diag(), old.diag(), expected.diag()
    out = project_cov(new, old, bound, diagonal=not full)
    assert_close(out.chol, expected)
    assert_close(out.dual_cov, real(1.0))


def test_golden_a_correlation():
    # New precision [[2, 1], [1, 2]] against I, t = ½: [[3/2, ½], [½, 3/2]], of eigenvalues 2 and 1. ε = ½ (½ + 1 − 2 + ln 2).
    # Its inverse [[¾, −¼], [−¼, ¾]] has the factor [[√¾, 0], [−¼/√¾, √(¾ − 1/12)]].
    new = torch.linalg.cholesky(torch.linalg.inv(real([[2.0, 1.0], [1.0, 2.0]])))
    out = project_cov(new, torch.eye(2, dtype=torch.float64), 0.5 * (math.log(2) - 0.5))
    assert_close(out.chol, real([[0.75**0.5, 0.0], [-0.25 / 0.75**0.5, (2 / 3) ** 0.5]]))
    assert_close(out.dual_cov, real(1.0))


def test_golden_inside_nothing_changes():
    # Standard normal against N(0.1, 1.1²): ½ · 0.01/1.21 and ½ (1/1.21 − 1 + ln 1.21).
    problem = real([0.0]), real([[1.0]]), real([0.1]), real([[1.1]])
    out = project(problem, 0.01, 0.01)
    assert torch.equal(out.mean, problem[0])
    assert torch.equal(out.chol, problem[1])
    assert_close(out.before_mean, real(0.005 / 1.21))
    assert_close(out.before_cov, real(0.5 * (1 / 1.21 - 1 + math.log(1.21))))
    assert out.after_mean == out.before_mean
    assert out.after_cov == out.before_cov
    assert out.dual_mean == out.dual_cov == 0
    assert not out.active_mean
    assert not out.active_cov
    assert out.converged


@pytest.mark.parametrize("dimension", [1, 4, 63])
@pytest.mark.parametrize("scale", [0.2, 3.0])
def test_an_isotropic_change_stops_at_the_isotropic_root(dimension, scale):
    # Σ = scale Σ_o: Σ̃ = s Σ_o with D/2 (s − 1 − ln s) = ε, on the side of the new policy.
    _, _, _, old = policies(1, dimension)
    ends = (1.0, scale) if scale > 1 else (scale, 1.0)
    s = scipy.optimize.brentq(lambda s: dimension / 2 * (s - 1 - math.log(s)) - 0.01, *ends, xtol=1e-15)
    out = project_cov(scale**0.5 * old[0], old[0], 0.01)
    assert_close(out.chol, s**0.5 * old[0], rtol=1e-9)


@pytest.mark.parametrize("t", [1e-3, 0.1, 0.5, 0.99])
def test_a_manufactured_step_is_recovered(t):
    _, new, _, old = policies()
    between = torch.linalg.inv((1 - t) * torch.linalg.inv(cov(old)) + t * torch.linalg.inv(cov(new)))
    out = project_cov(new, old, kl_cov(torch.linalg.cholesky(between), old))
    assert out.active_cov.all()
    assert_close(cov(out.chol), between, rtol=1e-7, atol=1e-9)  # the textbook KL loses digits at small t
    assert_close(out.dual_cov, torch.full_like(out.dual_cov, 1 / t - 1), rtol=1e-6)


# ---------------------------------------------------------------------------------------------------- optimality


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("dimension", [1, 2, 9, 63])
def test_the_bound_is_met_exactly(dimension, bound):
    problem = policies(6, dimension, spread=6.0, step=50.0)
    out = project(problem, bound, bound)
    assert out.active_mean.all()
    assert out.active_cov.any()
    assert out.converged.all()
    assert_close(kl_mean(out.mean, problem[2], problem[3]), torch.full_like(out.after_mean, bound))
    after = kl_cov(out.chol, problem[3])
    # The textbook formula itself rounds D and D apart.
    assert_close(after[out.active_cov], torch.full_like(after, bound)[out.active_cov], rtol=1e-9, atol=dimension * 1e-15)
    assert_close(out.after_cov[out.active_cov], torch.full_like(after, bound)[out.active_cov])
    assert torch.equal(out.chol, out.chol.tril())
    assert (out.chol.diagonal(dim1=-2, dim2=-1) > 0).all()


def test_karush_kuhn_tucker():
    # Gradient of the Lagrangian in Σ̃: ½ (Σ⁻¹ − Σ̃⁻¹) + η/2 (Σ_o⁻¹ − Σ̃⁻¹) = 0, in μ̃: Σ_o⁻¹ ((μ̃ − μ) + η (μ̃ − μ_o)) = 0.
    mean, new, old_mean, old = problem = policies()
    out = project(problem)
    assert out.active_mean.all()
    assert out.active_cov.all()
    eta = out.dual_cov[:, None, None]
    p, p_old, r = (torch.linalg.inv(cov(x)) for x in (new, old, out.chol))
    residual = (p - r) + eta * (p_old - r)
    assert (residual.abs().amax((-2, -1)) / (eta[:, 0, 0] * p_old.abs().amax((-2, -1)))).max() < 1e-12
    assert (eta > 0).all()
    residual = (out.mean - mean) + out.dual_mean[:, None] * (out.mean - old_mean)
    assert residual.abs().max() < 1e-12


def test_no_feasible_covariance_is_closer():
    _, new, _, old = policies(rows=6, dimension=3)
    out = project_cov(new, old, 0.05)
    torch.manual_seed(1)
    size = torch.logspace(-4, 0, 3000, dtype=torch.float64)[:, None, None, None]
    candidates = out.chol @ torch.linalg.matrix_exp(size * torch.randn(3000, 6, 3, 3, dtype=torch.float64).tril())
    feasible = kl_cov(candidates, old) <= 0.05
    assert (feasible.sum(0) > 200).all()
    assert (kl_cov(candidates, new) >= kl_cov(out.chol, new) - 1e-12)[feasible].all()


@pytest.mark.parametrize("bound", [0.005, 0.05, 0.3])
@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_oracle_sequential_quadratic_programming(dimension, bound):
    # Knows nothing of duals, precisions or eigenvalues: minimises over the entries of the factor itself.
    _, news, _, olds = policies(rows=3, dimension=dimension, spread=1.5)
    out = project_cov(news, olds, bound)
    below = np.tril_indices(dimension)
    for i in out.active_cov.nonzero().flatten():
        new, old = news[i].numpy(), olds[i].numpy()

        def kl(entries: np.ndarray, reference: np.ndarray) -> float:
            factor = np.zeros((dimension, dimension))
            factor[below] = entries
            relative = np.linalg.solve(reference, factor)
            return 0.5 * ((relative**2).sum() - dimension - 2 * np.log(np.abs(np.diag(relative))).sum())

        oracle = scipy.optimize.minimize(
            kl, old[below], args=(new,), method="SLSQP", options={"ftol": 1e-15, "maxiter": 500},
            constraints={"type": "ineq", "fun": lambda entries, old=old, kl=kl: bound - kl(entries, old)},
        )  # fmt: skip
        found = torch.zeros(dimension, dimension, dtype=torch.float64)
        found[below] = torch.from_numpy(oracle.x)
        assert_close(cov(out.chol[i]), cov(found), rtol=0, atol=1e-5)  # a column's sign is the oracle's to choose


def test_oracle_the_mean_by_sequential_quadratic_programming():
    mean, new, old_mean, old = policies(rows=3, dimension=3)
    out = project((mean, new, old_mean, old), 0.1)
    for i in range(3):
        whiten = np.linalg.inv(old[i].numpy())

        def distance(x: np.ndarray, centre: np.ndarray, whiten=whiten) -> float:
            return 0.5 * ((whiten @ (x - centre)) ** 2).sum()

        oracle = scipy.optimize.minimize(
            distance, old_mean[i].numpy(), args=(mean[i].numpy(),), method="SLSQP", options={"ftol": 1e-15},
            constraints={"type": "ineq", "fun": lambda x, i=i, distance=distance: 0.1 - distance(x, old_mean[i].numpy())},
        )  # fmt: skip
        assert_close(out.mean[i], torch.from_numpy(oracle.x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("bound", BOUNDS)
def test_diagonal_equals_full(bound):
    torch.manual_seed(0)
    new, old = torch.randn(2, 6, 5, dtype=torch.float64).exp()
    full, diagonal = project_cov(new.diag_embed(), old.diag_embed(), bound), project_cov(new, old, bound, diagonal=True)
    assert_close(diagonal.chol.diag_embed(), full.chol)
    for name in ("dual_cov", "before_cov", "after_cov"):
        assert_close(getattr(diagonal, name), getattr(full, name))
    assert diagonal.converged.all()


# ---------------------------------------------------------------------------------------------------- properties


@given(problems())
def test_the_projection_stays_inside(problem):
    (mean, chol, old_mean, old), bound = problem
    out = project((mean, chol, old_mean, old), bound, bound)
    assert out.converged
    assert out.after_mean <= bound * (1 + 1e-12)
    assert out.after_cov <= bound * (1 + 1e-12)
    assert_close(kl_cov(out.chol, old), out.after_cov, rtol=1e-8, atol=1e-13)
    assert out.active_cov == (out.before_cov > bound)
    assert out.active_mean == (out.before_mean > bound)


@given(problems())
def test_inside_nothing_changes(problem):
    policy, _ = problem
    far = project(policy, INF, INF)
    for bounds in ((far.before_mean, far.before_cov), (2 * far.before_mean, 2 * far.before_cov), (INF, INF)):
        out = project(policy, *bounds)  # on the boundary is inside
        assert torch.equal(out.mean, policy[0])
        assert torch.equal(out.chol, policy[1])
        assert out.dual_mean == out.dual_cov == 0
        assert not out.active_mean
        assert not out.active_cov


@given(problems())
def test_projecting_twice_is_projecting_once(problem):
    (mean, chol, old_mean, old), bound = problem
    once = project((mean, chol, old_mean, old), bound, bound)
    twice = project((once.mean, once.chol, old_mean, old), bound, bound)
    assert_close(twice.mean, once.mean, rtol=1e-9, atol=1e-11)
    assert_close(twice.chol, once.chol, rtol=1e-9, atol=1e-11)


@given(problems(), st.integers(0, 10**6), st.floats(-3, 3))
def test_affine_maps_commute_with_the_projection(problem, seed, shift):
    (mean, chol, old_mean, old), bound = problem
    generator = torch.Generator().manual_seed(seed)
    n = len(mean)
    a = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator)).Q
    a = a * (2 * torch.rand(n, dtype=torch.float64, generator=generator) - 1).exp()
    out = project((mean, chol, old_mean, old), bound, bound)
    moved = project((a @ mean + shift, factor_of(a @ chol), a @ old_mean + shift, factor_of(a @ old)), bound, bound)
    assert_close(moved.mean, a @ out.mean + shift, rtol=1e-7, atol=1e-9)
    assert_close(moved.chol, factor_of(a @ out.chol), rtol=1e-6, atol=1e-8)
    assert_close(moved.dual_cov, out.dual_cov, rtol=1e-6, atol=1e-8)


def test_a_wider_ball_brings_the_projection_closer_to_the_new_policy():
    _, new, _, old = policies()
    outs = [project_cov(new, old, bound) for bound in (1e-6, 1e-4, 1e-2, 0.05)]
    distances = torch.stack([kl_cov(out.chol, new) for out in outs])
    duals = torch.stack([out.dual_cov for out in outs])
    assert (distances[1:] < distances[:-1]).all()
    assert (duals[1:] < duals[:-1]).all()


@pytest.mark.parametrize("diagonal", [False, True])
def test_each_row_is_projected_on_its_own(diagonal):
    mean, new, old_mean, old = policies(rows=6)
    if diagonal:
        new, old = (x.diagonal(dim1=-2, dim2=-1) for x in (new, old))
    mean, new = mean.clone(), new.clone()
    mean[::2], new[::3] = old_mean[::2], old[::3]
    bound = real([0.01, 0.02, 0.05, 0.1, 0.2, 0.3]) / 10
    out = project((mean, new, old_mean, old), bound, bound, diagonal=diagonal)
    assert out.active_mean.tolist() == [False, True] * 3
    assert out.active_cov.tolist() == [False, True, True] * 2
    for i in range(6):
        alone = project((mean[i], new[i], old_mean[i], old[i]), bound[i].item(), bound[i].item(), diagonal=diagonal)
        assert_fields_close(alone, row_of(out, i))


# ---------------------------------------------------------------------------------------------------- precision and cost


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("dimension", [1, 9, 63])
def test_float32_agrees_with_float64(dimension, bound):
    # Measured at worst: 5e-6 of the largest entry of the factor. The KL of the rounded factor is off by about 1e-7 √(D/ε):
    # what float32 can hold.
    problem = tuple(x.float() for x in policies(6, dimension, spread=2.0, step=5.0))
    exact = project(tuple(x.double() for x in problem), bound, bound)
    out = project(problem, bound, bound)
    assert out.mean.dtype == out.chol.dtype == out.after_cov.dtype == torch.float32
    assert out.converged.all()
    scale = exact.chol.abs().amax((-2, -1), keepdim=True)
    assert_close(out.chol / scale, exact.chol / scale, rtol=0, atol=3e-5)
    assert_close(out.mean, exact.mean, atol=2e-5)
    achieved = project((out.mean.double(), out.chol.double(), problem[2].double(), problem[3].double()), INF, INF)
    assert ((achieved.before_cov - exact.after_cov).abs() / bound).max() < 1e-6 * math.sqrt(max(1, dimension / bound))
    assert ((achieved.before_mean - exact.after_mean).abs() / bound).max() < 1e-3


EXTREME = {
    "huge": [1e12, 1.0, 1.0],
    "tiny": [1e-12, 0.9, 1.1],
    "huge and tiny": [1e-12, 1.0, 1e8],
    "far apart": [1e-12, 1e12, 1e-3, 1e3],
    "all tiny": [1e-8] * 3,
    "all huge": [1e8] * 3,
    "one of 63": [0.5] * 62 + [1e10],
    "repeated": [2.0] * 63,
    "barely": [1.0, 1.0, 1.0005],
}


@pytest.mark.parametrize("bound", [1e-10, 5e-4, 0.05, 1.0, 10.0])
@pytest.mark.parametrize("values", EXTREME.values(), ids=EXTREME)
def test_ill_conditioned_policies(values, bound):
    new, old = with_eigenvalues(values)
    out = project_cov(new, old, bound)
    assert out.converged
    expected = min(out.before_cov.item(), bound)
    assert_close(out.after_cov, real(expected), atol=0)
    # Of the factor itself, by the formula that loses no digits; 1e-12 of it is rounding at ε = 1e-10.
    assert_close(project_cov(out.chol, old, INF).before_cov, real(expected), rtol=1e-8, atol=1e-18)


@pytest.mark.parametrize("values", [EXTREME["all tiny"], EXTREME["all huge"], EXTREME["repeated"], EXTREME["barely"]])
@pytest.mark.parametrize("bound", [5e-5, 5e-4, 0.05, 1.0])
def test_ill_conditioned_policies_in_float32(values, bound):
    new, old = with_eigenvalues(values, torch.float32)
    out = project_cov(new, old, bound)
    assert out.converged
    achieved = project_cov(out.chol.double(), old.double(), INF).before_cov
    assert_close(achieved, real(min(out.before_cov.item(), bound)), rtol=3e-4)


@pytest.mark.parametrize("bound", [5e-4, 0.05, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_handful_of_evaluations_is_enough(bound, dtype, monkeypatch):
    roots: list[Root] = []

    def kept(*args, **options) -> Root:
        roots.append(find_root(*args, **options))
        return roots[-1]

    monkeypatch.setattr("corral.projection.gaussian.find_root", kept)
    for spread in (0.5, 2.0, 8.0):
        _, new, _, old = policies(32, 9, spread)
        out = project_cov(new.to(dtype), old.to(dtype), bound)
        if out.active_cov.any():
            assert roots[-1].steps.shape == (int(out.active_cov.sum()),)  # rows inside the ball are not solved
            assert roots[-1].steps.max() <= (8 if bound < 1 else 16)


# ---------------------------------------------------------------------------------------------------- edges


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bound", [0.0, 0.05, INF])
def test_on_policy_nothing_changes(bound, dtype):
    mean, chol, *_ = (x.to(dtype) for x in policies(4, 63))
    out = project((mean, chol, mean, chol), bound, bound)
    assert torch.equal(out.mean, mean)
    assert torch.equal(out.chol, chol)
    assert (out.before_cov == 0).all()
    assert not out.active_cov.any()
    assert out.converged.all()


@pytest.mark.parametrize("diagonal", [False, True])
def test_a_ball_of_no_size_holds_the_old_policy_alone(diagonal):
    mean, new, old_mean, old = policies()
    if diagonal:
        new, old = (x.diagonal(dim1=-2, dim2=-1) for x in (new, old))
    out = project((mean, new, old_mean, old), 0.0, 0.0, diagonal=diagonal)
    assert torch.equal(out.mean, old_mean)
    assert torch.equal(out.chol, old)
    assert (out.dual_mean == INF).all()
    assert (out.dual_cov == INF).all()
    assert (out.after_cov == 0).all()
    assert out.converged.all()


def test_the_parts_are_switched_off_separately():
    problem = policies()
    only_cov, only_mean = project(problem, mean_bound=INF), project(problem, cov_bound=INF)
    assert torch.equal(only_cov.mean, problem[0])
    assert torch.equal(only_mean.chol, problem[1])
    both = project(problem)
    assert torch.equal(only_cov.chol, both.chol)
    assert torch.equal(only_mean.mean, both.mean)


def test_a_shared_covariance_is_projected_once():
    mean, new, old_mean, old = policies()
    shared = project((mean, new[0], old_mean, old[0]))
    assert shared.chol.shape == (4, 4)
    assert shared.after_cov.shape == shared.active_cov.shape == ()
    assert shared.mean.shape == (8, 4)
    assert shared.converged.shape == (8,)
    apart = project((mean, new[:1].expand_as(new), old_mean, old[:1].expand_as(old)))
    assert_close(shared.mean, apart.mean)
    assert_close(shared.chol.expand_as(apart.chol), apart.chol)


def test_as_many_means_as_dimensions_are_read_as_said():
    # [4, 4] factors and [4, 4] means: one full covariance for four means, or four diagonals.
    mean, new, old_mean, old = policies(rows=4)
    assert project((mean, new[0], old_mean, old[0])).after_cov.shape == ()
    std, old_std = new[0].abs() + 1, old[0].abs() + 1
    assert project((mean, std, old_mean, old_std), diagonal=True).after_cov.shape == (4,)


def test_leading_axes_and_bounds_broadcast():
    mean, new, old_mean, old = (x.view(2, 3, *x.shape[1:]) for x in policies(rows=6))
    bound = real([[0.01], [0.02]])
    out = project((mean, new, old_mean[:1, :1], old[:1]), bound, bound)
    assert out.mean.shape == (2, 3, 4)
    assert out.chol.shape == (2, 3, 4, 4)
    assert out.active_cov.all()
    assert_close(out.after_cov, bound.expand(2, 3))
    assert_close(out.after_mean, bound.expand(2, 3))


def test_no_rows_are_no_work():
    mean, chol = torch.zeros(0, 3), torch.zeros(0, 3, 3)
    out = project((mean, chol, mean, chol))
    assert out.mean.shape == (0, 3)
    assert out.chol.shape == (0, 3, 3)
    assert out.converged.shape == (0,)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize(
    "what", ["nan", "negative", "zero", "infinite", "nan mean", "infinite mean", "old nan", "old infinite"]
)
def test_a_bad_row_is_flagged_and_spoils_no_other(what, diagonal):
    mean, new, old_mean, old = problem = [x.clone() for x in policies(rows=4)]
    if diagonal:
        problem[1], problem[3] = new, old = new.diagonal(dim1=-2, dim2=-1).clone(), old.diagonal(dim1=-2, dim2=-1).clone()
    good = project(problem, diagonal=diagonal)
    entry = (1, 2) if diagonal else (1, 2, 2)
    tensor = {"nan mean": mean, "infinite mean": mean, "old nan": old, "old infinite": old}.get(what, new)
    value = NAN if "nan" in what else INF if "infinite" in what else -1.0 if what == "negative" else 0.0
    tensor[(1, 2) if tensor is mean else entry] = value
    out = project(problem, diagonal=diagonal)
    assert out.converged.tolist() == [True, False, True, True]
    for i in (0, 2, 3):
        for a, b in zip(vars(row_of(out, i)).values(), vars(row_of(good, i)).values(), strict=True):
            assert torch.equal(a, b)
    if what == "zero":  # infinitely far away: the old policy
        assert torch.equal(out.chol[1], old[1])
        assert out.dual_cov[1] == INF
        assert out.active_cov[1]
    if what == "infinite mean":
        assert torch.equal(out.mean[1], old_mean[1])
        assert out.dual_mean[1] == INF
    if what in ("nan", "negative", "infinite"):
        assert torch.equal(out.chol[1].nan_to_num(-9.0), new[1].nan_to_num(-9.0))  # as it came
        assert not out.active_cov[1]


def test_inputs_are_left_as_they_were():
    problem = policies()
    kept = [x.clone() for x in problem]
    project(problem)
    assert all(torch.equal(x, y) for x, y in zip(problem, kept, strict=True))


def test_half_precision_is_computed_in_float32():
    problem = tuple(x.bfloat16() for x in policies())
    out = project(problem)
    assert out.mean.dtype == out.chol.dtype == torch.float32
    assert torch.equal(out.chol, project(tuple(x.float() for x in problem)).chol)


@pytest.mark.parametrize("projection", [project_gaussian_kl, project_gaussian_wasserstein, project_gaussian_frobenius])
def test_autocast_does_not_round_the_bound(projection):
    problem = tuple(x.float() for x in policies())
    expected = projection(*problem, mean_bound=0.05, cov_bound=0.01)
    floored = project_entropy_floor(problem[1], 9.0, old_chol=problem[3], cov_bound=0.5)
    with torch.autocast("cpu", torch.bfloat16):
        out = projection(*problem, mean_bound=0.05, cov_bound=0.01)
        again = project_entropy_floor(problem[1], 9.0, old_chol=problem[3], cov_bound=0.5)
    for a, b in zip((*vars(out).values(), again.chol), (*vars(expected).values(), floored.chol), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("single", [0, 1])
def test_a_bound_is_not_rounded_to_a_coarser_input(single):
    # 0.05 is 1.5e-8 off in float32; everything is computed in float64, so the bound is met in it too.
    problem = [x.float() if index == single else x for index, x in enumerate(policies())]
    out = project_gaussian_kl(*problem, mean_bound=0.05, cov_bound=0.05)
    for part, active in ((out.after_mean, out.active_mean), (out.after_cov, out.active_cov)):
        assert active.any()
        assert_close(part[active], torch.full_like(part[active], 0.05), rtol=1e-12, atol=0)


@pytest.mark.parametrize("diagonal", [False, True])
def test_what_overflows_is_the_old_policy_and_flagged(diagonal):
    # The squared inverse of 1e-22 is no float32; that of 1e-15 is, but the square of it, which the norm takes, is none.
    for size in (1e-15, 1e-22):
        new, old = torch.tensor([size, 1.0]), torch.ones(2)
        if not diagonal:
            new, old = new.diag(), old.diag()
        x = new.requires_grad_()
        out = project_cov(x, old, 0.05, diagonal=diagonal)
        assert torch.equal(out.chol, old)
        assert out.dual_cov == INF
        assert out.after_cov == 0
        assert not out.converged
        assert (torch.autograd.grad(out.chol.sum(), x)[0] == 0).all()


def test_the_example_of_the_docs_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "gaussian.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(block, {})
    # KL of N((3, 0), ·) from N(0, I) is 4.5, of (0.1, 0.1) it is 0.01. L = [[.5, 0], [.3, .4]]: trace .25 + .09 + .16 = ½,
    # determinant (.5 · .4)² = .04, so ½ (½ − 2 − ln .04) = 0.8594.
    mean, cov = capsys.readouterr().out.splitlines()
    assert mean.startswith("[4.5, 0.01")
    assert cov.startswith("0.8594")
    assert "→ 0.00500" in cov


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chol": 4 * torch.ones(3, 3, dtype=torch.float64)}, "Was a covariance passed"),
        ({"chol": torch.eye(4, dtype=torch.float64)}, r"`chol` is a lower Cholesky factor .* D = 3"),
        ({"old_chol": torch.ones(3, dtype=torch.float64)}, r"`old_chol` is a lower Cholesky factor"),
        ({"diagonal": True, "chol": torch.ones(1, dtype=torch.float64)}, r"`chol` is standard deviations"),
        ({"mean": torch.zeros(2, dtype=torch.float64)}, "both means need the same last axis"),
        ({"old_mean": torch.zeros(3, dtype=torch.int64)}, "`old_mean` must hold floating-point numbers"),
        ({"mean_bound": -0.1}, "`mean_bound` is a distance and must be ≥ 0"),
        ({"cov_bound": NAN}, "`cov_bound` is a distance and must be ≥ 0"),
        ({"cov_bound": real([0.1, -2.0])}, "got -2"),
        ({"mean": torch.zeros(5, 3, dtype=torch.float64), "mean_bound": torch.ones(4)}, "do not fit together"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_input_is_named(change, message):
    zero, eye = torch.zeros(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    arguments = {"mean": zero, "chol": eye, "old_mean": zero, "old_chol": eye, "mean_bound": 0.1, "cov_bound": 0.1}
    with pytest.raises(ValueError, match=message):
        project_gaussian_kl(**{**arguments, **change})
