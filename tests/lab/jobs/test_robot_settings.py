"""Settings of a robot's run: layers, tables per algorithm, and a sentence for every mistake."""

import json
from typing import Any

import pytest

from corral.lab.baselines.config import BaselineConfig
from corral.lab.cli.explain import field_docs
from corral.lab.jobs.robot.prepare import check_used, prepare, rehearse, used_by
from corral.lab.jobs.robot.settings import ALGORITHMS, Settings, check_flags, resolve
from corral.lab.jobs.robot.smoke import TRAINING
from corral.lab.jobs.robot.train import train
from corral.lab.run.settings import read_recipe, recipes
from corral.validate import RunError

SMALL: dict[str, Any] = {**TRAINING, "environment_config": {"reward": "sparse"}}


def test_later_layers_win_key_by_key() -> None:
    first = {"seed": 1, "prodmp": {"basis": 3, "tau": 1.0}, "learner": {"episodes": 8, "std": 0.3}}
    settings = resolve([first, {"seed": 2, "prodmp": {"tau": 2.0}, "learner": {"episodes": "16"}}])
    assert (settings.seed, settings.prodmp, settings.learner) == (2, {"basis": 3, "tau": 2.0}, {"episodes": 16, "std": 0.3})


def test_the_table_of_the_algorithm_in_force_is_the_learner_s() -> None:
    recipe = {"learner": {"episodes": 8}, "tce": {"points": 13}, "bbrl": {"std": 0.2}, "sb3-ppo": {"rate": 1e-4}}
    assert resolve([recipe]).learner == {"episodes": 8, "points": 13}
    assert resolve([recipe, {"algorithm": "bbrl"}]).learner == {"episodes": 8, "std": 0.2}
    assert resolve([recipe, {"algorithm": "sb3-ppo", "learner": {"rate": 1e-3}}]).learner == {"episodes": 8, "rate": 1e-3}
    assert resolve([recipe, {"algorithm": "sb3-sac"}]).learner == {"episodes": 8}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_settings_survive_being_saved(algorithm: str) -> None:
    settings = resolve([SMALL, {"algorithm": algorithm}])
    assert resolve([json.loads(json.dumps(settings.flat()))]) == settings


def test_what_is_asked_for_is_built() -> None:
    asked = {"prodmp": {"basis": 4, "auto_scale": True}, "learner": {"hidden": [8, 9], "points": 7}, "dtype": "float32"}
    agent = prepare(resolve([SMALL, asked]))
    assert (agent.prodmp.dof, agent.prodmp.basis, agent.prodmp.tau, agent.prodmp.auto_scale) == (5, 4, 2.0, True)
    assert (agent.config.hidden, agent.config.points, agent.config.iterations, agent.seed) == ((8, 9), 7, 2, 0)
    assert (agent.plant.envs.num_envs, agent.plant.envs.reward) == (4, "sparse")
    assert next(agent.policy.parameters()).dtype.itemsize == 4
    baseline = prepare(resolve([SMALL, {"algorithm": "sb3-ppo-gsde"}]))
    assert (baseline.name, baseline.config.minibatches, baseline.model.use_sde) == ("sb3-ppo-gsde", 4, True)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"iteration": 3}, "no setting `iteration`. Did you mean 'iterations'?"),
        ({"steps": 3}, "robots have no setting `steps`. Use iterations."),
        ({"objective": "troll"}, "robots have no setting `objective`. Use algorithm."),
        ({"iterations": 0}, "`iterations` is a whole number ≥ 1; got 0"),
        ({"workers": 0}, "`workers` is a whole number ≥ 1, or None; got 0"),
        ({"iterations": "many"}, "`iterations` is int; got 'many'"),
        ({"algorithm": "ppo"}, "`algorithm` is one of tce, bbrl, top_erl, sb3-ppo"),
        ({"dtype": "bfloat16"}, "`dtype` is one of float64, float32"),
        ({"learner": {"iterations": 3}}, "`learner.iterations` is decided by the run"),
        ({"prodmp": {"dof": 3}}, "`prodmp.dof` is decided by the environment"),
        ({"tce": 3}, "`tce` is a table of settings; got 3"),
        ({"learner": {"pionts": 3}}, "tce: there is no setting `pionts`. Did you mean 'points'?"),
        ({"learner": {"points": 2.5}}, "`tce.points` is int; got 2.5"),
        ({"learner": {"points": 1}}, "tce: `points` is a whole number ≥ 2"),
        ({"learner": {"points": 101}}, "tce: `points` is at most the 100 steps of an episode; got 101"),
        ({"learner": {"entropy_floor": "inf"}}, "tce: `entropy_floor` is a finite number, or None; got inf"),
        ({"prodmp": {"tau": 0.2}}, "ProDMP: `times` must end by 6 τ + delay = 1.2 s; got 2 s"),
        ({"learner": {"projection": "tv"}}, "`tce.projection` is one of kl, wasserstein, frobenius"),
        ({"algorithm": "bbrl", "learner": {"points": 3}}, "bbrl: there is no setting `points`"),
        ({"algorithm": "sb3-ppo", "learner": {"minibatches": 7}}, "do not divide into 7 minibatches"),
        ({"prodmp": {"bases": 3}}, "prodmp: there is no setting `bases`. Did you mean 'basis'?"),
        ({"prodmp": {"tau": 0.0}}, "ProDMP: `tau` must be finite and > 0"),
        ({"environment": "corral/ViaPoint-v0"}, "no environment 'corral/ViaPoint-v0'. Did you mean 'corral/ViaPointReacher-v0"),
        ({"environment_config": {"rewards": "dense"}}, "ViaPointReacher has no setting `rewards`. Did you mean 'reward'?"),
        ({"environment_config": {"reward": "none"}}, "`reward` is 'dense' or 'sparse'"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("unchecked_shapes")
def test_mistakes_get_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RunError) as refused:
        prepare(resolve([SMALL, changes]))
    assert sentence in str(refused.value)


def test_defaults_are_a_whole_run() -> None:
    assert resolve([]) == Settings()
    assert prepare(Settings()).config.episodes == 64


@pytest.mark.parametrize(
    ("algorithm", "key", "value", "owners"),
    [
        ("sb3-ppo", "noise_colour", 0.5, ": it belongs to sb3-ppo-pink, sb3-sac-pink."),
        ("sb3-ppo-pink", "mean_bound", 0.1, ": it belongs to tce, bbrl, top_erl, sb3-trpl."),
        ("sb3-sac", "minibatches", 8, ": it belongs to sb3-ppo, sb3-ppo-gsde, sb3-ppo-pink, sb3-trpl."),
        ("sb3-trpl", "gradient_steps", 8, ": it belongs to sb3-sac, sb3-sac-gsde, sb3-sac-pink."),
        ("sb3-ppo", "device", "cuda", ": it belongs to tce, bbrl, top_erl, sb3-sac, sb3-sac-gsde, sb3-sac-pink."),
        ("bbrl", "points", 3, ": it belongs to tce."),
        ("tce", "rate", 1e-3, ": it belongs to sb3-ppo, sb3-ppo-gsde,"),
    ],
)
def test_a_setting_of_another_algorithm_is_refused(algorithm: str, key: str, value: Any, owners: str) -> None:
    settings = resolve([SMALL, {"algorithm": algorithm, "learner": {key: value}}])
    for begin in (check_used, rehearse, train):
        with pytest.raises(RunError) as refused:
            begin(settings)  # type: ignore[operator]
        assert f"{algorithm}: there is no setting `{key}`" in str(refused.value)
        assert owners in str(refused.value)


def test_what_a_baseline_reads_is_what_its_settings_say() -> None:
    """Fields that not all baselines read begin their description with who does."""
    every = {name for name in ALGORITHMS if name.startswith("sb3-")}
    sac, pink = ({name for name in every if word in name} for word in ("sac", "pink"))
    readers = {"PPO and TRPL:": every - sac, "TRPL:": {"sb3-trpl"}, "SAC:": sac, "…": sac, "sb3-…-pink:": pink}
    for name, words in field_docs(BaselineConfig).items():
        said = next((found for begin, found in readers.items() if words.startswith(begin)), every)
        assert said == {algorithm for algorithm in every if name in used_by(algorithm)}, name


def test_rewards_move_only_to_an_event_that_is_told() -> None:
    moved = {"learner": {"move_to_event": True}}
    with pytest.raises(RunError, match=r"corral/ViaPointReacher-v0 tells of none; corral/HopperJump-v0 does"):
        check_used(resolve([SMALL, moved]))
    check_used(resolve([SMALL, moved, {"environment": "corral/HopperJump-v0"}]))
    check_used(resolve([SMALL, {"learner": {"move_to_event": False}}]))


@pytest.mark.parametrize(
    ("recipe", "flags", "sentence"),
    [
        ("via_point", {"algorithm": "sb3-ppo", "prodmp": {"basis": "8"}}, "`prodmp.basis` would change nothing"),
        ("via_point", {"algorithm": "sb3-ppo", "dtype": "float64"}, "`dtype` is float32 for sb3-ppo"),
        ("via_point_sparse", {"learner": {"critic_rate": "1e-3"}}, "with learner.plans_per_context=4 no critic is fitted"),
        ("via_point", {"learner": {"lam": "1", "plans_per_context": "2"}}, "`learner.lam` would change nothing"),
        ("via_point", {"learner": {"replan_from": "state"}}, "`learner.replan_from` would change nothing"),
        ("via_point", {"learner": {"floor_in_region": "false"}}, "`learner.floor_in_region` would change nothing"),
        ("via_point", {"learner": {"floor_over": "9"}}, "`learner.floor_over` would change nothing"),
    ],
)  # fmt: skip
def test_a_flag_that_would_change_nothing_is_refused(recipe: str, flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RunError) as refused:
        check_flags(resolve([read_recipe(recipe), flags]), flags)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    "flags",
    [
        {"prodmp": {"basis": "8"}, "dtype": "float64"},
        {"algorithm": "sb3-ppo", "dtype": "float32"},
        {"learner": {"plans_per_context": "1", "critic_rate": "1e-3"}},
        {"learner": {"entropy_floor": "0", "floor_in_region": "false"}},
        {"learner": {"replan_every": "50", "replan_from": "state", "plans_per_context": "1"}},
    ],
)
def test_flags_that_change_something_pass(flags: dict[str, Any]) -> None:
    check_flags(resolve([read_recipe("via_point_sparse"), flags]), flags)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_recipe_has_a_setting_that_its_algorithm_would_not_read(algorithm: str) -> None:
    for recipe in recipes("robot"):
        if not recipe.endswith("_published") or algorithm in ("tce", "bbrl"):
            check_used(resolve([read_recipe(recipe), {"algorithm": algorithm}]))
