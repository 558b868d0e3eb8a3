"""CPPO: DPPO's mask with weights by position and a budget for the prefix."""

import math
from dataclasses import replace

import torch
from batches import as_batch, inputs, loss_and_grad, random_batch, row, tokens
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from corral import TokenBatch, make_objective
from tolerance import assert_close


def keeps(moved: list[float], outward: list[bool], bound: float, last: float, floor: float) -> list[bool]:
    """Which tokens of one sequence keep their gradient, one after the other."""
    n = len(moved)
    ordered = sorted(moved)
    at = 0.9 * (n - 1)
    below = math.floor(at)
    percentile = ordered[below] + (at - below) * (ordered[min(below + 1, n - 1)] - ordered[below])
    budget = min(max(percentile, floor), 2 * floor)
    spent = earned = 0.0
    kept = []
    for t, (d, out) in enumerate(zip(moved, outward, strict=True)):
        weight = 1 - (1 - last) * t / max(n - 1, 1)
        limit = min(bound, bound + (budget * earned - spent if earned else 0.0))
        assume(abs(weight * d - limit) > 1e-9)
        kept.append(not out or weight * d <= limit)
        spent, earned = spent + weight * d, earned + weight
    return kept


def test_golden_weights_and_budget():
    # D = .15, .15, .15, .19; P90 is above .04, so b = .04.  w = 1, .9333, .8667, .8.  δ = .2.
    # w D = .15, .14, .13, .152.  Spent before: 0, .15, .29, .42; earned: 0, 1, 1.9333, 2.8, times b: 0, .04, .0773, .112.
    # Limits: .2, .2 + .04 − .15 = .09, .2 + .0773 − .29 < 0, …: the first is kept, the others are not.
    batch = inputs([0.65, 0.65, 0.65, 0.69], [0.5] * 4, [1.0] * 4)
    loss, grad = loss_and_grad(make_objective("cppo"), batch)
    assert_close(loss, row([-1.3, 0.0, 0.0, 0.0]))
    assert_close(grad, row([-1.3, 0.0, 0.0, 0.0]))
    # Without a budget all are below δ = .2; with δ = .145 the weights alone decide: .15 > .145, .14, .13 and .152 > .145.
    assert not make_objective("cppo", budget=math.inf)(batch).acted.any()
    assert make_objective("cppo", budget=math.inf, bound=0.145)(batch).acted.tolist() == [[True, False, False, True]]


def test_golden_moves_back_are_never_blocked_and_spend_all_the_same():
    # The first token moves against its advantage: kept, and its .4 leaves nothing for the second.
    batch = inputs([0.1, 0.55], [0.5, 0.5], [1.0, 1.0])
    assert make_objective("cppo")(batch).acted.tolist() == [[False, True]]


@given(tokens(max_size=8), st.floats(0.02, 0.5), st.floats(0.2, 1.0), st.floats(0.0, 0.2))
def test_the_mask_is_that_of_a_walk_along_the_sequence(draw, bound, last, floor):
    new, old, _ = draw
    moved = [abs(p - q) for p, q in zip(new, old, strict=True)]
    outward = [(p - q) * a > 0 for p, q, a in zip(*draw, strict=True)]
    kept = keeps(moved, outward, bound, last, floor)
    objective = make_objective("cppo", bound=bound, weight_last=last, budget=floor)
    expected = row([-(p / q) * a * k for p, q, a, k in zip(*draw, kept, strict=True)])
    for got in loss_and_grad(objective, inputs(*draw)):
        assert_close(got, expected)


@given(tokens(), st.floats(0.05, 0.5))
def test_with_equal_weights_and_no_budget_it_is_dppo(draw, bound):
    ours = loss_and_grad(make_objective("cppo", bound=bound, weight_last=1.0, budget=math.inf), inputs(*draw))
    theirs = loss_and_grad(make_objective("dppo", bound=bound), inputs(*draw))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_on_a_support_it_is_dppo_s_divergence_that_is_spent():
    batch, _ = random_batch(3, 4, 6, 2, step=1.0, per_token=True)
    for settings in ({"weight_last": 1.0, "budget": math.inf}, {}):
        acted = [make_objective("cppo", estimator=x, **settings)(batch).acted for x in ("binary", "topk")]
        assert not torch.equal(*acted)
        assert acted[1].sum() >= acted[0].sum()  # merging tokens only lowers a divergence
    alone = make_objective("cppo", estimator="topk", weight_last=1.0, budget=math.inf)(batch)
    assert torch.equal(alone.acted, make_objective("dppo", estimator="topk")(batch).acted)


def test_padding_and_tool_outputs_have_no_place_in_the_sequence():
    batch = inputs([0.65, 0.65, 0.65, 0.69], [0.5] * 4, [1.0] * 4)
    gaps = torch.tensor([[0, 9, 1, 9, 9, 2, 3]])
    spread = TokenBatch(
        *(x[0, gaps.clamp(max=3)[0]][None] for x in (batch.logp_new, batch.logp_old, batch.advantages)), gaps < 9
    )
    loss = make_objective("cppo", budget=0.05)(spread).loss
    assert_close(loss[gaps < 9][None], make_objective("cppo", budget=0.05)(batch).loss)
    assert make_objective("cppo")(replace(spread, mask=gaps == 0)).acted.sum() == 0


def test_gradient_is_the_derivative_of_the_loss():
    batch, logits = random_batch(2, 3, 4, 2, step=1.0, per_token=True)
    assert 0 < make_objective("cppo")(batch).metrics["tr/active_frac"] < 1
    assert gradcheck(lambda x: make_objective("cppo")(as_batch(x, batch)).loss, logits)
