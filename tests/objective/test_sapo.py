"""SAPO: a sigmoid gate on the ratio, with its own temperature for each sign of the advantage."""

import math
from dataclasses import replace

import torch
from batches import inputs, loss_and_grad, row, tokens
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from corral import make_objective
from tolerance import assert_close


def gate(r: float, tau: float) -> float:
    return 1 / (1 + math.exp(-tau * (r - 1)))


def test_golden_loss_and_gradient():
    # τ⁺ = ln 3 at ρ = .8/.4 = 2:  σ(ln 3) = 3/4.  L = −(4/ln 3)(3/4)·2 = −6/ln 3;  w = 4·3/4·1/4·2 = 3/2, dL/dlogp = −3.
    # τ⁻ = 2 ln 3 at ρ = .2/.4 = ½: σ(−ln 3) = 1/4. L = (4/2 ln 3)(1/4) = 1/(2 ln 3);  w = 4·1/4·3/4·½ = 3/8, dL/dlogp = 3/8.
    batch = inputs(p_new=[0.8, 0.2], p_old=[0.4, 0.4], adv=[2.0, -1.0])
    objective = make_objective("sapo", tau_positive=math.log(3), tau_negative=2 * math.log(3))
    loss, grad = loss_and_grad(objective, batch)
    assert_close(loss, row([-6 / math.log(3), 1 / (2 * math.log(3))]))
    assert_close(grad, row([-3.0, 0.375]))


def test_golden_on_policy():
    # σ(0) = ½:  L = −2 Â/τ with τ = 1 and 1.05;  w = 4·½·½·1 = 1, so dL/dlogp = −Â.
    batch = inputs(p_new=[0.5, 0.5], p_old=[0.5, 0.5], adv=[1.0, -1.0])
    loss, grad = loss_and_grad(make_objective("sapo"), batch)
    assert_close(loss, row([-2.0, 2 / 1.05]))
    assert_close(grad, row([-1.0, 1.0]))


def test_golden_active_where_the_gate_is_less_than_half_open():
    # 4σ(1−σ) < ½ beyond |τ(ρ − 1)| = 1.7627 = ln(3 + 2√2), so at τ = 1 beyond ρ = 2.7627: of ρ = 2.7, 2.8 and 2.8 the
    # second is, and the third would be but has no advantage.
    batch = inputs(p_new=[0.54, 0.56, 0.56], p_old=[0.2] * 3, adv=[1.0, 1.0, 0.0])
    assert_close(make_objective("sapo")(batch).metrics["tr/active_frac"], torch.tensor(1 / 3))


@given(tokens(), st.floats(0.1, 5.0), st.floats(0.1, 5.0))
def test_loss_and_gradient_follow_the_formula(draw, tau_positive, tau_negative):
    loss, grad = loss_and_grad(make_objective("sapo", tau_positive=tau_positive, tau_negative=tau_negative), inputs(*draw))
    losses, grads = [], []
    for p, q, a in zip(*draw, strict=True):
        r, tau = p / q, tau_positive if a > 0 else tau_negative
        sigma = gate(r, tau)
        losses.append(-4 / tau * sigma * a)
        grads.append(-4 * sigma * gate(-r + 2, tau) * r * a)  # 1 − σ(x) = σ(−x), which keeps its digits as σ → 1
    assert_close(loss, row(losses))
    assert_close(grad, row(grads), atol=1e-12, rtol=1e-8)


@given(st.floats(0.05, 0.99), st.floats(-3.0, 3.0))
def test_on_policy_the_gradient_is_reinforce(p, a):
    assert_close(loss_and_grad(make_objective("sapo"), inputs([p], [p], [a]))[1], row([-a]))


@given(tokens())
def test_a_gentle_gate_is_reinforce(draw):
    # As τ → 0 the gate stays half open, w → ρ, with an error of order τ²(ρ−1)²/4 ≤ 1e-10 here.
    _, ours = loss_and_grad(make_objective("sapo", tau_positive=1e-6, tau_negative=1e-6), inputs(*draw))
    _, free = loss_and_grad(make_objective("reinforce"), inputs(*draw))
    assert_close(ours, free, rtol=1e-8)


def test_gradient_is_the_derivative_of_the_loss():
    batch = inputs(p_new=[0.9, 0.9, 0.1, 0.1, 0.5], p_old=[0.5] * 5, adv=[1.0, -1.0, -1.0, 1.0, 0.0])
    assert gradcheck(lambda logp: make_objective("sapo")(replace(batch, logp_new=logp)).loss, batch.logp_new)
