"""The Wasserstein projection of Gaussians, in both forms: closed forms, the geodesic, gradients, edges."""

import itertools
import math
from functools import partial

import pytest
import scipy.linalg
import torch
from gaussian_policies import assert_fields_close, cov, factor_of, policies, problems, real, rotation, row_of, with_eigenvalues
from hypothesis import given
from torch import Tensor
from torch.autograd import gradcheck

from corral.divergence import gaussian_wasserstein
from corral.projection import GaussianProjection, project_gaussian_wasserstein
from tolerance import assert_close

INF, NAN = math.inf, math.nan
FORMS = list(itertools.product(["commuting", "bures"], [True, False]))
each_form = pytest.mark.parametrize(("form", "scaled"), FORMS)


def project(problem, mean_bound=0.05, cov_bound=0.01, **options) -> GaussianProjection:
    return project_gaussian_wasserstein(*problem, mean_bound=mean_bound, cov_bound=cov_bound, **options)


def root(chol: Tensor) -> Tensor:
    """Σ^½ of each row, by SciPy."""
    return torch.stack([torch.from_numpy(scipy.linalg.sqrtm(cov(x).numpy())) for x in chol])


# ---------------------------------------------------------------------------------------------------- golden and oracle


@each_form
def test_golden_one_dimension(form, scaled):
    # Old N(1, 2²), new N(5, 6²). Scaled: distances (4/2)² = 4 each, ε = 1, so t = ½: μ̃ = 3, σ̃ = 4, η = 1.
    # Unscaled: 16 each, ε = 4 gives the same.
    bound = 1.0 if scaled else 4.0
    out = project((real([5.0]), real([[6.0]]), real([1.0]), real([[2.0]])), bound, bound, form=form, scaled=scaled)
    assert_close(out.mean, real([3.0]))
    assert_close(out.chol, real([[4.0]]))
    assert_close(torch.stack([out.before_mean, out.before_cov]), real([4 * bound, 4 * bound]))
    assert_close(torch.stack([out.after_mean, out.after_cov]), real([bound, bound]))
    assert_close(torch.stack([out.dual_mean, out.dual_cov]), real([1.0, 1.0]))
    assert out.active_mean
    assert out.active_cov
    assert out.converged


@each_form
def test_golden_two_dimensions(form, scaled):
    # σ from (1, 1) to (4, 5): distance 9 + 16 = 25, ε = 1, t = 1/5: (1.6, 1.8). Old is I, so scaled or not.
    zero, old = torch.zeros(2, dtype=torch.float64), real([1.0, 1.0])
    for new, centre, expected, diagonal in (
        (real([4.0, 5.0]).diag(), old.diag(), real([1.6, 1.8]).diag(), False),
        (real([4.0, 5.0]), old, real([1.6, 1.8]), True),
    ):
        out = project((zero, new, zero, centre), cov_bound=1.0, form=form, scaled=scaled, diagonal=diagonal)
        assert_close(out.chol, expected)


def test_the_commuting_form_interpolates_symmetric_roots():
    _, new, _, old = problem = policies()
    for scaled in (True, False):
        out = project(problem, form="commuting", scaled=scaled)
        assert out.active_cov.all()
        gap = root(new) - root(old)
        measured = gap @ torch.linalg.inv(root(old)) if scaled else gap
        t = (0.01 / measured.square().sum((-2, -1))).sqrt()[:, None, None]
        assert_close(root(out.chol), root(old) + t * gap, rtol=1e-8)
        assert_close(1 / (1 + out.dual_cov), t[:, 0, 0], rtol=1e-9)


def test_the_bures_form_walks_the_geodesic():
    # On the way at t: W(old, Σ̃) = t W and W(Σ̃, new) = (1 − t) W, which only a shortest path does.
    mean, new, _, old = problem = policies()
    out = project(problem, form="bures", scaled=False)
    distance = partial(gaussian_wasserstein, form="bures")
    whole, first, second = (distance(mean, a, mean, b).cov.sqrt() for a, b in ((new, old), (out.chol, old), (new, out.chol)))
    assert_close(first, torch.full_like(first, 0.1), rtol=1e-9)
    assert_close(first + second, whole, rtol=1e-9)


def test_the_scaled_bures_form_is_the_plain_one_in_the_frame_of_the_old_policy():
    mean, new, old_mean, old = policies()
    out = project((mean, new, old_mean, old), form="bures", scaled=True)
    eye = torch.eye(4, dtype=torch.float64).expand_as(old)
    relative = torch.linalg.solve_triangular(old, new, upper=False)
    whitened = project((mean, relative, old_mean, eye), form="bures", scaled=False)
    assert_close(out.chol, old @ whitened.chol, rtol=1e-8)


def test_the_forms_agree_where_the_covariances_commute():
    torch.manual_seed(0)
    turn = rotation(dimension=4)
    new, old = (factor_of(turn * x) for x in torch.randn(2, 4, dtype=torch.float64).exp())
    zero = torch.zeros(4, dtype=torch.float64)
    for scaled in (True, False):
        outs = [project((zero, new, zero, old), form=form, scaled=scaled) for form in ("commuting", "bures")]
        assert_close(outs[0].chol, outs[1].chol, rtol=1e-8)


@each_form
def test_diagonal_equals_full(form, scaled):
    torch.manual_seed(0)
    new, old = torch.randn(2, 6, 4, dtype=torch.float64).exp()
    mean, old_mean = torch.randn(2, 6, 4, dtype=torch.float64)
    full = project((mean, new.diag_embed(), old_mean, old.diag_embed()), form=form, scaled=scaled)
    diagonal = project((mean, new, old_mean, old), form=form, scaled=scaled, diagonal=True)
    assert_close(diagonal.chol.diag_embed(), full.chol)
    assert_close(diagonal.mean, full.mean)


# ---------------------------------------------------------------------------------------------------- properties


@each_form
@given(problem=problems())
def test_the_projection_stays_inside(form, scaled, problem):
    policy, bound = problem
    out = project(policy, bound, bound, form=form, scaled=scaled)
    after = gaussian_wasserstein(out.mean, out.chol, *policy[2:], form=form, scaled=scaled)
    assert out.converged
    for part, reported in ((after.mean, out.after_mean), (after.cov, out.after_cov)):
        assert reported <= bound * (1 + 1e-12)
        assert_close(part, reported, rtol=1e-6, atol=1e-9)
    assert (out.chol.diagonal() > 0).all()
    assert torch.equal(out.chol, out.chol.tril())
    if scaled and form == "commuting":
        assert gaussian_wasserstein(out.mean, out.chol, *policy[2:], scaled=True).cov <= bound * (1 + 1e-6) + 1e-9
    if not out.active_cov:
        assert torch.equal(out.chol, policy[1])
    if not out.active_mean:
        assert torch.equal(out.mean, policy[0])


@each_form
@given(problem=problems())
def test_projecting_twice_is_projecting_once(form, scaled, problem):
    policy, bound = problem
    once = project(policy, bound, bound, form=form, scaled=scaled)
    twice = project((once.mean, once.chol, *policy[2:]), bound, bound, form=form, scaled=scaled)
    assert_close(twice.mean, once.mean, rtol=1e-8, atol=1e-10)
    assert_close(twice.chol, once.chol, rtol=1e-6, atol=1e-8)


# ---------------------------------------------------------------------------------------------------- gradients


@each_form
def test_gradcheck(form, scaled):
    # Rows: inside, equal eigenvalues, two at both bounds.
    mean, new, old_mean, old = policies(4, 3)
    mean[0], new[0], new[1] = old_mean[0] + 1e-3, 1.001 * old[0], 1.8 * old[1]
    options = {"form": form, "scaled": scaled}
    out = project((mean, new, old_mean, old), **options)
    assert out.active_cov.tolist() == [False, True, True, True]

    def f(mean: Tensor, chol: Tensor) -> tuple[Tensor, Tensor]:
        out = project((mean, chol.tril(), old_mean, old), **options)
        return out.mean, out.chol

    assert gradcheck(f, (mean.requires_grad_(), new.requires_grad_()))


@each_form
def test_gradcheck_with_an_isotropic_old_policy(form, scaled):
    # Symmetric roots of 2 I and I: every singular value alike.
    eye, zero = torch.eye(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    assert gradcheck(lambda x: project((zero, x.tril(), zero, eye), form=form, scaled=scaled).chol, (2 * eye).requires_grad_())


@pytest.mark.parametrize("scaled", [True, False])
def test_gradcheck_diagonal(scaled):
    mean, new, old_mean, old = policies(3)
    std, old_std = (x.diagonal(dim1=-2, dim2=-1).clone() for x in (new, old))
    std[0] = old_std[0]

    def f(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        out = project((mean, std, old_mean, old_std), scaled=scaled, diagonal=True)
        return out.mean, out.chol

    assert gradcheck(f, (mean.requires_grad_(), std.requires_grad_()))


@each_form
def test_gradients_reach_the_new_policy_alone_and_pass_inside_rows_on(form, scaled):
    mean, new, old_mean, old = policies()
    new[::2] = old[::2]
    problem = [x.requires_grad_() for x in (mean, new, old_mean, old)]
    out = project(problem, form=form, scaled=scaled)
    assert [name for name, x in vars(out).items() if x.requires_grad] == ["mean", "chol"]
    v = torch.randn_like(new).tril()
    (gradient,) = torch.autograd.grad(out.chol, problem[1], v, retain_graph=True)
    assert_close(gradient[::2], v[::2])
    assert gradient.isfinite().all()
    (out.mean.sum() + out.chol.sum()).backward()
    assert problem[2].grad is problem[3].grad is None


# ---------------------------------------------------------------------------------------------------- precision and edges


@each_form
@pytest.mark.parametrize("dimension", [1, 9, 63])
def test_float32_agrees_with_float64(dimension, form, scaled):
    problem = tuple(x.float() for x in policies(4, dimension, step=5.0))
    out = project(problem, form=form, scaled=scaled)
    exact = project(tuple(x.double() for x in problem), form=form, scaled=scaled)
    assert out.chol.dtype == torch.float32
    assert_close(out.mean, exact.mean, atol=1e-4)
    scale = exact.chol.abs().amax((-2, -1), keepdim=True)
    assert_close(out.chol / scale, exact.chol / scale, rtol=0, atol=2e-5)
    assert_close(out.after_cov, exact.after_cov, rtol=1e-4)


@each_form
@pytest.mark.parametrize("values", [[1e10, 1.0, 1.0], [1e-10, 1.0, 1.0], [1e-6, 1.0, 1e6]])
def test_ill_conditioned_policies(values, form, scaled):
    new, old = with_eigenvalues(values)
    zero = torch.zeros(3, dtype=torch.float64)
    out = project((zero, new, zero, old), form=form, scaled=scaled)
    assert out.active_cov
    assert out.converged
    assert_close(gaussian_wasserstein(zero, out.chol, zero, old, form=form, scaled=scaled).cov, real(0.01), rtol=1e-6)


@each_form
def test_edges_of_the_ball(form, scaled):
    mean, new, old_mean, old = problem = policies()
    none = project(problem, 0.0, 0.0, form=form, scaled=scaled)
    assert torch.equal(none.mean, old_mean)
    assert_close(none.chol, old)
    assert (none.dual_cov == INF).all()
    assert none.converged.all()
    off = project(problem, INF, INF, form=form, scaled=scaled)
    assert torch.equal(off.mean, mean)
    assert torch.equal(off.chol, new)
    itself = project((mean, new, mean, new), form=form, scaled=scaled)
    assert torch.equal(itself.chol, new)
    assert not itself.active_cov.any()


@each_form
def test_each_row_is_projected_on_its_own(form, scaled):
    problem = policies()
    out = project(problem, form=form, scaled=scaled)
    for i in range(8):
        alone = project(tuple(x[i] for x in problem), form=form, scaled=scaled)
        assert_fields_close(alone, row_of(out, i))


@each_form
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_bad_row_is_flagged_and_spoils_no_other(value, diagonal, form, scaled):
    problem = [x.clone() for x in policies(rows=4)]
    if diagonal:
        problem[1::2] = [x.diagonal(dim1=-2, dim2=-1).clone() for x in problem[1::2]]
    options = {"form": form, "scaled": scaled, "diagonal": diagonal}
    good = project(problem, **options)
    problem[1][(1, 2) if diagonal else (1, 2, 2)] = value
    out = project(problem, **options)
    assert out.converged.tolist() == [True, False, True, True]
    for i in (0, 2, 3):
        for a, b in zip(vars(row_of(out, i)).values(), vars(row_of(good, i)).values(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_input_is_named():
    with pytest.raises(ValueError, match="commuting, bures; got 'exact'"):
        project(policies(), form="exact")
    with pytest.raises(ValueError, match="project_gaussian_wasserstein: `cov_bound`"):
        project(policies(), cov_bound=-1.0)
