"""The gradient through the Gaussian KL projection: several ways to the same one, and where it is 0 or plain."""

import math
from functools import partial

import pytest
import torch
from gaussian_policies import cov, factor_of, policies, real, rotation, with_eigenvalues
from torch import Tensor
from torch.autograd import gradcheck
from torch.autograd.functional import jacobian
from torch.utils.checkpoint import checkpoint

from corral.projection import project_gaussian_kl
from tolerance import assert_close

NAN = math.nan
MEAN_BOUND, COV_BOUND = 0.05, 0.005


def project(mean: Tensor, chol: Tensor, old_mean: Tensor, old: Tensor, **options) -> tuple[Tensor, Tensor]:
    chol = chol if options.get("diagonal") else chol.tril()  # finite differences step above the diagonal too
    out = project_gaussian_kl(mean, chol, old_mean, old, mean_bound=MEAN_BOUND, cov_bound=COV_BOUND, **options)
    return out.mean, out.chol


def project_chol(chol: Tensor, old: Tensor, bound: float = COV_BOUND, **options) -> Tensor:
    zero = old.new_zeros(old.shape[-1])
    chol = chol if options.get("diagonal") else chol.tril()
    return project_gaussian_kl(zero, chol, zero, old, mean_bound=1.0, cov_bound=bound, **options).chol


def pulled_back(f, x: Tensor, v: Tensor) -> Tensor:
    """vᵀ ∂f/∂x."""
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(f(x), x, v)[0]


# ---------------------------------------------------------------------------------------------------- the Jacobian


@pytest.mark.parametrize("dimension", [1, 2, 4])
def test_gradcheck(dimension):
    # One row inside, one at the bound in its mean alone, the others at both bounds.
    mean, new, old_mean, old = policies(4, dimension, spread=3.0, step=5.0)
    mean[0] = old_mean[0] + 0.01 * old[0, :, 0]
    new[:2] = 1.001 * old[:2]
    out = project_gaussian_kl(mean, new, old_mean, old, mean_bound=MEAN_BOUND, cov_bound=COV_BOUND)
    assert out.active_mean.tolist() == [False, True, True, True]
    assert out.active_cov.tolist() == [False, False, True, True]
    assert gradcheck(partial(project, old_mean=old_mean, old=old), (mean.requires_grad_(), new.requires_grad_()))


@pytest.mark.parametrize("values", [[3.0] * 3, [0.5, 0.5, 2.0], [0.2, 1.0, 1.0], [1.5, 1.5 * (1 + 1e-12), 1.0]])
def test_gradcheck_with_repeated_eigenvalues(values):
    # Differentiated eigenvectors would divide by the differences of these: 0, or 1e-12.
    new, old = with_eigenvalues(values)
    assert gradcheck(partial(project_chol, old=old), new.requires_grad_())


def test_gradcheck_of_equal_factors_scaled():
    # L = 2 L_o, and L_o = I: every intermediate matrix is a multiple of I.
    old = torch.eye(3, dtype=torch.float64)
    assert gradcheck(partial(project_chol, old=old), (2 * old).requires_grad_())


@pytest.mark.parametrize("bound", [1e-6, 5e-4, 0.3])
def test_gradcheck_at_other_bounds(bound):
    _, new, _, old = policies(2, 3, spread=2.0)
    assert gradcheck(partial(project_chol, old=old, bound=bound), new.requires_grad_())


def test_gradcheck_diagonal():
    mean, new, old_mean, old = policies(3, 4)
    std, old_std = (x.diagonal(dim1=-2, dim2=-1).clone() for x in (new, old))
    std[0] = 1.7 * old_std[0]
    inputs = mean.requires_grad_(), std.requires_grad_()
    assert gradcheck(partial(project, old_mean=old_mean, old=old_std, diagonal=True), inputs)


def test_diagonal_equals_full():
    torch.manual_seed(0)
    std, old, v = torch.randn(3, 6, 5, dtype=torch.float64).exp()
    diagonal = pulled_back(partial(project_chol, old=old, diagonal=True), std, v)
    full = pulled_back(partial(project_chol, old=old.diag_embed()), std.diag_embed(), v.diag_embed())
    assert_close(diagonal, full.diagonal(dim1=-2, dim2=-1))


def test_implicit_equals_one_newton_step_from_the_root():
    # At the root, t − (K(t, L) − ε)/K′(t) is t itself, and its derivative in L is the implicit one; the rest is autograd
    # through inverses and Cholesky factors.
    _, new, _, old = policies()
    zero = torch.zeros(4, dtype=torch.float64)
    out = project_gaussian_kl(zero, new, zero, old, mean_bound=1.0, cov_bound=COV_BOUND)
    t = (1 / (1 + out.dual_cov))[:, None, None]

    def between(chol: Tensor, t: Tensor) -> Tensor:
        precision = (1 - t) * torch.linalg.inv(cov(old)) + t * torch.linalg.inv(cov(chol))
        return torch.linalg.inv(precision)

    def distance(chol: Tensor, t: Tensor) -> Tensor:
        relative = torch.linalg.solve(cov(old), between(chol, t))
        trace = relative.diagonal(dim1=-2, dim2=-1).sum(-1)
        return 0.5 * (trace - 4 - torch.linalg.slogdet(relative).logabsdet)[:, None, None]

    def stepped(chol: Tensor) -> Tensor:
        chol = chol.tril()
        at = t.clone().requires_grad_()
        (slope,) = torch.autograd.grad(distance(chol.detach(), at).sum(), at)
        return torch.linalg.cholesky(between(chol, t - (distance(chol, t) - COV_BOUND) / slope))

    v = torch.randn_like(new).tril()
    assert_close(pulled_back(partial(project_chol, old=old), new, v), pulled_back(stepped, new, v), rtol=1e-7, atol=1e-9)


def test_implicit_equals_finite_differences_in_63_dimensions():
    _, new, _, old = policies(1, 63, spread=0.5)
    new, old = new[0], old[0]
    f = partial(project_chol, old=old, bound=5e-4)
    v = torch.randn_like(new).tril()
    gradient = pulled_back(f, new, v)
    for _ in range(5):
        direction = torch.randn_like(new).tril() * new.diagonal()[:, None] * 1e-2
        h = 1e-4
        difference = ((f(new + h * direction) - f(new - h * direction)) * v).sum() / (2 * h)
        assert_close((gradient * direction).sum(), difference, rtol=1e-6)


def test_golden_the_mean_moves_along_the_ellipse():
    # Old N(0, diag(1, 4)), new mean (3, 0), ε = ½: μ̃ = (1, 0), t = ⅓. Along the first axis nothing moves, along the second
    # the derivative is t = ⅓.
    mean, zero, old = real([3.0, 0.0]), real([0.0, 0.0]), real([1.0, 2.0])
    f = lambda x: project_gaussian_kl(x, old, zero, old, mean_bound=0.5, cov_bound=1.0, diagonal=True).mean  # noqa: E731
    assert_close(f(mean), real([1.0, 0.0]))
    assert_close(jacobian(f, mean), real([[0.0, 0.0], [0.0, 1 / 3]]))


@pytest.mark.parametrize("scale", [0.3, 2.0, 50.0])
@pytest.mark.parametrize("diagonal", [False, True])
def test_one_dimension_at_the_bound_gets_no_gradient(scale, diagonal):
    # The answer is the root of ½ (s − 1 − ln s) = ε, whatever the new variance: 0, as under clipping.
    old = real([1.3]) if diagonal else real([[1.3]])
    assert pulled_back(partial(project_chol, old=old, diagonal=diagonal), scale * old, torch.ones_like(old)).abs().max() < 1e-14
    mean = pulled_back(lambda x: project(x, old, real([0.0]), old, diagonal=diagonal)[0], real([9.0]), real([1.0]))
    assert mean.abs().max() < 1e-14


def test_no_step_of_the_new_precision_away_from_the_old_moves_the_projection():
    # Σ⁻¹ → Σ⁻¹ + h (Σ⁻¹ − Σ_o⁻¹) only moves t: J's kernel. dL follows from dΣ = −Σ (Σ⁻¹ − Σ_o⁻¹) Σ.
    _, news, _, olds = policies()
    for new, old in zip(news, olds, strict=True):
        step = cov(new) @ torch.linalg.inv(cov(old)) @ cov(new) - cov(new)
        inner = torch.linalg.solve_triangular(new, torch.linalg.solve_triangular(new, step, upper=False).mT, upper=False)
        d_chol = new @ (inner.tril() - 0.5 * inner.diagonal().diag())
        h = 1e-6 / d_chol.abs().max()
        assert_close(project_chol(new + h * d_chol, old), project_chol(new, old), rtol=0, atol=1e-11)
        for v in torch.randn(3, 4, 4, dtype=torch.float64):
            gradient = pulled_back(partial(project_chol, old=old), new, v)
            assert (gradient * d_chol).sum().abs() < 1e-12 * gradient.norm() * d_chol.norm()


def test_rotations_of_the_frame_rotate_the_gradient():
    # A loss of Σ̃ alone, both policies mapped by A: the gradient in Σ maps by A⁻ᵀ · A⁻¹. In the factor, ∇_L = 2 ∇_Σ L.
    _, news, _, olds = policies(1)
    new, old, a = news[0], olds[0], rotation(dimension=4) * real([0.5, 1.0, 2.0, 3.0])
    w = torch.randn(4, 4, dtype=torch.float64)

    def loss(root: Tensor, old: Tensor, weight: Tensor) -> Tensor:
        return (cov(project_chol(torch.linalg.cholesky(cov(root)), old)) * weight).sum()

    plain = pulled_back(lambda x: loss(x, old, w), new, real(1.0))
    inverse = torch.linalg.inv(a)
    mapped = pulled_back(lambda x: loss(x, factor_of(a @ old), inverse.T @ w @ inverse), a @ new, real(1.0))
    assert_close(a.T @ mapped, plain, rtol=1e-8, atol=1e-10)


# ---------------------------------------------------------------------------------------------------- where it does not bind


def test_rows_inside_pass_the_gradient_on():
    mean, new, old_mean, old = policies()
    mean[::2], new[::2] = old_mean[::2] + 1e-3, 1.001 * old[::2]
    v_mean, v_chol = torch.randn_like(mean), torch.randn_like(new).tril()
    inputs = [x.clone().requires_grad_() for x in (mean, new)]
    gradients = torch.autograd.grad(project(*inputs, old_mean, old), inputs, (v_mean, v_chol))
    for gradient, v in zip(gradients, (v_mean, v_chol), strict=True):
        assert torch.equal(gradient[::2], v[::2])
        assert (gradient - v)[1::2].flatten(1).abs().amax(-1).min() > 1e-2


def test_on_policy_the_gradient_is_the_identity():
    mean, chol, *_ = policies()
    inputs = [x.clone().requires_grad_() for x in (mean, chol)]
    v = torch.randn_like(mean), torch.randn_like(chol).tril()
    for gradient, expected in zip(torch.autograd.grad(project(*inputs, mean, chol), inputs, v), v, strict=True):
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("diagonal", [False, True])
def test_a_ball_of_no_size_has_no_gradient(diagonal):
    mean, new, old_mean, old = policies()
    if diagonal:
        new, old = (x.diagonal(dim1=-2, dim2=-1).clone() for x in (new, old))
    inputs = [x.requires_grad_() for x in (mean, new)]
    out = project_gaussian_kl(*inputs, old_mean, old, mean_bound=0.0, cov_bound=0.0, diagonal=diagonal)
    for gradient in torch.autograd.grad(out.mean.sum() + out.chol.sum(), inputs):
        assert (gradient == 0).all()


def test_gradients_reach_the_new_policy_alone():
    problem = [x.requires_grad_() for x in policies()]
    bound = real(0.01).requires_grad_()
    out = project_gaussian_kl(*problem, mean_bound=bound, cov_bound=bound)
    assert [name for name, x in vars(out).items() if x.requires_grad] == ["mean", "chol"]
    (out.mean.square().sum() + out.chol.square().sum()).backward()
    assert problem[0].grad is not None
    assert problem[1].grad is not None
    assert problem[2].grad is problem[3].grad is bound.grad is None


def test_the_mean_and_the_covariance_do_not_mix():
    mean, new, old_mean, old = policies()
    inputs = [x.requires_grad_() for x in (mean, new)]
    projected = project(*inputs, old_mean, old)
    assert torch.autograd.grad(projected[0].sum(), inputs[1], retain_graph=True, allow_unused=True) == (None,)
    assert torch.autograd.grad(projected[1].sum(), inputs[0], allow_unused=True) == (None,)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("value", [NAN, 0.0, -1.0])
def test_a_bad_row_keeps_its_gradient_to_itself(value, diagonal):
    _, new, _, old = policies(3)
    if diagonal:
        new, old = (x.diagonal(dim1=-2, dim2=-1).clone() for x in (new, old))
    f = partial(project_chol, old=old, diagonal=diagonal)
    v = torch.randn_like(new) if diagonal else torch.randn_like(new).tril()
    expected = pulled_back(f, new, v)
    new[(1, 2) if diagonal else (1, 2, 2)] = value
    gradient = pulled_back(f, new, v)
    assert torch.equal(gradient[[0, 2]], expected[[0, 2]])
    if value == 0:  # infinitely far: the answer is the old policy, a constant
        assert (gradient[1] == 0).all()


# ---------------------------------------------------------------------------------------------------- precision, machinery


@pytest.mark.parametrize("dimension", [2, 63])
@pytest.mark.parametrize("bound", [5e-4, 0.05])
def test_float32_gradients_agree_with_float64(bound, dimension):
    # Measured: 5e-5 of the largest entry of the row at worst, at D = 63 and ε = 5e-4.
    _, new, _, old = (x.float() for x in policies(8, dimension))
    v = torch.randn_like(new).tril()
    exact = pulled_back(partial(project_chol, old=old.double(), bound=bound), new.double(), v.double())
    actual = pulled_back(partial(project_chol, old=old, bound=bound), new, v)
    size = exact.abs().amax((-2, -1), keepdim=True)
    assert_close(actual / size, exact / size, rtol=0, atol=5e-4)


def test_ill_conditioned_gradients_are_finite_and_right():
    new, old = with_eigenvalues([1e-10, 1.0, 1e6])
    v = torch.randn_like(new).tril()
    gradient = pulled_back(partial(project_chol, old=old), new, v)
    assert gradient.isfinite().all()
    direction = (new @ torch.randn_like(new).tril()).tril()
    h = 1e-6
    difference = ((project_chol(new + h * direction, old) - project_chol(new - h * direction, old)) * v).sum() / (2 * h)
    assert_close((gradient * direction).sum(), difference, rtol=1e-5, atol=1e-8)


def test_a_shared_covariance_collects_the_gradients_of_all_rows():
    mean, new, old_mean, old = policies()
    v = torch.randn_like(new).tril()
    shared = pulled_back(lambda x: project(mean, x, old_mean, old)[1], new[0], v)
    apart = pulled_back(lambda x: project(mean, x, old_mean, old)[1], new[:1].expand_as(new), v)
    assert_close(shared, apart.sum(0))


def test_a_second_derivative_is_refused():
    _, new, _, old = policies()
    new.requires_grad_()
    (gradient,) = torch.autograd.grad(project_chol(new, old).square().sum(), new, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_checkpointing_recomputes_the_same_gradient():
    _, new, _, old = policies()
    x, y = (new.clone().requires_grad_() for _ in range(2))
    checkpoint(lambda z: project_chol(z, old).square().sum(), x, use_reentrant=False).backward()
    project_chol(y, old).square().sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_two_forwards_before_a_backward_do_not_disturb_each_other():
    _, new, _, old = policies()
    x = new.clone().requires_grad_()
    first, second = project_chol(x, old), project_chol(1.5 * x[:3], old[:3])
    (alone,) = torch.autograd.grad(project_chol(x, old).square().sum(), x)
    second.sum().backward()
    x.grad = None
    first.square().sum().backward()
    assert torch.equal(x.grad, alone)
