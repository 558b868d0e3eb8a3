"""The head on odd shapes and odd rows, at its real block size, against dense float64 autograd."""

import math

import pytest
import torch
from torch import Tensor

import corral
from corral.head import HeadOutput, lm_head
from tolerance import assert_close

F64 = torch.float64
SUMMED = {F64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", SUMMED, ids=str)
SHAPES = {
    "one token": (1, 301, 5),
    "one vocabulary entry": (3, 1, 1),
    "more tokens than a block": (1023, 67, 3),
    "K = 1": (5, 2100, 1),
    "K = 63": (5, 2100, 63),
    "GPT-2": (3, 50257, 63),
    "two blocks and one entry": (4, 2 * 2048 + 1, 7),
}


def dense(hidden: Tensor, weight: Tensor, bias: Tensor, tokens: Tensor, *, top_k: int | None, ids: Tensor | None) -> HeadOutput:
    """The same from full logits, in float64 whatever comes in."""
    logp = (hidden.double() @ weight.double().T + bias.double()).log_softmax(-1)
    nats = -(logp.exp() * torch.where(logp > -math.inf, logp, 0.0)).sum(-1)
    if ids is None:
        assert top_k is not None
        dist = corral.top_k_support(logp, tokens, top_k)
    else:
        dist = corral.gather_support(logp, ids)
    return HeadOutput(logp.gather(-1, tokens[..., None]).squeeze(-1), nats, dist)


def scalar(out: HeadOutput) -> Tensor:
    """A weighting of everything the head reports that may have a gradient."""
    dist = out.dist
    finite = (dist.ids >= 0) & (dist.logp > -math.inf)
    weights = torch.linspace(-1, 1, dist.ids.shape[-1], dtype=F64)
    kept = (torch.where(finite, dist.logp, 0.0) * weights).sum()
    rest = torch.where(dist.rest > -math.inf, dist.rest, 0.0).sum()
    return kept + 0.3 * rest + torch.where(out.logp > -math.inf, out.logp, 0.0).sum() - 0.2 * out.entropy.sum()


def compare(hidden: Tensor, weight: Tensor, tokens: Tensor, bias: Tensor | None = None, *, top_k: int) -> None:
    """Own support and given ids, values and gradients; supports up to ties that rounding broke."""
    dtype = hidden.dtype
    inputs = [
        x.detach().requires_grad_() for x in (hidden, weight, torch.zeros(len(weight), dtype=dtype) if bias is None else bias)
    ]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    own = lm_head(inputs[0], inputs[1], tokens, bias=inputs[2], top_k=top_k, entropy=True)
    expected = dense(*exact, tokens, top_k=top_k, ids=None)
    if dtype == F64:
        assert torch.equal(own.dist.ids, expected.dist.ids)
    assert_close(own.dist.logp, expected.dist.logp)
    for given in (None, own.dist.ids):
        out = own if given is None else lm_head(*inputs[:2], tokens, bias=inputs[2], ids=given, entropy=True)
        expected = dense(*exact, tokens, top_k=top_k, ids=own.dist.ids)
        for got, want in [
            (out.logp, expected.logp),
            (out.entropy, expected.entropy),
            (out.dist.logp, expected.dist.logp),
            (out.dist.rest, expected.dist.rest),
        ]:
            assert_close(got, want)
        gradients, wanted = torch.autograd.grad(scalar(out), inputs), torch.autograd.grad(scalar(expected), exact)
        for got, want in zip(gradients, wanted, strict=True):
            assert got.dtype == dtype
            # Sums of thousands of terms that cancel: what is left may be far smaller than what was added.
            assert_close(got, want, atol=SUMMED[dtype] * max(want.abs().max().item(), 1.0))


@DTYPES
@pytest.mark.parametrize(("tokens", "vocabulary", "top_k"), SHAPES.values(), ids=SHAPES)
def test_odd_shapes(tokens, vocabulary, top_k, dtype):
    hidden, weight = torch.randn(tokens, 6).to(dtype), torch.randn(vocabulary, 6).to(dtype)
    compare(hidden, weight, torch.randint(vocabulary, (tokens,)), torch.randn(vocabulary).to(dtype), top_k=top_k)


@DTYPES
@pytest.mark.parametrize("sampled", [7, 4000])
def test_one_token_carries_all_mass(dtype, sampled):
    # e^−90 of it is left over: below the smallest normal float32 relative to 1, and still exact as a logarithm.
    bias = torch.zeros(4100, dtype=dtype)
    bias[7] = 80.0
    compare(torch.zeros(2, 3, dtype=dtype), torch.zeros(4100, 3, dtype=dtype), torch.full((2,), sampled), bias, top_k=5)
    out = lm_head(torch.zeros(1, 3, dtype=dtype), torch.zeros(4100, 3, dtype=dtype), torch.tensor([7]), bias=bias, top_k=1)
    assert_close(out.dist.rest, torch.tensor([math.log(4099) - 80.0], dtype=F64))


@DTYPES
def test_uniform_logits_and_ties_go_to_the_lowest_ids(dtype):
    hidden, weight = torch.ones(3, 2, dtype=dtype), torch.ones(5000, 2, dtype=dtype)
    tokens = torch.tensor([0, 4, 4999])
    compare(hidden, weight, tokens, top_k=4)
    out = lm_head(hidden, weight, tokens, top_k=4, entropy=True)
    assert out.dist.ids.tolist() == [[0, 1, 2, 3, -1], [4, 0, 1, 2, 3], [4999, 0, 1, 2, 3]]
    assert_close(out.entropy, torch.full((3,), math.log(5000), dtype=F64))


@DTYPES
@pytest.mark.parametrize("possible", [1, 3, 2500])
def test_impossible_tokens(dtype, possible):
    # −inf on all but a few: fewer than k of them can be in the support with any mass, and none of the others gets a gradient.
    bias = torch.full((5000,), -math.inf, dtype=dtype)
    bias[torch.randperm(5000)[:possible]] = 0.5
    tokens = (bias > -math.inf).nonzero()[:1, 0].expand(4)
    compare(torch.randn(4, 3).to(dtype), torch.randn(5000, 3).to(dtype), tokens, bias, top_k=6)


def test_rows_that_are_all_masked_get_no_gradient():
    hidden, weight = torch.randn(6, 3, requires_grad=True), torch.randn(90, 3, requires_grad=True)
    out = lm_head(hidden, weight, torch.randint(90, (6,)), top_k=4, entropy=True)
    ((out.logp + out.entropy + out.dist.rest) * 0.0).sum().backward()
    assert hidden.grad.count_nonzero() == weight.grad.count_nonzero() == 0


@pytest.mark.parametrize("how", [{}, {"top_k": 3}, {"ids": torch.zeros(0, 2, dtype=torch.int64)}], ids=str)
def test_no_token_at_all(how):
    hidden, weight = torch.randn(0, 3, requires_grad=True), torch.randn(90, 3, requires_grad=True)
    out = lm_head(hidden, weight, torch.zeros(0, dtype=torch.int64), entropy=True, **how)
    assert out.logp.shape == out.entropy.shape == (0,)
    (out.logp.sum() + out.entropy.sum()).backward()
    assert weight.grad.count_nonzero() == 0


@pytest.mark.parametrize("slots", [0, 2])
def test_a_given_support_may_be_empty(slots):
    hidden, weight, tokens = torch.randn(3, 4), torch.randn(40, 4), torch.tensor([1, 2, 3])
    out = lm_head(hidden, weight, tokens, ids=torch.full((3, slots), -1))
    assert out.dist.logp.shape == (3, slots)
    assert (out.dist.logp == -math.inf).all()
    assert_close(out.dist.rest, torch.zeros(3))
    assert_close(out.logp, lm_head(hidden, weight, tokens).logp)
