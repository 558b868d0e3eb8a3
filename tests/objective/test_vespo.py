"""VESPO: the weight W^k e^{λ(1−W)} of the whole sequence's ratio W."""

import math

import torch
from batches import as_batch, inputs, loss_and_grad, random_batch, row, tokens
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from corral import make_objective
from tolerance import assert_close


def test_golden_weight_loss_and_gradient():
    # ρ = .5, .8: W = .4.  Â = 1: φ = .4² e^{3·.6} = .16 e^1.8 = .9679.  Â = −1: φ = .4³ e^{2·.6} = .064 e^1.2 = .2125.
    positive, negative = 0.16 * math.exp(1.8), 0.064 * math.exp(1.2)
    batch = inputs([0.1, 0.4], [0.2, 0.5], [1.0, -1.0])
    loss, grad = loss_and_grad(make_objective("vespo"), batch)
    assert_close(loss, row([-positive * math.log(0.1), negative * math.log(0.4)]))
    assert_close(grad, row([-positive, negative]))
    assert make_objective("vespo")(batch).acted.tolist() == [[False, True]]  # below one half


@given(tokens(), st.lists(st.floats(0.1, 4.0), min_size=4, max_size=4))
def test_the_gradient_follows_the_formula(draw, exponents):
    w = math.prod(p / q for p, q, _ in zip(*draw, strict=True))
    wanted = []
    for a in draw[2]:
        k, decay = exponents[:2] if a >= 0 else exponents[2:]
        wanted.append(-a * math.exp(k * math.log(w) + decay * (1 - w)))
    settings = dict(zip(("k_positive", "lambda_positive", "k_negative", "lambda_negative"), exponents, strict=True))
    assert_close(loss_and_grad(make_objective("vespo", **settings), inputs(*draw))[1], row(wanted), atol=1e-11, rtol=1e-9)


@given(st.floats(0.5, 4.0), st.floats(0.5, 4.0), st.floats(0.05, 20.0))
def test_the_weight_is_one_on_policy_and_largest_at_k_over_lambda(k, decay, ratio):
    def weight(w: float) -> float:
        objective = make_objective("vespo", k_positive=k, lambda_positive=decay)
        return -loss_and_grad(objective, inputs([1e-3 * w], [1e-3], [1.0]))[1].item()

    assert abs(weight(1.0) - 1.0) < 1e-12
    assert weight(ratio) <= weight(k / decay) * (1 + 1e-9)


@given(tokens())
def test_without_exponents_it_is_cispo_with_weights_of_one(draw):
    plain = {f"{letter}_{sign}": 0.0 for letter in ("k", "lambda") for sign in ("positive", "negative")}
    ours = loss_and_grad(make_objective("vespo", **plain), inputs(*draw))
    theirs = loss_and_grad(make_objective("cispo", cap_low=1.0, cap_high=1.0), inputs(*draw))
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b)


def test_gradient_is_that_of_log_pi_times_a_constant_weight():
    batch, logits = random_batch(2, 3, 4, 2, step=0.3)
    _, fixed = loss_and_grad(make_objective("vespo"), batch)
    assert fixed.abs().max() > 0.1
    assert gradcheck(lambda x: fixed * as_batch(x, batch).logp_new, logits)
    (ours,) = torch.autograd.grad(make_objective("vespo")(as_batch(logits, batch)).loss.sum(), logits)
    (theirs,) = torch.autograd.grad((fixed * as_batch(logits, batch).logp_new).sum(), logits)
    assert_close(ours, theirs)
