"""Credit of segments: sums by hand and by loop, values that cancel, episodes of different lengths, the critic's targets."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from straightforward_tce import advantages as by_loop
from torch import Tensor

from corral import gae
from corral.robot import critic_targets, draw_pairs, normalise_advantages, segment_advantages
from tolerance import assert_close


def doubles(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def episodes(seed: int, steps: int = 17) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Rewards, values and mask [4 T] of episodes that end after a random step."""
    torch.manual_seed(seed)
    lengths = [steps, *torch.randint(0, steps + 1, (3,)).tolist()]
    mask = torch.arange(steps) < torch.tensor(lengths)[:, None]
    rewards, values = torch.randn(2, 4, steps).double()
    return torch.where(mask, rewards, math.nan), torch.where(mask, values, math.inf), mask, lengths


# ---------------------------------------------------------------------------------------------------- golden


def test_golden_the_last_segment_of_a_short_episode_runs_to_its_end():
    # Segments (0, 1) and (4, 6) with two steps between them. Three steps: the first segment is the last, r_0 + r_1 + r_2 − V_0
    # = 1 + 2 + 3 − 10 = −4. Six: it is r_0 + V_1 − V_0 = 11, and the second one r_4 + r_5 − V_4 = −39.
    rewards, values = doubles([1, 2, 3, 0, 0, 0], [1, 2, 3, 4, 5, 6]), doubles(*[[10, 20, 30, 40, 50, 60]] * 2)
    mask = torch.arange(6) < torch.tensor([[3], [6]])
    got, live = segment_advantages(rewards, values, torch.tensor([[0, 1], [4, 6]]), mask=mask)
    assert live.tolist() == [[True, False], [True, True]]
    assert_close(got, doubles([-4.0, 0.0], [11.0, -39.0]))


def test_golden_credit():
    # Pairs (1, 3) and (3, 5), T = 6, γ = ½.
    #   A_0 = r_1 + ½ r_2 + ¼ V_3 − V_1 = 2 + 1.5 + 10 − 20 = −6.5
    #   A_1 closing: r_3 + ½ r_4 + ¼ r_5 − V_3 = 4 + 2.5 + 1.5 − 40 = −32;  published: 4 + 2.5 + 15 − 40 = −18.5
    rewards, values = doubles([1, 2, 3, 4, 5, 6]), doubles([10, 20, 30, 40, 50, 60])
    pairs = torch.tensor([[1, 3], [3, 5]])
    got, live = segment_advantages(rewards, values, pairs, gamma=0.5)
    assert_close(got, doubles([-6.5, -32.0]))
    assert live.all()
    published, live = segment_advantages(rewards, values, pairs, gamma=0.5, closing_segment=False)
    assert_close(published, doubles([-6.5, -18.5]))
    assert live.all()


def test_golden_credit_for_what_comes_later():
    # The same with λ = ½: A_1 = −32 as above, A_0 = −6.5 + ½ · (½)² · A_1 = −6.5 − 4 = −10.5.
    rewards, values = doubles([1, 2, 3, 4, 5, 6]), doubles([10, 20, 30, 40, 50, 60])
    got, _ = segment_advantages(rewards, values, torch.tensor([[1, 3], [3, 5]]), gamma=0.5, lam=0.5)
    assert_close(got, doubles([-10.5, -32.0]))


def test_golden_an_episode_that_ends_early():
    # Steps 0 … 3 are live, γ = 1.
    # (1, 3) is whole: 2 + 3 + V_3 − V_1 = 25. (3, 5) runs to the end: r_3 − V_3 = −36. (5, 6) never was.
    rewards, values = doubles([1, 2, 3, 4, 5, 6]), doubles([10, 20, 30, 40, 50, 60])
    mask, pairs = torch.arange(6)[None] < 4, torch.tensor([[1, 3], [3, 5], [5, 6]])
    got, live = segment_advantages(rewards, values, pairs, mask=mask)
    assert_close(got, doubles([25.0, -36.0, 0.0]))
    assert live.tolist() == [[True, True, False]]
    published, live = segment_advantages(rewards, values, pairs, mask=mask, closing_segment=False)
    assert_close(published, doubles([25.0, 0.0, 0.0]))
    assert live.tolist() == [[True, False, False]]


def test_the_published_rule_never_sees_the_last_reward():
    rewards, values = torch.zeros(1, 100).double(), torch.zeros(1, 100).double()
    rewards[:, -1] = 7.0
    for _ in range(20):
        pairs = draw_pairs(100)
        assert segment_advantages(rewards, values, pairs, closing_segment=False)[0].abs().sum() == 0
        assert_close(segment_advantages(rewards, values, pairs)[0][0, -1], torch.tensor(7.0).double())


def test_one_segment_is_bbrls_return_minus_value():
    rewards, values = torch.randn(2, 5, 30).double()
    got, _ = segment_advantages(rewards, values, torch.tensor([[0, 29]]))
    assert_close(got[:, 0], rewards.sum(-1) - values[:, 0])
    got, _ = segment_advantages(rewards, values, torch.tensor([[0, 30]]), closing_segment=False)
    assert_close(got[:, 0], rewards.sum(-1) - values[:, 0])


def test_segments_of_one_step_are_temporal_differences():
    # δ_t = r_t + γ V_{t+1} − V_t: what gae gives at λ = 0.
    rewards, values = torch.randn(2, 3, 8).double()
    pairs = torch.stack([torch.arange(8), torch.arange(1, 9)], -1)
    got, _ = segment_advantages(rewards, values, pairs, gamma=0.9)
    assert_close(got, gae(rewards, values, torch.ones(3, 8, dtype=torch.bool), 0.9, 0.0)[0])


# ---------------------------------------------------------------------------------------------------- properties


@given(
    seed=st.integers(0, 2**20), points=st.integers(2, 17), gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]), closing=st.booleans()
)
def test_the_loop_agrees(seed, points, gamma, closing):
    rewards, values, mask, lengths = episodes(seed)
    pairs = draw_pairs(17, points)
    got, live = segment_advantages(rewards, values, pairs, mask=mask, gamma=gamma, closing_segment=closing)
    expected = by_loop(rewards, values, pairs, lengths, gamma, closing)
    assert live.sum(-1).tolist() == [len(row) for row in expected]
    assert (got[~live] == 0).all()
    assert_close(got[live], torch.tensor([x for row in expected for x in row], dtype=torch.float64))


@given(seed=st.integers(0, 2**20), points=st.integers(2, 17), gamma=st.sampled_from([0.0, 0.5, 1.0]), lam=st.floats(0, 1))
def test_later_credit_by_loop(seed, points, gamma, lam):
    # A_n = Σ_{m ≥ n} λ^{m−n} γ^{a_m − a_n} δ_m over the segments that count.
    rewards, values, mask, lengths = episodes(seed)
    pairs = draw_pairs(17, points)
    got, live = segment_advantages(rewards, values, pairs, mask=mask, gamma=gamma, lam=lam)
    for i, alone in enumerate(by_loop(rewards, values, pairs, lengths, gamma, True)):
        starts = pairs[:, 0].tolist()
        expected = [
            sum(lam ** (m - n) * gamma ** (starts[m] - starts[n]) * alone[m] for m in range(n, len(alone)))
            for n in range(len(alone))
        ]
        assert_close(got[i, live[i]], torch.tensor(expected, dtype=torch.float64), atol=1e-11)


@given(seed=st.integers(0, 2**20), points=st.integers(2, 17))
def test_all_later_credit_is_the_return_minus_the_value(seed, points):
    rewards, values, mask, lengths = episodes(seed)
    pairs = draw_pairs(17, points)
    got, live = segment_advantages(rewards, values, pairs, mask=mask, lam=1.0)
    for i, n in live.nonzero().tolist():
        first = int(pairs[n, 0])
        assert_close(got[i, n], rewards[i, first : lengths[i]].sum() - values[i, first], atol=1e-11)


@given(seed=st.integers(0, 2**20), points=st.integers(2, 17))
def test_values_in_between_cancel(seed, points):
    # γ = 1: Σ_n A_n = Σ_{t ≥ a_0} r_t − V(s_{a_0}), and with the published rule V(s_b) of the last pair is left.
    rewards, values, mask, lengths = episodes(seed)
    pairs = draw_pairs(17, points)
    first, last = int(pairs[0, 0]), int(pairs[-1, 1])
    total = segment_advantages(rewards, values, pairs, mask=mask)[0].sum(-1)
    published = segment_advantages(rewards, values, pairs, mask=mask, closing_segment=False)[0].sum(-1)
    for i, length in enumerate(lengths):
        if length > first:
            assert_close(total[i], rewards[i, first:length].sum() - values[i, first], atol=1e-11)
        else:
            assert total[i] == 0
    assert_close(published[0], rewards[0, first:last].sum() + values[0, last] - values[0, first], atol=1e-11)


@given(seed=st.integers(0, 2**20), gamma=st.sampled_from([0.3, 0.97, 1.0]))
def test_discounted_credit_telescopes_too(seed, gamma):
    # Σ_n γ^{a_n − a_0} A_n is the discounted return from a_0 on, minus V(s_{a_0}).
    rewards, values, _, _ = episodes(seed)
    pairs = draw_pairs(17, 4)
    got, _ = segment_advantages(rewards[:1], values[:1], pairs, gamma=gamma)
    first = int(pairs[0, 0])
    weights = gamma ** (pairs[:, 0] - first).double()
    discounts = gamma ** torch.arange(17 - first).double()
    assert_close((got[0] * weights).sum(), (rewards[0, first:] * discounts).sum() - values[0, first], atol=1e-11)


@given(seed=st.integers(0, 2**20))
def test_an_exact_critic_leaves_no_credit(seed):
    torch.manual_seed(seed)
    rewards = torch.randn(3, 20).double()
    to_go = rewards.flip(-1).cumsum(-1).flip(-1)
    got, _ = segment_advantages(rewards, to_go, draw_pairs(20, 5))
    assert_close(got, torch.zeros_like(got), atol=1e-10)


def test_a_long_episode_with_a_small_discount_keeps_its_digits():
    # γ^t underflows long before the end; a segment's own sum does not.
    rewards, values = torch.ones(1, 2000).double(), torch.zeros(1, 2000).double()
    got, _ = segment_advantages(rewards, values, torch.tensor([[0, 1900], [1900, 1998]]), gamma=0.5)
    assert_close(got, doubles([2.0, 2.0]))


@given(seed=st.integers(0, 2**20), shift=st.floats(-5, 5), scale=st.floats(0.1, 10))
def test_normalised_advantages(seed, shift, scale):
    torch.manual_seed(seed)
    raw, mask = torch.randn(6, 9).double(), torch.rand(6, 9) < 0.7
    got = normalise_advantages(raw, mask)
    assert_close(got[mask].mean(), torch.tensor(0.0).double(), atol=1e-10)
    assert_close(got[mask].std(), torch.tensor(1.0).double(), rtol=1e-6)
    assert (got[~mask] == 0).all()
    assert_close(normalise_advantages(torch.where(mask, scale * raw + shift, math.nan), mask), got, rtol=1e-6, atol=1e-7)


def test_normalised_advantages_of_few_and_equal_segments():
    # The mean of equal numbers is rounded; what is left of them must not be blown up to 1.
    equal = torch.full((37, 11), 3.3)
    assert normalise_advantages(equal, torch.ones_like(equal, dtype=torch.bool)).abs().max() < 1e-2
    assert (normalise_advantages(torch.randn(2, 3), torch.zeros(2, 3, dtype=torch.bool)) == 0).all()
    one = torch.zeros(2, 3, dtype=torch.bool)
    one[1, 1] = True
    assert (normalise_advantages(torch.randn(2, 3), one) == 0).all()


def test_critic_targets_are_lambda_returns():
    rewards, values, mask, lengths = episodes(3)
    to_go = critic_targets(rewards, values, mask, lam=1.0)
    one_step = critic_targets(rewards, values, mask, lam=0.0)
    for i, length in enumerate(lengths):
        r, v = rewards[i, :length], values[i, :length]
        assert_close(to_go[i, :length], r.flip(0).cumsum(0).flip(0), atol=1e-11)
        assert_close(one_step[i, :length], r + torch.cat([v[1:], v[:0].new_zeros(min(length, 1))]), atol=1e-11)
    full = torch.ones(1, 17, dtype=torch.bool)
    assert torch.equal(critic_targets(rewards[:1], values[:1]), gae(rewards[:1], values[:1], full, 1.0, 0.95)[1])


def test_half_precision_is_normalised_in_float32():
    advantages, mask = torch.randn(4, 6).bfloat16(), torch.rand(4, 6) < 0.7
    got = normalise_advantages(advantages, mask)
    assert got.dtype == torch.float32
    assert torch.equal(got, normalise_advantages(advantages.float(), mask))


def test_float32_and_gradients_stop():
    rewards, values = torch.randn(2, 4, 50, requires_grad=True)
    got, _ = segment_advantages(rewards, values, draw_pairs(50, 10))
    assert got.dtype == torch.float32
    assert not got.requires_grad


# ---------------------------------------------------------------------------------------------------- bad input


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_arguments():
    ok, pairs = torch.zeros(2, 5), torch.tensor([[0, 2], [2, 4]])
    with pytest.raises(ValueError, match=r"all \[B T\]"):
        segment_advantages(ok, ok[:, 1:], pairs)
    with pytest.raises(ValueError, match="from an episode's first step to its last"):
        segment_advantages(ok, ok, pairs, mask=torch.tensor([[True, False, True, True, True]] * 2))
    with pytest.raises(ValueError, match="mask is bool"):
        segment_advantages(ok, ok, pairs, mask=torch.ones(2, 5))
    for bad in ([[2, 2]], [[-1, 2]], [[0, 6]], [[2, 4], [0, 2]]):
        with pytest.raises(ValueError, match="each pair has 0 ≤ a < b ≤ T = 5"):
            segment_advantages(ok, ok, torch.tensor(bad))
    with pytest.raises(ValueError, match=r"pairs is \[N 2\]"):
        segment_advantages(ok, ok, torch.zeros(0, 2, dtype=torch.long))
    for bad_share in ({"gamma": 1.1}, {"lam": -0.1}):
        with pytest.raises(ValueError, match="`gamma` and `lam` must lie in"):
            segment_advantages(ok, ok, pairs, **bad_share)
    with pytest.raises(ValueError, match="each pair begins where the one before ends"):
        segment_advantages(ok, ok, torch.tensor([[0, 1], [2, 4]]), lam=0.5)
    with pytest.raises(ValueError, match="must be finite at unmasked steps"):
        segment_advantages(ok + math.nan, ok, pairs)
