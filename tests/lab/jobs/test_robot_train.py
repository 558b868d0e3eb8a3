"""Runs of robots: resumed = uninterrupted, bit for bit, whatever ended them; guards; and no need of TRL."""

import contextlib
import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corral.lab.jobs.robot.evaluate import bootstrap, evaluate
from corral.lab.jobs.robot.settings import ALGORITHMS, Settings, resolve
from corral.lab.jobs.robot.smoke import TRAINING
from corral.lab.jobs.robot.train import LIMITS, STATE, RobotRun, resume, select_watched, train
from corral.lab.run.guard import CollapseWatch
from corral.lab.run.interval import Estimate
from corral.robot.learner import Learner
from corral.validate import RunError, pip_install

TIMES = ("seconds", "steps_per_second")
ITERATIONS = 6
LONG: dict[str, Any] = {**TRAINING, "iterations": ITERATIONS, "eval_every": 2, "checkpoint_every": 2, "keep_checkpoints": 3}
PLANS = {"prodmp": {"basis": 3, "alpha": 10.0, "auto_scale": True}}


def settings(**changes: Any) -> Settings:
    return resolve([LONG, PLANS, changes])


def lines(path: Path) -> list[dict[str, Any]]:
    """Metrics, but for what a clock says."""
    read = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in read]


def summary(path: Path) -> dict[str, Any]:
    return json.loads((path / "summary.json").read_text())


def state(path: Path, step: int = ITERATIONS) -> Any:
    return torch.load(path / "checkpoints" / f"checkpoint-{step}" / STATE, weights_only=True)


def assert_same_state(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_state(one[key], other[key])
    elif isinstance(one, list | tuple):
        for left, right in zip(one, other, strict=True):
            assert_same_state(left, right)
    else:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def assert_same_run(path: Path, reference: Path) -> None:
    assert lines(path) == lines(reference)
    assert_same_state(state(path), state(reference))
    ends = [{key: value for key, value in summary(run).items() if key != "seconds"} for run in (path, reference)]
    assert ends[0] == ends[1]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps without a break."""
    out = tmp_path_factory.mktemp("reference") / "run"
    train(settings(), out=out, quiet=True)
    return out


def test_what_a_run_leaves(reference: Path) -> None:
    written = lines(reference)
    assert [line["step"] for line in written] == list(range(ITERATIONS + 1))
    assert [line["step"] for line in written if line["success"] is not None] == [0, 2, 4, 6]
    assert written[-1]["update"] == 2 * ITERATIONS
    assert written[-1]["env_steps"] == 400 * ITERATIONS
    assert {"return", "reward", "batch_success", "tr/kl_after", "tr/active_frac", "skipped", "std"} <= written[-1].keys()
    assert {"motion/jerk", "explore/torque_rate", "explore/autocorrelation"} <= written[2].keys() - written[3].keys()
    ended = summary(reference)
    assert [ended[key] for key in ("objective", "task", "model", "seed", "steps", "stopped", "why")] == [
        "tce", "corral/ViaPointReacher-v0", "gaussian-prodmp", 0, ITERATIONS, "finished", None,
    ]  # fmt: skip
    assert ended["return_start"] == written[0]["return"]
    assert ended["return_final"] == written[-1]["return"]
    assert ended["seconds"] > 0
    config = json.loads((reference / "config.json").read_text())
    assert resolve([config["settings"]]) == settings()
    assert config["objective"]["name"] == "tce"
    assert config["objective"]["points"] == 25, "everything is resolved"
    assert config["task"]["steps"] == 100
    assert config["model"]["prodmp"]["basis"] == 3
    assert config["versions"]["gymnasium"]
    assert sorted(path.name for path in (reference / "checkpoints").iterdir()) == [f"checkpoint-{n}" for n in (2, 4, 6)]


@pytest.mark.supports("run: killed by SIGKILL, resumed bit for bit", door="robots")
def test_a_killed_run_goes_on_bit_for_bit(reference: Path, tmp_path: Path) -> None:
    out, step = tmp_path / "run", random.SystemRandom().randrange(1, ITERATIONS)
    (tmp_path / "run.json").write_text(json.dumps({**LONG, **PLANS}))
    script = (
        "import json, sys, torch; from pathlib import Path; from corral.lab.jobs.robot.settings import resolve;"
        "from corral.lab.jobs.robot.train import train; torch.set_num_threads(1);"
        "train(resolve([json.loads(Path(sys.argv[1]).read_text())]), out=Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", script, tmp_path / "run.json", out]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            if len((out / "metrics.jsonl").read_bytes().splitlines()) > step:
                break
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    _, words = process.communicate()
    assert (out / "metrics.jsonl").exists(), words
    if (out / "summary.json").exists():
        pytest.skip("the run was over before it could be killed")
    assert resume(out, quiet=True).summary["stopped"] == "finished"
    assert_same_run(out, reference)


@pytest.mark.supports("run: Ctrl-C and SIGTERM end it with a checkpoint", door="robots")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_after_its_step_with_a_checkpoint(
    number: int, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, step = tmp_path / "run", RobotRun.step

    def signalled(job: RobotRun) -> bool:
        if job.agent.iteration == 2:
            os.kill(os.getpid(), number)
        return step(job)

    monkeypatch.setattr(RobotRun, "step", signalled)
    outcome = train(settings(), out=out, quiet=True)
    assert (outcome.summary["stopped"], outcome.summary["steps"]) == ("interrupted", 3)
    assert state(out, 3)["iteration"] == 3
    monkeypatch.undo()
    resume(out, quiet=True)
    assert_same_run(out, reference)


@pytest.mark.supports("run: a second Ctrl-C ends it at once", door="robots")
def test_a_second_signal_ends_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def impatient(learner: Learner) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    monkeypatch.setattr(Learner, "step", impatient)
    outcome = train(settings(), out=tmp_path / "run", quiet=True)
    assert (outcome.summary["stopped"], outcome.summary["steps"]) == ("interrupted", 0)


@pytest.mark.supports("run: a damaged checkpoint is passed over", door="robots")
def test_a_torn_checkpoint_is_passed_over(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    shutil.copytree(reference, out)
    for step, tear in ((6, lambda data: data[:-1]), (4, lambda data: data[:-1] + bytes([data[-1] ^ 1]))):
        file = out / "checkpoints" / f"checkpoint-{step}" / STATE
        file.write_bytes(tear(file.read_bytes()))
    monkeypatch.setenv("COLUMNS", "500")
    resume(out)
    said = capsys.readouterr()
    assert "checkpoint-6 is damaged (state.pt has" in said.err
    assert "checkpoint-4 is damaged (state.pt is not what was written)" in said.err
    assert "going on after step 2" in said.out
    assert_same_run(out, reference)


def test_without_a_checkpoint_it_starts_over_and_a_finished_run_stays(reference: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(reference, out)
    shutil.rmtree(out / "checkpoints")
    resume(out, quiet=True)
    assert_same_run(out, reference)
    before = (out / "metrics.jsonl").read_bytes()
    (out / "summary.json").unlink()
    assert resume(out, quiet=True).summary["stopped"] == "finished"
    assert (out / "metrics.jsonl").read_bytes() == before
    assert_same_run(out, reference)


@pytest.mark.parametrize(
    "algorithm",
    [
        *("bbrl", "top_erl", "sb3-ppo", "sb3-sac"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS if name.endswith(("gsde", "pink", "trpl"))),
    ],
)
def test_every_algorithm_is_resumed(algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = settings(algorithm=algorithm, iterations=3, checkpoint_every=1)
    train(asked, out=tmp_path / "whole", quiet=True)
    step = RobotRun.step

    def failing(job: RobotRun) -> bool:
        if job.agent.iteration == 1:
            raise RuntimeError("power cut")
        return step(job)

    monkeypatch.setattr(RobotRun, "step", failing)
    with pytest.raises(RuntimeError, match="power cut"):
        train(asked, out=tmp_path / "cut", quiet=True)
    assert summary(tmp_path / "cut")["stopped"] == "failed"
    monkeypatch.undo()
    resume(tmp_path / "cut", quiet=True)
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    assert_same_state(state(tmp_path / "cut", 3), state(tmp_path / "whole", 3))


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int], record: list[Any]) -> None:
    """NaN advantages in some steps; `record` gets the policy's weights before and after every step."""
    from corral.robot.tce import TCE

    credit, step = TCE.credit, Learner.step

    def poisoned(learner: Any, episodes: Any) -> Any:
        found = credit(learner, episodes)
        return found._replace(advantages=found.advantages * float("nan")) if learner.iteration + 1 in steps else found

    def recorded(learner: Learner) -> dict[str, float]:
        weights = [torch.cat([p.detach().flatten() for p in learner.policy.parameters()])]
        metrics = step(learner)
        record.append((*weights, torch.cat([p.detach().flatten() for p in learner.policy.parameters()])))
        return metrics

    monkeypatch.setattr(TCE, "credit", poisoned)
    monkeypatch.setattr(Learner, "step", recorded)


@pytest.mark.supports("run: a NaN is skipped and counted", door="robots")
def test_a_nan_changes_nothing_and_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[Any] = []
    poison(monkeypatch, {3}, weights)
    outcome = train(settings(), out=tmp_path / "run", quiet=True)
    assert [torch.equal(before, after) for before, after in weights] == [False, False, True, False, False, False]
    assert outcome.summary["skipped"] == 2, "both of that step's updates of the policy; the critic's were fine"
    assert outcome.summary["stopped"] == "finished"
    written = lines(tmp_path / "run")
    assert [line["skipped"] for line in written[1:]] == [0, 0, 2, 2, 2, 2]
    assert written[3]["warnings"] == ["an update of the policy in step 3 had a non-finite gradient and was skipped (1 so far)."]
    assert written[3]["policy_loss"] is None


def test_without_the_guard_a_nan_is_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {3}, [])
    with pytest.raises((ValueError, RuntimeError)):  # the projection, or the environments, refuse such numbers
        train(settings(guard="off"), out=tmp_path / "run", quiet=True)
    assert summary(tmp_path / "run")["stopped"] == "failed"


def test_nothing_but_nans_is_a_collapse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, set(range(2, 9)), [])
    asked = settings(guard="stop", learner={"policy_epochs": 10})
    outcome = train(asked, out=tmp_path / "run", quiet=True)
    assert (outcome.summary["stopped"], outcome.summary["steps"]) == ("collapsed", 2)
    assert outcome.summary["why"] == "10 updates in a row had to be skipped: nothing is being learned."
    assert state(tmp_path / "run", 2)["iteration"] == 2


@pytest.mark.supports("run: a collapse warns or stops", door="robots")
@pytest.mark.parametrize("guard", ["warn", "stop"])
def test_a_collapse_is_noticed(guard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = itertools.chain([0.1, 0.8], itertools.repeat(0.05))
    monkeypatch.setattr(RobotRun, "measure", lambda job: {"success": next(found), "return": -1.0})
    outcome = train(settings(guard=guard, eval_every=1), out=tmp_path / "run", quiet=True)
    assert (outcome.summary["stopped"], outcome.summary["steps"]) == (("collapsed", 4) if guard == "stop" else ("finished", 6))
    warned = [line["step"] for line in lines(tmp_path / "run") if "warnings" in line]
    assert warned == [4], "the third measurement in a row, and once"


def test_a_density_s_entropy_below_zero_is_no_collapse() -> None:
    # 1 % of the best, 5, is .05: a language model far below that has collapsed, a Gaussian has only become narrow.
    falling = [{"entropy": value, "success": 0.5} for value in (5.0, 1.0, -1.0, -2.0, -3.0, -4.0)]
    alarmed, calm = CollapseWatch(LIMITS), CollapseWatch(LIMITS)
    assert any(alarmed.observe(line) for line in falling)
    assert not any(calm.observe(select_watched(line)) for line in falling)


def test_a_policy_that_stops_exploring_is_noticed_unless_it_is_done() -> None:
    narrow = [{"std": value, "success": 0.2} for value in (0.3, 0.2, 0.002, 0.002, 0.002, 0.002)]
    watch = CollapseWatch(LIMITS)
    found = [watch.observe(select_watched(line)) for line in narrow]
    assert [len(said) for said in found] == [0, 0, 0, 0, 1, 0], "the third in a row, and once"
    assert found[4][0].sentence.startswith("std fell from 0.3 to 0.002")
    done = CollapseWatch(LIMITS)
    assert not any(done.observe(select_watched({**line, "success": 0.95})) for line in narrow)


def test_std_is_the_geometric_mean_of_the_deviations(reference: Path) -> None:
    # Diagonal at first: every deviation is `std`, 1 by default; two small steps later not far from it.
    assert lines(reference)[1]["std"] == pytest.approx(1.0, abs=0.05)


@pytest.mark.supports("run: a full disk loses nothing", door="robots")
def test_a_full_disk_loses_nothing(reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, save = tmp_path / "run", torch.save

    def full(content: Any, path: Any) -> None:
        save(content, path)
        if content["iteration"] == 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RunError, match="the disk is full"):
        train(settings(), out=out, quiet=True)
    assert summary(out)["stopped"] == "failed"
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["checkpoint-2"]
    monkeypatch.undo()
    resume(out, quiet=True)
    assert_same_run(out, reference)


def test_an_environment_without_success_says_nothing_about_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from corral.lab.environments.via_point import ViaPointReachers as Arms

    outcome = Arms.outcome
    monkeypatch.setattr(Arms, "outcome", lambda arms: {**outcome(arms), "success": outcome(arms)["success"] * float("nan")})
    done = train(settings(iterations=1), out=tmp_path / "run", quiet=True)
    assert done.summary["success_final"] is None
    assert done.summary["return_final"] < 0
    assert "success" not in evaluate(tmp_path / "run", episodes=4).result["estimates"]["mean"]


def test_what_a_gpu_trained_is_measured_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"episodes": 4, "hidden": [8], "gradient_steps": 1}
    train(settings(algorithm="sb3-sac", iterations=1, prodmp={}, learner=few), out=tmp_path / "run", quiet=True)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["settings"]["learner"]["device"] = "cuda"
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert evaluate(tmp_path / "run", episodes=4).result["estimates"]["mean"]["return"]["value"] < 0
    with pytest.raises(RunError, match="torch finds no GPU"):
        resume(tmp_path / "run", iterations=2, quiet=True)


def test_evaluation_repeats_what_the_run_measured(reference: Path, tmp_path: Path) -> None:
    done = evaluate(reference, episodes=4, out=tmp_path / "eval")
    written = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert written == done.result
    last = lines(reference)[-1]
    found = written["estimates"]["mean"]
    assert (found["return"]["value"], found["success"]["value"]) == (last["return"], last["success"])
    assert found["return"]["low"] < last["return"] < found["return"]["high"]
    assert found["success"]["high"] == pytest.approx(0.4899, abs=1e-4), "Wilson's for 0 of 4: z² / (4 + z²)"
    assert set(found) == {"return", "success", "jerk (LDJ)", "spectrum (SPARC)", "torque rate"}
    assert written["estimates"]["exploring"]["torque rate"]["value"] > found["torque rate"]["value"]
    assert evaluate(reference, episodes=4, checkpoint="2", out=tmp_path / "older").result["step"] == 2
    with pytest.raises(RunError, match="keeps no whole checkpoint of step 3"):
        evaluate(reference, checkpoint="3")


def test_a_bootstrap_of_means_is_as_wide_as_theory_says() -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(1)).double().numpy()
    one = bootstrap(values, lambda x, axis=None: x.mean(axis))
    assert one.value == pytest.approx(values.mean())
    # mean ± 1.96 s / √n
    assert one.high - one.low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)


def test_golden_bootstraps_of_one_value_and_of_two() -> None:
    # Two draws of (0, 1) have the means 0, ½, ½, 1 equally often: their 2.5 % and 97.5 % quantiles are 0 and 1.
    assert bootstrap(np.array([0.0, 1.0]), np.mean) == Estimate(0.5, 0.0, 1.0)
    for statistic in (np.mean, np.median):
        assert bootstrap(np.array([-3.0]), statistic) == Estimate(-3.0, None, None), (
            "one draw of (−3) is −3, certain of nothing"
        )


@pytest.mark.supports("run: training without the extra `llm`", door="robots")
def test_robots_train_without_trl_and_transformers(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "for name in ('trl', 'transformers', 'accelerate', 'datasets', 'peft'): sys.modules[name] = None\n"
        "import corral.lab.jobs.robot.train, corral.lab.jobs.robot.evaluate\n"
        "from corral.lab.cli import main\n"
        "import importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if sys.modules.get(name, 0) is None else find(name, *rest)\n"
        "assert main(['train', '--recipe', 'via_point', '--smoke', '--quiet', '--out', sys.argv[1]]) == 0\n"
        "assert main(['eval', sys.argv[1], '--smoke', '--quiet']) == 0\n"
        "assert main(['train']) == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "run"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"training needs transformers, trl, accelerate. Install them: {pip_install('llm')}." in done.stderr
