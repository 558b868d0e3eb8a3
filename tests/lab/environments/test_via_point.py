"""The planar arm: its kinematics and rewards by hand, one arm against many, the Gymnasium interface."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import corral.lab.environments  # noqa: F401  # registers the ids
from corral.lab.environments.via_point import DT, STEPS, STRENGTH, ViaPointReachers, joints

NAME = "corral/ViaPointReacher-v0"


def arms(reward: str, angles: list[float], via: tuple[float, float], goal: tuple[float, float]) -> ViaPointReachers:
    state = ViaPointReachers(1, reward)  # type: ignore[arg-type]
    state.angles, state.via, state.goal = np.array([angles]), np.array([via]), np.array([goal])
    return state


def test_golden_kinematics() -> None:
    # Straight up, then a right turn of 90° at the third joint: two links up, three to the right.
    tip = joints(np.array([np.pi / 2, 0, -np.pi / 2, 0, 0]))
    np.testing.assert_allclose(tip[[0, 2, -1]], [[0, 0], [0, 2], [3, 2]], atol=1e-12)


@pytest.mark.parametrize("arms", [1, 3, 1024])
def test_the_tip_is_the_last_joint_to_the_bit(arms: int) -> None:
    angles = np.random.default_rng(0).normal(scale=2.0, size=(arms, 5))
    envs = ViaPointReachers(arms)
    envs.angles = angles
    np.testing.assert_array_equal(envs.distance(), np.linalg.norm(joints(angles)[:, -1] - envs.via, axis=-1))


def test_golden_step() -> None:
    # u = (0.5, 0, 0, 0, 0): q̇ = 40 · 0.02 · 0.5 = 0.4, q = 0.02 · 0.4 = 0.008; the whole arm turns by it.
    # tip = 5 (cos 0.008, sin 0.008); via-point at (5, 0): distance 2 · 5 · sin 0.004; r = −0.2 distance − 0.002 · 0.25.
    state = arms("dense", [0.0] * 5, via=(5.0, 0.0), goal=(0.0, 0.0))
    reward = state.step(np.array([[0.5, 0, 0, 0, 0]]))[1]
    np.testing.assert_allclose(state.velocities[0, 0], 0.4)
    np.testing.assert_allclose(state.angles[0, 0], 0.008)
    np.testing.assert_allclose(reward, -0.2 * 10 * np.sin(0.004) - 0.0005)


@pytest.mark.parametrize(("time", "paid"), [(48, False), (49, True), (50, False), (98, False), (99, True)])
def test_sparse_rewards_come_half_way_and_at_the_end(time: int, paid: bool) -> None:
    # At rest, straight along x: tip (5, 0). Via-point 1 m off, goal 2 m off.
    state = arms("sparse", [0.0] * 5, via=(4.0, 0.0), goal=(3.0, 0.0))
    state.time = time
    expected = (-10.0 if time < 50 else -20.0) if paid else 0.0
    np.testing.assert_allclose(state.step(np.zeros((1, 5)))[1], expected)


def test_dense_rewards_turn_to_the_goal_after_half_the_episode() -> None:
    state = arms("dense", [0.0] * 5, via=(4.0, 0.0), goal=(3.0, 0.0))
    rewards = [float(state.step(np.zeros((1, 5)))[1][0]) for _ in range(STEPS)]
    np.testing.assert_allclose(rewards, [-0.2] * 50 + [-0.4] * 50)


def test_a_hidden_goal_is_shown_half_way_and_nothing_else_changes() -> None:
    shown = [gymnasium.make(NAME, hidden_goal=hidden) for hidden in (False, True)]
    seen = [np.stack([env.reset(seed=3)[0], *(env.step(np.full(5, 0.1))[0] for _ in range(99))]) for env in shown]
    assert (seen[1][:50, 12:14] == 0).all()
    np.testing.assert_array_equal(seen[1][50:], seen[0][50:])
    np.testing.assert_array_equal(np.delete(seen[1], [12, 13], 1), np.delete(seen[0], [12, 13], 1))
    many = gymnasium.make_vec(NAME, 2, vectorization_mode="vector_entry_point", hidden_goal=True)
    np.testing.assert_array_equal(many.reset(seed=[3, 4])[0][0], seen[1][0])


def test_success_needs_both_points() -> None:
    for via, goal, success in (((4.8, 0), (4.8, 0), 1), ((4.8, 0), (4.7, 0), 0), ((4.7, 0), (4.8, 0), 0)):
        state = arms("dense", [0.0] * 5, via=via, goal=goal)
        for _ in range(STEPS):
            state.step(np.zeros((1, 5)))
        assert state.outcome()["success"] == success


@pytest.mark.parametrize(("touched", "success"), [(10, 1), (50, 1), (51, 0)])
def test_the_via_point_may_be_passed_at_any_moment_of_the_first_half(touched: int, success: int) -> None:
    # The tip is 1 m from both points but for one step at the via-point, and is at the goal in the end.
    state = arms("dense", [0.0] * 5, via=(4.0, 0.0), goal=(5.0, 0.0))
    for time in range(1, STEPS + 1):
        state.via = np.array([[5.0, 0.0] if time == touched else [4.0, 0.0]])
        state.step(np.zeros((1, 5)))
    assert state.outcome()["success"] == success
    assert state.outcome()["via_distance"] == pytest.approx(1.0 - success)
    state.reset(seed=0)
    state.step(np.zeros((1, 5)))
    assert state.outcome()["via_distance"] > 0.5, "a new episode remembers nothing"


def test_actions_are_clipped_as_motors_do() -> None:
    strong, full = (arms("dense", [0.0] * 5, (1, 1), (1, 1)) for _ in range(2))
    assert strong.step(np.full((1, 5), 9.0))[1] == full.step(np.ones((1, 5)))[1]
    np.testing.assert_allclose(strong.velocities, STRENGTH * DT)


@pytest.mark.parametrize("reward", ["dense", "sparse"])
def test_many_arms_move_as_single_ones_do(reward: str) -> None:
    single = gymnasium.make_vec(NAME, num_envs=3, vectorization_mode="sync", reward=reward)
    many = gymnasium.make_vec(NAME, num_envs=3, vectorization_mode="vector_entry_point", reward=reward)
    np.testing.assert_array_equal(single.reset(seed=5)[0], many.reset(seed=5)[0])
    actions = np.random.default_rng(0).uniform(-1, 1, (STEPS + 2, 3, 5)).astype(np.float32)
    for index, action in enumerate(actions):  # past the end: both start anew on the step after the last
        (seen, reward_seen, *over, info), (expected, reward_expected, *over_expected, info_expected) = (
            many.step(action),
            single.step(action),
        )
        np.testing.assert_array_equal(seen, expected)
        np.testing.assert_allclose(reward_seen, reward_expected, atol=1e-15)
        np.testing.assert_array_equal(over, over_expected)
        if index == STEPS - 1:
            assert all(over[1])
            np.testing.assert_array_equal(info["success"], info_expected["success"])


def test_it_is_a_gymnasium_environment_with_a_picture() -> None:
    env = gymnasium.make(NAME, render_mode="rgb_array")
    with pytest.warns(UserWarning, match="infinity"):  # velocities have no bound
        check_env(env.unwrapped)
    env.reset(seed=0)
    picture = env.render()
    assert picture.shape == (480, 480, 3)
    assert picture.dtype == np.uint8
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 3  # an arm and two points on white


def test_points_can_be_reached_and_lie_on_their_sides() -> None:
    many = gymnasium.make_vec(NAME, num_envs=500, vectorization_mode="vector_entry_point")
    observation = many.reset(seed=0)[0]
    via, goal = observation[:, 10:12], observation[:, 12:14]
    for points in (via, goal):
        radius = np.linalg.norm(points, axis=-1)
        assert (radius >= 1.5).all()
        assert (radius <= 4).all()
        assert (points[:, 1] >= 0).all()
    assert (via[:, 0] >= 0).all()
    assert (goal[:, 0] <= 0).all()


@pytest.mark.usefixtures("unchecked_shapes")
def test_an_unknown_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="'dense' or 'sparse'; got 'thin'"):
        ViaPointReachers(1, "thin")  # type: ignore[arg-type]
