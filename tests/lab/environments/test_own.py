"""Environments of one's own: what is looked at before a run, each refusal, and how learners read them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from corral.lab.environments.own import Adapter, find_maker, make_film, make_own
from corral.lab.jobs.robot.prepare import find_environment
from corral.lab.jobs.robot.settings import resolve
from corral.robot.episode import Plant
from corral.robot.tracking import Tracking
from corral.validate import RunError, UserCodeError

JOINTS: dict[str, Any] = {"joints": [0, 7], "velocities": [7, 14], "p": 1.0}
REACH = """
import gymnasium
import numpy as np

class Reach(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (6,))
    action_space = gymnasium.spaces.Box(-3.0, 3.0, (2,))

    def __init__(self, render_mode=None, noise=0.0, fails_at=None, length=99):
        self.render_mode, self.noise, self.fails_at, self.length = render_mode, noise, fails_at, length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal, self.t = self.np_random.uniform(-1, 1, 2), 0
        self.q = np.random.normal(size=2) * self.noise
        self.before = self.q
        return self.observe(), {}

    def observe(self):
        return np.concatenate([self.q, self.q - self.before, self.goal]).astype(np.float32)

    def step(self, action):
        self.t += 1
        if self.t == self.fails_at:
            raise ZeroDivisionError("a bug of mine")
        self.before, self.q = self.q, self.q + 0.5 * (action - self.q)
        apart = np.linalg.norm(self.q - self.goal)
        return self.observe(), -apart, self.t == self.length, False, {"is_success": apart < 0.2}

    def render(self):
        return np.full((32, 48, 3), 200, np.uint8)

def nested(**settings):
    space = gymnasium.spaces.Dict(x=Reach.observation_space)
    return gymnasium.wrappers.TransformObservation(Reach(), lambda x: {"x": x}, space)

number = 3
"""
TABLE: dict[str, Any] = {"joints": [0, 2], "velocities": [2, 4], "command": "position", "steps": 12, "dt": 0.05}


@pytest.fixture
def reach(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "reach.py"
    path.write_text(REACH)
    yield f"{path}:Reach"
    sys.modules.pop(str(path), None)


def found(environment: str, tracking: dict[str, Any], **more: Any) -> Any:
    return find_environment(resolve([{"environment": environment, "tracking": tracking, **more}]))


def test_what_gymnasium_has_need_not_be_said() -> None:
    known = found("Pusher-v5", JOINTS)
    assert (known.steps, known.dt, known.tracking) == (100, 0.05, Tracking(joints=(0, 7), velocities=(7, 14), p=1.0))
    assert (shorter := found("Pusher-v5", JOINTS | {"steps": 30, "dt": 0.1})).steps == 30
    assert shorter.dt == 0.1


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.refuses("run: your own environment without joints, length, seeds or flat numbers", door="robots")
@pytest.mark.parametrize(
    ("environment", "tracking", "more", "sentence"),
    [
        ("Pusher-v6", JOINTS, {}, "Gymnasium has no environment 'Pusher-v6'. Did you mean 'Pusher-v5'?"),
        ("Pusher-v6", {}, {}, "there is no environment 'Pusher-v6'. Did you mean 'Pusher-v5'?"),
        ("corral/Arm-v0", JOINTS, {}, "there is no environment 'corral/Arm-v0'."),
        ("corral/HopperJump-v0", JOINTS, {}, "`tracking` is for environments that are not corral's"),
        ("no_such:Reach", TABLE, {}, "cannot be imported: No module named 'no_such'"),
        ("no_such:Reach-v0", TABLE, {}, "an id that the module no_such registers, which cannot be imported"),
        ("HERE:number", TABLE, {}, "is int, which cannot be called"),
        ("Pusher-v5", {}, {}, "`tracking.joints` is a range [begin, end) of its observation, which has 23 numbers"),
        ("Pusher-v5", {"joints": [0, 7]}, {}, "`tracking.velocities` is a range"),
        ("Pusher-v5", JOINTS | {"joint": 3}, {}, "tracking: there is no setting `joint`. Did you mean 'joints'?"),
        ("Pusher-v5", JOINTS | {"velocities": [17, 24]}, {}, "ends at 24; 23 numbers are observed"),
        ("Pusher-v5", JOINTS | {"joints": [0, 3], "velocities": [7, 10]}, {}, "has 7 numbers, and `tracking.joints` names 3"),
        ("Pusher-v5", JOINTS | {"joints": [0, 7, 2]}, {}, "`joints` is a range [begin, end)"),
        ("Pusher-v5", JOINTS | {"joints": "some"}, {}, "`joints` is a range [begin, end)"),
        ("Pusher-v5", JOINTS | {"p": 0.0}, {}, "with `tracking.p` of 0 no torque pulls a joint to its plan"),
        ("Pusher-v5", JOINTS | {"p": [1.0, 2.0]}, {}, "`p` is one finite number, or one for each of 7 joints"),
        ("Pusher-v5", JOINTS | {"steps": 1}, {}, "`tracking.steps` is a whole number of at least 2; got 1"),
        ("Pusher-v5", JOINTS | {"steps": "many"}, {}, "`tracking.steps` is int or none; got 'many'"),
        ("Pusher-v5", JOINTS | {"dt": -0.1}, {}, "`tracking.dt` is in seconds, finite and > 0; got -0.1"),
        ("Pusher-v5", JOINTS, {"environment_config": {"frames": 3}}, "unexpected keyword argument 'frames'"),
        ("Pusher-v5", JOINTS, {"simulator": "warp"}, "plays hopper jump and box pushing alone, not Pusher-v5"),
        ("HERE:Reach", {**TABLE, "steps": None}, {}, "`tracking.steps` is a whole number of at least 2; got None"),
        ("HERE:Reach", {**TABLE, "dt": None}, {}, "`tracking.dt` is in seconds, finite and > 0; got None"),
        ("HERE:Reach", TABLE, {"environment_config": {"noise": 0.1}}, "two resets with the seed 0 begin in different states"),
        ("HERE:nested", TABLE, {}, "one flat array; its are Dict"),
        ("CartPole-v1", TABLE, {}, "its actions are Discrete(2)"),
        ("FrozenLake-v1", TABLE, {}, "its actions are Discrete(4)"),
    ],
)
def test_everything_that_can_be_wrong_is_refused_in_a_sentence(
    environment: str, tracking: dict[str, Any], more: dict[str, Any], sentence: str, reach: str
) -> None:
    with pytest.raises(RunError) as refused:
        found(environment.replace("HERE:", reach.removesuffix("Reach")), tracking, **more)
    assert sentence in str(refused.value)


def test_a_bug_of_the_user_s_is_said_with_its_cause(reach: str) -> None:
    with pytest.raises(UserCodeError, match=r"cannot be made: .*unexpected keyword argument 'wind'") as wrong:
        found(reach, TABLE, environment_config={"wind": 1})
    assert isinstance(wrong.value.__cause__, TypeError)
    envs = make_own(reach, find_maker(reach), 2, 12, {"fails_at": 2}, workers=1)
    envs.reset(seed=[0, 1])
    envs.step(np.zeros((2, 2)))
    with pytest.raises(UserCodeError, match="step raised ZeroDivisionError: a bug of mine"):
        envs.step(np.zeros((2, 2)))


@pytest.mark.parametrize("workers", [1, 2])
def test_the_elapsed_share_is_the_last_number_observed(reach: str, workers: int) -> None:
    envs = make_own(reach, find_maker(reach), 3, 4, {"length": 2}, workers)  # episodes end after 2 of 4 steps
    first, _ = envs.reset(seed=[5, 6, 7])
    assert envs.single_observation_space.shape == (7,)
    assert first[:, -1].tolist() == [0, 0, 0]
    shares, ends = [], []
    for _ in range(4):
        seen, _, terminated, _, info = envs.step(np.ones((3, 2)))
        shares.append(seen[0, -1])
        ends.append(bool(terminated[0]))
    assert shares == [0.25, 0.5, 0, 0.25]  # the step after an end begins anew, as Gymnasium has it
    assert ends == [False, True, False, False]
    assert "is_success" in info
    seen, _ = envs.reset(seed=[5, 6, 7], options={"reset_mask": np.array([True, False, True])})
    assert seen[:, -1].tolist() == [0, 0.25, 0]
    np.testing.assert_array_equal(seen[[0, 2]], first[[0, 2]])
    envs.close()


def test_a_plan_is_followed_and_success_is_read_by_either_name(reach: str) -> None:
    plant = Plant(
        make_own(reach, find_maker(reach), 2, 12, {}, 1), Tracking(joints=(0, 2), velocities=(2, 4), command="position"), 12
    )
    context = plant.start([0, 1])
    goals = context[:, None, 4:6].repeat(12, 1)
    there = plant.follow(context, goals, 0 * goals)
    assert there.success.tolist() == [1, 1]
    assert there.mask.all(), "an episode is cut at `steps`, though the class itself would go on to 99"
    away = plant.follow(plant.start([0, 1]), goals + 1, 0 * goals)
    assert away.success.tolist() == [0, 0]
    assert there.returns.min() > away.returns.max()
    np.testing.assert_array_equal(plant.context(context[:, :-1]), context)
    np.testing.assert_array_equal(plant.context(context), context)
    with pytest.raises(ValueError, match=r"has 6 numbers; got \[2, 5\]"):
        plant.context(context[:, :5])
    plant.close()


def test_steps_end_an_episode_that_says_nothing_of_its_end() -> None:
    class Endless(gymnasium.vector.VectorEnv):
        metadata: ClassVar = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        num_envs = 1
        single_observation_space = gymnasium.spaces.Box(-1, 1, (2,))
        single_action_space = action_space = gymnasium.spaces.Box(-1, 1, (1,))

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return torch.zeros(1, 2, requires_grad=True), {}

        def step(self, actions: Any) -> Any:
            no = torch.zeros(1, dtype=torch.bool)
            return torch.zeros(1, 2), torch.ones(1), no, no, {"success": torch.ones(1, dtype=torch.bool)}

    tracking = Tracking(joints=(0, 1), velocities=(1, 2), command="position")
    plant = Plant(Adapter(Endless(), "endless", 5), tracking, 5)
    played = plant.act(plant.start([0]), lambda t, seen: np.zeros((1, 1)))
    assert (float(played.returns), float(played.success)) == (5, 1)


def test_a_mujoco_task_is_filmed_without_opengl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    env = make_film("Pusher-v5", gymnasium.spec("Pusher-v5"), 100, {})
    env.reset(seed=0)
    first = env.render()
    assert first.shape == (360, 480, 3)
    red = (first[..., 0] > 150) & (first[..., 1] < 60)
    assert red.sum() > 100, "the goal is a flat disc, of which only the upper end is seen"
    for _ in range(20):
        env.step(np.full(7, 2.0, np.float32))
    assert (env.render() != first).any()
    hopper = make_film("Hopper-v5", gymnasium.spec("Hopper-v5"), 100, {})
    hopper.reset(seed=0)
    first = hopper.render()
    own: Any = hopper.unwrapped
    own.set_state(own.data.qpos + np.array([3.0, 0, 0, 0, 0, 0]), own.data.qvel)
    moved = np.abs(hopper.render().astype(int) - first).max(-1) > 30
    assert moved.mean() < 0.02, "the camera goes with what it tracks"
    with pytest.raises(RunError, match="cannot be filmed"):
        make_film("Pusher-v5", gymnasium.spec("Pusher-v5"), 100, {"wind": 1})
