"""The guard of a trainer: a poisoned update changes nothing, and a collapse warns or stops."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from corral.llm.guard import GuardCallback, on_any_process
from corral.run.watch import Limits

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
    assert guard.collapsed is None
    for update in range(10):
        pre_step(guard, model_with_gradients(float("nan")), update)
    assert guard.collapsed == "10 updates in a row had to be skipped: nothing is being learned."


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
    guard = GuardCallback("stop", Limits(patience=1), say=lambda _: None)
    guard.on_log(ARGS, TrainerState(global_step=1), TrainerControl(), logs={"train_runtime": 1.0, "tr/kl_before": 9.0})
    assert guard.collapsed is None


def test_acting_before_any_update_is_a_mismatch_and_said_once() -> None:
    said: list[str] = []
    guard = GuardCallback("warn", say=said.append)
    guard.check_first_update([0.0, 0.0])
    guard.check_first_update([])
    assert said == []
    guard.check_first_update([0.0, 0.02])
    guard.check_first_update([0.5])
    assert len(said) == 1
    assert said[0].startswith("the trust region acted on 1.00% of the tokens before any update")


def test_a_guard_is_where_it_was_after_a_resume() -> None:
    lines = [{"success": 0.6, "skipped": 1, "warnings": ["… before any update …"]}, {"success": 0.1}, {"success": 0.1}]
    guard = GuardCallback("stop", say=lambda _: None)
    guard.restore(lines)
    assert guard.skipped == 1
    guard.check_first_update([1.0])
    assert guard.news == []
    assert on_log(guard, {"success": 0.1}).should_training_stop


def test_one_process_speaks_for_itself() -> None:
    assert on_any_process(True)
    assert not on_any_process(False)
