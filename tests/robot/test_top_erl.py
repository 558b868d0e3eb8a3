"""TOP-ERL: N-step targets, a causal critic, plans inside the trust region, and learning in seconds."""

import io
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import MultivariateNormal, kl_divergence

from corral.robot.episode import Plant, held_out_seeds
from corral.robot.planner import Plans
from corral.robot.prodmp import ProDMP
from corral.robot.segment import draw_segments, segment_returns
from corral.robot.sequence_critic import SequenceCritic
from corral.robot.top_erl import TopERL, TopERLConfig
from corral.robot.tracking import Tracking
from tolerance import assert_close


class Sent(gymnasium.Env):
    """One joint that is wherever it is sent; pays −(position − goal)² at each step; ends early by `ends_after`[seed % 4]."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = gymnasium.spaces.Box(-9.0, 9.0, (1,), np.float64)

    def __init__(self, steps: int = 6, ends_after: tuple[int, ...] = ()) -> None:
        self.steps, self.ends_after = steps, ends_after

    def observation(self) -> Any:
        return np.array([*self.state, self.t / self.steps, self.goal])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.state, self.goal = 0, (0.5, 0.0), float(self.np_random.uniform(-1, 1))
        self.last = self.ends_after[(seed or 0) % 4] if self.ends_after else self.steps
        return self.observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t, before = self.t + 1, self.state[0]
        self.state = (float(action[0]), (float(action[0]) - before) / 0.1)
        return self.observation(), -((self.state[0] - self.goal) ** 2), self.t == self.last, False, {}


def learner(
    *,
    steps: int = 6,
    ends_after: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float64,
    basis: int = 2,
    relative_goal: bool = False,
    **settings: Any,
) -> TopERL:
    plant = Plant(
        SyncVectorEnv([lambda: Sent(steps, ends_after)] * 8),
        Tracking(joints=(0, 1), velocities=(1, 2), command="position"),
        steps,
    )
    small = {"episodes": 8, "warm_up": 8, "batch": 8, "critic_hidden": (16,), "heads": 2, "segments": 3, "hidden": (16,)}
    small |= {"critic_epochs": 3, "policy_epochs": 3, "critic_dtype": None}
    prodmp = ProDMP(1, basis, 0.1 * steps, alpha=10.0, auto_scale=True, goal_scale=0.3, relative_goal=relative_goal)
    return TopERL(plant, prodmp, 0.1, TopERLConfig(**{**small, **settings}), dtype=dtype)


def critic(longest: int = 5, **settings: Any) -> SequenceCritic:
    torch.manual_seed(0)
    sizes = {"observation": 3, "dof": 2, "longest": longest, "width": 16, "layers": 2, "heads": 4}
    return SequenceCritic(**{**sizes, **settings}).double()


# ------------------------------------------------------------------------------------------------------------- targets


def test_golden_targets_of_three_steps() -> None:
    # Rewards 1, 2, 4; V = 9, 10, 20, 40 at s_0 … s_3, of which the last is after the end; γ = ½.
    # From s_0: 1 + ½ 10 = 6,   1 + ½ 2 + ¼ 20 = 7,   1 + 1 + ¼ 4 = 3.   From s_1, two steps: 2 + ½ 20 = 12,   2 + ½ 4 = 4.
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[9.0, 10.0, 20.0, 40.0]])
    running = torch.ones(1, 3, dtype=torch.bool)
    assert segment_returns(rewards, values, running, torch.tensor([[0, 1, 2]]), 0.5).tolist() == [[[6, 7, 3]]]
    assert segment_returns(rewards, values, running, torch.tensor([[0, 1], [1, 2]]), 0.5).tolist() == [[[6, 7], [12, 4]]]
    # Over after two steps: V of s_2 is 0, and so is the third reward.
    over = torch.tensor([[True, True, False]])
    assert segment_returns(rewards, values, over, torch.tensor([[0, 1, 2]]), 0.5).tolist() == [[[6, 2, 2]]]


@given(steps=st.integers(1, 12), most=st.integers(1, 12), gamma=st.sampled_from([0.0, 0.5, 0.9, 1.0]), seed=st.integers(0, 999))
def test_targets_are_those_of_a_loop(steps: int, most: int, gamma: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    starts, length = draw_segments(steps, min(most, steps), generator)
    rewards, values = (torch.randn(3, size, generator=generator, dtype=torch.float64) for size in (steps, steps + 1))
    ends = torch.randint(1, steps + 1, (3,), generator=generator)
    mask = torch.arange(steps) < ends[:, None]
    found = segment_returns(rewards, values, mask, (starts[:, None] + torch.arange(length)).clamp(max=steps - 1), gamma)
    for episode, end in enumerate(ends.tolist()):
        for k, start in enumerate(starts.tolist()):
            for n in range(1, min(length, steps - start) + 1):
                total = sum(gamma**i * float(rewards[episode, start + i]) for i in range(n) if start + i < end)
                total += gamma**n * float(values[episode, start + n]) if start + n < end else 0.0
                assert found[episode, k, n - 1].item() == pytest.approx(total, rel=1e-9, abs=1e-12)


def test_with_the_rewards_to_go_as_v_every_target_is_the_reward_to_go() -> None:
    rewards = torch.randn(4, 10, dtype=torch.float64)
    to_go = torch.nn.functional.pad(rewards.flip(1).cumsum(1).flip(1), (0, 1))
    starts, length = draw_segments(10, 4)
    rows = starts[:, None] + torch.arange(length)
    found = segment_returns(rewards, to_go, torch.ones(4, 10, dtype=torch.bool), rows.clamp(max=9))
    inside = (rows < 10).expand_as(found)
    assert_close(found[inside], to_go[:, starts, None].expand(-1, -1, length)[inside])


@given(steps=st.integers(1, 60), most=st.integers(1, 60), seed=st.integers(0, 99))
def test_segments_hold_every_step_and_begin_before_the_end(steps: int, most: int, seed: int) -> None:
    if most > steps:
        with pytest.raises(ValueError, match="draw_segments: `most` is from 1"):
            draw_segments(steps, most)
        return
    starts, length = draw_segments(steps, most, torch.Generator().manual_seed(seed))
    held = (starts[:, None] + torch.arange(length)).flatten()
    assert held.unique()[:steps].tolist() == list(range(steps))
    assert starts[0] == 0
    assert starts[-1] < steps <= held.max() + 1
    assert (starts.diff() > 0).all()
    assert len(starts) <= steps // length + 2
    again, same = draw_segments(steps, most, torch.Generator().manual_seed(seed))
    assert torch.equal(starts, again)
    assert length == same


def test_every_state_begins_a_segment_and_every_number_of_segments_is_drawn() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [draw_segments(12, 4, generator) for _ in range(400)]
    assert {length for _, length in drawn} == {12, 6, 4, 3}
    assert set(torch.cat([starts for starts, _ in drawn]).tolist()) == set(range(12))


# -------------------------------------------------------------------------------------------------------------- critic


@given(n=st.integers(0, 5), seed=st.integers(0, 99))
def test_a_value_never_depends_on_a_later_action(n: int, seed: int) -> None:
    network, generator = critic(), torch.Generator().manual_seed(seed)
    state, actions = (torch.randn(4, *size, generator=generator, dtype=torch.float64) for size in ((3,), (5, 2)))
    changed = actions.clone()
    changed[:, n:] = torch.randn(4, 5 - n, 2, generator=generator, dtype=torch.float64)
    before, after = network(state, actions), network(state, changed)
    assert_close(after[:, : n + 1], before[:, : n + 1])
    assert n == 5 or (after[:, n + 1 :] != before[:, n + 1 :]).all()  # all later ones do depend on them
    assert_close(network(state, actions[:, :n]), before[:, : n + 1])  # nor on how many follow
    assert_close(network(state), before[:, :1])


@given(seed=st.integers(0, 99))
def test_values_of_a_permuted_batch_are_permuted(seed: int) -> None:
    network, generator = critic(), torch.Generator().manual_seed(seed)
    state, actions = (torch.randn(4, 3, *size, generator=generator, dtype=torch.float64) for size in ((3,), (5, 2)))
    order = torch.randperm(4, generator=generator)
    assert_close(network(state[order], actions[order]), network(state, actions)[order])


def test_the_order_of_actions_matters() -> None:
    network, state, actions = critic(), torch.zeros(1, 3).double(), torch.randn(1, 5, 2).double()
    assert (network(state, actions)[:, 2:-1] - network(state, actions.flip(1))[:, 2:-1]).abs().min() > 1e-6


def test_the_target_follows_slowly_and_has_the_scale_and_statistics_of_the_network() -> None:
    network, state = critic(), torch.randn(6, 3).double()
    assert_close(network(state, target=True), network(state))
    with torch.no_grad():
        network.value.head.bias += 1.0
    network.follow(0.25)
    assert_close(network(state) - network(state, target=True), torch.full((6, 1), 0.75).double())
    network.set_scale(torch.tensor([2.0, 2.0]).double())  # σ = 2
    assert_close(network(state) - network(state, target=True), torch.full((6, 1), 1.5).double())
    network.set_scale(torch.tensor([3.0, 4.0]).double())
    assert network.scale == pytest.approx(12.5**0.5)
    network.set_scale(torch.zeros(3).double())
    assert network.scale == 1.0
    network.follow(1.0)
    assert_close(network(state, target=True), network(state))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_is_close_to_float64(dtype: torch.dtype) -> None:
    exact, state, actions = critic(), torch.randn(6, 3).double(), torch.randn(6, 5, 2).double()
    expected = exact(state, actions)
    network = critic()
    network.value.float()
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        found = network(state, actions)
    assert found.dtype == torch.float32
    assert_close(found, expected, dtype, **({"atol": 5e-2} if dtype == torch.bfloat16 else {}))


def test_a_critic_learns_the_values_of_a_problem_of_two_steps() -> None:
    # Plans begin where the joint is: ã_1 = row · w + start · (q, v) is normal given s_1, so with rewards −(a − g)²
    #   V(s_1) = −(E ã_1 − g)² − Var ã_1      Q_1(s_0, a_0) = −(a_0 − g)² + V(s_1)      Q_2 = −(a_0 − g)² − (a_1 − g)²
    agent = learner(
        steps=2, segments=2, replan_from="state", batch=64, episodes=128, warm_up=128, critic_hidden=(32,), std=0.2,
        critic_rate=3e-3, critic_epochs=250, policy_epochs=1, policy_rate=1e-12, target_rate=0.05, critic_dtype="float32",
    )  # fmt: skip
    agent.step()
    replay = agent.replay
    at = agent.cut(replay, torch.tensor([0]), 2)
    goal, actions = replay.observations[:, 0, 3], at.actions[:, 0, :, 0]
    design = agent.prodmp.design(agent.planner.times[1:2], 0.1)
    mean, chol = (x.detach() for x in agent.policy(replay.observations[:, 0]))
    reached = (design.start[0, 0] * replay.observations[:, 1, :2]).sum(-1)
    expected = (mean @ design.position[0] + reached - goal).square() + (design.position[0] @ chol).square().sum()
    first, second = -(actions[:, 0] - goal).square(), -(actions[:, 1] - goal).square()
    with torch.no_grad():
        value, one, two = agent.critic(at.states, at.actions)[:, 0].unbind(-1)
        after = agent.critic(replay.observations[:, 1])[:, 0]
    for found, wanted in ((two, first + second), (one, first - expected), (after, -expected)):
        assert (found - wanted).square().mean() < 0.15 * wanted.var()
    assert value.mean() == pytest.approx((first + second).mean().item(), abs=0.3 * float((first + second).std()))


# ------------------------------------------------------------------------------------------------------------- learner


def test_gradient_from_the_policy_through_prodmp_and_the_critic() -> None:
    agent = learner(steps=4, segments=2, basis=1, batch=3, ends_after=(4, 2, 4, 3))
    agent.step()
    at = agent.draw(torch.Generator().manual_seed(0))
    size, noise = agent.prodmp.parameters, torch.randn(3, agent.prodmp.parameters, dtype=torch.float64)
    old = Plans(at.replay.params, torch.zeros(3, size).double(), torch.eye(size, dtype=torch.float64), (3,))
    agent.critic.value.requires_grad_(False)

    def gain(mean: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
        projected, factor = agent.project(mean, lower.tril(), old)
        assert projected.active_mean.any()
        assert projected.active_cov.all()
        return agent.gain(projected.mean + noise @ factor.mT, at)

    mean = torch.randn(3, size, dtype=torch.float64, requires_grad=True)
    lower = (0.7 * torch.eye(size) + 0.1 * torch.ones(size, size)).double().tril().requires_grad_()
    assert torch.autograd.gradcheck(gain, (mean, lower))


@pytest.mark.parametrize("relative_goal", [False, True])
def test_the_gain_of_the_plans_that_were_followed_is_the_mean_of_q(relative_goal: bool) -> None:
    agent = learner(steps=6, ends_after=(6, 3, 6, 1), relative_goal=relative_goal)
    agent.step()
    at = agent.draw(torch.Generator().manual_seed(1))
    assert not at.mask.all()
    assert_close(agent.plan(at.replay.params, at), at.actions, atol=1e-9)  # begun anew on its way, a plan is the same plan
    values = agent.critic(at.states, at.actions)[..., 1:] / agent.critic.scale
    assert_close(agent.gain(at.replay.params, at), values[at.mask].mean(), rtol=1e-8)


def test_the_recorded_actions_are_what_the_joints_were_sent_to() -> None:
    agent = learner(steps=6)
    agent.step()
    at = agent.cut(agent.replay, torch.tensor([0, 2]), 3)
    assert_close(at.actions[..., 0], agent.replay.observations[:, 1:, 0][:, at.rows], atol=1e-6)  # actions are float32
    assert_close(at.position[..., 0], agent.replay.observations[:, [0, 2], 0], atol=1e-6)


def test_what_comes_after_an_early_end_changes_no_update() -> None:
    losses = []
    for garbage in (0.0, 1e6):
        agent = learner(steps=6, ends_after=(2, 4, 6, 3))
        agent.step()
        replay = agent.replay
        over = ~replay.mask
        replay.rewards[over] += garbage
        replay.observations[:, 1:][over & torch.nn.functional.pad(over, (1, 0))[:, :-1]] += garbage  # keeps the last state
        at, noise = agent.cut(replay, torch.tensor([0, 2, 4]), 2), torch.ones(8, agent.prodmp.parameters, dtype=torch.float64)
        assert at.mask[:, 2].any(-1).tolist() != [True] * 8  # some segments begin after the end
        losses.append([float(agent.improve_critic(at, noise)["critic_loss"])])
        losses[-1] += [float(agent.improve_policy(at, noise, agent.policy)["policy_loss"])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_targets_of_v_are_the_target_s_q_of_the_policy_s_own_actions() -> None:
    agent = learner(steps=6, ends_after=(6, 4, 6, 6), segments=2, target_rate=1.0)
    agent.step()
    at = agent.draw(torch.Generator().manual_seed(2))
    noise = torch.randn(8, agent.prodmp.parameters, dtype=torch.float64)
    found = agent.targets(at, noise)
    mean, chol = agent.policy(at.replay.observations[:, 0])
    for episode in range(8):
        params = mean[episode] + chol @ noise[episode]
        for k, rows in enumerate(at.rows):
            begin = (at.position[episode, k], at.velocity[episode, k], 0.1 * float(rows[0]))
            actions = agent.prodmp.trajectory(agent.planner.times[rows], params, *begin)[0]
            values = agent.critic(at.states[episode, k : k + 1], actions[None])[0]
            assert found[episode, k, 0].item() == pytest.approx(values[int(at.mask[episode, k].sum())].item(), rel=1e-9)


@given(rate=st.sampled_from([1e-3, 1e-2, 0.1]), seed=st.integers(0, 20), contextual=st.booleans())
def test_every_update_draws_from_a_policy_inside_its_region(rate: float, seed: int, contextual: bool) -> None:
    agent = learner(policy_rate=rate, mean_bound=0.02, cov_bound=0.003, contextual_covariance=contextual, deployed_bound=0.05)
    agent.seed = seed
    drawn, project = [], agent.project

    def spy(mean: torch.Tensor, chol: torch.Tensor, old: Plans) -> Any:
        found, factor = project(mean, chol, old)
        drawn.append((found.mean.detach(), factor.detach(), old))
        return found, factor

    agent.project = spy
    metrics = agent.step()
    assert len(drawn) == 3
    for mean, factor, old in drawn:
        kl = kl_divergence(MultivariateNormal(mean, scale_tril=factor), MultivariateNormal(old.mean, scale_tril=old.chol))
        assert kl.max() <= 0.023 * (1 + 1e-6)
    assert metrics["tr/kl_after"] <= 0.023 * (1 + 1e-6)
    assert metrics["tr/unconverged"] == 0
    # The certificate is of the network that draws the next batch, on the contexts of this one.
    assert metrics["tr/deployed_kl_mean"] <= 0.05
    assert (metrics["tr/step_share"] == 1.0) or rate > 1e-3


def test_the_buffer_waits_for_the_warm_up_and_keeps_the_last_episodes() -> None:
    agent = learner(warm_up=12, replay=20)
    before = [p.clone() for p in agent.policy.parameters()]
    metrics = agent.step()
    assert agent.updates == 0
    assert "critic_loss" not in metrics
    assert metrics["tr/deployed_kl_mean"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, agent.policy.parameters(), strict=True))
    assert agent.step()["critic_loss"] > 0
    assert agent.updates == 3
    kept = agent.replay.params
    agent.step()
    assert agent.replay.params.shape == (20, agent.prodmp.parameters)
    assert torch.equal(agent.replay.params[:12], kept[4:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_same_seed_gives_the_same_run_and_a_resumed_one_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    make = lambda: learner(warm_up=12, replay=20, ends_after=(6, 4, 5, 6), dtype=dtype, contextual_covariance=True)  # noqa: E731
    whole = make()
    for stop in (1, 2):  # before the first update, and after it
        whole.step()
        file = io.BytesIO()
        torch.save(whole.state(), file)
        rest = make()
        file.seek(0)
        rest.restore(torch.load(file, weights_only=True))
        if stop == 2:
            for _ in range(3):
                one, other = rest.step(), whole.step()
                assert one.pop("success") != other.pop("success")  # NaN: this environment does not report it
                assert one == other
    again = make()
    for _ in range(5):
        again.step()
    assert str(again.state()) == str(whole.state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_stay_finite_in_low_precision(dtype: torch.dtype) -> None:
    agent = learner(dtype=torch.float32, critic_dtype="float32")
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        metrics = [agent.step() for _ in range(2)][-1]
    known = {name: value for name, value in metrics.items() if name != "success"}  # this environment does not report it
    assert all(np.isfinite(value) for value in known.values()), metrics
    assert all(p.isfinite().all() for network in agent.networks.values() for p in network.parameters())


def test_it_learns_to_reach_a_point() -> None:
    agent = learner(
        iterations=16, warm_up=16, batch=32, critic_epochs=15, policy_epochs=10, policy_rate=3e-3, critic_rate=3e-3,
        critic_dtype="float32", critic_hidden=(32,), mean_bound=0.2, cov_bound=0.02, std=0.3, target_rate=0.05, replay=128,
    )  # fmt: skip
    seeds = held_out_seeds(32)
    before = agent.evaluate(seeds).returns.mean()
    for _ in range(16):
        metrics = agent.step()
    after = agent.evaluate(seeds).returns.mean()
    assert after > 0.5 * before, f"returns are negative: {before:.2f} → {after:.2f}"
    assert metrics["tr/unconverged"] == 0


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"plans_per_context": 2, "episodes": 8}, "top_erl: an episode has one plan"),
        ({"replan_every": 2}, "top_erl: an episode has one plan"),
        ({"critic_hidden": (16, 32)}, "top_erl: `critic_hidden` is one width for all blocks"),
        ({"critic_hidden": (15,)}, r"a multiple of `heads`; got \[15\] and 2 heads"),
        ({"replay": 4}, "top_erl: `replay` holds at least the episodes of `warm_up`; got 4 and 8"),
        ({"segments": 7}, "top_erl: `segments` is at most the 6 steps of an episode; got 7"),
        ({"target_rate": 0.0}, "top_erl: `target_rate`"),
        ({"gamma": 1.5}, "top_erl: `gamma`"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        learner(**settings)


def test_a_plan_from_the_joints_has_no_delay() -> None:
    agent = learner()
    prodmp = ProDMP(1, 2, 0.4, delay=0.2)
    with pytest.raises(ValueError, match=r"top_erl: a plan rests until its delay of 0\.2 s is over"):
        TopERL(agent.plant, prodmp, 0.1, TopERLConfig(segments=3, replan_from="state"))
    waiting = TopERL(agent.plant, prodmp, 0.1, TopERLConfig(segments=6, episodes=8, warm_up=8, batch=8, critic_epochs=8))
    assert np.isfinite(waiting.step()["critic_loss"])
