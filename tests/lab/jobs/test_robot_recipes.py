"""Recipes for robots: one screen each, every algorithm runs from them, and published ones say what was published."""

import math
from importlib.util import find_spec
from pathlib import Path

import pytest

from corral.lab.jobs.robot.prepare import learner_config, prepare
from corral.lab.jobs.robot.settings import ALGORITHMS, EPISODIC, check_flags, resolve
from corral.lab.jobs.robot.smoke import TRAINING
from corral.lab.jobs.robot.train import train
from corral.lab.run.settings import RECIPES, read_recipe, recipes
from corral.robot.config import AS_PUBLISHED
from corral.robot.tce import TCEConfig
from corral.validate import RunError

NAMES = [name for name in sorted(recipes("robot")) if "metaworld" not in name or find_spec("metaworld")]
OURS = [name for name in NAMES if not name.endswith("_published")]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_fits_on_a_screen_and_runs(name: str, tmp_path: Path) -> None:
    assert len((RECIPES / "robot" / f"{name}.toml").read_text().splitlines()) <= 46
    outcome = train(resolve([read_recipe(name), TRAINING]), out=tmp_path / "run", quiet=True)
    assert (outcome.summary["stopped"], outcome.summary["steps"]) == ("finished", 2)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", OURS)
def test_every_algorithm_has_settings_in_every_recipe(name: str, algorithm: str) -> None:
    settings = resolve([read_recipe(name), {"algorithm": algorithm, "workers": 1}])
    agent = prepare(settings)
    assert agent.config.iterations == settings.iterations
    assert agent.config.episodes == settings.learner["episodes"], "all learn from equally many steps"
    agent.plant.close()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OURS])
def test_published_recipes_have_the_published_rules(name: str) -> None:
    config = prepare(resolve([read_recipe(name), {"workers": 1}])).config
    assert {key: getattr(config, key) for key in AS_PUBLISHED["tce"]} == AS_PUBLISHED["tce"]


def test_published_sizes() -> None:
    # Interactions in total, as published: 3000 × 64 × 250 = 48 million, 7500 × 152 × 100 = 114 million.
    for name, steps, total, parameters in (("hopper_jump", 250, 48e6, 12), ("box_pushing", 100, 114e6, 63)):
        agent = prepare(resolve([read_recipe(f"{name}_published"), {"workers": 1}]))
        assert agent.plant.steps == steps
        assert agent.config.iterations * agent.config.episodes * steps == total
        assert agent.prodmp.parameters == parameters


@pytest.mark.parametrize("name", ["metaworld", "metaworld_published"])
def test_metaworld_s_recipes_fit_and_have_the_published_trajectory(name: str) -> None:
    # The environment is not here; what can be said without it: 4 joints × (8 weights + goal) = 36 parameters.
    assert len((RECIPES / "robot" / f"{name}.toml").read_text().splitlines()) <= 46
    settings = resolve([read_recipe(name)])
    assert 4 * (settings.prodmp["basis"] + 1) == 36
    for algorithm in EPISODIC:
        learner_config(resolve([read_recipe(name), {"algorithm": algorithm}]))


def test_metaworld_as_published() -> None:
    # 7600 × 16 × 500 = 60.8 million interactions.
    config = learner_config(resolve([read_recipe("metaworld_published")]))
    assert {key: getattr(config, key) for key in AS_PUBLISHED["tce"]} == AS_PUBLISHED["tce"]
    assert config.iterations * config.episodes * 500 == 60_800_000
    assert (config.policy_epochs, config.critic_epochs, config.mean_bound, config.cov_bound) == (50, 50, 0.005, 0.0005)
    assert (config.entropy_floor, config.decay_over, config.floor_over) == (0.0, 10_000, 7600)


@pytest.mark.parametrize("name", ["box_pushing_published", "metaworld_published"])
def test_bbrl_as_published_has_constant_rates_and_raw_contexts(name: str) -> None:
    config = learner_config(resolve([read_recipe(name), {"algorithm": "bbrl"}]))
    assert (config.decay_over, config.normalise_critic, config.set_covariance) == (math.inf, False, True)


def test_a_recipe_that_is_none() -> None:
    with pytest.raises(RunError, match=r"no recipe 'via_pont'\. Did you mean 'via_point'\?"):
        read_recipe("via_pont")


@pytest.mark.parametrize("algorithm", ["tce", "bbrl"])
def test_a_switch_takes_the_published_rules(algorithm: str) -> None:
    ours = resolve([read_recipe("via_point"), {"algorithm": algorithm}])
    published = resolve([read_recipe("via_point"), {"algorithm": algorithm, "as_published": "true"}])
    assert published == resolve([read_recipe("via_point_published"), {"algorithm": algorithm}])
    assert published.learner == ours.learner | AS_PUBLISHED[algorithm]
    assert resolve([published.flat()]) == published, "what a run keeps is the rules themselves"
    assert resolve([read_recipe("via_point"), {"algorithm": algorithm, "as_published": False}]) == ours
    config = learner_config(published)
    assert {key: getattr(config, key) for key in AS_PUBLISHED[algorithm]} == AS_PUBLISHED[algorithm]


def test_the_switch_and_the_settings_have_the_same_rules() -> None:
    assert TCEConfig.as_published() == TCEConfig(**AS_PUBLISHED["tce"])
    with pytest.raises(RunError, match="`as_published` would change nothing: it is for tce and bbrl, not for sb3-ppo"):
        check_flags(resolve([read_recipe("via_point"), {"algorithm": "sb3-ppo"}]), {"as_published": "true"})
