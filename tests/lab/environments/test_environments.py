"""The registry, and many copies at once: every form sees the same numbers."""

from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from corral.lab.environments import ENVIRONMENTS, make_envs
from corral.lab.environments.drawing import Camera
from corral.lab.environments.hopper_jump import HopperJumps
from corral.lab.environments.vector import Threads
from corral.lab.environments.via_point import ViaPointReachers
from corral.robot.episode import Plant

SIMULATED = ["corral/HopperJump-v0", "corral/BoxPushing-v0"]
OURS = ["corral/ViaPointReacher-v0", *SIMULATED]


@pytest.mark.parametrize("name", OURS)
def test_the_registry_tells_the_truth(name: str) -> None:
    known, env = ENVIRONMENTS[name], gymnasium.make(name)
    assert gymnasium.spec(name).max_episode_steps == known.steps
    assert env.metadata["render_fps"] == round(1 / known.dt)
    observation, _ = env.reset(seed=0)
    assert known.tracking.dof == env.action_space.shape[0]
    over, steps = False, 0
    while not over:
        assert observation[-1] == pytest.approx(steps / known.steps)  # the elapsed share comes last
        before = known.tracking.state(observation)
        observation, _, terminated, over, info = env.step(np.zeros(env.action_space.shape, np.float32))
        position, velocity = known.tracking.state(observation)
        # Velocities are those of the positions: the mean of both ends leads from one to the other, up to curvature.
        np.testing.assert_allclose(position - before[0], known.dt * (velocity + before[1]) / 2, atol=0.02)
        assert not terminated
        steps += 1
    assert steps == known.steps
    assert info["success"] in (0.0, 1.0)


@pytest.mark.parametrize("name", [*OURS, "Pendulum-v1"])
def test_threads_processes_and_one_after_another_agree(name: str) -> None:
    length = 3
    forms = [
        make_envs(name, 5, workers=2),
        make_envs(name, 5, workers=1),
        gymnasium.make_vec(name, 5, vectorization_mode="sync"),
        gymnasium.make_vec(name, 5, vectorization_mode="async"),
    ]
    assert [type(form) for form in forms[2:]] == [SyncVectorEnv, AsyncVectorEnv]
    actions = np.random.default_rng(0).uniform(-1, 1, (length, *forms[0].action_space.shape)).astype(np.float32)
    seen = []
    for form in forms:
        first, _ = form.reset(seed=7)
        steps = [form.step(action) for action in actions]
        again, _ = form.reset(seed=list(range(7, 12)))
        np.testing.assert_array_equal(first, again)
        seen.append((first, *(np.stack([step[part] for step in steps]) for part in range(4))))
        form.close()
    for other in seen[1:]:
        for one, two in zip(seen[0], other, strict=True):
            np.testing.assert_array_equal(one, two)
    alone = gymnasium.make(name)
    np.testing.assert_array_equal(alone.reset(seed=9)[0], seen[0][0][2])


@pytest.mark.parametrize(("name", "length"), [(SIMULATED[1], 100), ("Pendulum-v1", 200)])
def test_episodes_end_and_begin_anew_in_every_block(name: str, length: int) -> None:
    envs, plain = make_envs(name, 3, workers=2), gymnasium.make_vec(name, 3, vectorization_mode="sync")
    envs.reset(seed=0), plain.reset(seed=0)
    action = np.full(envs.action_space.shape, 0.1, np.float32)
    for step in range(1, length + 3):
        (observation, _, terminated, truncated, info), expected = envs.step(action), plain.step(action)
        np.testing.assert_array_equal(observation, expected[0])
        assert truncated.all() == (step == length)
        assert not terminated.any()
        assert set(info) <= set(expected[4])
        for key, value in info.items():
            np.testing.assert_allclose(value, expected[4][key], rtol=1e-12)
    assert name not in OURS or observation[0, -1] == 0.01  # one step into the next episode
    envs.close(), plain.close()


def test_some_begin_anew_and_the_others_go_on_in_every_block() -> None:
    forms = [make_envs("Pendulum-v1", 5, workers=workers) for workers in (1, 2, 5)]
    assert [type(form) for form in forms] == [SyncVectorEnv, Threads, Threads]
    some = np.array([False, False, False, True, False])  # nobody in the first of two blocks
    seen = []
    for envs in forms:
        before = envs.reset(seed=0)[0]
        after = envs.step(np.zeros((5, 1), np.float32))[0]
        seen.append(envs.reset(seed=list(range(10, 15)), options={"reset_mask": some})[0])
        seen.append(envs.step(np.zeros((5, 1), np.float32))[0])
        np.testing.assert_array_equal(seen[-2][~some], after[~some])
        assert not np.array_equal(seen[-2][some], before[some])
        envs.close()
    for index in range(2, 6):
        np.testing.assert_array_equal(seen[index], seen[index % 2])


def test_an_info_of_one_block_has_room_for_all() -> None:
    envs = make_envs("Pendulum-v1", 3, workers=2)
    joined = envs._join_infos([{}, {"success": np.array([1.0]), "_success": np.array([True])}])  # blocks of two and of one
    np.testing.assert_array_equal(joined["success"], [0, 0, 1])
    np.testing.assert_array_equal(joined["_success"], [False, False, True])
    envs.close()


@pytest.mark.parametrize("name", SIMULATED)
def test_plans_are_followed_in_them(name: str) -> None:
    known = ENVIRONMENTS[name]
    plant = Plant(make_envs(name, 2, workers=2), known.tracking, known.steps)
    context = plant.start([1, 2])
    start, _ = known.tracking.state(context)
    plan = np.repeat(start[:, None], known.steps, 1)
    episodes = plant.follow(context, plan, np.zeros_like(plan))
    assert episodes.mask.all()
    assert episodes.success.isfinite().all()
    assert episodes.observations.isfinite().all()
    plant.close()


def test_the_form_in_one_array_is_used_where_there_is_one() -> None:
    envs = make_envs("corral/ViaPointReacher-v0", 4, reward="sparse")
    assert isinstance(envs.unwrapped, ViaPointReachers)
    assert envs.unwrapped.reward == "sparse"
    assert isinstance(make_envs(SIMULATED[0], 2).unwrapped, HopperJumps)
    assert isinstance(make_envs("CartPole-v1", 2, workers=1), SyncVectorEnv)  # others' vector forms draw by other rules


def test_the_form_in_one_array_refuses_what_single_arms_refuse() -> None:
    with pytest.raises(TypeError, match="rewrad"):
        make_envs("corral/ViaPointReacher-v0", 4, rewrad="sparse")
    with pytest.raises(ValueError, match="episodes have 100 steps; got max_episode_steps=7"):
        make_envs("corral/ViaPointReacher-v0", 4, max_episode_steps=7)
    envs = make_envs("corral/ViaPointReacher-v0", 4)
    with pytest.raises(ValueError, match="one seed for each of 4 copies; got 3"):
        envs.reset(seed=[1, 2, 3])
    with pytest.raises(ValueError, match="copies start and end together"):
        envs.reset(options={"reset_mask": np.array([True, True, False, True])})
    envs.reset(options={"reset_mask": np.ones(4, bool)})


@pytest.mark.parametrize(("count", "workers"), [(0, None), (2, 0)])
def test_impossible_numbers_are_refused(count: int, workers: int | None) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make_envs(SIMULATED[0], count, workers=workers)


def test_a_camera_sees_right_and_up() -> None:
    # From the front x grows to the right and z upwards; from above, y does. A quarter turn further round, y grows to the right.
    front, above = (Camera(centre=(0, 0, 0), width=1, azimuth=0, elevation=e).axes for e in (0, 90))
    np.testing.assert_allclose(front, [[1, 0, 0], [0, 0, 1], [0, -1, 0]], atol=1e-12)
    np.testing.assert_allclose(above, [[1, 0, 0], [0, 1, 0], [0, 0, 1]], atol=1e-12)
    side = Camera(centre=(0, 0, 0), width=1, azimuth=90, elevation=0).axes
    np.testing.assert_allclose(side, [[0, 1, 0], [0, 0, 1], [1, 0, 0]], atol=1e-12)


def test_the_scene_travels_with_the_package() -> None:
    import corral.lab.environments

    assert (Path(corral.lab.environments.__file__).parent / "box_pushing.xml").exists()
