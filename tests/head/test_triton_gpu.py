"""The compiled kernels at sizes that matter: GPT-2's vocabulary, odd shapes, every objective, against dense float64."""

import math

import pytest
import torch
from torch import Tensor

import corral
from corral import TokenBatch, policy_loss_from_hidden
from corral.head.logits import LogitSpec
from corral.head.union import gather_logp
from policy_objectives import POLICY_OBJECTIVES

pytestmark = pytest.mark.gpu

VOCABULARY = 50257
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def problem(rows: int, width: int, dtype: torch.dtype, kind: str = "spread") -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    hidden = torch.randn(rows, width, device="cuda").to(dtype)
    weight = (3 / math.sqrt(width) * torch.randn(VOCABULARY, width, device="cuda")).to(dtype)
    tokens, bias = torch.randint(VOCABULARY, (rows,), device="cuda"), None
    if kind == "one token holds all":  # everything a whole number, so that sums are exact and order is order
        hidden, weight = hidden.round(), (weight * math.sqrt(width) / 3).round()
        weight[3] = 0.0
        bias = torch.zeros(VOCABULARY, device="cuda")
        bias[3] = 120.0
    elif kind == "uniform":
        hidden = torch.zeros_like(hidden)
    elif kind == "ties":  # sums of small whole numbers are exact, and many are equal
        hidden, weight = hidden.round(), (weight * math.sqrt(width) / 3).round()
    elif kind == "few allowed":
        bias = torch.full((VOCABULARY,), -math.inf, device="cuda")
        bias[:40] = 0.0
        tokens = tokens % 40
    return hidden, weight, tokens, bias


def exact_logp(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    z = hidden.double() @ weight.double().T
    return (z if bias is None else z + bias.double()).log_softmax(-1)


SHAPES = [(1, 768, 64, BF16), (1023, 768, 63, BF16), (300, 776, 1, BF16), (300, 64, 64, F32), (77, 512, 100, torch.float16)]


@pytest.mark.parametrize(("rows", "width", "top_k", "dtype"), SHAPES)
def test_the_own_support_at_odd_shapes(rows, width, top_k, dtype):
    hidden, weight, tokens, _ = problem(rows, width, dtype)
    out = corral.lm_head(hidden, weight, tokens, top_k=top_k, entropy=True, impl="triton")
    logp = exact_logp(hidden, weight, None)
    assert (out.logp - logp.gather(1, tokens[:, None])[:, 0]).abs().max() < 2e-4
    assert (out.entropy + (logp.exp() * logp).sum(-1)).abs().max() < 2e-4
    wanted = corral.top_k_support(logp, tokens, top_k)
    # Up to ties of float32: where another token was taken, its log-probability is the same.
    assert (out.dist.logp - wanted.logp)[wanted.ids >= 0].abs().max() < 2e-4
    assert (out.dist.ids != wanted.ids).float().mean() < 1e-3
    assert (out.dist.rest - corral.gather_support(logp, out.dist.ids).rest).abs().max() < 2e-4


@pytest.mark.parametrize("kind", ["one token holds all", "uniform", "ties", "few allowed"])
def test_awkward_rows(kind):
    hidden, weight, tokens, bias = problem(200, 64, BF16, kind)
    out = corral.lm_head(hidden, weight, tokens, bias=bias, top_k=64, impl="triton")
    logp = exact_logp(hidden, weight, bias)
    wanted = corral.top_k_support(logp.float(), tokens, 64)
    assert torch.equal(out.dist.ids, wanted.ids)
    exact = corral.gather_support(logp, wanted.ids)
    both = exact.logp > -math.inf
    assert torch.equal(both, out.dist.logp > -math.inf)
    assert (out.dist.logp - exact.logp)[both].abs().max() < 2e-4
    left = exact.rest > -math.inf
    assert torch.equal(left, out.dist.rest > -math.inf)
    assert not left.any() or (out.dist.rest - exact.rest)[left].abs().max() < 2e-4


@pytest.mark.parametrize("strength", [6.0, 30.0])
def test_common_tokens_are_neighbours(strength):
    """Nearly all of the top 64 lie in two tiles, with many more that come into question; whole numbers keep sums exact."""
    hidden, weight, tokens, _ = problem(300, 64, BF16, "ties")
    bias = torch.zeros(VOCABULARY, device="cuda")
    bias[:512] = strength
    out = corral.lm_head(hidden, weight, tokens, bias=bias, top_k=64, impl="triton")
    logp = exact_logp(hidden, weight, bias)
    wanted = corral.top_k_support(logp.float(), tokens, 64)
    assert torch.equal(out.dist.ids, wanted.ids)
    assert (out.dist.rest - corral.gather_support(logp, wanted.ids).rest).abs().max() < 2e-4


@pytest.mark.parametrize("slots", [1, 64, 257])
def test_a_given_support_of_any_tokens(slots):
    """No mark is the largest of its tile: all of them are recomputed."""
    hidden, weight, tokens, _ = problem(1023, 256, BF16)
    ids = torch.rand(1023, 4096, device="cuda").argsort(-1)[:, :slots] * 11
    ids[:, 0] = torch.where((ids[:, 1:] == tokens[:, None]).any(-1), ids[:, 0], tokens)
    ids[3, slots // 2 :] = -1
    out = corral.lm_head(hidden, weight, tokens, ids=ids, impl="triton")
    exact = corral.gather_support(exact_logp(hidden, weight, None), ids)
    assert (out.dist.logp - exact.logp)[ids >= 0].abs().max() < 2e-4
    assert (out.dist.rest - exact.rest).abs().max() < 2e-4


TOKEN_BY_TOKEN = [
    name for name in POLICY_OBJECTIVES if name in ("gspo", "gmpo", "m2po") or corral.make_objective(name).config.tokenwise
]
"""Objectives whose weights are no product over a sequence, nor chosen by rank, either of which rounding decides."""
UNIONS = [(1, 768, 64, BF16), (1023, 768, 63, BF16), (300, 776, 1, BF16), (300, 64, 64, F32), (8200, 64, 190, torch.float16)]


@pytest.mark.parametrize(("rows", "width", "top_k", "dtype"), UNIONS)
def test_the_union_at_odd_shapes(rows, width, top_k, dtype):
    """The first rows' given support is the policy's own, the others' another policy's; one is empty."""
    hidden, weight, tokens, _ = problem(rows, width, dtype)
    moved = torch.where(torch.arange(rows, device="cuda")[:, None] < rows // 2, hidden, hidden.flip(0))
    ids = corral.lm_head(moved, weight, tokens, top_k=top_k, impl="triton").dist.ids
    ids[rows // 3] = -1
    out = corral.lm_head(hidden, weight, tokens, ids=ids, top_k=top_k, impl="triton")
    some = slice(0, 1024)
    logp = exact_logp(hidden[some], weight, None)
    wanted = corral.top_k_support(logp, tokens[some], top_k, ids=ids[some])
    # Up to ties of float32: where another token was taken, its log-probability is the same.
    assert (out.dist.logp[some] - wanted.logp)[wanted.ids >= 0].abs().max() < 2e-4
    assert (out.dist.ids[some] != wanted.ids).float().mean() < 1e-3
    assert (out.dist.rest[some] - corral.gather_support(logp, out.dist.ids[some]).rest).abs().max() < 2e-4
    plain = corral.lm_head(hidden, weight, tokens, impl="triton")
    assert torch.equal(out.logp, plain.logp)  # to the last bit, whatever else is asked for


@pytest.mark.parametrize("kind", ["one token holds all", "uniform", "ties", "few allowed"])
def test_the_union_of_awkward_rows(kind):
    hidden, weight, tokens, bias = problem(200, 64, BF16, kind)
    ids = torch.rand(200, 4096, device="cuda").argsort(-1)[:, :40]
    out = corral.lm_head(hidden, weight, tokens, bias=bias, ids=ids, top_k=64, impl="triton")
    logp = exact_logp(hidden, weight, bias)
    wanted = corral.top_k_support(logp.float(), tokens, 64, ids=ids)
    assert torch.equal(out.dist.ids, wanted.ids)
    left = corral.gather_support(logp, wanted.ids).rest
    assert torch.equal(left > -math.inf, out.dist.rest > -math.inf)
    assert not (left > -math.inf).any() or (out.dist.rest - left)[left > -math.inf].abs().max() < 2e-4


@pytest.mark.parametrize(("dtype", "exact"), [(BF16, True), (BF16, False), (F32, False)])
def test_gradients_on_the_union(dtype, exact):
    """Half of the rows move towards a token of the old policy's tail; of every fifth no old hidden state was kept."""
    rows, width, k = 515, 256, 63
    hidden, weight, tokens, _ = problem(rows, width, dtype)
    hidden = 2 * hidden
    logp_old = exact_logp(hidden, weight, None)
    far = weight[logp_old.topk(500).indices[:, -1]].double()
    step = torch.where(torch.arange(rows, device="cuda")[:, None] % 2 == 0, 0.3 * far, 0.05 * torch.randn_like(far))
    moved = (hidden.double() + step).to(dtype)
    old = corral.top_k_support(logp_old, tokens, k)
    place = torch.where(torch.arange(rows, device="cuda") % 5 == 0, -1, torch.arange(rows, device="cuda"))[None]
    mask, advantages = torch.ones(1, rows, dtype=torch.bool, device="cuda"), torch.randn(1, rows, device="cuda")
    objective = corral.make_objective("troll")

    leaves = [x.double().requires_grad_() for x in (moved, weight)]
    logp = (leaves[0] @ leaves[1].T).log_softmax(-1)
    ids = corral.top_k_support(logp, tokens, k, ids=old.ids).ids
    ids[::5, k + 1 :] = -1
    ids[::5, : k + 1] = old.ids[::5]
    new, anchor = (corral.gather_support(x[None], ids[None]) for x in (logp, logp_old))
    batch = TokenBatch.on_support(new, anchor, advantages.double(), mask)
    reference, clear = objective(batch), off_threshold("troll", new, anchor)
    wanted = torch.autograd.grad(torch.where(clear, reference.loss, 0.0).sum(), leaves)

    dist = corral.SparseDist(old.ids[None], old.logp[None].float(), old.rest[None].float())
    batch = TokenBatch(dist.logp[..., 0], dist.logp[..., 0], advantages, mask, None, dist)
    union = corral.UnionSupport(top_k=k, hidden=hidden, weight=weight, place=place)
    fast = [x.detach().clone().requires_grad_() for x in (moved, weight)]
    out = policy_loss_from_hidden(
        fast[0][None], fast[1], tokens[None], batch, objective, exact=exact, weights=clear.float(), union=union, impl="triton"
    )  # fmt: skip
    assert (out.dist.ids[0] != ids).float().mean() < 1e-3  # ties of float32
    assert (out.per_token - reference.loss)[clear].abs().max() < 2e-3
    for actual, expected in zip(torch.autograd.grad(out.loss, fast), wanted, strict=True):
        error = (actual.double() - expected).norm() / expected.norm()
        assert error < (3e-3 if dtype == BF16 else 2e-3), error


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_gathered_log_probs(dtype):
    hidden, weight, tokens, _ = problem(1023, 776, dtype)
    ids = torch.rand(1023, 4096, device="cuda").argsort(-1)[:, :63] * 11
    ids[5:200, 7:] = -1
    logp = exact_logp(hidden, weight, None)
    own = logp.gather(1, tokens[:, None])[:, 0].float()
    found = gather_logp(hidden, weight, None, LogitSpec(), tokens, own, ids, impl="triton")
    assert (found - logp.gather(1, ids.clamp(min=0)))[ids >= 0].abs().max() < 2e-4
    assert (found[ids < 0] == -math.inf).all()


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("name", TOKEN_BY_TOKEN)
def test_gradients_off_the_threshold(name, dtype, exact):
    rows, width = 515, 256
    hidden, weight, tokens, _ = problem(rows, width, dtype)
    hidden = 2 * hidden
    old = corral.top_k_support(exact_logp(hidden, weight, None), tokens, 63)
    moved = (hidden.double() + 0.05 * torch.randn(rows, width, device="cuda")).to(dtype)
    mask = (torch.arange(rows, device="cuda") % 5 > 0)[None]
    old = corral.SparseDist(old.ids[None], old.logp[None].float(), old.rest[None].float())
    advantages = torch.randn(1, rows, device="cuda")
    logp_old = old.logp[..., 0]
    batch = TokenBatch(logp_old, logp_old, advantages, mask, None, old, logp_old - 0.1)
    objective = corral.make_objective(name)

    leaves = [x.double().requires_grad_() for x in (moved, weight)]
    new = corral.gather_support((leaves[0] @ leaves[1].T).log_softmax(-1)[None], old.ids)
    exactly = (x.double() for x in (logp_old, advantages))
    reference = objective(TokenBatch(new.logp[..., 0], *exactly, mask, new, old, (logp_old - 0.1).double()))
    # A token within rounding of its region's edge may fall on either side of it.
    clear = off_threshold(name, new, old) & mask
    wanted = torch.autograd.grad(torch.where(clear, reference.loss, 0.0).sum(), leaves)

    fast = [x.detach().clone().requires_grad_() for x in (moved, weight)]
    out = policy_loss_from_hidden(
        fast[0][None], fast[1], tokens[None], batch, objective, exact=exact, weights=clear.float(), impl="triton"
    )  # fmt: skip
    got = torch.autograd.grad(out.loss, fast)
    assert (out.per_token - reference.loss)[clear].abs().max() < 2e-3
    for actual, expected in zip(got, wanted, strict=True):
        error = (actual.double() - expected).norm() / expected.norm()
        assert error < (3e-3 if dtype == BF16 else 2e-3 if not exact else 1e-4), error
    assert got[0][~mask[0]].abs().sum() == 0


def off_threshold(name: str, new: corral.SparseDist, old: corral.SparseDist) -> Tensor:
    """Rows whose ratio, KL and total variation are not within 1e-3 of any objective's default bound."""
    ratio = (new.logp[..., 0] - old.logp[..., 0]).detach()
    kl = corral.categorical_kl(new.with_rest().detach(), old.with_rest().double())
    tv = corral.binary_tv(new.logp[..., 0].detach(), old.logp[..., 0].double())
    chi = old.logp[..., 0].double().exp() * (ratio.exp() - 1) ** 2
    edges = [
        (kl, 0.05),
        (chi, 0.05),
        (tv, 0.2),
        (ratio.exp(), 0.8),
        (ratio.exp(), 1.2),
        (ratio.exp(), 1.28),
        (ratio.exp(), 3.0),
        (ratio.abs(), 0.4),
    ]
    clear = torch.ones_like(ratio, dtype=torch.bool)
    for value, edge in edges:
        clear &= (value - edge).abs() > 1e-3
    return clear


def test_the_same_every_time():
    hidden, weight, tokens, _ = problem(600, 256, BF16)
    weight.requires_grad_()
    gradients = [
        torch.autograd.grad(corral.lm_head(hidden, weight, tokens, top_k=64, impl="triton").logp.sum(), weight)[0]
        for _ in range(2)
    ]
    assert torch.equal(*gradients)


def test_no_logits_are_held():
    hidden, weight, tokens, _ = problem(4096, 256, BF16)
    corral.lm_head(hidden, weight, tokens, top_k=64, impl="triton")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    corral.lm_head(hidden, weight, tokens, top_k=64, impl="triton")
    assert torch.cuda.max_memory_allocated() - before < 128 * 2**20  # the logits alone would take 785 MiB
