"""The union of a given support and the policy's own in the streamed head, against `top_k_support` on dense float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import corral
from corral.head.logits import LogitSpec
from corral.head.rows import HeadInput, HeadRows
from corral.head.union import gather_logp
from interpreted import DEVICE, HALF, small_tiles
from tolerance import assert_close

from corral.head.triton import support as select  # isort: skip  # after `interpreted`
from corral.head.triton.support import join_supports  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # NumPy's, where the kernels compute with inf

WIDTH = 8
VOCABULARY = 85 if DEVICE == "cpu" else 1000
"""So that there are some tiles; the last one is not full."""
LOGITS = 1e-5 if DEVICE == "cpu" else 1e-4
"""How far float32 sums of products may be off."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)


def problem(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Weights on a coarse grid and whole-numbered hidden states: many logits are exactly equal, and sums exact."""
    hidden = (2 * torch.randn(rows, WIDTH)).round().to(DEVICE, dtype)
    weight = (2 * torch.randn(vocabulary, WIDTH)).round().div(2).to(DEVICE, dtype)
    return hidden, weight, torch.randint(vocabulary, (rows,)).to(DEVICE)


def some_ids(logp: Tensor, tokens: Tensor) -> Tensor:
    """Supports of 5: the policy's own, the sampled token and strangers, with a gap, and none at all."""
    rows, vocabulary = logp.shape
    ids = torch.rand(rows, vocabulary).argsort(-1)[:, :5].to(DEVICE)
    ids[0] = logp[0].topk(5).indices  # nothing is new but what ties bring
    ids[1, 0] = torch.where((ids[1, 1:] == tokens[1]).any(), ids[1, 0], tokens[1])
    ids[2, [1, 4]] = -1
    ids[3] = -1
    return ids


def log_softmax(spec: LogitSpec, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return spec.finish_(hidden.double() @ weight.double().T + (0.0 if bias is None else bias.double())).log_softmax(-1)


def assert_union(found: HeadRows, logp: Tensor, tokens: Tensor, ids: Tensor, top_k: int, mass: float = 1.0) -> None:
    expected = corral.top_k_support(logp.float(), tokens, top_k, mass, ids=ids)
    assert torch.equal(found.ids, expected.ids)
    exact = corral.gather_support(logp, expected.ids)
    assert_close(found.kept, exact.logp, torch.float32, atol=LOGITS)
    assert_close(found.rest, exact.rest, torch.float32, atol=LOGITS)
    assert_close(found.rest_max, exact.rest_max, torch.float32, atol=LOGITS)
    assert_close(found.logp, logp.gather(1, tokens[:, None])[:, 0], torch.float32, atol=LOGITS)


SPECS = {
    "plain": (LogitSpec(), False, 1.0),
    "part of the mass": (LogitSpec(temperature=0.7), False, 0.8),
    "bias, scale and cap": (LogitSpec(scale=-1.3, softcap=4.0, temperature=0.8), True, 0.97),
}


@pytest.mark.parametrize(("spec", "biased", "mass"), SPECS.values(), ids=SPECS)
def test_it_is_top_k_support_with_ids(spec, biased, mass):
    hidden, weight, tokens = problem(6, VOCABULARY)
    bias = torch.randn(VOCABULARY, device=DEVICE).mul(4).round() if biased else None
    logp = log_softmax(spec, hidden, weight, bias)
    ids = some_ids(logp, tokens)
    found = select.stream_head(HeadInput(hidden, weight, bias, tokens, ids, spec, 4, mass, True))
    assert_union(found, logp, tokens, ids, 4, mass)
    assert_close(found.entropy, -(logp.exp() * logp).sum(-1), torch.float32, atol=LOGITS)


@pytest.mark.parametrize("kind", ["ties everywhere", "one token holds all", "five allowed", "no room"])
def test_awkward_rows(kind, monkeypatch):
    hidden, weight, tokens = problem(6, VOCABULARY)
    bias = torch.zeros(VOCABULARY, device=DEVICE)
    if kind == "ties everywhere":
        hidden = torch.zeros_like(hidden)
    elif kind == "one token holds all":
        weight[3], bias[3] = 0.0, 150.0  # e⁻¹⁵⁰ is 0 in float32, and the rest must not be
    elif kind == "five allowed":
        allowed = torch.tensor([0, 17, 18, 40, 69], device=DEVICE)
        bias = torch.full_like(bias, -math.inf)
        bias[allowed], tokens = 0.0, allowed[[0, 1, 2, 3, 4, 0]]
    else:
        monkeypatch.setattr(select, "ROOM", 2)
        monkeypatch.setattr(select, "ROWS_AT_ONCE", 4)
    logp = log_softmax(LogitSpec(), hidden, weight, bias)
    ids = some_ids(logp, tokens)
    for top_k in (1, 4):
        found = select.stream_head(HeadInput(hidden, weight, bias, tokens, ids, LogitSpec(), top_k))
        assert_union(found, logp, tokens, ids, top_k)


def test_golden_join():
    # Given 7, then a gap, then 2; of the ranking 2 is known, 9 and 4 are new. The second row has no room to spare.
    given, ranked = torch.tensor([[7, -1, 2], [1, 2, 3]]), torch.tensor([[-1, 9, 2, 4], [6, 5, -1, -1]])
    expected = [[7, 2, 9, 4, -1], [1, 2, 3, 6, 5]]
    assert join_supports(given.to(DEVICE), ranked.to(DEVICE), 2).tolist() == expected


@given(st.data())
def test_a_union_is_a_set_with_the_given_first(data):
    row = st.lists(st.integers(0, 9), max_size=6, unique=True)
    first, second = data.draw(row), data.draw(row)
    given, ranked = (torch.tensor([x + [-1] * (6 - len(x))]).to(DEVICE) for x in (first, second))
    (found,) = join_supports(given, ranked, 6).tolist()
    members = [x for x in found if x >= 0]
    assert members == first + [x for x in second if x not in first]
    assert found == members + [-1] * (12 - len(members))


GRADIENTS = {
    "dense": {},
    "entropy, bias and cap": {"entropy": True, "bias": True, "softcap": 6.0, "scale": 1.3, "temperature": 0.8},
    "half precision": {"dtype": HALF},
}


@pytest.mark.parametrize("case", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_are_the_dense_ones(case):
    how = dict(case)
    dtype, biased, entropy = how.pop("dtype", torch.float32), how.pop("bias", False), how.pop("entropy", False)
    hidden, weight, tokens = problem(6, VOCABULARY, dtype)
    leaves = [hidden / 2, weight] + ([torch.randn(VOCABULARY, device=DEVICE)] if biased else [])
    leaves = [x.requires_grad_() for x in leaves]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    spec = LogitSpec(how.get("scale", 1.0), how.get("softcap"), how.get("temperature", 1.0))
    z = spec.scale * (exact[0] @ exact[1].T + (exact[2] if biased else 0.0))
    full = ((z if spec.softcap is None else spec.softcap * torch.tanh(z / spec.softcap)) / spec.temperature).log_softmax(-1)
    out = corral.lm_head(
        *leaves[:2], tokens, bias=leaves[2] if biased else None, ids=some_ids(full.detach(), tokens), top_k=4,
        entropy=entropy, impl="triton", **how,
    )  # fmt: skip
    wanted = corral.gather_support(full, out.dist.ids)
    draws = [torch.randn(x.shape, device=DEVICE) for x in (out.logp, out.dist.logp, out.dist.rest)]

    def total(logp: Tensor, dist: corral.SparseDist, h: Tensor | None) -> Tensor:
        parts = zip((logp, dist.logp, dist.rest), draws, strict=True)
        value = sum((torch.where(x > -math.inf, x, 0.0) * draw).sum() for x, draw in parts)
        return value if h is None else value + h.sum()

    got = torch.autograd.grad(total(out.logp, out.dist, out.entropy), leaves)
    h = -(full.exp() * full).sum(-1) if entropy else None
    expected = torch.autograd.grad(total(full.gather(1, tokens[:, None])[:, 0], wanted, h), exact)
    for actual, reference in zip(got, expected, strict=True):
        error = (actual.double() - reference).norm() / reference.norm()
        assert error < (5e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_rows_that_do_not_join_keep_the_support_they_were_given(impl):
    hidden, weight, tokens = problem(6, VOCABULARY)
    ids = some_ids(log_softmax(LogitSpec(), hidden, weight, None), tokens)
    joins = torch.tensor([True, False, True, True, False, False], device=DEVICE)
    union, given, both = (
        corral.lm_head(hidden, weight, tokens, ids=ids, impl=impl, **how).dist
        for how in ({"top_k": 4}, {}, {"top_k": 4, "joins": joins})
    )
    assert torch.equal(both.ids[joins], union.ids[joins])
    assert_close(both.rest, torch.where(joins, union.rest, given.rest), torch.float32, atol=LOGITS)
    assert (both.ids[~joins] >= 0).sum() == (ids[~joins] >= 0).sum()
    for wrong in ({"top_k": 4, "joins": joins[:2]}, {"joins": joins}, {"top_k": 4, "joins": joins.int()}):
        with pytest.raises(ValueError, match="lm_head: `joins` says where `top_k` adds to `ids`"):
            corral.lm_head(hidden, weight, tokens, ids=ids, impl=impl, **wrong)


def test_no_rows_and_no_slots():
    hidden, weight, tokens = problem(3, VOCABULARY)
    none = corral.lm_head(hidden[:0], weight, tokens[:0], ids=tokens.new_empty(0, 3), top_k=2, impl="triton")
    assert none.dist.ids.shape == none.dist.logp.shape == (0, 5)
    out = corral.lm_head(hidden, weight, tokens, ids=tokens.new_empty(3, 0), top_k=2, impl="triton")
    slow = corral.lm_head(hidden, weight, tokens, ids=tokens.new_empty(3, 0), top_k=2, impl="torch")
    assert torch.equal(out.dist.ids, slow.dist.ids)
    assert_close(out.dist.rest, slow.dist.rest, torch.float32, atol=LOGITS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("spec", "biased", "_"), SPECS.values(), ids=SPECS)
def test_gathered_log_probs_are_those_of_the_softmax(spec, biased, _, dtype):
    hidden, weight, tokens = problem(4, VOCABULARY, dtype)
    bias = torch.randn(VOCABULARY, device=DEVICE).to(dtype) if biased else None
    exact = log_softmax(spec, hidden, weight, bias)
    ids = torch.rand(4, VOCABULARY).argsort(-1)[:, :11].to(DEVICE)
    ids[0], ids[1, 3:], ids[2, 1] = -1, -1, -1
    found = gather_logp(hidden, weight, bias, spec, tokens, exact.gather(1, tokens[:, None])[:, 0].float(), ids, impl="triton")
    expected = torch.where(ids < 0, -math.inf, exact.gather(1, ids.clamp(min=0)))
    assert_close(found, expected, torch.float32, atol=LOGITS)
    none = gather_logp(hidden, weight, bias, spec, tokens, found[:, 0], ids[:, :0], impl="triton")
    assert none.shape == (4, 0)
