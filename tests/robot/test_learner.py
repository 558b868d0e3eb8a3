"""TCE and BBRL as wholes: equal policies have ratio 1, runs repeat and resume, both learn in seconds."""

from typing import Any

import gymnasium
import pytest
import torch

from corral.robot.bbrl import BBRL, BBRLConfig
from corral.robot.env import ENVIRONMENTS
from corral.robot.episode import Plant, episode_seeds
from corral.robot.learner import Learner
from corral.robot.prodmp import ProDMP
from corral.robot.tce import TCE, TCEConfig

NAME = "corral/ViaPointReacher-v0"
LEARNERS = {"tce": (TCE, TCEConfig), "bbrl": (BBRL, BBRLConfig)}


def learner(algorithm: str, *, seed: int = 0, episodes: int = 32, reward: str = "dense", **settings: Any) -> Learner:
    environment = ENVIRONMENTS[NAME]
    envs = gymnasium.make_vec(NAME, num_envs=episodes, vectorization_mode="vector_entry_point", reward=reward)
    plant = Plant(envs, environment.tracking, environment.steps)
    make, config = LEARNERS[algorithm]
    prodmp = ProDMP(5, 3, 2.0, alpha=10.0, auto_scale=True)
    return make(plant, prodmp, environment.dt, config(episodes=episodes, **settings), seed=seed)


@pytest.mark.parametrize("algorithm", LEARNERS)
def test_an_unchanged_policy_has_ratio_one(algorithm: str) -> None:
    agent = learner(algorithm, policy_epochs=1, critic_epochs=1)
    metrics = agent.step()  # metrics are of the first update, before it
    assert metrics["tr/ratio_max"] == pytest.approx(1.0, abs=1e-12)
    assert metrics["tr/kl_before"] == pytest.approx(0.0, abs=1e-14)
    assert metrics["tr/active_frac"] == metrics["tr/active_cov"] == 0


@pytest.mark.parametrize("algorithm", LEARNERS)
def test_the_same_seed_gives_the_same_run_and_another_another(algorithm: str) -> None:
    runs = [[learner(algorithm, seed=seed, policy_epochs=3, critic_epochs=3).step() for _ in range(1)] for seed in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert runs[0][0]["return"] != runs[2][0]["return"]


@pytest.mark.parametrize("algorithm", LEARNERS)
def test_a_resumed_run_goes_on_as_if_never_stopped(algorithm: str) -> None:
    settings = {"policy_epochs": 3, "critic_epochs": 3, "entropy_floor": -1.0}
    whole = learner(algorithm, **settings)
    first = [whole.step() for _ in range(2)]
    state = torch.load(_saved(whole.state()), weights_only=True)
    rest = [whole.step() for _ in range(2)]
    resumed = learner(algorithm, **settings)
    resumed.restore(state)
    assert [resumed.step() for _ in range(2)] == rest
    assert first != rest


def _saved(state: dict[str, Any]) -> Any:
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("algorithm", LEARNERS)
def test_it_learns(algorithm: str) -> None:
    agent = learner(algorithm, iterations=25, policy_epochs=15, critic_epochs=10, policy_rate=3e-3, cov_bound=0.01)
    seeds = episode_seeds(1234, 0, 32)
    before = agent.evaluate(seeds).returns.mean()
    for _ in range(25):
        agent.step()
    after = agent.evaluate(seeds).returns.mean()
    assert after > 0.6 * before, f"returns are negative: {before:.1f} → {after:.1f}"


@pytest.mark.parametrize("projection", ["kl", "wasserstein", "frobenius"])
def test_the_projected_policy_stays_in_its_region(projection: str) -> None:
    agent = learner("tce", projection=projection, policy_epochs=12, policy_rate=1e-2, mean_bound=0.02, cov_bound=0.003)
    metrics = agent.step()
    assert metrics["tr/active_frac"] > 0
    assert metrics["tr/active_cov"] == 1
    assert metrics["tr/kl_after"] <= (0.02 + 0.003) * (1 + 1e-6)
    assert metrics["tr/unconverged"] == 0


def test_the_entropy_floor_holds() -> None:
    agent = learner("bbrl", iterations=4, entropy_floor=1.0, policy_epochs=10, policy_rate=1e-2)
    for _ in range(4):
        floor = agent.floor()
        assert agent.step()["entropy"] >= floor - 1e-9
    assert agent.floor() == pytest.approx(agent.prodmp.parameters * 1.0)


def test_a_set_covariance_is_the_projected_one() -> None:
    agent = learner("bbrl", set_covariance=True, policy_epochs=20, policy_rate=1e-2, cov_bound=0.002)
    entropy = agent.step()["entropy"]
    chol = agent.policy.cholesky().detach()
    assert float(torch.distributions.MultivariateNormal(torch.zeros(len(chol)).double(), scale_tril=chol).entropy()) == (
        pytest.approx(entropy, abs=1e-9)
    )


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"episodes": 0}, "tce: `episodes` is a whole number ≥ 1; got 0"),
        ({"mean_bound": 0.0}, "`mean_bound` must be > 0"),
        ({"gamma": 1.5}, r"`gamma` must lie in \[0, 1\]"),
        ({"projection": "tv"}, "one of kl, wasserstein, frobenius; got 'tv'"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        TCEConfig(**settings)


def test_plan_and_controller_must_have_the_same_joints() -> None:
    environment = ENVIRONMENTS[NAME]
    envs = gymnasium.make_vec(NAME, num_envs=2, vectorization_mode="vector_entry_point")
    with pytest.raises(ValueError, match="the trajectory has 4 joints, the controller 5"):
        TCE(Plant(envs, environment.tracking, environment.steps), ProDMP(4, 3, 2.0), environment.dt, TCEConfig())
