"""Collapses are told from ordinary learning, and a step without gradients changes nothing."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from corral.lab.run.guard import CollapseLimits, CollapseWatch, Guard
from corral.numerics import drop_gradients, gradient_state


def observe(lines: list[dict[str, Any]], **limits: Any) -> list[str]:
    watch = CollapseWatch(CollapseLimits(**limits))
    return [finding.sentence for line in lines for finding in watch.observe(line)]


def model_with_gradients(*values: float) -> nn.Module:
    model = nn.Linear(len(values), 1, bias=False)
    model.weight.grad = torch.tensor([values])
    return model


@pytest.mark.parametrize(
    ("values", "state"),
    [
        ((1.0, 2.0), (True, False)),
        ((0.0, -0.0), (True, True)),
        ((0.0, 1e-45), (True, False)),  # the smallest there is
        ((0.0, float("nan")), (False, False)),
        ((-float("inf"), 0.0), (False, False)),
    ],
)
def test_the_state_of_a_gradient(values: tuple[float, ...], state: tuple[bool, bool]) -> None:
    still = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(0))]
    for parameter in still:
        parameter.grad = torch.zeros_like(parameter)
    assert gradient_state([*still, *model_with_gradients(*values).parameters()]) == state


def test_a_model_without_gradients_is_fine_and_not_still() -> None:
    assert gradient_state(nn.Linear(2, 2).parameters()) == (True, False)


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
    assert observe([*[line] * 19, {"frac_reward_zero_std": 0.8}, *[line] * 19]) == []
    assert observe([{**line, "success": 1.0}] * 30) == [], "solved"


def test_almost_equal_rewards_are_reported_before_they_are_a_collapse() -> None:
    line = {"frac_reward_zero_std": 0.95, "reward": 0.5}
    assert observe([line] * 19) == []
    assert observe([line] * 30) == [
        "for 20 steps at least 90% of the groups had one reward for all completions (95% now): almost every sample is wasted. "
        "Try easier problems, more completions per prompt, or a reward with more than two values."
    ]
    assert observe([*[line] * 19, {"frac_reward_zero_std": 0.8}, *[line] * 19]) == []
    assert observe([{**line, "success": 1.0}] * 30) == [], "solved"
    (sentence,) = observe([{**line, "frac_reward_zero_std": 1.0}] * 20)
    assert "every advantage is 0" in sentence, "of two kinds at once the worse one is said"


def test_a_small_effective_sample_size_is_reported() -> None:
    fine, bad = {"tr/ess": 0.7}, {"tr/ess": 0.69}
    assert observe([fine] * 9) == []
    assert len(observe([bad, bad, fine, bad])) == 2, "once until it has recovered"
    (sentence,) = observe([fine, bad])
    assert sentence.startswith("tr/ess is 0.69, below 0.7: a few tokens with large ratios decide the updates")
    assert "fewer updates per batch" in sentence
    assert len(observe([{"tr/ess": math.nan}])) == 1


def test_completions_that_never_end_are_reported() -> None:
    cut = {"completions/clipped_ratio": 1.0}
    assert observe([cut] * 9) == []
    (sentence,) = observe([cut] * 30)
    assert sentence.startswith("for 10 steps every completion was cut off before its end")
    assert "raise max_completion_length" in sentence
    assert observe([*[cut] * 9, {"completions/clipped_ratio": 0.9}, *[cut] * 9]) == []


def test_a_zero_gradient_is_reported_unless_equal_rewards_explain_it() -> None:
    assert observe([{"zero_gradients": 9, "frac_reward_zero_std": 0.25}]) == []
    assert observe([{"zero_gradients": 10, "frac_reward_zero_std": 1.0}]) == [], "no advantage, no gradient"
    # Not every line has new rollouts: rewards are those of the last that had.
    lines = [{"zero_gradients": 0, "frac_reward_zero_std": 0.25}, {"zero_gradients": 10}, {"zero_gradients": 12}]
    (sentence,) = observe(lines)
    assert sentence.startswith("the gradient was exactly 0 at each of the last 10 updates, though rewards differ in 75% of")
    assert "requires a gradient" in sentence
    assert len(observe([*lines, {"zero_gradients": 0}, *lines])) == 2, "it had recovered"


@pytest.mark.parametrize(
    ("line", "times"), [({"tr/ess": 0.1}, 1), ({"zero_gradients": 10}, 1), ({"completions/clipped_ratio": 1.0}, 10)]
)
def test_a_sign_of_a_collapse_is_told_but_stops_nothing(line: dict[str, Any], times: int) -> None:
    guard = Guard("stop", say=lambda _: None)
    for _ in range(times):
        guard.observe(line)
    assert len(guard.news) == 1
    assert guard.collapsed is None
