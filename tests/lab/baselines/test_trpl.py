"""TRPL: the projected surrogate by hand, against torch.distributions and finite differences; the network is certified."""

from dataclasses import replace
from typing import Any

import gymnasium
import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from corral.lab.baselines.stable import Baseline, BaselineConfig
from corral.lab.baselines.trpl import StepGaussian, _gaussian, trpl_loss
from corral.lab.environments import ENVIRONMENTS
from corral.robot.episode import Plant
from tolerance import assert_close

NAME = "corral/ViaPointReacher-v0"
REGION = BaselineConfig(projection="kl", mean_bound=0.02, cov_bound=0.005, regression=3.0)


def gaussian(mean: Any, std: Any) -> StepGaussian:
    return StepGaussian(torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64))


def test_golden_loss_outside_the_region() -> None:
    # Old N(0, 1), new N(1, 1) of one action, ε_μ = ½ · 0.2² = 0.02: π̃ = N(0.2, 1). At a = 1: log ρ = (1² − 0.8²)/2 = 0.18.
    # KL(new‖π̃) = 0.8²/2 = 0.32. L = 3 · 0.32 − e^0.18 · 2.
    new, old = gaussian([[1.0]], [1.0]), gaussian([[0.0]], [1.0])
    loss, metrics = trpl_loss(new, old, torch.tensor([[1.0]]).double(), torch.tensor([2.0]).double(), REGION)
    assert_close(loss, torch.tensor(0.96 - 2 * 1.1972173631218102, dtype=torch.float64))
    assert_close(metrics["tr/kl_before"], torch.tensor(0.5, dtype=torch.float64))
    assert_close(metrics["tr/kl_after"], torch.tensor(0.02, dtype=torch.float64))
    assert (metrics["tr/active_frac"], metrics["tr/active_cov"], metrics["tr/unconverged"]) == (1, 0, 0)


def batch(dtype: torch.dtype = torch.float64) -> tuple[StepGaussian, StepGaussian, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    old = StepGaussian(torch.randn(6, 3, dtype=dtype), torch.tensor([0.5, 1.0, 1.5], dtype=dtype))
    new = StepGaussian(old.mean + 0.3 * torch.randn(6, 3, dtype=dtype), old.std * torch.tensor([0.8, 1.1, 1.3], dtype=dtype))
    return new, old, old.mean + old.std * torch.randn(6, 3, dtype=dtype), torch.randn(6, dtype=dtype)


@pytest.mark.parametrize("projection", ["kl", "wasserstein", "frobenius"])
def test_gradient_is_that_of_finite_differences(projection: str) -> None:
    new, old, actions, advantages = batch()
    region = replace(REGION, projection=projection, regression=0.0)  # the regression's gradient stops at the projection

    def loss(mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
        return trpl_loss(StepGaussian(mean, std), old, actions, advantages, region)[0]

    assert torch.autograd.gradcheck(loss, (new.mean.requires_grad_(), new.std.requires_grad_()))
    assert loss(new.mean, new.std) != loss(old.mean, old.std)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_far_inside_the_region_it_is_the_plain_surrogate(dtype: torch.dtype) -> None:
    new, old, actions, advantages = batch(dtype)
    wide = replace(REGION, mean_bound=1e6, cov_bound=1e6)
    loss, metrics = trpl_loss(new, old, actions, advantages, wide)
    dists = [Independent(Normal(x.mean, x.std), 1) for x in (new, old)]
    ratio = (dists[0].log_prob(actions) - dists[1].log_prob(actions)).exp()
    assert_close(loss, -(ratio * advantages).mean())
    assert_close(metrics["tr/kl_before"], kl_divergence(*dists).mean(), atol=1e-5)
    assert metrics["regression"] == pytest.approx(0, abs=1e-6)


def test_half_precision_in_is_computed_in_float32() -> None:
    new, old, actions, advantages = batch(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = trpl_loss(new, old, actions, advantages, REGION)
    wide = [StepGaussian(x.mean.float(), x.std.float()) for x in (new, old)]
    expected = trpl_loss(*wide, actions.float(), advantages.float(), REGION)
    assert found[0].dtype == torch.float32
    assert torch.equal(found[0], expected[0])
    assert found[1]["tr/kl_after"] <= 0.025 * (1 + 1e-4)


def test_at_the_old_policy_the_gradient_is_the_policy_gradient() -> None:
    _, old, actions, advantages = batch()
    mean, std = old.mean.clone().requires_grad_(), old.std.clone().requires_grad_()
    loss, metrics = trpl_loss(StepGaussian(mean, std), old, actions, advantages, REGION)
    found = torch.autograd.grad(loss, (mean, std))
    plain = -(Independent(Normal(mean, std), 1).log_prob(actions) * advantages).mean()
    for one, expected in zip(found, torch.autograd.grad(plain, (mean, std)), strict=True):
        assert_close(one, expected)
    assert metrics["tr/ratio_max"] == 1


def agent(**settings: Any) -> Baseline:
    envs = gymnasium.make_vec(NAME, num_envs=4, vectorization_mode="vector_entry_point")
    config = BaselineConfig(**{"iterations": 4, "episodes": 4, "hidden": (16,), "epochs": 3, "minibatches": 4} | settings)
    return Baseline(Plant(envs, ENVIRONMENTS[NAME].tracking, 100), "sb3-trpl", config)


def test_a_step_reports_its_region_and_certifies_what_acts_next() -> None:
    learner = agent(rate=1e-2)
    found = learner.step()
    assert found["tr/active_frac"] > 0
    assert found["tr/kl_after"] <= (0.03 + 0.001) * (1 + 1e-4)
    assert found["tr/unconverged"] == 0
    model = learner.model
    states = model.rollout_buffer.to_torch(model.rollout_buffer.observations)
    with torch.no_grad():
        new, old = (_gaussian(policy, states) for policy in (model.policy, model.old_policy))
        apart = kl_divergence(*(Independent(Normal(x.mean, x.std), 1) for x in (new, old)))
    assert len(apart) == 400
    assert found["tr/deployed_kl_mean"] == pytest.approx(float(apart.mean()), rel=1e-4)
    assert found["tr/deployed_kl_max"] == pytest.approx(float(apart.max()), rel=1e-4)


def test_a_bound_on_what_acts_next_holds_and_leaves_the_critic_alone() -> None:
    free, held = agent(rate=1e-2), agent(rate=1e-2, deployed_bound=1e-3)
    assert free.step()["tr/deployed_kl_mean"] > 1e-3
    found = held.step()
    assert 0 < found["tr/step_share"] < 1
    assert found["tr/deployed_kl_mean"] <= 1e-3
    weights = [dict(one.model.policy.named_parameters()) for one in (free, held)]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]) == ("value_net" in name)


@pytest.mark.usefixtures("unchecked_shapes")
def test_impossible_settings_are_refused() -> None:
    for settings, sentence in (
        ({"projection": "tv"}, "`projection` is one of kl, wasserstein, frobenius; got 'tv'"),
        ({"mean_bound": 0.0}, "`mean_bound` must be > 0"),
        ({"deployed_bound": 0.0}, "`deployed_bound` is a divergence and must be > 0"),
        ({"regression": -1.0}, "`regression` must be finite and ≥ 0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            BaselineConfig(**settings)
