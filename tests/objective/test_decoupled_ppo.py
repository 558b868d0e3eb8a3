"""Decoupled PPO: PPO's clip around the recomputed policy, weighed by that policy's ratio to the sampler's."""

from dataclasses import replace

import pytest
import torch
from batches import as_batch, inputs, loss_and_grad, random_batch, row, tokens
from hypothesis import given
from torch.autograd import gradcheck

from corral import make_correction, make_objective
from tolerance import assert_close


def test_golden_loss_and_gradient():
    # ρ = π/π_old = 1.1, 1.5, .5, .5; b = π_old/π_rollout = 2, .5, 4, .25; Â = 1, 1, −1, 1.
    # PPO: −1.1, −1.2 (clipped), .8 (clipped), −.5; times b: −2.2, −.6, 3.2, −.125.
    batch = inputs([0.22, 0.3, 0.2, 0.1], [0.2, 0.2, 0.4, 0.2], [1.0, 1.0, -1.0, 1.0], p_rollout=[0.1, 0.4, 0.1, 0.8])
    loss, grad = loss_and_grad(make_objective("decoupled_ppo"), batch)
    assert_close(loss, row([-2.2, -0.6, 3.2, -0.125]))
    assert_close(grad, row([-2.2, 0.0, 0.0, -0.125]))
    assert make_objective("decoupled_ppo")(batch).acted.tolist() == [[False, True, True, False]]


@given(tokens())
def test_with_the_old_policy_as_the_sampler_it_is_ppo(draw):
    ours = loss_and_grad(make_objective("decoupled_ppo"), inputs(*draw, p_rollout=draw[1]))
    theirs = loss_and_grad(make_objective("ppo_clip"), inputs(*draw))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_it_is_ppo_times_an_uncapped_correction(seed):
    batch, _ = random_batch(3, 4, 6, 3, step=1.0, per_token=True, seed=seed)
    wide = replace(batch, logp_rollout=batch.logp_old - 1.5 * torch.rand_like(batch.logp_old))
    weight = make_correction("tis", cap=1e6)(wide)
    assert weight.max() > 2
    assert_close(make_objective("decoupled_ppo")(wide).loss, make_objective("ppo_clip")(wide).loss * weight)


def test_without_the_samplers_log_probs_it_is_refused():
    with pytest.raises(ValueError, match="decoupled_ppo: needs `logp_rollout`"):
        make_objective("decoupled_ppo")(inputs([0.5], [0.5], [1.0]))


def test_gradient_is_the_derivative_of_the_loss():
    batch, logits = random_batch(2, 3, 4, 2, step=1.0, per_token=True)
    assert 0 < make_objective("decoupled_ppo")(batch).metrics["tr/active_frac"] < 1
    assert gradcheck(lambda x: make_objective("decoupled_ppo")(as_batch(x, batch)).loss, logits)
