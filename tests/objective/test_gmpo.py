"""GMPO: the geometric mean of token ratios, each clipped on the side its advantage pushes to."""

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


def paper_loss(batch: TokenBatch, clip: float) -> Tensor:
    """−J of arXiv:2507.20673 with z = sgn(Â) min(sgn(Â) log ρ, sgn(Â) clip(log ρ)), for autograd to differentiate."""
    losses = []
    for b in range(len(batch.mask)):
        live, sign = batch.mask[b], batch.advantages[b].sign()
        log_rho = batch.logp_new[b][live] - batch.logp_old[b][live]
        z = sign * torch.minimum(sign * log_rho, sign * log_rho.clamp(-clip, clip))
        losses.append(-batch.advantages[b] * z.mean().exp())
    return torch.stack(losses).mean()


def test_golden_positive_advantage_clips_above():
    # log ρ = ln 4, −ln 4 and ε = ln 2: z = ln 2, −ln 4, mean −½ ln 2.  L = −2/√2 = −√2 on both; only the second has gradient.
    batch = inputs(p_new=[0.8, 0.1], p_old=[0.2, 0.4], adv=[2.0, 2.0])
    objective = make_objective("gmpo", clip=math.log(2))
    loss, grad = loss_and_grad(objective, batch)
    assert_close(loss, row([-math.sqrt(2), -math.sqrt(2)]))
    assert_close(grad, row([0.0, -math.sqrt(2)]))
    assert objective(batch).metrics["tr/active_frac"] == 0.5


def test_golden_negative_advantage_clips_below():
    # z = ln 4, −ln 2, mean ½ ln 2.  L = √2 on both; only the first has gradient.
    batch = inputs(p_new=[0.8, 0.1], p_old=[0.2, 0.4], adv=[-1.0, -1.0])
    objective = make_objective("gmpo", clip=math.log(2))
    loss, grad = loss_and_grad(objective, batch)
    assert_close(loss, row([math.sqrt(2), math.sqrt(2)]))
    assert_close(grad, row([math.sqrt(2), 0.0]))
    assert objective(batch).metrics["tr/active_frac"] == 0.5


def test_golden_masked_out_tokens_do_not_count_in_the_length():
    # The unmasked tokens have ρ = 4, 1 and nothing is clipped: √(4·1) = 2 as if the middle one were not there.
    batch = inputs(p_new=[0.8, 0.9, 0.4], p_old=[0.2, 0.1, 0.4], adv=[1.0] * 3, mask=[True, False, True])
    loss, grad = loss_and_grad(make_objective("gmpo", clip=5.0), batch)
    assert_close(loss, row([-2.0, 0.0, -2.0]))
    assert_close(grad, row([-2.0, 0.0, -2.0]))


def test_golden_a_token_beyond_every_ratio_counts_in_full():
    # log ρ = 30, −28: the mean is 1 and the ratio e, though one token alone lies beyond the cut-off at e²⁰.
    old = torch.tensor([[-31.0, -1.0]], dtype=torch.float64)
    new = torch.tensor([[-1.0, -29.0]], dtype=torch.float64, requires_grad=True)
    batch = TokenBatch(new, old, torch.ones(1, dtype=torch.float64), torch.tensor([[True, True]]))
    loss, grad = loss_and_grad(make_objective("gmpo", clip=40.0), batch)
    assert_close(loss, row([-math.e, -math.e]))
    assert_close(grad, row([-math.e, -math.e]))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("clip", [0.1, 0.4, 1.0])
def test_loss_and_gradient_are_the_papers_under_the_sequence_mean_of_token_means(seed, clip):
    batch, logits = random_batch(5, 6, 5, 2, step=1.0, seed=seed)
    ours = reduce_loss(make_objective("gmpo", clip=clip)(batch).loss, batch.mask, "seq-mean-token-mean")
    paper = paper_loss(batch, clip)
    assert_close(ours, paper)
    assert_close(torch.autograd.grad(ours, logits, retain_graph=True)[0], torch.autograd.grad(paper, logits)[0])


@given(tokens(), st.floats(0.0, 3.0), st.floats(-3.0, 3.0))
def test_every_token_carries_the_sequences_value_and_clipped_tokens_no_gradient(draw, clip, a):
    p_new, p_old, _ = draw
    log_rho = [math.log(p / q) for p, q in zip(p_new, p_old, strict=True)]
    assume(apart(log_rho, -clip, clip))
    z = [min(x, clip) if a > 0 else max(x, -clip) if a < 0 else x for x in log_rho]
    value = -a * math.exp(sum(z) / len(z))
    loss, grad = loss_and_grad(make_objective("gmpo", clip=clip), inputs(p_new, p_old, [a] * len(z)))
    assert_close(loss, row([value] * len(z)))
    assert_close(grad, row([value * (zt == x) for zt, x in zip(z, log_rho, strict=True)]))


@pytest.mark.parametrize("seed", range(4))
def test_without_a_clip_it_is_gspo_without_a_clip(seed):
    batch, logits = random_batch(4, 5, 5, 2, step=1.0, seed=seed)
    gmpo = make_objective("gmpo", clip=math.inf)(batch).loss
    gspo = make_objective("gspo", clip_low=1, clip_high=math.inf)(batch).loss
    assert_close(gmpo, gspo)
    assert_close(torch.autograd.grad(gmpo.sum(), logits, retain_graph=True)[0], torch.autograd.grad(gspo.sum(), logits)[0])


@given(tokens(), st.floats(0.0, 2.0))
def test_clipping_only_ever_raises_the_loss(draw, clip):
    p_new, p_old, adv = draw
    batch = inputs(p_new, p_old, adv[:1] * len(adv))
    clipped, _ = loss_and_grad(make_objective("gmpo", clip=clip), batch)
    free, _ = loss_and_grad(make_objective("gmpo", clip=math.inf), batch)
    assert (clipped >= free - 1e-12).all()


def test_gradient_is_the_derivative_of_the_sequence_mean_of_token_means():
    batch, logits = random_batch(3, 4, 3, 2, step=1.0, seed=1)

    def loss(logits: Tensor) -> Tensor:
        return reduce_loss(make_objective("gmpo")(as_batch(logits, batch)).loss, batch.mask, "seq-mean-token-mean")

    assert gradcheck(loss, logits)
