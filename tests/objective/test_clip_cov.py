"""Clip-Cov: PPO's clip, and no gradient for some of the tokens whose covariance lies in a window."""

import math

import torch
from batches import apart, as_batch, inputs, loss_and_grad, random_batch, row, tokens
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from corral import make_objective
from corral.objective.masks import token_covariance
from tolerance import assert_close

NEW, OLD, ADV = [0.8, 0.4, 0.1, 0.05], [0.75, 0.4, 0.11, 0.05], [2.0, 0.0, -1.0, -1.0]


def test_golden_the_window_and_the_draw():
    # c = 2.7726, 0, .6931, 1.3863 (see test_kl_cov): the first and the last lie in (1, 5).  One of four is drawn, the one whose
    # thousandfold covariance ends lower: 2772.589 and 1386.294, so the last.  ρ = 1.0667, 1, .909, 1: no clip.  L = −ρÂ but 0.
    loss, grad = loss_and_grad(make_objective("clip_cov"), inputs(NEW, OLD, ADV))
    assert_close(loss, row([-2 * 0.8 / 0.75, 0.0, 0.1 / 0.11, 0.0]))
    assert_close(grad, row([-2 * 0.8 / 0.75, 0.0, 0.1 / 0.11, 0.0]))
    assert make_objective("clip_cov")(inputs(NEW, OLD, ADV)).acted.tolist() == [[False, False, False, True]]
    both = make_objective("clip_cov", share=0.5)(inputs(NEW, OLD, ADV))
    assert both.acted.tolist() == [[True, False, False, True]]
    assert not make_objective("clip_cov", share=1.0, cov_low=3.0)(inputs(NEW, OLD, ADV)).acted.any()


def test_golden_what_the_clip_holds_is_not_drawn():
    # ρ = 2 with Â = 2 is clipped: L = −2.4.  The last one is drawn, though both may be.
    out = make_objective("clip_cov", share=1.0)(inputs(NEW, [0.4, 0.4, 0.11, 0.05], ADV))
    assert_close(out.loss, row([-2.4, 0.0, 0.1 / 0.11, 0.0]))
    assert out.acted.tolist() == [[True, False, False, True]]


@given(st.integers(0, 2**20), st.floats(0.05, 1.0))
def test_as_many_are_drawn_as_the_share_says_and_only_from_the_window(seed, share):
    batch, _ = random_batch(4, 6, 6, 3, step=0.1, per_token=True, seed=seed)
    objective = make_objective("clip_cov", share=share, cov_low=0.2)
    covariance, clipped = token_covariance(batch), make_objective("ppo_clip")(batch).acted
    window = (covariance > 0.2) & (covariance < 5) & ~clipped
    drawn = objective(batch).acted & ~clipped
    assert not (drawn & ~window).any()
    assert drawn.sum() == min(int(window.sum()), max(1, int(share * int(batch.mask.sum()))))


@given(tokens())
def test_where_nothing_lies_in_the_window_it_is_ppo(draw):
    assume(apart([p / q for p, q, _ in zip(*draw, strict=True)], 0.8, 1.2))
    ours = loss_and_grad(make_objective("clip_cov", cov_low=1e3, cov_high=math.inf), inputs(*draw))
    theirs = loss_and_grad(make_objective("ppo_clip"), inputs(*draw))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_gradient_is_the_derivative_of_the_loss():
    batch, logits = random_batch(2, 3, 4, 2, step=1.0, per_token=True)
    objective = make_objective("clip_cov", cov_low=0.1)
    assert 0 < objective(batch).metrics["tr/active_frac"] < 1

    # Lots are drawn from digits: within gradcheck's step others may come out, so those of this batch are kept.
    drawn = objective(batch).acted & ~make_objective("ppo_clip")(batch).acted
    assert drawn.any()
    kept = make_objective("ppo_clip")
    assert gradcheck(lambda x: torch.where(drawn, 0.0, kept(as_batch(x, batch)).loss), logits)
    (ours,) = torch.autograd.grad(objective(as_batch(logits, batch)).loss.sum(), logits)
    (theirs,) = torch.autograd.grad(torch.where(drawn, 0.0, kept(as_batch(logits, batch)).loss).sum(), logits)
    assert_close(ours, theirs)
