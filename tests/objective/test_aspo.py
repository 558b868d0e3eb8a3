"""ASPO: the ratio turned over where the advantage is positive, masked where PPO clips, with a cap that keeps gradients."""

import math

import torch
from batches import apart, as_batch, inputs, loss_and_grad, random_batch, row, tokens
from hypothesis import assume, given
from torch.autograd import gradcheck

from corral import make_objective
from tolerance import assert_close


def test_golden_weights_mask_and_cap():
    # ρ = 1.1, .5, .2, 1.5 with Â = 1: w = 1/ρ = .909, 2, min(5, 3) = 3, and 1.5 > 1.2 is masked.
    # ρ = .9, .5, 2, 5 with Â = −2: w = ρ = .9, masked (.5 < .8), 2, min(5, 3) = 3.  dL/dlogp = L = −w Â.
    batch = inputs([0.11, 0.05, 0.02, 0.15, 0.09, 0.05, 0.2, 0.5], [0.1] * 8, [1.0] * 4 + [-2.0] * 4)
    expected = row([-1 / 1.1, -2.0, -3.0, 0.0, 1.8, 0.0, 4.0, 6.0])
    loss, grad = loss_and_grad(make_objective("aspo"), batch)
    assert_close(loss, expected)
    assert_close(grad, expected)
    out = make_objective("aspo")(batch)
    assert out.acted.tolist() == [[False, False, True, True, False, True, False, True]]
    assert_close(out.metrics["tr/active_frac"], torch.tensor(0.5))


@given(tokens())
def test_the_gradient_follows_the_formula(draw):
    ratios = [p / q for p, q, _ in zip(*draw, strict=True)]
    assume(apart(ratios, 0.8, 1.2, 1 / 3, 3.0))
    wanted = []
    for r, a in zip(ratios, draw[2], strict=True):
        masked = (a > 0 and r > 1.2) or (a < 0 and r < 0.8)
        wanted.append(0.0 if masked else -a * min(1 / r if a > 0 else r, 3.0))
    assert_close(loss_and_grad(make_objective("aspo"), inputs(*draw))[1], row(wanted))


@given(tokens())
def test_where_the_advantage_is_negative_and_no_cap_binds_it_is_ppo(draw):
    new, old, adv = draw
    batches = [inputs(new, old, [-abs(a) for a in adv]) for _ in range(2)]
    uncapped = make_objective("aspo", cap=math.inf)
    ours, theirs = (loss_and_grad(x, b)[1] for x, b in zip((uncapped, make_objective("ppo_clip")), batches, strict=True))
    assume(apart([p / q for p, q in zip(new, old, strict=True)], 0.8))
    assert_close(ours, theirs)


@given(tokens())
def test_a_token_that_has_fallen_behind_counts_for_more(draw):
    # The opposite of PPO: at positive advantages the weight falls as the ratio rises.
    new, old, adv = draw
    positive = [abs(a) + 0.1 for a in adv]
    _, grad = loss_and_grad(make_objective("aspo"), inputs(new, old, positive))
    _, further = loss_and_grad(make_objective("aspo"), inputs([p / 2 for p in new], old, positive))
    assert (further.abs() >= grad.abs()).all()


def test_gradient_is_that_of_log_pi_times_a_constant_weight():
    # With the weights held at their values the loss is −w Â exp(log π − log π₀), whose derivative gradcheck finds.
    batch, logits = random_batch(2, 3, 4, 2, step=1.0, per_token=True)
    _, grad = loss_and_grad(make_objective("aspo"), batch)
    fixed, at = grad.detach(), batch.logp_new.detach()
    assert gradcheck(lambda x: fixed * (as_batch(x, batch).logp_new - at).exp(), logits)
    (ours,) = torch.autograd.grad(make_objective("aspo")(as_batch(logits, batch)).loss.sum(), logits)
    (theirs,) = torch.autograd.grad((fixed * as_batch(logits, batch).logp_new).sum(), logits)
    assert_close(ours, theirs)
