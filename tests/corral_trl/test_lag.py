"""Stale rollouts: which weights draw and which score, what objectives read of either, and resumed = uninterrupted."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_models import Spy, dense_logp, fixed_rollout, make_trainer, measured, tiny_model
from torch import Tensor
from transformers import TrainerCallback

from corral.deployed.retract import restore, snapshot
from corral.lab.jobs.llm.train import resume, train
from corral.llm import CorralConfig, CorralTrainer
from small_runs import save_model, small
from tolerance import assert_close

LORA = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)}
SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}


class Witness(TrainerCallback):
    """Keeps the weights at the start of every step and the rollouts that were drawn for it."""

    def __init__(self, trainer: CorralTrainer, updates: int = 2) -> None:
        self.trainer, self.updates = trainer, updates
        self.weights: list[dict[str, Tensor]] = []
        self.drawn: list[list[dict[str, Any]]] = []
        trainer.add_callback(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.updates == 0:
            self.weights.append(snapshot(self.trainer.model))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.updates == 0:
            self.drawn.append([dict(inputs) for inputs in self.trainer._buffered_inputs])

    @torch.no_grad()
    def logp(self, step: int, inputs: dict[str, Any]) -> Tensor:
        """Log-probs of the sampled tokens under the weights at the start of a step."""
        restore(self.trainer.model, self.weights[step])
        found = dense_logp(self.trainer.model, inputs, 0.9)
        return found.gather(-1, inputs["completion_ids"][..., None])[..., 0]


def logged(trainer: CorralTrainer, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


@pytest.mark.supports("anchor: stale rollouts, drawn by earlier weights (`rollout_lag`)", door="TRL")
@pytest.mark.parametrize("objective", ["troll", "ppo_clip"])
def test_earlier_weights_draw_and_present_weights_score(tmp_path: Path, objective: str) -> None:
    trainer = make_trainer(tmp_path, objective, rollout_lag=2, max_steps=8)
    witness = Witness(trainer)
    trainer.train()
    # Two updates a step. Lags are min(t, 2), so the first three batches are all from the first weights.
    assert logged(trainer, "tr/staleness") == [0, 0, 1, 1, 2, 2, 2, 2]
    for step, batches in enumerate(witness.drawn):
        for inputs in batches:
            mask, sampled_at = inputs["completion_mask"].bool(), max(0, step - 2)
            assert set(inputs["corral_sampled_at"].tolist()) == {sampled_at}
            drew, scored = inputs["sampling_per_token_logps"][mask], inputs["old_per_token_logps"][mask]
            assert_close(drew, witness.logp(sampled_at, inputs)[mask], atol=1e-4)
            assert_close(scored, witness.logp(step, inputs)[mask], atol=1e-4)
            if objective == "troll":
                assert_close(inputs["corral_logp"][..., 0][mask], scored)
            assert step == 0 or (drew - scored).abs().max() > 1e-2
    assert all(drift < 1e-5 for drift in logged(trainer, "tr/drift_max")), "the old policy is the present one"
    assert logged(trainer, "tr/mismatch")[0] < 1e-5 < 1e-3 < logged(trainer, "tr/mismatch")[-1]


def test_a_lag_changes_neither_prompts_nor_their_number_nor_the_first_batch(tmp_path: Path) -> None:
    drawn = []
    for lag in (0, 1):
        trainer = make_trainer(tmp_path, "ppo_clip", rollout_lag=lag, max_steps=6)
        witness = Witness(trainer)
        trainer.train()
        drawn.append(witness.drawn)
        assert (lag == 0) == ("corral_sampled_at" not in witness.drawn[0][0])
        assert (lag == 0) == (not logged(trainer, "tr/staleness"))
    present, stale = drawn
    assert all(torch.equal(a["completion_ids"], b["completion_ids"]) for a, b in zip(present[0], stale[0], strict=True))

    def asked(step: list[dict[str, Any]]) -> list[tuple[int, ...]]:
        rows = [row for inputs in step for row in inputs["prompt_ids"].tolist()]
        return sorted(tuple(row) for row in rows)

    assert [asked(step) for step in present] == [asked(step) for step in stale]


@pytest.mark.parametrize(
    ("objective", "given"),
    [
        ("dppo", {"objective_config": {"bound": 0.02}}),
        ("troll", {"anchor": "rollout"}),
        ("decoupled_ppo", {}),
        ("ppo_clip", {"correction": "tis"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("accumulation", [1, 2], ids=["two updates", "one update"])
def test_what_reads_the_sampler_reads_the_policy_that_drew(
    tmp_path: Path, objective: str, given: dict[str, Any], accumulation: int
) -> None:
    same: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "max_steps": 6 // accumulation, **given}
    trainer = make_trainer(tmp_path, objective, rollout_lag=1, **same)
    witness, said = Witness(trainer, updates=2 // accumulation), list[str]()
    trainer.self_check.say = said.append
    spy = Spy.on(trainer)
    trainer.train()
    assert not said, "a region may act before any update where it lies around an earlier policy"
    assert trainer.on_policy is (trainer.anchor == "old" and accumulation == 2)
    step, batch = 2, spy.batches[4]  # two micro-batches a step
    inputs = witness.drawn[step][0]
    mask = inputs["completion_mask"].bool()
    drew = inputs["sampling_per_token_logps"][mask]
    assert batch.logp_rollout is not None
    assert torch.equal(batch.logp_rollout[mask], drew)
    expected = drew if trainer.anchor == "rollout" else witness.logp(step, inputs)[mask]
    assert_close(batch.logp_old[mask], expected, atol=1e-4)
    assert (batch.logp_new.detach() - batch.logp_rollout)[mask].abs().max() > 1e-3
    if objective == "dppo":
        assert max(logged(trainer, "tr/active_frac")) > 0
    if batch.dist_old is not None and trainer.anchor == "rollout":
        assert_close(batch.dist_old.logp[..., 0][mask], drew)


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "LoRA"])
@pytest.mark.parametrize("at", [2, 6], ids=["while it fills", "when it is full"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, lora: bool, at: int) -> None:
    def trainer(where: Path) -> CorralTrainer:
        given = LORA if lora else {}
        same: dict[str, Any] = {"rollout_lag": 3, "max_steps": 10, "gradient_accumulation_steps": 2, "num_iterations": 2}
        return make_trainer(where, "troll", trainer_kwargs=given, save_strategy="steps", save_steps=at, **same)

    whole, again = trainer(tmp_path / "whole"), trainer(tmp_path / "again")
    whole.train()
    shutil.copytree(tmp_path / "whole" / f"checkpoint-{at}", tmp_path / f"checkpoint-{at}")
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}"))
    ages = [logged(one, "tr/staleness") for one in (whole, again)]
    assert ages[0] == ages[1] == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3]
    losses = [logged(one, "loss") for one in (whole, again)]
    assert losses[0] == losses[1]
    weights = [snapshot(one.model) for one in (whole, again)]
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())
    assert again.past is not None
    assert list(again.past.weights) == [2, 3, 4], "what the next step would need"
    assert again.past.weights[2].keys() == weights[0].keys(), "adapters alone, where nothing else is trained"


@pytest.mark.supports("run: with stale rollouts (`rollout_lag`), resumed bit for bit", door="command line")
def test_a_resumed_run_of_the_command_is_the_uninterrupted_one(tmp_path: Path) -> None:
    settings = small(save_model(tmp_path / "model"), objective="dppo", rollout_lag=2, steps=4, keep_checkpoints=9)
    train(settings, out=tmp_path / "whole", quiet=True)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for late in (6, 8):
        shutil.rmtree(tmp_path / "cut" / "checkpoints" / f"checkpoint-{late}")
    (tmp_path / "cut" / "summary.json").unlink()
    resume(tmp_path / "cut", quiet=True)
    found = []
    for name in ("whole", "cut"):
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        found.append(
            [{key: line.get(key) for key in ("step", "success", "loss", "tr/staleness", "tr/kl_before")} for line in lines]
        )
    assert found[0] == found[1]
    assert [line["tr/staleness"] for line in found[0]] == [None, 0, 1, 2, 2]
    last = [(tmp_path / name / "checkpoints" / "checkpoint-8") for name in ("whole", "cut")]
    assert (last[0] / "model.safetensors").read_bytes() == (last[1] / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "given",
    [
        {"learning_rate": "auto"},
        {"deployed_bound": 0.01},
        {"reuse": "auto", "num_iterations": 3, "deployed_bound": 1e-4},
        {"support": "union"},
        {"beta": 0.1},
        {"bf16": True},
        {"num_iterations": 2, "advantage": "rloo"},
    ],
    ids=str,
)
def test_other_settings_work_with_a_lag(tmp_path: Path, given: dict[str, Any]) -> None:
    same: dict[str, Any] = {"max_steps": 12 if "reuse" in given else 6, "trainer_kwargs": LORA if "beta" in given else {}}
    trainer = make_trainer(tmp_path, "troll", rollout_lag=1, **same, **given)  # an adapter is its own reference
    witness = Witness(trainer, updates=2 * trainer.args.num_iterations)
    trainer.train()
    assert logged(trainer, "tr/staleness")[-1] == 1
    assert all(math.isfinite(loss) for loss in logged(trainer, "loss"))
    if "bf16" not in given:  # weights rounded for sampling are those of the policy that drew, and are forgotten
        inputs = witness.drawn[1][0]
        mask = inputs["completion_mask"].bool()
        assert_close(inputs["sampling_per_token_logps"][mask], witness.logp(0, inputs)[mask], atol=1e-4)
        assert_close(inputs["old_per_token_logps"][mask], witness.logp(1, inputs)[mask], atol=1e-4)
    if trainer.deployed is not None:
        assert all(0 <= moved < math.inf for moved in logged(trainer, "tr/deployed_kl_mean"))


def test_a_teacher_scores_stale_rollouts(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "distill", rollout_lag=1, max_steps=4, trainer_kwargs={"teacher": tiny_model(seed=5)})
    trainer.train()
    assert logged(trainer, "tr/staleness")[-1] == 1
    assert all(drift < 1e-5 for drift in logged(trainer, "tr/drift_max"))


def test_an_evaluation_draws_from_the_present_weights(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "ppo_clip", rollout_lag=3, max_steps=4, per_device_eval_batch_size=4)
    trainer.train()
    seen: list[dict[str, Any]] = []
    trainer.token_observer = lambda inputs, batch, objective: seen.append(inputs)
    before = snapshot(trainer.model)
    trainer.evaluate(trainer.train_dataset.select(range(4)))
    inputs = seen[0]
    mask = inputs["completion_mask"].bool()
    with torch.no_grad():
        logp = dense_logp(trainer.model, inputs, 0.9).gather(-1, inputs["completion_ids"][..., None])[..., 0]
    assert_close(inputs["sampling_per_token_logps"][mask], logp[mask], atol=1e-4)
    assert "corral_sampled_at" not in inputs
    assert all(torch.equal(x, before[name]) for name, x in snapshot(trainer.model).items())
    assert "tr/staleness" not in measured(trainer)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"rollout_lag": -1}, r"`rollout_lag` must be a whole number ≥ 0|rollout_lag.*-1"),
        ({"rollout_lag": 1, "gradient_accumulation_steps": 4, "steps_per_generation": 2}, "no multiple of"),
        ({"rollout_lag": 1, "use_vllm": True}, "another sampler draws: vLLM"),
    ],
    ids=["negative", "update across batches", "vLLM"],
)
def test_what_a_lag_cannot_do_is_refused(tmp_path: Path, given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make_trainer(tmp_path, **{"objective": "ppo_clip", "anchor": "auto", **given})


def test_another_sampler_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="another sampler draws"):
        make_trainer(tmp_path, "ppo_clip", rollout_lag=1, trainer_kwargs={"rollout_func": fixed_rollout([-1.0, -1.0, -1.0])})


def test_a_checkpoint_without_past_weights_is_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path, "ppo_clip", max_steps=2, **SAVED).train()
    trainer = make_trainer(tmp_path, "ppo_clip", rollout_lag=1, max_steps=4)
    with pytest.raises(ValueError, match=r"checkpoint-2 has no past_weights.pt, which `rollout_lag` needs"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_checkpoints_are_saved_between_batches(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "ppo_clip", rollout_lag=1, max_steps=9, save_strategy="steps", save_steps=3)
    with pytest.raises(
        ValueError, match=r"end of a batch of rollouts. A step has 2 updates, and `save_steps` is 3.* save_steps=4"
    ):
        trainer.train()
    stopped = make_trainer(tmp_path, "ppo_clip", rollout_lag=1, max_steps=3, save_strategy="steps", save_steps=8)
    stopped.train()  # the end of a run is saved whenever it comes
    assert (tmp_path / "checkpoint-3").is_dir()
    assert not (tmp_path / "checkpoint-3" / "past_weights.pt").exists()


def test_a_model_alone_is_saved_without_past_weights(tmp_path: Path) -> None:
    make_trainer(tmp_path, "ppo_clip", rollout_lag=1, max_steps=2, save_only_model=True, **SAVED).train()
    assert not (tmp_path / "checkpoint-2" / "past_weights.pt").exists()


def test_the_default_is_no_lag() -> None:
    assert CorralConfig(output_dir="out", use_cpu=True, bf16=False).rollout_lag == 0
