"""Four ways to average a loss, each with the same gradient however the batch is split."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from corral import reduce_loss, reduction_weights
from tolerance import assert_close

SEEDS = st.integers(0, 2**20)
HOWS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
LENGTH = 10.0


def ragged(seed: int, sequences: int = 6, tokens: int = 5) -> tuple[Tensor, Tensor]:
    """A random loss, and a mask with holes, whose first token is live and whose last sequence has none."""
    generator = torch.Generator().manual_seed(seed)
    loss = torch.randn(sequences, tokens, generator=generator, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(sequences, tokens, generator=generator) < 0.6
    mask[0, 0], mask[-1] = True, False
    return loss, mask


def total_of(mask: Tensor, how: str) -> Tensor:
    """What the mean is over, in the whole batch."""
    return mask.sum() if how == "token-mean" else mask.any(-1).sum()


def reduce_by_hand(loss: np.ndarray, mask: np.ndarray, how: str) -> float:
    sequences = [row[live] for row, live in zip(loss, mask, strict=True) if live.any()]
    return {
        "token-mean": np.mean(np.concatenate(sequences)),
        "seq-mean-token-mean": np.mean([s.mean() for s in sequences]),
        "seq-mean-token-sum": np.mean([s.sum() for s in sequences]),
        "seq-mean-token-sum-norm": np.mean([s.sum() / LENGTH for s in sequences]),
    }[how]


# ---------------------------------------------------------------------------------------------------- golden


@pytest.mark.supports("reduction: {how}", door="import corral")
@pytest.mark.parametrize(
    ("how", "value", "gradient"),
    [
        # Sequences (1, 2) and (4), and one without an unmasked token.
        ("token-mean", 7 / 3, [[1 / 3, 1 / 3], [1 / 3, 0.0], [0.0, 0.0]]),  # 7 over 3 tokens
        ("seq-mean-token-mean", 2.75, [[1 / 4, 1 / 4], [1 / 2, 0.0], [0.0, 0.0]]),  # (1.5 + 4) / 2 sequences
        ("seq-mean-token-sum", 3.5, [[1 / 2, 1 / 2], [1 / 2, 0.0], [0.0, 0.0]]),  # (3 + 4) / 2
        ("seq-mean-token-sum-norm", 0.35, [[0.05, 0.05], [0.05, 0.0], [0.0, 0.0]]),  # (3/10 + 4/10) / 2
    ],
)
def test_golden_values_and_gradients(how, value, gradient):
    loss = torch.tensor([[1.0, 2.0], [4.0, 99.0], [99.0, 99.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    reduced = reduce_loss(loss, mask, how, length=LENGTH)
    reduced.backward()
    assert_close(reduced.detach(), torch.tensor(value, dtype=torch.float64))
    assert_close(loss.grad, torch.tensor(gradient, dtype=torch.float64))


@pytest.mark.parametrize(
    ("how", "value"),
    [
        ("token-mean", 7 / 8),  # 8 tokens in the whole batch
        ("seq-mean-token-mean", 5.5 / 8),  # 8 sequences
        ("seq-mean-token-sum", 7 / 8),
        ("seq-mean-token-sum-norm", 0.7 / 8),
    ],
)
@pytest.mark.parametrize(
    "total", [8, 8.0, torch.tensor(8), torch.tensor(8.0), torch.tensor([8]), torch.tensor(8, dtype=torch.int32)]
)
def test_golden_the_total_may_be_a_number_or_a_tensor(how, value, total):
    loss = torch.tensor([[1.0, 2.0], [4.0, 99.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    assert_close(reduce_loss(loss, mask, how, total=total, length=LENGTH), torch.tensor(value, dtype=torch.float64))


# ---------------------------------------------------------------------------------------------------- oracle, gradient


@given(SEEDS, st.sampled_from(HOWS))
def test_values_agree_with_loops(seed, how):
    loss, mask = ragged(seed)
    expected = reduce_by_hand(loss.detach().numpy(), mask.numpy(), how)
    assert_close(reduce_loss(loss, mask, how, length=LENGTH).detach(), torch.tensor(expected))


@pytest.mark.parametrize("how", HOWS)
def test_gradcheck(how):
    loss, mask = ragged(0)
    assert gradcheck(lambda x: reduce_loss(x, mask, how, length=LENGTH), loss)


# ---------------------------------------------------------------------------------------------------- splitting a batch


@given(SEEDS, st.sampled_from(HOWS), st.lists(st.integers(1, 3), min_size=1, max_size=6))
def test_micro_batches_add_up_to_the_batch(seed, how, sizes):
    # The last sequence has no unmasked token: a micro-batch of it alone must give 0, not an error.
    loss, mask = ragged(seed, sequences=sum(sizes) + 1)
    whole = reduce_loss(loss, mask, how, length=LENGTH)
    (expected,) = torch.autograd.grad(whole, loss)
    parts = [
        reduce_loss(part, live, how, total=total_of(mask, how), length=LENGTH)
        for part, live in zip(loss.split([*sizes, 1]), mask.split([*sizes, 1]), strict=True)
    ]
    for part in parts:
        part.backward(retain_graph=True)  # gradients accumulate
    assert_close(sum(parts).detach(), whole.detach())
    assert_close(loss.grad, expected)


@given(SEEDS, st.sampled_from(HOWS), st.integers(1, 4), st.integers(1, 3))
def test_ranks_that_average_their_gradients_agree_with_one_device(seed, how, ranks, micro_batches):
    # A parameter that every token shares; each rank accumulates its micro-batches, times the world size, and ranks average.
    loss, mask = ragged(seed, sequences=ranks * micro_batches * 2)
    loss = loss.detach()
    parameter = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(reduce_loss((parameter * loss).sin(), mask, how, length=LENGTH), parameter)
    averaged = torch.zeros_like(expected)
    for rank in range(ranks):
        for micro in range(micro_batches):
            rows = slice(2 * (rank * micro_batches + micro), 2 * (rank * micro_batches + micro + 1))
            part = reduce_loss((parameter * loss[rows]).sin(), mask[rows], how, total=total_of(mask, how), length=LENGTH)
            averaged += torch.autograd.grad(part * ranks, parameter)[0] / ranks
    assert_close(averaged, expected)


@pytest.mark.parametrize("how", HOWS)
def test_a_micro_batch_without_a_live_token_adds_nothing(how):
    loss = torch.full((2, 3), math.nan, requires_grad=True)
    reduced = reduce_loss(loss, torch.zeros(2, 3, dtype=torch.bool), how, total=4.0, length=LENGTH)
    reduced.backward()
    assert reduced == 0
    assert not loss.grad.any()


# ---------------------------------------------------------------------------------------------------- properties, edges


@given(SEEDS, st.sampled_from(HOWS), st.sampled_from([math.nan, math.inf, -math.inf, 1e300]))
def test_padding_may_hold_anything(seed, how, garbage):
    loss, mask = ragged(seed)
    poisoned = loss.detach().masked_fill(~mask, garbage).requires_grad_()
    expected, actual = (reduce_loss(x, mask, how, length=LENGTH) for x in (loss, poisoned))
    assert torch.equal(actual, expected)
    (grad,) = torch.autograd.grad(actual, poisoned)
    assert torch.equal(grad, torch.autograd.grad(expected, loss)[0])
    assert not grad[~mask].any()


@given(SEEDS, st.sampled_from(HOWS))
def test_appending_padding_changes_nothing(seed, how):
    loss, mask = ragged(seed)
    longer = torch.nn.functional.pad(loss, (0, 3, 0, 2), value=7.0)
    padded = reduce_loss(longer, torch.nn.functional.pad(mask, (0, 3, 0, 2)), how, length=LENGTH)
    assert_close(padded, reduce_loss(loss, mask, how, length=LENGTH).detach())


@pytest.mark.parametrize("how", HOWS[:3])
def test_tokens_with_loss_0_stay_in_the_denominator(how):
    # A blocked token is live: (3 + 0) over 2 tokens of 1 sequence is 1.5, or 3 as a sum.
    loss, mask = torch.tensor([[3.0, 0.0]]), torch.tensor([[True, True]])
    assert reduce_loss(loss, mask, how) == (3.0 if how == "seq-mean-token-sum" else 1.5)


@pytest.mark.parametrize("how", HOWS)
def test_a_single_token_is_its_own_mean(how):
    reduced = reduce_loss(torch.tensor([[2.5]]), torch.tensor([[True]]), how, length=1.0)
    assert reduced == 2.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_added_up_in_float32(dtype):
    # 4096 + 1 is no half-precision number.
    reduced = reduce_loss(torch.tensor([[4096.0, 1.0]], dtype=dtype), torch.tensor([[True, True]]), "seq-mean-token-sum")
    assert reduced.dtype == torch.float32
    assert reduced == 4097


@given(st.sampled_from(HOWS), st.integers(0, 1000), st.sampled_from([None, 7.0]))
def test_weights_are_those_that_the_reduction_multiplies_with(how, seed, total):
    draw = torch.Generator().manual_seed(seed)
    loss, mask = torch.randn(3, 5, generator=draw), torch.rand(3, 5, generator=draw) < 0.6
    mask[0, 0] = True
    weights = reduction_weights(mask, how, total=total, length=LENGTH)
    assert not weights[~mask].any()
    assert_close((weights * loss).sum(), reduce_loss(loss, mask, how, total=total, length=LENGTH))


def test_golden_weights():
    # Two sequences of 2 and 1 unmasked tokens: 1/3 each; or a half of a half, a half of a half, and a half.
    mask = torch.tensor([[True, True, False], [False, True, False]])
    third = 1 / 3
    assert_close(reduction_weights(mask, "token-mean"), torch.tensor([[third, third, 0], [0, third, 0]]))
    assert_close(reduction_weights(mask, "seq-mean-token-mean"), torch.tensor([[0.25, 0.25, 0], [0, 0.5, 0]]))
