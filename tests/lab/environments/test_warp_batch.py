"""MuJoCo Warp in MuJoCo's place; what needs the package is skipped without it (make test-warp has an environment for it)."""

from dataclasses import replace
from typing import Any

import mujoco.batch
import numpy as np
import pytest
import torch

from corral.lab.environments import ENVIRONMENTS, make_envs
from corral.lab.environments.box_pushing import UNSTABLE, BoxPushings, scene
from corral.lab.jobs.robot.prepare import prepare
from corral.lab.jobs.robot.settings import resolve
from corral.lab.jobs.robot.train import RobotRun
from corral.lab.run.settings import read_recipe
from corral.robot.episode import Episodes, Plant
from corral.validate import RunError
from device import DEVICE

try:
    import mujoco_warp

    from corral.lab.environments.warp_batch import WarpBatch, WarpSimulator
except ImportError:
    mujoco_warp = None

HOPPER, BOX, ARM = "corral/HopperJump-v0", "corral/BoxPushing-v0", "corral/ViaPointReacher-v0"
needs_warp = pytest.mark.skipif(mujoco_warp is None, reason="needs mujoco-warp")
DEVICES = ["cpu"] if DEVICE == "cpu" else ["cpu", "cuda"]


class Counted:
    """MuJoCo's own batch as another simulator, which counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: Any, copies: int, threads: int) -> Any:
        self.calls += 1
        return mujoco.batch.Batch(model, copies, threads)


def plant(name: str, count: int, simulator: Any) -> Plant:
    known = ENVIRONMENTS[name]
    return Plant(make_envs(name, count, workers=1, simulator=simulator), known.tracking, known.steps)


def swing(world: Plant, seeds: list[int], *, learned_from: bool) -> Episodes:
    """Episodes of a swinging motion, different in each."""
    context = world.start(seeds, learned_from=learned_from)
    start, _ = world.tracking.state(context)
    size = 0.3 * np.random.default_rng(1).normal(size=(len(seeds), 1, world.tracking.dof))
    time = np.linspace(0, 4 * np.pi, world.steps)[None, :, None]
    plans = start[:, None] + size * np.sin(time), 6 * size * np.cos(time)
    return world.follow(context, *plans)


def test_only_what_is_learned_from_is_played_by_another_simulator() -> None:
    other = Counted()
    world = plant(HOPPER, 2, other)
    measured = swing(world, [0, 1], learned_from=False)
    assert other.calls == 0
    learned = swing(world, [0, 1], learned_from=True)
    assert other.calls == 1
    torch.testing.assert_close(measured.observations, learned.observations, rtol=0, atol=0)
    world.close()


@pytest.mark.parametrize("algorithm", ["tce", "bbrl"])
def test_a_learner_samples_from_it_and_is_measured_without_it(algorithm: str) -> None:
    few = {"episodes": 2, "policy_epochs": 1, "critic_epochs": 1}
    settings = resolve([read_recipe("hopper_jump"), {"algorithm": algorithm, "learner": few, "workers": 1}])
    agent = prepare(settings)
    agent.plant.envs.unwrapped.simulator = other = Counted()
    agent.evaluate([0])
    agent.explore([0])
    assert other.calls == 0
    agent.step()
    assert other.calls == 1
    agent.plant.close()


def test_a_run_says_which_release_simulated_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.lab.jobs.robot.train.version", lambda name: {"mujoco-warp": "4.0.0"}[name])
    settings = resolve([read_recipe("hopper_jump"), {"workers": 1}])
    agent = prepare(settings)
    run = RobotRun(replace(settings, simulator="warp"))
    run.agent = agent
    assert run.describe()["task"]["simulator"] == "mujoco-warp 4.0.0"
    run.settings = settings
    assert "simulator" not in run.describe()["task"]
    agent.plant.close()


def test_a_task_that_is_not_simulated_as_a_batch_refuses_another_simulator() -> None:
    with pytest.raises(ValueError, match=r"cannot play corral/ViaPointReacher-v0"):
        plant(ARM, 1, Counted())


def test_step_based_algorithms_refuse_warp() -> None:
    settings = resolve([read_recipe("hopper_jump"), {"algorithm": "sb3-ppo", "simulator": "warp"}])
    with pytest.raises(RunError, match=r"simulator='warp' plays whole plans, and sb3-ppo chooses an action at every step"):
        prepare(settings)


def test_an_unknown_simulator_is_refused() -> None:
    with pytest.raises(RunError, match=r"simulator.*mujoco"):
        resolve([{"simulator": "bullet"}])


@pytest.mark.skipif(mujoco_warp is not None, reason="mujoco-warp is here")
def test_without_the_package_the_error_says_what_to_install() -> None:
    with pytest.raises(RunError, match=r"corral\[warp\]"):
        prepare(resolve([read_recipe("hopper_jump"), {"simulator": "warp"}]))


@needs_warp
@pytest.mark.skipif(DEVICE == "cuda", reason="there is a GPU")
def test_without_a_gpu_the_error_says_so() -> None:
    with pytest.raises(RunError, match=r"simulates on a GPU, and Warp finds none"):
        prepare(resolve([read_recipe("hopper_jump"), {"simulator": "warp"}]))


@needs_warp
@pytest.mark.parametrize("device", DEVICES)
def test_the_hopper_moves_as_in_mujoco(device: str) -> None:
    # Seen on a CPU: 1e-5 in the first 100 steps; later contacts amplify that, to .07 in a velocity.
    world = plant(HOPPER, 2, WarpSimulator(device))
    expected, found = (swing(world, [3, 1], learned_from=flag) for flag in (False, True))
    torch.testing.assert_close(found.observations[:, :101], expected.observations[:, :101], rtol=0, atol=1e-3)
    torch.testing.assert_close(found.returns, expected.returns, rtol=0, atol=0.05)
    torch.testing.assert_close(found.event, expected.event, rtol=0, atol=0, equal_nan=True)
    assert found.rewards.abs().sum() > 0
    world.close()


@needs_warp
@pytest.mark.parametrize("device", DEVICES)
def test_the_box_moves_as_in_mujoco_until_contacts_amplify_rounding(device: str) -> None:
    world = plant(BOX, 4, WarpSimulator(device))
    expected, found = (swing(world, [0, 1, 2, 3], learned_from=flag) for flag in (False, True))
    torch.testing.assert_close(found.observations[:, :6], expected.observations[:, :6], rtol=0, atol=1e-3)
    # Seen on a CPU: .1 in the median, where episodes differ by 30.
    assert (found.returns - expected.returns).abs().median() < 0.05 * expected.returns.std()
    if device == "cpu":  # a GPU's threads add in any order
        again = swing(world, [0, 1, 2, 3], learned_from=True)
        torch.testing.assert_close(again.observations, found.observations, rtol=0, atol=0)  # a batch is used again, bit for bit
    world.close()


@needs_warp
def test_a_copy_that_blows_up_is_undone_and_costs_fifty(monkeypatch: pytest.MonkeyPatch) -> None:
    world, move, calls = plant(BOX, 2, WarpSimulator("cpu")), BoxPushings.move, iter(range(100))

    def explode(copies: BoxPushings, actions: np.ndarray) -> Any:
        if next(calls) == 3:
            copies.batch.qvel[1, 0] = 1e12
        return move(copies, actions)

    monkeypatch.setattr(BoxPushings, "move", explode)
    episodes = swing(world, [0, 1], learned_from=True)
    assert episodes.rewards[1, 3] == UNSTABLE
    assert (episodes.rewards == UNSTABLE).sum() == 1
    before, after = episodes.observations[1, 3:5, :28]
    still = np.r_[:7, 14:28]  # undone, and at rest
    torch.testing.assert_close(after[still], before[still], rtol=0, atol=1e-6)
    assert not after[7:14].any()
    world.close()


@needs_warp
def test_more_contacts_than_there_is_room_for_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.lab.environments.warp_batch._ROWS", 2)
    batch = WarpBatch(scene(), 2, "cpu")
    batch.qpos[:, 9] -= 0.02  # the box into its table
    with pytest.raises(RuntimeError, match=r"no room for all contacts of a copy.*simulator=mujoco"):
        batch.step(nstep=5)
