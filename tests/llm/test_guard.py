"""Guards: a poisoned update changes nothing, and collapses are told from ordinary learning."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from corral.llm.guard import CollapseWatch, GuardCallback, Limits, drop_gradients, finite_gradients, on_any_process

ARGS = TrainingArguments(output_dir="nowhere", use_cpu=True, bf16=False)


def observe(lines: list[dict[str, Any]], **limits: Any) -> list[str]:
    watch = CollapseWatch(Limits(**limits))
    return [sentence for line in lines for sentence in watch.observe(line)]


def model_with_gradients(*values: float) -> nn.Module:
    model = nn.Linear(len(values), 1, bias=False)
    model.weight.grad = torch.tensor([values])
    return model


@pytest.mark.parametrize(
    ("values", "finite"), [((1.0, 2.0), True), ((1.0, float("nan")), False), ((-float("inf"), 0.0), False)]
)
def test_finite_gradients(values: tuple[float, ...], finite: bool) -> None:
    assert finite_gradients(model_with_gradients(*values)) is finite


def test_a_model_without_gradients_is_fine() -> None:
    assert finite_gradients(nn.Linear(2, 2))


@pytest.mark.parametrize("optimizer_cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_a_step_without_gradients_leaves_weights_and_moments_alone(optimizer_cls: Any) -> None:
    model = model_with_gradients(1.0, 2.0)
    optimizer = optimizer_cls(model.parameters(), lr=0.1, weight_decay=0.1)
    optimizer.step()
    before = model.weight.clone(), [value.clone() for value in tensors(optimizer)]
    model.weight.grad = torch.tensor([[1.0, float("nan")]])
    drop_gradients(model)
    optimizer.step()
    torch.testing.assert_close(model.weight, before[0], atol=0, rtol=0)
    for now, then in zip(tensors(optimizer), before[1], strict=True):
        torch.testing.assert_close(now, then, atol=0, rtol=0)


def tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


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


def test_success_far_below_its_best_is_a_collapse() -> None:
    # Best .6, so below .3: three measurements in a row; lines without one in between do not count.
    rise = [{"success": value} for value in (0.1, 0.4, 0.6)]
    fall = [{"success": 0.2}, {"success": None}, {"success": 0.1}, {"success": None}, {"success": 0.0}]
    assert observe(rise + fall[:4]) == []
    (sentence,) = observe(rise + fall)
    assert sentence.startswith("success fell from 0.6 to 0 and stayed there: the policy is collapsing.")
    assert len(observe(rise + fall + fall)) == 1, "it is said once"
    assert observe([*rise, {"success": 0.2}, {"success": 0.5}, {"success": 0.2}, {"success": 0.2}]) == []
    assert observe([{"success": value} for value in (0.02, 0.0, 0.0, 0.0, 0.0)]) == [], "noise near zero"


def test_entropy_may_fall_tenfold_but_not_hundredfold() -> None:
    assert observe([{"entropy": 0.72}, *[{"entropy": 0.05}] * 9]) == []
    assert "entropy fell from 0.72 to 0.005" in observe([{"entropy": 0.72}, *[{"entropy": 0.005}] * 9])[0]
    assert observe([{"entropy": 0.72, "success": 0.95}, *[{"entropy": 0.0}] * 9]) == [], "certain, and right"


@pytest.mark.parametrize(("key", "fine", "bad"), [("tr/kl_before", 0.5, 3.0), ("kl", 5.0, 50.0)])
def test_an_exploding_kl_is_a_collapse(key: str, fine: float, bad: float) -> None:
    assert observe([{key: fine}] * 9) == []
    assert observe([{key: bad}, {key: fine}] * 5) == []
    assert "runs away" in observe([{key: bad}] * 3)[0]
    assert "runs away" in observe([{key: float("nan")}] * 3)[0]


def test_equal_rewards_for_long_are_reported() -> None:
    line = {"frac_reward_zero_std": 1.0, "reward": 0.0}
    assert observe([line] * 19) == []
    assert "same reward (0)" in observe([line] * 20)[0]
    assert observe([*[line] * 19, {"frac_reward_zero_std": 0.9}, *[line] * 19]) == []
    assert observe([{**line, "success": 1.0}] * 30) == [], "solved"


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
