"""Meta-World's tasks through the adapter; skipped without the package (make test-metaworld has an environment for it)."""

from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch

from corral.lab.environments import ENVIRONMENTS, make_envs
from corral.lab.environments.metaworld import DT, STEPS, MetaWorld, _tolerance, quickened, task_names
from corral.lab.jobs.robot.settings import resolve
from corral.lab.run.settings import read_recipe
from corral.robot.prodmp import ProDMP

NAME = "corral/MetaWorld-v0"

try:
    import metaworld

    TASKS = task_names()
except ImportError:
    metaworld, TASKS = None, []

needs_metaworld = pytest.mark.skipif(metaworld is None, reason="needs metaworld")
meets_its_warnings = pytest.mark.filterwarnings("ignore")  # Meta-World's own, on gymnasium's newer releases


@pytest.mark.skipif(metaworld is not None, reason="metaworld is here")
def test_without_the_package_the_error_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"corral\[metaworld\]"):
        gymnasium.make(NAME)


def test_it_is_registered_with_its_length_and_step() -> None:
    assert (ENVIRONMENTS[NAME].steps, ENVIRONMENTS[NAME].dt) == (STEPS, DT)


class _Finger:
    """A stand-in for a task of Meta-World: a guide, and a finger that slides from 0 m (open) to 0.04 m (closed)."""

    _obs_obj_max_len: ClassVar[int] = 14

    def __init__(self, seed: int) -> None:
        self.mocap_low, self.mocap_high = np.array([-0.5, 0.4, 0.05]), np.array([0.5, 1.0, 0.5])
        self.finger, self.commands = 0.0, list[float]()
        self.data = SimpleNamespace(mocap_pos=np.zeros((1, 3)), joint=lambda name: {"r_close": self}[name])

    @property
    def qpos(self) -> np.ndarray:
        return np.array([self.finger])

    def reset(self) -> tuple[np.ndarray, dict[str, Any]]:
        self.data.mocap_pos[0], self.finger, self.commands = [0.0, 0.6, 0.2], 0.0, []
        return np.zeros(39), {}

    def step(self, command: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.data.mocap_pos[0] += command[:3] / 100
        # A position servo of 400 N/m against 1,000 N s/m, 0.0125 s a step.
        self.finger = float(np.clip(self.finger + 0.005 * (command[3] - self.finger), 0.0, 0.04))
        self.commands.append(float(command[3]))
        return np.zeros(39), 0.0, False, False, {"success": 0.0}

    def _get_quat_objects(self) -> None: ...

    def compute_reward(self) -> None: ...

    def _gripper_caging_reward(self) -> None: ...


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> MetaWorld:
    """The adapter around `_Finger` in the package's place."""
    tasks = {"reach-v3-goal-observable": _Finger}
    package = SimpleNamespace(
        ALL_V3_ENVIRONMENTS=["reach-v3"],
        ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE=tasks,
        utils=SimpleNamespace(reward_utils=SimpleNamespace()),
    )
    monkeypatch.setattr("corral.lab.environments.metaworld._metaworld", lambda: package)
    return MetaWorld("reach-v3")


def test_a_batch_of_first_plans_opens_and_closes_the_gripper(stand_in: MetaWorld) -> None:
    settings = resolve([read_recipe("metaworld")]).prodmp
    prodmp = ProDMP(4, settings.pop("basis"), settings.pop("tau"), **settings)
    observation, _ = stand_in.reset()
    start = [torch.from_numpy(part) for part in ENVIRONMENTS[NAME].tracking.state(observation)]
    params = torch.randn(64, prodmp.parameters, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plans, _ = prodmp.trajectory(DT * torch.arange(1, STEPS + 1).double(), params, *start)
    fingers = np.empty((64, STEPS))
    for plan, row in zip(plans.numpy(), fingers, strict=True):
        stand_in.reset()
        for step, action in enumerate(plan):
            stand_in.step(action)
            row[step] = stand_in.inner.finger
    assert (fingers.max(1) > 0.03).mean() > 0.5, "most plans close the gripper at some time"
    assert (fingers[:, -1] > 0.03).any()
    assert (fingers[:, -1] < 0.01).any()


def test_joint_four_is_the_finger(stand_in: MetaWorld) -> None:
    # The servo moves the finger 0.005 · 1 m in the first step, 0.005 · 0.995 m in the second.
    observation, _ = stand_in.reset()
    assert (observation[3], observation[7]) == (0.0, 0.0)
    action = np.array([0.0, 0.6, 0.2, 1.0], np.float32)
    for finger, moved in ((0.005, 0.005), (0.009975, 0.004975)):
        observation, *_ = stand_in.step(action)
        np.testing.assert_allclose(observation[[3, 7]], [finger, moved / DT], rtol=1e-12)
    assert stand_in.inner.commands == [1.0, 1.0], "the command is the desired number itself, not the way to it"


@needs_metaworld
@meets_its_warnings
@pytest.mark.parametrize("task", TASKS)
def test_every_task_steps(task: str) -> None:
    env = MetaWorld(task)
    observation, _ = env.reset(seed=1)
    goals = [observation[44:47].copy()]
    assert env.observation_space.contains(observation)
    assert (observation[36:47] != 0).any()  # the goal is seen
    middle = (env.action_space.low + env.action_space.high) / 2
    start = observation[:3].copy()
    for _ in range(8):
        observation, reward, terminated, truncated, info = env.step(middle)
        assert np.isfinite(observation).all()
        assert np.isfinite(reward)
        assert (terminated, truncated, info) == (False, False, {})
    # 1 cm a step on each axis, or straight to the middle where it is nearer.
    expected = start + np.clip(middle[:3] - start, -0.08, 0.08)
    np.testing.assert_allclose(observation[:3], np.clip(expected, env.inner.mocap_low, env.inner.mocap_high), atol=1e-6)
    assert observation[-1] == 8 / STEPS
    np.testing.assert_array_equal(env.reset(seed=1)[0][44:47], goals[0])
    env.close()


@needs_metaworld
@meets_its_warnings
@pytest.mark.parametrize("task", TASKS)
def test_quickened_steps_are_meta_worlds_own(task: str) -> None:
    theirs = metaworld.ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE[f"{task}-goal-observable"]
    pair = [theirs(seed=2), quickened(theirs(seed=2))]
    first, second = (env.reset()[0] for env in pair)
    np.testing.assert_allclose(first, second, atol=1e-12)
    down = np.r_[np.clip(10 * (first[4:7] - first[:3]), -1, 1), 1.0]  # onto the object, closing: contacts too
    for step in range(60):
        action = down if step % 3 else np.random.default_rng(step).uniform(-1, 1, 4)
        (seen, reward, *_), (other, same, *_) = (env.step(action) for env in pair)
        np.testing.assert_allclose(seen, other, atol=1e-12)
        np.testing.assert_allclose(reward, same, rtol=1e-9, atol=1e-9)


def test_golden_share_of_a_reward() -> None:
    # 1 within, v = 0.1 one margin away; two margins away 1 / (1 + 9 · 4) = 1/37, on either side.
    share = [_tolerance(x, (0.0, 1.0), 0.5, "long_tail") for x in (0.3, 1.0, 1.5, 2.0, -1.0)]
    np.testing.assert_allclose(share, [1.0, 1.0, 0.1, 1 / 37, 1 / 37], rtol=1e-14)


@needs_metaworld
@meets_its_warnings
def test_shares_of_rewards_are_meta_worlds_own() -> None:
    theirs = metaworld.utils.reward_utils.tolerance
    draws, kinds = np.random.default_rng(0), ("long_tail", "gaussian", "long_tail")
    for kind, lower, width, margin, value in zip(kinds * 50, *draws.uniform(0, 1, (4, 150)), strict=True):
        about = ((lower, lower + width), margin, kind, 0.05 + 0.9 * value)
        for x in (*draws.uniform(-1, 3, 4), lower, lower + width, float("nan"), np.array([-0.5, 0.5, 3.0])):
            np.testing.assert_allclose(_tolerance(x, *about), theirs(x, *about), rtol=1e-14)
    with pytest.raises(ValueError, match="margin"):
        _tolerance(0.5, (0.0, 1.0), -1.0, "long_tail")
    with pytest.raises(ValueError, match="bound"):
        _tolerance(0.5, (1.0, 0.0), 1.0, "long_tail")


@needs_metaworld
@meets_its_warnings
def test_a_pad_that_presses_on_an_object_is_seen() -> None:
    theirs = metaworld.ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE["pick-place-v3-goal-observable"]
    env, found = quickened(theirs(seed=0)), set()
    seen, _ = env.reset()
    for step in range(80):
        towards = np.clip(10 * (seen[4:7] - seen[:3]), -1, 1)
        seen, *_ = env.step(np.append(towards, -1.0 if step < 40 else 1.0))
        found.add((theirs.touching_object(env, env._get_id_main_object()), env.touching_main_object))
    assert found == {(False, False), (True, True)}


@needs_metaworld
@meets_its_warnings
def test_a_reach_that_is_planned_succeeds() -> None:
    env = gymnasium.make(NAME, task="reach-v3", render_mode="rgb_array")
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        start, goal = observation[:4].copy(), np.append(observation[44:47], -1.0)
        for step in range(1, STEPS + 1):
            share = min(1.0, step / 200)
            observation, _, _, over, info = env.step((start + share * (goal - start)).astype(np.float32))
        assert over
        assert info["success"] == 1.0
        assert np.linalg.norm(observation[8:11] - goal[:3]) < 0.05  # the hand itself
    picture = env.render()
    assert (picture.shape, picture.dtype) == ((360, 480, 3), np.uint8)
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 50


@needs_metaworld
@meets_its_warnings
def test_a_closing_command_moves_the_finger() -> None:
    env = MetaWorld("reach-v3")
    before, _ = env.reset(seed=0)
    assert abs(before[3]) < 0.01  # open, where Meta-World's reset leaves it
    for _ in range(60):
        after, *_ = env.step(np.append(before[:3], 1.0))
    assert after[3] > 0.03
    assert after[11] < before[11] - 0.3  # Meta-World's own share by which the gripper is open
    env.close()


@needs_metaworld
@meets_its_warnings
def test_velocities_are_differences_and_seeds_repeat() -> None:
    envs = make_envs(NAME, 2, workers=2, task="push-v3")
    runs = []
    for _ in range(2):
        seen = [envs.reset(seed=[3, 4])[0]]
        seen += [envs.step(np.tile(np.float32([0.05, 0.65, 0.2, 0.5]), (2, 1)))[0] for _ in range(5)]
        runs.append(np.stack(seen))
    np.testing.assert_array_equal(*runs)
    np.testing.assert_allclose(runs[0][1:, :, 4:8], np.diff(runs[0][:, :, :4], axis=0) / DT, atol=1e-9)
    assert (runs[0][0, 0] != runs[0][0, 1]).any()
    envs.close()


@needs_metaworld
def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ValueError, match="no task 'fly-v3'"):
        MetaWorld("fly-v3")
