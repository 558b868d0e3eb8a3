"""The streamed head against dense float64: statistics, exact supports, both backward routes; compiled or interpreted."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

import corral
from corral.head.forward import HeadFunction
from corral.head.logits import LogitSpec
from corral.head.rows import HeadInput, HeadRows
from interpreted import DEVICE, HALF, small_tiles
from tolerance import assert_close

from corral.head.triton import backward as dense_backward  # isort: skip  # after `interpreted`
from corral.head.triton import support as select  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # NumPy's, where the kernels compute with inf

F64 = torch.float64
WIDTH = 8
LOGITS = 1e-5 if DEVICE == "cpu" else 1e-4
"""How far float32 sums of products may be off."""
"""Request, tolerance and report of an exact gradient."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)
    monkeypatch.setattr(dense_backward, "LOGITS_AT_ONCE", 2**9)
    monkeypatch.setattr(dense_backward, "ROWS_AT_ONCE", 4)


def dense(spec: LogitSpec, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Log-softmax of the full logits."""
    z = spec.scale * (hidden @ weight.T + (0.0 if bias is None else bias))
    if spec.softcap is not None:
        z = spec.softcap * torch.tanh(z / spec.softcap)
    return (z / spec.temperature).log_softmax(-1)


def problem(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Weights on a coarse grid and whole-numbered hidden states: many logits are exactly equal, and sums exact."""
    hidden = (2 * torch.randn(rows, WIDTH)).round().to(DEVICE, dtype)
    weight = (2 * torch.randn(vocabulary, WIDTH)).round().div(2).to(DEVICE, dtype)
    return hidden, weight, torch.randint(vocabulary, (rows,)).to(DEVICE)


def head(*given: object, tolerance: float = 0.0, report: Tensor | None = None) -> HeadRows:
    """The head with autograd, on rows."""
    backward = partial(dense_backward.lm_head_backward, tolerance=tolerance, report=report)
    return HeadFunction.on(HeadInput(*given), select.lm_head_forward, backward)


def stream_head(*given: object) -> HeadRows:
    return select.stream_head(HeadInput(*given))


def some_ids(rows: int, vocabulary: int, slots: int, tokens: Tensor) -> Tensor:
    """A support per row: padded, with and without the sampled token, and one of that token alone."""
    ids = torch.rand(rows, vocabulary).argsort(-1)[:, :slots].to(DEVICE)
    ids[0, -1] = -1
    ids[-1] = -1
    ids[-1, 0] = tokens[-1]
    return ids


SPECS = {
    "plain": LogitSpec(),
    "tempered": LogitSpec(temperature=0.7),
    "negative scale": LogitSpec(scale=-1.3),
    "capped": LogitSpec(scale=1.3, softcap=4.0, temperature=0.8),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("biased", [False, True])
def test_the_own_support_is_top_k_support(spec, biased):
    hidden, weight, tokens = problem(5, 70)
    bias = torch.randn(70, device=DEVICE).mul(4).round() if biased else None
    rows = stream_head(hidden, weight, bias, tokens, None, spec, 4, 0.97, True)
    logp = dense(spec, hidden.double(), weight.double(), None if bias is None else bias.double())
    expected = corral.top_k_support(logp.float(), tokens, 4, 0.97)
    assert torch.equal(rows.ids, expected.ids)
    assert_close(rows.kept, expected.logp, torch.float32, atol=LOGITS)
    exact = corral.gather_support(logp, rows.ids)
    assert_close(rows.rest, exact.rest, torch.float32, atol=LOGITS)
    assert_close(rows.rest_max, exact.rest_max, torch.float32, atol=LOGITS)
    assert_close(rows.logp, logp.gather(1, tokens[:, None])[:, 0], torch.float32, atol=LOGITS)
    assert_close(rows.entropy, -(logp.exp() * logp).sum(-1), torch.float32, atol=LOGITS)


@pytest.mark.parametrize("vocabulary", [70, 81])  # 81 leaves one column in the last tile
@pytest.mark.parametrize("kind", ["ties everywhere", "one token holds all", "five allowed", "no room"])
def test_supports_of_awkward_rows(kind, vocabulary, monkeypatch):
    hidden, weight, tokens = problem(4, vocabulary)
    bias = None
    if kind == "ties everywhere":
        hidden = torch.zeros_like(hidden)
    elif kind == "one token holds all":
        weight[3] = 0.0
        bias = torch.zeros(vocabulary, device=DEVICE)
        bias[3] = 150.0  # e⁻¹⁵⁰ is 0 in float32, and the rest must not be
    elif kind == "five allowed":
        bias = torch.full((vocabulary,), -math.inf, device=DEVICE)
        bias[[0, 17, 18, 40, 69]] = 0.0
        tokens = torch.tensor([0, 17, 18, 69], device=DEVICE)
    else:
        monkeypatch.setattr(select, "ROOM", 2)
        monkeypatch.setattr(select, "ROWS_AT_ONCE", 3)
    for top_k in (1, 4):
        rows = stream_head(hidden, weight, bias, tokens, None, LogitSpec(), top_k)
        z = hidden.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        expected = corral.top_k_support(z.float().log_softmax(-1), tokens, top_k)
        assert torch.equal(rows.ids, expected.ids)
        exact = corral.gather_support(z.log_softmax(-1), rows.ids)
        assert_close(rows.kept, exact.logp, torch.float32, atol=LOGITS)
        assert_close(rows.rest, exact.rest, torch.float32, atol=LOGITS)
        assert_close(rows.rest_max, exact.rest_max, torch.float32, atol=LOGITS)


@pytest.mark.parametrize("rows", [1, 19])
@pytest.mark.parametrize(("at_once", "slots"), [(10_000, 6), (10, 7)])  # 7 and the sampled token leave no slot empty
def test_a_given_support_is_gather_support(rows, at_once, slots, monkeypatch):
    monkeypatch.setattr(select, "ROWS_AT_ONCE", at_once)
    hidden, weight, tokens = problem(rows, 85)
    ids = some_ids(rows, 85, slots, tokens)
    found = stream_head(hidden, weight, None, tokens, ids, LogitSpec())
    logp = dense(LogitSpec(), hidden.double(), weight.double(), None)
    expected = corral.gather_support(logp, ids)
    assert torch.equal(found.ids, ids)
    assert_close(found.kept, expected.logp, torch.float32, atol=LOGITS)
    assert_close(found.rest, expected.rest, torch.float32, atol=LOGITS)
    assert_close(found.rest_max, expected.rest_max, torch.float32, atol=LOGITS)
    assert_close(found.logp, logp.gather(1, tokens[:, None])[:, 0], torch.float32, atol=LOGITS)


GRADIENTS = {
    "given": {"slots": 4},
    "given, with entropy, bias and cap": {"slots": 4, "entropy": True, "biased": True, "spec": SPECS["capped"]},
    "own": {"top_k": 4, "spec": SPECS["tempered"]},
    "own, with entropy": {"top_k": 4, "entropy": True},
    "sampled token": {"biased": True},
    "half precision": {"slots": 3, "dtype": HALF},
}


@pytest.mark.parametrize("case", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_are_the_dense_ones(case):
    assert_gradients(**case)


def assert_gradients(slots=None, top_k=None, entropy=False, biased=False, spec=None, dtype=torch.float32, rows=6):
    spec = spec or LogitSpec()
    hidden, weight, tokens = problem(rows, 50, dtype)
    ids = None if slots is None else some_ids(rows, 50, slots, tokens)
    leaves = [hidden / 2, weight] + ([torch.randn(50, device=DEVICE)] if biased else [])
    leaves = [x.requires_grad_() for x in leaves]
    bias = leaves[2] if biased else None
    rows = head(*leaves[:2], bias, tokens, ids, spec, top_k, 1.0, entropy)
    logp, nats, kept, rest, support = rows.logp, rows.entropy, rows.kept, rows.rest, rows.ids
    exact = [x.detach().to(F64).requires_grad_() for x in leaves]
    full = dense(spec, *exact[:2], exact[2] if biased else None)
    dist = corral.gather_support(full, support)
    draws = [torch.randn(x.shape, device=DEVICE) for x in (logp, nats, kept, rest)]
    for draw in draws:
        draw[1] = 0.0  # a row without a gradient

    def total(*outputs: Tensor) -> Tensor:
        return sum((torch.where(x > -math.inf, x, 0.0) * draw).sum() for x, draw in zip(outputs, draws, strict=True))

    got = torch.autograd.grad(total(logp, nats if entropy else 0 * nats, kept, rest), leaves)
    h = -(full.exp() * full).sum(-1) * (1.0 if entropy else 0.0)
    wanted = torch.autograd.grad(total(full.gather(1, tokens[:, None])[:, 0], h, dist.logp, dist.rest), exact)
    for actual, expected in zip(got, wanted, strict=True):
        error = (actual.to(F64) - expected).norm() / expected.norm()
        assert error < (5e-6 if dtype == torch.float32 else 4e-3)
    assert got[0][1].abs().sum() == 0


@pytest.mark.parametrize("sampled", [0, 3])
def test_a_rest_too_small_for_float32_has_its_gradient(sampled):
    # One token 120 nats above the others: p_rest = e^−120 + …, of which d rest / dz_v = p_v / p_rest is an ordinary share.
    weight = torch.randn(40, WIDTH, device=DEVICE).div(4)
    weight[0] += 15.0
    hidden = torch.ones(2, WIDTH, device=DEVICE)
    tokens, ids = torch.full((2,), sampled, device=DEVICE), torch.zeros(2, 1, dtype=torch.long, device=DEVICE)
    grads = []
    for dtype in (torch.float32, F64):
        h, w = hidden.to(dtype, copy=True).requires_grad_(), weight.to(dtype, copy=True).requires_grad_()
        if dtype == torch.float32:
            rows = head(h, w, None, tokens, ids, LogitSpec())
            logp, rest = rows.logp, rows.rest
        else:
            full = dense(LogitSpec(), h, w, None)
            logp, rest = full.gather(1, tokens[:, None])[:, 0], corral.gather_support(full, ids).rest
        assert rest.max() < -100
        (rest + 0.5 * logp).sum().backward()
        grads.append((h.grad, w.grad))
    for ours, theirs in zip(*grads, strict=True):
        assert_close(ours, theirs, torch.float32, atol=1e-4)


def test_a_frozen_head_gets_no_gradient_and_a_frozen_trunk_neither():
    hidden, weight, tokens = problem(3, 40)
    for first, second in ((True, False), (False, True)):
        inputs = hidden.clone().requires_grad_(first), weight.clone().requires_grad_(second)
        head(*inputs, None, tokens, None, LogitSpec()).logp.sum().backward()
        assert (inputs[0].grad is not None) == first
        assert (inputs[1].grad is not None) == second


def test_routes_follow_the_bound():
    """Row 0 is sure of its token and goes the sparse way, row 1 is flat and dense, row 2 has no gradient."""
    weight = torch.zeros(40, WIDTH, device=DEVICE)
    weight[5, 0] = 1.0
    weight[6, 0] = 0.6
    hidden = torch.zeros(3, WIDTH, device=DEVICE)
    hidden[0, 0] = 30.0
    tokens = torch.tensor([6, 7, 7], device=DEVICE)
    ids = torch.tensor([[6, 5], [7, 5], [7, 5]], device=DEVICE)
    report = torch.full((2,), math.nan, device=DEVICE)
    hidden.requires_grad_()
    weight.requires_grad_()
    logp = head(hidden, weight, None, tokens, ids, LogitSpec(), tolerance=1e-3, report=report).logp
    got = torch.autograd.grad((logp * torch.tensor([1.0, 1.0, 0.0], device=DEVICE)).sum(), (hidden, weight))
    # Row 0: dz = e_6 − p, p_5 = 1 − 6e-6, the 38 others hold 38 e⁻³⁰ = 4e-12. Row 1: all 40 alike, 38/40 of dz off the support.
    assert report[0].item() == 0.5
    assert 0 < report[1].item() < 1e-11
    exact = [x.detach().to(F64).requires_grad_() for x in (hidden, weight)]
    full = dense(LogitSpec(), *exact, None)
    wanted = torch.autograd.grad(full[0, 6] + full[1, 7], exact)
    for actual, expected in zip(got, wanted, strict=True):
        assert_close(actual, expected, torch.float32)


def test_the_same_gradient_every_time():
    hidden, weight, tokens = problem(8, 60)
    tokens[:] = tokens[0]  # one token with a long list of rows
    weight.requires_grad_()
    given = hidden, weight, None, tokens, None, LogitSpec(), 4
    first, second = (torch.autograd.grad(head(*given, tolerance=1.0).logp.sum(), weight)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_row_of_nan_names_no_token_outside_the_vocabulary():
    hidden, weight, tokens = problem(3, 70)
    hidden[1] = math.nan
    rows = stream_head(hidden, weight, None, tokens, None, LogitSpec(), 4)
    assert rows.logp[1].isnan()
    assert rows.ids.max() < 70
    exact = corral.top_k_support(dense(LogitSpec(), hidden[[0, 2]].double(), weight.double(), None).float(), tokens[[0, 2]], 4)
    assert torch.equal(rows.ids[[0, 2]], exact.ids)


def test_a_given_support_may_have_no_slot():
    hidden, weight, tokens = problem(3, 70)
    out = corral.lm_head(hidden, weight, tokens, ids=tokens.new_empty(3, 0), impl="triton")
    assert out.dist.logp.shape == (3, 0)
    assert_close(out.dist.rest, torch.zeros(3, device=DEVICE), atol=LOGITS)
    assert_close(out.logp, corral.lm_head(hidden, weight, tokens, impl="torch").logp, atol=LOGITS)


def test_no_rows_at_all():
    hidden, weight, tokens = problem(0, 1000)
    hidden.requires_grad_()
    out = corral.lm_head(hidden, weight, tokens, top_k=3, impl="triton")
    out.logp.sum().backward()
    assert out.dist.ids.shape == (0, 4)
    assert hidden.grad.shape == (0, WIDTH)


def test_lm_head_takes_leading_axes_and_agrees_with_torch():
    hidden, weight, tokens = problem(6, 70 if DEVICE == "cpu" else 1000)
    hidden, tokens = hidden.view(2, 3, WIDTH), tokens.view(2, 3)
    fast, slow = (corral.lm_head(hidden, weight, tokens, top_k=5, mass=0.9, entropy=True, impl=i) for i in ("triton", "torch"))
    assert torch.equal(fast.dist.ids, slow.dist.ids)
    for name in ("logp", "entropy"):
        assert_close(getattr(fast, name), getattr(slow, name), torch.float32, atol=LOGITS)
    assert_close(fast.dist.rest, slow.dist.rest, torch.float32, atol=LOGITS)
