"""SPO: a quadratic penalty on the ratio, whose optimum is the edge of the region."""

import math
from dataclasses import replace

import torch
from batches import inputs, loss_and_grad, row, tokens
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from corral import make_objective
from tolerance import assert_close


def test_golden_loss_and_gradient():
    # ρ = .9/.5, .2/.4, .2/.4 = 1.8, .5, .5, Â = 1, −2, 1 and ε = .2, so |Â|(ρ−1)²/(2ε) = 1.6, 1.25, .625.
    # L = −ρÂ + that = −1.8 + 1.6, 1 + 1.25, −.5 + .625.
    # dL/dlogp = ρ(−Â + |Â|(ρ−1)/ε) = 1.8(−1 + 4), .5(2 − 5), .5(−1 − 2.5).  The first two are beyond 1 ± ε, outward.
    batch = inputs(p_new=[0.9, 0.2, 0.2], p_old=[0.5, 0.4, 0.4], adv=[1.0, -2.0, 1.0])
    loss, grad = loss_and_grad(make_objective("spo"), batch)
    assert_close(loss, row([-0.2, 2.25, 0.125]))
    assert_close(grad, row([5.4, -1.5, -1.75]))
    assert_close(make_objective("spo")(batch).metrics["tr/active_frac"], torch.tensor(2 / 3))


@given(tokens(), st.floats(0.05, 2.0))
def test_loss_and_gradient_follow_the_formula(draw, epsilon):
    loss, grad = loss_and_grad(make_objective("spo", epsilon=epsilon), inputs(*draw))
    losses, grads = [], []
    for p, q, a in zip(*draw, strict=True):
        r = p / q
        losses.append(-(r * a - abs(a) * (r - 1) ** 2 / (2 * epsilon)))
        grads.append(-r * (1 - math.copysign(1, a) * (r - 1) / epsilon) * a)
    assert_close(loss, row(losses))
    assert_close(grad, row(grads), atol=1e-11)


@given(st.floats(0.05, 0.4), st.floats(0.05, 0.9), st.floats(0.1, 3.0), st.sampled_from([-1.0, 1.0]))
def test_the_gradient_vanishes_at_the_edge_and_points_inward_beyond_it(p_old, epsilon, size, sign):
    edge = p_old * (1 + sign * epsilon)
    beyond, before = edge + sign * 0.01 * p_old, edge - sign * 0.01 * p_old
    _, grad = loss_and_grad(
        make_objective("spo", epsilon=epsilon), inputs([edge, beyond, before], [p_old] * 3, [sign * size] * 3)
    )
    at, out, inside = grad[0].tolist()
    assert abs(at) < 1e-12
    assert out * sign > 0  # descent moves the token back
    assert inside * sign < 0  # and here still along its advantage


@given(tokens())
def test_an_infinite_range_is_reinforce(draw):
    free = loss_and_grad(make_objective("reinforce"), inputs(*draw))
    for ours, theirs in zip(loss_and_grad(make_objective("spo", epsilon=math.inf), inputs(*draw)), free, strict=True):
        assert_close(ours, theirs)


def test_gradient_is_the_derivative_of_the_loss():
    batch = inputs(p_new=[0.9, 0.9, 0.1, 0.1, 0.5], p_old=[0.5] * 5, adv=[1.0, -1.0, -1.0, 1.0, 0.0])
    assert gradcheck(lambda logp: make_objective("spo")(replace(batch, logp_new=logp)).loss, batch.logp_new)
