"""Likelihood of segments: against the loop that writes every matrix out, the whole trajectory's Gaussian, and BBRL."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from straightforward_tce import log_prob
from torch import Tensor
from torch.autograd import gradcheck
from torch.distributions import MultivariateNormal

from corral.robot import ProDMP, draw_pairs, segment_advantages, segment_covariance, segment_jitter, segment_log_prob
from tolerance import assert_close

BOX = ProDMP(7, 8, 2.0, alpha=10.0, weights_scale=0.3, goal_scale=0.3, auto_scale=True)
SMALL = ProDMP(2, 3, 1.0, alpha=10.0, auto_scale=True)


def grid(prodmp: ProDMP, steps: int) -> Tensor:
    return prodmp.tau * torch.arange(1, steps + 1).double() / steps


def policy(prodmp: ProDMP, episodes: int, spread: float = 0.2) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters drawn [B W], their mean [B W] and one factor for all [W W]."""
    size = prodmp.parameters
    chol = (torch.eye(size) + spread * torch.randn(size, size).tril(-1)).double()
    mean = torch.randn(episodes, size).double()
    return mean + torch.randn(episodes, size).double() @ chol.mT, mean, chol


def case(prodmp: ProDMP = SMALL, episodes: int = 5, steps: int = 20, points: int = 5) -> tuple[Tensor, ...]:
    """Rows, parameters, mean, factor and jitter, as segment_log_prob takes them."""
    rows = prodmp.design(grid(prodmp, steps)).position[draw_pairs(steps, points)]
    params, mean, chol = policy(prodmp, episodes)
    return rows, params, mean, chol, segment_jitter(rows, chol)


# ---------------------------------------------------------------------------------------------------- golden


def test_golden_two_points_of_one_joint():
    # R = I, Σ = 4I, r = 1: C + rI = 5I.  w − μ = (1, 3): log N = −(1 + 9)/10 − log 5 − log 2π.
    one = torch.eye(2, dtype=torch.float64)
    params = torch.tensor([[1.0, 3.0]], dtype=torch.float64)
    got = segment_log_prob(one[None], params, 0 * params, 2 * one, torch.ones(1).double())
    assert_close(got, torch.tensor([[-1 - math.log(5) - math.log(2 * math.pi)]], dtype=torch.float64))


def test_golden_jitter():
    # Rows (1, 0) and (0, 2), Σ = diag(9, 1): variances 9 and 4; the larger times 1e-4.  Rows of 0: nothing varies, 1.
    rows = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[0.0, 0.0], [0.0, 0.0]]], dtype=torch.float64)
    chol = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64)).requires_grad_()
    jitter = segment_jitter(rows, chol)
    assert_close(jitter, torch.tensor([9e-4, 1.0], dtype=torch.float64))
    assert not jitter.requires_grad


def test_golden_pairs():
    # T = 10, 5 points: interval 2, first ∈ {0, 1}.  T = 11: interval 2, first ∈ {0, 1, 2}, and five or six points.
    drawn = {tuple(map(tuple, draw_pairs(10, 5).tolist())) for _ in range(50)}
    assert drawn == {((0, 2), (2, 4), (4, 6), (6, 8)), ((1, 3), (3, 5), (5, 7), (7, 9))}
    lengths = {(int(pairs[0, 0]), len(pairs)) for pairs in (draw_pairs(11, 5) for _ in range(100))}
    assert lengths == {(0, 5), (1, 4), (2, 4)}


@given(steps=st.integers(2, 300), points=st.integers(2, 40), seed=st.integers(0, 99))
def test_pairs_are_neighbours_inside_the_episode(steps, points, seed):
    if points > steps:
        with pytest.raises(ValueError, match="2 ≤ points ≤ steps"):
            draw_pairs(steps, points)
        return
    pairs = draw_pairs(steps, points, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(pairs, draw_pairs(steps, points, generator=torch.Generator().manual_seed(seed)))
    assert len(pairs) >= points - 1
    assert pairs.min() >= 0
    assert pairs.max() < steps
    assert (pairs[1:, 0] == pairs[:-1, 1]).all()
    assert (pairs.diff() == steps // points).all()


# ---------------------------------------------------------------------------------------------------- oracles


@pytest.mark.parametrize("prodmp", [SMALL, BOX, ProDMP(3, 3, 0.5, delay=0.2)], ids=["small", "box", "delay"])
def test_the_straightforward_loop_agrees(prodmp):
    rows, params, mean, chol, jitter = case(prodmp)
    leaves = [x.requires_grad_() for x in (params, mean, chol)]
    results = [f(rows, *leaves, jitter) for f in (segment_log_prob, log_prob)]
    upstream = torch.randn_like(results[0])
    gradients = [torch.autograd.grad(out, leaves, upstream) for out in results]
    for out, grads in zip(results[1:], gradients[1:], strict=True):
        assert_close(results[0], out, rtol=1e-8)
        for ours, theirs in zip(gradients[0], grads, strict=True):
            assert_close(ours, theirs, rtol=1e-7, atol=1e-8)


def test_pairs_are_marginals_of_the_whole_trajectory():
    times, pairs = grid(SMALL, 12), torch.tensor([[0, 3], [3, 11], [2, 4]])
    params, mean, chol = policy(SMALL, 4)
    whole = SMALL.covariance(times, chol @ chol.mT)  # [D·T D·T]
    rows = SMALL.design(times).position[pairs]
    index = (12 * torch.arange(2)[:, None] + pairs[:, None, :]).flatten(1)  # joint by joint [N D·2]
    picked = whole[index[:, :, None], index[:, None, :]]
    assert_close(segment_covariance(rows, chol), picked)

    # And the density is that of the positions themselves, wherever the plans begin.
    position, velocity = torch.randn(2, 4, 2).double()
    sampled, expected = (SMALL.trajectory(times, w, position, velocity)[0].mT.flatten(-2) for w in (params, mean))
    jitter = segment_jitter(rows, chol)
    for n in range(3):
        gaussian = MultivariateNormal(expected[:, index[n]], picked[n] + jitter[n] * torch.eye(4).double())
        assert_close(
            segment_log_prob(rows, params, mean, chol, jitter)[:, n], gaussian.log_prob(sampled[:, index[n]]), rtol=1e-8
        )


def test_as_many_points_as_parameters_change_variables():
    # y = offset + (I ⊗ H) w with H square: log p(y) = log p(w) − D log|det H|.
    times = SMALL.tau * torch.tensor([0.2, 0.5, 1.0, 2.5]).double()
    rows = SMALL.design(times).position[None]
    params, mean, chol = policy(SMALL, 6)
    density = MultivariateNormal(mean, scale_tril=chol).log_prob(params)
    _, log_det = torch.linalg.slogdet(rows[0])
    got = segment_log_prob(rows, params, mean, chol, torch.zeros(1).double())
    assert_close(got[:, 0], density - 2 * log_det, rtol=1e-7)


@pytest.mark.parametrize("prodmp", [SMALL, ProDMP(3, 1, 1.0)], ids=["four points", "a pair"])
def test_one_full_segment_has_the_ratio_of_bbrl(prodmp):
    # BBRL divides the densities of the whole parameter vector. With n = 1 weight and the goal, one pair is enough.
    times = prodmp.tau * torch.linspace(0.3, 2.0, prodmp.columns).double()
    rows = prodmp.design(times).position[None]
    params, old_mean, old_chol = policy(prodmp, 6)
    mean = (old_mean + 0.1 * torch.randn_like(old_mean)).requires_grad_()
    chol = (old_chol + 0.05 * torch.randn_like(old_chol).tril()).requires_grad_()
    none = torch.zeros(1).double()
    ratio = (segment_log_prob(rows, params, mean, chol, none) - segment_log_prob(rows, params, old_mean, old_chol, none)).exp()
    densities = [MultivariateNormal(m, scale_tril=c).log_prob(params) for m, c in ((mean, chol.tril()), (old_mean, old_chol))]
    expected = (densities[0] - densities[1]).exp()
    assert_close(ratio[:, 0], expected, rtol=1e-6)
    (mean_grad, chol_grad), theirs = (torch.autograd.grad(x.sum(), (mean, chol)) for x in (ratio, expected))
    assert_close(mean_grad, theirs[0], rtol=1e-5, atol=1e-5)
    assert_close(chol_grad.tril(), theirs[1], rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- properties


@given(seed=st.integers(0, 2**20))
def test_an_episode_does_not_see_the_others(seed):
    torch.manual_seed(seed)
    rows, params, mean, chol, jitter = case()
    together = segment_log_prob(rows, params, mean, chol, jitter)
    louder = torch.cat([params, params + 1e3]), torch.cat([mean, mean])
    assert_close(segment_log_prob(rows, *louder, chol, jitter)[: len(params)], together)
    # Nor does a pair see the other pairs.
    assert_close(segment_log_prob(rows[1:2], params, mean, chol, segment_jitter(rows[1:2], chol))[:, 0], together[:, 1])


@given(seed=st.integers(0, 2**20))
def test_one_covariance_per_episode_is_the_same_as_one_for_all(seed):
    torch.manual_seed(seed)
    rows, params, mean, chol, jitter = case()
    shared = segment_log_prob(rows, params, mean, chol, jitter)
    each = segment_log_prob(rows, params, mean, chol.expand(5, -1, -1), jitter)
    assert_close(shared, each)
    assert_close(shared, segment_log_prob(rows.expand(5, -1, -1, -1), params, mean, chol, jitter.expand(5, -1)))
    assert_close(shared.view(5, 1, -1), segment_log_prob(rows, params[:, None], mean[:, None], chol, jitter))
    assert_close(shared[0], segment_log_prob(rows, params[0], mean[0], chol, jitter))
    assert_close(segment_jitter(rows, chol.expand(5, -1, -1)), jitter.expand(5, -1))


@given(seed=st.integers(0, 2**20), scale=st.floats(1e-3, 1e3))
def test_a_change_of_unit_leaves_ratios_alone(seed, scale):
    torch.manual_seed(seed)
    rows, params, mean, chol, jitter = case()
    new = mean + 0.1 * torch.randn_like(mean)

    def log_ratio(rows: Tensor, jitter: Tensor) -> Tensor:
        return segment_log_prob(rows, params, new, chol, jitter) - segment_log_prob(rows, params, mean, chol, jitter)

    assert_close(log_ratio(scale * rows, segment_jitter(scale * rows, chol)), log_ratio(rows, jitter), rtol=1e-6, atol=1e-7)


def test_equal_policies_have_ratio_one_and_the_score_for_gradient():
    rows, params, mean, chol, jitter = case()
    old = segment_log_prob(rows, params, mean, chol, jitter)
    mean.requires_grad_()
    new = segment_log_prob(rows, params, mean, chol, jitter)
    assert torch.equal(new.detach(), old)
    ratio = torch.autograd.grad((new - old).exp().sum(), mean, retain_graph=True)[0]
    assert_close(ratio, torch.autograd.grad(new.sum(), mean)[0])


def test_a_segment_inside_the_delay_says_nothing():
    prodmp = ProDMP(2, 3, 1.0, delay=0.5)
    rows = prodmp.design(torch.tensor([0.1, 0.3, 0.4, 0.8, 1.2]).double()).position[torch.tensor([[0, 1], [2, 3], [3, 4]])]
    params, mean, chol = policy(prodmp, 3)
    jitter = segment_jitter(rows, chol)
    old = segment_log_prob(rows, params, mean, chol, jitter)
    other = segment_log_prob(rows, params, mean + 1, 2 * chol, jitter)
    assert (old[:, 0] == other[:, 0]).all()
    assert (old[:, 1:] != other[:, 1:]).all()


def test_dead_segments_have_no_likelihood_and_no_gradient():
    rows, params, mean, chol, jitter = case()
    mask = torch.arange(len(rows)) < torch.tensor([0, 1, 2, len(rows), len(rows)])[:, None]
    mean.requires_grad_()
    masked = segment_log_prob(rows, params, mean, chol, jitter, mask)
    assert_close(masked, torch.where(mask, segment_log_prob(rows, params, mean, chol, jitter), 0.0))
    masked.sum().backward()
    assert (mean.grad[0] == 0).all()
    assert (mean.grad[1:] != 0).any()


def test_gradients():
    rows, params, mean, chol, jitter = case(episodes=2, steps=6, points=3)
    leaves = [x.requires_grad_() for x in (params, mean, chol)]
    assert gradcheck(lambda *x: segment_log_prob(rows, *x, jitter), leaves)
    leaves[2] = chol.detach().expand(2, -1, -1).clone().requires_grad_()
    assert gradcheck(lambda *x: segment_log_prob(rows, *x, jitter), leaves)


def test_float32_ratios_of_the_largest_task():
    # 7 joints, 8 weights, 100 steps: the first pairs lie 0.04 s apart and have the worst condition.
    rows, params, old_mean, old_chol, jitter = case(BOX, episodes=64, steps=100, points=25)
    new = old_mean + 0.02 * torch.randn_like(old_mean)
    exact = segment_log_prob(rows, params, new, old_chol, jitter) - segment_log_prob(rows, params, old_mean, old_chol, jitter)
    rows, params, new, old_mean, old_chol, jitter = (x.float() for x in (rows, params, new, old_mean, old_chol, jitter))
    got = segment_log_prob(rows, params, new, old_chol, jitter) - segment_log_prob(rows, params, old_mean, old_chol, jitter)
    assert got.dtype == torch.float32
    assert (got - exact).abs().max() < 1e-4
    assert (got - exact).abs().mean() < 1e-5


def test_autocast_does_not_round_likelihoods_and_credit():
    inputs = [x.float() for x in case(BOX)]
    rewards, values = torch.randn(2, 4, 50)
    pairs = draw_pairs(50, 10)

    def results() -> list[Tensor]:
        rows, _, _, chol, _ = inputs
        credit = segment_advantages(rewards, values, pairs)[0]
        return [segment_log_prob(*inputs), segment_jitter(rows, chol), segment_covariance(rows, chol), credit]

    with torch.autocast("cpu", torch.bfloat16):
        got = results()
    for a, b in zip(got, results(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("coarse", range(5))
def test_the_best_precision_of_the_inputs_is_that_of_the_result(coarse):
    inputs = case()
    exact = segment_log_prob(*inputs)
    mixed = [x.float() if index == coarse else x for index, x in enumerate(inputs)]
    got = segment_log_prob(*mixed)
    assert got.dtype == torch.float64
    assert_close(got, exact, rtol=1e-3, atol=1e-3)
    assert segment_jitter(mixed[0], mixed[3]).dtype == torch.float64 or coarse in (0, 3)


def test_half_precision_is_computed_in_float32():
    half = [x.bfloat16() for x in case()]
    single = [x.float() for x in half]
    assert torch.equal(segment_covariance(half[0], half[3]), segment_covariance(single[0], single[3]))
    assert torch.equal(segment_jitter(half[0], half[3]), segment_jitter(single[0], single[3]))
    assert torch.equal(segment_log_prob(*half), segment_log_prob(*single))


# ---------------------------------------------------------------------------------------------------- bad input


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_arguments():
    rows, params, mean, chol, jitter = case()
    with pytest.raises(ValueError, match="7 parameters are not a whole number of joints with 4 each"):
        segment_covariance(rows, torch.eye(7).double())
    for odd in (params[:, 1:], torch.cat([params, params], -1)):
        with pytest.raises(ValueError, match="`params` and `mean` have 8 entries on their last axis"):
            segment_log_prob(rows, odd, odd, chol, jitter)
    with pytest.raises(ValueError, match="not positive definite"):
        segment_log_prob(rows, params, mean, chol * math.nan, jitter)
    with pytest.raises(ValueError, match="`relative` must be ≥ 0"):
        segment_jitter(rows, chol, -1.0)
    with pytest.raises(ValueError, match="2 ≤ points ≤ steps"):
        draw_pairs(10, 1)
