"""The hopper: its reward and its memory by hand, against fancy_gym, and the Gymnasium interface."""

from itertools import accumulate
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from corral.lab.environments import ENVIRONMENTS
from corral.lab.environments.hopper_jump import DOWN, DT, FALLING, FLYING, NEVER, STEPS, HopperJump, jump_reward, next_phase

NAME = "corral/HopperJump-v0"
FANCY = dict(np.load(Path(__file__).parent / "data" / "fancy_gym.npz"))
RECORDED = {
    "height": 1.2, "highest": 1.7, "distance": 0.4, "landing": 0.3, "healthy": True, "action": np.array([1.0, -0.5, 0.0]),
}  # fmt: skip


def test_golden_rewards() -> None:
    # Cost: 10⁻³ (1 + 0.25) = 0.00125. Sparse: 10 · 1.7 − 3 · 0.4 − 2 · 0.3 + 2 = 17.2. Dense: 3 · 1.2 − 3 · 0.4 + 1 = 3.4.
    assert jump_reward("sparse", **RECORDED, last=True) == pytest.approx(17.2 - 0.00125)
    assert jump_reward("sparse", **RECORDED, last=False) == pytest.approx(-0.00125)
    for last in (False, True):
        assert jump_reward("dense", **RECORDED, last=last) == pytest.approx(3.4 - 0.00125)
    assert jump_reward("sparse", **{**RECORDED, "healthy": False}, last=True) == pytest.approx(15.2 - 0.00125)


def test_a_landing_is_the_first_contact_after_the_foot_has_left_the_floor() -> None:
    contacts = [False, True, True, False, False, True, False, True]
    phases = list(accumulate(contacts, next_phase, initial=FALLING))
    assert phases == [0, 0, 1, 1, 2, 2, 3, 3, 3]  # falling, standing, flying, down for good


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_rewards_are_those_of_fancy_gym_on_its_own_episodes(kind: str) -> None:
    record = {name.removeprefix(f"{kind}_"): value for name, value in FANCY.items() if name.startswith(f"{kind}_")}
    phases = list(accumulate(map(bool, record["contact"]), next_phase, initial=FALLING))
    landed = phases.index(DOWN) - 1
    assert phases[landed] == FLYING
    for step in range(STEPS):
        expected = jump_reward(
            kind, height=record["height"][step], highest=record["height"][: step + 1].max(),  # type: ignore[arg-type]
            distance=record["distance"][step], landing=record["distance"][landed] if step >= landed else NEVER,
            healthy=bool(record["healthy"][step]), action=record["actions"][step], last=step == STEPS - 1,
        )  # fmt: skip
        assert expected == pytest.approx(record["reward"][step], abs=1e-12)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_it_moves_as_fancy_gyms_hopper_does_until_it_touches_the_floor(kind: str) -> None:
    env = HopperJump()
    env.reset(seed=0)
    env.copies.batch.qpos[0], env.copies.goal[0] = FANCY[f"{kind}_start"], float(FANCY[f"{kind}_goal"])
    env.copies.batch.forward()
    for step, expected in enumerate(FANCY[f"{kind}_states"]):
        observation = env.step(FANCY[f"{kind}_actions"][step])[0]
        if env.copies.contact()[0]:
            break
        np.testing.assert_allclose(observation[:12], expected, atol=1e-5)
        # fancy_gym's positions lag by a part of a step: at most 2.5 ms of 3 m/s.
        assert np.linalg.norm(env.copies.offset()[0]) == pytest.approx(FANCY[f"{kind}_distance"][step], abs=0.01)
    assert step > 15  # a fall of a quarter of a metre


def test_starts_lie_in_their_ranges() -> None:
    env = HopperJump()
    starts = np.array([env.reset(seed=seed)[0] for seed in range(300)])
    np.testing.assert_array_equal(starts[:, :3], np.tile([0.0, 1.5, 0.0], (300, 1)))
    low, high = [-0.5, -0.2, 0.0, 0.3], [0.0, 0.0, 0.785, 1.35]
    drawn = starts[:, [3, 4, 5, 14]]
    assert (drawn >= low).all()
    assert (drawn <= high).all()
    np.testing.assert_allclose(drawn.min(0), low, atol=0.02)
    np.testing.assert_allclose(drawn.max(0), high, atol=0.02)
    np.testing.assert_array_equal(starts[5], env.reset(seed=5)[0])


def test_the_sole_is_on_the_floor_when_the_hopper_stands() -> None:
    env = HopperJump()
    env.reset(seed=0)
    # Straight up: hip 0.2 m below the torso's centre, knee 0.45 m below, ankle 0.5 m, and the foot is 6 cm thick: 1.21 m.
    env.copies.batch.qpos[0, :] = [0, 1.21, 0, 0, 0, 0]
    env.copies.batch.forward()
    np.testing.assert_allclose(env.copies.offset()[0] + np.array([env.copies.goal[0], 0, 0]), 0, atol=1e-9)
    assert env.copies.contact()[0]
    env.copies.batch.qpos[0, 1] += 0.01
    env.copies.batch.forward()
    assert not env.copies.contact()[0]


JUMP = [
    [0.0, 0.0, 0.0], [1.23, -0.85, 0.79], [1.51, 1.88, -3.8], [1.35, 1.77, -0.26], [1.37, 0.04, -1.2], [1.02, -0.56, -0.76],
    [-0.48, -0.31, -1.6], [-0.61, 0.44, -1.91], [0.36, -2.5, 0.0],
]  # fmt: skip
"""Where hip, knee and ankle should be from their start, at nine equal times: found by a search for the goal of seed 0."""


def jump(reward: str = "sparse", **settings: bool) -> tuple[list[float], dict[str, float], np.ndarray]:
    """Rewards, the last info and the observations of an episode that follows `JUMP`."""
    env, tracking = gymnasium.make(NAME, reward=reward, **settings), ENVIRONMENTS[NAME].tracking
    observation, _ = env.reset(seed=0)
    plan = [np.interp(np.arange(STEPS), np.linspace(0, STEPS - 1, 9), points) for points in np.transpose(JUMP)]
    plan = observation[3:6] + np.stack(plan, -1)
    rewards, states = [], [observation]
    for step in range(STEPS):
        action = tracking.action(plan[step], np.zeros(3), observation).clip(-1, 1).astype(np.float32)
        observation, paid, terminated, truncated, info = env.step(action)
        assert (terminated, truncated) == (False, step == STEPS - 1)
        rewards.append(float(paid))
        states.append(observation)
    return rewards, info, np.array(states)


def test_a_jump_to_the_goal_succeeds_and_is_remembered_to_the_end() -> None:
    rewards, info, states = jump()
    assert info["success"] == 1
    assert info["max_height"] == pytest.approx(states[1:, 1].max())
    assert info["max_height"] > 1.7
    standing = np.flatnonzero(states[1:, 7] > 0.5)  # the torso rises: the push, and then the flight
    assert standing[0] < info["event"] < np.argmax(states[1:, 1]), "the foot leaves the floor before the highest point"
    assert states[-1, 1] < 0.5  # long over: it has fallen, and is not healthy
    assert max(rewards[:-1]) <= 0
    paid = 10 * info["max_height"] - 3 * info["goal_distance"] - 2 * info["landing_distance"]
    assert rewards[-1] == pytest.approx(paid, abs=4e-3)  # less the last action's cost
    np.testing.assert_allclose(states[:, -1], np.arange(STEPS + 1) / STEPS)
    dense, _, again = jump("dense")
    np.testing.assert_array_equal(again, states)  # the reward moves nothing, and a seed repeats itself
    heights, distances = again[1:, 1], np.linalg.norm(again[1:, 12:14], axis=-1)
    np.testing.assert_allclose(dense, 3 * heights - 3 * distances + (heights > 0.5), atol=4e-3)


def test_the_take_off_is_observed_if_asked_for() -> None:
    rewards, info, states = jump(takeoff=True)
    assert states[:, 15].tolist() == [float(step > info["event"]) for step in range(STEPS + 1)]
    plain = jump()
    np.testing.assert_array_equal(np.delete(states, 15, 1), plain[2])
    assert rewards == plain[0]


def test_success_needs_a_jump_and_a_landing_near_the_goal() -> None:
    env = HopperJump()
    env.reset(seed=0)
    for landing, highest, success in ((0.05, 1.7, 1), (0.15, 1.7, 0), (0.05, 1.55, 0), (NEVER, 1.7, 0)):
        env.copies.landing[:], env.copies.highest[:] = landing, highest
        assert env.copies.outcome()["success"] == [success]


def test_the_controller_follows_a_smooth_plan() -> None:
    # In the air: the torso held 3 m up, the legs swing 0.4 rad within half a second.
    env, tracking = HopperJump(), ENVIRONMENTS[NAME].tracking
    env.reset(seed=0)
    env.copies.batch.qpos[0, :] = [0, 3.0, 0, -0.6, -0.6, 0]
    env.copies.batch.forward()
    observation, worst = env.copies.observe()[0], 0.0
    for step in range(1, 61):
        time = step / 60
        plan = np.array([-0.6, -0.6, 0]) + 0.4 * (10 * time**3 - 15 * time**4 + 6 * time**5) * np.array([1, -1, 1])
        speed = 0.4 * (30 * time**2 - 60 * time**3 + 30 * time**4) / (60 * DT) * np.array([1, -1, 1])
        observation = env.step(tracking.action(plan, speed, observation))[0]
        worst = max(worst, float(np.abs(observation[3:6] - plan).max()))
    assert worst < 0.06


def test_it_is_a_gymnasium_environment_with_a_picture() -> None:
    env = gymnasium.make(NAME, render_mode="rgb_array")
    with pytest.warns(UserWarning, match="infinity"):  # velocities have no bound
        check_env(env.unwrapped)
    env.reset(seed=0)
    picture = env.render()
    assert (picture.shape, picture.dtype) == ((360, 480, 3), np.uint8)
    assert (np.abs(picture.astype(int) - [204, 153, 102]).sum(-1) < 30).sum() > 1000  # the hopper's own colour
    for _ in range(30):
        env.step(np.ones(3, np.float32))
    assert (env.render() != picture).any()


@pytest.mark.usefixtures("unchecked_shapes")
def test_an_unknown_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="'sparse' or 'dense'; got 'thin'"):
        HopperJump(reward="thin")  # type: ignore[arg-type]
