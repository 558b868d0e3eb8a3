"""M2PO masks the outliers among the tokens that have moved along their advantage, as few as bring the mean within its bound."""

import math
from dataclasses import replace

import pytest
import torch
from batches import as_batch, inputs, loss_and_grad, random_batch, row, tokens
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from corral import TokenBatch, make_objective
from tolerance import assert_close

SEEDS = st.integers(0, 2**20)


def moved(log_ratios: list[float], adv: list[float]) -> TokenBatch:
    """One sequence whose tokens have these log-ratios; the old policy gives each e⁻³."""
    new = torch.tensor([log_ratios], dtype=torch.float64) - 3
    return TokenBatch(new.requires_grad_(), torch.full_like(new, -3), row(adv), torch.ones_like(new, dtype=torch.bool))


def test_golden_mask_loss_and_gradient():
    # log ρ = .1, −.2, .3, 1, −2, Â = 1, −1, 1, 1, 1: the last has moved against its advantage and is left alone.
    # (log ρ)² of the others, ascending: .01, .04, .09, 1, with means .01, .025, .0467, .285.
    # τ = .04 keeps two of them, τ = .05 three, τ = .3 all, τ = .005 none.  L = dL/dlogp = −m ρ Â.
    ratios, adv = [0.1, -0.2, 0.3, 1.0, -2.0], [1.0, -1.0, 1.0, 1.0, 1.0]
    kept = {0.04: [1, 1, 0, 0, 1], 0.05: [1, 1, 1, 0, 1], 0.3: [1, 1, 1, 1, 1], 0.005: [0, 0, 0, 0, 1]}
    for bound, each in kept.items():
        expected = row([-m * math.exp(r) * a for m, r, a in zip(each, ratios, adv, strict=True)])
        loss, grad = loss_and_grad(make_objective("m2po", bound=bound), moved(ratios, adv))
        assert_close(loss, expected)
        assert_close(grad, expected)
    out = make_objective("m2po")(moved(ratios, adv))
    assert out.acted.tolist() == [[False, False, True, True, False]]
    assert_close(out.metrics["tr/active_frac"], torch.tensor(0.4))


@pytest.mark.parametrize(("bound", "acted"), [(0.04, [True, True, False]), (0.09, [False, False, False])])
def test_golden_equal_tokens_share_their_fate(bound, acted):
    # (log ρ)² = .09, .09, .01: means .01, .05, .0633.  With τ = .04 neither of the two fits, with .09 both do.
    assert make_objective("m2po", bound=bound)(moved([0.3, 0.3, 0.1], [1.0] * 3)).acted.tolist() == [acted]


def test_golden_the_mean_is_over_the_whole_call():
    # Alone, the second sequence's (log ρ)² = .09 is beyond τ = .04; beside three tokens of .01 the mean is .03.
    alone, both = moved([0.3], [1.0]), moved([0.1, 0.1, 0.1, 0.3], [1.0] * 4)
    assert make_objective("m2po")(alone).acted.all()
    assert not make_objective("m2po")(both).acted.any()
    assert not make_objective("m2po").config.tokenwise


@given(SEEDS, st.floats(1e-3, 2.0))
def test_the_mask_is_the_smallest_that_is_enough(seed, bound):
    # By removing the largest, one at a time, until the mean of what is left is within the bound.
    batch, _ = random_batch(3, 4, 6, 3, step=1.0, per_token=True, seed=seed)
    log_rho = batch.logp_new.detach() - batch.logp_old
    outward = [(b, t) for b, t in batch.mask.nonzero().tolist() if log_rho[b, t] * batch.advantages[b, t] > 0]
    left = sorted(outward, key=lambda at: abs(log_rho[at].item()))
    while left and (mean := sum(log_rho[at].item() ** 2 for at in left) / len(left)) > bound:
        assume(abs(mean - bound) > 1e-9)
        left.pop()
    acted = make_objective("m2po", bound=bound)(batch).acted
    assert {tuple(at) for at in acted.nonzero().tolist()} == set(outward) - set(left)


@given(tokens())
def test_an_infinite_bound_is_reinforce_and_none_blocks_every_outward_move(draw):
    free = loss_and_grad(make_objective("reinforce"), inputs(*draw))
    for ours, theirs in zip(loss_and_grad(make_objective("m2po", bound=math.inf), inputs(*draw)), free, strict=True):
        assert torch.equal(ours, theirs)
    strict = make_objective("dppo", divergence="ratio", bound=0.0)(inputs(*draw)).acted
    assert torch.equal(make_objective("m2po", bound=0.0)(inputs(*draw)).acted, strict)


def test_gradient_is_the_derivative_of_the_loss():
    batch, logits = random_batch(3, 4, 5, 2, step=1.0, per_token=True)
    assert 0 < make_objective("m2po")(batch).metrics["tr/active_frac"] < 1
    assert gradcheck(lambda x: make_objective("m2po")(as_batch(x, batch)).loss, logits)


def test_padding_takes_no_part_in_the_mean():
    batch = moved([0.3, 0.1, 0.1, 0.1], [1.0] * 4)
    masked = replace(batch, mask=torch.tensor([[True, True, False, False]]))
    assert make_objective("m2po")(batch).acted.tolist() == [[False] * 4]  # mean .03
    assert make_objective("m2po")(masked).acted.tolist() == [[True, False, False, False]]  # .05, then .01
