"""A one-sided support has a hole: mass that gathers on one token of the tail. The union of both supports sees it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from corral import TokenBatch, categorical_kl, gather_support, lm_head, make_objective, top_k_support
from corral.head.logits import LogitSpec
from corral.head.union import gather_logp
from corral.support import extend_support, hidden_kl, tail_gap
from tolerance import assert_close

F64 = torch.float64
V, K = 50_000, 64


def zipf_row() -> tuple[Tensor, Tensor, Tensor]:
    """Old and new log-probs [1, 1, V] and the sampled token: all of the tail's mass, .58, gathers on one token of it.

    The sampled token becomes a thousandth likelier, so that a mask has a direction to be outward in.
    """
    old = 1 / torch.arange(1, V + 1, dtype=F64)
    old = old / old.sum()
    new = old.clone()
    new[0] *= 1.001
    new[K:] = 1e-12
    new[9_000] = 1 - new.sum() + 1e-12
    return old.log().view(1, 1, V), (new / new.sum()).log().view(1, 1, V), torch.zeros(1, 1, dtype=torch.int64)


def batch_on(new, old) -> TokenBatch:
    mask = torch.ones(1, 1, dtype=torch.bool)
    return TokenBatch.on_support(new, old, torch.ones(1, 1, dtype=F64), mask)


def test_on_the_old_support_the_row_is_invisible_but_for_the_tails_maximum():
    logp_old, logp_new, token = zipf_row()
    old = top_k_support(logp_old, token, K)
    new = gather_support(logp_new, old.ids)
    out = make_objective("troll")(batch_on(new, old))
    assert categorical_kl(logp_new, logp_old) > 6  # the truth
    assert out.metrics["tr/kl_before"] < 1e-6
    assert out.metrics["tr/active_frac"] == 0
    assert make_objective("dppo", estimator="topk")(batch_on(new, old)).metrics["tr/active_frac"] == 0
    # p_new = .58 on the token; the likeliest one outside was the 65th, p_old = 1 / (65 · 11.4) = 1.35e-3.
    assert 400 < out.metrics["tr/rest_max_ratio"] < 450
    # .58 · (log(.58 / 1.35e-3) − 1 + …) of the 6.4 nats are certain to be hidden.
    assert 2.9 < out.metrics["tr/hidden_kl_max"] < 3.1


@pytest.mark.parametrize(
    ("name", "config"),
    [("troll", {}), ("dppo", {"estimator": "topk"}), ("dppo", {"estimator": "topk", "divergence": "kl"})],
    ids=["troll", "dppo tv", "dppo kl"],
)
def test_on_the_union_it_is_seen(name, config):
    logp_old, logp_new, token = zipf_row()
    ids = top_k_support(logp_old, token, K).ids
    new = top_k_support(logp_new, token, K, ids=ids)
    old = gather_support(logp_old, new.ids)
    whole = [x.with_rest() for x in (new, old)]
    assert torch.equal(new.ids[..., :K], ids[..., :K])
    assert 9_000 in new.ids
    assert_close(categorical_kl(*whole), categorical_kl(logp_new, logp_old), atol=1e-6)
    metrics = make_objective(name, **config)(batch_on(new, old)).metrics
    assert metrics["tr/kl_before"] > 6
    assert metrics["tr/active_frac"] == 1
    if name == "troll":
        assert metrics["tr/kl_after"] <= 0.05 * (1 + 1e-6)


@given(st.integers(0, 10_000))
def test_a_support_is_extended_to_what_a_gather_gives(seed):
    draw = torch.Generator().manual_seed(seed)
    logp_old, logp_new = ((3 * torch.randn(4, 30, generator=draw, dtype=F64)).log_softmax(-1) for _ in range(2))
    tokens = torch.randint(30, (4,), generator=draw)
    old = top_k_support(logp_old, tokens, 5, 0.8)
    ids = top_k_support(logp_new, tokens, 5, 0.8, ids=old.ids).ids
    members = (old.ids >= 0).sum(-1, keepdim=True)
    others = ids.gather(-1, (members + torch.arange(5)).clamp(max=ids.shape[-1] - 1))
    others = torch.where(members + torch.arange(5) < (ids >= 0).sum(-1, keepdim=True), others, -1)
    added = torch.where(others >= 0, logp_old.gather(-1, others.clamp(min=0)), math.nan)  # anything at padding
    got, expected = extend_support(old, ids, added), gather_support(logp_old, ids)
    assert_close(got.logp, expected.logp)
    assert_close(got.rest.exp(), expected.rest.exp(), atol=2e-6)
    assert (got.rest_max >= expected.rest_max).all()


def test_golden_extension():
    # p = (.5, .3, .15, .05): support {0}, then {0, 2}: of the rest .5 there is .35 left.
    logp = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=F64).log()
    dist = top_k_support(logp, torch.tensor([0]), 1)
    wide = extend_support(dist, torch.tensor([[0, 2, -1]]), logp[:, 2:3])
    assert_close(wide.logp.exp(), torch.tensor([[0.5, 0.15, 0.0]], dtype=F64))
    assert_close(wide.rest.exp(), torch.tensor([0.35], dtype=F64))


def test_extending_by_nothing_changes_nothing():
    dist = top_k_support(torch.randn(3, 9, dtype=F64).log_softmax(-1), torch.tensor([0, 1, 2]), 4)
    same = extend_support(dist, dist.ids, torch.empty(3, 0, dtype=F64))
    assert torch.equal(same.logp, dist.logp)
    assert torch.equal(same.rest, dist.rest)


def test_a_tail_that_all_goes_to_the_support_leaves_a_millionth():
    # Both tokens of the tail join: 1 − Σ would be 0, or less by rounding.
    logp = torch.tensor([[0.5, 0.3, 0.2]]).log()
    wide = extend_support(top_k_support(logp, torch.tensor([0]), 1), torch.tensor([[0, 1, 2]]), logp[:, 1:])
    assert_close(wide.rest.exp(), torch.tensor([0.5e-6]), atol=1e-9)


@given(st.integers(0, 10_000), st.floats(0.1, 4.0))
def test_what_is_said_to_be_hidden_is_hidden(seed, size):
    # KL(new‖old) = what the support and its bucket see + the tail's own; of the latter this is a lower bound.
    draw = torch.Generator().manual_seed(seed)
    logp_old = (2 * torch.randn(6, 30, generator=draw, dtype=F64)).log_softmax(-1)
    logp_new = (logp_old + size * torch.randn(6, 30, generator=draw, dtype=F64)).log_softmax(-1)
    old = top_k_support(logp_old, torch.zeros(6, dtype=torch.int64), 4)
    new = gather_support(logp_new, old.ids)
    hidden = hidden_kl(new.rest, new.rest_max, old.rest, old.rest_max)
    truth = categorical_kl(logp_new, logp_old) - categorical_kl(new.with_rest(), old.with_rest())
    assert (hidden <= truth + 1e-12).all()
    assert (hidden >= 0).all()


def test_golden_hidden_kl():
    # Tails of mass ½; the old one's likeliest has a quarter of it, the new one's all: ½ (log 4 − 1 + ¼).
    half, quarter, eighth = (torch.tensor([x], dtype=F64).log() for x in (0.5, 0.25, 0.125))
    assert_close(hidden_kl(half, half, half, eighth), torch.tensor([0.5 * (math.log(4) - 0.75)], dtype=F64))
    assert hidden_kl(half, eighth, half, quarter).item() == 0  # it lost
    nothing = torch.tensor([-math.inf], dtype=F64)
    assert hidden_kl(nothing, nothing, nothing, nothing).item() == 0


def test_the_gap_of_tails_that_are_empty_is_none():
    inf = torch.tensor([-math.inf])
    assert tail_gap(inf, inf).item() == 0
    assert tail_gap(torch.tensor([-1.0]), inf).item() == math.inf


@pytest.mark.parametrize("spec", [LogitSpec(), LogitSpec(1.7, 3.0, 0.6)], ids=["plain", "capped, scaled, tempered"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_gathered_log_probs_are_the_heads(spec, biased, dtype):
    hidden, weight = torch.randn(7, 8).to(dtype), torch.randn(30, 8).to(dtype)
    bias = torch.randn(30).to(dtype) if biased else None
    tokens, ids = torch.randint(30, (7,)), torch.rand(7, 30).argsort(-1)[:, :4]
    ids[2, 3] = -1
    how = {"scale": spec.scale, "softcap": spec.softcap, "temperature": spec.temperature, "bias": bias}
    head = lm_head(hidden, weight, tokens, ids=ids, **how)
    got = gather_logp(hidden, weight, bias, spec, tokens, head.logp, ids)
    assert_close(got, head.dist.logp, atol=1e-12 if dtype == F64 else 2e-5)
    assert got[2, 3] == -math.inf
