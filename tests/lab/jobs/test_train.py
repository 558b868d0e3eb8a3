"""Whole runs on a model of a few thousand weights: resumed = uninterrupted, bit for bit, and every way to fail."""

import contextlib
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from corral.lab.jobs.llm.eval_settings import find_subject
from corral.lab.jobs.llm.prepare import prepare
from corral.lab.jobs.llm.problems import Problems, Sampling
from corral.lab.jobs.llm.rewards import verifier
from corral.lab.jobs.llm.sampler import TransformersSampler
from corral.lab.jobs.llm.train import banner, resume, train, why_inactive
from corral.lab.jobs.llm.trainer import GuardCallback, RunTrainer
from corral.lab.jobs.llm.turns import OneTurn
from corral.lab.tasks import TASKS
from corral.llm import CorralConfig
from corral.objective import make_objective
from corral.trl.api import FUSED, updates_per_step
from corral.trl.trainer import CorralTrainer
from corral.validate import RewardError, RunError
from policy_objectives import POLICY_OBJECTIVES, one_of_each_kind
from small_runs import Digits, save_model, small

TIMES = ("seconds", "tokens_per_second", "step_time")
LONG = {"steps": 6, "checkpoint_every": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps without a break."""
    out = tmp_path_factory.mktemp("reference") / "run"
    train(small(model, **LONG), out=out, quiet=True)
    return out


@pytest.fixture(scope="module")
def killed(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in a process of its own, started early and killed in the middle of its fourth step or later."""
    out = tmp_path_factory.mktemp("killed") / "run"
    script = Path(__file__).parents[2] / "small_runs.py"
    process = subprocess.Popen([sys.executable, script, model, out], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (out / "metrics.jsonl").exists() and len((out / "metrics.jsonl").read_bytes().splitlines()) >= 4:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    printed, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, printed.decode()
    return out


def lines(out: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in found]


def summary(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())


def assert_same_run(one: Path, other: Path) -> None:
    """Metrics, completions, weights, optimizer, schedule and random state, bit for bit."""
    assert lines(one) == lines(other)
    assert pq.read_table(one / "completions.parquet").equals(pq.read_table(other / "completions.parquet"))
    last = [max((out / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name[11:])) for out in (one, other)]
    assert last[0].name == last[1].name
    (weights,) = (path.name for path in last[0].glob("*model.safetensors"))  # a model's, or an adapter's
    assert (last[0] / weights).read_bytes() == (last[1] / weights).read_bytes()
    schedules = [torch.load(path / "scheduler.pt", weights_only=True) for path in last]
    assert schedules[0] == schedules[1]
    drawn = [torch.load(path / "rng_state.pth", weights_only=False) for path in last]
    assert torch.equal(drawn[0]["cpu"], drawn[1]["cpu"])
    assert repr(drawn[0]["numpy"]) == repr(drawn[1]["numpy"])  # Python's own is left out: shape checks in tests draw from it
    moments = [torch.load(path / "optimizer.pt", weights_only=True)["state"] for path in last]
    for index, state in moments[0].items():
        for key, value in state.items():
            assert torch.equal(value, moments[1][index][key]), key
    ended = [{**summary(out), "seconds": 0} for out in (one, other)]
    assert ended[0] == ended[1]


def test_a_run_leaves_what_the_design_promises(reference: Path, model: str) -> None:
    config = json.loads((reference / "config.json").read_text())
    assert config["settings"]["learning_rate"] == 0.15
    assert config["objective"]["name"] == "troll"
    assert config["objective"]["bound"] == 0.05
    assert config["task"] == {"name": "digits", "prompt_length": 3}
    assert config["trainer"]["max_steps"] == 12
    assert {"versions", "commit", "command"} <= set(config)
    metrics = lines(reference)
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4, 5, 6]
    assert [line["update"] for line in metrics] == [0, 2, 4, 6, 8, 10, 12]
    assert [line["success"] is not None for line in metrics] == [True, False, True, False, True, False, True]
    assert all(line["reward"] is not None and line["entropy"] > 0 and "tr/active_frac" in line for line in metrics[1:])
    assert any(line["tr/active_frac"] > 0 for line in metrics[1:]), "the region acts, so there is something to compare"
    ended = summary(reference)
    measured = [line["success"] for line in metrics if line["success"] is not None]
    assert (ended["success_start"], ended["success_best"], ended["success_final"]) == (measured[0], max(measured), measured[-1])
    assert (ended["objective"], ended["task"], ended["model"], ended["seed"]) == ("troll", "digits", model, 0)
    assert (ended["steps"], ended["stopped"], ended["why"]) == (6, "finished", None)
    rows = pq.read_table(reference / "completions.parquet").to_pylist()
    assert [row["step"] for row in rows] == [step for step in range(1, 7) for _ in range(8)]
    assert all(row["reward"] == pytest.approx(Digits().verify(row["prompt"], row["completion"])) for row in rows)
    assert sorted(path.name for path in (reference / "checkpoints").iterdir()) == [
        "checkpoint-12",
        "checkpoint-4",
        "checkpoint-8",
    ]


def test_the_run_learned(reference: Path) -> None:
    assert summary(reference)["success_final"] > summary(reference)["success_start"] + 0.1


TRAINED = [name for name in POLICY_OBJECTIVES if name != "decoupled_ppo"]  # which needs another sampler


@pytest.mark.supports("objective: {name}", door="command line")
@pytest.mark.parametrize("name", TRAINED)
def test_every_objective_trains(name: str, model: str, tmp_path: Path) -> None:
    settings = small(model, objective=name, steps=1, checkpoint_every=1, eval_every=1, eval_size=1)
    assert train(settings, out=tmp_path / "run", quiet=True).summary["stopped"] == "finished"
    (line,) = lines(tmp_path / "run")[-1:]
    assert math.isfinite(line["tr/kl_max"])
    assert line["tr/kl_max"] > 0, "the policy has moved between the two updates"


@pytest.mark.parametrize("name", one_of_each_kind(without=("decoupled_ppo",)))
def test_every_objective_learns(name: str, model: str, tmp_path: Path) -> None:
    steps = 16 if name in ("gmpo", "spo", "vespo") else 8  # these are careful
    settings = small(model, objective=name, steps=steps, checkpoint_every=steps, eval_every=steps, eval_size=64)
    ended = train(settings, out=tmp_path / "run", quiet=True).summary
    assert ended["success_final"] > ended["success_start"] + 0.1


@pytest.mark.supports("objective: distill", door="command line")
def test_a_run_learns_from_another_ones_checkpoint(reference: Path, model: str, tmp_path: Path) -> None:
    last = str(reference / "checkpoints" / "checkpoint-12")
    how = {"objective": "distill", "objective_config": {"bound": 0.2}, "teacher": last}
    settings = small(model, **how, steps=8, checkpoint_every=8, eval_every=8, eval_size=64)
    ended = train(settings, out=tmp_path / "run", quiet=True).summary
    assert ended["success_final"] > ended["success_start"] + 0.1
    row = pq.read_table(tmp_path / "run" / "tokens.parquet").to_pylist()[0]
    assert row["bound"] == 0.2
    assert "projected" in row["action"]


class TestTeacher:
    """What `corral train` shows a teacher, and what it refuses."""

    def test_a_model_reads_the_solution_before_the_problem(self) -> None:
        parts = prepare(small("tiny", task="countdown", objective="distill", instruction="{problem}"))
        for row in parts.dataset:
            solution, problem = row["teacher_prompt"].split("\n")
            assert problem == row["prompt"] == row["problem"]
            assert parts.problems.task.verify(problem, solution) == 1.0

    def test_another_model_reads_what_the_student_does_unless_told_otherwise(self, model: str) -> None:
        parts = prepare(small(model, objective="distill", teacher=model))
        assert parts.teacher is not None
        assert "teacher_prompt" not in parts.dataset.column_names
        parts = prepare(small(model, objective="distill", teacher=model, teacher_instruction="{problem} {other}!"))
        assert parts.dataset["teacher_prompt"][0] == parts.dataset["problem"][0] + " {other}!"

    @pytest.mark.parametrize(
        ("given", "why"),
        [
            ({"objective": "distill"}, r"should read {solution}, and the task digits has no such column. Set .*\(none\)"),
            ({"teacher": "tiny"}, "`teacher` is for distillation, and objective='troll' reads no teacher"),
            ({"teacher_instruction": "{problem}"}, "`teacher_instruction` is for objective='distill'; got 'troll'"),
            ({"objective": "distill", "teacher": "no/such/model"}, "there is no folder no/such/model"),
            ({"objective": "distill", "teacher_instruction": "x" * 40 + "{problem}"}, "a teacher's prompt has 44 tokens"),
        ],
        ids=str,
    )
    def test_refusals(self, model: str, given: dict[str, Any], why: str) -> None:
        with pytest.raises(RunError, match=why):
            prepare(small(model, **given))


@pytest.mark.supports("model: saved with the original's keys and configuration", door="command line")
def test_a_checkpoint_is_an_ordinary_model(reference: Path, model: str) -> None:
    last = reference / "checkpoints" / "checkpoint-12"
    loaded, original = (AutoModelForCausalLM.from_pretrained(path) for path in (last, model))
    assert set(load_file(last / "model.safetensors")) == set(load_file(Path(model) / "model.safetensors"))
    same = {**loaded.config.to_dict(), "_name_or_path": None}
    assert same == {**original.config.to_dict(), "_name_or_path": None}
    tokens = AutoTokenizer.from_pretrained(last)("abc", return_tensors="pt")
    assert loaded(**tokens).logits.isfinite().all()


@pytest.mark.supports("run: killed by SIGKILL, resumed bit for bit", door="command line")
def test_a_killed_run_resumes_bit_for_bit(killed: Path, reference: Path) -> None:
    assert not (killed / "summary.json").exists()
    outcome = resume(killed, quiet=True)
    assert outcome.summary["stopped"] == "finished"
    assert_same_run(killed, reference)


class Signalling(Digits):
    """Sends this process a signal while it scores a chosen batch of rollouts."""

    when: int = 3
    calls: int = 0
    number: int = signal.SIGINT
    times: int = 1

    def verify(self, prompt: str, completion: str) -> float:
        if prompt[0] != "q":
            type(self).calls += 1
            if type(self).calls == 8 * self.when:
                for _ in range(self.times):
                    os.kill(os.getpid(), self.number)
        return super().verify(prompt, completion)


@pytest.fixture
def signalling(monkeypatch: pytest.MonkeyPatch) -> type[Signalling]:
    chosen = type("Chosen", (Signalling,), {})
    monkeypatch.setitem(TASKS, "digits", chosen)
    return chosen


@pytest.mark.supports("run: Ctrl-C and SIGTERM end it with a checkpoint", door="command line")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_and_saves(
    number: int, model: str, reference: Path, tmp_path: Path, signalling: type[Signalling], capfd: pytest.CaptureFixture[str]
) -> None:
    signalling.number = number
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    outcome = train(small(model, **LONG), out=tmp_path / "run", quiet=True)
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before
    assert (outcome.summary["stopped"], outcome.summary["steps"]) == ("interrupted", 3)
    assert summary(tmp_path / "run") == outcome.summary
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-6").is_dir(), "between the regular ones"
    printed = capfd.readouterr()
    assert "Stopping after this step" in printed.err
    assert f"Next: corral train --resume {tmp_path / 'run'}" in printed.out
    assert resume(tmp_path / "run", quiet=True).summary["stopped"] == "finished"
    assert_same_run(tmp_path / "run", reference)


@pytest.mark.supports("run: a second Ctrl-C ends it at once", door="command line")
def test_a_second_signal_ends_it_at_once(model: str, reference: Path, tmp_path: Path, signalling: type[Signalling]) -> None:
    signalling.times = 2
    outcome = train(small(model, **LONG), out=tmp_path / "run", quiet=True)
    assert (outcome.summary["stopped"], outcome.summary["steps"]) == ("interrupted", 2)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["checkpoint-4"]
    resume(tmp_path / "run", quiet=True)
    assert_same_run(tmp_path / "run", reference)


@pytest.mark.supports("run: a damaged checkpoint is passed over", door="command line")
def test_a_damaged_checkpoint_is_passed_over(reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(reference, tmp_path / "run")
    with (run / "checkpoints" / "checkpoint-12" / "optimizer.pt").open("r+b") as file:
        file.seek(1000)
        file.write(b"\xff\xff")
    shutil.rmtree(run / "checkpoints" / "checkpoint-8")
    resume(run, quiet=False)
    printed = capsys.readouterr()
    assert "checkpoint-12 is damaged (optimizer.pt is not what was written) and is not used." in printed.err
    assert "going on after step 2" in printed.out
    assert_same_run(run, reference)


def test_a_run_without_a_whole_checkpoint_starts_over(reference: Path, tmp_path: Path) -> None:
    run = shutil.copytree(reference, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    resume(run, quiet=True)
    assert_same_run(run, reference)


def test_an_infinite_bound_survives_being_saved(model: str, tmp_path: Path) -> None:
    train(small(model, steps=2, objective_config={"bound": float("inf")}), out=tmp_path / "run", quiet=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint-4")
    assert resume(tmp_path / "run", quiet=True).summary["stopped"] == "finished"


@pytest.mark.supports("model: LoRA", door="command line")
def test_a_run_with_an_adapter(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = small(model, steps=2, lora={"r": 2, "lora_alpha": 8})
    for name in ("one", "two"):
        torch.rand(3)  # what was drawn before must not matter
        train(settings, out=tmp_path / name)
    assert_same_run(tmp_path / "one", tmp_path / "two")
    assert "of them trained (LoRA)" in capsys.readouterr().out
    last = tmp_path / "one" / "checkpoints" / "checkpoint-4"
    saved = load_file(last / "adapter_model.safetensors")
    assert saved
    assert all(".lora_" in name for name in saved)
    assert json.loads((last / "adapter_config.json").read_text())["lora_alpha"] == 8
    tokens = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        plain, adapted = (AutoModelForCausalLM.from_pretrained(path)(tokens).logits for path in (model, last))
    assert not torch.allclose(plain, adapted)
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "checkpoint-4")
    resume(tmp_path / "two", quiet=True)
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.fixture(scope="module")
def adapter_run(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step of an adapter."""
    out = tmp_path_factory.mktemp("adapter") / "run"
    train(small(model, steps=1, lora={"r": 2, "lora_alpha": 8}), out=out, quiet=True)
    return out


@pytest.mark.supports("model: an adapter's checkpoint goes on training", door="command line")
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_an_adapters_checkpoint_goes_on_training(beta: float, adapter_run: Path, tmp_path: Path) -> None:
    start = adapter_run / "checkpoints" / "checkpoint-2"
    train(small(str(start), steps=2, beta=beta), out=tmp_path / "run", quiet=True)
    ended, begun, *updated = [lines(adapter_run)[-1], *lines(tmp_path / "run")]
    assert [begun[key] for key in ("success", "greedy")] == [ended[key] for key in ("success", "greedy")], "the same weights"
    assert all(line["grad_norm"] > 0 for line in updated)
    last = tmp_path / "run" / "checkpoints" / "checkpoint-4"
    before, after = (load_file(path / "adapter_model.safetensors") for path in (start, last))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert json.loads((last / "adapter_config.json").read_text())["r"] == 2
    again = shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(again / "checkpoints" / "checkpoint-4")
    resume(again, quiet=True)
    assert_same_run(again, tmp_path / "run")


def test_the_reference_of_an_adapter_is_the_adapter_as_it_was(adapter_run: Path, tmp_path: Path) -> None:
    start = str(adapter_run / "checkpoints" / "checkpoint-2")
    settings = small(start, steps=1, beta=0.1, steps_per_generation=1)  # one update, before which nothing has moved
    train(settings, out=tmp_path / "run", quiet=True)
    assert lines(tmp_path / "run")[1]["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.refuses("model: a new adapter on an adapter's checkpoint", door="command line")
def test_a_new_adapter_on_an_adapter_is_refused(adapter_run: Path, tmp_path: Path) -> None:
    start = shutil.copytree(adapter_run / "checkpoints" / "checkpoint-2", tmp_path / "adapter")
    with pytest.raises(RunError, match=r"adapter is an adapter, and lora.r asks for another one. Leave lora out to go on"):
        train(small(str(start), lora={"r": 4}), out=tmp_path / "run", quiet=True)
    config = json.loads((start / "adapter_config.json").read_text())
    (start / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/no/such/base"}))
    with pytest.raises(RunError, match=r"adapter is an adapter, and of its base there is no folder /no/such/base"):
        train(small(str(start)), out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_an_adapters_checkpoint_is_evaluated(adapter_run: Path, model: str) -> None:
    start = str(adapter_run / "checkpoints" / "checkpoint-2")
    sampler = TransformersSampler(find_subject(start, None), "cpu")
    ids = [[5, 6, 7]] * 4
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(model)(torch.tensor(ids)).logits
        adapted = AutoModelForCausalLM.from_pretrained(start)(torch.tensor(ids)).logits
        assert torch.equal(sampler.model(torch.tensor(ids)).logits, adapted)
    assert not torch.equal(plain, adapted)
    problems = Problems(task=Digits(), tokenizer=sampler.tokenizer, instruction="{problem}")
    completions = sampler.complete(OneTurn(), problems, ["12"] * 4, [0] * 4, Sampling(max_tokens=3))
    assert [1 <= len(completion.tokens) <= 3 for completion in completions] == [True] * 4


def test_a_finished_run_has_nothing_to_resume(reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(reference, tmp_path / "run")
    (run / "summary.json").unlink()  # killed between the last checkpoint and the summary
    assert resume(run, quiet=True).summary == summary(reference)
    assert capsys.readouterr().out.startswith("finished after 6 steps: held-out success")


def poison(monkeypatch: pytest.MonkeyPatch, updates: set[int], record: list[Any]) -> None:
    """NaN losses at these updates; weights and moments before and after every update."""
    compute = CorralTrainer._compute_loss

    def poisoned(self: CorralTrainer, *args: Any) -> torch.Tensor:
        loss = compute(self, *args)
        state = [p.detach().clone() for p in self.model.parameters()]
        state += [v.clone() for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        record.append(state)
        return loss * float("nan") if self.state.global_step in updates else loss

    monkeypatch.setattr(CorralTrainer, "_compute_loss", poisoned)


@pytest.mark.usefixtures("unchecked_shapes")  # a task of a user's may give anything
def test_success_needs_a_verdict(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Digits, "verify", lambda self, prompt, completion: None if prompt[0] == "q" else 1.0)
    with pytest.raises(RewardError, match=r"digits.verify gave None for .* needs a number"):
        train(small(model, steps=1), out=tmp_path / "run", quiet=True)


@pytest.mark.supports("run: a NaN is skipped and counted", door="command line")
def test_a_nan_changes_nothing_and_is_counted(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[Any] = []
    poison(monkeypatch, {2}, states)
    outcome = train(small(model), out=tmp_path / "run", quiet=True)
    same = [all(map(torch.equal, one, two)) for one, two in itertools.pairwise(states)]
    assert same == [False, False, True, False, False], "the third update, and only that, left everything alone"
    assert (outcome.summary["stopped"], outcome.summary["skipped"]) == ("finished", 1)
    assert [line["skipped"] for line in lines(tmp_path / "run")[1:]] == [0, 1, 1]
    assert lines(tmp_path / "run")[2]["warnings"] == ["update 3 had a non-finite loss and was skipped (1 so far)."]


def test_without_the_guard_a_nan_is_the_end(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {2}, [])
    with pytest.raises(ValueError, match="logp_new is not finite"):
        train(small(model, guard="off"), out=tmp_path / "run", quiet=True)
    assert summary(tmp_path / "run")["stopped"] == "failed"


@pytest.mark.supports("run: a NaN is skipped and counted", door="TRL")
def test_the_guard_serves_any_trainer(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {1, 4}, [])
    parts = prepare(small(model))
    parts.config.output_dir = str(tmp_path)
    guard = GuardCallback("stop", say=lambda _: None)
    trainer = CorralTrainer(
        parts.model,
        verifier(parts.problems.task),
        parts.config,
        parts.dataset,
        processing_class=parts.problems.tokenizer,
        callbacks=[guard],
    )
    trainer.train()
    assert guard.skipped == 2
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


class Forgetful(Digits):
    """Held-out problems that nobody can solve any more after the first measurement."""

    calls: int = 0

    def verify(self, prompt: str, completion: str) -> float:
        if prompt[0] == "q":
            type(self).calls += 1
            return 0.8 if self.calls <= 16 else 0.0  # 8 problems, sampled and greedy
        return super().verify(prompt, completion)


@pytest.mark.supports("run: a collapse warns or stops", door="command line")
@pytest.mark.parametrize("guard", ["warn", "stop"])
def test_a_collapse_is_noticed(guard: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "digits", type("Chosen", (Forgetful,), {}))
    settings = small(model, guard=guard, steps=5, eval_every=1, checkpoint_every=5)
    outcome = train(settings, out=tmp_path / "run", quiet=True)
    # .8 at step 0, then 0 at 1, 2 and 3: the third time in a row.
    assert lines(tmp_path / "run")[3]["warnings"][0].startswith("success fell from 0.8 to 0")
    assert outcome.summary["stopped"] == ("collapsed" if guard == "stop" else "finished")
    assert outcome.summary["steps"] == (3 if guard == "stop" else 5)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert checkpoint.name == f"checkpoint-{2 * outcome.summary['steps']}"
    assert (outcome.summary["why"] or "success fell").startswith("success fell")


@pytest.mark.supports("run: a sampler that differs is noticed", door="command line")
def test_a_sampler_that_differs_is_noticed(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token_batch = CorralTrainer._token_batch

    def stale(self: CorralTrainer, *args: Any, **kwargs: Any) -> Any:
        batch = token_batch(self, *args, **kwargs)
        return type(batch)(batch.logp_new, batch.logp_old - 1.0, batch.advantages, batch.mask)

    monkeypatch.setattr(CorralTrainer, "_token_batch", stale)
    train(small(model, objective="ppo_clip", steps=1), out=tmp_path / "run", quiet=True)
    (warning,) = lines(tmp_path / "run")[1]["warnings"]
    assert "of the tokens before any update" in warning


def rewards_that(outcome: Any) -> Any:
    class Broken(Digits):
        def verify(self, prompt: str, completion: str) -> float:
            if prompt[0] == "q":
                return 0.0
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

    return Broken


@pytest.mark.refuses("run: a reward that raises, or gives NaN or no number", door="command line")
@pytest.mark.usefixtures("unchecked_shapes")  # of what a verifier gives, where it is no number at all
@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (ZeroDivisionError("by zero"), r"digits\.verify raised ZeroDivisionError: by zero\. The completion was '"),
        (float("nan"), r"digits\.verify gave nan for the completion '.*A reward is a finite number"),
        ("good", r"digits\.verify gave 'good' for the completion"),
    ],
)
def test_a_broken_reward_is_named(
    outcome: Any, message: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "digits", rewards_that(outcome))
    with pytest.raises(RewardError, match=message):
        train(small(model), out=tmp_path / "run", quiet=True)
    ended = summary(tmp_path / "run")
    assert ended["stopped"] == "failed"
    assert "digits.verify" in ended["why"]
    assert len(lines(tmp_path / "run")) == 1, "what came before is kept"


@pytest.mark.supports("run: a reward function of one's own", door="command line")
def test_a_reward_function_of_the_users_own(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(
        "def length(prompts, completions, **columns):\n    return [float(len(c)) for c in completions]\n"
        "def short(prompts, completions, **columns):\n    return [1.0]\n"
        "def long(prompts, completions, **columns):\n"
        "    assert len(completions) < 2 or 'x' not in prompts[0]\n    raise KeyError(completions[-1])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    outcome = train(small(model, reward="own_rewards:length", steps=1), out=Path("run"), quiet=True)
    assert "rewards/length/mean" in lines(outcome.path)[1]
    with pytest.raises(RewardError, match="own_rewards:short gave 1 rewards for 8 completions, the first of which was '"):
        train(small(model, reward="own_rewards:short"), out=Path("short"), quiet=True)
    with pytest.raises(RewardError, match="own_rewards:long raised KeyError"):
        train(small(model, reward="own_rewards:long"), out=Path("long"), quiet=True)
    with pytest.raises(RunError, match="cannot be imported"):
        train(small(model, reward="own_rewards:missing"), out=Path("missing"), quiet=True)


@pytest.mark.supports("run: a full disk loses nothing", door="command line")
def test_a_full_disk_loses_nothing(model: str, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, calls = torch.save, []

    def full(content: Any, path: Any, *args: Any) -> None:
        calls.append(path)
        if "checkpoint-8" in str(path):
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
        save(content, path, *args)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RunError, match=r"the disk is full .*checkpoint-8 could not be written. Free some space, then resume"):
        train(small(model, **LONG), out=tmp_path / "run", quiet=True)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["checkpoint-4"]
    assert summary(tmp_path / "run")["stopped"] == "failed"
    monkeypatch.undo()
    resume(tmp_path / "run", quiet=True)
    assert_same_run(tmp_path / "run", reference)


class Empty(Digits):
    def train_prompts(self, count: int, seed: int) -> list[str]:
        return []


class NothingHeldOut(Digits):
    def held_out_prompts(self, count: int, seed: int) -> list[str]:
        return []


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        (Empty, {}, "digits has 0 problems to train on, and this run needs 6"),
        (NothingHeldOut, {}, "no held-out problems"),
        (
            Digits,
            {"task_config": {"prompt_length": 28}},
            r"a prompt has 29 tokens, and with max_completion_length=5 .* 32 positions",
        ),
        (Digits, {"task_config": {"promt_length": 28}}, "there is no setting `promt_length`. Did you mean 'prompt_length'"),
        (Digits, {"objective_config": {"bund": 1}}, "there is no setting `bund`. Did you mean 'bound'"),
        (Digits, {"lora": {"rank": 8}}, "lora: there is no setting `rank`"),
        (Digits, {"lora": {"lora_alfa": 8}}, "Did you mean 'lora_alpha'"),
        (Digits, {"correction": "tis", "anchor": "rollout"}, "with anchor='rollout' they are one"),
        (Digits, {"num_generations": 3}, "divisible"),
        (Digits, {"max_completion_length": None}, "`max_completion_length` is None"),
        (Digits, {"model": "/no/such/folder"}, "there is no folder /no/such/folder"),
        (Digits, {"model": "smollm2"}, "make smollm2"),
    ],
)
def test_what_cannot_run_leaves_no_folder(
    task: type, changes: dict[str, Any], message: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "digits", task)
    monkeypatch.setattr("corral.lab.models.packaged.find_spec", lambda name: None)
    with pytest.raises(RunError, match=message):
        train(small(**{"model": model, **changes}), out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_an_adapter_that_fits_nowhere_is_a_sentence(model: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"Target modules .*nowhere"):
        train(small(model, lora={"target_modules": ["nowhere"]}), out=tmp_path / "run", quiet=True)
    assert summary(tmp_path / "run")["stopped"] == "failed"


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"steps_per_generation": 1, "per_device_train_batch_size": 8}, "with one update per batch of rollouts"),
        ({"objective": "reinforce"}, "reinforce has no trust region"),
        ({"objective_config": {"bound": float("inf")}}, "the bound is infinite"),
        ({"objective": "dppo"}, None),
        ({"objective": "dppo", "objective_config": {"bound_low": float("inf")}}, None),  # `bound` stands where Â > 0
        ({"objective": "gspo"}, None),
        ({"objective": "gspo", "loss_type": "dapo"}, "loss_type='dapo' is token-mean, which gives gspo another gradient"),
    ],
)
def test_the_banner_says_when_the_region_cannot_act(
    changes: dict[str, Any], note: str | None, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: dict[str, str] = {}
    monkeypatch.setattr("corral.lab.jobs.llm.train.banner", lambda *args: said.update(banner(*args)) or [])
    train(small(model, steps=1, **changes), out=tmp_path / "run", quiet=True)
    assert {"corral", "objective", "step", "device", "run"} <= set(said)
    assert ("reduction" in said) is ("loss_type" in changes), "its own reduction is no news"
    assert all(f"{key}={value}" in said["objective"] for key, value in changes.get("objective_config", {}).items())
    assert "None" not in said["objective"]
    assert (note or "") in said.get("note", "")
    assert ("note" in said) is (note is not None)
    active = lines(tmp_path / "run")[1]["tr/active_frac"]
    assert active == 0 or "tr/active_frac will be 0" not in said.get("note", "")


@pytest.mark.parametrize(("anchor", "still"), [("old", True), ("rollout", False)])
def test_one_update_on_another_samplers_batch(anchor: str, still: bool) -> None:
    trainer = RunTrainer.__new__(RunTrainer)
    trainer.args = CorralConfig(
        output_dir="out", use_cpu=True, bf16=False, gradient_accumulation_steps=2, steps_per_generation=2, num_iterations=1
    )
    trainer.anchor, trainer.reports_logps, trainer.teacher = anchor, True, None
    trainer.objective = make_objective("ppo_clip")
    assert bool(why_inactive(trainer)) is still


@pytest.mark.parametrize(
    ("changes", "head", "support"),
    [
        ({"objective": "ppo_clip"}, "corral's head", "none: "),
        ({"objective": "ppo_clip", "top_entropy_quantile": 0.5}, "TRL's head", "none: "),
        ({"top_entropy_quantile": 0.5}, "corral's head", "the 64 likeliest"),
        ({"objective": "dppo", "objective_config": {"estimator": "full"}}, "corral's head", "every token"),
    ],
)
@pytest.mark.skipif(not FUSED, reason="this TRL computes all logits")
def test_the_banner_says_what_is_computed_with_what(
    changes: dict[str, Any], head: str, support: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: dict[str, str] = {}
    monkeypatch.setattr("corral.lab.jobs.llm.train.banner", lambda *args: said.update(banner(*args)) or [])
    train(small(model, steps=1, **changes), out=tmp_path / "run", verbose=True)
    assert f"; {head}" in said["device"]
    assert said["support"].startswith(support)


@pytest.mark.supports("kept: gradient accumulation", door="command line")
def test_misaligned_accumulation_still_saves_only_between_rollouts(model: str, tmp_path: Path) -> None:
    # 4 micro-batches per rollout, 3 per update: together again after 12, which are 4 updates and 3 rollouts.
    settings = small(model, steps=2, steps_per_generation=2, num_iterations=2, gradient_accumulation_steps=3)
    train(settings, out=tmp_path / "whole", quiet=True)
    assert [line["update"] for line in lines(tmp_path / "whole")] == [0, 4, 8]
    cut = shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(cut / "checkpoints" / "checkpoint-8")
    resume(cut, quiet=True)
    assert_same_run(cut, tmp_path / "whole")


@pytest.mark.supports("run: `--report-to tensorboard`", door="command line")
def test_tensorboard_writes_beside_the_run(model: str, tmp_path: Path) -> None:
    with contextlib.suppress(KeyError):
        del os.environ["TENSORBOARD_LOGGING_DIR"]
    train(small(model, steps=1, report_to="tensorboard"), out=tmp_path / "run", quiet=True)
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.*"))
    assert "TENSORBOARD_LOGGING_DIR" not in os.environ


def test_measuring_success_changes_nothing_else(model: str, tmp_path: Path) -> None:
    for every in (1, 3):
        train(small(model, eval_every=every), out=tmp_path / str(every), quiet=True)
    weights = [tmp_path / str(every) / "checkpoints" / "checkpoint-6" / "model.safetensors" for every in (1, 3)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_updates_per_step() -> None:
    counts = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 3}
    assert updates_per_step(CorralConfig(output_dir="out", use_cpu=True, bf16=False, **counts)) == 6
