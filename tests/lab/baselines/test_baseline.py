"""Step-based baselines: the same contexts, steps and evaluation as TCE; runs repeat and resume; they learn."""

import importlib
import io
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from corral.lab.baselines.stable import BASELINES, REPLAY_FIELDS, Baseline, BaselineConfig, StepEnvironments
from corral.lab.environments import ENVIRONMENTS
from corral.lab.environments.vector import Threads
from corral.lab.jobs.robot.settings import resolve
from corral.lab.jobs.robot.smoke import TRAINING
from corral.lab.jobs.robot.train import train
from corral.robot.episode import Plant, episode_seeds, held_out_seeds
from corral.robot.tracking import Tracking
from tolerance import assert_close

NAME = "corral/ViaPointReacher-v0"
ALL = [pytest.param(name, marks=pytest.mark.slow) if name == "sb3-sac-pink" else name for name in BASELINES]
"""Coloured noise is shown with PPO, SAC with white noise and gSDE; together they are for `make test-all`."""


def plant(count: int, reward: str = "dense", mode: str = "vector_entry_point") -> Plant:
    envs = gymnasium.make_vec(NAME, num_envs=count, vectorization_mode=mode, reward=reward)
    return Plant(envs, ENVIRONMENTS[NAME].tracking, ENVIRONMENTS[NAME].steps)


def baseline(algorithm: str, *, envs: int = 4, seed: int = 0, **settings: Any) -> Baseline:
    defaults = {"iterations": 4, "episodes": 4, "hidden": (16,), "epochs": 2, "minibatches": 4, "gradient_steps": 1}
    return Baseline(plant(envs), algorithm, BaselineConfig(**defaults | settings), seed=seed)


@pytest.mark.parametrize("algorithm", ALL)
def test_it_takes_exactly_its_steps_and_repeats(algorithm: str) -> None:
    seeds = held_out_seeds(5)
    runs = []
    for seed in (0, 0, 1):
        agent = baseline(algorithm, seed=seed)
        torch.rand(3)  # what others draw meanwhile does not matter
        np.random.rand(3)
        metrics = [agent.step() for _ in range(2)]
        assert [row["env_steps"] for row in metrics] == [400, 800]
        runs.append((metrics, agent.evaluate(seeds).returns.tolist(), agent.explore(seeds).returns.tolist()))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert runs[0][1] != runs[0][2]


@pytest.mark.parametrize("algorithm", ALL)
def test_a_resumed_run_goes_on_as_if_never_stopped(algorithm: str) -> None:
    whole = baseline(algorithm)
    whole.step()
    whole.step()
    file = io.BytesIO()
    torch.save(whole.state(), file)
    whole.evaluate(held_out_seeds(3))  # looking changes nothing
    rest = whole.step()
    resumed = baseline(algorithm)
    file.seek(0)
    resumed.restore(torch.load(file, weights_only=True))
    assert resumed.step() == rest
    assert resumed.evaluate(held_out_seeds(2)).returns.tolist() == whole.evaluate(held_out_seeds(2)).returns.tolist()


def test_a_buffer_that_has_begun_to_forget_is_resumed_whole() -> None:
    # Three batches fit; in the fourth the first is written over, and everything else is still drawn from.
    whole = baseline("sb3-sac", iterations=3)
    for _ in range(4):
        whole.step()
    assert (whole.model.replay_buffer.full, whole.model.replay_buffer.pos) == (True, 100)
    state = whole.state()
    assert len(state["rewards"]) == 300
    resumed = baseline("sb3-sac", iterations=3)
    resumed.restore(state)
    for key in REPLAY_FIELDS:
        np.testing.assert_array_equal(getattr(resumed.model.replay_buffer, key), getattr(whole.model.replay_buffer, key))
    whole.step()
    resumed.step()
    assert resumed.evaluate(held_out_seeds(2)).returns.tolist() == whole.evaluate(held_out_seeds(2)).returns.tolist()
    for name, expected in whole.state()["networks"]["policy"].items():
        assert torch.equal(resumed.state()["networks"]["policy"][name], expected)


def test_the_guard_looks_at_every_update_of_sac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[int] = []

    def look(parameters: Any) -> tuple[bool, bool]:
        asked.append(len(list(parameters)))
        return True, False

    monkeypatch.setattr("corral.lab.jobs.robot.train.gradient_state", look)
    train(resolve([TRAINING, {"algorithm": "sb3-sac", "learner": {"hidden": [16]}}]), out=tmp_path / "run", quiet=True)
    assert len(asked) == 3 * 100  # critic, policy and temperature; two steps of 50 updates


def test_a_gpu_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device='cuda', but torch finds no GPU. Leave it at 'cpu'"):
        baseline("sb3-sac", device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["sb3-sac", "sb3-sac-gsde", "sb3-sac-pink"])
def test_what_a_gpu_trained_goes_on_there_and_plays_on_a_cpu(algorithm: str) -> None:
    whole = baseline(algorithm, device="cuda")
    whole.step()
    assert {p.device.type for p in whole.model.policy.parameters()} == {"cuda"}
    file, seeds = io.BytesIO(), held_out_seeds(3)
    torch.save(whole.state(), file)
    played, before = whole.evaluate(seeds).returns, torch.cuda.get_rng_state()
    rest = whole.step()
    assert torch.equal(torch.cuda.get_rng_state(), before)
    for device in ("cuda", "cpu"):
        file.seek(0)
        resumed = baseline(algorithm, device=device)
        resumed.restore(torch.load(file, weights_only=True, map_location="cpu"))
        assert_close(resumed.evaluate(seeds).returns, played, rtol=1e-4)
        if device == "cuda":
            assert resumed.step()["return"] == pytest.approx(rest["return"], rel=1e-4)


def test_the_global_generators_are_left_alone() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(5)
    np.random.seed(5)
    baseline("sb3-ppo").step()
    assert (torch.rand(1), np.random.rand()) == expected


@pytest.mark.parametrize("mode", ["vector_entry_point", "sync"])
def test_environments_meet_the_contexts_that_tce_meets(mode: str) -> None:
    world = plant(2, mode=mode)
    envs = StepEnvironments(world, 4, seed=7)
    envs.begin(3)
    seen = [envs.reset()]
    for _ in range(100):
        envs.step_async(np.full((2, 5), 0.1))
        observation, reward, over, infos = envs.step_wait()
    seen.append(observation)
    assert over.all()
    assert reward.dtype == observation.dtype == np.float32
    expected = [world.start(episode_seeds(7, 3, 4)[rows]) for rows in (slice(0, 2), slice(2, 4))]
    np.testing.assert_allclose(np.concatenate(seen), np.concatenate(expected), rtol=1e-6)
    assert infos[0]["terminal_observation"][-1] == 1.0  # the time of the last observation
    assert infos[0]["TimeLimit.truncated"] is False
    assert len(envs.finished) == 2


class Fuse(gymnasium.Env):
    """Ends after 2 + seed mod 3 steps, each paid 1; even seeds succeed, the others say nothing of it."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left, self.info = 2 + (seed or 0) % 3, {} if (seed or 0) % 2 else {"success": 1.0}
        return np.array([float(self.left), 0.0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return np.array([float(self.left), 0.0]), 1.0, self.left == 0, False, self.info if self.left == 0 else {}


@pytest.mark.parametrize("blocks", [1, 2])
def test_episodes_of_different_lengths_begin_anew_one_by_one(blocks: int) -> None:
    parts = [gymnasium.vector.SyncVectorEnv([Fuse] * (4 // blocks)) for _ in range(blocks)]
    world = Plant(parts[0] if blocks == 1 else Threads(parts), Tracking(joints=(0, 1), velocities=(1, 2)), 4)
    envs = StepEnvironments(world, 8, seed=1)
    envs.begin(0)
    envs.reset()
    lengths = [2 + seed % 3 for seed in episode_seeds(1, 0, 8)]
    assert len(set(lengths[:4])) > 1
    for _ in range(4):
        envs.step_async(np.zeros((4, 1), np.float32))
        seen, _, over, infos = envs.step_wait()
        assert all("terminal_observation" in info for index, info in enumerate(infos) if over[index])
    # After four steps each is in its second episode, at the step that its own first one left it at.
    again = [second - (4 - first) if first < 4 else second for first, second in zip(lengths[:4], lengths[4:], strict=True)]
    assert seen[:, 0].tolist() == [left or lengths[4 + index] for index, left in enumerate(again)]
    world.close()


def test_golden_command_of_the_controller() -> None:
    # Gains 10 and 1: first at 0.5 rad, now at 0.6 and 0.2 rad/s; a = 0.25 of 0.8 rad asks for 0.7: 10 · 0.1 − 0.2 = 0.8. a = 9
    # counts as 1, which asks for 1.3 and saturates.
    envs = StepEnvironments(plant(2), 2, seed=0, controller_span=0.8)
    first, seen = np.zeros((2, 15)), np.zeros((2, 15))
    first[:, :5], seen[:, :5], seen[:, 5:10] = 0.5, 0.6, 0.2
    found = envs.commands(np.array([[0.25] * 5, [9.0] * 5]), first, seen)
    np.testing.assert_allclose(found, [[0.8] * 5, [1.0] * 5], rtol=1e-6)
    assert envs.action_space == gymnasium.spaces.Box(-1, 1, (5,), np.float32)
    np.testing.assert_array_equal(StepEnvironments(plant(2), 2, seed=0).commands(seen[:, :5], first, seen), seen[:, :5])


def test_one_action_through_the_controller_is_a_plan_that_stands_still() -> None:
    world, action = plant(2), np.array([[0.5, -0.2, 0.1, 0.0, 1.0], [-0.3, 0.6, 0.0, 0.2, -1.0]])
    envs = StepEnvironments(world, 4, seed=7, controller_span=0.8)
    seeds = episode_seeds(7, 3, 4)
    context = [world.start(seeds[:2]), world.start(seeds[2:])]
    plans = [np.repeat((part[:, :5] + 0.8 * action)[:, None], 100, 1) for part in context]
    expected = [world.follow(world.start(x), plan, 0 * plan) for x, plan in zip((seeds[:2], seeds[2:]), plans, strict=True)]
    envs.begin(3)
    seen = [envs.reset()]
    for _ in range(199):
        envs.step_async(action)
        seen.append(envs.step_wait()[0])
    for episodes, rows in zip(expected, (slice(0, 100), slice(100, 200)), strict=True):
        found = torch.from_numpy(np.stack(seen[rows], 1))
        assert_close(found, episodes.observations[:, :100].float())


def test_a_policy_is_evaluated_through_the_controller_it_was_trained_with() -> None:
    agent = baseline("sb3-ppo", envs=2, episodes=4, controller_span=0.5)
    agent.step()
    found = agent.evaluate(held_out_seeds(2))
    context = found.observations[:, 0].numpy()
    for t in (0, 40):
        seen = found.observations[:, t].numpy()
        wanted = agent.model.predict(seen.astype(np.float32), deterministic=True)[0]
        assert_close(found.actions[:, t], torch.from_numpy(agent.envs.commands(wanted, context, seen)).double())
    assert found.actions.abs().max() > 0


def test_who_says_nothing_of_success_has_not_failed() -> None:
    world = Plant(gymnasium.vector.SyncVectorEnv([Fuse] * 4), Tracking(joints=(0, 1), velocities=(1, 2)), 4)
    envs = StepEnvironments(world, 4, seed=0)
    envs.begin(0)
    envs._context_seeds = np.array([[0, 3, 6, 9]])  # two steps each, the first and the third told
    envs.reset()
    for _ in range(2):
        envs.step_async(np.zeros((4, 1), np.float32))
        envs.step_wait()
    assert [(value, success != success) for value, success in envs.finished] == [(2, False), (2, True)] * 2
    agent = Baseline(world, "sb3-ppo", BaselineConfig(episodes=4, minibatches=4, epochs=1))
    assert agent.step()["success"] == 1.0
    world.close()


def test_episodes_longer_than_a_batch_are_refused() -> None:
    envs = gymnasium.make_vec(NAME, num_envs=4, vectorization_mode="vector_entry_point")
    agent = Baseline(Plant(envs, ENVIRONMENTS[NAME].tracking, 40), "sb3-ppo", BaselineConfig(episodes=4, minibatches=4))
    with pytest.raises(ValueError, match="no episode ended within 40 steps"):
        agent.step()


def test_returns_are_those_of_the_environment() -> None:
    world = plant(2)
    envs = StepEnvironments(world, 2, seed=0)
    envs.begin(0)
    envs.reset()
    for _ in range(100):
        envs.step_async(np.full((2, 5), 0.1, np.float32))
        envs.step_wait()
    episodes = world.act(world.start(episode_seeds(0, 0, 2)), lambda t, seen: np.full((2, 5), 0.1))
    assert_close(torch.tensor([row[0] for row in envs.finished], dtype=torch.float64), episodes.returns)
    assert [row[1] for row in envs.finished] == episodes.success.tolist()


@pytest.mark.slow
def test_it_learns() -> None:
    # Seen over four seeds: + 10 to + 12 after 18 batches, + 5 to + 11 after 12.
    agent = baseline("sb3-ppo", envs=16, episodes=16, iterations=18, hidden=(32,), epochs=10, minibatches=10, rate=3e-3)
    seeds = held_out_seeds(16)
    before = agent.evaluate(seeds).returns.mean()
    for _ in range(18):
        agent.step()
    after = agent.evaluate(seeds).returns.mean()
    assert after > before + 6, f"{before:.1f} → {after:.1f}"


@pytest.mark.usefixtures("unchecked_shapes")
def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one of sb3-ppo, sb3-ppo-gsde, sb3-ppo-pink, .*, sb3-trpl; got 'ppo'"):
        baseline("ppo")
    with pytest.raises(ValueError, match="must be a multiple of the 4 environments; got 6"):
        baseline("sb3-ppo", episodes=6)
    with pytest.raises(ValueError, match="do not divide into 7 minibatches"):
        baseline("sb3-ppo", minibatches=7)
    for settings, sentence in (
        ({"gamma": 2.0}, "`gamma` must lie"),
        ({"rate": 0.0}, "`rate` must be > 0"),
        ({"epochs": 0}, "≥ 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            BaselineConfig(**settings)


def test_an_environment_that_breaks_is_told_apart_from_a_policy_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from corral.lab.environments.via_point import ViaPointReachers as Arms

    move = Arms.move
    monkeypatch.setattr(Arms, "move", lambda arms, action: move(arms, action) * (np.nan if arms.time == 70 else 1.0))
    with pytest.raises(ValueError, match="an environment returned NaN or infinite"):
        baseline("sb3-ppo").step()


def test_without_stable_baselines3_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("noise", "sac", "stable", "trpl"):
        monkeypatch.delitem(sys.modules, f"corral.lab.baselines.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    with pytest.raises(ImportError, match=r"stable needs stable-baselines3: .*corral\[robot\]"):
        importlib.import_module("corral.lab.baselines.stable")
