"""GSPO: one length-normalised ratio per sequence, its value on every token, and each token's own share of the gradient."""

import math

import pytest
import torch
from batches import apart, as_batch, inputs, loss_and_grad, random_batch, row, tokens
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from corral import TokenBatch, make_objective, reduce_loss
from tolerance import assert_close


def paper_loss(batch: TokenBatch, low: float, high: float) -> Tensor:
    """−J of arXiv:2507.18071, eq. 5, sequence by sequence on the unmasked tokens alone, for autograd to differentiate."""
    losses = []
    for b in range(len(batch.mask)):
        live = batch.mask[b]
        s = (batch.logp_new[b][live] - batch.logp_old[b][live]).mean().exp()
        losses.append(-torch.minimum(s * batch.advantages[b], s.clamp(1 - low, 1 + high) * batch.advantages[b]))
    return torch.stack(losses).mean()


def test_golden_inside_the_range():
    # ρ = .8/.2, .4/.4 = 4, 1, so s = √(4·1) = 2 ≤ 1 + 1.5.  L = −2Â on both tokens, and dL/dlogp_t = −sÂ straight through.
    batch = inputs(p_new=[0.8, 0.4], p_old=[0.2, 0.4], adv=[3.0, 3.0])
    loss, grad = loss_and_grad(make_objective("gspo", clip_high=1.5), batch)
    assert_close(loss, row([-6.0, -6.0]))
    assert_close(grad, row([-6.0, -6.0]))


@pytest.mark.parametrize(
    ("p_new", "adv", "value", "slope"),
    [
        (0.8, +1.0, -1.5, 0.0),  # s = 2: min(2, 1.5), clipped
        (0.8, -1.0, 2.0, 2.0),  # s = 2: min(−2, −1.5), kept
        (0.05, -1.0, 0.75, 0.0),  # s = ½: min(−.5, −.75), clipped
        (0.05, +1.0, -0.5, -0.5),  # s = ½: min(.5, .75), kept
    ],
)
def test_golden_clip(p_new, adv, value, slope):
    # ρ = p_new/.2 and .4/.4, so s = √ρ; the range is [1 − .25, 1 + .5].
    batch = inputs(p_new=[p_new, 0.4], p_old=[0.2, 0.4], adv=[adv, adv])
    objective = make_objective("gspo", clip_low=0.25, clip_high=0.5)
    loss, grad = loss_and_grad(objective, batch)
    assert_close(loss, row([value, value]))
    assert_close(grad, row([slope, slope]))
    assert objective(batch).metrics["tr/active_frac"] == (slope == 0)


def test_golden_masked_out_tokens_do_not_count_in_the_length():
    # The unmasked tokens have ρ = 4, 1: s = 2 as if the middle one were not there.
    batch = inputs(p_new=[0.8, 0.9, 0.4], p_old=[0.2, 0.1, 0.4], adv=[1.0] * 3, mask=[True, False, True])
    loss, grad = loss_and_grad(make_objective("gspo", clip_high=1.5), batch)
    assert_close(loss, row([-2.0, 0.0, -2.0]))
    assert_close(grad, row([-2.0, 0.0, -2.0]))


def test_golden_advantages_may_differ_by_token():
    # The GSPO-token variant: s = 2 on both, clipped at 1.5 where Â = 1, and not where Â = −3.
    batch = inputs(p_new=[0.8, 0.4], p_old=[0.2, 0.4], adv=[1.0, -3.0])
    loss, grad = loss_and_grad(make_objective("gspo", clip_high=0.5), batch)
    assert_close(loss, row([-1.5, 6.0]))
    assert_close(grad, row([0.0, 6.0]))


def test_golden_a_token_beyond_every_ratio_counts_in_full():
    # log ρ = 30, −28: the mean is 1 and the ratio e, though one token alone lies beyond the cut-off at e²⁰.
    old = torch.tensor([[-31.0, -1.0]], dtype=torch.float64)
    new = torch.tensor([[-1.0, -29.0]], dtype=torch.float64, requires_grad=True)
    batch = TokenBatch(new, old, torch.ones(1, dtype=torch.float64), torch.tensor([[True, True]]))
    loss, grad = loss_and_grad(make_objective("gspo", clip_high=2.0), batch)
    assert_close(loss, row([-math.e, -math.e]))
    assert_close(grad, row([-math.e, -math.e]))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("low", "high"), [(0.1, 0.1), (3e-4, 4e-4), (1, math.inf)])
def test_loss_and_gradient_are_the_papers_under_the_sequence_mean_of_token_means(seed, low, high):
    batch, logits = random_batch(5, 6, 5, 2, seed=seed)
    out = make_objective("gspo", clip_low=low, clip_high=high)(batch)
    ours = reduce_loss(out.loss, batch.mask, "seq-mean-token-mean")
    paper = paper_loss(batch, low, high)
    assert_close(ours, paper)
    assert_close(torch.autograd.grad(ours, logits, retain_graph=True)[0], torch.autograd.grad(paper, logits)[0])


@given(tokens(), st.floats(0.0, 0.9), st.floats(0.0, 3.0), st.floats(-3.0, 3.0))
def test_every_token_carries_the_sequences_value_and_its_own_gradient(draw, low, high, a):
    p_new, p_old, _ = draw
    s = math.prod(p / q for p, q in zip(p_new, p_old, strict=True)) ** (1 / len(p_new))
    assume(apart([s], 1 - low, 1 + high))
    value = -min(s * a, min(max(s, 1 - low), 1 + high) * a)
    kept = not ((a > 0 and s > 1 + high) or (a < 0 and s < 1 - low))
    loss, grad = loss_and_grad(make_objective("gspo", clip_low=low, clip_high=high), inputs(p_new, p_old, [a] * len(p_new)))
    assert_close(loss, row([value] * len(p_new)))
    assert_close(grad, row([-s * a * kept] * len(p_new)))


@given(tokens(max_size=1), st.floats(0.0, 0.9), st.floats(0.0, 3.0))
def test_on_one_token_it_is_ppo_clip(draw, low, high):
    gspo = loss_and_grad(make_objective("gspo", clip_low=low, clip_high=high), inputs(*draw))
    ppo = loss_and_grad(make_objective("ppo_clip", clip_low=low, clip_high=high), inputs(*draw))
    for ours, theirs in zip(gspo, ppo, strict=True):
        assert_close(ours, theirs)


@given(tokens(min_size=2), st.integers(1, 3))
def test_repeating_a_sequence_changes_nothing_for_its_tokens(draw, times):
    # The ratio is normalised by length, so the longer sequence has the same one.
    p_new, p_old, adv = draw
    adv = adv[:1] * len(adv)
    objective = make_objective("gspo", clip_low=0.25, clip_high=0.5)
    once, _ = loss_and_grad(objective, inputs(p_new, p_old, adv))
    often, _ = loss_and_grad(objective, inputs(p_new * times, p_old * times, adv * times))
    assert_close(often, once.repeat(1, times))


def test_gradient_is_the_derivative_of_the_sequence_mean_of_token_means():
    batch, logits = random_batch(3, 4, 3, 2, seed=1)

    def loss(logits: Tensor) -> Tensor:
        out = make_objective("gspo", clip_low=0.05, clip_high=0.05)(as_batch(logits, batch))
        return reduce_loss(out.loss, batch.mask, "seq-mean-token-mean")

    assert gradcheck(loss, logits)
