"""TCE and BBRL with their networks on a GPU: the same batches, the same updates, and runs that go on without one."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from corral.lab.environments import ENVIRONMENTS
from corral.lab.jobs.robot.evaluate import evaluate
from corral.lab.jobs.robot.export import export_policy, export_run
from corral.lab.jobs.robot.prepare import prepare
from corral.lab.jobs.robot.settings import resolve
from corral.lab.jobs.robot.smoke import TRAINING
from corral.lab.jobs.robot.train import banner, resume, train
from corral.robot.bbrl import BBRL, BBRLConfig
from corral.robot.episode import Plant, held_out_seeds
from corral.robot.learner import Learner
from corral.robot.planner import Plans
from corral.robot.prodmp import ProDMP
from corral.robot.tce import TCE, TCEConfig
from corral.validate import RunError
from tolerance import assert_close

NAME = "corral/ViaPointReacher-v0"
LEARNERS: dict[str, tuple[Any, Any]] = {"tce": (TCE, TCEConfig), "bbrl": (BBRL, BBRLConfig)}
SHARED: list[dict[str, Any]] = [
    {},
    {"projection": "wasserstein"},
    {"projection": "frobenius", "cov_bound": 0.05},
    {"contextual_covariance": True},
    {"contextual_covariance": True, "projection": "wasserstein", "replan_every": 25},
    {"replan_every": 50},
    {"plans_per_context": 4, "mirrored": True},
    {"plans_per_context": 4, "contextual_covariance": True, "projection": "frobenius"},
    {"set_covariance": True, "critic_dtype": "float32", "normalise_contexts": True},
    {"entropy_floor": 1.3, "deployed_bound": 1e-3},
    {"entropy_floor": 1.3, "floor_in_region": False, "entropy_equal": True},
]
OF_TCE: list[dict[str, Any]] = [
    {"move_to_event": True, "critic_inputs": "context"},
    {"common_jitter": True, "closing_segment": False},
    {"credit_lam": 0.5, "gamma": 0.99},
    {"segments_until": 1.0, "credit_lam": 1.0},
]
KINDS = [(name, kind) for name in LEARNERS for kind in SHARED + (OF_TCE if name == "tce" else [])]
every_kind = pytest.mark.parametrize(("algorithm", "kind"), KINDS, ids=str)


def arm(algorithm: str, **settings: Any) -> Learner:
    make, config = LEARNERS[algorithm]
    envs = gymnasium.make_vec(NAME, num_envs=8, vectorization_mode="vector_entry_point", reward="dense")
    plant, prodmp = Plant(envs, ENVIRONMENTS[NAME].tracking, 100), ProDMP(5, 3, 2.0, alpha=10.0, auto_scale=True)
    few = {"episodes": 8, "iterations": 4, "policy_epochs": 4, "critic_epochs": 3, "policy_rate": 1e-2, "hidden": (16, 16)}
    return make(plant, prodmp, 0.02, config(**few | settings))


def batch(agent: Learner) -> tuple[Any, Plans]:
    """Episodes with an event, which the arm's own are without."""
    episodes, plans = agent.sample()
    return replace(episodes, event=torch.where(torch.arange(8) % 2 == 0, 40.0, torch.nan).double()), plans


@pytest.mark.parametrize("algorithm", LEARNERS)
def test_a_gpu_must_be_there(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=rf"{algorithm}: device='cuda', but torch finds no GPU. Leave it at 'cpu'"):
        arm(algorithm, device="cuda")


@pytest.mark.usefixtures("unchecked_shapes")
def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="tce: `device` is one of cpu, cuda; got 'mps'"):
        TCEConfig(device="mps")  # type: ignore[arg-type]


@every_kind
def test_updates_make_every_tensor_where_the_batch_is(algorithm: str, kind: dict[str, Any]) -> None:
    # With "meta" as the default device, what is made without saying where has no values, and does not add to what has.
    one, other = arm(algorithm, **kind), arm(algorithm, **kind)
    for agent in (one, other):
        agent.improve(*batch(agent))  # Adam makes counters at its first step, which belong on the CPU
    played = batch(one)
    with torch.device("meta"):
        found = one.improve(*played)
    assert found == other.improve(*played)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("learner.device", "cuda", "torch finds no GPU"),
        ("simulator", "warp", r"corral\[warp\]|Warp finds none|plays plans of corral/HopperJump-v0"),
    ],
)
def test_what_a_gpu_trained_is_measured_and_exported_without_one(
    key: str, value: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(resolve([TRAINING, {"iterations": 1}]), out=tmp_path / "run", quiet=True)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    table, _, name = key.rpartition(".")
    (config["settings"][table] if table else config["settings"])[name] = value
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert evaluate(tmp_path / "run", episodes=4).result["estimates"]["mean"]["return"]["value"] < 0
    assert export_run(tmp_path / "run", tmp_path / "policy.npz") == 1
    with pytest.raises(RunError, match=why):
        resume(tmp_path / "run", iterations=2, quiet=True)


def test_a_run_that_was_simulated_on_a_gpu_goes_on_without_one(tmp_path: Path) -> None:
    train(resolve([TRAINING, {"iterations": 3}]), out=tmp_path / "whole", quiet=True)
    train(resolve([TRAINING, {"iterations": 3}]), out=tmp_path / "run", quiet=True)
    for folder in (tmp_path / "run/checkpoints").glob("*"):
        if folder.name != "checkpoint-2":
            shutil.rmtree(folder)
    (tmp_path / "run/summary.json").unlink()
    file = tmp_path / "run/config.json"
    began = json.loads(file.read_text())
    file.write_text(json.dumps(began | {"settings": began["settings"] | {"simulator": "warp"}}))
    with pytest.raises(RunError, match=r"corral\[warp\]|Warp finds none|plays plans of corral/HopperJump-v0"):
        resume(tmp_path / "run", quiet=True, simulator="warp")
    assert "simulated" not in json.loads(file.read_text())
    resume(tmp_path / "run", quiet=True, simulator="mujoco")
    config = json.loads(file.read_text())
    assert config["settings"] == began["settings"]
    assert config["simulated"] == [{"from": "warp", "to": "mujoco", "after": 2}]
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "run")]
    whole, resumed = ([json.loads(line)["reward"] for line in found] for found in lines)
    assert whole == resumed
    resume(tmp_path / "run", quiet=True, simulator="mujoco", iterations=4)
    assert len(json.loads(file.read_text())["simulated"]) == 1


@pytest.mark.gpu
@every_kind
def test_updates_on_a_gpu_are_those_on_a_cpu(algorithm: str, kind: dict[str, Any]) -> None:
    here, there = arm(algorithm, **kind), arm(algorithm, device="cuda", **kind)
    played = batch(here)
    expected, found = here.improve(*played), there.improve(*played)
    rtol, atol = (1e-3, 1e-5) if "critic_dtype" in kind else (1e-6, 1e-8)  # in float32 it judges plans to as many digits
    assert found == pytest.approx(expected, rel=rtol, abs=atol)
    assert {type(value) for value in found.values()} == {float}
    for network, same in ((there.policy, here.policy), (there.critic, here.critic)):
        for key, weight in network.state_dict().items():
            assert weight.device.type == "cuda"
            assert_close(weight, same.state_dict()[key], rtol=rtol, atol=atol)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [{}, {"contextual_covariance": True, "replan_every": 50}, {"plans_per_context": 4}], ids=str)
@pytest.mark.parametrize("algorithm", LEARNERS)
def test_a_gpu_meets_the_contexts_and_plans_that_a_cpu_meets(algorithm: str, kind: dict[str, Any]) -> None:
    here, there = arm(algorithm, **kind), arm(algorithm, device="cuda", **kind)
    before = torch.cuda.get_rng_state()
    (expected, plans), (episodes, drawn) = here.sample(), there.sample()
    assert torch.equal(episodes.observations[:, 0], expected.observations[:, 0])
    assert {x.device.type for x in (*vars(episodes).values(), *drawn[:3])} == {"cpu"}
    assert_close(drawn.params, plans.params, rtol=1e-9, atol=1e-10)
    assert_close(episodes.rewards, expected.rewards, rtol=1e-7, atol=1e-9)
    there.step()
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [{}, {"contextual_covariance": True, "critic_dtype": "float32"}], ids=str)
@pytest.mark.parametrize("algorithm", LEARNERS)
def test_what_a_gpu_trained_goes_on_there_and_on_a_cpu(algorithm: str, kind: dict[str, Any], tmp_path: Path) -> None:
    whole = arm(algorithm, device="cuda", **kind)
    whole.step()
    file, state, seeds = io.BytesIO(), whole.state(), held_out_seeds(5)
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True, map_location="cpu")
    played, rest = whole.evaluate(seeds).returns, [whole.step() for _ in range(2)]
    for saved in (state, loaded):
        resumed = arm(algorithm, device="cuda", **kind)
        resumed.restore(saved)
        assert torch.equal(resumed.evaluate(seeds).returns, played)
        assert [resumed.step() for _ in range(2)] == rest
        resumed = arm(algorithm, **kind)
        resumed.restore(saved)
        assert_close(resumed.evaluate(seeds).returns, played, rtol=1e-7)
        assert resumed.step() == pytest.approx(rest[0], rel=1e-3, abs=1e-5)
    for name, agent in (("there", whole), ("here", resumed)):
        agent.restore(state)
        export_policy(agent, tmp_path / f"{name}.npz")
    with np.load(tmp_path / "there.npz") as there, np.load(tmp_path / "here.npz") as here:
        assert all(np.array_equal(there[key], here[key]) for key in here)


@pytest.mark.gpu
def test_the_banner_says_where_updates_are() -> None:
    settings = resolve([TRAINING, {"learner": {"device": "cuda"}}])
    assert ", updates on cuda; " in dict(banner(settings, prepare(settings), Path("run")))["device"]
