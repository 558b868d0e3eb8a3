"""Several plans for one context: a baseline of the others, in segments (TCE) and whole (BBRL)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_learner import LEARNERS, learner

from corral.advantage import group_advantages
from corral.robot.episode import episode_seeds
from corral.robot.learner import leave_one_out, mirror
from corral.robot.tce import TCEConfig
from tolerance import assert_close


def test_golden_plans_of_two_contexts() -> None:
    # 1, 2, 6: the others' means are 4, 3.5 and 1.5. 5, 5, 5: nobody is better. Segments apart from each other.
    credit = torch.tensor([[1.0, 0.0], [2.0, 0.0], [6.0, 3.0], [5.0, 0.0], [5.0, 0.0], [5.0, 0.0]])
    expected = torch.tensor([[-3.0, -1.5], [-1.5, -1.5], [4.5, 3.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    assert_close(leave_one_out(credit, 3), expected)


def test_golden_mirrored_pairs() -> None:
    # Pairs (1, 3), (6, 0) and (2, 4): for the first the others' mean is 12/4 = 3, for the second 10/4, for the third 10/4.
    credit = torch.tensor([[1.0], [3.0], [6.0], [0.0], [2.0], [4.0]])
    expected = torch.tensor([[-2.0], [0.0], [3.5], [-2.5], [-0.5], [1.5]])
    assert_close(leave_one_out(credit, 6, mirrored=True), expected)


def test_mirrored_pairs_estimate_the_same_gradient_with_less_noise() -> None:
    # R(w) = w + 3 w² with w = ε, so μ = 0 and σ = 1: dE R/dμ = 1, dE R/dσ = 6 σ = 6. Scores are ε and ε² − 1.
    noise = torch.randn((40_000, 1), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = {}
    for mirrored, drawn in ((False, noise), (True, mirror(noise))):
        advantages = leave_one_out(drawn + 3 * drawn**2, 4, mirrored=mirrored)
        each = torch.stack([advantages * drawn, advantages * (drawn**2 - 1)]).unflatten(1, (-1, 4)).mean((2, 3))
        assert_close(each.mean(1), torch.tensor([1.0, 6.0], dtype=torch.float64), atol=0.3)
        found[mirrored] = each.var(1)
    assert found[True][0] < 0.1 * found[False][0]  # 3 w² drops out


@given(st.integers(1, 4), st.integers(2, 5), st.integers(1, 3), st.integers(0, 2**16))
def test_each_segment_is_corral_s_own_leave_one_out(contexts: int, plans: int, segments: int, seed: int) -> None:
    credit = torch.randn((contexts * plans, segments), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    group = torch.arange(contexts).repeat_interleave(plans)
    oracle = torch.stack([group_advantages(column, group, "rloo") for column in credit.unbind(-1)], -1)
    found = leave_one_out(credit, plans)
    assert_close(found, oracle)
    assert_close(found.unflatten(0, (contexts, plans)).sum(1), torch.zeros((contexts, segments), dtype=torch.float64))
    assert_close(leave_one_out(credit + 7, plans), found)  # what all plans of a context earn says nothing of any


@pytest.mark.parametrize(("episodes", "plans", "mirrored"), [(6, 1, False), (6, 4, False), (6, 2, True), (6, 3, True)])
def test_impossible_groups_are_refused(episodes: int, plans: int, mirrored: bool) -> None:
    with pytest.raises(ValueError, match=f"got {episodes} episodes, {plans} plans a context"):
        leave_one_out(torch.zeros(episodes, 1), plans, mirrored=mirrored)


def test_a_batch_is_a_whole_number_of_contexts() -> None:
    with pytest.raises(ValueError, match="`plans_per_context` plans each; got 64 and 5"):
        TCEConfig(plans_per_context=5)
    with pytest.raises(ValueError, match="plans_per_context"):
        TCEConfig(plans_per_context=0)
    with pytest.raises(ValueError, match="contexts of their own; got 4 and replan_every=50"):
        TCEConfig(plans_per_context=4, replan_every=50)
    with pytest.raises(ValueError, match="even and at least 4; got 2"):
        TCEConfig(plans_per_context=2, mirrored=True)


@pytest.mark.parametrize("algorithm", LEARNERS)
def test_plans_of_a_context_share_it_and_are_credited_against_each_other(algorithm: str) -> None:
    agent = learner(algorithm, episodes=8, plans_per_context=4, policy_epochs=2, critic_epochs=2)
    untouched = [parameter.clone() for parameter in agent.critic.parameters()]
    episodes, plans = agent.sample()
    contexts = episodes.observations[:, 0].unflatten(0, (2, 4))
    assert (contexts == contexts[:, :1]).all()
    assert not torch.equal(contexts[0], contexts[1])
    assert len({tuple(row) for row in plans.params.tolist()}) == 8
    agent.begin_batch(plans)
    credit = agent.credit(episodes)
    if algorithm == "tce":
        ends = [(a, 100 if n == len(agent.pairs) - 1 else b) for n, (a, b) in enumerate(agent.pairs.tolist())]
        earned = torch.stack([episodes.rewards[:, a:b].sum(-1) for a, b in ends], -1)
    else:
        earned = episodes.returns[:, None]
    by_hand = torch.stack(
        [earned[i] - earned[[j for j in range(i // 4 * 4, i // 4 * 4 + 4) if j != i]].mean(0) for i in range(8)]
    )
    assert_close(credit.advantages, by_hand / by_hand.std(), rtol=1e-6)  # their mean is 0 already
    assert credit.inputs is None
    metrics = agent.improve(episodes, plans)
    assert "critic_loss" not in metrics
    assert all(torch.equal(*pair) for pair in zip(agent.critic.parameters(), untouched, strict=True))
    assert agent.critic.normaliser.count == 0


def test_one_plan_a_context_meets_the_contexts_of_a_plain_batch() -> None:
    alone, grouped = learner("tce", episodes=4), learner("tce", episodes=8, plans_per_context=2)
    assert_close(grouped.sample()[0].observations[::2, 0], alone.sample()[0].observations[:, 0])
    assert episode_seeds(0, 0, 8)[:4] == episode_seeds(0, 0, 4)


def test_it_learns_without_a_critic() -> None:
    settings = {"policy_epochs": 12, "policy_rate": 3e-3, "cov_bound": 0.01, "dtype": torch.float32}
    agent = learner("tce", iterations=8, plans_per_context=4, mirrored=True, **settings)
    _, plans = agent.sample()
    assert_close(plans.params[::2] + plans.params[1::2], 2 * plans.mean[::2], atol=1e-5)
    before = agent.evaluate(list(range(32))).returns.mean()
    for _ in range(8):
        agent.step()
    after = agent.evaluate(list(range(32))).returns.mean()
    assert after > 0.8 * before, f"returns are negative: {before:.1f} → {after:.1f}"


@pytest.mark.parametrize("contextual", [False, True])
def test_the_network_sees_a_context_once_and_learns_the_same(contextual: bool) -> None:
    agent = learner("tce", episodes=12, plans_per_context=4, contextual_covariance=contextual)
    context = torch.randn((3, agent.plant.observation_size), dtype=torch.float64).repeat_interleave(4, 0)
    seen: list[int] = []
    agent.policy.mean.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    found = []
    for gaussians in (agent.gaussians(context), agent.policy(context)):
        weights = [torch.linspace(-1, 1, part.numel()).view_as(part) for part in gaussians]
        loss = sum((part * weight).sum() for part, weight in zip(gaussians, weights, strict=True))
        found.append((*gaussians, *torch.autograd.grad(loss, list(agent.policy.parameters()))))
    assert seen == [3, 12]
    for once, each in zip(*found, strict=True):
        assert_close(once, each)
