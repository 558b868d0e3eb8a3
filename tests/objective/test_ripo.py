"""RIPO: a clip range of √(δ/π_old), the same step for every token in Fisher's metric."""

import math

import torch
from batches import apart, as_batch, inputs, loss_and_grad, random_batch, row, tokens
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from corral import make_objective
from tolerance import assert_close


def test_golden_the_papers_two_tokens():
    # δ = .02.  π_old = .8: ε = √.025 = .1581, so up to .9265.  π_old = .01: ε = √2, so up to .024142.
    # .92 and .024 are inside, L = −ρ = −1.15, −2.4; .93 and .0242 are outside, L = −(1 + ε), no gradient.
    objective = make_objective("ripo", bound_low=0.02, bound_high=0.02)
    inside = inputs([0.92, 0.024], [0.8, 0.01], [1.0, 1.0])
    for got in loss_and_grad(objective, inside):
        assert_close(got, row([-1.15, -2.4]))
    loss, grad = loss_and_grad(objective, inputs([0.93, 0.0242], [0.8, 0.01], [1.0, 1.0]))
    assert_close(loss, row([-(1 + math.sqrt(0.025)), -(1 + math.sqrt(2))]))
    assert_close(grad, row([0.0, 0.0]))
    assert objective(inputs([0.93, 0.024], [0.8, 0.01], [1.0, 1.0])).acted.tolist() == [[True, False]]


def test_golden_the_two_sides():
    # δ_low = .05, δ_high = .2 at π_old = .2: ε = .5 below, 1 above.  ρ = .4 with Â = −1 is clipped at .5, ρ = 2.5 with Â = 1
    # at 2; ρ = .4 with Â = 1 and ρ = 2.5 with Â = −1 come back and are left alone.
    batch = inputs([0.08, 0.5, 0.08, 0.5], [0.2] * 4, [-1.0, 1.0, 1.0, -1.0])
    loss, grad = loss_and_grad(make_objective("ripo", bound_low=0.05, bound_high=0.2), batch)
    assert_close(loss, row([0.5, -2.0, -0.4, 2.5]))
    assert_close(grad, row([0.0, 0.0, -0.4, 2.5]))


@given(tokens(), st.floats(1e-3, 1.0))
def test_it_is_ppo_with_a_range_for_every_token(draw, bound):
    losses, grads = [], []
    for p, q, a in zip(*draw, strict=True):
        ratio, range_ = p / q, math.sqrt(bound / q)
        assume(apart([ratio], 1 - range_, 1 + range_))
        clipped = min(max(ratio, 1 - range_), 1 + range_)
        losses.append(-min(ratio * a, clipped * a))
        grads.append(-ratio * a if ratio * a <= clipped * a else 0.0)
    loss, grad = loss_and_grad(make_objective("ripo", bound_low=bound, bound_high=bound), inputs(*draw))
    assert_close(loss, row(losses))
    assert_close(grad, row(grads))


@given(tokens(), st.floats(1e-3, 1.0))
def test_a_clipped_token_is_beyond_the_same_distance_wherever_it_started(draw, bound):
    # acted iff (π − π_old)² / π_old > δ and the advantage points outward.
    distance = [(p - q) ** 2 / q for p, q, _ in zip(*draw, strict=True)]
    assume(apart(distance, bound))
    outward = [(p - q) * a > 0 for p, q, a in zip(*draw, strict=True)]
    acted = make_objective("ripo", bound_low=bound, bound_high=bound)(inputs(*draw)).acted
    assert acted.tolist() == [[d > bound and o for d, o in zip(distance, outward, strict=True)]]


def test_a_certain_token_has_ppo_s_range():
    for p in (0.7, 0.75, 0.8):  # √.05 = .2236
        ours, theirs = (
            loss_and_grad(make_objective(name, **settings), inputs([p], [1.0], [-1.0]))
            for name, settings in (("ripo", {}), ("ppo_clip", {"clip_low": math.sqrt(0.05)}))
        )
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_gradient_is_the_derivative_of_the_loss():
    batch, logits = random_batch(2, 3, 4, 2, step=1.5, per_token=True)
    assert 0 < make_objective("ripo")(batch).metrics["tr/active_frac"] < 1
    assert gradcheck(lambda x: make_objective("ripo")(as_batch(x, batch)).loss, logits)
