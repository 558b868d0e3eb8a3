"""TOPR: weight 1 where the advantage is positive, the sequence's ratio cut at 1 where it is negative."""

import math

import torch
from batches import as_batch, inputs, loss_and_grad, random_batch, row, tokens
from hypothesis import given
from torch.autograd import gradcheck

from corral import make_objective
from tolerance import assert_close


def test_golden_a_bad_answer_that_has_become_unlikely():
    # ρ = .5, .8: Π = .4.  Â = −2: w = .4, dL/dlogp = −w Â = .8, L = .8 log π.
    batch = inputs([0.1, 0.4], [0.2, 0.5], [-2.0, -2.0])
    loss, grad = loss_and_grad(make_objective("topr"), batch)
    assert_close(loss, row([0.8 * math.log(0.1), 0.8 * math.log(0.4)]))
    assert_close(grad, row([0.8, 0.8]))
    assert make_objective("topr")(batch).acted.all()  # below one half


def test_golden_a_bad_answer_that_has_become_likelier_and_a_good_one():
    # ρ = 3, .8: Π = 2.4, cut at 1: dL/dlogp = 2.  With Â = 2 the weight is 1 whatever the ratio: −2.
    assert_close(loss_and_grad(make_objective("topr"), inputs([0.6, 0.4], [0.2, 0.5], [-2.0, -2.0]))[1], row([2.0, 2.0]))
    assert_close(loss_and_grad(make_objective("topr"), inputs([0.1, 0.4], [0.2, 0.5], [2.0, 2.0]))[1], row([-2.0, -2.0]))
    assert not make_objective("topr")(inputs([0.6, 0.4], [0.2, 0.5], [-2.0, 0.5])).acted.any()
    assert make_objective("topr")(inputs([0.1, 0.4], [0.2, 0.5], [-2.0, 0.5])).acted.tolist() == [[True, False]]
    assert_close(
        loss_and_grad(make_objective("topr", cap=2.0), inputs([0.6, 0.4], [0.2, 0.5], [-2.0, -2.0]))[1], row([4.0, 4.0])
    )


@given(tokens())
def test_the_gradient_follows_the_formula(draw):
    product = math.prod(p / q for p, q, _ in zip(*draw, strict=True))
    wanted = [-a * (min(product, 1.0) if a < 0 else 1.0) for a in draw[2]]
    assert_close(loss_and_grad(make_objective("topr"), inputs(*draw))[1], row(wanted))


@given(tokens())
def test_good_answers_are_learned_whatever_the_sampler_thought_of_them(draw):
    new, old, adv = draw
    positive = [abs(a) for a in adv]
    ours, same = (loss_and_grad(make_objective("topr"), inputs(new, q, positive)) for q in (old, new))
    assert all(torch.equal(a, b) for a, b in zip(ours, same, strict=True))


def test_gradient_is_that_of_log_pi_times_a_constant_weight():
    batch, logits = random_batch(2, 3, 4, 2, step=1.0)
    _, fixed = loss_and_grad(make_objective("topr"), batch)
    assert gradcheck(lambda x: fixed * as_batch(x, batch).logp_new, logits)
    (ours,) = torch.autograd.grad(make_objective("topr")(as_batch(logits, batch)).loss.sum(), logits)
    (theirs,) = torch.autograd.grad((fixed * as_batch(logits, batch).logp_new).sum(), logits)
    assert_close(ours, theirs)


def test_a_long_sequence_overflows_nothing():
    # Π ρ = e^±3000: the weight is 1 or 0.
    for step, weight in ((3.0, 1.0), (-3.0, 0.0)):
        old = torch.full((1, 1000), -3.0 if step > 0 else -0.1)
        batch = inputs([0.5], [0.5], [1.0])
        batch = type(batch)((old + step).clamp(max=0).requires_grad_(), old, torch.tensor([-1.0]), torch.ones(1, 1000).bool())
        assert_close(loss_and_grad(make_objective("topr"), batch)[1], torch.full((1, 1000), weight))
