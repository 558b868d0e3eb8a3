"""SAC as a CUDA graph: an update is stable-baselines3's, what is drawn is in the buffer, replays are updates; it learns."""

import io
import json
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3 import SAC
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import DummyVecEnv
from torch.utils._python_dispatch import TorchDispatchMode

from corral.lab.baselines.sac import GraphedSAC, draw, read_transitions
from corral.lab.baselines.stable import Baseline, BaselineConfig
from corral.lab.environments import ENVIRONMENTS
from corral.lab.jobs.robot.settings import Settings, resolve
from corral.lab.jobs.robot.smoke import TRAINING
from corral.lab.jobs.robot.train import train
from corral.robot.episode import Plant, held_out_seeds
from results.robots import study as robot_study
from results.robots.plans import PLANS
from tolerance import TWENTY_UPDATES, assert_close

ENVS, STATES, JOINTS = 3, 4, 2


class Space(gymnasium.Env):
    """States and actions of these sizes; nobody plays."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (STATES,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (JOINTS,), np.float32)


def agent(kind: type[SAC] = GraphedSAC, *, steps: int = 40, device: str = "cpu", **settings: Any) -> Any:
    """A SAC of stable-baselines3 or ours, with the same networks and the same transitions of three environments."""
    torch.manual_seed(3)
    defaults: dict[str, Any] = {"policy_kwargs": {"net_arch": [16, 16]}, "buffer_size": 64 * ENVS, "learning_rate": 3e-3}
    model = kind("MlpPolicy", DummyVecEnv([Space] * ENVS), device=device, **defaults | settings)
    model.set_logger(Logger(None, []))
    fill(model.replay_buffer, steps)
    return model


def fill(buffer: ReplayBuffer, steps: int) -> None:
    """Transitions of a bandit that pays −‖a − s‖² over its first entries; each s' ends in a number of its own, in 1/1000.

    The first environment always ends, the others in every other step, the third of them by its time limit.
    """
    rng = np.random.default_rng(5)
    for step in range(steps):
        states, actions = rng.uniform(-1, 1, (ENVS, STATES)), rng.uniform(-1, 1, (ENVS, JOINTS))
        after = rng.normal(size=(ENVS, STATES))
        after[:, -1] = (ENVS * step + np.arange(ENVS)) / 1000
        reward = -((actions - states[:, :JOINTS]) ** 2).sum(1)
        over = np.array([True, step % 2 == 0, step % 2 == 0])
        infos = [{"TimeLimit.truncated": bool(over[env]) and env == 2} for env in range(ENVS)]
        buffer.add(states, after, actions, reward, over, infos)


def numbers_of(batch: ReplayBufferSamples) -> torch.Tensor:
    return (batch.next_observations[:, -1] * 1000).round().long()


def learned(model: SAC) -> dict[str, torch.Tensor]:
    """Everything that an update changes, a copy."""
    parameters, found = model.get_parameters(), {"log_ent_coef": model.log_ent_coef.detach()}
    found |= {f"policy.{name}": value for name, value in parameters.pop("policy").items()}
    for optimizer, contents in parameters.items():
        for index, state in contents["state"].items():
            found |= {f"{optimizer}.{index}.{name}": value for name, value in state.items()}
    return deepcopy(found)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name].cpu(), expected[name].cpu())] == []


def one_by_one(_: GraphedSAC, update: Any, count: int) -> None:
    """Updates without a graph, in place of `_repeat`."""
    for _ in range(count):
        update()


def test_an_update_is_stable_baselines3_s_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = agent(), agent(SAC)
    before = learned(ours)
    assert_equal(before, learned(theirs))
    transitions = read_transitions(theirs.replay_buffer, "cpu")
    batches = [draw(transitions, 32) for _ in range(5)]
    given = iter(batches)
    monkeypatch.setattr(theirs.replay_buffer, "sample", lambda count, env: next(given))
    torch.manual_seed(7)
    theirs.train(5, 32)
    torch.manual_seed(7)
    for batch in batches:
        ours.update(batch)
    found = learned(ours)
    assert_equal(found, learned(theirs))
    for part in ("policy.actor", "policy.critic.", "policy.critic_target", "log_ent_coef"):
        assert all(not torch.equal(found[name], before[name]) for name in before if name.startswith(part))


@pytest.mark.parametrize("settings", [{}, {"use_sde": True}])
def test_on_a_cpu_training_is_stable_baselines3_s_own(settings: dict[str, Any]) -> None:
    results = []
    for kind in (SAC, GraphedSAC):
        model = agent(kind, **settings)
        torch.manual_seed(7)
        np.random.seed(7)
        model.train(4, 32)
        assert model._n_updates == 4
        results.append(learned(model))
    assert_equal(*results)


def test_a_checkpoint_of_a_gpu_goes_on_on_a_cpu_as_one_of_a_cpu() -> None:
    results = []
    for fused in (None, True):
        model = agent()
        torch.manual_seed(7)
        np.random.seed(7)
        model.train(2, 32)
        state = model.get_parameters()
        for name in ("actor.optimizer", "critic.optimizer", "ent_coef_optimizer"):
            state[name]["param_groups"][0]["fused"] = fused
        model.set_parameters(state)
        model.train(2, 32)
        results.append(learned(model))
        assert model.actor.optimizer.param_groups[0]["fused"] is None
    assert_equal(*results)


def test_what_the_graph_has_not_is_stable_baselines3_s() -> None:
    def replays(**settings: Any) -> bool:
        model = agent(**settings)
        model.device = torch.device("cuda")
        return model.replays

    assert replays()
    assert not agent().replays
    assert not replays(use_sde=True)


@pytest.mark.parametrize("steps", [40, 64, 90])
def test_what_is_drawn_is_in_the_buffer_as_stable_baselines3_reads_it(steps: int) -> None:
    buffer = agent(steps=steps).replay_buffer
    transitions = read_transitions(buffer, "cpu")
    numbers = numbers_of(transitions)
    assert sorted(numbers.tolist()) == [*range(ENVS * max(0, steps - 64), ENVS * steps)]  # 64 rows, the oldest written over
    step, env = numbers // ENVS, numbers % ENVS
    assert torch.equal(transitions.dones[:, 0], ((env == 0) | ((env == 1) & (step % 2 == 0))).float())
    place = {number: row for row, number in enumerate(numbers.tolist())}
    for batch in (buffer.sample(256), draw(transitions, 256)):
        rows = [place[number] for number in numbers_of(batch).tolist()]
        for name in ("observations", "actions", "next_observations", "dones", "rewards"):
            found, expected = getattr(batch, name), getattr(transitions, name)[rows]
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)


def test_every_transition_is_drawn_equally_often() -> None:
    transitions = read_transitions(agent().replay_buffer, "cpu")
    found, counts = numbers_of(draw(transitions, 120_000)).unique(return_counts=True)
    assert len(found) == 120
    assert ((counts - 1000).abs() < 5 * 1000**0.5).all()  # five standard deviations of a count of mean 1000


def test_training_by_replays_is_updates_of_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphedSAC, "replays", True)
    monkeypatch.setattr(GraphedSAC, "_repeat", one_by_one)
    whole, steps = agent(), agent()
    torch.manual_seed(7)
    whole.train(3, 32)
    whole.train(2, 32)
    transitions = read_transitions(steps.replay_buffer, "cpu")
    torch.manual_seed(7)
    for _ in range(5):
        steps.update(draw(transitions, 32))
    for name, value in learned(steps).items():
        assert_close(learned(whole)[name], value)  # to the rounding of torch's fused Adam
    assert whole._n_updates == 5


class HostReads(TorchDispatchMode):
    """Operations whose result the host waits for, which no capture survives."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function.overloadpacket.__name__ in ("_local_scalar_dense", "equal", "nonzero", "masked_select"):
            self.found.append(str(function))
        return function(*arguments, **named or {})


def test_the_host_waits_for_nothing_in_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphedSAC, "replays", True)
    monkeypatch.setattr(GraphedSAC, "_repeat", one_by_one)
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile switches it off for good
    model = agent()
    with HostReads() as reads:
        model.train(2, 32)
        assert len(reads.found) == 1  # whether networks are finite, after both
        model.predict(np.zeros((1, STATES), np.float32))
        assert len(reads.found) > 1  # torch.distributions checks its arguments again


def test_nan_raises_after_the_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphedSAC, "replays", True)
    monkeypatch.setattr(GraphedSAC, "_repeat", one_by_one)
    model = agent()
    model.train(3, 32)
    model.replay_buffer.rewards[:] = np.nan
    with pytest.raises(ValueError, match=r"after 2 updates on a GPU, 5 in all.*NaN or infinite.*Lower `learner.rate`"):
        model.train(2, 32)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", ["actor", "critic", "log_ent_coef"])
def test_one_bad_number_anywhere_is_found(part: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphedSAC, "replays", True)
    monkeypatch.setattr(GraphedSAC, "_repeat", lambda *_: None)
    model = agent()
    model.train(2, 32)
    found = getattr(model, part)
    weight = found if part == "log_ent_coef" else list(found.parameters())[-1]
    weight.data.view(-1)[-1] = value
    with pytest.raises(ValueError, match="NaN or infinite"):
        model.train(2, 32)


def few_steps(*, device: str = "cpu", guard: str = "warn") -> Settings:
    return resolve([TRAINING, {"algorithm": "sb3-sac", "guard": guard, "learner": {"hidden": [16], "device": device}}])


def test_a_run_whose_networks_are_nan_ends_with_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def diverge(model: GraphedSAC, update: Any, count: int) -> None:
        one_by_one(model, update, count)
        if model._n_updates:  # in the second step
            next(model.actor.parameters()).data[0] = torch.nan

    monkeypatch.setattr(GraphedSAC, "replays", True)
    monkeypatch.setattr(GraphedSAC, "_repeat", diverge)
    with pytest.raises(ValueError, match=r"leave `learner\.device` at 'cpu'"):
        train(few_steps(), out=tmp_path / "run", quiet=True)
    ended = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (ended["stopped"], ended["steps"]) == ("failed", 1)
    assert ended["why"].startswith("sac: after 50 updates on a GPU, 100 in all")


def test_the_guard_asks_nothing_of_an_update_that_is_captured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    capturing, asked = True, list[int]()

    def look(parameters: Any) -> tuple[bool, bool]:
        asked.append(len(list(parameters)))
        return True, False

    monkeypatch.setattr("corral.lab.jobs.robot.train.gradient_state", look)
    monkeypatch.setattr("corral.lab.jobs.robot.train.is_captured", lambda: capturing)
    train(few_steps(), out=tmp_path / "captured", quiet=True)
    assert asked == []
    capturing = False
    train(few_steps(), out=tmp_path / "launched", quiet=True)
    assert len(asked) == 3 * 100  # optimizers, updates


def test_a_run_whose_networks_are_on_a_gpu_sees_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str | None] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(subprocess, "Popen", lambda _, env, **__: seen.append(env["CUDA_VISIBLE_DEVICES"]))
    for plan in ("hopper-sac", "hopper-steps"):
        robot_study.start(next(iter(PLANS[plan](lambda _: (0.0, 0.0)))), tmp_path / plan)
    assert seen == ["0", ""]


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 10])
def test_replays_are_updates(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    graph, eager = agent(device="cuda"), agent(device="cuda")
    for model in (graph, eager):
        if model is eager:
            monkeypatch.setattr(GraphedSAC, "_repeat", one_by_one)
        torch.manual_seed(7)
        for _ in range(2):  # the second has Adam's moments already, and another graph
            model.train(count, 32)
        assert model._n_updates == 2 * count
    found, expected = learned(graph), learned(eager)
    assert found.keys() == expected.keys()
    for name in expected:
        assert_close(found[name], expected[name], rtol=TWENTY_UPDATES, atol=TWENTY_UPDATES)
    assert found["actor.optimizer.0.step"].item() == 2 * count
    assert found["actor.optimizer.0.step"].is_cuda


@pytest.mark.gpu
def test_nan_raises_after_replays() -> None:
    model = agent(device="cuda")
    model.train(10, 32)
    model.replay_buffer.rewards[:] = np.nan
    with pytest.raises(ValueError, match="after 10 updates on a GPU, 20 in all"):
        model.train(10, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("guard", ["warn", "off"])
def test_a_guarded_run_replays_its_updates(guard: str, tmp_path: Path) -> None:
    ended = train(few_steps(device="cuda", guard=guard), out=tmp_path / "run", quiet=True).summary
    assert (ended["stopped"], ended["steps"], ended["skipped"]) == ("finished", 2, 0)
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["update"] == 100


@pytest.mark.gpu
def test_a_bandit_is_learned_from_its_replay_buffer() -> None:
    model = agent(device="cuda", steps=64, gamma=0.0)
    states = np.random.default_rng(0).uniform(-0.8, 0.8, (50, STATES)).astype(np.float32)
    error = [np.abs(model.predict(states, deterministic=True)[0] - states[:, :JOINTS]).mean()]
    model.train(1000, 64)
    error += [np.abs(model.predict(states, deterministic=True)[0] - states[:, :JOINTS]).mean()]
    assert error[1] < 0.15 < 0.3 < error[0]


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["sb3-sac", "sb3-sac-gsde", "sb3-sac-pink"])
def test_a_run_on_a_gpu_resumes_bit_for_bit_and_goes_on_on_a_cpu(algorithm: str) -> None:
    name = "corral/ViaPointReacher-v0"
    settings = {"iterations": 4, "episodes": 4, "hidden": (16,), "gradient_steps": 8}

    def baseline(device: str) -> Baseline:
        envs = gymnasium.make_vec(name, num_envs=4, vectorization_mode="vector_entry_point", reward="dense")
        plant = Plant(envs, ENVIRONMENTS[name].tracking, ENVIRONMENTS[name].steps)
        return Baseline(plant, algorithm, BaselineConfig(**settings, device=device))

    whole, file = baseline("cuda"), io.BytesIO()
    assert whole.model.replays == (algorithm != "sb3-sac-gsde")
    for _ in range(2):
        whole.step()
    torch.save(whole.state(), file)
    rest = whole.step()
    for device in ("cuda", "cpu"):
        file.seek(0)
        resumed = baseline(device)
        resumed.restore(torch.load(file, weights_only=True, map_location="cpu"))
        found = resumed.step()
        assert found["env_steps"] == rest["env_steps"]
        if device == "cuda":
            assert found == rest
            assert_equal(learned(resumed.model), learned(whole.model))
        else:  # and back
            back = baseline("cuda")
            back.restore(resumed.state())
            back.step()
            assert np.isfinite(back.evaluate(held_out_seeds(2)).returns.numpy()).all()
