"""Box pushing: rewards by hand and against fancy_gym, kinematics by Denavit and Hartenberg, the motion, the interface."""

from pathlib import Path

import gymnasium
import mujoco
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from numpy.typing import NDArray

from corral.lab.environments import ENVIRONMENTS
from corral.lab.environments.box_pushing import (
    APART,
    DOWN,
    DT,
    HIGH,
    LOW,
    REGION,
    STEPS,
    UNSTABLE,
    BoxPushing,
    BoxPushings,
    limit_excess,
    planar_pose,
    push_reward,
    rotation_distance,
    seen_from,
)

NAME = "corral/BoxPushing-v0"
KINDS = ["dense", "temporal_sparse", "temporal_spatial_sparse"]
FANCY = dict(np.load(Path(__file__).parent / "data" / "fancy_gym.npz"))
TRACKING = ENVIRONMENTS[NAME].tracking
UNTURNED = [1.0, 0.0, 0.0, 0.0]
# Joints in their ranges, 1 rad/s; the box 8 cm from its target and a quarter turn about z off; the tip 10 cm above it.
STATE = {
    "q": np.array([0, 0, 0, -1.5, 0, 1.5, 0.0]), "velocity": np.array([1.0, 0, 0, 0, 0, 0, 0]),
    "box": np.array([0.4, 0.0, 0.0, *UNTURNED]), "target": np.array([0.48, 0.0, 0.0, np.sqrt(0.5), 0, 0, np.sqrt(0.5)]),
    "tip": np.array([0.4, 0.0, 0.1]), "rod": DOWN, "torque": np.array([10.0, 0, 0, 0, 0, 0, 0]),
}  # fmt: skip


def test_golden_rewards() -> None:
    # d = 0.1, p = 0.08, θ = π/2, ‖u‖² = 100, no limit exceeded, rod upright.
    # dense: −0.2 − 3.5 · 0.08 − 0.5 − 0.05 = −1.03; the sparse ones in the middle: −0.2 − 0.02 · 100 = −2.2.
    # temporal_sparse at the end: −2.2 − 28 − 50 − 50 = −130.2.
    # temporal_spatial_sparse: 1050 · 0.08 = 84, 150 · 0.5 = 75: −2.2 + 300 − 84 − 75 = 138.8.
    for last in (False, True):
        assert push_reward("dense", **STATE, last=last) == pytest.approx(-1.03)
    assert push_reward("temporal_sparse", **STATE, last=False) == pytest.approx(-2.2)
    assert push_reward("temporal_sparse", **STATE, last=True) == pytest.approx(-130.2)
    assert push_reward("temporal_spatial_sparse", **STATE, last=False) == pytest.approx(-2.2)
    assert push_reward("temporal_spatial_sparse", **STATE, last=True) == pytest.approx(138.8)


def test_golden_branches() -> None:
    # Too near counts as 5 cm: −0.1 instead of −0.2. A rod tilted by 60° costs a third, by 40° nothing. Far off, no bonus; and
    # both parts of the bonus are cut at 100: p = 0.099 → 103.95 and θ = π → 150, so −2.2 + 300 − 200 = 97.8.
    assert push_reward("dense", **{**STATE, "tip": np.array([0.4, 0.0, 0.01])}, last=False) == pytest.approx(-0.93)
    for degrees, cost in ((60, 1 / 3), (40, 0.0)):
        half = np.radians(degrees) / 2
        rod = np.array([np.sin(half), np.cos(half), 0.0, 0.0])
        assert push_reward("dense", **{**STATE, "rod": rod}, last=False) == pytest.approx(-1.03 - cost)
    far = {**STATE, "target": STATE["target"] + np.array([0.1, 0, 0, 0, 0, 0, 0])}
    assert push_reward("temporal_spatial_sparse", **far, last=True) == pytest.approx(-2.2)
    cut = {**STATE, "target": np.array([0.499, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])}
    assert push_reward("temporal_spatial_sparse", **cut, last=True) == pytest.approx(97.8)


def test_golden_limits() -> None:
    # 0.1 above joint 1's limit, 0.2 below joint 4's, and velocities 0.5 and 0.39 beyond theirs, either sign: 1.19.
    q, velocity = STATE["q"].copy(), np.array([2.675, 0, 0, 0, 0, 0, -3.0])
    q[0], q[3] = 2.9973, -3.2718
    assert limit_excess(q, velocity) == pytest.approx(0.1 + 0.2 + 0.5 + 0.39)
    assert limit_excess(STATE["q"], STATE["velocity"]) == 0
    without = push_reward("dense", **{**STATE, "velocity": np.zeros(7)}, last=False)
    assert push_reward("dense", **{**STATE, "q": q, "velocity": velocity}, last=False) == pytest.approx(without - 1.19)


def test_rotation_distance_by_hand() -> None:
    quarter = np.array([np.sqrt(0.5), 0, 0, np.sqrt(0.5)])
    assert rotation_distance(np.array(UNTURNED), quarter) == pytest.approx(np.pi / 2)
    assert rotation_distance(-quarter, quarter) == pytest.approx(0, abs=1e-7)  # one orientation, two quaternions
    assert rotation_distance(quarter * (1 + 1e-9), quarter) == 0  # rounding does not leave the domain of arccos


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("last", [False, True])
def test_rewards_are_those_of_fancy_gym_on_the_same_states(kind: str, last: bool) -> None:
    expected = FANCY[f"box_{kind}_{'last' if last else 'middle'}"]
    states = [{name: FANCY[f"box_{name}"][index] for name in STATE} for index in range(len(expected))]
    seen = [push_reward(kind, **state, last=last) for state in states]
    np.testing.assert_allclose(seen, expected, atol=1e-10)
    distances = [np.linalg.norm(state["box"][:3] - state["target"][:3]) for state in states]
    assert min(distances) < 0.05 < 0.1 < max(distances)  # both sides of the bonus are among them


def hand_by_denavit_hartenberg(q: NDArray[np.floating]) -> NDArray[np.floating]:
    """The flange's pose [4 4] from Franka's table (Craig's convention): a, d, α of each joint, then the flange."""
    table = [
        (0, 0.333, 0),
        (0, 0, -1),
        (0, 0.316, 1),
        (0.0825, 0, 1),
        (-0.0825, 0.384, -1),
        (0, 0, 1),
        (0.088, 0, 1),
        (0, 0.107, 0),
    ]
    pose = np.eye(4)
    for (a, d, quarter), theta in zip(table, [*q, 0.0], strict=True):
        c, s, ca, sa = np.cos(theta), np.sin(theta), float(quarter == 0), float(quarter)
        pose = pose @ np.array([[c, -s, 0, a], [s * ca, c * ca, -sa, -d * sa], [s * sa, c * sa, ca, d * ca], [0, 0, 0, 1]])
    return pose


def test_kinematics_are_frankas() -> None:
    env, rng = BoxPushing(), np.random.default_rng(0)
    env.reset(seed=0)
    for q in rng.uniform(LOW, HIGH, (20, 7)):
        env.copies.batch.qpos[0, :7] = q
        env.copies.batch.forward()
        hand = hand_by_denavit_hartenberg(q)
        np.testing.assert_allclose(env.copies.first().body("hand").xpos, hand[:3, 3], atol=1e-6)
        # The hand is turned by −45° about the flange's axis; the tip is 20 cm along it.
        np.testing.assert_allclose(env.copies.first().body("hand").xmat.reshape(3, 3)[:, 2], hand[:3, 2], atol=1e-6)
        np.testing.assert_allclose(env.copies.first().site("tip").xpos, hand[:3, 3] + 0.2 * hand[:3, 2], atol=1e-6)


def test_limits_are_frankas() -> None:
    model = BoxPushing().copies.model
    np.testing.assert_allclose(model.jnt_range[:7], np.stack([LOW, HIGH], -1))
    np.testing.assert_allclose(model.actuator_ctrlrange[:, 1], [87] * 4 + [12] * 3)


def test_contexts_lie_in_the_region_apart_from_each_other_and_within_reach() -> None:
    env = BoxPushing()
    starts = np.array([env.reset(seed=seed)[0] for seed in range(400)])
    box, target = starts[:, 14:16], starts[:, 21:23]
    for places in (box, target):
        assert ((places >= REGION[0]) & (places <= REGION[1])).all()
    assert np.linalg.norm(box - target, axis=-1).min() >= APART
    np.testing.assert_allclose(box.min(0), REGION[0], atol=0.02)
    np.testing.assert_allclose(box.max(0), REGION[1], atol=0.02)
    assert ((starts[:, :7] > LOW) & (starts[:, :7] < HIGH)).all()
    yaw = np.degrees(2 * np.arctan2(starts[:, 20], starts[:, 17])) % 360
    assert np.histogram(yaw, 4, (0, 360))[0].min() > 70
    np.testing.assert_array_equal(starts[7], env.reset(seed=7)[0])


@pytest.mark.parametrize("corner", [(x, y) for x in REGION[:, 0] for y in REGION[:, 1]])
def test_the_arm_starts_with_an_upright_rod_in_the_box(corner: tuple[float, float]) -> None:
    env = BoxPushing()
    env.reset(seed=0)
    env.copies.batch.qpos[0, :7] = env.copies.joints_above(np.array([*corner, -0.01]))
    env.copies.batch.forward()
    np.testing.assert_allclose(env.copies.first().site("tip").xpos, [*corner, 0.045], atol=2e-5)
    assert rotation_distance(env.copies.first().body("hand").xquat, DOWN) < 1e-4


def test_without_torque_everything_stays_where_it_is() -> None:
    env = BoxPushing()
    start, _ = env.reset(seed=3)
    for _ in range(STEPS):
        observation, _, _, over, info = env.step(np.zeros(7))
    np.testing.assert_allclose(observation[:28], start[:28], atol=1e-3)
    assert over
    assert info["success"] == 0
    assert info["distance"] == pytest.approx(np.linalg.norm(start[14:17] - start[21:24]), abs=1e-3)


def follow(env: BoxPushing, plan: NDArray, speed: NDArray) -> NDArray:
    """States [T 21] under the controller: angles, velocities, box."""
    states, observation = [], env.copies.observe()[0]
    for position, velocity in zip(plan, speed, strict=True):
        observation = env.step(TRACKING.action(position, velocity, observation))[0]
        states.append(observation[:21])
    return np.array(states)


def test_a_push_moves_box_and_joints_as_in_fancy_gym() -> None:
    # Same start, same plan, same gains; masses, shapes and the simulator's version differ.
    env = BoxPushing()
    env.reset(seed=0)
    start = FANCY["motion_start"]
    env.copies.batch.qpos[0, :7], env.copies.batch.qpos[0, 7:] = start[:7], start[14:21]
    env.copies.batch.forward()
    states, expected = follow(env, FANCY["motion_plan"], FANCY["motion_plan_velocity"]), FANCY["motion_states"]
    moved = states[-1, 14:16] - start[14:16]
    assert np.linalg.norm(expected[-1, 14:16] - start[14:16]) > 0.25
    np.testing.assert_allclose(moved, expected[-1, 14:16] - start[14:16], atol=0.03)
    np.testing.assert_allclose(states[:, :7], expected[:, :7], atol=0.1)


def test_dynamics_are_near_fancy_gyms() -> None:
    env = BoxPushing()
    env.reset(seed=0)
    env.copies.batch.qpos[0, :7] = FANCY["motion_posture"]
    env.copies.batch.forward()
    inertia = np.zeros(7)
    for joint in range(7):
        column = np.zeros(env.copies.model.nv)
        mujoco.mj_mulM(env.copies.model, env.copies.first(), column, np.eye(env.copies.model.nv)[joint])
        inertia[joint] = column[joint]
    np.testing.assert_allclose(inertia, FANCY["motion_inertia"], rtol=0.2)
    np.testing.assert_allclose(env.copies.first().qfrc_bias[:7], FANCY["motion_gravity"], atol=1.5)
    np.testing.assert_allclose(env.copies.first().site("tip").xpos, FANCY["motion_tip"], atol=1e-6)
    assert rotation_distance(env.copies.first().body("hand").xquat, FANCY["motion_rod"]) < 1e-5


def test_the_controller_follows_a_smooth_plan() -> None:
    # The box put aside, 0.3 rad in two seconds. The published gains are soft: 12 N·m per radian and no damping of the joints.
    env = BoxPushing()
    env.reset(seed=0)
    env.copies.batch.qpos[0, 7:9] = [0.7, 0.7]
    env.copies.batch.forward()
    time = np.arange(1, STEPS + 1) / STEPS
    change = 0.3 * np.array([1, -1, 1, 1, -1, 1, 1])
    plan = env.copies.observe()[0][:7] + (10 * time**3 - 15 * time**4 + 6 * time**5)[:, None] * change
    speed = (30 * time**2 - 60 * time**3 + 30 * time**4)[:, None] / (STEPS * DT) * change
    error = np.abs(follow(env, plan, speed)[:, :7] - plan)
    assert error.max() < 0.15
    assert np.sqrt(np.square(error).mean()) < 0.05


def test_exceeding_a_limit_is_penalised() -> None:
    env = BoxPushing()
    env.reset(seed=0)
    for _ in range(5):
        observation, reward, *_ = env.step(np.array([0, 0, 0, 0, 0, 0, 1.0]))  # the wrist spins: 10 N·m on 0.1 kg·m²
    excess = limit_excess(observation[:7], observation[7:14])
    assert excess > 0.5
    unpunished = push_reward(
        "dense", q=observation[:7].clip(LOW, HIGH), velocity=np.zeros(7), box=env.copies.box()[0], target=env.copies.target[0],
        tip=env.copies.first().site("tip").xpos, rod=env.copies.first().body("hand").xquat,
        torque=np.array([0, 0, 0, 0, 0, 0, 10.0]), last=False,
    )  # fmt: skip
    assert reward == pytest.approx(unpunished - excess)


def test_an_unstable_simulation_costs_fifty_and_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log where it runs
    env = BoxPushing()
    before, _ = env.reset(seed=0)
    env.copies.batch.qvel[0, 0] = 1e12
    observation, reward, terminated, truncated, _ = env.step(np.zeros(7))
    assert reward == UNSTABLE == -50
    assert (terminated, truncated) == (False, False)
    np.testing.assert_allclose(observation[:28], before[:28])
    assert env.step(np.zeros(7))[1] > -5  # and on it goes


@pytest.mark.parametrize("kind", KINDS)
def test_success_and_the_last_reward(kind: str) -> None:
    env = BoxPushing(reward=kind)
    for offset, yaw, success in ((0.04, 0.3, 1), (0.06, 0.3, 0), (0.04, 0.6, 0)):
        start, _ = env.reset(seed=1)
        env.copies.time = STEPS - 1
        env.copies.target[0, :3] = start[14:17] + np.array([offset, 0, 0])
        turned = np.zeros(4)
        mujoco.mju_mulQuat(turned, start[17:21], np.array([np.cos(yaw / 2), 0, 0, np.sin(yaw / 2)]))
        env.copies.target[0, 3:] = turned
        _, reward, _, over, info = env.step(np.zeros(7))
        assert over
        assert info["success"] == success
        assert info["distance"] == pytest.approx(offset, abs=1e-4)
        assert info["rotation_distance"] == pytest.approx(yaw, abs=1e-3)
        paid = {
            "dense": -3.5 * offset - yaw / np.pi,
            "temporal_sparse": -350 * offset - 100 * yaw / np.pi,
            "temporal_spatial_sparse": 300 - 1050 * offset - 150 * yaw / np.pi,
        }[kind]
        assert reward == pytest.approx(paid - 0.11, abs=0.1)  # the tip is 5.5 cm above the box


def test_it_is_a_gymnasium_environment_with_a_picture() -> None:
    env = gymnasium.make(NAME, render_mode="rgb_array")
    with pytest.warns(UserWarning, match="infinity"):  # velocities have no bound
        check_env(env.unwrapped)
    env.reset(seed=0)
    picture = env.render()
    assert (picture.shape, picture.dtype) == ((360, 480, 3), np.uint8)
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 50
    red = (picture[..., 0] > 120) & (picture[..., 1] < 60)
    assert red.sum() > 100  # the box


@pytest.mark.usefixtures("unchecked_shapes")
def test_an_unknown_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="'temporal_spatial_sparse'; got 'thin'"):
        BoxPushing(reward="thin")


def test_golden_planar_poses() -> None:
    # A yaw of 90° at (1, 2), with the quaternion (√½, 0, 0, √½), and one of 180° at (1, 5): 3 m along the first x, 90° further.
    half = np.sqrt(0.5)
    own, other = np.array([1.0, 2.0, 0.3, half, 0, 0, half]), np.array([1.0, 5.0, 0.3, 0, 0, 0, 1.0])
    np.testing.assert_allclose(planar_pose(own), [1, 2, 0, 1], atol=1e-15)
    np.testing.assert_allclose(planar_pose(-own * [-1, -1, -1, 1, 1, 1, 1]), [1, 2, 0, 1], atol=1e-15)  # −p turns as p does
    np.testing.assert_allclose(planar_pose(other), [1, 5, -1, 0], atol=1e-15)
    np.testing.assert_allclose(seen_from(planar_pose(own), planar_pose(other)), [3, 0, 0, 1], atol=1e-15)


def test_planar_observations_tell_the_same_episode() -> None:
    usual, planar = BoxPushings(3), BoxPushings(3, planar=True)
    first, second = usual.reset(seed=4)[0], planar.reset(seed=4)[0]
    assert planar.single_observation_space.shape == (27,) == second.shape[1:]
    np.testing.assert_array_equal(first[:, :14], second[:, :14])
    np.testing.assert_allclose(second[:, 18:20], first[:, 21:23])  # the target's place
    np.testing.assert_allclose(
        np.linalg.norm(second[:, 22:24], axis=-1), np.linalg.norm(first[:, 21:23] - first[:, 14:16], axis=-1)
    )
    turned = np.abs(np.arctan2(second[:, 25], second[:, 24]))
    np.testing.assert_allclose(
        turned, np.abs(np.angle(np.exp(1j * rotation_distance(first[:, 17:21], first[:, 24:28])))), atol=1e-9
    )
    np.testing.assert_array_equal(usual.step(np.ones((3, 7)))[1], planar.step(np.ones((3, 7)))[1])
