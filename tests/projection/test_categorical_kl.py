"""The projection onto a KL ball: closed forms, properties, slow oracles, every edge of its contract."""

import math
from functools import partial

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from corral.projection import CategoricalProjection, project_categorical_kl
from corral.projection.root import Root, find_root
from tolerance import assert_close

INF, NAN = math.inf, math.nan
FAMILIES = ["smooth", "wild", "peaked", "switch"]
BOUNDS = [1e-6, 1e-4, 1e-2, 0.05, 0.25, 1.0]
real = partial(torch.tensor, dtype=torch.float64)


def family(name: str, rows: int = 256, categories: int = 65) -> tuple[Tensor, Tensor]:
    """New and old logits [N, K] of one kind of disagreement; float32 holds them exactly."""
    torch.manual_seed(0)
    a, b = torch.randn(2, rows, categories).double()
    first, second = torch.eye(categories)[:2].double()
    return {
        "smooth": (a + 2 * b, a),
        "wild": (5 * b, 5 * a),
        "peaked": (a + 12 * first + 3 * b, a + 12 * first),
        "switch": (b + 15 * second, a + 15 * first),
    }[name]


def kl(logp_p: Tensor, logp_q: Tensor) -> Tensor:
    """KL(p‖q) by its textbook sum, with 0 log 0 = 0."""
    p = logp_p.exp()
    return torch.where(p > 0, p * (logp_p - logp_q), 0.0).sum(-1)


def bernoulli_kl(x: float, p: float) -> float:
    return x * math.log(x / p) + (1 - x) * math.log((1 - x) / (1 - p))


def bernoulli(*p: float) -> Tensor:
    """Log-probs [N, 2] of yes and no; a single p gives [2]."""
    yes = real(p)
    return torch.stack([yes, 1 - yes], -1).log().squeeze(0)


def tilted(new: Tensor, old: Tensor, t: float) -> Tensor:
    """old^(1−t) new^t, normalised."""
    return (t * new.log_softmax(-1) + (1 - t) * old.log_softmax(-1)).log_softmax(-1)


def assert_fields_close(a: CategoricalProjection, b: CategoricalProjection) -> None:
    for x, y in [(a.logp, b.logp), (a.dual, b.dual), (a.kl_before, b.kl_before), (a.kl_after, b.kl_after)]:
        assert_close(x, y)
    assert torch.equal(a.active, b.active)
    assert torch.equal(a.converged, b.converged)


# ---------------------------------------------------------------------------------------------------- golden


@pytest.mark.parametrize(("q", "x"), [(0.9, 0.6), (0.99, 0.6), (1 - 1e-9, 0.6), (0.2, 0.4)])
def test_golden_a_fair_coin(q, x):
    # p = ½: r leans to q's side until kl(x‖½) = 0.6 ln 1.2 + 0.4 ln 0.8 = 0.020135513550688863 = ε, at x = 0.6 or 0.4.
    # r ∝ q^t there, so logit x = t logit q: for q = 0.9, t = ln 1.5 / ln 9 = 0.18453…, η = 1/t − 1 = 4.41902…
    out = project_categorical_kl(bernoulli(q), bernoulli(0.5), 0.020135513550688863)
    assert_close(out.logp, bernoulli(x))
    t = math.log(x / (1 - x)) / math.log(q / (1 - q))
    assert_close(out.dual, real(1 / t - 1))
    assert_close(out.kl_before, real(bernoulli_kl(q, 0.5)))
    assert_close(out.kl_after, real(0.020135513550688863))
    assert out.active
    assert out.converged


@pytest.mark.parametrize("bound", [0.01, 0.05, 0.25])
@pytest.mark.parametrize("p", [0.5, 0.1, 0.7, 1e-3])
def test_a_coin_lands_on_the_boundary_however_far_the_new_one_is(p, bound):
    # Two categories leave one degree of freedom: r is the root of kl(x‖p) = ε on q's side, and q's distance is forgotten.
    x = scipy.optimize.brentq(lambda x: bernoulli_kl(x, p) - bound, p, 1 - 1e-12, xtol=1e-15, rtol=1e-14)
    q = 1 - (1 - x) * real([0.9, 0.3, 1e-2, 1e-6])
    out = project_categorical_kl(bernoulli(*q.tolist()), bernoulli(p), bound)
    assert out.active.all()
    assert_close(out.logp, bernoulli(x).expand(4, 2))


@pytest.mark.parametrize(("p", "ratio"), [(0.9, 1.09), (0.5, 1.31), (0.1, 2.07), (1e-2, 5.5), (1e-3, 23), (1e-4, 129)])
def test_golden_a_kl_bound_does_not_bound_the_ratio(p, ratio):
    # The largest r/p of a token that the new policy has made all but certain, at ε = 0.05.
    out = project_categorical_kl(bernoulli(1 - 1e-9), bernoulli(p), 0.05)
    assert out.logp[0].exp().item() / p == pytest.approx(ratio, rel=5e-3)


@pytest.mark.parametrize(("share", "converged"), [(0.99, True), (1.01, False)])
def test_golden_a_token_of_at_most_1_less_e_to_minus_bound_may_vanish(share, converged):
    # KL(r‖old) = −ln(1 − p) for r = old without that token: within ε iff p ≤ 1 − e^−ε = 0.0488 at 0.05.
    p = share * -math.expm1(-0.05)
    out = project_categorical_kl(real([-INF, 0.0]), bernoulli(p), 0.05)
    assert out.logp.exp().tolist() == [0.0, 1.0]
    assert out.kl_after.item() == pytest.approx(-math.log1p(-p))
    assert out.converged == converged


@pytest.mark.parametrize("bound", [1e-3, 0.05, 0.3])
def test_tokens_of_one_probability_may_be_merged(bound):
    # Five tokens share a probability under each policy, and so a log-ratio: projected as one they have the same sum.
    new, old = (x.log_softmax(-1) for x in family("smooth", rows=32, categories=7))
    five = math.log(5)
    split = project_categorical_kl(*(torch.cat([x[:, :6], (x[:, 6:] - five).expand(32, 5)], -1) for x in (new, old)), bound)
    merged = project_categorical_kl(new, old, bound)
    assert merged.active.any()
    assert_close(split.logp[:, :6], merged.logp[:, :6])
    assert_close(split.logp[:, 6:], (merged.logp[:, 6:] - five).expand(32, 5))
    assert_close(split.dual, merged.dual, rtol=1e-9)


def test_golden_three_categories():
    # p = ⅓ each, q ∝ (16, 4, 1): r_t ∝ (16^t, 4^t, 1), at t = ½ it is (4, 2, 1)/7.
    # ε = KL(r‖p) = Σ r ln 3r = (4 ln 12/7 + 2 ln 6/7 + ln 3/7)/7 = 0.1428893…, so η = 1/t − 1 = 1.
    bound = (4 * math.log(12 / 7) + 2 * math.log(6 / 7) + math.log(3 / 7)) / 7
    out = project_categorical_kl(real([16, 4, 1]).log(), torch.zeros(3, dtype=torch.float64), bound)
    assert_close(out.logp.exp(), real([4, 2, 1]) / 7)
    assert_close(out.dual, real(1.0))


def test_golden_inside_the_ball_nothing_changes():
    # kl(0.6‖½) = 0.0201 ≤ 0.05.
    out = project_categorical_kl(bernoulli(0.6), bernoulli(0.5), 0.05)
    assert_close(out.logp, bernoulli(0.6))
    assert_close(out.kl_before, real(0.020135513550688863))
    assert out.kl_after == out.kl_before
    assert out.dual == 0
    assert not out.active
    assert out.converged


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("t", [0.02, 0.1, 0.5, 0.9, 0.999])
def test_a_manufactured_step_is_recovered(name, t):
    # ε := KL(r_t‖old) for a chosen t, so the projection is r_t itself and η = 1/t − 1.
    new, old = family(name, rows=64)
    r = tilted(new, old, t)
    out = project_categorical_kl(new, old, kl(r, old.log_softmax(-1)))
    assert out.active.all()
    assert out.converged.all()
    # The textbook sum that gives ε here loses the digits of a small KL: 1e-16 / 1e-7 of it where t = 1e-3.
    assert_close(out.logp, r, rtol=1e-8)
    assert_close(out.dual, torch.full_like(out.dual, 1 / t - 1), rtol=1e-7)


@pytest.mark.parametrize("name", FAMILIES)
def test_strong_duality(name):
    # g(η) = −ηε − (1 + η) log Σ exp((log new + η log old) / (1 + η)) is at its maximum the primal value KL(r‖new).
    new, old = (x.log_softmax(-1) for x in family(name))
    bound = 0.05
    out = project_categorical_kl(new, old, bound)
    new, old, logp, eta = new[out.active], old[out.active], out.logp[out.active], out.dual[out.active]
    mixed = (new + eta[:, None] * old) / (1 + eta[:, None])
    dual_value = -eta * bound - (1 + eta) * mixed.logsumexp(-1)
    assert_close(dual_value, kl(logp, new))


def test_a_small_step_is_quadratic():
    # K(t) = t² Var_p(d)/2 + O(t³), so t* → √(2ε / Var_p d), from which it differs by O(t*).
    new, old = (x.log_softmax(-1) for x in family("smooth"))
    p, d = old.exp(), new - old
    variance = (p * d**2).sum(-1) - (p * d).sum(-1) ** 2
    for bound in (1e-6, 1e-8, 1e-10):
        t = 1 / (1 + project_categorical_kl(new, old, bound).dual)
        assert_close(t, (2 * bound / variance).sqrt(), atol=0, rtol=2 * math.sqrt(bound))


# ---------------------------------------------------------------------------------------------------- properties


@st.composite
def problems(draw) -> tuple[Tensor, Tensor, float]:
    """New and old logits of a few categories, up to 12 nats apart, and a bound."""
    categories = draw(st.integers(2, 6))
    logits = st.lists(st.floats(-6, 6), min_size=categories, max_size=categories)
    return real(draw(logits)), real(draw(logits)), 10 ** draw(st.floats(-6, 0.5))


@given(problems())
def test_the_projection_stays_inside_the_ball(problem):
    new, old, bound = problem
    out = project_categorical_kl(new, old, bound)
    assert out.converged
    assert out.kl_after <= bound * (1 + 1e-12)
    assert_close(kl(out.logp, old.log_softmax(-1)), out.kl_after, rtol=1e-9)
    assert_close(out.logp.logsumexp(-1), real(0.0))
    assert out.active == (out.kl_before > bound)


@given(problems())
def test_inside_the_ball_nothing_changes(problem):
    new, old, _ = problem
    distance = project_categorical_kl(new, old, INF).kl_before.item()
    for bound in (distance, 2 * distance, INF):  # on the boundary is inside
        out = project_categorical_kl(new, old, bound)
        assert torch.equal(out.logp, new.log_softmax(-1))
        assert out.dual == 0
        assert not out.active
        assert out.converged


@given(problems())
def test_projecting_twice_is_projecting_once(problem):
    new, old, bound = problem
    once = project_categorical_kl(new, old, bound)
    assert_close(project_categorical_kl(once.logp, old, bound).logp, once.logp, rtol=1e-9)


@given(problems(), st.floats(-50, 50), st.floats(-50, 50))
def test_a_constant_added_to_either_policy_changes_nothing(problem, shift_new, shift_old):
    new, old, bound = problem
    out = project_categorical_kl(new, old, bound)
    shifted = project_categorical_kl(new + shift_new, old + shift_old, bound)
    assert_close(shifted.logp, out.logp, rtol=1e-8, atol=1e-10)  # logits of 50 round the differences to 1e-14


@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_categories_does_not_matter(problem, random):
    new, old, bound = problem
    order = list(range(len(new)))
    random.shuffle(order)
    out = project_categorical_kl(new[order], old[order], bound)
    assert_close(out.logp, project_categorical_kl(new, old, bound).logp[order], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_wider_ball_brings_the_projection_closer_to_the_new_policy(name):
    new, old = family(name)
    outs = [project_categorical_kl(new, old, bound) for bound in BOUNDS]
    distances = torch.stack([kl(out.logp, new.log_softmax(-1)) for out in outs])
    duals = torch.stack([out.dual for out in outs])
    active = outs[1].active  # by the smaller of each pair of bounds
    assert active.all() or name == "peaked"
    assert (distances[1:] <= distances[:-1] + 1e-12).all()
    assert (duals[1:] <= duals[:-1]).all()
    assert (duals[1] < duals[0])[active].all()


def test_no_feasible_policy_is_closer():
    rows, draws, categories, bound = 20, 4000, 4, 0.05
    new, old = (x.log_softmax(-1) for x in family("wild", rows, categories))
    out = project_categorical_kl(new, old, bound)
    best = kl(out.logp, new)
    # Candidates around the answer and around the old policy, at every distance.
    centre = torch.stack([out.logp, old])[torch.arange(draws) % 2]
    size = torch.logspace(-4, 0.5, draws, dtype=torch.float64)[:, None, None]
    candidates = (centre + size * torch.randn(draws, rows, categories, dtype=torch.float64)).log_softmax(-1)
    feasible = kl(candidates, old) <= bound
    assert (feasible.sum(0) > 200)[out.active].all()
    assert (kl(candidates, new) >= best - 1e-12)[feasible].all()


def test_each_row_is_projected_on_its_own():
    new, old = family("smooth", rows=6)
    new[::2] = old[::2]  # every other row is inside
    bound = real([0.01, 0.02, 0.05, 0.1, 0.2, 0.3])
    out = project_categorical_kl(new, old, bound)
    assert out.active.tolist() == [False, True] * 3
    for i in range(6):
        alone = project_categorical_kl(new[i], old[i], bound[i].item())
        assert_fields_close(alone, CategoricalProjection(*(x[i] for x in vars(out).values())))


def test_inputs_are_left_as_they_were():
    new, old = family("wild", rows=8)
    bound = torch.full((8,), 0.05, dtype=torch.float64)
    kept = [x.clone() for x in (new, old, bound)]
    project_categorical_kl(new, old, bound)
    assert all(torch.equal(x, y) for x, y in zip((new, old, bound), kept, strict=True))


# ---------------------------------------------------------------------------------------------------- oracles


def bisected(new: Tensor, old: Tensor, bound: float) -> Tensor:
    """One row by 200 halvings of η's bracket in long double, from the formulas as published."""
    q, p = (x.log_softmax(-1).numpy().astype(np.longdouble) for x in (new, old))

    def r(eta: np.longdouble) -> np.ndarray:
        mixed = (q + eta * p) / (1 + eta)
        return mixed - np.log(np.exp(mixed - mixed.max()).sum()) - mixed.max()

    low, high = np.longdouble(0), np.longdouble(1e9)
    for _ in range(200):
        eta = (low + high) / 2
        logp = r(eta)
        outside = (np.exp(logp) * (logp - p)).sum() > bound
        low, high = (eta, high) if outside else (low, eta)
    return torch.from_numpy(r(high).astype(np.float64))


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_oracle_bisection_in_long_double(name, bound):
    new, old = family(name, rows=32, categories=17)
    out = project_categorical_kl(new, old, bound)
    assert out.active.any()
    for i in out.active.nonzero().flatten():
        # The oracle's own KL is a difference of terms as large as √(2ε): 1e-19 / √ε of it is noise.
        assert_close(out.logp[i], bisected(new[i], old[i], bound), rtol=1e-9)


@pytest.mark.parametrize("bound", [0.01, 0.05, 0.5])
def test_oracle_sequential_quadratic_programming(bound):
    # Knows nothing of duals or tilts: minimise Σ r log(r/q) over the simplex subject to Σ r log(r/p) ≤ ε.
    new, old = (x.log_softmax(-1) for x in family("smooth", rows=6, categories=5))
    new = (2 * new).log_softmax(-1)
    out = project_categorical_kl(new, old, bound)
    for i in range(6):
        log_q, log_p = new[i].numpy(), old[i].numpy()
        oracle = scipy.optimize.minimize(
            lambda r, log_q=log_q: (r * (np.log(r) - log_q)).sum(),
            np.exp(log_p),
            jac=lambda r, log_q=log_q: np.log(r) - log_q + 1,
            bounds=[(1e-12, 1.0)] * 5,
            constraints=[
                {"type": "eq", "fun": lambda r: r.sum() - 1, "jac": lambda r: np.ones_like(r)},
                {
                    "type": "ineq",
                    "fun": lambda r, log_p=log_p: bound - (r * (np.log(r) - log_p)).sum(),
                    "jac": lambda r, log_p=log_p: -(np.log(r) - log_p + 1),
                },
            ],
            method="SLSQP",
            options={"ftol": 1e-15, "maxiter": 500},
        )
        assert_close(out.logp[i].exp(), torch.from_numpy(oracle.x), rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------------------------------- precision and cost


@pytest.mark.parametrize("categories", [2, 65])
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_float32_agrees_with_float64(name, bound, categories):
    # Measured: 9e-5 in log r at worst (wild, ε = 1, where log r is −40), 5e-7 in r, 7e-6 of ε in KL.
    new, old = family(name, categories=categories)
    exact = project_categorical_kl(new, old, bound)
    out = project_categorical_kl(new.float(), old.float(), bound)
    assert out.converged.all()
    assert exact.converged.all()
    assert out.logp.dtype == out.dual.dtype == out.kl_after.dtype == torch.float32
    assert_close(out.logp, exact.logp, atol=4e-6)
    assert_close(out.logp.exp(), exact.logp.exp(), rtol=0, atol=1e-6)
    assert_close(out.kl_after, exact.kl_after, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_row_is_solved_within_15_evaluations(name, bound, dtype, monkeypatch):
    roots: list[Root] = []

    def kept(*args, **options) -> Root:
        roots.append(find_root(*args, **options))
        return roots[-1]

    monkeypatch.setattr("corral.projection.categorical_kl.find_root", kept)
    new, old = family(name)
    out = project_categorical_kl(new.to(dtype), old.to(dtype), bound)
    (root,) = roots
    assert out.converged.all()
    assert root.steps.shape == (int(out.active.sum()),)  # rows inside the ball are not solved
    assert root.steps.max() <= 15
    assert root.steps.double().mean() <= 7.5


@pytest.mark.parametrize("bound", [1e-12, 1e-9])
def test_a_tiny_ball_keeps_its_digits(bound):
    # KL(r‖old) = 1e-12 is the square of log-ratios of 1e-6; a sum of p log p/q would lose it among terms of that size.
    new, old = family("smooth")
    out = project_categorical_kl(new, old, bound)
    assert out.converged.all()
    assert_close(out.kl_after, torch.full_like(out.kl_after, bound), atol=0)


def test_a_large_common_part_of_the_log_ratios_costs_no_digits():
    # One token takes all from the others: their log-ratios are −25 plus 0.01 of noise, and the noise alone counts at ε = 1e-6.
    _, old = family("smooth")
    old[:, 0] -= 40
    new = old + 0.01 * torch.randn_like(old)
    new[:, 0] = 25
    out = project_categorical_kl(new.float(), old.float(), 1e-6)
    assert out.converged.all()
    assert_close(out.kl_after, torch.full_like(out.kl_after, 1e-6), atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_kl_that_rises_in_a_sudden_step_is_solved(dtype):
    # log K is flat, steep, flat, and Newton's step from either flat part lands in the other: after 24 evaluations t is
    # still 0.857, where KL is 30 nats instead of 0.05.
    old = torch.tensor([0.0, -19.4, -5.8, -29.1, -11.8, -48.1, -8.0, -42.2], dtype=dtype)
    new = torch.tensor([-8.7, -13.9, -15.0, -12.2, -12.5, 0.0, -15.4, -17.0], dtype=dtype)
    out = project_categorical_kl(new, old, 0.05)
    assert out.converged
    assert_close(out.kl_after, real(0.05))


# ---------------------------------------------------------------------------------------------------- edges of the ball


def test_a_ball_of_no_size_holds_the_old_policy_alone():
    new, old = family("wild", rows=8)
    out = project_categorical_kl(new, old, 0.0)
    assert_close(out.logp, old.log_softmax(-1))
    assert (out.dual == INF).all()
    assert (out.kl_after < 1e-30).all()  # the square of a rounding
    assert out.active.all()
    assert out.converged.all()


@pytest.mark.parametrize("bound", [0.0, 0.05, INF])
def test_on_policy_nothing_changes(bound):
    logits, _ = family("wild", rows=8)
    out = project_categorical_kl(logits, logits, bound)
    assert torch.equal(out.logp, logits.log_softmax(-1))
    assert (out.kl_before == 0).all()
    assert (out.kl_after == 0).all()
    assert (out.dual == 0).all()
    assert not out.active.any()
    assert out.converged.all()


def test_logits_that_differ_by_a_constant_are_the_same_policy():
    logits = real([0.0, -1.0, 2.0])
    out = project_categorical_kl(logits + 8.0, logits, 1e-20)  # sums of small integers: no rounding
    assert_close(out.logp, logits.log_softmax(-1))
    assert not out.active
    assert out.converged


def test_one_category_is_certain():
    out = project_categorical_kl(real([[3.0], [-2.0]]), real([[0.0], [7.0]]), 0.0)
    assert out.logp.tolist() == [[0.0], [0.0]]
    assert out.dual.tolist() == [0.0, 0.0]
    assert out.converged.all()


def test_an_infinite_bound_switches_the_projection_off():
    new, old = family("switch", rows=8)
    out = project_categorical_kl(new, old, INF)
    assert torch.equal(out.logp, new.log_softmax(-1))
    assert not out.active.any()
    assert out.converged.all()
    assert torch.equal(out.kl_after, out.kl_before)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1), (2, 3)])
def test_a_bound_per_row_broadcasts(shape):
    new, old = (x.view(2, 3, 5) for x in family("wild", rows=6, categories=5))
    bound = 0.01 + 0.1 * torch.rand(shape, dtype=torch.float64)
    out = project_categorical_kl(new, old, bound)
    assert out.kl_after.shape == (2, 3)
    assert out.active.all()
    assert_close(out.kl_after, bound.expand(2, 3))


def test_bounds_of_0_and_infinity_may_sit_side_by_side():
    new, old = family("smooth", rows=3)
    out = project_categorical_kl(new, old, real([0.0, 0.05, INF]))
    assert_close(out.kl_after, torch.stack([real(0.0), real(0.05), out.kl_before[2]]))
    assert out.active.tolist() == [True, True, False]
    assert out.converged.all()


def test_one_old_policy_serves_many_new_ones():
    new, old = family("wild", rows=6, categories=5)
    shared = project_categorical_kl(new.view(2, 3, 5), old[:1], 0.05)
    assert shared.logp.shape == (2, 3, 5)
    assert_close(shared.logp.view(6, 5), project_categorical_kl(new, old[:1].expand(6, 5), 0.05).logp)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5)])
def test_no_rows_are_no_work(shape):
    out = project_categorical_kl(torch.zeros(shape), torch.zeros(shape), 0.05, strict=True)
    assert out.logp.shape == shape
    assert out.dual.shape == out.converged.shape == shape[:-1]


# ---------------------------------------------------------------------------------------------------- −inf


def test_golden_a_token_that_the_new_policy_rules_out():
    # q = (0.9, 0.1, 0), p = (¼, ¼, ½). r lives on the first two, where p is a fair coin of mass ½: KL(r‖p) = kl(x‖½) + ln 2.
    # ε = ln 2 + kl(0.6‖½) leaves kl(0.6‖½) for the coin, so r = (0.6, 0.4, 0) and η = ln 9 / ln 1.5 − 1 as for the coin.
    new, old = real([0.9, 0.1, 0.0]).log(), real([0.25, 0.25, 0.5]).log()
    out = project_categorical_kl(new, old, math.log(2) + 0.020135513550688863)
    assert_close(out.logp, real([0.6, 0.4, 0.0]).log())
    assert_close(out.dual, real(math.log(9) / math.log(1.5) - 1))
    assert_close(out.kl_after, real(math.log(2) + 0.020135513550688863))
    assert out.active
    assert out.converged


@pytest.mark.parametrize("bound", [0.0, 0.05, 0.69])
def test_golden_a_bound_that_no_policy_meets(bound):
    # As above, but ε < ln 2 = 0.693…, the least KL(r‖p) without the third token. Best of all is p on the other two: (½, ½, 0).
    new, old = real([0.9, 0.1, 0.0]).log(), real([0.25, 0.25, 0.5]).log()
    out = project_categorical_kl(new, old, bound)
    assert_close(out.logp, real([0.5, 0.5, 0.0]).log())
    assert_close(out.kl_after, real(math.log(2)))
    assert_close(out.kl_before, real(bernoulli_kl(0.9, 0.5) + math.log(2)))
    assert out.dual == INF
    assert out.active
    assert not out.converged


def test_golden_a_token_that_the_old_policy_rules_out_and_the_rest_fits():
    # KL(q‖p) = inf, but q = (0.3, 0.2, ½) restricted to p's support is (0.6, 0.4), and kl(0.6‖½) = 0.0201 ≤ 0.05: η → 0.
    new, old = real([0.3, 0.2, 0.5]).log(), real([0.5, 0.5, 0.0]).log()
    out = project_categorical_kl(new, old, 0.05)
    assert_close(out.logp, real([0.6, 0.4, 0.0]).log())
    assert out.kl_before == INF
    assert_close(out.kl_after, real(0.020135513550688863))
    assert out.dual == 0
    assert out.active
    assert out.converged


def test_golden_a_token_that_the_old_policy_rules_out_and_the_rest_does_not_fit():
    # q restricted is (0.9, 0.1): the fair coin again, r = (0.6, 0.4, 0).
    new, old = real([0.45, 0.05, 0.5]).log(), real([0.5, 0.5, 0.0]).log()
    out = project_categorical_kl(new, old, 0.020135513550688863)
    assert_close(out.logp, real([0.6, 0.4, 0.0]).log())
    assert_close(out.dual, real(math.log(9) / math.log(1.5) - 1))
    assert out.kl_before == INF
    assert out.active
    assert out.converged


def test_golden_each_policy_rules_out_another_token():
    # q = (0.45, 0.05, ½, 0), p = (¼, ¼, 0, ½): the coin of the common two, after ln 2 for p's own.
    new, old = real([0.45, 0.05, 0.5, 0.0]).log(), real([0.25, 0.25, 0.0, 0.5]).log()
    out = project_categorical_kl(new, old, math.log(2) + 0.020135513550688863)
    assert_close(out.logp, real([0.6, 0.4, 0.0, 0.0]).log())
    assert out.converged


@pytest.mark.parametrize("bound", [0.0, 1e-3, 0.05, INF])
def test_a_category_that_neither_policy_has_changes_nothing(bound):
    new, old = family("smooth", rows=8, categories=5)
    padding = torch.full((8, 2), -INF, dtype=torch.float64)
    padded = project_categorical_kl(torch.cat([new, padding], -1), torch.cat([old, padding], -1), bound)
    bare = project_categorical_kl(new, old, bound)
    assert (padded.logp[:, 5:] == -INF).all()
    assert_fields_close(CategoricalProjection(padded.logp[:, :5], *list(vars(padded).values())[1:]), bare)


@pytest.mark.parametrize("bound", [0.0, 0.05])
def test_golden_disjoint_policies_leave_the_old_one(bound):
    new, old = real([[0.9, 0.1, 0.0, 0.0]]).log(), real([[0.0, 0.0, 0.3, 0.7]]).log()
    out = project_categorical_kl(new, old, bound)
    assert_close(out.logp, old)
    assert out.dual.tolist() == [INF]
    assert out.kl_before.tolist() == [INF]
    assert out.kl_after.tolist() == [0.0]
    assert out.active.all()
    assert not out.converged.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e5, 1e9, 1e38])
@pytest.mark.parametrize("bound", [0.05, 0.5])
@pytest.mark.parametrize("side", ["new", "old", "both"])
def test_a_mask_of_large_finite_numbers_is_a_mask(side, bound, size, dtype):
    # −1e9, or the least float32, stands for −inf; squared it overflows, and added to other log-ratios it takes their digits.
    logits = {"new": [2.0, 0.0, 1.0, 0.5], "old": [0.0, 1.0, 0.3, 0.2]}
    policies, exact = ({name: torch.tensor(x, dtype=dtype) for name, x in logits.items()} for _ in range(2))
    for name in logits if side == "both" else [side]:
        policies[name][3], exact[name][3] = -size, -INF
    new, masked = policies["new"].requires_grad_(), exact["new"].requires_grad_()
    out, expected = project_categorical_kl(new, policies["old"], bound), project_categorical_kl(masked, exact["old"], bound)
    assert expected.active
    assert_close(out.logp, expected.logp)
    assert_close(out.kl_after, expected.kl_after)
    assert_close(out.dual, expected.dual)
    assert out.converged == expected.converged
    v = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=dtype)
    assert_close(torch.autograd.grad(out.logp, new, v)[0], torch.autograd.grad(expected.logp, masked, v)[0])


@pytest.mark.parametrize("far", [1e2, 1e3, 9e3])
@pytest.mark.parametrize("bound", [0.01, 0.05, 0.5])
@pytest.mark.parametrize("side", ["new", "old"])
def test_one_token_far_off_costs_the_others_no_digits(side, bound, far):
    # Its log-ratio of up to 9000 must not be taken off those of the others, which are near 1.
    new, old = (x.float() for x in family("smooth", rows=64, categories=9))
    (new if side == "new" else old)[range(64), torch.arange(64) % 9] -= far
    out, exact = project_categorical_kl(new, old, bound), project_categorical_kl(new.double(), old.double(), bound)
    assert out.converged.all()
    assert_close(out.logp.exp(), exact.logp.exp(), rtol=0, atol=3e-6)


def test_impossible_rows_harm_no_others():
    new, old = family("smooth", rows=4, categories=5)
    expected = project_categorical_kl(new, old, 0.05)
    new[1, old[1].argmax()] = -INF  # infeasible: the old policy needs that token
    new[2] = real([0.0, 0.0, -INF, -INF, -INF])
    old[2] = real([-INF, -INF, 0.0, 0.0, 0.0])
    out = project_categorical_kl(new, old, 0.05)
    assert out.converged.tolist() == [True, False, False, True]
    for i in (0, 3):
        assert torch.equal(out.logp[i], expected.logp[i])
        assert out.dual[i] == expected.dual[i]


# ---------------------------------------------------------------------------------------------------- NaN


@pytest.mark.parametrize("rows", ["some", "all"])
def test_a_nan_in_the_new_policy_is_reported_and_harms_no_other_row(rows):
    new, old = family("smooth", rows=4, categories=5)
    expected = project_categorical_kl(new, old, 0.05)
    bad = torch.tensor([False, True, False, True]) if rows == "some" else torch.ones(4, dtype=torch.bool)
    new[bad, 0] = NAN
    out = project_categorical_kl(new, old, 0.05)
    assert torch.equal(out.converged, ~bad)
    assert torch.equal(out.logp[~bad], expected.logp[~bad])
    assert out.logp[bad].isnan().all()


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_nan_in_the_old_policy_is_reported_and_harms_no_other_row(value):
    new, old = family("smooth", rows=3, categories=5)
    expected = project_categorical_kl(new, old, 0.05)
    old[1, 0] = value
    out = project_categorical_kl(new, old, 0.05)
    assert out.converged.tolist() == [True, False, True]
    assert torch.equal(out.logp[[0, 2]], expected.logp[[0, 2]])


def test_an_old_policy_without_any_token_is_reported():
    out = project_categorical_kl(real([0.0, 1.0]), real([-INF, -INF]), 0.05)
    assert not out.converged


# ---------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    new, old = (x.to(dtype) for x in family("smooth"))
    out = project_categorical_kl(new, old, 0.05)
    assert out.logp.dtype == out.dual.dtype == out.kl_before.dtype == out.kl_after.dtype == torch.float32
    assert torch.equal(out.logp, project_categorical_kl(new.float(), old.float(), 0.05).logp)


@pytest.mark.parametrize(
    ("dtype_new", "dtype_old", "computed"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float64, torch.float16, torch.float64),
    ],
)
def test_mixed_dtypes_meet_in_the_wider_one(dtype_new, dtype_old, computed):
    new, old = family("smooth", rows=8)
    new, old = new.to(dtype_new), old.to(dtype_old)
    out = project_categorical_kl(new, old, torch.full((8,), 0.05))
    assert out.logp.dtype == out.dual.dtype == computed
    assert_fields_close(out, project_categorical_kl(new.to(computed), old.to(computed), torch.tensor(0.05).item()))


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("bound", [-1e-9, -INF, NAN])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_bound_below_0_is_refused(bound, as_tensor):
    new, old = family("smooth", rows=2, categories=3)
    with pytest.raises(ValueError, match="`bound` is a KL in nats and must be ≥ 0"):
        project_categorical_kl(new, old, real([0.05, bound]) if as_tensor else bound)


def test_a_bound_below_0_is_refused_even_for_no_rows():
    with pytest.raises(ValueError, match="must be ≥ 0"):
        project_categorical_kl(torch.zeros(0, 3), torch.zeros(0, 3), -0.05)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["logp_new", "logp_old"])
def test_probabilities_are_refused(name, dtype):
    p = torch.tensor([[0.5, 0.3, 0.2], [0.0, 0.9, 0.1]], dtype=dtype)
    given = {"logp_new": p.float().log(), "logp_old": p.float().log()} | {name: p}
    with pytest.raises(ValueError, match=f"`{name}` holds probabilities: every row is ≥ 0 and sums to 1"):
        project_categorical_kl(**given, bound=0.1)
    with pytest.raises(ValueError, match=f"`{name}` holds probabilities"):
        torch.vmap(lambda x: project_categorical_kl(**(given | {name: x}), bound=0.1).logp)(p[:, None])


@pytest.mark.parametrize(
    "logits",
    [
        [[0.5, 0.3, 0.2], [0.5, 0.3, 0.201]],  # a row that sums to something else
        [[0.5, 0.3, 0.2], [1.1, -0.3, 0.2]],  # an entry below 0
        [[1.0], [1.0]],  # one category is certain, up to a constant
        [[0.0, 1.0], [1.0, 0.0]],
        [[0.0, -math.inf], [0.0, -math.inf]],
    ],
)
def test_logits_that_are_not_beyond_doubt_probabilities_are_read(logits):
    logits = torch.tensor(logits)
    assert_close(project_categorical_kl(logits, logits, 0.1).logp, logits.log_softmax(-1))


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("side", ["new", "old"])
def test_integers_are_refused(side):
    policies = {"new": torch.zeros(2, 3), "old": torch.zeros(2, 3), side: torch.zeros(2, 3, dtype=torch.int64)}
    with pytest.raises(ValueError, match=f"`logp_{side}` holds log-probabilities; got dtype torch.int64"):
        project_categorical_kl(policies["new"], policies["old"], 0.05)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(("k_new", "k_old"), [(3, 4), (1, 3), (3, 1), (0, 0)])
def test_policies_over_different_or_no_categories_are_refused(k_new, k_old):
    with pytest.raises(
        ValueError, match=rf"same categories on the last axis, at least one; got \[2, {k_new}\] and \[2, {k_old}\]"
    ):
        project_categorical_kl(torch.zeros(2, k_new), torch.zeros(2, k_old), 0.05)


@pytest.mark.usefixtures("unchecked_shapes")
def test_an_unknown_gradient_is_refused():
    with pytest.raises(ValueError, match="`gradient` is one of exact, constant_dual; got 'unrolled'"):
        project_categorical_kl(torch.zeros(2, 3), torch.zeros(2, 3), 0.05, gradient="unrolled")


def test_strict_names_the_worst_row():
    # Rows [0, 1] and [1, 0] are infeasible: without the last token, at best ln 2 and ln 4 over the old policy; ε = 0.01.
    old = real([[0.5, 0.5], [0.5, 0.5], [0.25, 0.75], [0.5, 0.5]]).log().view(2, 2, 2)
    new = real([[0.5, 0.5], [1.0, 0.0], [1.0, 0.0], [0.9, 0.1]]).log().view(2, 2, 2)
    with pytest.raises(RuntimeError, match=r"2 of 4 rows.*row \(1, 0\): bound 0.01, KL before 1.39, after 1.39"):
        project_categorical_kl(new, old, 0.01, strict=True)
    assert project_categorical_kl(new, old, 0.01).converged.tolist() == [[True, False], [False, True]]


def test_strict_names_a_nan_row_before_any_other():
    old, new = real([[0.5, 0.5]] * 3).log(), real([[0.5, 0.5], [1.0, 0.0], [NAN, 0.0]]).log()
    with pytest.raises(RuntimeError, match=r"row \(2,\)"):
        project_categorical_kl(new, old, 0.01, strict=True)


def test_strict_is_silent_where_every_row_converges():
    new, old = family("wild", rows=8)
    strict = project_categorical_kl(new, old, 0.05, strict=True)
    assert_fields_close(strict, project_categorical_kl(new, old, 0.05))
