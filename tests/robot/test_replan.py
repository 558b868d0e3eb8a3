"""Replanning: several plans per episode, smooth where they meet, each credited for its own segments."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import MultivariateNormal

from corral.lab.environments import ENVIRONMENTS
from corral.lab.jobs.robot.export import export_policy
from corral.robot import tce
from corral.robot.bbrl import BBRL, BBRLConfig
from corral.robot.episode import Episodes, Plant, held_out_seeds
from corral.robot.learner import Learner
from corral.robot.planner import Planner
from corral.robot.policy import GaussianPolicy
from corral.robot.prodmp import ProDMP
from corral.robot.tce import TCE, TCEConfig
from corral.robot.tracking import Tracking
from tolerance import assert_close

NAME = "corral/ViaPointReacher-v0"
LEARNERS: dict[str, tuple[Any, Any]] = {"tce": (TCE, TCEConfig), "bbrl": (BBRL, BBRLConfig)}


class Ramp(gymnasium.Env):
    """One joint that is wherever it is sent; pays 2^t at step t; ends after 4 steps, or after `seed` where that is less."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gymnasium.spaces.Box(-9.0, 9.0, (1,), np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.last = 0, min(seed or 4, 4)
        return np.zeros(3), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.array([float(action[0]), 0.0, self.t / 4]), 2.0 ** (self.t - 1), self.t == self.last, False, {}


def ramp(algorithm: str = "tce", *, envs: int = 2, **settings: Any) -> Learner:
    make, config = LEARNERS[algorithm]
    plant = Plant(SyncVectorEnv([Ramp] * envs), Tracking(joints=(0, 1), velocities=(1, 2), command="position"), 4)
    return make(plant, ProDMP(1, 2, 0.4, alpha=10.0), 0.1, config(episodes=3, **settings))


def arm(algorithm: str = "tce", **settings: Any) -> Learner:
    make, config = LEARNERS[algorithm]
    envs = gymnasium.make_vec(NAME, num_envs=8, vectorization_mode="vector_entry_point", reward="dense")
    plant, prodmp = Plant(envs, ENVIRONMENTS[NAME].tracking, 100), ProDMP(5, 3, 2.0, alpha=10.0, auto_scale=True)
    return make(plant, prodmp, 0.02, config(**{"episodes": 8, "policy_epochs": 3, "critic_epochs": 2} | settings))


def test_golden_credit_of_two_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rewards 1, 2, 4, 8; V = 3, 7, 5, 9; γ = ½; a plan has two steps, one segment each. The first ends where the second begins:
    # 1 + ½ (2 + ½ · 5) − 3 = 0.25. The second ends with the episode: 4 + ½ · 8 − 5 = 3.
    agent = ramp(replan_every=2, points=4, gamma=0.5)
    episodes, plans = agent.planner.play([4, 4], agent.planner.noise(2, 0))
    assert episodes.rewards.tolist() == [[1, 2, 4, 8]] * 2
    assert plans.sizes == (2, 2)
    agent.begin_batch(plans)
    assert agent.pairs.tolist() == [[0, 1]]
    monkeypatch.setattr(tce, "normalise_advantages", lambda advantages, mask: advantages)
    monkeypatch.setattr(agent, "critic", lambda inputs: torch.tensor([3.0, 7, 5, 9]).double().expand(inputs.shape[:-1]))
    found = agent.credit(episodes)
    assert found.advantages.tolist() == [[0.25], [0.25], [3.0], [3.0]]  # the first plans of both episodes, then the second
    assert found.mask.all()
    # As published no segment holds a plan's last reward: 1 + ½ · 7 − 3 and 4 + ½ · 9 − 5.
    object.__setattr__(agent.config, "closing_segment", False)
    assert agent.credit(episodes).advantages.tolist() == [[1.5], [1.5], [3.5], [3.5]]
    # The critic's targets do not know of plans. λ-returns of the last two steps: 4 + ½ (.05 · 9 + .95 · 8) = 8.025, and 8.
    assert_close(found.targets.view(2, 4)[:, 2:], torch.tensor([[8.025, 8.0]] * 2, dtype=torch.float64))


def test_golden_credit_of_bbrl_s_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rewards 1, 2, 4, 8: 15 from the first plan on, 12 from the second.
    agent = ramp("bbrl", replan_every=2)
    episodes, _ = agent.planner.play([4, 4], agent.planner.noise(2, 0))
    assert agent.credit(episodes).targets.tolist() == [15, 15, 12, 12]
    assert_close(agent.credit(episodes).inputs[:, 2], torch.tensor([0, 0, 0.5, 0.5]).double())  # the time it sees


def test_an_episode_that_ends_early_begins_no_further_plan() -> None:
    # Three episodes in rounds of two, of 1, 3 and 2 steps: three first plans, one second.
    for algorithm, own in {"tce": {"points": 4}, "bbrl": {}}.items():
        agent = ramp(algorithm, replan_every=2, policy_epochs=2, critic_epochs=1, **own)
        episodes, plans = agent.planner.play([1, 3, 2], agent.planner.noise(3, 0))
        assert episodes.mask.sum(-1).tolist() == [1, 3, 2]
        assert plans.sizes == (3, 1)
        assert len(plans.params) == len(agent.planner.contexts(episodes)) == 4
        assert_close(agent.planner.contexts(episodes)[3], episodes.observations[1, 2])
        metrics = agent.improve(episodes, plans)
        assert all(value == value for value in metrics.values())
        alone, first = agent.planner.play([1, 1, 2], agent.planner.noise(3, 0))  # nobody begins a second one
        assert first.sizes == (3, 0)
        assert agent.improve(alone, first)["tr/unconverged"] == 0


def test_a_plan_that_ends_with_its_episode_expects_nothing_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Over after two steps, exactly at the break: 1 + 2 − V, where an episode that goes on has V of the break besides.
    agent = ramp(replan_every=2, points=4)
    episodes, plans = agent.planner.play([2, 4], agent.planner.noise(2, 0))
    agent.begin_batch(plans)
    monkeypatch.setattr(tce, "normalise_advantages", lambda advantages, mask: advantages)
    monkeypatch.setattr(agent, "critic", lambda inputs: torch.full(inputs.shape[:-1], 5.0, dtype=torch.float64))
    assert agent.credit(episodes).advantages.tolist() == [[3.0 - 5], [3.0 + 5 - 5], [12.0 - 5]]


@pytest.mark.parametrize("algorithm", LEARNERS)
def test_one_plan_per_episode_is_what_it_is_without_the_setting(algorithm: str) -> None:
    plain, one = arm(algorithm), arm(algorithm, replan_every=100)
    assert [plain.step() for _ in range(2)] == [one.step() for _ in range(2)]
    for a, b in zip(plain.policy.parameters(), one.policy.parameters(), strict=True):
        assert torch.equal(a, b)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), pieces=st.sampled_from([2, 4, 5]), delay=st.sampled_from([0.0, 0.2]))
def test_plans_meet_in_position_and_velocity(seed: int, pieces: int, delay: float) -> None:
    # The second plan's own curve, led back from its first point to the break, is in the state in which the first one ends.
    torch.manual_seed(seed)
    prodmp = ProDMP(2, 3, 1.0, delay=delay, relative_goal=bool(seed % 2))
    planner = small_planner(prodmp, 20 // pieces)
    context = np.random.default_rng(seed).normal(size=(3, 4))
    curves, params_of = plan_by_plan(planner, planner.noise(3, seed), [context] * pieces)
    for index, ((y, v), (next_y, next_v)) in enumerate(pairwise(curves), 1):
        times = planner.times[index * planner.every :]
        after = (next_y[:, 0], next_v[:, 0])
        params = _absolute(prodmp, params_of[index], y[:, -1])
        back = replace(prodmp, relative_goal=False).trajectory(times[:1] - 0.05, params, *after, float(times[0]))
        assert_close(back[0][:, 0], y[:, -1], atol=1e-8)
        assert_close(back[1][:, 0], v[:, -1], atol=1e-6)


def plan_by_plan(planner: Planner, noise: torch.Tensor, seen: list[Any]) -> tuple[list[Any], torch.Tensor]:
    """Positions and velocities of each plan made where these observations are seen, and all plans' parameters [P E W]."""
    curves: list[Any] = []

    def follow_anew(context: Any, plan: Any, every: int, **_: Any) -> Any:
        curves.extend(tuple(map(torch.from_numpy, plan(observation))) for observation in seen)
        count, steps = len(context), planner.plant.steps
        observations, rewards, actions = (
            torch.zeros(count, steps + 1, 1),
            torch.zeros(count, steps),
            torch.zeros(count, steps, 1),
        )
        return Episodes(observations, rewards, rewards == 0, actions, *torch.zeros(3, count))

    planner.plant.envs = SimpleNamespace(num_envs=len(noise))  # a round of all episodes
    planner.plant.start, planner.plant.follow_anew = lambda seeds, **_: seen[0], follow_anew
    _, plans = planner.play(list(range(len(noise))), noise)
    return curves, plans.params.unflatten(0, (planner.count, -1))


def small_planner(prodmp: ProDMP, every: int) -> Planner:
    """Twenty steps of 0.05 s; contexts are the joints' two positions and velocities, at rest before a delay."""
    plant = Plant.__new__(Plant)
    plant.steps, plant.tracking = 20, Tracking(joints=(0, 2), velocities=(2, 4))
    policy = GaussianPolicy(4, prodmp.parameters, (8,)).double()
    if prodmp.delay:
        plant.tracking = Still(joints=(0, 2), velocities=(2, 4))
    return Planner(plant, prodmp, 0.05, policy, every=every)


class Still(Tracking):
    """Joints at rest."""

    def state(self, observation: Any) -> tuple[Any, Any]:
        return observation[..., :2], 0 * observation[..., :2]


def _absolute(prodmp: ProDMP, params: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """The same plan with its goal as a position."""
    if not prodmp.relative_goal:
        return params
    shaped = params.unflatten(-1, (2, -1)).clone()
    shaped[..., -1] += start
    return shaped.flatten(-2)


@pytest.mark.parametrize("start", ["desired", "state"])
def test_a_new_plan_begins_where_it_should(start: str) -> None:
    agent = arm(replan_every=25, replan_from=start)
    context = agent.plant.start(held_out_seeds(8))
    moved = context + 0.1
    ((y, v), (found, _), *_), params = plan_by_plan(agent.planner, agent.planner.noise(8, 0), [context, *[moved] * 3])
    begin = (y[:, -1], v[:, -1]) if start == "desired" else tuple(map(torch.from_numpy, (moved[:, :5], moved[:, 5:10])))
    expected, _ = agent.prodmp.trajectory(0.02 * torch.arange(26, 51).double(), params[1], *begin, 0.5)
    assert_close(found, expected)


def test_the_same_parameters_anew_change_nothing() -> None:
    # A network whose mean is one vector for all contexts: planning again from the desired state is the plan that it was.
    agents = [arm(), arm(replan_every=20)]
    for agent in agents:
        for parameter in agent.policy.mean.parameters():
            parameter.data.zero_()
        agent.policy.mean[-1].bias.data.copy_(torch.linspace(-1, 1, 20))
    seeds = held_out_seeds(8)
    assert_close(*(agent.evaluate(seeds).observations for agent in agents), atol=1e-9)


def test_likelihoods_are_those_of_each_plan_s_own_curve() -> None:
    # The joint density of a segment's two desired positions, from the trajectory's whole covariance after its start time.
    agent = arm(replan_every=50, points=10)
    _, plans = agent.sample()
    agent.begin_batch(plans)
    mean = plans.mean + 0.1
    chol = 0.9 * plans.chol
    found = agent.log_prob(replace(plans, mean=mean, chol=chol)).view(2, 8, -1)
    pair = agent.pairs[1]
    for index in range(2):
        times = 0.02 * torch.arange(1 + 50 * index, 51 + 50 * index).double()[pair]
        cov = agent.prodmp.covariance(times, chol @ chol.T, 1.0 * index) + agent.jitter[index][1] * torch.eye(10).double()
        rest = torch.zeros(8, 5).double()
        rows = slice(8 * index, 8 * index + 8)
        y, centre = (
            agent.prodmp.trajectory(times, x[rows], rest, rest, 1.0 * index)[0].mT.flatten(-2) for x in (plans.params, mean)
        )
        assert_close(found[index, :, 1], MultivariateNormal(centre, cov).log_prob(y), rtol=1e-8)


@pytest.mark.parametrize("algorithm", LEARNERS)
def test_an_unchanged_policy_has_ratio_one_in_every_plan(algorithm: str) -> None:
    found = arm(algorithm, replan_every=25, policy_epochs=1).step()
    assert found["tr/ratio_max"] == pytest.approx(1.0, abs=1e-12)
    assert found["tr/kl_before"] == pytest.approx(0.0, abs=1e-12)


def test_a_critic_of_contexts_sees_what_its_plan_saw() -> None:
    agent = arm(replan_every=25, critic_inputs="context")
    episodes, _ = agent.sample()
    seen = agent.states(episodes).reshape(8, 100, -1)
    for t in (0, 24, 25, 80):
        assert_close(seen[:, t, :-1], episodes.observations[:, t - t % 25])


def test_rounds_and_resuming_are_as_with_one_plan() -> None:
    whole, parts = arm(replan_every=25, episodes=8), arm(replan_every=25, episodes=8)
    small = gymnasium.make_vec(NAME, num_envs=3, vectorization_mode="vector_entry_point", reward="dense")
    parts.plant = parts.planner.plant = Plant(small, ENVIRONMENTS[NAME].tracking, 100)
    (episodes, plans), (same, drawn) = whole.sample(), parts.sample()
    assert_close(same.observations, episodes.observations)
    assert drawn.sizes == plans.sizes == (8, 8, 8, 8)
    assert_close(drawn.params, plans.params)
    state = whole.state()
    rest = whole.step()
    resumed = arm(replan_every=25)
    resumed.restore(state)
    assert resumed.step() == rest


def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`replan_every` must divide the 100 steps of an episode; got 30"):
        arm(replan_every=30)
    with pytest.raises(ValueError, match="`replan_every` is a whole number ≥ 1, or None; got 0"):
        TCEConfig(replan_every=0)
    with pytest.raises(ValueError, match="a plan of 1 steps has no two ends of segments"):
        arm(replan_every=1)
    with pytest.raises(ValueError, match=r"at least the trajectory's delay of 0.3 s, in which it rests; got 4 steps of 0.05 s"):
        small_planner(ProDMP(2, 3, 1.0, delay=0.3), 4)
    with pytest.raises(ValueError, match=r"this policy plans anew every 50 steps\. Train it without `replan_every`"):
        export_policy(arm(replan_every=50), tmp_path / "policy.npz")
