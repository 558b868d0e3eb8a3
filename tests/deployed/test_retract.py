"""Retraction: what is kept fits the bound, whatever the updates did and whatever the probe says."""

import copy
import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from corral import head_kl, retract, snapshot
from corral.deployed import STATISTICS, BatchKL, restore
from device import DEVICE

F64 = torch.float64


class Language(nn.Module):
    """A language model small enough to see through: an embedding, a layer, a head that may be tied, a buffer."""

    def __init__(self, *, tied: bool = False, dtype: torch.dtype = F64) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(23, 6), nn.Linear(6, 6), nn.Linear(6, 23, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(()))
        self.to(dtype)

    def hidden(self) -> torch.Tensor:
        return torch.tanh(self.layer(self.embed.weight)) + self.embed.weight


def language(seed=0, **how) -> Language:
    torch.manual_seed(seed)
    return Language(**how).to(DEVICE)


def updated(model: Language, size: float, seed: int = 1) -> tuple[dict, object]:
    """Random updates of every trained weight; the old weights, and a probe of the true distance from them."""
    old = snapshot(model)
    was = model.hidden().detach(), model.head.weight.detach().clone()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(size * torch.randn(p.shape, generator=draw).to(p))
    return old, lambda: head_kl(model.hidden(), model.head.weight, *was)


class Line(nn.Module):
    """One weight, moved from 0 to `size`: its own square is the distance."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([size], dtype=F64))

    def squared(self) -> torch.Tensor:
        return self.x.detach() ** 2


ZERO = {"x": torch.zeros(1, dtype=F64)}


def test_golden_a_quadratic():
    # D = x² = 4 after the step, δ = 1. √(.97 δ / D) = √.2425 = .492443: x = .984886, D = .97 ≥ .8 δ: kept after two probes.
    line = Line(2.0)
    done = retract(line, ZERO, line.squared, bound=1.0)
    assert done.share == pytest.approx(math.sqrt(0.97 / 4), abs=1e-12)
    assert line.x.item() == pytest.approx(2 * math.sqrt(0.97 / 4), abs=1e-12)
    assert (done.value_before, done.probes) == (4.0, 2)
    assert done.value_after == pytest.approx(0.97, abs=1e-12)
    assert done.metrics() == {
        "tr/deployed_kl_mean": pytest.approx(0.97),
        "tr/deployed_kl_p999": pytest.approx(0.97),
        "tr/deployed_kl_max": pytest.approx(0.97),
        "tr/step_share": done.share,
        "tr/deployed_probes": 2.0,
    }


def test_a_probe_may_know_its_sequences():
    # x² = 4 twice, in two sequences, and KL(old‖new) three times as much: retracted to .97, the sums are 2.91 each.
    line = Line(2.0)

    def probe():
        kl = line.squared().expand(2)
        return BatchKL(new_old=kl, old_new=3 * kl, sequence=torch.arange(2))

    metrics = retract(line, ZERO, probe, bound=1.0).metrics()
    assert metrics["tr/deployed_kl_mean"] == pytest.approx(0.97)
    assert metrics["tr/deployed_seq_kl_mean"] == metrics["tr/deployed_seq_kl_max"] == pytest.approx(3 * 0.97)
    assert metrics["tr/deployed_kl_se"] == pytest.approx(0.0, abs=1e-12)


def test_autocast_keeps_no_copy_of_weights_that_were_retracted():
    model = language(dtype=torch.float32)
    inputs = torch.randn(50, 6, device=DEVICE)

    def run():
        with torch.autocast(DEVICE, torch.bfloat16):
            return model.layer(inputs).float(), model.head.weight.detach().clone()

    old, was = snapshot(model), run()
    with torch.no_grad():
        model.layer.weight += 2.0
    with torch.autocast(DEVICE, torch.bfloat16):  # which keeps half-precision copies of weights until its end
        done = retract(model, old, lambda: head_kl(*run(), *was), bound=0.01)
    assert 0 < done.share < 1
    assert done.value_after == pytest.approx(float(head_kl(*run(), *was).double().mean()), rel=1e-6)
    with torch.autocast(DEVICE, torch.bfloat16), torch.no_grad():
        run()
        restore(model, old)
        assert torch.equal(run()[0], was[0])


def test_a_percentile_of_few_tokens_is_warned_of_once(monkeypatch, caplog):
    monkeypatch.setattr(sys.modules[retract.__module__], "_told", set())
    for statistic, tokens in (("mean", 10), ("p999", 5000), ("p999", 4999), ("p999", 10)):
        line = Line(0.5)
        retract(line, ZERO, lambda line=line, tokens=tokens: line.squared().expand(tokens), bound=1.0, statistic=statistic)
    (record,) = caplog.records
    assert "of 4999 tokens is one of their five largest" in record.getMessage()


def test_golden_a_steeper_law_is_corrected_once():
    # D = x⁴ = 16, δ = 1: s = √(.97/16) = .246221 gives D = 16 s⁴ = .0588, far below. The power through both probes is 4:
    # s = .246221 (.97/.0588)^¼ = (.97/16)^¼ = .496208, D = .97.
    line = Line(2.0)
    done = retract(line, ZERO, lambda: line.squared() ** 2, bound=1.0)
    assert done.share == pytest.approx((0.97 / 16) ** 0.25, abs=1e-12)
    assert done.probes == 3


def test_a_step_that_fits_is_left_alone_bit_for_bit():
    model = language()
    old, probe = updated(model, 1e-3)
    new = snapshot(model)
    done = retract(model, old, probe, bound=1.0)
    assert (done.share, done.probes) == (1.0, 1)
    assert done.value_before == done.value_after
    assert all(torch.equal(p, new[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_what_is_kept_fits_as_it_is_stored(statistic, tied, dtype):
    model = language(tied=tied, dtype=dtype)
    old, probe = updated(model, 1.0)
    done = retract(model, old, probe, bound=0.05, statistic=statistic)
    again = float(STATISTICS[statistic](probe().double()))
    assert again == done.value_after
    assert 0 < again <= 0.05 < done.value_before
    assert 0 < done.share < 1


@given(size=st.floats(1e-6, 1e4), bound=st.floats(1e-8, 10), seed=st.integers(0, 999), probes=st.integers(1, 6))
def test_the_bound_holds_after_any_update(size, bound, seed, probes):
    model = language(seed % 3)
    old, probe = updated(model, size, seed)
    done = retract(model, old, probe, bound=bound, max_probes=probes)
    assert float(probe().mean()) <= bound
    assert done.value_after == float(probe().mean())
    assert done.probes <= probes


@given(st.lists(st.one_of(st.floats(0, 1e300), st.just(math.nan), st.just(math.inf)), min_size=6, max_size=6), st.data())
def test_a_lying_probe_keeps_nothing_that_was_not_measured_to_fit(said, data):
    line, seen, left = Line(3.0), [], iter(said)

    def probe() -> torch.Tensor:
        seen.append((line.x.item(), next(left)))
        return torch.tensor([seen[-1][1]], dtype=F64)

    done = retract(line, ZERO, probe, bound=data.draw(st.floats(1e-6, 1e3)), max_probes=6)
    assert done.value_after <= done.bound
    fitting = [x for x, value in seen if value <= done.bound]
    assert line.x.item() == (max(fitting) if fitting else 0.0)
    assert done.share == pytest.approx(line.x.item() / 3)


@pytest.mark.parametrize("said", [9.0, 0.1001])
def test_nothing_that_fits_means_the_old_weights_bit_for_bit(said):
    model = language(dtype=torch.bfloat16)
    old, _ = updated(model, 0.1)
    done = retract(model, old, lambda: torch.full((5,), said), bound=0.1)
    assert (done.share, done.value_after, done.after.mean, done.after.tokens) == (0.0, 0.0, 0.0, 5)
    assert all(torch.equal(p, old[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_are_never_kept(bad):
    model = language()
    old, probe = updated(model, 0.1)
    with torch.no_grad():
        model.layer.weight[0, 0] = bad
    done = retract(model, old, probe, bound=1e3)
    assert (done.share, done.probes) == (0.0, 0)
    assert math.isnan(done.value_before)
    assert all(torch.equal(p, old[name]) for name, p in model.named_parameters())


def test_one_token_without_a_distance_is_too_far_for_a_quantile_too():
    # p99.9 of two thousand zeros and one NaN is 0: a quantile would pass it by.
    line = Line(1.0)
    kl = torch.zeros(2001, dtype=F64)
    kl[7] = math.nan
    assert retract(line, ZERO, lambda: kl, bound=1.0, statistic="p999").share == 0.0


def test_without_a_bound_it_measures_and_changes_nothing():
    line = Line(2.0)
    done = retract(line, ZERO, lambda: torch.tensor([math.nan], dtype=F64), bound=math.inf)
    assert (done.share, done.probes, line.x.item()) == (1.0, 1, 2.0)
    assert math.isnan(done.after.mean)


def test_frozen_weights_and_buffers_are_left_alone():
    model = language()
    model.embed.weight.requires_grad_(False)  # as a base under an adapter is
    old, probe = updated(model, 2.0)
    assert "embed.weight" not in old
    model.steps += 5
    frozen = model.embed.weight.clone()
    assert retract(model, old, probe, bound=0.01).share < 1
    assert torch.equal(model.embed.weight, frozen)
    assert model.steps == 5


def test_an_adapter_alone_is_retracted():
    peft = pytest.importorskip("peft")
    base = language()
    before = copy.deepcopy(base.state_dict())
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["layer"], r=2, init_lora_weights=False))
    old = snapshot(model)
    assert all("lora" in name for name in old)
    inner = model.base_model.model
    was = inner.hidden().detach(), inner.head.weight.detach().clone()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in old:
                p.mul_(40)
    done = retract(model, old, lambda: head_kl(inner.hidden(), inner.head.weight, *was), bound=0.01)
    assert 0 < done.share < 1
    assert done.value_after <= 0.01
    after = {name.replace(".base_layer", ""): x for name, x in inner.state_dict().items() if "lora" not in name}
    assert all(torch.equal(x, before[name]) for name, x in after.items())


def test_restore_undoes_everything():
    model = language(tied=True)
    old, _ = updated(model, 1.0)
    restore(model, old)
    assert all(torch.equal(p, old[name]) for name, p in model.named_parameters())


BAD = {
    "it is empty": {"old": {}},
    "'y' is none of them": {"old": {"y": torch.zeros(1)}},
    "another shape": {"old": {"x": torch.zeros(2)}},
    "`bound` is a divergence > 0, inf to measure alone; got 0": {"bound": 0},
    "`bound` is a divergence > 0, inf to measure alone; got nan": {"bound": math.nan},
    "`statistic` is one of mean, p999, cvar, max; got 'median'": {"statistic": "median"},
    "`max_probes` is a whole number ≥ 1; got 0": {"max_probes": 0},
}


@pytest.mark.parametrize(("says", "change"), BAD.items(), ids=BAD)
def test_what_is_wrong_is_refused(says, change):
    line = Line(1.0)
    given = {"old": ZERO, "probe": line.squared, "bound": 1.0, **change}
    with pytest.raises(ValueError, match=r"^retract: ") as error:
        retract(line, **given)
    assert says in str(error.value)


def test_no_token_is_no_certificate():
    with pytest.raises(ValueError, match="no token to measure"):
        retract(Line(1.0), ZERO, lambda: torch.zeros(0, dtype=F64), bound=1.0)
