"""Collapses are told from ordinary learning, and a step without gradients changes nothing."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from corral.run.guard import drop_gradients, finite_gradients
from corral.run.watch import CollapseWatch, Limits


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
    assert finite_gradients(model_with_gradients(*values).parameters()) is finite


def test_a_model_without_gradients_is_fine() -> None:
    assert finite_gradients(nn.Linear(2, 2).parameters())


@pytest.mark.parametrize("optimizer_cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_a_step_without_gradients_leaves_weights_and_moments_alone(optimizer_cls: Any) -> None:
    model = model_with_gradients(1.0, 2.0)
    optimizer = optimizer_cls(model.parameters(), lr=0.1, weight_decay=0.1)
    optimizer.step()
    before = model.weight.clone(), [value.clone() for value in tensors(optimizer)]
    model.weight.grad = torch.tensor([[1.0, float("nan")]])
    drop_gradients(model.parameters())
    optimizer.step()
    torch.testing.assert_close(model.weight, before[0], atol=0, rtol=0)
    for now, then in zip(tensors(optimizer), before[1], strict=True):
        torch.testing.assert_close(now, then, atol=0, rtol=0)


def tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


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


@pytest.mark.parametrize("key", ["success", "entropy"])
def test_one_value_that_is_no_number_does_not_hide_a_collapse(key: str) -> None:
    # The best stays .6, and the fall is told from it; the NaN itself is one bad line, and three of those are a collapse.
    lines = [{key: value} for value in (0.6, math.nan, 0.55, 0.001, 0.001, 0.001)]
    assert observe(lines[:5]) == []
    assert observe(lines)[0].startswith(f"{key} fell from 0.6 to 0.001")
    assert observe([{key: 0.6}, *[{key: math.nan}] * 3])[0].startswith(f"{key} fell from 0.6 to nan")
    assert observe([{key: math.nan}, *[{key: 0.6}] * 9]) == []


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
