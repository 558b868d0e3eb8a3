"""The entropy floor, alone and inside a KL ball: closed forms, optimality, gradients, what no covariance can satisfy."""

import math
from functools import partial

import numpy as np
import pytest
import scipy.optimize
import torch
from gaussian_policies import cov, kl_cov, policies, problems, real, with_eigenvalues
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from corral.divergence import gaussian_entropy
from corral.projection import project_entropy_floor, project_gaussian_kl
from corral.projection.root import Root, find_root
from tolerance import assert_close

INF, NAN = math.inf, math.nan
UNIT = 0.5 * math.log(2 * math.pi * math.e)
"""Entropy of N(0, 1)."""


def collapsed(rows: int = 6, dimension: int = 3) -> tuple[Tensor, Tensor]:
    """New and old factors; the new ones have lost most of their entropy, some directions more than others."""
    _, new, _, old = policies(rows, dimension)
    return 0.4 * new, old


def kl_projected(chol: Tensor, old: Tensor, bound: float) -> Tensor:
    zero = chol.new_zeros(chol.shape[-1])
    return project_gaussian_kl(zero, chol, zero, old, mean_bound=1.0, cov_bound=bound).chol


# ---------------------------------------------------------------------------------------------------- the floor alone


@pytest.mark.parametrize("diagonal", [False, True])
def test_golden_floor(diagonal):
    # σ = (1, ¼): H = 2u − ln 4, u = ½ log 2πe. A floor of 2u asks for ln 4 over two dimensions: each σ doubles.
    std = real([1.0, 0.25])
    out = project_entropy_floor(std if diagonal else std.diag(), 2 * UNIT, diagonal=diagonal)
    assert_close(out.chol, 2 * std if diagonal else (2 * std).diag())
    assert_close(out.entropy_before, real(2 * UNIT - math.log(4)))
    assert_close(out.entropy_after, real(2 * UNIT))
    assert out.active
    assert out.converged


@given(problems(), st.floats(-3, 3))
def test_entropy_after_is_the_larger_of_entropy_and_floor(problem, above):
    (_, chol, _, _), _ = problem
    before = gaussian_entropy(chol)
    out = project_entropy_floor(chol, (before + above).item())
    assert_close(gaussian_entropy(out.chol), before + max(above, 0.0))
    assert_close(out.entropy_after, before + max(above, 0.0))
    if above <= 0:
        assert torch.equal(out.chol, chol)
        assert not out.active
    assert_close(project_entropy_floor(out.chol, (before + above).item()).chol, out.chol)


def test_the_floor_alone_is_the_nearest_covariance():
    # min KL(Σ̃‖Σ) s.t. H(Σ̃) ≥ β: no covariance of as much entropy is nearer.
    new, _ = collapsed()
    floor = gaussian_entropy(new) + 1.0
    out = project_entropy_floor(new, floor)
    torch.manual_seed(1)
    size = torch.logspace(-4, 0, 2000, dtype=torch.float64)[:, None, None, None]
    candidates = out.chol @ torch.linalg.matrix_exp(size * torch.randn(2000, 6, 3, 3, dtype=torch.float64).tril())
    feasible = gaussian_entropy(candidates) >= floor
    assert (feasible.sum(0) > 200).all()
    assert (kl_cov(candidates, new) >= kl_cov(out.chol, new) - 1e-12)[feasible].all()


@pytest.mark.parametrize("diagonal", [False, True])
def test_gradcheck_floor(diagonal):
    new, _ = collapsed(3)
    if diagonal:
        new = new.diagonal(dim1=-2, dim2=-1).clone()
    floor = gaussian_entropy(new, diagonal=diagonal) + real([-1.0, 0.5, 2.0])
    f = lambda x: project_entropy_floor(x if diagonal else x.tril(), floor, diagonal=diagonal).chol  # noqa: E731
    assert gradcheck(f, new.requires_grad_())


def test_at_the_floor_no_gradient_scales_the_covariance():
    new, _ = collapsed()
    x = new.requires_grad_()
    out = project_entropy_floor(x, gaussian_entropy(new).detach() + 1.0).chol
    (gradient,) = torch.autograd.grad(out, x, torch.randn_like(new).tril())
    assert_close((gradient * new.detach()).sum((-2, -1)), torch.zeros(6, dtype=torch.float64))


def test_a_floor_per_row_broadcasts():
    new, _ = collapsed()
    floor = torch.linspace(-5, 5, 6, dtype=torch.float64)
    out = project_entropy_floor(new, floor)
    assert_close(gaussian_entropy(out.chol), torch.maximum(gaussian_entropy(new), floor))
    many = project_entropy_floor(new[0], floor)
    assert many.chol.shape == (6, 3, 3)
    assert torch.equal(project_entropy_floor(new, -INF).chol, new)


# ---------------------------------------------------------------------------------------------------- inside the ball


def test_golden_inside_the_ball():
    # Old I. S = diag(2, ½) has H = 2u and KL ½ (2 + ½ − 2) = ¼. New variances (1, 1/7): S = c/(1 + t q), q = (0, 6), so
    # 1 + 6t = 4 and c = 2: t = ½. New has H = 2u − ½ ln 7 and KL ½ (1/7 − 1 + ln 7) = 0.544: neither is met before.
    new, old = real([1.0, 7**-0.5]), real([1.0, 1.0])
    out = project_entropy_floor(new, 2 * UNIT, old_chol=old, cov_bound=0.25, diagonal=True)
    assert_close(out.chol.square(), real([2.0, 0.5]))
    assert_close(out.entropy_after, real(2 * UNIT))
    full = project_entropy_floor(new.diag(), 2 * UNIT, old_chol=old.diag(), cov_bound=0.25)
    assert_close(full.chol, out.chol.diag())
    assert out.converged
    assert full.converged


def test_golden_no_room_for_the_floor():
    # Old N(0, 1), floor that asks for a variance of 4; ½ (s − 1 − ln s) ≤ ½ (1 − ln 2) ends at s = 2.
    bound = 0.5 * (1 - math.log(2))
    for new in (0.1, 1.0, 1.9):
        x = real([[new**0.5]]).requires_grad_()
        out = project_entropy_floor(x, UNIT + math.log(2), old_chol=real([[1.0]]), cov_bound=bound)
        assert_close(out.chol, real([[2**0.5]]))
        assert not out.converged
        assert torch.autograd.grad(out.chol.sum(), x)[0] == 0


@given(problems(), st.floats(-2, 1))
def test_both_constraints_hold(problem, above):
    (_, chol, _, old), bound = problem
    floor = (gaussian_entropy(old) + above).item()
    out = project_entropy_floor(chol, floor, old_chol=old, cov_bound=bound)
    distance = kl_cov(out.chol, old)
    assert distance <= bound * (1 + 1e-8) + 1e-12
    # The most entropy in the ball is a multiple of the old covariance's.
    most = scipy.optimize.brentq(lambda y: len(chol) / 2 * (math.expm1(y) - y) - bound, 0, 50) * len(chol) / 2
    assert_close(out.entropy_after, gaussian_entropy(out.chol))
    if above < most - 1e-6:
        assert out.converged
        assert out.entropy_after >= floor - 1e-9
    if above > most + 1e-6:
        assert not out.converged
        assert_close(out.entropy_after, gaussian_entropy(old) + most, rtol=1e-7)
    if not out.active:
        assert torch.equal(out.chol, chol)
        assert gaussian_entropy(chol) >= floor


@given(problems())
def test_without_a_floor_it_is_the_kl_projection(problem):
    (_, chol, _, old), bound = problem
    out = project_entropy_floor(chol, -INF, old_chol=old, cov_bound=bound)
    assert out.converged
    assert_close(out.chol, kl_projected(chol, old, bound), rtol=1e-7, atol=1e-9)


def test_without_a_bound_it_is_the_floor_alone():
    new, old = collapsed()
    floor = gaussian_entropy(new) + 1.0
    out = project_entropy_floor(new, floor, old_chol=old, cov_bound=INF)
    assert out.converged.all()
    assert_close(out.chol, project_entropy_floor(new, floor).chol)


@pytest.mark.parametrize("above", [-0.3, 0.0, 0.1])
def test_after_a_projection_it_changes_only_what_the_floor_asks_for(above):
    new, old = collapsed()
    projected = kl_projected(new, old, 0.05)
    floor = gaussian_entropy(old) + above
    out = project_entropy_floor(projected, floor, old_chol=old, cov_bound=0.05)
    assert out.converged.all()
    short = gaussian_entropy(projected) < floor
    assert short.any()
    assert (kl_cov(out.chol, old) <= 0.05 * (1 + 1e-9)).all()
    assert_close(gaussian_entropy(out.chol)[short], floor[short])
    assert_close(out.chol[~short], projected[~short])


def test_only_with_a_bound_is_the_bound_kept():
    # As wide as old, but stretched: scaled up to the floor, the projected covariance leaves the ball it was projected into.
    _, new, _, old = policies(6, 3)
    projected, floor = kl_projected(new, old, 0.05), gaussian_entropy(old) + 0.3
    assert (gaussian_entropy(projected) < floor).any()
    assert (kl_cov(project_entropy_floor(projected, floor).chol, old) > 0.055).any()
    kept = project_entropy_floor(projected, floor, old_chol=old, cov_bound=0.05)
    assert kept.converged.all()
    assert (kl_cov(kept.chol, old) <= 0.05 * (1 + 1e-9)).all()
    assert (gaussian_entropy(kept.chol) >= floor - 1e-9).all()


@pytest.mark.parametrize(("above", "bound"), [(0.1, 0.05), (-0.2, 0.3), (-0.5, 0.05), (0.15, 0.02)])
def test_oracle_sequential_quadratic_programming(above, bound):
    dimension = 2
    news, olds = collapsed(3, dimension)
    floors = gaussian_entropy(olds) + above
    out = project_entropy_floor(news, floors, old_chol=olds, cov_bound=bound)
    assert out.converged.all()
    assert out.active.all()
    below = np.tril_indices(dimension)
    for new, old, floor, ours in zip(news.numpy(), olds.numpy(), floors.tolist(), out.chol, strict=True):

        def factor(entries: np.ndarray) -> np.ndarray:
            x = np.zeros((dimension, dimension))
            x[below] = entries
            return x

        def kl(entries: np.ndarray, reference: np.ndarray, factor=factor) -> float:
            relative = np.linalg.solve(reference, factor(entries))
            return 0.5 * ((relative**2).sum() - dimension - 2 * np.log(np.abs(np.diag(relative))).sum())

        def entropy(entries: np.ndarray, factor=factor) -> float:
            return dimension * UNIT + np.log(np.abs(np.diag(factor(entries)))).sum()

        oracle = scipy.optimize.minimize(
            kl, old[below], args=(new,), method="SLSQP", options={"ftol": 1e-15, "maxiter": 500},
            constraints=[
                {"type": "ineq", "fun": lambda x, old=old, kl=kl: bound - kl(x, old)},
                {"type": "ineq", "fun": lambda x, floor=floor, entropy=entropy: entropy(x) - floor},
            ],
        )  # fmt: skip
        assert_close(cov(ours), cov(torch.from_numpy(factor(oracle.x))), rtol=0, atol=2e-5)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize(("above", "bound"), [(0.1, 0.05), (-0.5, 0.3), (-3.0, 0.05), (-3.0, INF), (0.2, INF)])
def test_gradcheck_inside_the_ball(above, bound, diagonal):
    # Both constraints, mostly both, the bound alone, neither, the floor alone.
    new, old = collapsed(3)
    if diagonal:
        new, old = (x.diagonal(dim1=-2, dim2=-1).clone() for x in (new, old))
    floor = gaussian_entropy(old, diagonal=diagonal) + above

    def f(x: Tensor) -> Tensor:
        x = x if diagonal else x.tril()
        return project_entropy_floor(x, floor, old_chol=old, cov_bound=bound, diagonal=diagonal).chol

    assert gradcheck(f, new.requires_grad_())


def test_gradcheck_with_repeated_eigenvalues():
    new, old = with_eigenvalues([0.2, 0.2, 0.9])
    floor = (gaussian_entropy(old) + 0.1).item()
    f = lambda x: project_entropy_floor(x.tril(), floor, old_chol=old, cov_bound=0.05).chol  # noqa: E731
    assert gradcheck(f, new.requires_grad_())


def test_gradients_reach_the_new_factor_alone():
    new, old = (x.requires_grad_() for x in collapsed())
    out = project_entropy_floor(new, 0.0, old_chol=old, cov_bound=0.05)
    assert [name for name, x in vars(out).items() if x.requires_grad] == ["chol"]
    out.chol.sum().backward()
    assert old.grad is None


# ---------------------------------------------------------------------------------------------------- precision and edges


@pytest.mark.parametrize("dimension", [1, 9, 63])
def test_float32_agrees_with_float64(dimension):
    new, old = (x.float() for x in collapsed(4, dimension))
    floor = gaussian_entropy(old) + 0.05
    options = {"cov_bound": 0.05}
    out = project_entropy_floor(new, floor, old_chol=old, **options)
    exact = project_entropy_floor(new.double(), floor.double(), old_chol=old.double(), **options)
    assert out.chol.dtype == torch.float32
    assert out.converged.all()
    scale = exact.chol.abs().amax((-2, -1), keepdim=True)
    assert_close(out.chol / scale, exact.chol / scale, rtol=0, atol=1e-4)


@pytest.mark.parametrize("above", [-0.5, 0.0, 0.1])
def test_a_handful_of_evaluations_is_enough(above, monkeypatch):
    roots: list[Root] = []

    def kept(*args, **options) -> Root:
        roots.append(find_root(*args, **options))
        return roots[-1]

    monkeypatch.setattr("corral.projection.entropy.find_root", kept)
    new, old = collapsed(32, 9)
    out = project_entropy_floor(new, gaussian_entropy(old) + above, old_chol=old, cov_bound=0.01)
    assert out.converged.all()
    assert max(root.steps.max() for root in roots) <= 8


@pytest.mark.parametrize("values", [[1e-10, 1.0, 1.0], [1e10, 1e-3, 1.0], [1e-6, 1.0, 1e6]])
@pytest.mark.parametrize("above", [-0.1, 0.05])
def test_ill_conditioned_policies(values, above):
    new, old = with_eigenvalues(values)
    floor = (gaussian_entropy(old) + above).item()
    out = project_entropy_floor(new, floor, old_chol=old, cov_bound=0.01)
    assert out.converged
    assert_close(kl_cov(out.chol, old), real(0.01), rtol=1e-6)
    assert out.entropy_after >= floor - 1e-9


@pytest.mark.parametrize("bound", [1e19, INF])
@pytest.mark.parametrize("diagonal", [False, True])
def test_a_wide_ball_does_not_see_how_far_apart_the_policies_are(diagonal, bound):
    # Standard deviations 1e-9 and 1e9 have the product, and so the entropy, of 1 and 1: one nat more is √e times both. Their
    # precisions relative to the old ones are 1e18 and 1e-18, of which only the first would be left beside a 1.
    new = real([1e-9, 1e9]).requires_grad_()
    shaped = new if diagonal else torch.diag(new)
    old = torch.ones(2, dtype=torch.float64) if diagonal else torch.eye(2, dtype=torch.float64)
    out = project_entropy_floor(shaped, 2 * UNIT + 1, old_chol=old, cov_bound=bound, diagonal=diagonal)
    assert out.converged
    assert out.active
    std = out.chol if diagonal else out.chol.diagonal()
    assert_close(std, math.exp(0.5) * new.detach(), rtol=1e-12)
    assert_close(out.entropy_after, real(2 * UNIT + 1))
    assert torch.autograd.grad(std.log().sum(), new)[0].mul(new).abs().max() < 1e-9  # the entropy is held


def test_a_ball_of_no_size_holds_the_old_policy_alone():
    new, old = collapsed()
    out = project_entropy_floor(new, gaussian_entropy(old) - 1.0, old_chol=old, cov_bound=0.0)
    assert_close(out.chol, old)
    assert out.converged.all()
    more = project_entropy_floor(new, gaussian_entropy(old) + 1.0, old_chol=old, cov_bound=0.0)
    assert_close(more.chol, old)
    assert not more.converged.any()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("value", [NAN, 0.0, -1.0])
def test_a_bad_row_is_flagged_and_spoils_no_other(value, inside):
    new, old = collapsed(4)
    f = partial(project_entropy_floor, floor=3.0, **({"old_chol": old, "cov_bound": 0.05} if inside else {}))
    good = f(new)
    new[1, 2, 2] = value
    out = f(new)
    assert not out.converged[1]
    for a, b in zip(vars(out).values(), vars(good).values(), strict=True):
        assert torch.equal(a[[0, 2, 3]], b[[0, 2, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_floor_that_no_number_reaches_is_flagged(dtype):
    new, old = (x.to(dtype).requires_grad_() for x in collapsed())
    alone = project_entropy_floor(new, 1e6)
    assert torch.equal(alone.chol, new)
    assert torch.equal(alone.entropy_after, alone.entropy_before)
    assert not alone.converged.any()
    inside = project_entropy_floor(new, 1e6, old_chol=old, cov_bound=0.05)
    assert_close(kl_cov(inside.chol.detach().double(), old.detach().double()), torch.full((6,), 0.05).double(), rtol=1e-4)
    assert (inside.chol.diagonal(dim1=-2, dim2=-1) > old.diagonal(dim1=-2, dim2=-1)).all()  # the widest in the ball
    assert not inside.converged.any()
    for out in (alone, inside):
        assert torch.autograd.grad(out.chol.sum(), new)[0].isfinite().all()


@pytest.mark.parametrize("value", [NAN, -1.0])
def test_an_old_row_that_is_no_gaussian_changes_nothing(value):
    new, old = collapsed(4)
    good = project_entropy_floor(new, 3.0, old_chol=old, cov_bound=0.05)
    old[1, 2, 2] = value
    out = project_entropy_floor(new, 3.0, old_chol=old, cov_bound=0.05)
    assert torch.equal(out.chol[1], new[1])
    assert not out.active[1]
    assert not out.converged[1]
    for a, b in zip(vars(out).values(), vars(good).values(), strict=True):
        assert torch.equal(a[[0, 2, 3]], b[[0, 2, 3]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"old_chol": torch.eye(3)}, "give both or neither"),
        ({"cov_bound": 0.1}, "give both or neither"),
        ({"floor": NAN}, "`floor` is an entropy"),
        ({"floor": INF}, "`floor` is an entropy"),
        ({"floor": torch.tensor([NAN])}, "`floor` is an entropy"),
        ({"chol": torch.ones(3, 3)}, "Was a covariance passed"),
        ({"chol": torch.eye(3).long()}, "floating-point"),
        ({"old_chol": torch.eye(2), "cov_bound": 0.1}, r"`old_chol` is a lower Cholesky factor"),
        ({"old_chol": torch.eye(3), "cov_bound": -0.1}, "must be ≥ 0"),
        ({"chol": torch.eye(3).expand(2, 3, 3), "floor": torch.zeros(3)}, "do not fit together"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_input_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        project_entropy_floor(**{"chol": torch.eye(3), "floor": 0.0, **options})
