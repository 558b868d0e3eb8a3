"""ProDMP: the differential equation, exact starts and velocities, linearity, covariance, every edge of its contract."""

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import scipy.integrate
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from corral.robot import ProDMP
from tolerance import assert_close

VARIANTS = [
    ProDMP(2, 5, 1.7),
    ProDMP(2, 1, 0.8, alpha=10.0),
    ProDMP(1, 2, 1.0, bandwidth=5.0),
    ProDMP(3, 8, 2.0, alpha=10.0, weights_scale=0.3, goal_scale=0.4, relative_goal=True),
    ProDMP(2, 25, 0.75, delay=0.3, alpha=40.0),
    ProDMP(2, 3, 0.75, delay=0.3, auto_scale=True, weights_scale=0.7, goal_scale=0.1, relative_goal=True),
    ProDMP(1, 4, 1.0, bandwidth=30.0, alpha_phase=1.0),
]


def doubles(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def spaced(low: float, high: float, count: int) -> Tensor:
    return torch.linspace(low, high, count, dtype=torch.float64)


def drawn(prodmp: ProDMP, *batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters large enough for the force to rival the spring, and a start state."""
    params = 10 * doubles(*batch, prodmp.parameters)
    return params, doubles(*batch, prodmp.dof), doubles(*batch, prodmp.dof)


def gaussians(prodmp: ProDMP) -> tuple[np.ndarray, np.ndarray]:
    """Centres and precisions of the ψ in the phase, from their definition."""
    n = prodmp.basis
    if n == 1:
        return np.exp([-prodmp.alpha_phase / 2]), np.array([prodmp.bandwidth])
    centre = np.exp(-prodmp.alpha_phase * np.arange(n + 1) / (n - 1))
    gap = np.diff(centre)
    gap[-1] *= 2 if n == 2 else 1
    return centre[:-1], prodmp.bandwidth / gap**2


def solved(prodmp: ProDMP, times: Tensor, params: Tensor, y: Tensor, v: Tensor, begin: float) -> tuple[Tensor, Tensor]:
    """The differential equation itself, integrated by SciPy from one time to the next."""
    weights = params.view(prodmp.dof, -1).numpy() * prodmp._scale.numpy()
    goal = weights[:, -1] + (y.numpy() if prodmp.relative_goal else 0)
    centre, precision = gaussians(prodmp)

    def slope(t: float, state: np.ndarray) -> np.ndarray:
        position, velocity = np.split(state, 2)
        x = math.exp(-prodmp.alpha_phase * (t - prodmp.delay) / prodmp.tau)
        psi = np.exp(-precision / 2 * (x - centre) ** 2)
        force = x * weights[:, :-1] @ (psi / psi.sum() if prodmp.basis > 1 else psi)
        spring = prodmp.alpha * (prodmp.alpha / 4 * (goal - position) - prodmp.tau * velocity)
        return np.concatenate([velocity, (spring + force) / prodmp.tau**2])

    state, states = np.concatenate([y, v]), []
    for since, until in zip([begin, *times.tolist()], times.tolist(), strict=False):
        if until > since:
            span = scipy.integrate.solve_ivp(slope, (since, until), state, method="DOP853", rtol=1e-12, atol=1e-13)
            state = span.y[:, -1]
        states.append(state)
    position, velocity = np.split(np.stack(states), 2, axis=-1)
    return torch.from_numpy(position), torch.from_numpy(velocity)


# ---------------------------------------------------------------------------------------------------- golden


def test_golden_a_goal_alone():
    # w = 0, from rest at 0: y = g (1 − (1 + a s) e^{−a s}) with a = 25/2, s = t/τ.  At t = 0.4, τ = 2: a s = 2.5,
    # y = g (1 − 3.5 e^−2.5), v = g a² s e^{−a s}/τ = g 15.625 e^−2.5.
    prodmp = ProDMP(1, 3, 2.0)
    params = torch.tensor([0.0, 0.0, 0.0, 3.0], dtype=torch.float64)
    rest = torch.zeros(1, dtype=torch.float64)
    y, v = prodmp.trajectory(spaced(0.4, 0.4, 1), params, rest, rest)
    assert_close(y.squeeze(), torch.tensor(3 * (1 - 3.5 * math.exp(-2.5)), dtype=torch.float64))
    assert_close(v.squeeze(), torch.tensor(3 * 15.625 * math.exp(-2.5), dtype=torch.float64))


def test_golden_the_spring_alone():
    # Goal and weights 0: y = (1 + a s) e^{−a s} y_b + s e^{−a s} τ v_b.  α = 2, so a = 1; τ = 2, t = 2 → s = 1;
    # y = (2 y_b + 2 v_b)/e = 14/e,  v = (−y_b·1 + 0·2 v_b)/(τ e) = −3/(2e) for y_b = 3, v_b = 4.
    prodmp = ProDMP(1, 3, 2.0, alpha=2.0)
    y, v = prodmp.trajectory(
        spaced(2, 2, 1), torch.zeros(4).double(), torch.tensor([3.0]).double(), torch.tensor([4.0]).double()
    )
    assert_close(y.squeeze(), torch.tensor(14 / math.e, dtype=torch.float64))
    assert_close(v.squeeze(), torch.tensor(-1.5 / math.e, dtype=torch.float64))


def test_golden_a_force_without_a_spring_to_speak_of():
    # n = 1 and a nearly flat ψ (bandwidth → 0): the force is e^{−α_x s}.  As α → 0 too, Φ = ∫ (s−z) e^{−α_x z} dz
    #   = s/α_x − (1 − e^{−α_x s})/α_x²;  at α_x = 3, s = 1: 1/3 − (1 − e^−3)/9.
    prodmp = ProDMP(1, 1, 1.0, alpha=1e-9, bandwidth=1e-12)
    expected = 1 / 3 - (1 - math.exp(-3)) / 9
    got = prodmp.design(spaced(1, 1, 1)).position[0, 0]
    assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-8)


def test_parameters_are_joint_by_joint_and_weights_before_the_goal():
    prodmp = ProDMP(2, 3, 1.0)
    rest = torch.zeros(2).double()
    for index in range(8):
        params = torch.eye(8, dtype=torch.float64)[index]
        y, _ = prodmp.trajectory(spaced(0, 5, 9), params, rest, rest)
        joint = index // 4
        assert (y[:, 1 - joint] == 0).all()
        # Forces fade, the goal stays.
        assert_close(y[-1, joint], torch.tensor(float(index % 4 == 3)).double(), atol=1e-5)


# ---------------------------------------------------------------------------------------------------- oracle


@pytest.mark.parametrize("begin", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("prodmp", VARIANTS, ids=str)
def test_the_differential_equation_is_solved(prodmp, begin):
    begin = prodmp.delay + begin
    times = spaced(begin, begin + 1.5 * prodmp.tau, 7)
    params, y, v = drawn(prodmp)
    positions, velocities = prodmp.trajectory(times, params, y, v, begin)
    expected_positions, expected_velocities = solved(prodmp, times, params, y, v, begin)
    assert_close(positions, expected_positions, rtol=1e-9, atol=1e-9)
    assert_close(velocities, expected_velocities, rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize("prodmp", VARIANTS, ids=str)
def test_more_panels_change_nothing(prodmp, monkeypatch):
    times = spaced(0, prodmp.delay + 6 * prodmp.tau, 301)
    coarse = prodmp.design(times)
    monkeypatch.setattr("corral.robot.prodmp.NODES", 24)
    fine = replace(prodmp).design(times)
    for a, b in ((coarse.position, fine.position), (coarse.velocity, fine.velocity)):
        assert ((a - b).abs().amax(0) <= 1e-13 * b.abs().amax(0)).all()


# ---------------------------------------------------------------------------------------------------- properties


@pytest.mark.parametrize("prodmp", VARIANTS, ids=str)
def test_starts_are_exact(prodmp):
    for begin in torch.linspace(prodmp.delay, prodmp.delay + 5.9 * prodmp.tau, 13).double().tolist():
        params, y, v = drawn(prodmp, 4)
        positions, velocities = prodmp.trajectory(spaced(begin, begin, 1), params, y, v, begin)
        assert_close(positions[:, 0], y, rtol=0, atol=1e-10)
        assert_close(velocities[:, 0], v, rtol=0, atol=1e-10)


@pytest.mark.parametrize("prodmp", VARIANTS, ids=str)
def test_velocity_is_the_derivative_of_position(prodmp):
    times = spaced(0, prodmp.delay + 4 * prodmp.tau, 57).requires_grad_()  # among them times before the delay
    params, y, v = drawn(prodmp)
    positions, velocities = prodmp.trajectory(times, params, y, v, prodmp.delay + 0.1)
    for joint in range(prodmp.dof):
        (slope,) = torch.autograd.grad(positions[:, joint].sum(), times, retain_graph=True)
        assert_close(velocities[:, joint], slope, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("prodmp", VARIANTS, ids=str)
def test_a_plan_made_anew_on_its_way_is_the_same_plan(prodmp):
    prodmp = replace(prodmp, relative_goal=False)  # an offset from another start is another goal
    params, y, v = drawn(prodmp, 3)
    begin, middle = prodmp.delay, prodmp.delay + 0.4 * prodmp.tau
    times = spaced(middle, middle + prodmp.tau, 21)
    positions, velocities = prodmp.trajectory(times, params, y, v, begin)
    again = prodmp.trajectory(times, params, positions[:, 0], velocities[:, 0], middle)
    assert_close(again[0], positions, rtol=1e-9, atol=1e-11)
    assert_close(again[1], velocities, rtol=1e-9, atol=1e-10)


def test_before_the_delay_a_plan_rests():
    prodmp = ProDMP(2, 4, 1.0, delay=0.5)
    params, y, v = drawn(prodmp)
    positions, velocities = prodmp.trajectory(torch.tensor([0.0, 0.25, 0.4999, 0.5]).double(), params, y, 0 * v)
    assert_close(positions, y.expand(4, 2))
    assert (velocities == 0).all()
    with pytest.raises(ValueError, match=r"rests until its delay of 0\.5 s"):
        prodmp.trajectory(torch.ones(1).double(), params, y, v)
    begin = torch.tensor([0.3, 0.5, 0.6]).double()  # one of them waits
    prodmp.trajectory(torch.ones(1).double(), params, y, v * (begin >= 0.5)[:, None], begin)
    with pytest.raises(ValueError, match="cannot start earlier"):
        prodmp.trajectory(torch.ones(1).double(), params, y, v.expand(3, 2), begin)


def test_the_goal_is_reached_from_anywhere():
    for relative in (False, True):
        prodmp = ProDMP(2, 5, 1.0, goal_scale=0.5, relative_goal=relative)
        params, y, v = drawn(prodmp, 6)
        positions, velocities = prodmp.trajectory(spaced(6, 6, 1), params, y, v, 0.2)
        goal = 0.5 * params.unflatten(-1, (2, 6))[..., -1] + (y if relative else 0)
        assert_close(positions[:, 0], goal, atol=1e-6)
        assert velocities.abs().max() < 1e-5


def test_auto_scale_makes_every_column_peak_at_its_scale():
    prodmp = ProDMP(1, 6, 1.3, delay=0.2, auto_scale=True, weights_scale=0.3, goal_scale=2.0)
    peak = prodmp.design(spaced(0, 0.2 + 6 * 1.3, 20000)).position.amax(0)
    assert_close(peak, torch.tensor([0.3] * 6 + [2.0], dtype=torch.float64), rtol=1e-5)


@given(seed=st.integers(0, 2**20), n=st.integers(1, 12), alpha=st.floats(1, 60), tau=st.floats(0.1, 10), late=st.floats(0, 5))
def test_a_plan_is_affine_and_shifts_with_its_delay(seed, n, alpha, tau, late):
    torch.manual_seed(seed)
    prodmp = ProDMP(2, n, tau, alpha=alpha)
    times, begin = spaced(late * tau, (late + 1) * tau, 5), late * tau
    (p1, y1, v1), (p2, y2, v2) = drawn(prodmp), drawn(prodmp)
    a = prodmp.trajectory(times, p1, y1, v1, begin)
    b = prodmp.trajectory(times, p2, y2, v2, begin)
    mixed = prodmp.trajectory(times, 0.3 * p1 + 0.7 * p2, 0.3 * y1 + 0.7 * y2, 0.3 * v1 + 0.7 * v2, begin)
    delayed = replace(prodmp, delay=0.7).trajectory(times + 0.7, p1, y1, v1, begin + 0.7)
    for one, other, mix, later in zip(a, b, mixed, delayed, strict=True):
        assert_close(mix, 0.3 * one + 0.7 * other, rtol=1e-9, atol=1e-9)
        assert_close(later, one, rtol=1e-7, atol=1e-7 / tau)


@given(seed=st.integers(0, 2**20), stretch=st.floats(0.2, 5))
def test_time_stretches(seed, stretch):
    # y depends on t/τ alone, and on τ v_b.
    torch.manual_seed(seed)
    slow, fast = ProDMP(2, 4, stretch), ProDMP(2, 4, 1.0)
    params, y, v = drawn(fast)
    times = spaced(0.1, 3, 7)
    expected, velocities = fast.trajectory(times, params, y, v, 0.1)
    positions, slow_velocities = slow.trajectory(times * stretch, params, y, v / stretch, 0.1 * stretch)
    assert_close(positions, expected, rtol=1e-9, atol=1e-10)
    assert_close(slow_velocities * stretch, velocities, rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------------------------------------------- covariance


@pytest.mark.parametrize("prodmp", VARIANTS, ids=str)
def test_covariance_is_the_linear_map_squared(prodmp):
    times = spaced(prodmp.delay, prodmp.delay + prodmp.tau, 6)
    factor = doubles(prodmp.parameters, prodmp.parameters)
    # The plan is linear in its parameters: from rest at 0 its flat form is B w, column by column.
    rest = torch.zeros(prodmp.dof).double()
    y, _ = prodmp.trajectory(times, torch.eye(prodmp.parameters).double(), rest, rest)
    matrix = y.mT.flatten(-2).mT
    assert_close(prodmp.covariance(times, factor @ factor.mT), matrix @ factor @ factor.mT @ matrix.mT, rtol=1e-9)


def test_covariance_by_monte_carlo():
    prodmp, draws = ProDMP(2, 4, 1.0, weights_scale=20.0), 100_000
    times = spaced(0.1, 1.0, 4)
    factor = 0.4 * doubles(10, 10)
    mean, y, v = doubles(10), doubles(2), doubles(2)
    positions, _ = prodmp.trajectory(times, mean + doubles(draws, 10) @ factor.mT, y, v)
    cov = prodmp.covariance(times, factor @ factor.mT)
    empirical = positions.mT.flatten(-2).mT.cov()
    # A sample covariance of Gaussians has variance (c_ii c_jj + c_ij²)/n.
    error = ((cov.diag()[:, None] * cov.diag() + cov**2) / draws).sqrt()
    assert ((empirical - cov).abs() <= 5 * error).all()
    expected = prodmp.trajectory(times, mean, y, v)[0]
    assert ((positions.mean(0) - expected).abs().mT.flatten() <= 5 * (cov.diag() / draws).sqrt()).all()


# ---------------------------------------------------------------------------------------------------- shapes and dtypes


def test_leading_axes_broadcast():
    prodmp = ProDMP(2, 3, 1.0)
    params, y, v = doubles(5, 3, 8), doubles(3, 2), doubles(2)
    times, begin = spaced(0, 1, 15).view(3, 5), torch.tensor([0.0, 0.1, 0.2], dtype=torch.float64)
    positions, velocities = prodmp.trajectory(times, params, y, v, begin)
    assert positions.shape == velocities.shape == (5, 3, 5, 2)
    for i in range(3):
        alone = prodmp.trajectory(times[i], params[2, i], y[i], v, float(begin[i]))
        assert_close(positions[2, i], alone[0])
        assert_close(velocities[2, i], alone[1])
    cov = doubles(3, 8, 8)
    cov = cov @ cov.mT
    whole = prodmp.covariance(times, cov, begin)
    assert whole.shape == (3, 10, 10)
    assert_close(whole[1], prodmp.covariance(times[1], cov[1], 0.1))


@pytest.mark.parametrize("prodmp", VARIANTS, ids=str)
def test_float32_is_as_good_as_its_inputs(prodmp):
    for begin in (prodmp.delay, prodmp.delay + 4.5 * prodmp.tau):  # e^{−α s} underflows here: nothing divides by it
        times = spaced(begin, begin + prodmp.tau, 50).float()
        inputs = [x.float() for x in drawn(prodmp, 3)]
        exact = prodmp.trajectory(times.double(), *(x.double() for x in inputs), begin)
        for got, expected in zip(prodmp.trajectory(times, *inputs, begin), exact, strict=True):
            assert got.dtype == torch.float32
            assert ((got - expected).abs() <= 1e-6 * expected.abs().amax()).all()


def test_autocast_does_not_round_plans():
    prodmp = ProDMP(2, 3, 1.0)
    times, params, state = torch.arange(1, 21) / 20, torch.randn(4, 8), torch.randn(2, 4, 2)
    with torch.autocast("cpu", torch.bfloat16):
        got = *prodmp.trajectory(times, params, *state), prodmp.covariance(times, torch.eye(8))
    for a, b in zip(got, (*prodmp.trajectory(times, params, *state), prodmp.covariance(times, torch.eye(8))), strict=True):
        assert torch.equal(a, b)


def test_half_precision_is_computed_in_float32():
    prodmp = ProDMP(1, 2, 1.0)
    rest = torch.zeros(1)
    y, _ = prodmp.trajectory(torch.ones(1), torch.ones(3, dtype=torch.bfloat16), rest, rest)
    assert y.dtype == torch.float32


def test_gradients():
    prodmp = ProDMP(2, 3, 0.9, delay=0.05, relative_goal=True, auto_scale=True)
    params, y, v = (x.requires_grad_() for x in drawn(prodmp, 2))
    times = spaced(0.21, 1.0, 4).requires_grad_()
    begin = torch.tensor(0.2).double().requires_grad_()
    assert gradcheck(prodmp.trajectory, (times, params, y, v, begin))
    assert gradcheck(prodmp.covariance, (times, doubles(8, 8).requires_grad_()))


def test_nothing_depends_on_earlier_calls():
    prodmp, fresh = (ProDMP(2, 5, 1.0, auto_scale=True) for _ in range(2))
    params, y, v = drawn(prodmp)
    with torch.inference_mode():
        prodmp.trajectory(spaced(0, 2, 9), params.clone(), y, v)
    times = spaced(0, 1, 4).requires_grad_()  # what is differentiated in time saves the table for its backward pass
    for model in (prodmp, pickle.loads(pickle.dumps(prodmp)), replace(prodmp)):
        positions, velocities = model.trajectory(times, params, y, v)
        (slope,) = torch.autograd.grad(positions.sum(), times)
        assert torch.equal(positions, fresh.trajectory(times, params, y, v)[0])
        assert_close(slope, velocities.sum(-1))
    assert prodmp == fresh
    assert hash(prodmp) == hash(fresh)


@pytest.mark.gpu
def test_the_same_on_a_gpu():
    prodmp = ProDMP(3, 5, 1.0, delay=0.1)
    params, y, v = drawn(prodmp, 4)
    times = spaced(0, 2, 20)
    for got, expected in zip(
        prodmp.trajectory(times.cuda(), params.cuda(), y.cuda(), v.cuda(), 0.2),
        prodmp.trajectory(times, params, y, v, 0.2),
        strict=True,
    ):
        assert got.device.type == "cuda"
        assert_close(got.cpu(), expected)


# ---------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dof": 0}, "`dof` is a whole number"),
        ({"basis": 0}, "`basis` is a whole number"),
        ({"tau": 0.0}, "`tau` must be finite and > 0"),
        ({"tau": math.nan}, "`tau` must be finite"),
        ({"alpha": math.inf}, "`alpha` must be finite"),
        ({"delay": -0.1}, "`delay` is a number of seconds and must be finite and ≥ 0"),
        ({"weights_scale": 0.0}, "`weights_scale` must be"),
    ],
)
def test_impossible_settings(change, words):
    with pytest.raises(ValueError, match=words):
        replace(ProDMP(1, 3, 1.0), **change)


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_arguments():
    with pytest.raises(ValueError, match="`cov` is square"):
        ProDMP(1, 2, 1.0).covariance(torch.ones(2), torch.eye(3)[:2])
    prodmp = ProDMP(2, 3, 1.0)
    times, params, rest = torch.ones(1), torch.zeros(8), torch.zeros(2)
    with pytest.raises(ValueError, match=r"`params` has 8 entries.*got \[7\]"):
        prodmp.trajectory(times, torch.zeros(7), rest, rest)
    with pytest.raises(ValueError, match="`velocity` has 2 entries"):
        prodmp.trajectory(times, params, rest, torch.zeros(3))
    with pytest.raises(ValueError, match="`times` is"):
        prodmp.trajectory(torch.arange(3), params, rest, rest)
    with pytest.raises(ValueError, match=r"must end by 6 τ \+ delay = 6 s; got 6\.1 s"):
        prodmp.trajectory(torch.tensor([6.1]), params, rest, rest)
    with pytest.raises(ValueError, match="`times` must end by"):
        prodmp.trajectory(torch.tensor([math.nan]), params, rest, rest)
    with pytest.raises(ValueError, match="`start_time` must end by"):
        prodmp.trajectory(times, params, rest, rest, 7.0)
    with pytest.raises(ValueError, match="`cov` has 8"):
        prodmp.covariance(times, torch.eye(7))


@given(st.floats(0, 6), st.floats(0, 6))
def test_every_time_within_the_horizon_is_finite(a, b):
    assume(a <= b)
    prodmp = ProDMP(1, 10, 1.0, alpha=100.0)
    design = prodmp.design(torch.tensor([a, b], dtype=torch.float64), a)
    assert all(x.isfinite().all() for x in (design.position, design.velocity, design.start))
