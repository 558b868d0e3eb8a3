"""CISPO: the weight is clipped and constant for autograd, so that every token keeps a gradient."""

import math
from dataclasses import replace

import pytest
import torch
from batches import inputs, loss_and_grad, row, tokens
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from corral import make_objective
from tolerance import assert_close


def test_golden_loss_and_gradient():
    # ρ = .9/.5, .1/.5, .5/.5 = 1.8, .2, 1, clipped to [.5, 1.5]: w = 1.5, .5, 1.
    # L = −w Â log π = −3 log .9, .5 log .1, −log .5;   dL/dlogp = −w Â = −3, .5, −1.
    batch = inputs(p_new=[0.9, 0.1, 0.5], p_old=[0.5] * 3, adv=[2.0, -1.0, 1.0])
    objective = make_objective("cispo", cap_low=0.5, cap_high=1.5)
    loss, grad = loss_and_grad(objective, batch)
    assert_close(loss, row([-3 * math.log(0.9), 0.5 * math.log(0.1), -math.log(0.5)]))
    assert_close(grad, row([-3.0, 0.5, -1.0]))
    assert_close(objective(batch).metrics["tr/active_frac"], torch.tensor(2 / 3))


def test_golden_default_cap_is_5_above_and_none_below():
    # ρ = .9/.1, .01/.9 = 9, 1/90: the first weighs 5, the second what it is.
    batch = inputs(p_new=[0.9, 0.01], p_old=[0.1, 0.9], adv=[1.0, 1.0])
    assert_close(loss_and_grad(make_objective("cispo"), batch)[1], row([-5.0, -1 / 90]))


@given(tokens(), st.floats(0.0, 1.5), st.floats(0.0, 10.0))
def test_loss_and_gradient_follow_the_formula(draw, low, width):
    high = low + width
    p_new, p_old, adv = draw
    weights = [min(max(p / q, low), high) for p, q in zip(p_new, p_old, strict=True)]
    loss, grad = loss_and_grad(make_objective("cispo", cap_low=low, cap_high=high), inputs(*draw))
    assert_close(loss, row([-w * a * math.log(p) for w, a, p in zip(weights, adv, p_new, strict=True)]))
    assert_close(grad, row([-w * a for w, a in zip(weights, adv, strict=True)]))


@given(tokens())
def test_within_the_range_the_gradient_is_reinforce(draw):
    # Ratios of these draws lie in [.05/.99, .99/.05].
    _, ours = loss_and_grad(make_objective("cispo", cap_low=0.05, cap_high=20.0), inputs(*draw))
    _, free = loss_and_grad(make_objective("reinforce"), inputs(*draw))
    assert_close(ours, free)


@given(tokens())
def test_no_token_with_an_advantage_is_ever_without_gradient(draw):
    _, grad = loss_and_grad(make_objective("cispo", cap_low=0.1, cap_high=0.2), inputs(*draw))
    assert torch.equal(grad != 0, row(draw[2]) != 0)


def test_gradient_is_the_derivative_of_the_loss_at_a_constant_weight():
    # With cap_low = cap_high the weight is the same constant everywhere, and the value can be differentiated numerically.
    batch = inputs(p_new=[0.9, 0.1, 0.5], p_old=[0.5] * 3, adv=[2.0, -1.0, 0.0])
    objective = make_objective("cispo", cap_low=1.5, cap_high=1.5)
    assert gradcheck(lambda logp: objective(replace(batch, logp_new=logp)).loss, batch.logp_new)


def test_an_infinite_smallest_weight_is_refused():
    with pytest.raises(ValueError, match="cap_low < inf; got"):
        make_objective("cispo", cap_low=math.inf, cap_high=math.inf)
