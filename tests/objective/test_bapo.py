"""BAPO: PPO's clip with bounds that depend on how positive and negative advantages share the batch's surrogate."""

import math

import torch
from batches import apart, as_batch, inputs, loss_and_grad, random_batch, row, tokens
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from corral import make_objective
from tolerance import assert_close


def search(ratios: list[float], adv: list[float], share: float) -> tuple[float, float]:
    """The bounds as the authors' code searches for them, a step at a time: l first, by 0.05, then h."""
    low, high = 0.6, 1.2

    def short() -> bool:
        positive = sum(min(r, high) * a for r, a in zip(ratios, adv, strict=True) if a > 0)
        negative = sum(max(r, low) * -a for r, a in zip(ratios, adv, strict=True) if a < 0)
        assume(abs((1 - share) * positive - share * negative) > 1e-9)
        return (1 - share) * positive < share * negative

    while short() and low < 0.9:
        low = min(low + 0.05, 0.9)
    while short() and high < 3.0:
        high = min(high + 0.05, 3.0)
    return low, high


def test_golden_a_balanced_batch_is_clipped_at_the_first_bounds():
    # ρ = 2, .5; Â = 1, −1: P(1.2) = 1.2 ≥ N(.6) = .6.  L = −1.2, clipped; .6, clipped.
    loss, grad = loss_and_grad(make_objective("bapo"), inputs([0.4, 0.1], [0.2, 0.2], [1.0, -1.0]))
    assert_close(loss, row([-1.2, 0.6]))
    assert_close(grad, row([0.0, 0.0]))


def test_golden_the_upper_bound_rises_until_the_batch_is_balanced():
    # ρ = 2.5, 1, .7 with Â = 1, −1, −1: P(1.2) = 1.2 < N(.6) = 1.7.  Then l = .9, N = 1.9, and P(h) = h ≥ 1.9 from h = 1.9 on
    # (1.2 + 14 · .05).  L = −1.9, clipped; 1, free; .9, clipped, which at l = .6 would have been free.
    batch = inputs([0.5, 0.2, 0.14], [0.2] * 3, [1.0, -1.0, -1.0])
    loss, grad = loss_and_grad(make_objective("bapo"), batch)
    assert_close(loss, row([-1.9, 1.0, 0.9]))
    assert_close(grad, row([0.0, 1.0, 0.0]))
    assert make_objective("bapo")(batch).acted.tolist() == [[True, False, True]]
    # With Â = −2 twice no h ≤ 3 is enough: h = 3, and ρ = 2.5 is free.
    assert_close(
        loss_and_grad(make_objective("bapo"), inputs([0.5, 0.2, 0.14], [0.2] * 3, [1.0, -2.0, -2.0]))[1],
        row([-2.5, 2.0, 0.0]),
    )
    assert_close(loss_and_grad(make_objective("bapo"), inputs([0.8], [0.2], [-1.0]))[0], row([3.0]))  # dual clip


@given(tokens(), st.floats(0.05, 0.95))
def test_the_bounds_are_those_of_a_search_step_by_step(draw, share):
    new, old, adv = draw
    ratios = [p / q for p, q in zip(new, old, strict=True)]
    low, high = search(ratios, adv, share)
    assume(apart(ratios, low, high))
    theirs = make_objective("ppo_clip", clip_low=1 - low, clip_high=high - 1, dual_clip=3.0)
    for a, b in zip(
        loss_and_grad(make_objective("bapo", share=share), inputs(*draw)), loss_and_grad(theirs, inputs(*draw)), strict=True
    ):
        assert_close(a, b)


@given(tokens())
def test_without_a_share_to_reach_it_is_ppo(draw):
    ours = loss_and_grad(make_objective("bapo", share=0.0, dual_clip=None), inputs(*draw))
    theirs = loss_and_grad(make_objective("ppo_clip", clip_low=0.4, clip_high=0.2), inputs(*draw))
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b)


def test_the_bounds_are_of_the_whole_call():
    # Alone the first sequence is balanced and 2 is clipped at 1.2; beside one of negative advantage it goes free.
    alone, both = inputs([0.4], [0.2], [1.0]), inputs([0.4, 0.2, 0.2], [0.2] * 3, [1.0, -1.0, -3.0])
    assert make_objective("bapo")(alone).acted.tolist() == [[True]]
    assert make_objective("bapo")(both).acted.tolist() == [[False, False, False]]
    assert not make_objective("bapo").config.tokenwise


def test_gradient_is_the_derivative_of_the_loss():
    batch, logits = random_batch(2, 3, 4, 2, step=1.0, per_token=True)
    assert 0 < make_objective("bapo")(batch).metrics["tr/active_frac"] < 1
    # Within gradcheck's step the bounds are the same, and constants: h stays where it is on its grid.
    assert gradcheck(lambda x: make_objective("bapo")(as_batch(x, batch)).loss, logits)
    assert math.isfinite(make_objective("bapo")(batch).loss.sum().item())
    assert torch.equal(make_objective("bapo")(batch).loss, make_objective("bapo")(batch).loss)
