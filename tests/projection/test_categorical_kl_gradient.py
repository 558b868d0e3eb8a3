"""The gradient through the projection: five ways to the same Jacobian, and what autograd's machinery makes of it."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.autograd.functional import jacobian
from torch.utils.checkpoint import checkpoint

from corral.projection import project_categorical_kl
from tolerance import assert_close
from typecheck import passed_unchecked

INF, NAN = math.inf, math.nan
BOUND = 0.05
real = partial(torch.tensor, dtype=torch.float64)


def policies(rows: int = 8, categories: int = 6, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """New and old logits [N, K], far enough apart for every row to be well outside the ball."""
    torch.manual_seed(0)
    old = torch.randn(rows, categories, dtype=torch.float64)
    return old + 2 * scale * torch.randn_like(old), old


def project(new: Tensor, old: Tensor, bound: float | Tensor = BOUND, **options) -> Tensor:
    return project_categorical_kl(new, old, bound, **options).logp


def pulled_back(f, x: Tensor, v: Tensor) -> Tensor:
    """vᵀ ∂f/∂x."""
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(f(x), x, v)[0]


def closed_form(new: Tensor, old: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """∂ log r_i / ∂ logit_j = t (δ_ij − r_j (1 + z_i z_j)) [K, K] and d = log new − log old [K], of one row."""
    d = new.log_softmax(-1) - old.log_softmax(-1)
    r = (old + t * d).softmax(-1)
    mean = (r * d).sum()
    z = (d - mean) / (r * (d - mean) ** 2).sum().sqrt()
    return t * (torch.eye(len(d), dtype=torch.float64) - r * (1 + z[:, None] * z)), d


# ---------------------------------------------------------------------------------------------------- the Jacobian


def test_golden_three_categories():
    # p = ⅓ each, q ∝ (e, 1, e⁻¹), and ε such that t = ½: r ∝ (e^½, 1, e^−½) = (a, 1, 1/a), s = a + 1 + 1/a = 3.2552519…
    # d = (1, 0, −1): μ = (a − 1/a)/s = 0.32015…, V = (a + 1/a)/s − μ² = 0.59030…
    # For v = (0, 1, 0):  Σ v = 1, Σ v (d − μ) = −μ, so grad_j = ½ [δ_j2 − r_j (1 − μ (d_j − μ)/V)].
    a = math.exp(0.5)
    s = a + 1 + 1 / a
    r, d = real([a, 1, 1 / a]) / s, real([1.0, 0.0, -1.0])
    mu = (a - 1 / a) / s
    variance = (a + 1 / a) / s - mu**2
    bound = 0.5 * mu - math.log(s / 3)  # K(t) = t μ − A(t), A = log Σ p e^{t d} = log s/3
    expected = 0.5 * (real([0.0, 1.0, 0.0]) - r * (1 - mu * (d - mu) / variance))
    grad = pulled_back(partial(project, old=torch.zeros(3, dtype=torch.float64), bound=bound), d, real([0.0, 1.0, 0.0]))
    assert_close(grad, expected)


def test_implicit_equals_closed_form_and_finite_differences():
    for new, old in zip(*policies(), strict=True):
        out = project_categorical_kl(new, old, BOUND)
        assert out.active
        actual = jacobian(partial(project, old=old), new)
        expected, _ = closed_form(new, old, 1 / (1 + out.dual.item()))
        assert_close(actual, expected, rtol=1e-9)
        h = 1e-5
        nudges = h * torch.eye(len(new), dtype=torch.float64)
        differences = (project(new + nudges, old) - project(new - nudges, old)).T / (2 * h)
        assert_close(actual, differences, rtol=1e-7, atol=1e-8)


def test_implicit_equals_one_newton_step_from_the_root():
    # At the root, t − (K(t, new) − ε)/K′(t) is t itself, and its derivative in `new` is the implicit one.
    new, old = policies()
    t = 1 / (1 + project_categorical_kl(new, old, BOUND).dual[:, None])
    old = old.log_softmax(-1)

    def tilted(new: Tensor, t: Tensor) -> Tensor:
        return (old + t * (new.log_softmax(-1) - old)).log_softmax(-1)

    def distance(new: Tensor, t: Tensor) -> Tensor:
        logp = tilted(new, t)
        return (logp.exp() * (logp - old)).sum(-1, keepdim=True)

    def stepped(new: Tensor) -> Tensor:
        at = t.clone().requires_grad_()
        (slope,) = torch.autograd.grad(distance(new.detach(), at).sum(), at)
        return tilted(new, t - (distance(new, t) - BOUND) / slope)

    v = torch.randn_like(new)
    assert_close(pulled_back(stepped, new, v), pulled_back(partial(project, old=old), new, v), rtol=1e-8)


@pytest.mark.parametrize("bound", [1e-4, 1e-2, 0.05])
def test_gradcheck(bound):
    # Four rows at the boundary, one well inside.
    new, old = policies(rows=4, categories=4)
    new = torch.cat([new, old[:1] + 1e-3 * torch.randn(1, 4, dtype=torch.float64)])
    old = torch.cat([old, old[:1]])
    assert project_categorical_kl(new, old, bound).active.tolist() == [True] * 4 + [False]
    assert gradcheck(lambda x: project(x, old, bound), new.requires_grad_())


def test_gradcheck_with_tokens_that_one_policy_rules_out():
    # Live logits only: the old policy rules out the third token, the new one the fourth; ε leaves room for that.
    old = real([[0.3, 0.1, -INF, -2.0], [1.0, 0.0, -INF, -3.0]])
    gone = real([-INF])

    def f(live: Tensor) -> Tensor:
        logp = project(torch.cat([live, gone.expand(2, 1)], -1), old, 0.2)
        return logp[:, :2]

    live = real([[2.0, -2.0, 0.5], [-3.0, 1.0, 0.0]]).requires_grad_()
    assert project_categorical_kl(torch.cat([live, gone.expand(2, 1)], -1), old, 0.2).converged.all()
    assert gradcheck(f, live)


def test_the_jacobian_annihilates_a_constant_and_the_way_out():
    # J 1 = 0: logits have no absolute level. J d = 0: at the boundary the policy cannot move further out.
    for new, old in zip(*policies(), strict=True):
        actual = jacobian(partial(project, old=old), new)
        d = new - old
        assert_close(actual @ torch.ones_like(d), torch.zeros_like(d), atol=1e-13)
        assert_close(actual @ d, torch.zeros_like(d), atol=1e-13)


def test_the_jacobian_scales_every_other_direction_by_t():
    for new, old in zip(*policies(), strict=True):
        t = 1 / (1 + project_categorical_kl(new, old, BOUND).dual)
        values = torch.linalg.eigvals(jacobian(partial(project, old=old), new))
        assert values.imag.abs().max() < 1e-12
        expected = torch.cat([torch.zeros(2, dtype=torch.float64), t.expand(len(new) - 2)])
        assert_close(values.real.sort().values, expected, atol=1e-11)


@pytest.mark.parametrize(("p", "q"), [(0.5, 0.9), (0.5, 0.01), (0.1, 0.9999), (0.99, 0.3)])
def test_two_categories_at_the_boundary_get_no_gradient(p, q):
    # 1 and d span the plane, so nothing is left: the policy gradient is exactly 0, as under clipping.
    old, new = real([p, 1 - p]).log(), real([q, 1 - q]).log()
    assert project_categorical_kl(new, old, BOUND).active
    for v in (real([1.0, 0.0]), real([0.0, 1.0]), real([3.0, -2.0])):
        assert pulled_back(partial(project, old=old), new, v).abs().max() < 1e-12


# ---------------------------------------------------------------------------------------------------- where it does not bind


def test_rows_inside_the_ball_have_the_gradient_of_log_softmax():
    new, old = policies()
    new[::2] = old[::2] + 0.01 * new[::2]
    inside = ~project_categorical_kl(new, old, BOUND).active
    assert inside.tolist() == [True, False] * 4
    v = torch.randn_like(new)
    plain = pulled_back(lambda x: x.log_softmax(-1), new, v)
    actual = pulled_back(partial(project, old=old), new, v)
    assert_close(actual[inside], plain[inside])
    assert (actual - plain)[~inside].abs().amax(-1).min() > 1e-2


def test_on_policy_the_gradient_is_the_vanilla_policy_gradient():
    # ∂/∂logits of A r_s/p_s at new = old is A ∂ log softmax_s = A (δ_js − p_j).
    old, _ = policies()
    sampled = torch.arange(8) % 6
    advantages = torch.randn(8, dtype=torch.float64)
    new = old.clone().requires_grad_()
    ratio = (project(new, old) - old.log_softmax(-1)).exp()[range(8), sampled]
    (ratio * advantages).sum().backward()
    onehot = torch.eye(6, dtype=torch.float64)[sampled]
    assert_close(new.grad, advantages[:, None] * (onehot - old.softmax(-1)))


def test_the_restriction_to_the_old_support_has_its_own_gradient():
    # KL(new‖old) = inf because of the third token; without it the policy fits, so log r is a log-softmax of the other two.
    old, new, v = real([0.5, 0.5, 0.0]).log(), real([0.3, 0.2, 0.5]).log(), real([1.0, -2.0, 5.0])
    grad = pulled_back(partial(project, old=old), new, v)
    restricted = pulled_back(lambda x: x[:2].log_softmax(-1), new, v[:2])
    assert_close(grad, restricted)


@pytest.mark.parametrize(
    ("new", "old", "bound"),
    [
        ([0.7, 0.2, 0.1], [0.2, 0.3, 0.5], 0.0),  # r is the old policy
        ([0.9, 0.1, 0.0], [0.25, 0.25, 0.5], 0.05),  # no policy meets the bound
        ([0.9, 0.1, 0.0, 0.0], [0.0, 0.0, 0.3, 0.7], 0.05),  # nothing in common
    ],
)
@pytest.mark.parametrize("gradient", ["exact", "constant_dual"])
def test_where_the_answer_does_not_depend_on_the_new_policy_the_gradient_is_0(new, old, bound, gradient):
    f = partial(project, old=real(old).log(), bound=bound, gradient=gradient)
    assert pulled_back(f, real(new).log(), torch.ones(len(new), dtype=torch.float64)).tolist() == [0.0] * len(new)
    assert pulled_back(f, real(new).log(), torch.arange(len(new), dtype=torch.float64)).tolist() == [0.0] * len(new)


def test_no_gradient_reaches_the_old_policy_or_the_bound():
    new, old = policies()
    old.requires_grad_()
    bound = real(BOUND).requires_grad_()
    assert not project(new, old, bound).requires_grad
    new.requires_grad_()
    (project(new, old, bound) ** 2).sum().backward()
    assert new.grad.abs().min() > 0
    assert old.grad is None
    assert bound.grad is None


def test_only_the_log_probs_carry_a_gradient():
    new, old = policies()
    out = project_categorical_kl(new.requires_grad_(), old, BOUND)
    assert [name for name, x in vars(out).items() if x.requires_grad] == ["logp"]


# ---------------------------------------------------------------------------------------------------- constant dual


def test_constant_dual_is_autograd_with_t_held():
    new, old = policies()
    new[::4] = old[::4] + 0.01 * new[::4]
    out = project_categorical_kl(new, old, BOUND)
    t = 1 / (1 + out.dual[:, None])
    v = torch.randn_like(new)
    held = pulled_back(lambda x: (t * x.log_softmax(-1) + (1 - t) * old.log_softmax(-1)).log_softmax(-1), new, v)
    actual = pulled_back(partial(project, old=old, gradient="constant_dual"), new, v)
    assert_close(actual, held)
    exact = pulled_back(partial(project, old=old), new, v)
    assert (actual - exact)[out.active].abs().amax(-1).min() > 1e-3


def test_golden_constant_dual_still_pushes_a_coin_outward():
    # J = t (δ_ij − r_j): for v = (1, 0), grad = t r_2 (1, −1). p = ½, q = 0.9, r = (0.6, 0.4), t = ln 1.5 / ln 9.
    old, new, bound = real([0.5, 0.5]).log(), real([0.9, 0.1]).log(), 0.020135513550688863
    grad = pulled_back(partial(project, old=old, bound=bound, gradient="constant_dual"), new, real([1.0, 0.0]))
    step = 0.4 * math.log(1.5) / math.log(9)
    assert_close(grad, real([step, -step]))


# ---------------------------------------------------------------------------------------------------- NaN and precision


@pytest.mark.parametrize("gradient", ["exact", "constant_dual"])
@pytest.mark.parametrize("bound", [0.0, 0.05, 0.8, INF])
def test_a_ruled_out_token_leaks_no_nan(bound, gradient):
    # Padding in both, a token of the old alone, one of the new alone; upstream is NaN wherever log r = −inf, as from 0 · inf.
    new = real([[1.0, 0.0, 2.0, -INF, -INF], [1.0, -1.0, -INF, 0.5, -INF], [1.0, 0.0, 2.0, 1.0, -INF]])
    old = real([[0.0, 0.0, 0.0, -INF, -INF], [0.0, 0.5, -2.0, 0.0, -INF], [1.0, 0.3, 0.0, -INF, -INF]])
    x = new.clone().requires_grad_()
    logp = project(x, old, bound, gradient=gradient)
    v = torch.where(logp > -INF, real([1.0, -2.0, 0.5, 3.0, 1.0]), NAN)
    assert v.isnan().any(-1).all()
    (grad,) = torch.autograd.grad(logp, x, v)
    assert grad.isfinite().all()
    (clean,) = torch.autograd.grad(project(x, old, bound, gradient=gradient), x, v.nan_to_num(0.0))
    assert torch.equal(grad, clean)
    assert (grad[new == -INF] == 0).all()


def test_a_nan_row_keeps_its_gradient_to_itself():
    new, old = policies(rows=3)
    v = torch.randn_like(new)
    expected = pulled_back(partial(project, old=old), new, v)
    new[1, 0] = NAN
    grad = pulled_back(partial(project, old=old), new, v)
    assert torch.equal(grad[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_float32_gradients_agree_with_float64(scale):
    # Measured: 2e-6 of the largest entry of the row.
    new, old = (x.float().double() for x in policies(rows=64, categories=65, scale=scale))
    v = torch.randn_like(new)
    exact = pulled_back(partial(project, old=old), new, v)
    actual = pulled_back(partial(project, old=old.float()), new.float(), v.float())
    size = exact.abs().amax(-1, keepdim=True)
    assert_close(actual / size, exact / size, dtype=torch.float32, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_get_a_half_precision_gradient(dtype):
    new, old = (x.to(dtype) for x in policies())
    v = torch.randn(8, 6)
    grad = pulled_back(partial(project, old=old), new, v)
    assert grad.dtype == dtype
    assert torch.equal(grad, pulled_back(partial(project, old=old.float()), new.float(), v).to(dtype))


# ---------------------------------------------------------------------------------------------------- autograd's machinery


def test_a_shared_old_policy_and_a_shared_new_one_broadcast_in_the_gradient():
    new, old = policies()
    v = torch.randn(8, 6, dtype=torch.float64)
    grad = pulled_back(partial(project, old=old), new[0], v)
    each = pulled_back(partial(project, old=old), new[:1].expand(8, 6), v)
    assert_close(grad, each.sum(0))


def test_a_second_derivative_through_the_new_policy_is_refused():
    new, old = policies()
    new.requires_grad_()
    (grad,) = torch.autograd.grad(project(new, old), new, torch.randn(8, 6, dtype=torch.float64), create_graph=True)
    with pytest.raises(RuntimeError, match="first derivative only"):
        torch.autograd.grad(grad.square().sum(), new)


def test_a_second_derivative_through_the_upstream_gradient_is_refused():
    new, old = policies()
    new.requires_grad_()
    v = torch.ones_like(new).requires_grad_()
    (grad,) = torch.autograd.grad(project(new, old), new, v, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivative only"):
        torch.autograd.grad(grad.sum(), v)


def test_create_graph_alone_costs_nothing():
    new, old = policies()
    new.requires_grad_()
    (with_graph,) = torch.autograd.grad(project(new, old).square().sum(), new, create_graph=True)
    (without,) = torch.autograd.grad(project(new, old).square().sum(), new)
    assert torch.equal(with_graph, without)


def test_checkpointing_recomputes_the_same_gradient():
    new, old = policies()

    def loss(x: Tensor) -> Tensor:
        return (project(2 * x, old) ** 2).sum()

    x = new.clone().requires_grad_()
    checkpoint(loss, x, use_reentrant=False).backward()
    expected = new.clone().requires_grad_()
    loss(expected).backward()
    assert torch.equal(x.grad, expected.grad)


def test_autocast_changes_nothing():
    # bf16 logits of a linear layer come in; from there on everything is float32, forward and backward.
    torch.manual_seed(0)
    layer, hidden = torch.nn.Linear(4, 6), 3 * torch.randn(8, 4)
    old = torch.randn(8, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = layer(hidden)
        out = project_categorical_kl(logits, old, BOUND)
        (grad,) = torch.autograd.grad(out.logp.square().sum(), logits)
    assert logits.dtype == grad.dtype == torch.bfloat16
    assert out.logp.dtype == out.kl_after.dtype == torch.float32
    plain = project_categorical_kl(logits.detach().float().requires_grad_(), old, BOUND)
    assert plain.active.any()
    assert torch.equal(out.logp, plain.logp)
    assert torch.equal(grad, pulled_back(lambda x: project(x.float(), old).square().sum(), logits, torch.tensor(1.0)))


def test_vmap_is_one_more_leading_axis():
    new, old = policies()
    bound = torch.linspace(0.01, 0.3, 8, dtype=torch.float64)
    assert_close(torch.func.vmap(project)(new, old, bound), project(new, old, bound))
    assert_close(torch.func.vmap(project, in_dims=(0, None))(new, old[0]), project(new, old[:1]))
    assert_close(torch.func.vmap(project, in_dims=(None, 0))(new[0], old), project(new[:1], old))
    assert_close(torch.func.vmap(project, in_dims=(1, 0), out_dims=1)(new.T, old), project(new, old).T)


def test_vmap_of_grad_is_the_batched_gradient():
    new, old = policies()
    new[::2] = old[::2] + 0.01 * new[::2]
    v = torch.randn_like(new)

    def loss(new: Tensor, old: Tensor, v: Tensor) -> Tensor:
        return (project(new, old) * v).sum()

    expected = pulled_back(partial(project, old=old), new, v)
    assert_close(torch.func.vmap(torch.func.grad(loss))(new, old, v), expected)
    assert_close(torch.func.grad(lambda x: torch.func.vmap(loss)(x, old, v).sum())(new), expected)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while tracing
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_compiled_equals_eager_forward_and_backward(backend):
    if passed_unchecked(project_categorical_kl):
        return
    # One graph, whatever the rows: some inside, some at the boundary, one infeasible, one with padding, one NaN.
    new, old = policies(rows=8, categories=6)
    new[:2] = old[:2] + 0.01 * new[:2]
    new[2, old[2].argmax()] = -INF
    new[3, 0] = old[3, 0] = -INF
    new[5, 0] = NAN
    v = torch.randn_like(new)
    bound = real([0.05, 0.0, 0.05, 0.05, 0.0, 0.1, INF, 1e-4])

    def run(function) -> dict[str, Tensor]:
        x = new.clone().requires_grad_()
        out = function(x, old, bound)
        (grad,) = torch.autograd.grad(out.logp, x, torch.where(out.logp > -INF, v, 0.0))
        fields = {**vars(out), "gradient": grad}
        return {name: y.detach().double().nan_to_num(nan=-99.0, neginf=-INF, posinf=INF) for name, y in fields.items()}

    eager = run(project_categorical_kl)
    compiled = run(torch.compile(project_categorical_kl, fullgraph=True, backend=backend))
    assert eager["converged"].tolist() == [1, 1, 0, 1, 1, 0, 1, 1]
    for name, expected in eager.items():
        assert_close(compiled[name], expected)
