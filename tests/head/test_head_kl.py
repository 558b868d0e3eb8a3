"""The exact KL of two networks from their hidden states: by hand, against float64, and for every input."""

import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corral import categorical_kl, head_kl
from corral.head.logits import LogitSpec
from corral.head.torch import stream
from corral.head.torch.head_kl import HeadStates, head_kl_both_ways
from device import DEVICE
from tolerance import assert_close

F64 = torch.float64


def networks(n=7, v=53, h=5, g=5, dtype=F64, spread=1.0, seed=0):
    """Hidden states and heads of two networks that are `spread` apart."""
    draw = torch.Generator().manual_seed(seed)
    old, weight = torch.randn(n, h, generator=draw, dtype=F64), torch.randn(v, h, generator=draw, dtype=F64)
    if g == h:
        new = old + spread * torch.randn(n, h, generator=draw, dtype=F64)
        weight_new = weight + spread * torch.randn(v, h, generator=draw, dtype=F64)
    else:
        new, weight_new = torch.randn(n, g, generator=draw, dtype=F64), torch.randn(v, g, generator=draw, dtype=F64)
    return [x.to(dtype).to(DEVICE) for x in (new, weight_new, old, weight)]


def oracle(new, weight_new, old, weight_old, bias_new=None, bias_old=None, scale=1.0, softcap=None, temperature=1.0):
    """The definition, all logits at once, in float64."""

    def logp(hidden, weight, bias):
        z = hidden.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        z = scale * z if softcap is None else softcap * torch.tanh(scale * z / softcap)
        return (z / temperature).log_softmax(-1)

    p, q = logp(new, weight_new, bias_new), logp(old, weight_old, bias_old)
    return (p.exp() * (p - q)).sum(-1)


def test_golden_two_tokens():
    # Heads of one unit: logits (h, 0), so p = σ(h). New: h = log 3, p = (3/4, 1/4). Old: h = 0, q = (1/2, 1/2).
    # KL = ¾ log(3/2) + ¼ log(1/2) = ¾ · 0.405465 − ¼ · 0.693147 = 0.130812; the other token has not moved.
    weight = torch.tensor([[1.0], [0.0]], dtype=F64)
    new, old = torch.tensor([[math.log(3)], [0.7]], dtype=F64), torch.tensor([[0.0], [0.7]], dtype=F64)
    expected = torch.tensor([0.75 * math.log(1.5) + 0.25 * math.log(0.5), 0.0], dtype=F64)
    assert_close(head_kl(new, weight, old, weight), expected)
    assert expected[0] == pytest.approx(0.130812, abs=1e-6)
    # The other way: ½ log(2/3) + ½ log 2 = ½ log(4/3) = 0.143841.
    there, back = head_kl_both_ways(HeadStates(new, weight), HeadStates(old, weight), LogitSpec())
    assert_close(there, expected)
    assert_close(back, torch.tensor([0.5 * math.log(4 / 3), 0.0], dtype=F64))


def test_both_ways_are_the_two_of_one_way():
    new, weight_new, old, weight_old = given = networks(n=71, dtype=torch.float32)
    bias = {"bias_new": weight_new[:, 0].clone(), "bias_old": weight_old[:, 1].clone()}
    both = HeadStates(new, weight_new, bias["bias_new"]), HeadStates(old, weight_old, bias["bias_old"])
    there, back = head_kl_both_ways(*both, LogitSpec(softcap=3.0, temperature=0.7))
    swapped = {"bias_new": bias["bias_old"], "bias_old": bias["bias_new"]}
    assert torch.equal(there, head_kl(*given, **bias, softcap=3.0, temperature=0.7))
    assert torch.equal(back, head_kl(old, weight_old, new, weight_new, **swapped, softcap=3.0, temperature=0.7))


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"scale": 0.5},
        {"softcap": 3.0},
        {"temperature": 0.7},
        {"scale": 2.0, "softcap": 4.0, "temperature": 1.5},
        {"bias": 1},
    ],
    ids=str,
)
def test_equals_the_definition(how):
    how = dict(how)
    given = networks()
    if how.pop("bias", None):
        how |= {"bias_new": given[1][:, 0].clone(), "bias_old": given[3][:, 1].clone()}
    assert_close(head_kl(*given, **how), oracle(*given, **how))


def test_networks_of_different_width_share_a_vocabulary():
    given = networks(h=5, g=9)
    assert_close(head_kl(*given), oracle(*given))


def test_blocks_of_rows_and_columns_join(monkeypatch):
    for module in (stream, sys.modules[head_kl.__module__]):
        monkeypatch.setattr(module, "COLUMNS", 16)
    monkeypatch.setattr(stream, "MOST_ROWS", 32)
    given = networks(n=71)
    assert_close(head_kl(*given), oracle(*given))


def test_leading_axes_stay():
    given = networks(n=6)
    shaped = [x.reshape(2, 3, -1) if i % 2 == 0 else x for i, x in enumerate(given)]
    assert torch.equal(head_kl(*shaped), head_kl(*given).reshape(2, 3))
    assert head_kl(given[0][:0], given[1], given[2][:0], given[3]).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_measured_as_it_is_stored(dtype):
    given = networks(dtype=dtype, spread=0.3)
    found = head_kl(*given)
    assert found.dtype == torch.float32
    assert_close(found, oracle(*given).to(torch.float32), torch.float32, atol=1e-5)


@given(spread=st.floats(0, 30), scale=st.floats(0.01, 100), seed=st.integers(0, 99))
def test_never_negative_and_finite(spread, scale, seed):
    kl = head_kl(*networks(spread=spread, seed=seed, dtype=torch.float32), scale=scale)
    assert (kl >= 0).all()
    assert kl.isfinite().all()


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_equal_networks_are_exactly_0_apart(dtype):
    new, weight, *_ = networks(dtype=dtype)
    assert not head_kl(new, weight, new.clone(), weight.clone()).any()


def test_small_distances_keep_their_digits_in_float32():
    # A step of 1e-4: KL about 1e-8, an eighth of float32's unit at 1, which a difference of log-probs would lose.
    new, weight, old, _ = networks(dtype=torch.float32, spread=1e-4)
    found, true = head_kl(new, weight, old, weight), oracle(new, weight, old, weight)
    assert true.max() < 1e-7
    assert ((found.double() - true).abs() <= 0.02 * true + 1e-12).all()


def test_large_logits_neither_overflow_nor_vanish():
    # Logits around ±300: e^300 is inf in float32. The oracle takes the numbers as float32 has them.
    given = networks(dtype=torch.float32, spread=0.3)
    found, true = head_kl(*given, scale=60.0), oracle(*given, scale=60.0)
    assert true.max() > 1
    assert_close(found, true.float(), rtol=1e-3, atol=1e-4)


def test_a_shift_of_all_logits_changes_nothing():
    new, weight, old, weight_old = networks()
    shift = torch.full((len(weight),), 3.0, dtype=F64, device=DEVICE)
    assert_close(head_kl(new, weight, old, weight_old, bias_new=shift), head_kl(new, weight, old, weight_old))


def test_it_is_categorical_kl_of_the_two_policies_and_no_gradient_flows():
    new, weight, old, weight_old = networks()
    new.requires_grad_()
    found = head_kl(new, weight, old, weight_old)
    expected = categorical_kl((new @ weight.T).log_softmax(-1), (old @ weight_old.T).log_softmax(-1))
    assert_close(found, expected.detach())
    assert not found.requires_grad


def test_tied_weights_that_were_trained_in_between():
    embedding = torch.nn.Embedding(11, 4, dtype=F64)
    tokens = torch.tensor([1, 5, 7])
    before = embedding(tokens).detach(), embedding.weight.detach().clone()
    with torch.no_grad():
        embedding.weight.add_(0.3 * torch.randn(11, 4, dtype=F64, generator=torch.Generator().manual_seed(1)))
    after = embedding(tokens), embedding.weight
    assert_close(head_kl(*after, *before), oracle(*(x.detach() for x in after), *before))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({0: lambda x: x[:, :-1]}, "hidden_new is"),
        ({3: lambda x: x[:, :-1]}, "hidden_old is"),
        ({2: lambda x: x[:-1]}, "same tokens"),
        ({3: lambda x: x[:-1]}, "one vocabulary"),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(change, words, unchecked_shapes):
    given = networks()
    for place, cut in change.items():
        given[place] = cut(given[place])
    with pytest.raises(ValueError, match=words):
        head_kl(*given)


def test_a_bias_of_another_vocabulary_is_refused(unchecked_shapes):
    given = networks()
    with pytest.raises(ValueError, match=r"head_kl: bias_old is \[V\] with V = 53; got \[5\]"):
        head_kl(*given, bias_old=torch.zeros(5, dtype=F64, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_vocabulary_is_never_held(dtype):
    new, weight, old, weight_old = networks(n=4096, v=128_256, h=64, dtype=dtype, spread=0.1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = head_kl(new, weight, old, weight_old)
    # The logits of both would be 2 · 4096 · 128,256 · 4 bytes = 4.2 GB.
    assert torch.cuda.max_memory_allocated() - before < 2.1e9
    some = slice(0, 4096, 512)
    assert_close(found[some], oracle(new[some], weight, old[some], weight_old).float(), torch.float32, rtol=1e-3, atol=1e-6)
