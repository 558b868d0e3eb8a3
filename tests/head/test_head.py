"""The head against the dense maths: blocks of any size, every option, values and gradients; and what it must not hold."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import corral
from corral.head import HeadOutput, lm_head, logits
from corral.head.torch import stream as online
from tolerance import assert_close

F64 = torch.float64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 3 tokens × 7 vocabulary entries, so that every test crosses their borders."""
    monkeypatch.setitem(logits.BLOCK, "cpu", (3, 7))
    monkeypatch.setitem(online.HELD, "cpu", 1)
    monkeypatch.setattr(online, "ROWS", 3)
    monkeypatch.setattr(online, "COLUMNS", 7)


def dense(hidden, weight, tokens, *, bias=None, scale=1.0, softcap=None, temperature=1.0, top_k=None, mass=1.0, ids=None):
    """The same from full logits."""
    z = scale * (hidden @ weight.T + (0.0 if bias is None else bias))
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    logp = (z / temperature).log_softmax(-1)
    dist = None
    if top_k is not None:
        dist = corral.top_k_support(logp, tokens, top_k, mass, ids=ids)
    elif ids is not None:
        dist = corral.gather_support(logp, ids)
    return HeadOutput(logp.gather(-1, tokens[..., None]).squeeze(-1), -(logp.exp() * logp).sum(-1), dist)


def problem(vocabulary: int, shape: tuple[int, ...] = (2, 5), dtype: torch.dtype = F64) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(*shape, 4, dtype=dtype, requires_grad=True)
    # Weights on a coarse grid make many logits exactly equal: ties are part of the test.
    weight = (torch.randn(vocabulary, 4, dtype=F64) * 2).round().to(dtype).div(2).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, shape)


def scalar(out: HeadOutput) -> Tensor:
    """A random weighting of everything the head reports, to pull gradients from."""
    draw = torch.Generator().manual_seed(7)
    total = (out.logp * torch.randn(out.logp.shape, generator=draw, dtype=F64)).sum()
    total = total + (out.entropy * torch.randn(out.logp.shape, generator=draw, dtype=F64)).sum()
    if out.dist is not None:
        weights = torch.randn(out.dist.logp.shape, generator=draw, dtype=F64)
        total = total + (torch.where(out.dist.ids >= 0, out.dist.logp, 0.0) * weights).sum()
        left = out.dist.rest > -math.inf
        total = total + torch.where(left, out.dist.rest, 0.0).sum()
    return total


OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "soft cap": {"softcap": 2.0, "scale": 1.7},
    "temperature": {"temperature": 0.6, "bias": True},
    "all": {"bias": True, "softcap": 3.0, "scale": 0.5, "temperature": 1.4},
}


@pytest.mark.parametrize("support", ["none", "top 4", "top 4 of 80 %", "all", "ids", "union"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("vocabulary", [5, 21, 33])
def test_values_and_gradients_are_the_dense_ones(vocabulary, options, support):
    hidden, weight, tokens = problem(vocabulary)
    options = dict(options)
    inputs = [hidden, weight]
    if options.pop("bias", False):
        options["bias"] = torch.randn(vocabulary, dtype=F64, requires_grad=True)
        inputs.append(options["bias"])
    if support == "top 4":
        options["top_k"] = 4
    elif support == "top 4 of 80 %":
        options |= {"top_k": 4, "mass": 0.8}
    elif support == "all":
        options["top_k"] = vocabulary
    elif support in ("ids", "union"):
        options |= {"top_k": 4, "mass": 0.8} if support == "union" else {}
        ids = torch.rand(2, 5, vocabulary).argsort(-1)[..., :3]
        ids[0, 0, 2] = ids[1, 1, 1] = -1
        options["ids"] = ids
    out, expected = lm_head(hidden, weight, tokens, entropy=True, **options), dense(hidden, weight, tokens, **options)
    assert_close(out.logp, expected.logp)
    assert_close(out.entropy, expected.entropy)
    if expected.dist is not None:
        assert torch.equal(out.dist.ids, expected.dist.ids)
        assert_close(out.dist.logp, expected.dist.logp)
        assert_close(out.dist.rest, expected.dist.rest)
        assert_close(out.dist.rest_max, expected.dist.rest_max)
    gradients, wanted = (torch.autograd.grad(scalar(x), inputs) for x in (out, expected))
    for got, want in zip(gradients, wanted, strict=True):
        assert_close(got, want)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 12), st.integers(0, 10_000))
def test_the_size_of_a_block_changes_nothing(vocabulary, rows, columns, seed):
    torch.manual_seed(seed)
    hidden, weight, tokens = problem(vocabulary)
    whole = dense(hidden, weight, tokens, top_k=min(3, vocabulary))
    before = logits.BLOCK["cpu"], online.ROWS, online.COLUMNS
    logits.BLOCK["cpu"], online.ROWS, online.COLUMNS = (rows, columns), rows, columns
    try:
        out = lm_head(hidden, weight, tokens, top_k=min(3, vocabulary), entropy=True)
        (gradient,) = torch.autograd.grad(scalar(out), hidden)
    finally:
        logits.BLOCK["cpu"], online.ROWS, online.COLUMNS = before
    assert torch.equal(out.dist.ids, whole.dist.ids)
    assert_close(out.dist.rest, whole.dist.rest)
    assert_close(gradient, torch.autograd.grad(scalar(whole), hidden)[0])


def test_gradcheck():
    hidden, weight, tokens = problem(11, shape=(4,))
    bias = torch.randn(11, dtype=F64, requires_grad=True)
    ids = torch.rand(4, 11).argsort(-1)[:, :3]

    def outputs(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        out = lm_head(h, w, tokens, bias=b, softcap=4.0, temperature=0.7, ids=ids, entropy=True)
        return out.logp, out.entropy, out.dist.logp, out.dist.rest

    assert torch.autograd.gradcheck(outputs, (hidden, weight, bias))


def test_golden_two_tokens():
    # z = h w = (0, log 3): p = (1/4, 3/4), H = 2 log 2 − 3/4 log 3.  d log p(1)/dz = (−1/4, 1 − 3/4).
    hidden = torch.ones(1, 1, dtype=F64, requires_grad=True)
    weight = torch.tensor([[0.0], [math.log(3)]], dtype=F64, requires_grad=True)
    out = lm_head(hidden, weight, torch.tensor([1]), top_k=1, entropy=True)
    assert_close(out.logp, torch.tensor([math.log(0.75)], dtype=F64))
    assert_close(out.entropy, torch.tensor([2 * math.log(2) - 0.75 * math.log(3)], dtype=F64))
    assert out.dist.ids.tolist() == [[1, -1]]
    assert_close(out.dist.rest, torch.tensor([math.log(0.25)], dtype=F64))
    out.logp.sum().backward()
    assert_close(weight.grad, torch.tensor([[-0.25], [0.25]], dtype=F64))
    assert_close(hidden.grad, torch.tensor([[0.25 * math.log(3)]], dtype=F64))


def test_the_rest_of_a_peaked_row_keeps_its_digits_in_float32():
    # One logit of 25 over 20 zeros: everything else holds 20 e^−25 / (1 + 20 e^−25) = 2.8e-10, and 1 − p is 0 in float32.
    weight = torch.zeros(21, 1)
    weight[3] = 25.0
    out = lm_head(torch.ones(1, 1), weight, torch.tensor([3]), top_k=1)
    assert_close(out.dist.rest, torch.tensor([math.log(20) - 25.0]))


def test_rows_without_gradient_cost_nothing(monkeypatch):
    hidden, weight, tokens = problem(20, shape=(6,))
    out = lm_head(hidden, weight, tokens)
    made = []
    block = logits.LogitSpec.block
    monkeypatch.setattr(
        logits.LogitSpec, "block", lambda self, h, *rest, **out: made.append(len(h)) or block(self, h, *rest, **out)
    )
    (out.logp * torch.tensor([1.0, 0, 0, 0, 0, 2.0])).sum().backward()
    assert set(made) == {2}  # of six
    assert hidden.grad[1:5].abs().sum() == 0


def test_a_frozen_head_gets_no_gradient_and_a_frozen_trunk_neither():
    hidden, weight, tokens = problem(20)
    lm_head(hidden, weight.detach(), tokens).logp.sum().backward()
    assert hidden.grad is not None
    lm_head(hidden.detach(), weight, tokens).logp.sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_and_float32_is_computed(dtype):
    hidden, weight, tokens = problem(40, dtype=dtype)
    out = lm_head(hidden, weight, tokens, top_k=5, entropy=True)
    assert {out.logp.dtype, out.entropy.dtype, out.dist.logp.dtype, out.dist.rest.dtype} == {torch.float32}
    expected = dense(hidden.detach().double(), weight.detach().double(), tokens, top_k=5)
    assert_close(out.logp, expected.logp)
    assert_close(out.dist.rest, expected.dist.rest)
    out.logp.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == dtype


def test_entropy_of_a_masked_vocabulary_counts_only_what_is_possible():
    bias = torch.full((20,), -math.inf, dtype=F64)
    bias[:2] = 0.0
    hidden = torch.zeros(1, 4, dtype=F64, requires_grad=True)
    out = lm_head(hidden, torch.randn(20, 4, dtype=F64), torch.tensor([0]), bias=bias, entropy=True)
    assert_close(out.entropy, torch.tensor([math.log(2)], dtype=F64))
    out.entropy.sum().backward()
    assert hidden.grad.isfinite().all()


BAD = {
    "`top_k` must lie in 1 … V = 20; got 21": {"top_k": 21},
    "`top_k` must lie in 1 … V = 20; got 2.5": {"top_k": 2.5},
    "`top_k` must lie in 1 … V = 20; got True": {"top_k": True},
    "`mass` is a probability in (0, 1], 1.0 for no threshold; got 0.0": {"top_k": 2, "mass": 0.0},
    "`mass` is a probability in (0, 1], 1.0 for no threshold; got '1'": {"top_k": 2, "mass": "1"},
    "`mass` is where `top_k` stops; got 0.9 without a `top_k`": {"mass": 0.9},
    "`temperature` must be > 0; got 0": {"temperature": 0.0},
    "`softcap` must be > 0 and finite, or None; got -1.0": {"softcap": -1.0},
    "`softcap` must be > 0 and finite, or None; got inf": {"softcap": math.inf},
    "`scale` must be a finite number; got nan": {"scale": math.nan},
    "`impl` is 'auto', 'torch' or 'triton'; got 'numpy'": {"impl": "numpy"},
    "bias is [V] with V = 20; got [3]": {"bias": torch.zeros(3, dtype=F64)},
    "ids is [2, 5] + [K]; got [2, 4, 3]": {"ids": torch.zeros(2, 4, 3).long()},
    "`ids` must lie in -1 … 19": {"ids": torch.full((2, 5, 3), 20)},
    "`ids` has a token twice in one row": {"ids": torch.tensor([7, -1, -1, 7]).expand(2, 5, 4)},
}


@pytest.mark.parametrize(("says", "options"), BAD.items(), ids=BAD)
def test_what_is_wrong_is_refused(says, options, unchecked_shapes):
    hidden, weight, tokens = problem(20)
    with pytest.raises(ValueError, match=r"^lm_head: ") as error:
        lm_head(hidden, weight, tokens, **options)
    assert says in str(error.value)


def test_a_weight_is_a_matrix(unchecked_shapes):
    hidden, weight, tokens = problem(20)
    with pytest.raises(ValueError, match=r"lm_head: hidden is .*, weight \[V, H\], .*; got .* \[4\], \[2, 5\]"):
        lm_head(hidden, weight[0], tokens)


def test_tokens_outside_the_vocabulary_are_refused():
    hidden, weight, tokens = problem(20)
    with pytest.raises(ValueError, match=r"lm_head: `tokens` must lie in 0 … 19 .* got 20"):
        lm_head(hidden, weight, tokens.fill_(20))


def test_logits_of_any_size_have_the_same_log_probs():
    """A normaliser as large as the logits would round them; numbers of a few bits come through the bias unrounded."""
    hidden, weight, tokens = problem(20, dtype=torch.float32)
    hidden = (hidden.detach() * 4).round() / 4
    small, large = (lm_head(hidden, weight.detach(), tokens, bias=torch.full((20,), b), top_k=4) for b in (0.0, 4096.0))
    assert torch.equal(small.logp, large.logp)
    assert torch.equal(small.dist.logp, large.dist.logp)
