"""REINFORCE with importance weights: −ρ Â, with an optional cap on the weight that leaves the gradient's direction alone."""

import math
from dataclasses import replace

import pytest
import torch
from batches import inputs, loss_and_grad, row, tokens
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from corral import TokenBatch, make_objective
from tolerance import assert_close


def test_golden_loss_and_gradient():
    # ρ = .9/.5, .3/.6, .5/.5 = 1.8, .5, 1.  L = −ρ Â = −3.6, .5, −3, and since dρ/dlogp = ρ the gradient is the same.
    batch = inputs(p_new=[0.9, 0.3, 0.5], p_old=[0.5, 0.6, 0.5], adv=[2.0, -1.0, 3.0])
    loss, grad = loss_and_grad(make_objective("reinforce"), batch)
    expected = row([-3.6, 0.5, -3.0])
    assert_close(loss, expected)
    assert_close(grad, expected)


def test_golden_cap_limits_the_weight_and_keeps_the_gradient():
    # min(ρ, 1.5) = 1.5, .5, 1.  L = −w Â = −3, .5, −3; clamping ρ itself would have given the first token no gradient.
    batch = inputs(p_new=[0.9, 0.3, 0.5], p_old=[0.5, 0.6, 0.5], adv=[2.0, -1.0, 3.0])
    loss, grad = loss_and_grad(make_objective("reinforce", ratio_cap=1.5), batch)
    expected = row([-3.0, 0.5, -3.0])
    assert_close(loss, expected)
    assert_close(grad, expected)


@given(tokens(), st.none() | st.floats(0.0, 25.0))
def test_loss_and_gradient_are_minus_the_capped_ratio_times_the_advantage(draw, cap):
    p_new, p_old, adv = draw
    expected = [-min(p / q, math.inf if cap is None else cap) * a for p, q, a in zip(p_new, p_old, adv, strict=True)]
    loss, grad = loss_and_grad(make_objective("reinforce", ratio_cap=cap), inputs(p_new, p_old, adv))
    assert_close(loss, row(expected))
    assert_close(grad, row(expected))


@given(tokens())
def test_an_infinite_cap_is_no_cap(draw):
    capped = loss_and_grad(make_objective("reinforce", ratio_cap=math.inf), inputs(*draw))
    free = loss_and_grad(make_objective("reinforce"), inputs(*draw))
    assert all(torch.equal(a, b) for a, b in zip(capped, free, strict=True))


@pytest.mark.parametrize("log_ratio", [3.0, 19.0, 25.0])
def test_beyond_the_cap_the_gradient_is_the_cap_however_large_the_ratio(log_ratio):
    old = torch.tensor([[-1.0 - log_ratio]], dtype=torch.float64)
    new = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    batch = TokenBatch(new, old, torch.tensor([2.0], dtype=torch.float64), torch.tensor([[True]]))
    _, grad = loss_and_grad(make_objective("reinforce", ratio_cap=5.0), batch)
    assert_close(grad, row([-10.0]))


def test_there_is_no_region_to_act():
    batch = inputs(p_new=[0.99, 0.01], p_old=[0.01, 0.99], adv=[1.0, -1.0])
    assert make_objective("reinforce")(batch).metrics["tr/active_frac"] == 0


def test_gradient_is_the_derivative_of_the_loss():
    batch = inputs(p_new=[0.9, 0.3, 0.5], p_old=[0.5, 0.6, 0.5], adv=[2.0, -1.0, 0.0])

    assert gradcheck(lambda logp: make_objective("reinforce")(replace(batch, logp_new=logp)).loss, batch.logp_new)
