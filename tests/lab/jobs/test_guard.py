"""The guard of a trainer: a poisoned update changes nothing, and a collapse warns or stops."""

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import loss_and_gradient, make_trainer, rollouts, without_fused_loss
from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from corral.lab.jobs.llm.trainer import GuardCallback
from corral.lab.run.guard import CollapseLimits
from corral.tensors import TokenBatch
from corral.trl.callbacks import SelfCheck, on_any_process
from corral.trl.trainer import CorralTrainer

ARGS = TrainingArguments(output_dir="nowhere", use_cpu=True, bf16=False)


def model_with_gradients(*values: float) -> nn.Module:
    model = nn.Linear(len(values), 1, bias=False)
    model.weight.grad = torch.tensor([values])
    return model


def pre_step(guard: GuardCallback, model: nn.Module, update: int = 0) -> None:
    guard.on_pre_optimizer_step(ARGS, TrainerState(global_step=update), TrainerControl(), model=model)


def test_poisoned_updates_are_skipped_and_counted() -> None:
    said: list[str] = []
    guard = GuardCallback("warn", say=said.append)
    good, bad = model_with_gradients(1.0), model_with_gradients(float("nan"))
    pre_step(guard, good, 0)
    pre_step(guard, bad, 1)
    assert good.weight.grad is not None
    assert bad.weight.grad is None
    assert guard.skipped == 1
    assert said == ["update 2 had a non-finite gradient and was skipped (1 so far)."]
    guard.loss_is_finite = False  # finite gradients, but the loss is not
    pre_step(guard, good, 2)
    assert good.weight.grad is None
    assert guard.skipped == 2
    assert guard.loss_is_finite


def test_off_means_off_and_fp16_has_a_scaler_of_its_own() -> None:
    half = copy.copy(ARGS)
    half.fp16 = True  # refused in the constructor where there is no GPU
    for guard, args in ((GuardCallback("off"), ARGS), (GuardCallback("stop"), half)):
        bad = model_with_gradients(float("nan"))
        guard.on_pre_optimizer_step(args, TrainerState(global_step=0), TrainerControl(), model=bad)
        assert bad.weight.grad is not None
        assert guard.skipped == 0


def test_many_skipped_updates_in_a_row_are_a_collapse() -> None:
    guard = GuardCallback("stop", say=lambda _: None)
    for update in range(9):
        pre_step(guard, model_with_gradients(float("nan")), update)
    pre_step(guard, model_with_gradients(1.0), 9)
    for update in range(10, 19):
        pre_step(guard, model_with_gradients(float("nan")), update)
    assert guard.collapsed is None  # 9 and 9, with a good one between them
    pre_step(guard, model_with_gradients(float("nan")), 19)
    assert guard.collapsed == "10 updates in a row had to be skipped: nothing is being learned."


def test_golden_a_hidden_kl_is_warned_of_unless_it_was_retracted() -> None:
    # .1 is above .05; of a step that kept 18 %, .1 · .18² = .003 is left.
    said: list[str] = []
    check = SelfCheck(SimpleNamespace(union=False))  # type: ignore[arg-type]
    check.say = said.append
    for line in ({"tr/hidden_kl_max": 0.1, "tr/step_share": 0.18}, {"tr/hidden_kl_max": 0.04}):
        check.on_log(ARGS, TrainerState(is_world_process_zero=True), TrainerControl(), logs=line)
    assert not said
    check.on_log(ARGS, TrainerState(is_world_process_zero=True), TrainerControl(), logs={"tr/hidden_kl_max": 0.1})
    assert [sentence[:24] for sentence in said] == ["tr/hidden_kl_max is 0.1:"]


def on_log(guard: GuardCallback, line: dict[str, Any]) -> TrainerControl:
    control = TrainerControl()
    guard.on_log(ARGS, TrainerState(global_step=1), control, logs={"loss": 0.0, **line})
    return control


@pytest.mark.parametrize("mode", ["warn", "stop", "off"])
def test_a_collapse_warns_or_stops_with_a_checkpoint(mode: Any) -> None:
    said: list[str] = []
    guard = GuardCallback(mode, say=said.append)
    controls = [on_log(guard, {"tr/kl_before": 9.0}) for _ in range(3)]
    assert len(said) == (mode != "off")
    assert [control.should_training_stop for control in controls] == [False, False, mode == "stop"]
    assert controls[-1].should_save is (mode == "stop")
    assert (guard.collapsed is not None) is (mode == "stop")
    assert guard.news == said


def test_the_last_words_of_a_trainer_are_no_line() -> None:
    guard = GuardCallback("stop", CollapseLimits(patience=1), say=lambda _: None)
    guard.on_log(ARGS, TrainerState(global_step=1), TrainerControl(), logs={"train_runtime": 1.0, "tr/kl_before": 9.0})
    assert guard.collapsed is None


def test_a_guard_is_where_it_was_after_a_resume() -> None:
    lines = [{"success": 0.6, "skipped": 1}, {"success": 0.1, "zero_gradients": 4}, {"success": 0.1, "zero_gradients": 6}]
    guard = GuardCallback("stop", say=lambda _: None)
    guard.restore(lines)
    assert (guard.skipped, guard.zero_gradients) == (1, 6)
    assert on_log(guard, {"success": 0.1}).should_training_stop


def test_updates_without_a_gradient_are_counted_in_a_row() -> None:
    said: list[str] = []
    guard = GuardCallback("stop", say=said.append)
    for gradient in (0.0, 1.0, *[0.0] * 10):
        pre_step(guard, model_with_gradients(gradient))
    assert guard.zero_gradients == 10
    assert not on_log(guard, {"frac_reward_zero_std": 0.0}).should_training_stop
    assert said[0].startswith("the gradient was exactly 0 at each of the last 10 updates")
    pre_step(guard, nn.Linear(1, 1))  # gradients that nobody can see are not 0
    assert guard.zero_gradients == 0


def test_one_process_speaks_for_itself() -> None:
    assert on_any_process(True)
    assert not on_any_process(False)


def drifting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: range, **settings: Any) -> CorralTrainer:
    """Weights that never move, and an old policy that is another one at these updates; four updates per batch of rollouts."""
    token_batch = CorralTrainer._token_batch

    def stale(self: CorralTrainer, *args: Any, **kwargs: Any) -> TokenBatch:
        batch = token_batch(self, *args, **kwargs)
        old = batch.logp_old - (1.0 if self.state.global_step in updates else 0.0)
        return TokenBatch(batch.logp_new, old, batch.advantages, batch.mask)

    monkeypatch.setattr(CorralTrainer, "_token_batch", stale)
    return make_trainer(tmp_path, "ppo_clip", steps_per_generation=4, learning_rate=1e-12, **settings)


@pytest.mark.supports("run: a sampler that differs is noticed", door="TRL")
@pytest.mark.parametrize("logging_steps", [1, 100])
def test_any_trainer_says_once_that_the_region_acts_before_any_update(
    logging_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    second_batch_on = range(4, 9)
    trainer = drifting(tmp_path, monkeypatch, second_batch_on, max_steps=9, logging_steps=logging_steps)
    with caplog.at_level("WARNING", "corral.lab.jobs.llm.trainer"):
        trainer.train()
    (message,) = caplog.messages
    # log ρ is 1 at every token, so ρ = e is beyond the clip range wherever the advantage is positive.
    share = re.search(r"acted on (\S+)% of the tokens before any update", message)
    assert share
    assert 0 < float(share[1]) < 100


def test_acting_later_is_what_a_region_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The first updates of both batches are clean; the three in between are not, and are in the log by the second.
    trainer = drifting(tmp_path, monkeypatch, range(1, 4), max_steps=5, logging_steps=100)
    with caplog.at_level("WARNING", "corral.lab.jobs.llm.trainer"):
        trainer.train()
    assert caplog.messages == []
    assert trainer.state.log_history[-1]["tr/active_frac"] > 0


@pytest.mark.parametrize("objective", ["ppo_clip", "troll"])
def test_a_trainers_first_batch_is_compared_with_its_anchor(
    objective: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Old log-probs of the wrong tokens are noticed at the first micro-batch, once, by either path of the loss."""
    for fused in (True, False):
        trainer = make_trainer(tmp_path, objective, support_mass=1.0)
        if not fused:
            without_fused_loss(trainer)
        first, second = rollouts(trainer)
        for inputs in (first, second):
            for name in ("old_per_token_logps", "corral_logp"):
                if name in inputs:
                    inputs[name] = inputs[name] - 1.0
            if "corral_rest" in inputs:
                inputs["corral_rest"] = torch.log1p(-inputs["corral_logp"].exp().sum(-1))
        caplog.clear()
        with caplog.at_level("WARNING", "corral.objective.check"):
            loss_and_gradient(trainer, first)
            loss_and_gradient(trainer, second)
        (message,) = caplog.messages
        assert message.startswith(f"{objective}: at the first call new and old log-probs differ by 1.00 nats on average")


@pytest.mark.refuses("model: nothing that requires a gradient", door="TRL")
def test_a_model_that_is_frozen_throughout_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, gradient_checkpointing=True)  # which gives embeddings a gradient, and weights none
    trainer.model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"no parameter of the model requires a gradient.*is_trainable=True"):
        trainer.train()
