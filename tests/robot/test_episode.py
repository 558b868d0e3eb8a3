"""Episodes: ragged ends, what environments say of success, more or fewer of them than environments, and what is refused."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from corral.robot.episode import Episodes, Plant
from corral.robot.tracking import Tracking
from tolerance import assert_close


class Counter(gymnasium.Env):
    """Observes (last action, its running sum); pays t at step t; ends after 2 + seed mod 3 steps, even seeds with success."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.number, self.t, self.total = seed or 0, 0, 0.0
        return np.array([0.0, float(self.number)]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        self.total += float(action[0])
        over = self.t == 2 + self.number % 3
        info = {"success": 1.0, "event": self.number / 2} if over and self.number % 2 == 0 else {}
        reward = np.nan if self.broken else float(self.t)
        return np.array([float(action[0]), self.total]), reward, over, False, info


def plant(count: int = 3, steps: int = 4, **settings: Any) -> Plant:
    broken = settings.pop("broken", False)
    envs = SyncVectorEnv([lambda: Counter(broken) for _ in range(count)], **settings)
    return Plant(envs, Tracking(joints=(0, 1), velocities=(1, 2), command="position"), steps)


def test_golden_ragged_episodes() -> None:
    # Seeds 0, 1, 2 end after 2, 3 and 4 steps. The plan is 0.25 per step, but 2 at t = 1, which is clipped to 1.
    world = plant()
    context = world.start([0, 1, 2])
    assert context.tolist() == [[0.0, 0.0], [0.0, 1.0], [0.0, 2.0]]
    y = np.full((3, 4, 1), 0.25)
    y[:, 1] = 2.0
    episodes = world.follow(context, y, np.zeros_like(y))
    assert episodes.mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert episodes.rewards.tolist() == [[1, 2, 0, 0], [1, 2, 3, 0], [1, 2, 3, 4]]
    assert episodes.returns.tolist() == [3, 6, 10]
    assert episodes.actions[..., 0].tolist() == [[0.25, 1, 0, 0], [0.25, 1, 0.25, 0], [0.25, 1, 0.25, 0.25]]
    assert episodes.observations[0, :, 1].tolist() == [0, 0.25, 1.25, 1.25, 1.25]  # the last one of its own, repeated
    assert episodes.observations[2, :, 1].tolist() == [2, 0.25, 1.25, 1.5, 1.75]
    assert torch.equal(episodes.success.isnan(), torch.tensor([False, True, False]))  # seed 1 ended without a word
    assert episodes.event.nan_to_num(-1.0).tolist() == [0, -1, 1]
    # Seeds 1 and 4 end in the same step, and only 4 has anything to say.
    both = world.act(world.start([1, 4]), lambda t, seen: np.zeros((2, 1)))
    assert both.success[1] == 1
    assert both.success[0].isnan()


def test_all_over_early_is_the_end() -> None:
    world = plant(steps=50)
    context = world.start([0, 0, 0])
    episodes = world.act(context, lambda t, seen: np.zeros((3, 1)))
    assert episodes.mask.sum(-1).tolist() == [2, 2, 2]
    assert (episodes.observations[:, 2:] == episodes.observations[:, 2:3]).all()


def test_fewer_episodes_than_environments() -> None:
    world = plant()
    assert world.rounds(7) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    few = world.act(world.start([4, 2]), lambda t, seen: 0.1 * seen[:, 1:])
    whole = world.act(world.start([4, 2, 1]), lambda t, seen: 0.1 * seen[:, 1:])
    assert few.rewards.shape == (2, 4)
    assert_close(few.observations, whole.observations[:2])
    both = Episodes.cat([few, whole])
    assert_close(both.returns, torch.cat([few.returns, whole.returns]))
    for seeds in ([], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match="from 1 to 3 episodes at a time"):
            world.start(seeds)


def test_a_plan_that_breaks_is_told_apart_from_an_environment_that_does() -> None:
    world = plant()
    plan = np.full((2, 4, 1), 0.1)
    plan[0, 2:] = np.nan  # seed 0 is over by then
    assert world.follow(world.start([0, 2]), plan, np.zeros_like(plan)).rewards.sum() == 13
    plan[1, 3] = np.nan
    with pytest.raises(ValueError, match="the policy asked for NaN in step 3"):
        world.follow(world.start([0, 2]), plan, np.zeros_like(plan))
    plan[1, 3] = np.inf  # as far as the motors go
    assert world.follow(world.start([0, 2]), plan, np.zeros_like(plan)).actions[1, 3] == 1


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="last observation must be its own"):
        plant(autoreset_mode=AutoresetMode.SAME_STEP)
    world = plant(broken=True)
    with pytest.raises(ValueError, match="NaN or infinite"):
        world.act(world.start([0]), lambda t, seen: np.zeros((1, 1)))
    grid = gymnasium.spaces.Box(0, 1, (2, 2), np.float64)
    envs = plant().envs
    envs.single_observation_space = grid
    with pytest.raises(ValueError, match="observations must be flat"):
        Plant(envs, Tracking(joints=(0, 1), velocities=(1, 2)), 4)


@pytest.mark.parametrize(
    ("settings", "steps", "sentence"),
    [
        ({"joints": (0, 1), "velocities": (2, 3)}, 4, r"`joints` and `velocities` lie within the observation's 2 numbers"),
        ({"joints": (-1, 0), "velocities": (0, 1)}, 4, r"`joints` is a range .*; got .-1, 0."),
        ({"joints": (0, 2), "velocities": (0, 2)}, 4, "an action is one number for each of 2 joints"),
        ({"joints": (0, 1), "velocities": (1, 2)}, 0, "`steps` is a whole number ≥ 1; got 0"),
    ],
)
def test_a_controller_that_does_not_fit_the_environment_is_refused(settings: dict[str, Any], steps: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Plant(plant().envs, Tracking(**settings), steps)


def test_actions_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="an action is one number for each of 1 joints"):
        Plant(gymnasium.make_vec("CartPole-v1", 2), Tracking(joints=(0, 1), velocities=(1, 2)), 4)
