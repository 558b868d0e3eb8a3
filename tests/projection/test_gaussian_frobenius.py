"""The Frobenius projection of Gaussians: closed forms, gradients, edges."""

import math

import pytest
import torch
from gaussian_policies import cov, policies, problems, real, row_of, with_eigenvalues
from hypothesis import given
from torch import Tensor
from torch.autograd import gradcheck

from corral.divergence import gaussian_frobenius
from corral.projection import GaussianProjection, project_gaussian_frobenius
from tolerance import assert_close

INF, NAN = math.inf, math.nan


def project(problem, mean_bound=0.05, cov_bound=0.01, **options) -> GaussianProjection:
    return project_gaussian_frobenius(*problem, mean_bound=mean_bound, cov_bound=cov_bound, **options)


def test_golden_one_dimension():
    # Old N(1, 2²), new N(5, 4²): means (4/2)² = 4, ε = 1, t = ½, μ̃ = 3. Variances 12² = 144, ε = 9, t = ¼: 4 + 3 = 7, η = 3.
    out = project((real([5.0]), real([[4.0]]), real([1.0]), real([[2.0]])), 1.0, 9.0)
    assert_close(out.mean, real([3.0]))
    assert_close(out.chol, real([[7**0.5]]))
    assert_close(torch.stack([out.before_mean, out.before_cov]), real([4.0, 144.0]))
    assert_close(torch.stack([out.after_mean, out.after_cov]), real([1.0, 9.0]))
    assert_close(torch.stack([out.dual_mean, out.dual_cov]), real([1.0, 3.0]))
    assert out.converged


def test_golden_two_dimensions():
    # Σ − I = [[0, 1], [1, 1]] of norm² 3; ε = ¾, t = ½: Σ̃ = [[1, ½], [½, 3/2]], factor [[1, 0], [½, √(5/4)]].
    zero = real([0.0, 0.0])
    out = project((zero, real([[1.0, 0.0], [1.0, 1.0]]), zero, torch.eye(2, dtype=torch.float64)), cov_bound=0.75)
    assert_close(out.chol, real([[1.0, 0.0], [0.5, 1.25**0.5]]))


def test_the_covariance_moves_in_a_straight_line():
    _, new, old_mean, old = problem = policies()
    out = project(problem)
    assert out.active_cov.all()
    gap = cov(new) - cov(old)
    t = 0.1 / gap.square().sum((-2, -1), keepdim=True).sqrt()
    assert_close(cov(out.chol), cov(old) + t * gap)
    assert_close(gaussian_frobenius(out.mean, out.chol, old_mean, old).cov, torch.full((8,), 0.01, dtype=torch.float64))


def test_diagonal_equals_full():
    torch.manual_seed(0)
    new, old = torch.randn(2, 6, 4, dtype=torch.float64).exp()
    mean, old_mean = torch.randn(2, 6, 4, dtype=torch.float64)
    full = project((mean, new.diag_embed(), old_mean, old.diag_embed()))
    diagonal = project((mean, new, old_mean, old), diagonal=True)
    assert_close(diagonal.chol.diag_embed(), full.chol)
    assert_close(diagonal.mean, full.mean)


@given(problems())
def test_the_projection_stays_inside_and_is_one(problem):
    policy, bound = problem
    out = project(policy, bound, bound)
    assert out.converged
    after = gaussian_frobenius(out.mean, out.chol, *policy[2:])
    for part, reported in ((after.mean, out.after_mean), (after.cov, out.after_cov)):
        assert reported <= bound * (1 + 1e-12)
        assert_close(part, reported, rtol=1e-7, atol=1e-10)
    twice = project((out.mean, out.chol, *policy[2:]), bound, bound)
    assert_close(twice.chol, out.chol, rtol=1e-7, atol=1e-9)
    if not out.active_cov:
        assert torch.equal(out.chol, policy[1])
    if not out.active_mean:
        assert torch.equal(out.mean, policy[0])


@pytest.mark.parametrize("diagonal", [False, True])
def test_gradcheck(diagonal):
    # Rows: on the old policy, equal eigenvalues, two at both bounds.
    mean, new, old_mean, old = policies(4, 3)
    mean[0], new[0], new[1] = old_mean[0], old[0], 1.8 * old[1]
    if diagonal:
        new, old = (x.diagonal(dim1=-2, dim2=-1).clone() for x in (new, old))
    assert project((mean, new, old_mean, old), diagonal=diagonal).active_cov.tolist() == [False, True, True, True]

    def f(mean: Tensor, chol: Tensor) -> tuple[Tensor, Tensor]:
        out = project((mean, chol if diagonal else chol.tril(), old_mean, old), diagonal=diagonal)
        return out.mean, out.chol

    assert gradcheck(f, (mean.requires_grad_(), new.requires_grad_()))


def test_gradients_reach_the_new_policy_alone():
    problem = [x.requires_grad_() for x in policies()]
    out = project(problem)
    assert [name for name, x in vars(out).items() if x.requires_grad] == ["mean", "chol"]
    (out.mean.sum() + out.chol.sum()).backward()
    assert problem[2].grad is problem[3].grad is None


@pytest.mark.parametrize("dimension", [1, 9, 63])
def test_float32_agrees_with_float64(dimension):
    problem = tuple(x.float() for x in policies(4, dimension, step=5.0))
    out, exact = project(problem), project(tuple(x.double() for x in problem))
    assert out.chol.dtype == torch.float32
    assert_close(out.mean, exact.mean, atol=1e-4)
    scale = exact.chol.abs().amax((-2, -1), keepdim=True)
    assert_close(out.chol / scale, exact.chol / scale, rtol=0, atol=2e-5)


@pytest.mark.parametrize("values", [[1e10, 1.0, 1.0], [1e-10, 1.0, 1.0], [1e-6, 1.0, 1e6]])
def test_ill_conditioned_policies(values):
    new, old = with_eigenvalues(values)
    zero = torch.zeros(3, dtype=torch.float64)
    out = project((zero, new, zero, old))
    assert out.active_cov
    assert out.converged
    assert_close(gaussian_frobenius(zero, out.chol, zero, old).cov, real(0.01), rtol=1e-8)


@pytest.mark.parametrize("inside", [1e-3, 1e-6, 1e-7])
@pytest.mark.parametrize("values", [[1e-12, 1.0, 1e6], [1e-14, 1.0, 1e8], [1e-10, 1e10, 1.0]])
def test_a_nearly_singular_answer_is_factorised_in_float32(values, inside):
    # The matrix between old and new has eigenvalues from 1e-7 to 1e6: its Cholesky factorisation fails, its root's does not.
    new, old = (x.float() for x in with_eigenvalues(values))
    zero = torch.zeros(3)
    x = new.clone().requires_grad_()
    bound = (1 - inside) * gaussian_frobenius(zero, new, zero, old).cov
    out = project((zero, x, zero, old), cov_bound=bound)
    assert out.active_cov
    assert out.converged
    assert_close(gaussian_frobenius(zero, out.chol, zero, old).cov.detach(), bound, rtol=1e-4)
    assert torch.autograd.grad(out.chol.sum(), x)[0].isfinite().all()


def test_edges_of_the_ball():
    mean, new, old_mean, old = problem = policies()
    none = project(problem, 0.0, 0.0)
    assert torch.equal(none.mean, old_mean)
    assert torch.equal(none.chol, old)
    assert (none.dual_cov == INF).all()
    off = project(problem, INF, INF)
    assert torch.equal(off.chol, new)
    itself = project((mean, new, mean, new))
    assert torch.equal(itself.chol, new)
    assert not itself.active_cov.any()


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_bad_row_is_flagged_and_spoils_no_other(value, diagonal):
    problem = [x.clone() for x in policies(rows=4)]
    if diagonal:
        problem[1::2] = [x.diagonal(dim1=-2, dim2=-1).clone() for x in problem[1::2]]
    good = project(problem, diagonal=diagonal)
    problem[1][(1, 2) if diagonal else (1, 2, 2)] = value
    out = project(problem, diagonal=diagonal)
    assert out.converged.tolist() == [True, False, True, True]
    for i in (0, 2, 3):
        for a, b in zip(vars(row_of(out, i)).values(), vars(row_of(good, i)).values(), strict=True):
            assert torch.equal(a, b)
