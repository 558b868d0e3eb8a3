"""KL-Cov: a penalty on |log ρ| of the tokens whose advantage and log-prob are both far above their means, or both below."""

import math

import torch
from batches import as_batch, inputs, loss_and_grad, random_batch, row, tokens
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from corral import make_objective
from corral.objective.masks import share_count, token_covariance
from tolerance import assert_close

NEW, OLD, ADV = [0.8, 0.4, 0.1, 0.05], [0.4, 0.4, 0.2, 0.1], [2.0, 0.0, -1.0, -1.0]


def test_golden_one_token_is_held():
    # log π = −.223, −.916, −2.303, −2.996, mean −1.6094; Â less its mean 0 is itself.
    # c = 2 · 1.3863, 0, .6931, 1.3863: the first is the largest.  ρ = 2, 1, .5, .5.
    # L = −ρÂ + β |log ρ| on the first = −4 + log 2, 0, .5, .5;  dL/dlogp = −ρÂ + β sgn(log ρ) there = −3, 0, .5, .5.
    assert_close(token_covariance(inputs(NEW, OLD, ADV)), row([2 * math.log(4), 0.0, math.log(2), math.log(4)]))
    loss, grad = loss_and_grad(make_objective("kl_cov"), inputs(NEW, OLD, ADV))
    assert_close(loss, row([-4 + math.log(2), 0.0, 0.5, 0.5]))
    assert_close(grad, row([-3.0, 0.0, 0.5, 0.5]))
    assert make_objective("kl_cov")(inputs(NEW, OLD, ADV)).acted.tolist() == [[True, False, False, False]]


def test_golden_half_of_the_tokens_are_held():
    # Two of four: the first and the last, whose ρ = .5 has |log ρ| = log 2 and sgn −1.  β = .1.
    loss, grad = loss_and_grad(make_objective("kl_cov", share=0.5, penalty=0.1), inputs(NEW, OLD, ADV))
    assert_close(loss, row([-4 + 0.1 * math.log(2), 0.0, 0.5, 0.5 + 0.1 * math.log(2)]))
    assert_close(grad, row([-3.9, 0.0, 0.5, 0.4]))


def test_golden_how_many_a_share_is():
    batch, _ = random_batch(4, 30, 5, 2)
    count = int(batch.mask.sum())
    assert [share_count(batch, share).item() for share in (2e-4, 0.5, 1.0)] == [1, count // 2, count]


@given(st.integers(0, 2**20), st.floats(0.05, 1.0))
def test_the_largest_covariances_are_held(seed, share):
    batch, _ = random_batch(3, 4, 6, 3, step=1.0, per_token=True, seed=seed)
    places = [tuple(at) for at in batch.mask.nonzero().tolist()]
    logp, adv = ([x.detach()[at].item() for at in places] for x in (batch.logp_new, batch.advantages))
    means = sum(adv) / len(adv), sum(logp) / len(logp)
    c = {at: (a - means[0]) * (p - means[1]) for at, a, p in zip(places, adv, logp, strict=True)}
    largest = sorted(c, key=c.get, reverse=True)[: max(1, int(share * len(c)))]
    acted = make_objective("kl_cov", share=share)(batch).acted
    assert {tuple(at) for at in acted.nonzero().tolist()} == {at for at in largest if c[at] > 0}


@given(tokens())
def test_without_a_penalty_it_is_reinforce(draw):
    ours = loss_and_grad(make_objective("kl_cov", penalty=0.0), inputs(*draw))
    theirs = loss_and_grad(make_objective("reinforce"), inputs(*draw))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_gradient_is_the_derivative_of_the_loss():
    batch, logits = random_batch(2, 3, 4, 2, step=1.0, per_token=True)
    objective = make_objective("kl_cov", share=0.5)
    assert 0 < objective(batch).metrics["tr/active_frac"] < 1
    assert gradcheck(lambda x: objective(as_batch(x, batch)).loss, logits)
