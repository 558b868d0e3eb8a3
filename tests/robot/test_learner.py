"""TCE and BBRL as wholes: equal policies have ratio 1, runs repeat and resume, both learn in seconds."""

import io
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from torch.distributions import MultivariateNormal, kl_divergence

from corral.divergence.gaussian import gaussian_entropy
from corral.lab.environments import ENVIRONMENTS
from corral.projection import project_gaussian_kl
from corral.robot.bbrl import BBRL, BBRLConfig
from corral.robot.episode import Plant, episode_seeds, held_out_seeds
from corral.robot.learner import Learner
from corral.robot.planner import Plans
from corral.robot.prodmp import ProDMP
from corral.robot.segment import segment_jitter, segment_log_prob
from corral.robot.tce import TCE, TCEConfig
from tolerance import assert_close

NAME = "corral/ViaPointReacher-v0"
LEARNERS = {"tce": (TCE, TCEConfig), "bbrl": (BBRL, BBRLConfig)}


def learner(
    algorithm: str,
    *,
    seed: int = 0,
    episodes: int = 32,
    envs: Any = None,
    reward: str = "dense",
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> Learner:
    environment = ENVIRONMENTS[NAME]
    if envs is None or isinstance(envs, int):
        count = envs or episodes
        envs = gymnasium.make_vec(NAME, num_envs=count, vectorization_mode="vector_entry_point", reward=reward)
    plant = Plant(envs, environment.tracking, environment.steps)
    make, config = LEARNERS[algorithm]
    prodmp = ProDMP(5, 3, 2.0, alpha=10.0, auto_scale=True)
    return make(plant, prodmp, environment.dt, config(episodes=episodes, **settings), seed=seed, dtype=dtype)


@pytest.mark.parametrize("contextual", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("algorithm", LEARNERS)
def test_an_unchanged_policy_has_ratio_one(algorithm: str, dtype: torch.dtype, contextual: bool) -> None:
    agent = learner(algorithm, policy_epochs=1, critic_epochs=1, contextual_covariance=contextual, dtype=dtype)
    metrics = agent.step()  # metrics are of the first update, before it
    close = 1e-12 if dtype == torch.float64 else 2e-5
    assert metrics["tr/ratio_max"] == pytest.approx(1.0, abs=close)
    assert metrics["tr/kl_before"] == pytest.approx(0.0, abs=close)
    assert metrics["tr/active_frac"] == metrics["tr/active_cov"] == 0
    assert metrics["env_steps"] == 3200


def test_golden_loss_of_the_first_update() -> None:
    # ρ = 1 and advantages have mean 0, so the loss is 0; its gradient is that of − mean Â log π, here by plain autograd.
    agent = learner("tce", policy_epochs=1, critic_epochs=1)
    rate = agent.policy_optimizer
    episodes, plans = agent.sample()
    agent.critic.normaliser.update(agent.states(episodes))
    agent.begin_batch(plans)
    with torch.no_grad():
        credit, log_old = agent.credit(episodes), agent.log_prob(plans)
    context = episodes.observations[:, 0]
    mean, chol = agent.policy(context)
    cov = torch.stack([_pair_cov(agent.rows[0][n], chol, agent.jitter[0][n]) for n in range(len(agent.pairs))])
    error = torch.einsum("nsm,edm->ends", agent.rows[0], (plans.params - mean).view(32, 5, 4)).flatten(-2)
    normal = MultivariateNormal(torch.zeros(10, dtype=torch.float64), cov)
    (-(credit.advantages * normal.log_prob(error)).mean()).backward()
    expected = [p.grad.clone() for p in agent.policy.parameters()]
    rate.param_groups[0]["lr"] = 0.0
    loss = agent.improve_policy(context, plans, credit, log_old)["policy_loss"]
    assert loss == pytest.approx(0.0, abs=1e-12)
    for parameter, gradient in zip(agent.policy.parameters(), expected, strict=True):
        assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("covariance", ["shared", "set", "contextual"])
@pytest.mark.parametrize("algorithm", LEARNERS)
def test_loss_and_gradient_of_a_policy_that_has_left_its_region(algorithm: str, covariance: str) -> None:
    # Densities and divergence by torch.distributions, every matrix written out; the projection has tests of its own.
    # A third of the segments does not count, whatever advantages stand there.
    kind = {"shared": {}, "set": {"set_covariance": True}, "contextual": {"contextual_covariance": True}}[covariance]
    agent = learner(algorithm, regression=3.0, mean_bound=0.02, cov_bound=0.003, **kind)
    episodes, plans = agent.sample()
    agent.critic.normaliser.update(agent.states(episodes))
    agent.begin_batch(plans)
    with torch.no_grad():
        credit, log_old = agent.credit(episodes), agent.log_prob(plans)
        for parameter in agent.policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    counts = torch.arange(credit.mask.numel()).view(credit.mask.shape) % 3 > 0
    credit = credit._replace(mask=counts, advantages=torch.where(counts, credit.advantages, 1e3))
    context = episodes.observations[:, 0]
    mean, chol = agent.policy(context)
    inside = project_gaussian_kl(mean, chol, plans.mean, plans.chol, mean_bound=0.02, cov_bound=0.003)
    assert inside.active_mean.any()
    assert inside.active_cov.all()
    assert chol.ndim == plans.chol.ndim == (3 if covariance == "contextual" else 2)

    def log_density(mean: torch.Tensor, chol: torch.Tensor) -> torch.Tensor:
        if algorithm == "bbrl":
            return MultivariateNormal(mean, scale_tril=chol).log_prob(plans.params)[:, None]
        pairs = zip(agent.rows[0], agent.jitter[0].unbind(-1), strict=True)
        cov = torch.stack([_pair_cov(rows, chol, r) for rows, r in pairs], -3)
        error = torch.einsum("nsm,edm->ends", agent.rows[0], (plans.params - mean).view(32, 5, 4)).flatten(-2)
        return MultivariateNormal(torch.zeros(10, dtype=torch.float64), cov).log_prob(error)

    assert_close(log_old, log_density(plans.mean, plans.chol), rtol=1e-8)
    ratio = (log_density(inside.mean, inside.chol) - log_old).exp()
    # A covariance that will be set needs no regression: only the means are pulled together, in units of the projected one.
    spread = inside.chol.detach() if covariance == "set" else chol
    apart = kl_divergence(
        MultivariateNormal(mean, scale_tril=spread), MultivariateNormal(inside.mean.detach(), scale_tril=inside.chol.detach())
    )
    expected = 3 * apart.mean() - (ratio * credit.advantages)[counts].mean()
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in agent.policy.parameters()]
    metrics = agent.improve_policy(context, plans, credit, log_old)
    assert float(metrics["policy_loss"]) == pytest.approx(expected.item(), rel=1e-8)
    assert float(metrics["regression"]) == pytest.approx(apart.mean().item(), rel=1e-8)
    assert float(metrics["tr/ratio_max"]) == pytest.approx(torch.where(counts, ratio, 1.0).max().item(), rel=1e-8)
    for parameter, gradient in zip(agent.policy.parameters(), gradients, strict=True):
        assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-9)


def test_golden_credit_of_bbrl() -> None:
    # Returns 3, 5 and 10 where V expects 1, 2 and 3: advantages 2, 3 and 7 have mean 4 and variance (4 + 1 + 9)/2 = 7.
    agent = learner("bbrl", episodes=3)
    episodes, _ = agent.sample()
    rewards = torch.zeros_like(episodes.rewards)
    rewards[:, 7] = torch.tensor([1.0, 4.0, 4.0])
    rewards[:, -1] = torch.tensor([2.0, 1.0, 6.0])
    agent.critic = lambda contexts: torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    credit = agent.credit(replace(episodes, rewards=rewards))
    assert_close(credit.advantages, torch.tensor([[-2.0], [-1.0], [3.0]], dtype=torch.float64) / 7**0.5, atol=1e-7)
    assert credit.targets.tolist() == [3, 5, 10]
    assert_close(credit.inputs, episodes.observations[:, 0])


def _pair_cov(rows: torch.Tensor, chol: torch.Tensor, jitter: torch.Tensor) -> torch.Tensor:
    kron = torch.kron(torch.eye(5, dtype=torch.float64), rows)
    return kron @ chol @ chol.mT @ kron.T + jitter[..., None, None] * torch.eye(10, dtype=torch.float64)


@pytest.mark.parametrize("algorithm", LEARNERS)
def test_the_same_seed_gives_the_same_run_and_another_another(algorithm: str) -> None:
    runs = [learner(algorithm, seed=seed, policy_epochs=3, critic_epochs=3).step() for seed in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert runs[0]["return"] != runs[2]["return"]


@pytest.mark.parametrize("envs", [16, 12])  # two full rounds; two and a third with eight of twelve
def test_fewer_environments_than_episodes_play_the_same_in_rounds(envs: int) -> None:
    at_once, in_rounds = learner("tce"), learner("tce", envs=envs)
    (whole, plans), (parts, same) = at_once.sample(), in_rounds.sample()
    for name in ("observations", "rewards", "mask", "actions", "success"):
        assert_close(getattr(parts, name).double(), getattr(whole, name).double())
    assert_close(same.params, plans.params)
    seeds = held_out_seeds(20)
    assert_close(in_rounds.evaluate(seeds).returns, at_once.evaluate(seeds).returns)


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_gymnasium_s_own_vector_environments_play_the_same(kind: type) -> None:
    envs = kind([lambda: gymnasium.make(NAME) for _ in range(2)])
    one, other = learner("tce", episodes=4, envs=envs), learner("tce", episodes=4)
    (episodes, _), (expected, _) = one.sample(), other.sample()
    one.plant.close()
    for name in ("observations", "rewards", "actions", "success"):
        assert_close(getattr(episodes, name), getattr(expected, name))


@pytest.mark.parametrize("contextual", [False, True])
@pytest.mark.parametrize("algorithm", LEARNERS)
def test_a_resumed_run_goes_on_as_if_never_stopped(algorithm: str, contextual: bool) -> None:
    settings = {"policy_epochs": 3, "critic_epochs": 3, "entropy_floor": -1.0, "contextual_covariance": contextual}
    settings |= {"episodes": 8, "normalise_contexts": contextual}
    whole = learner(algorithm, **settings)
    first = [whole.step() for _ in range(2)]
    file = io.BytesIO()
    torch.save(whole.state(), file)
    rest = [whole.step() for _ in range(2)]
    resumed = learner(algorithm, **settings)
    file.seek(0)
    resumed.restore(torch.load(file, weights_only=True))
    assert [resumed.step() for _ in range(2)] == rest
    assert first != rest


@pytest.mark.parametrize("algorithm", LEARNERS)
def test_a_state_stays_as_it_was_taken(algorithm: str) -> None:
    agent = learner(algorithm, episodes=4, policy_epochs=2, critic_epochs=2)
    agent.step()
    state = agent.state()
    once = agent.step()
    agent.restore(state)
    assert agent.step() == once
    agent.restore(state)
    assert agent.step() == once


@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    [("tce", torch.float64), pytest.param("tce", torch.float32, marks=pytest.mark.slow), ("bbrl", torch.float64)],
    ids=str,
)
def test_it_learns(algorithm: str, dtype: torch.dtype) -> None:
    agent = learner(algorithm, iterations=14, policy_epochs=15, critic_epochs=10, policy_rate=3e-3, cov_bound=0.01, dtype=dtype)
    seeds = held_out_seeds(32)
    before = agent.evaluate(seeds).returns.mean()
    for _ in range(14):
        metrics = agent.step()
    after = agent.evaluate(seeds).returns.mean()
    assert after > 0.6 * before, f"returns are negative: {before:.1f} → {after:.1f}"
    assert metrics["tr/unconverged"] == 0


@pytest.mark.parametrize("contextual", [False, True])
@pytest.mark.parametrize("projection", ["kl", "wasserstein", "frobenius"])
def test_the_projected_policy_stays_in_its_region(projection: str, contextual: bool) -> None:
    bounds = {"policy_rate": 1e-2, "mean_bound": 0.02, "cov_bound": 0.003, "contextual_covariance": contextual}
    agent = learner("tce", projection=projection, policy_epochs=12, episodes=8, **bounds)
    metrics = agent.step()
    assert metrics["tr/active_frac"] > 0
    assert metrics["tr/active_cov"] == 1
    assert metrics["tr/kl_after"] <= (0.02 + 0.003) * (1 + 1e-6)
    assert metrics["tr/unconverged"] == 0


def far_policy(agent: Learner) -> tuple[torch.Tensor, torch.Tensor, Plans]:
    """A policy with half the spread of the old one."""
    size = agent.prodmp.parameters
    old = Plans(*(torch.zeros(3, size, dtype=torch.float64) for _ in range(2)), torch.eye(size, dtype=torch.float64), (3,))
    return old.mean, 0.5 * old.chol, old


@pytest.mark.parametrize("inside", [True, False])
def test_the_entropy_floor_and_the_region(inside: bool) -> None:
    agent = learner("bbrl", iterations=4, entropy_floor=1.4, cov_bound=0.05, floor_in_region=inside)
    mean, chol, old = far_policy(agent)
    first = agent.first_entropy  # ½ log 2πe = 1.4189 per parameter, as many as there are
    assert first == pytest.approx(1.4189385 * agent.prodmp.parameters)
    for agent.iteration in (0, 2, 4, 9):
        share = min(1.0, agent.iteration / 4)
        floor = first + share * (1.4 * agent.prodmp.parameters - first)
        _, factor = agent.project(mean, chol, old)
        normal = MultivariateNormal(mean[0], scale_tril=factor)
        assert normal.entropy() >= floor - 1e-9
        kl = kl_divergence(normal, MultivariateNormal(mean[0], scale_tril=old.chol))
        assert kl <= 0.05 * (1 + 1e-6)  # a floor below the old entropy leaves room for both
    # A floor above the old entropy does not: of the two, the region gives way as published, the floor by default.
    object.__setattr__(agent.config, "entropy_floor", 2.0)
    _, factor = agent.project(mean, chol, old)
    normal = MultivariateNormal(mean[0], scale_tril=factor)
    kl = kl_divergence(normal, MultivariateNormal(mean[0], scale_tril=old.chol))
    assert (normal.entropy() >= 2.0 * agent.prodmp.parameters - 1e-9) != inside
    assert (kl <= 0.05 * (1 + 1e-6)) == inside


def test_an_equal_entropy_is_a_ceiling_too() -> None:
    # Half-way from log-deviation 0 to −1 (entropies 1.4189 and 0.4189 per parameter), whatever the network wants.
    last = 0.5 * math.log(2 * math.pi * math.e) - 1
    agent = learner("bbrl", iterations=4, entropy_floor=last, entropy_equal=True, cov_bound=10.0)
    mean, _, old = far_policy(agent)
    agent.iteration = 2
    for spread in (0.1, 0.5, 1.0, 2.0):
        factor = agent.project(mean, spread * old.chol, old)[1]
        assert_close(factor, math.exp(-0.5) * old.chol, rtol=1e-8)  # the first deviation is 1 up to the rounding of softplus
    many = torch.tensor([0.1, 0.5, 2.0])[:, None, None] * old.chol  # one for each context
    assert_close(agent.project(mean, many, old)[1], (math.exp(-0.5) * old.chol).expand(3, -1, -1), rtol=1e-8)


def test_a_critic_of_contexts_sees_no_states() -> None:
    agent = learner("tce", policy_epochs=1, critic_epochs=1, critic_inputs="context")
    episodes, plans = agent.sample()
    seen = agent.states(episodes).reshape(32, 100, -1)
    assert_close(seen[..., :-1], episodes.observations[:, :1].expand(-1, 100, -1))  # the first one, whatever happened since
    assert_close(seen[0, :, -1], torch.arange(100).double() / 100)
    agent.step()
    with torch.no_grad():  # A = rewards of the segment, less what V(context, time) expected of them
        agent.begin_batch(plans)
        values = agent.critic(seen)
        advantages = agent.credit(episodes).advantages
    a, b = agent.pairs[3].tolist()
    by_hand = episodes.rewards[:, a:b].sum(-1) + values[:, b] - values[:, a]
    correlation = torch.corrcoef(torch.stack([by_hand, advantages[:, 3]]))[0, 1]
    assert correlation == pytest.approx(1.0)  # they are normalised over the batch


def test_segments_lie_in_the_first_seconds_of_a_plan_and_what_is_paid_later_is_credited_still() -> None:
    whole, early = (learner("tce", policy_epochs=1, critic_epochs=1, points=5, segments_until=x) for x in (None, 0.8))
    episodes, plans = whole.sample()
    for agent in (whole, early):
        agent.begin_batch(plans)
    assert whole.pairs[:, 1].max() >= 80
    assert early.pairs.shape == (4, 2)
    assert early.pairs.max() < 40  # 0.8 s are 40 steps of 0.02 s, four segments of 8 in them
    assert (early.pairs[:, 1] - early.pairs[:, 0]).tolist() == [8] * 4
    with torch.no_grad():
        values, advantages = early.critic(episodes.observations[:, :-1]), early.credit(episodes).advantages
    (a, _), rewards = early.pairs[-1].tolist(), episodes.rewards
    by_hand = rewards[:, a:].sum(-1) - values[:, a]  # the last of them runs to the end
    assert torch.corrcoef(torch.stack([by_hand, advantages[:, -1]]))[0, 1] == pytest.approx(1.0)


def test_a_plan_at_rest_has_segments_of_its_goal_alone() -> None:
    # After 4 τ two plans with one goal and other weights have the same positions, and so the same likelihoods there.
    agent = learner("tce", points=5)
    plan = replace(agent.planner.prodmp, tau=0.5)
    rows = plan.design(agent.planner.times).position[torch.tensor([[5, 10], [90, 99]])]
    mean, chol = torch.zeros(2, 20, dtype=torch.float64), torch.eye(20, dtype=torch.float64)
    params = torch.zeros(2, 20, dtype=torch.float64)
    params[1, ::4] = 1.0  # the first weight of every joint
    moving, resting = segment_log_prob(rows, params, mean, chol, segment_jitter(rows, chol)).unbind(-1)
    assert (moving[0] - moving[1]).abs() > 0.1
    assert_close(resting[0], resting[1], atol=1e-3)


def test_a_critic_s_step_in_pieces_is_one_step_on_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, targets = torch.randn(7, 15, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    expected = (learner("tce", episodes=4).critic.value(inputs).squeeze(-1) - targets).square().mean().detach()
    found = []
    for piece in (3, 7):  # pieces of 3, 3 and 1 states
        monkeypatch.setattr("corral.robot.learner._PIECE", piece)
        agent = learner("tce", episodes=4)
        assert_close(agent.improve_critic(inputs, targets), expected)
        found.append(torch.cat([parameter.grad.flatten() for parameter in agent.critic.value.parameters()]))
    assert_close(*found)


@pytest.mark.parametrize("algorithm", LEARNERS)
def test_a_critic_in_float32_leaves_the_policy_in_float64(algorithm: str) -> None:
    settings = {"episodes": 8, "policy_epochs": 3, "critic_epochs": 3}
    agents = [learner(algorithm, critic_dtype=dtype, **settings) for dtype in (None, "float64", "float32")]
    metrics = [agent.step() for agent in agents]
    assert metrics[0] == metrics[1]
    assert {p.dtype for p in agents[2].critic.parameters()} == {torch.float32}
    assert {p.dtype for p in agents[2].policy.parameters()} == {torch.float64}
    assert 0 < abs(metrics[2]["critic_loss"] / metrics[0]["critic_loss"] - 1) < 1e-4
    for one, other in zip(agents[0].policy.parameters(), agents[2].policy.parameters(), strict=True):
        assert_close(one, other, atol=1e-4)


@pytest.mark.parametrize(
    ("decay_over", "left"),
    [(None, [1.0, 0.505, 0.01]), (4.0, [1.0, 0.7525, 0.505]), (math.inf, [1.0, 1.0, 1.0])],
)
def test_golden_learning_rates(decay_over: float | None, left: list[float]) -> None:
    # 1 − 0.99 k / K in batch k; K = 2 batches of the run, 4 whatever the run's length, or infinitely many.
    settings = {"iterations": 2, "policy_epochs": 1, "critic_epochs": 1, "policy_rate": 1e-3, "critic_rate": 2e-3}
    agent = learner("bbrl", episodes=4, decay_over=decay_over, **settings)
    for share in left:
        agent.step()
        rates = [optimizer.param_groups[0]["lr"] for optimizer in (agent.policy_optimizer, agent.critic_optimizer)]
        assert rates == pytest.approx([1e-3 * share, 2e-3 * share], rel=1e-12)


@pytest.mark.parametrize(("floor_over", "share"), [(None, 0.5), (8.0, 0.25), (1.0, 1.0)])
def test_golden_entropy_floor(floor_over: float | None, share: float) -> None:
    # After 2 batches of 4 the floor has gone 2 / 4 of the way, 2 / 8 if it falls over eight, and all of it if over one.
    agent = learner("bbrl", iterations=4, entropy_floor=3.0, entropy_equal=True, cov_bound=math.inf, floor_over=floor_over)
    plans = agent.sample()[1]
    agent.iteration = 2
    factor = agent.project(plans.mean, plans.chol, plans)[1]
    whole = 3.0 * agent.prodmp.parameters
    assert float(gaussian_entropy(factor)) == pytest.approx(
        agent.first_entropy + share * (whole - agent.first_entropy), rel=1e-9
    )


def test_a_critic_may_see_its_inputs_as_they_are() -> None:
    for normalised in (True, False):
        agent = learner("bbrl", episodes=8, policy_epochs=1, critic_epochs=1, normalise_critic=normalised)
        agent.step()
        contexts = agent.sample()[0].observations[:, 0]
        seen = agent.critic.normalise(contexts)
        if normalised:
            assert float(seen.mean(0).abs().max()) < 2  # about 0 in units of standard deviations
            assert float((seen - contexts).abs().max()) > 0.5
        else:
            assert_close(seen, contexts, rtol=1e-7)


def test_a_set_covariance_is_the_projected_one_and_moves() -> None:
    agent = learner("bbrl", set_covariance=True, policy_epochs=20, policy_rate=1e-2, cov_bound=0.002)
    old = agent.policy.cholesky().detach()
    agent.step()
    new = agent.policy.cholesky().detach()
    zero = torch.zeros(len(old), dtype=torch.float64)
    kl = kl_divergence(*(MultivariateNormal(zero, scale_tril=chol) for chol in (new, old)))
    assert float(kl) == pytest.approx(0.002, rel=1e-6)


def _perturb(agent: Learner, size: float) -> None:
    with torch.no_grad():
        for parameter in agent.policy.parameters():
            parameter.add_(size * torch.randn_like(parameter))


def test_golden_certificate_of_the_deployed_network() -> None:
    # 20 parameters, L_old = I. Means move by .1: ½ · 20 · .1² = .1. L_new = 1.1 I: ½ · 20 · (1.21 − 1 − ln 1.21) = .193796.
    agent = learner("tce")
    episodes, plans = agent.sample()
    context = episodes.observations[:, 0]
    assert agent.deployed_kl(context, plans).abs().max() < 1e-12
    with torch.no_grad():
        agent.policy.mean[-1].bias += 0.1
    assert_close(agent.deployed_kl(context, plans), torch.full((32,), 0.1, dtype=torch.float64), rtol=1e-7)
    agent.policy.set_cholesky(1.1 * torch.eye(20, dtype=torch.float64))
    assert_close(agent.deployed_kl(context, plans), torch.full((32,), 0.293796, dtype=torch.float64), rtol=1e-5)


@pytest.mark.parametrize("kind", [{}, {"set_covariance": True}, {"contextual_covariance": True}], ids=str)
@pytest.mark.parametrize("algorithm", LEARNERS)
def test_the_certificate_is_the_kl_of_what_is_deployed(algorithm: str, kind: dict[str, bool]) -> None:
    agent = learner(algorithm, episodes=8, policy_epochs=5, policy_rate=1e-2, cov_bound=0.002, **kind)
    episodes, plans = agent.sample()
    metrics = agent.improve(episodes, plans)
    with torch.no_grad():
        mean, chol = agent.policy(episodes.observations[:, 0])
    apart = kl_divergence(MultivariateNormal(mean, scale_tril=chol), MultivariateNormal(plans.mean, scale_tril=plans.chol))
    assert metrics["tr/deployed_kl_mean"] == pytest.approx(apart.mean().item(), rel=1e-9)
    assert metrics["tr/deployed_kl_max"] == pytest.approx(apart.max().item(), rel=1e-9)
    assert "tr/deployed_kl_p999" not in metrics  # of eight contexts it would be the largest
    assert (metrics["tr/step_share"], metrics["tr/deployed_probes"]) == (1.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_bound_holds_whatever_the_updates_do(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    agent = learner("bbrl", episodes=8, policy_epochs=1, critic_epochs=1, deployed_bound=0.01, dtype=dtype)
    improve = agent.improve_policy
    monkeypatch.setattr(agent, "improve_policy", lambda *given: (improve(*given), _perturb(agent, size))[0])
    for size in (1e-4, 0.1, 10.0, 1e6):
        episodes, plans = agent.sample()
        metrics = agent.improve(episodes, plans)
        assert agent.deployed_kl(episodes.observations[:, 0].to(dtype), plans).mean() <= 0.01
        assert metrics["tr/deployed_kl_mean"] <= 0.01
        assert metrics["tr/step_share"] == 1 if size == 1e-4 else metrics["tr/step_share"] < 1


def test_to_measure_changes_nothing() -> None:
    weights = []
    for bound in (float("inf"), 1e9):
        agent = learner("tce", episodes=8, policy_epochs=3, critic_epochs=1, deployed_bound=bound)
        agent.step()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in agent.policy.parameters()]))
    assert torch.equal(*weights)


def test_learning_rates_fall_linearly_and_stay_where_they_end() -> None:
    agent = learner("bbrl", episodes=2, iterations=2, policy_epochs=1, critic_epochs=1, policy_rate=1.0, critic_rate=2.0)
    rates = []
    for _ in range(4):
        agent.step()
        rates.append([optimizer.param_groups[0]["lr"] for optimizer in (agent.policy_optimizer, agent.critic_optimizer)])
    assert rates == [pytest.approx(pair) for pair in ([1.0, 2.0], [0.505, 1.01], [0.01, 0.02], [0.01, 0.02])]


def test_bbrl_s_critic_sees_contexts_alone() -> None:
    agent = learner("bbrl", policy_epochs=1, critic_epochs=1)
    agent.step()
    assert agent.critic.normaliser.count == 32
    assert agent.critic.normaliser.variance[-1] == 0  # the time


def test_tce_as_published_has_one_regulariser_per_policy() -> None:
    environment = ENVIRONMENTS[NAME]
    envs = gymnasium.make_vec(NAME, num_envs=4, vectorization_mode="vector_entry_point")
    config = TCEConfig.as_published(episodes=4, policy_epochs=2)
    agent = TCE(Plant(envs, environment.tracking, 100), ProDMP(5, 3, 2.0), environment.dt, config)
    _, plans = agent.sample()
    agent.begin_batch(plans)
    assert agent.jitter[0].unique().numel() > 1
    for chol in (plans.chol, 2 * plans.chol):
        largest = max(_pair_cov(rows, chol, torch.zeros(())).diag().max() for rows in agent.rows[0])
        expected = segment_log_prob(
            agent.rows[0], plans.params, plans.mean, chol, (1e-4 * largest).expand(len(agent.rows[0])).double()
        )
        assert_close(agent.log_prob(replace(plans, chol=chol)), expected)
    assert not config.closing_segment
    assert not config.floor_in_region
    assert TCEConfig.as_published(closing_segment=True).closing_segment
    assert agent.step()["tr/unconverged"] == 0


def test_as_published_what_rests_before_its_delay_does_not_set_the_regulariser() -> None:
    environment = ENVIRONMENTS[NAME]
    envs = gymnasium.make_vec(NAME, num_envs=2, vectorization_mode="vector_entry_point")
    config = TCEConfig.as_published(episodes=2)
    agent = TCE(Plant(envs, environment.tracking, 100), ProDMP(5, 3, 1.0, delay=0.7), environment.dt, config)
    _, plans = agent.sample()
    agent.begin_batch(plans)
    assert (agent.rows[0][0] == 0).all()  # nothing varies there
    largest = max(_pair_cov(rows, plans.chol, torch.zeros(())).diag().max() for rows in agent.rows[0])
    expected = segment_log_prob(
        agent.rows[0], plans.params, plans.mean, plans.chol, (1e-4 * largest).expand(len(agent.rows[0])).double()
    )
    assert_close(agent.log_prob(plans), expected)


def test_the_published_rule_leaves_the_last_reward_out() -> None:
    agents = [learner("tce", closing_segment=closing, policy_epochs=1, critic_epochs=1) for closing in (True, False)]
    for agent, seen in zip(agents, (True, False), strict=True):
        episodes, plans = agent.sample()
        agent.begin_batch(plans)
        bonus = torch.zeros_like(episodes.rewards)
        bonus[:3, -1] = 100.0
        paid = replace(episodes, rewards=episodes.rewards + bonus)
        with torch.no_grad():
            moved = not torch.equal(agent.credit(paid).advantages, agent.credit(episodes).advantages)
        assert moved == seen


@pytest.mark.parametrize("plans", [1, 2])
def test_every_segment_has_credit_for_what_is_paid_at_the_end(plans: int) -> None:
    # Paid in the last step alone, to the first plan: with λ = 0 that is the last segment's, with λ = 1 everybody's.
    for lam, credited in ((0.0, [False, True]), (1.0, [True, True])):
        agent = learner("tce", credit_lam=lam, plans_per_context=plans, policy_epochs=1, critic_epochs=1)
        episodes, drawn = agent.sample()
        agent.begin_batch(drawn)
        paid = torch.zeros_like(episodes.rewards)
        paid[0, -1] = 100.0
        agent.critic.value[-1].weight.data.zero_()  # a critic that expects nothing
        with torch.no_grad():
            found = agent.credit(replace(episodes, rewards=paid)).advantages[0]
        assert [bool(found[0] > 1), bool(found[-1] > 1)] == credited


def test_rewards_are_credited_to_the_event_that_earned_them() -> None:
    # A reward in the last step, and an event in step 40: told of it, the segment around step 40 is paid and the last is not.
    agents = [learner("tce", move_to_event=moved, policy_epochs=1, critic_epochs=1) for moved in (False, True)]
    for agent, step in zip(agents, (99, 40), strict=True):
        episodes, plans = agent.sample()
        agent.begin_batch(plans)
        bonus = torch.zeros_like(episodes.rewards)
        bonus[:3, -1] = 100.0
        event = torch.full((len(bonus),), 40.0, dtype=torch.float64)
        paid = replace(episodes, rewards=bonus, event=event)
        agent.critic.value[-1].weight.data.zero_()  # a critic that expects nothing: advantages are what segments were paid
        with torch.no_grad():
            found = agent.credit(paid)
        first, last = agent.pairs.unbind(-1)
        last = torch.where(last == last.max(), 100, last)  # the closing segment
        assert int(found.advantages[0].argmax()) == int(((first <= step) & (step < last)).nonzero()[0])
        assert found.targets.max() == pytest.approx(100.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_normalised_contexts_have_mean_0_and_deviation_1(dtype: torch.dtype) -> None:
    agent = learner("bbrl", episodes=8, normalise_contexts=True, dtype=dtype)
    contexts = torch.cat([torch.from_numpy(agent.plant.start(held_out_seeds(8000)[at : at + 8])) for at in range(0, 8000, 8)])
    seen = agent.policy.normalise(contexts.to(dtype))
    assert seen.dtype == dtype
    changes = contexts.std(0) > 0
    assert 0 < changes.sum() < len(changes)
    assert seen[:, changes].mean(0).abs().max() < 0.2  # of 256 contexts: 3 standard errors
    assert (seen[:, changes].std(0) - 1).abs().max() < 0.15
    assert seen[:, ~changes].abs().max() < 1e-6
    assert agent.critic.normaliser.count == 0  # nobody has learned from any of it


def test_segments_contexts_and_plans_are_drawn_apart() -> None:
    assert len({episode_seeds(3, 7, 1, purpose)[0] for purpose in range(6)}) == 6
    assert not set(held_out_seeds(256)) & set(episode_seeds(0, 0, 256))
    assert held_out_seeds(300)[:256] == held_out_seeds(256)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"episodes": 0}, "tce: `episodes` is a whole number ≥ 1; got 0"),
        ({"mean_bound": 0.0}, "`mean_bound` must be > 0"),
        ({"deployed_bound": 0.0}, "`deployed_bound` is a divergence and must be > 0"),
        ({"gamma": 1.5}, r"`gamma` must lie in \[0, 1\]"),
        ({"projection": "tv"}, "one of kl, wasserstein, frobenius; got 'tv'"),
        ({"hidden": ()}, "`hidden` holds at least one entry, each of which is a whole number ≥ 1; got "),
        ({"points": 1}, "`points` is a whole number ≥ 2"),
        ({"segments_until": 0.0}, "`segments_until` is a number of seconds and must be > 0, or None"),
        ({"jitter": 0.0}, "`jitter` must be > 0"),
        ({"regression": -1.0}, "`regression` must be finite and ≥ 0"),
        ({"std": 1e-5}, "0 < `min_std` < `std`"),
        ({"std": float("inf")}, "0 < `min_std` < `std`, both finite"),
        ({"std": "wide"}, "0 < `min_std` < `std`, both finite"),
        ({"policy_rate": float("inf")}, "`policy_rate` must be finite and > 0"),
        ({"regression": float("inf")}, "`regression` must be finite and ≥ 0"),
        ({"entropy_floor": float("inf")}, "`entropy_floor` is a finite number, or None; got inf"),
        ({"set_covariance": True, "contextual_covariance": True}, "with `contextual_covariance` there is one for each context"),
        ({"replan_every": 50, "plans_per_context": 4}, "those made on the way begin in contexts of their own"),
        ({"replan_every": 50, "normalise_contexts": True}, "the policy looks at states on the way too; got replan_every=50"),
        ({"replan_from": "here"}, "`replan_from` is one of desired, state"),
        ({"entropy_equal": True}, "`entropy_equal` needs an `entropy_floor` to end at; got None"),
        ({"critic_inputs": "plan"}, "`critic_inputs` is one of"),
        ({"critic_dtype": "bfloat16"}, "`critic_dtype` is one of"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        TCEConfig(**settings)


def test_segments_need_as_many_steps_as_they_have_ends() -> None:
    with pytest.raises(
        ValueError, match=r"25 ends of segments need as many steps, and `segments_until` has 20 of 0.02 s; got 0.4"
    ):
        learner("tce", segments_until=0.4)


def test_one_episode_alone_teaches_bbrl_nothing() -> None:
    with pytest.raises(ValueError, match=r"bbrl: `episodes` is a whole number ≥ 2 .*; got 1"):
        BBRLConfig(episodes=1)
    assert TCEConfig(episodes=1).episodes == 1  # its segments are compared with each other


def test_what_does_not_fit_the_episodes_is_refused_before_one_is_played() -> None:
    environment = ENVIRONMENTS[NAME]
    envs = gymnasium.make_vec(NAME, num_envs=2, vectorization_mode="vector_entry_point")
    plant = Plant(envs, environment.tracking, environment.steps)
    with pytest.raises(ValueError, match="the trajectory has 4 joints, the controller 5"):
        TCE(plant, ProDMP(4, 3, 2.0), environment.dt, TCEConfig())
    with pytest.raises(ValueError, match=r"must end by 6 τ \+ delay = 1.2 s; got 2 s"):
        TCE(plant, ProDMP(5, 3, 0.2), environment.dt, TCEConfig())
    with pytest.raises(ValueError, match="tce: `points` is at most the 100 steps of an episode; got 101"):
        TCE(plant, ProDMP(5, 3, 2.0), environment.dt, TCEConfig(points=101))
    with pytest.raises(ValueError, match="tce: `dt` is in seconds, finite and > 0; got 0"):
        TCE(plant, ProDMP(5, 3, 2.0), 0, TCEConfig())


def test_the_example_learns_in_150_lines() -> None:
    script = (Path(__file__).parents[2] / "examples" / "tce_in_150_lines.py").read_text()
    assert len(script.splitlines()) <= 150
    short = script.replace("EPISODES, ROUNDS, EPOCHS = 64, 60, 20", "EPISODES, ROUNDS, EPOCHS = 32, 20, 10")
    assert short != script
    done = subprocess.run([sys.executable, "-c", short], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.endswith(tuple("0123456789")) and " m " in line]
    assert [row[0] for row in rows] == ["32", "320", "640"]
    assert float(rows[-1][2]) > float(rows[0][2]) + 0.5, done.stdout  # the mean plans' return
    assert all(0 < float(row[-1]) <= 0.11 for row in rows)  # KL inside both bounds
