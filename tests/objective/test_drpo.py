"""DRPO: a quadratic penalty on the change of probability, whose optimum is the edge of DPPO's ball."""

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
    # π − μ = .4, −.2, −.2, .0099, ρ = 1.8, .5, .5, 100, Â = 1, −2, 1, 1 and δ = .2, so |Â| μ (ρ−1)²/(2δ) =
    # .5·.64/.4 = .8, 2·.4·.25/.4 = .5, .4·.25/.4 = .25, 1e-4·99²/.4 = 2.45025.
    # L = −ρÂ + that = −1.8 + .8, 1 + .5, −.5 + .25, −100 + 2.45025.
    # dL/dlogp = ρ(−Â + |Â|(π−μ)/δ) = 1.8(−1 + 2), .5(2 − 2), .5(−1 − 1), 100(−1 + .0495).
    # The first is beyond δ, outward; the second on the edge; the third comes back; the fourth, at ρ = 100, is well inside.
    batch = inputs(p_new=[0.9, 0.2, 0.2, 1e-2], p_old=[0.5, 0.4, 0.4, 1e-4], adv=[1.0, -2.0, 1.0, 1.0])
    loss, grad = loss_and_grad(make_objective("drpo"), batch)
    assert_close(loss, row([-1.0, 1.5, -0.25, -97.54975]))
    assert_close(grad, row([1.8, 0.0, -1.0, -95.05]))
    batch = replace(batch, logp_new=row([0.9, 0.19, 0.2, 1e-2]).log())
    assert make_objective("drpo")(batch).acted.tolist() == [[True, True, False, False]]
    assert_close(make_objective("drpo")(batch).metrics["tr/active_frac"], torch.tensor(0.5))


@given(tokens(), st.floats(0.05, 2.0))
def test_it_is_spo_with_a_range_that_shrinks_as_the_token_grows_likely(draw, bound):
    # |Â| μ (ρ−1)² / 2δ = |Â| (ρ−1)² / 2ε with ε = δ/μ, token by token.
    ours = loss_and_grad(make_objective("drpo", bound=bound), inputs(*draw))
    each = [
        loss_and_grad(make_objective("spo", epsilon=bound / q), inputs([p], [q], [a])) for p, q, a in zip(*draw, strict=True)
    ]
    for mine, theirs in zip(ours, zip(*each, strict=True), strict=True):
        assert_close(mine, torch.cat(theirs, -1), atol=1e-11)


@given(tokens(), st.floats(0.05, 2.0))
def test_loss_and_gradient_follow_the_formula(draw, bound):
    loss, grad = loss_and_grad(make_objective("drpo", bound=bound), inputs(*draw))
    losses, grads = [], []
    for p, q, a in zip(*draw, strict=True):
        losses.append(-(p / q) * a + abs(a) * q * (p / q - 1) ** 2 / (2 * bound))
        grads.append(-(p / q) * (1 - math.copysign(1, a) * (p - q) / bound) * a)
    assert_close(loss, row(losses))
    assert_close(grad, row(grads), atol=1e-11)


@given(st.floats(0.3, 0.6), st.floats(0.05, 0.25), st.floats(0.1, 3.0), st.sampled_from([-1.0, 1.0]))
def test_the_gradient_vanishes_at_the_edge_and_points_inward_beyond_it(p_old, bound, size, sign):
    edge = p_old + sign * bound
    objective = make_objective("drpo", bound=bound)
    _, grad = loss_and_grad(objective, inputs([edge, edge + sign * 0.01, edge - sign * 0.01], [p_old] * 3, [sign * size] * 3))
    at, out, inside = grad[0].tolist()
    assert abs(at) < 1e-12
    assert out * sign > 0  # descent moves the token back
    assert inside * sign < 0  # and here still along its advantage


@given(tokens(), st.floats(0.01, 0.5))
def test_it_acts_where_dppo_masks(draw, bound):
    ours = make_objective("drpo", bound=bound)(inputs(*draw)).acted
    moved = torch.tensor([[abs(p - q) for p, q, _ in zip(*draw, strict=True)]], dtype=torch.float64)
    decided = (moved - bound).abs() > 1e-9  # on the edge rounding decides
    assert torch.equal(ours & decided, make_objective("dppo", bound=bound)(inputs(*draw)).acted & decided)


@given(tokens())
def test_an_infinite_bound_is_reinforce(draw):
    free = loss_and_grad(make_objective("reinforce"), inputs(*draw))
    for ours, theirs in zip(loss_and_grad(make_objective("drpo", bound=math.inf), inputs(*draw)), free, strict=True):
        assert_close(ours, theirs)


def test_gradient_is_the_derivative_of_the_loss():
    batch = inputs(p_new=[0.9, 0.9, 0.1, 0.1, 0.5], p_old=[0.5] * 5, adv=[1.0, -1.0, -1.0, 1.0, 0.0])
    assert gradcheck(lambda logp: make_objective("drpo")(replace(batch, logp_new=logp)).loss, batch.logp_new)
