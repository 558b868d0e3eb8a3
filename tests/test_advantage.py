"""Credit relative to a group, and generalised advantage estimation, against loops and numbers worked by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from corral import gae, group_advantages
from tolerance import assert_close

HOWS = ["grpo", "dr_grpo", "rloo", "reinforce++"]
SEEDS = st.integers(0, 2**20)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def grouped(seed: int, *, smallest: int = 2) -> tuple[Tensor, Tensor]:
    """Rewards of up to 5 groups of 2 to 5, shuffled, with ids that are neither sorted nor consecutive."""
    generator = np.random.default_rng(seed)
    ids = generator.choice(np.arange(-1000, 1000), size=generator.integers(1, 6), replace=False)
    group = generator.permutation(np.repeat(ids, generator.integers(smallest, 6, size=len(ids))))
    return torch.from_numpy(generator.normal(size=len(group))), torch.from_numpy(group)


# ---------------------------------------------------------------------------------------------------- golden

# Group 7 has (1, 2, 3): mean 2, unbiased std 1.   Group −2 has (5, 3): mean 4, std √2.
REWARDS, GROUP = doubles(1.0, 5.0, 2.0, 3.0, 3.0), torch.tensor([7, -2, 7, 7, -2])


@pytest.mark.supports("advantage: {how}", door="import corral")
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("grpo", [-1 / 1.0001, 1 / (2**0.5 + 1e-4), 0.0, 1 / 1.0001, -1 / (2**0.5 + 1e-4)]),
        ("dr_grpo", [-1.0, 1.0, 0.0, 1.0, -1.0]),
        ("rloo", [1 - 2.5, 5 - 3, 2 - 2, 3 - 1.5, 3 - 5]),  # minus the mean of the others
        # Centred (−1, 1, 0, 1, −1): mean 0, squares 4, unbiased variance 4/4 = 1.
        ("reinforce++", [-1 / 1.0001, 1 / 1.0001, 0.0, 1 / 1.0001, -1 / 1.0001]),
    ],
)
def test_golden_group_advantages(how, expected):
    assert_close(group_advantages(REWARDS, GROUP, how), doubles(*expected))


@pytest.mark.parametrize("how", ["grpo", "dr_grpo"])
def test_golden_a_group_of_one_has_no_credit(how):
    # Group 3 is alone; group 0 has (1, 3): mean 2, std √2.
    std = 1.0 if how == "dr_grpo" else 2**0.5 + 1e-4
    advantages = group_advantages(doubles(9.0, 1.0, 3.0), torch.tensor([3, 0, 0]), how)
    assert_close(advantages, doubles(0.0, -1 / std, 1 / std))


def test_golden_a_group_of_one_under_reinforce_plus_plus():
    # Centred (0, −1, 1): unbiased variance 2/2 = 1.
    advantages = group_advantages(doubles(9.0, 1.0, 3.0), torch.tensor([3, 0, 0]), "reinforce++")
    assert_close(advantages, doubles(0.0, -1 / 1.0001, 1 / 1.0001))


def test_golden_reinforce_plus_plus_over_tokens():
    # Group 0 has (1, 3), group 1 (2, 2): centred −1, 1, 0, 0, with 3, 1, 1 and 0 tokens. Over the five: mean −2/5, squares
    # 3 (.6)² + 1.4² + .4² = 3.2, unbiased variance 3.2 / 4 = .8. The last completion has no token and changes nothing.
    mask = torch.tensor([[1, 1, 1], [0, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    advantages = group_advantages(doubles(1.0, 3.0, 2.0, 2.0), torch.tensor([0, 0, 1, 1]), "reinforce++", mask=mask)
    assert_close(advantages, doubles(-0.6, 1.4, 0.4, 0.4) / (0.8**0.5 + 1e-4))
    assert_close((advantages[:, None] * mask).sum(), doubles(0.0)[0])


@pytest.mark.parametrize("how", ["grpo", "dr_grpo", "reinforce++"])
def test_a_single_completion_has_no_credit(how):
    assert group_advantages(torch.tensor([3.0]), torch.tensor([5]), how).tolist() == [0.0]


def test_a_group_of_one_has_no_others_to_compare_with():
    with pytest.raises(ValueError, match="rloo compares with the others of a group, and group 3 has one member"):
        group_advantages(doubles(9.0, 1.0, 3.0), torch.tensor([3, 0, 0]), "rloo")


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 10.1, 1000.1])
def test_equal_rewards_give_no_credit(how, dtype, reward):
    # The mean of seven 0.1 is off by rounding, which the floor of 1e-4 keeps small.
    advantages = group_advantages(torch.full((7,), reward, dtype=dtype), torch.zeros(7, dtype=torch.int64), how)
    assert advantages.abs().max() < 1e-3


# ---------------------------------------------------------------------------------------------------- oracle, properties


def advantages_by_hand(rewards: np.ndarray, group: np.ndarray, how: str) -> np.ndarray:
    out = np.zeros_like(rewards)
    for i, (r, g) in enumerate(zip(rewards, group, strict=True)):
        mine = rewards[group == g]
        if how == "rloo":
            others = np.delete(rewards, i)[np.delete(group, i) == g]
            out[i] = r - others.mean()
        elif how == "grpo":
            out[i] = (r - mine.mean()) / (mine.std(ddof=1) + 1e-4) if len(mine) > 1 else 0.0
        else:
            out[i] = r - mine.mean()
    if how == "reinforce++":
        out = (out - out.mean()) / ((out.std(ddof=1) if len(out) > 1 else 0.0) + 1e-4)
    return out


@given(SEEDS, st.sampled_from(HOWS))
def test_group_advantages_agree_with_loops(seed, how):
    rewards, group = grouped(seed, smallest=2 if how == "rloo" else 1)
    assert_close(
        group_advantages(rewards, group, how), torch.from_numpy(advantages_by_hand(rewards.numpy(), group.numpy(), how))
    )


def token_mask(seed: int, completions: int) -> Tensor:
    """Unmasked tokens of completions of 1 to 7 tokens, none of some, with gaps as a tool leaves them."""
    generator = np.random.default_rng(seed)
    mask = torch.from_numpy(generator.random((completions, 7)) < generator.random((completions, 1)))
    mask[0, 0] = True
    return mask


@given(SEEDS)
def test_whitening_over_tokens_is_verls(seed):
    # verl writes a completion's centred reward on each of its tokens, then whitens the tokens: (x − mean) / √(var + 1e-8) with
    # an unbiased variance. Its floor is another one, so a spread s is compared times (s + 1e-4) / √(s² + 1e-8).
    rewards, group = grouped(seed, smallest=1)
    mask = token_mask(seed, len(group))
    centred = advantages_by_hand(rewards.numpy(), group.numpy(), "dr_grpo")
    tokens = np.concatenate([np.full(int(n), x) for n, x in zip(mask.sum(-1), centred, strict=True)])
    variance = tokens.var(ddof=1) if len(tokens) > 1 else 0.0
    theirs = (centred - tokens.mean()) / np.sqrt(variance + 1e-8)
    floors = np.sqrt(variance + 1e-8) / (np.sqrt(variance) + 1e-4)
    assert_close(group_advantages(rewards, group, "reinforce++", mask=mask), torch.from_numpy(theirs * floors), atol=1e-9)


@given(SEEDS, st.integers(1, 9))
def test_at_equal_lengths_tokens_and_completions_differ_by_the_unbiased_factor_alone(seed, length):
    rewards, group = grouped(seed)
    count = len(group)
    mask = torch.ones(count, length, dtype=torch.bool)
    spread = group_advantages(rewards, group, "dr_grpo").std().item()
    shrunk = spread * math.sqrt((count - 1) * length / (count * length - 1))
    expected = group_advantages(rewards, group, "reinforce++") * (spread + 1e-4) / (shrunk + 1e-4)
    assert_close(group_advantages(rewards, group, "reinforce++", mask=mask), expected)


@pytest.mark.parametrize(
    ("how", "mask", "why"),
    [
        ("grpo", torch.ones(5, 2).bool(), "`mask` is what reinforce\\+\\+ whitens over, and grpo reads none"),
        ("reinforce++", torch.ones(4, 2).bool(), r"`mask` is bool and \[B T\] with B = 5.*got torch.bool \[4, 2\]"),
        ("reinforce++", torch.ones(5).bool(), r"got torch.bool \[5\]"),
        ("reinforce++", torch.ones(5, 2), r"got torch.float32 \[5, 2\]"),
        ("reinforce++", torch.zeros(5, 2).bool(), "no unmasked token to whiten over"),
        ("reinforce++", [[True]] * 5, "`mask` is a tensor; got builtins.list"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_masks_that_are_refused(how, mask, why):
    with pytest.raises(ValueError, match=why):
        group_advantages(REWARDS, GROUP, how, mask=mask)


@given(SEEDS, st.sampled_from(HOWS))
def test_every_groups_advantages_sum_to_0(seed, how):
    rewards, group = grouped(seed)
    advantages = group_advantages(rewards, group, how)
    for g in group.unique():
        assert_close(advantages[group == g].sum(), doubles(0.0)[0])


@given(SEEDS, st.sampled_from(HOWS), st.integers(-100, 100))
def test_what_a_whole_group_gains_changes_nothing(seed, how, gain):
    rewards, group = grouped(seed)
    shifted = rewards + torch.where(group == group[0], gain, 3 * gain)
    assert_close(group_advantages(shifted, group, how), group_advantages(rewards, group, how), atol=1e-9)


@given(SEEDS, st.floats(0.1, 100.0))
def test_without_division_credit_scales_with_the_rewards(seed, scale):
    rewards, group = grouped(seed)
    for how in ("dr_grpo", "rloo"):
        assert_close(group_advantages(scale * rewards, group, how), scale * group_advantages(rewards, group, how))


@given(SEEDS, st.sampled_from(["grpo", "reinforce++"]), st.floats(1.0, 1e6))
def test_with_division_the_scale_matters_up_to_the_floor_alone(seed, how, scale):
    # A(cR) = x/(s + 1e-4/c): it grows with c, by no more than 1e-4/s altogether.
    rewards, group = grouped(seed)
    plain, scaled = group_advantages(rewards, group, how), group_advantages(scale * rewards, group, how)
    assert (scaled.abs() >= plain.abs() - 1e-9).all()
    narrowest = min(rewards[group == g].std().item() for g in group.unique()) if how == "grpo" else None
    spread = narrowest if narrowest is not None else group_advantages(rewards, group, "dr_grpo").std().item()
    assert (scaled.abs() <= plain.abs() * (1 + 1e-4 / spread) + 1e-9).all()


@given(SEEDS, st.sampled_from(HOWS))
def test_order_and_names_of_groups_do_not_matter(seed, how):
    rewards, group = grouped(seed)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(group)))
    advantages = group_advantages(rewards, group, how)
    assert_close(group_advantages(rewards[order], group[order], how), advantages[order])
    assert_close(group_advantages(rewards, (-3 * group + 5).int(), how), advantages)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rewards_are_compared_in_float32(how, dtype):
    # 1 + 2⁻⁷ is in both dtypes, its half-way mean with 1 is not in bfloat16.
    rewards = torch.tensor([1.0, 1.0 + 2**-7], dtype=dtype)
    advantages = group_advantages(rewards, torch.tensor([0, 0]), how)
    assert advantages.dtype == torch.float32
    assert_close(advantages, group_advantages(rewards.double(), torch.tensor([0, 0]), how))


# ---------------------------------------------------------------------------------------------------- gae


@pytest.mark.supports("advantage: gae", door="import corral")
def test_golden_gae():
    # γ = .9, λ = .5.  δ = 0 + .9 · .6 − .5, 0 + .9 · .8 − .6, 1 − .8 = .04, .12, .2.
    # Â_3 = .2,  Â_2 = .12 + .45 · .2 = .21,  Â_1 = .04 + .45 · .21 = .1345;  returns: plus the values.
    rewards, values = doubles(0.0, 0.0, 1.0)[None], doubles(0.5, 0.6, 0.8)[None]
    advantages, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), 0.9, 0.5)
    assert_close(advantages, doubles(0.1345, 0.21, 0.2)[None])
    assert_close(returns, doubles(0.6345, 0.81, 1.0)[None])


def test_golden_gae_skips_holes_and_padding():
    # The same three tokens with a hole before the second and padding at the end, which hold NaN.
    nan = math.nan
    rewards, values = doubles(0.0, nan, 0.0, 1.0, nan)[None], doubles(0.5, nan, 0.6, 0.8, nan)[None]
    advantages, returns = gae(rewards, values, torch.tensor([[True, False, True, True, False]]), 0.9, 0.5)
    assert_close(advantages, doubles(0.1345, 0.0, 0.21, 0.2, 0.0)[None])
    assert_close(returns, doubles(0.6345, 0.0, 0.81, 1.0, 0.0)[None])


def episodes(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and a mask with holes, [4 6]; the last episode has no unmasked token."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 6, generator=generator) < 0.7
    mask[0], mask[-1] = True, False
    return rewards, values, mask


UNIT = st.floats(0.0, 1.0)


@given(SEEDS, UNIT, UNIT)
def test_gae_agrees_with_the_double_sum(seed, gamma, lam):
    # Â_t = Σ_l (γλ)^l δ_{t+l} over the unmasked tokens of one episode.
    rewards, values, mask = episodes(seed)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    expected = torch.zeros_like(rewards)
    for b in range(len(mask)):
        live = mask[b].nonzero().flatten().tolist()
        r, v = rewards[b, live].tolist(), [*values[b, live].tolist(), 0.0]
        delta = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(live))]
        for i, t in enumerate(live):
            expected[b, t] = sum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(live)))
    assert_close(advantages, expected)
    assert_close(returns, torch.where(mask, expected + values, 0.0))


@given(SEEDS)
def test_without_discount_gae_is_reward_to_go_minus_value(seed):
    rewards, values, mask = episodes(seed)
    advantages, returns = gae(rewards, values, mask, 1.0, 1.0)
    live = torch.where(mask, rewards, 0.0)
    to_go = torch.where(mask, live.flip(-1).cumsum(-1).flip(-1), 0.0)
    assert_close(returns, to_go)
    assert_close(advantages, to_go - torch.where(mask, values, 0.0))


@given(SEEDS, UNIT)
def test_without_a_trace_gae_is_the_td_error(seed, gamma):
    rewards, values, _ = episodes(seed)
    advantages, _ = gae(rewards, values, torch.ones_like(rewards, dtype=torch.bool), gamma, 0.0)
    after = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    assert_close(advantages, rewards + gamma * after - values)


@given(SEEDS, UNIT, UNIT, st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_stands_at_padding_does_not_matter(seed, gamma, lam, garbage):
    rewards, values, mask = episodes(seed)
    plain = gae(rewards, values, mask, gamma, lam)
    poisoned = gae(rewards.masked_fill(~mask, garbage), values.masked_fill(~mask, garbage), mask, gamma, lam)
    for ours, theirs in zip(plain, poisoned, strict=True):
        assert torch.equal(ours, theirs)
        assert (ours[~mask] == 0).all()


def test_a_critic_that_is_right_leaves_nothing_to_credit():
    # A reward of 1 per token and γ = ½: values 1.75, 1.5, 1.
    advantages, returns = gae(torch.ones(1, 3), torch.tensor([[1.75, 1.5, 1.0]]), torch.ones(1, 3, dtype=torch.bool), 0.5, 0.9)
    assert advantages.tolist() == [[0.0, 0.0, 0.0]]
    assert returns.tolist() == [[1.75, 1.5, 1.0]]


@pytest.mark.parametrize(("rewards", "values"), [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_gae_of_mixed_dtypes_is_computed_in_the_wider_one(rewards, values):
    # ⅓ + ⅓ in float64 is not what it is in float32, whichever of the two comes rounded.
    r, v = torch.full((1, 2), 1 / 3, dtype=rewards), torch.full((1, 2), 1 / 3, dtype=values)
    mask = torch.ones(1, 2, dtype=torch.bool)
    for ours, theirs in zip(gae(r, v, mask, 0.9, 0.9), gae(r.double(), v.double(), mask, 0.9, 0.9), strict=True):
        assert ours.dtype == torch.float64
        assert torch.equal(ours, theirs)


def test_gae_carries_no_gradient():
    rewards, values = torch.randn(2, 1, 3, requires_grad=True).unbind(0)
    for out in gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), 0.9, 0.9):
        assert not out.requires_grad
