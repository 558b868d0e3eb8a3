"""Plans played as one batch: the same numbers as step by step, to the last bit where nothing is summed in another order."""

from itertools import accumulate, count
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

from corral.lab.environments import ENVIRONMENTS, make_envs
from corral.lab.environments.box_pushing import UNSTABLE, BoxPushings
from corral.lab.environments.hopper_jump import FLYING, NEVER, STEPS, HopperJumps, next_phase
from corral.robot.episode import Episodes, Plant

HOPPER, BOX = "corral/HopperJump-v0", "corral/BoxPushing-v0"
KINDS = [(HOPPER, "sparse"), (HOPPER, "dense"), (BOX, "dense"), (BOX, "temporal_sparse"), (BOX, "temporal_spatial_sparse")]


def plant(name: str, count: int, workers: int, **settings: str) -> Plant:
    known = ENVIRONMENTS[name]
    return Plant(make_envs(name, count, workers=workers, **settings), known.tracking, known.steps)


def wave(world: Plant, seeds: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Contexts and plans of a swinging motion, different in every episode, that contacts, pushes and saturates."""
    context = world.start(seeds)
    start, _ = world.tracking.state(context)
    size = np.random.default_rng(1).normal(size=(len(seeds), 1, world.tracking.dof))
    time = np.linspace(0, 4 * np.pi, world.steps)[None, :, None]
    return context, start[:, None] + size * np.sin(time), 6 * size * np.cos(time)


def assert_same(one: Episodes, other: Episodes) -> None:
    for name in ("observations", "actions", "mask", "success", "event"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=0, atol=0, equal_nan=True, msg=name)
    torch.testing.assert_close(one.rewards, other.rewards, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("name", "reward"), [(HOPPER, "sparse"), (BOX, "dense")])
def test_plans_made_on_the_way_see_what_single_environments_show(name: str, reward: str) -> None:
    world, told = plant(name, 2, 1, reward=reward), []

    def plan(observation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        told.append(observation)
        reach = 0.3 * np.tanh(observation[:, None, -world.tracking.dof :])  # what only a whole observation has
        time = np.linspace(0, 3, world.steps // 5)[None, :, None]
        return world.tracking.state(observation)[0][:, None] + reach * np.sin(time), reach * np.cos(time)

    batch = world.follow_anew(world.start([3, 1]), plan, world.steps // 5)
    seen, told[:] = told[:], []
    single = Plant(gymnasium.make_vec(name, 2, vectorization_mode="sync", reward=reward), world.tracking, world.steps)
    assert_same(batch, single.follow_anew(single.start([3, 1]), plan, world.steps // 5))
    assert len(seen) == len(told) == 5
    for index, (one, other) in enumerate(zip(seen, told, strict=True)):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, batch.observations[:, index * world.steps // 5])
    world.close()


@pytest.mark.parametrize(("name", "reward"), KINDS)
def test_a_batch_is_what_single_environments_do(name: str, reward: str) -> None:
    seeds = [3, 1]
    batch = plant(name, 2, 2, reward=reward)
    context, positions, velocities = wave(batch, seeds)
    found = batch.follow(context, positions, velocities)
    batch.close()
    env = gymnasium.make(name, reward=reward)
    for row, seed in enumerate(seeds):
        observation, _ = env.reset(seed=seed)
        for step in range(batch.steps):
            torch.testing.assert_close(found.observations[row, step], torch.from_numpy(observation), rtol=0, atol=0)
            action = batch.tracking.action(positions[row, step], velocities[row, step], observation)
            observation, paid, _, over, info = env.step(action.clip(-1, 1).astype(np.float32))
            assert found.rewards[row, step].item() == pytest.approx(paid, abs=1e-10)
        assert over
        assert found.success[row].item() == info["success"]
        torch.testing.assert_close(found.event[row].item(), float(info.get("event", np.nan)), equal_nan=True)


def test_threads_and_idle_copies_change_nothing() -> None:
    worlds = [plant(BOX, 5, 3), plant(BOX, 5, 1)]
    context, positions, velocities = wave(worlds[0], list(range(5)))
    found = [worlds[0].follow(context, positions, velocities)]
    found.append(worlds[1].follow(worlds[1].start(list(range(5))), positions, velocities))
    assert_same(*found)
    few = worlds[0].follow(worlds[0].start(list(range(2))), positions[:2], velocities[:2])
    torch.testing.assert_close(few.observations, found[0].observations[:2], rtol=0, atol=0)
    for world in worlds:
        world.close()


def test_wrapped_environments_are_stepped_one_by_one() -> None:
    known = ENVIRONMENTS[BOX]

    def dearer(env: gymnasium.Env) -> gymnasium.Env:
        return gymnasium.wrappers.TransformReward(env, lambda paid: 2 * paid)

    plain = plant(BOX, 1, 1)
    wrapped = Plant(SyncVectorEnv([lambda: dearer(gymnasium.make(BOX))]), known.tracking, known.steps)
    found = [world.follow(*wave(world, [2])) for world in (plain, wrapped)]
    torch.testing.assert_close(2 * found[0].rewards, found[1].rewards)


def test_a_jump_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    # Contacts of three episodes: a whole jump that is made twice, one without a landing, and none at all.
    told = [[0, 1, 1, 0, 0, 1, 0, 1], [1, 1, 0, 0, 0, 0, 0, 0], [0] * 8]
    contacts = np.zeros((3, STEPS), bool)
    contacts[:, :8] = told
    contacts[0, 8:] = True
    copies, heights, distances = HopperJumps(3), [], []
    copies.reset(seed=0)
    monkeypatch.setattr(copies, "contact", lambda: contacts[:, copies.time - 1])
    for _ in range(STEPS):
        info = copies.step(np.zeros((3, 3)))[4]
        heights.append(copies.batch.xpos[:, copies._torso, 2].copy())
        distances.append(copies.distance())
    for row in range(3):
        phases = list(accumulate(map(bool, contacts[row]), next_phase, initial=0))
        left = phases.index(FLYING) - 1 if FLYING in phases else np.nan
        np.testing.assert_equal(info["event"][row], left)
    np.testing.assert_array_equal(info["landing_distance"] < NEVER, [True, False, False])
    assert info["landing_distance"][0] == distances[5][0]
    np.testing.assert_array_equal(info["max_height"], np.max(heights, 0))


def test_a_step_that_the_simulator_cannot_take_costs_fifty_in_a_batch_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log where it runs
    world, move, calls = plant(BOX, 2, 1), BoxPushings.move, count()

    def explode(copies: BoxPushings, actions: np.ndarray) -> Any:
        if next(calls) == 3:
            copies.batch.qvel[1, 0] = 1e12
        return move(copies, actions)

    whole = world.follow(*wave(world, [0, 1]))
    monkeypatch.setattr(BoxPushings, "move", explode)
    episodes = world.follow(*wave(world, [0, 1]))
    assert episodes.rewards[1, 3] == UNSTABLE
    assert (episodes.rewards == UNSTABLE).sum() == 1
    before, after = episodes.observations[1, 3:5, :28]
    still = np.r_[:7, 14:28]  # undone, and at rest
    torch.testing.assert_close(after[still], before[still], rtol=0, atol=0)
    assert not after[7:14].any()
    torch.testing.assert_close(episodes.observations[0], whole.observations[0], rtol=0, atol=0)  # the other went on


def test_episodes_are_played_once_and_nan_is_refused() -> None:
    world = plant(HOPPER, 2, 1)
    context, positions, velocities = wave(world, [0, 1])
    world.follow(context, positions, velocities)
    with pytest.raises(ValueError, match="from their beginning, and once"):
        world.follow(context, positions, velocities)
    world.start([0, 1])
    positions[1, 3] = np.nan
    with pytest.raises(ValueError, match="the policy asked for NaN in step 3"):
        world.follow(context, positions, velocities)
