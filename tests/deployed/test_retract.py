"""Retraction: what is kept fits the bound, whatever the updates did and whatever the probe says."""

import copy
import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from corral import categorical_kl, head_kl, retract, snapshot
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
        "tr/deployed_kl_max": pytest.approx(0.97),
        "tr/step_share": done.share,
        "tr/deployed_probes": 2.0,
    }


@pytest.mark.parametrize("tokens", [4999, 5000])
def test_the_percentile_of_few_tokens_is_not_published(tokens):
    line = Line(0.5)
    metrics = retract(line, ZERO, lambda: line.squared().expand(tokens), bound=1.0).metrics()
    assert ("tr/deployed_kl_p999" in metrics) == (tokens >= 5000)
    assert "tr/deployed_kl_max" in metrics


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
    assert done.probes <= probes + (done.share == 0)  # the old weights are measured beyond the limit


@given(st.lists(st.one_of(st.floats(0, 1e300), st.just(math.nan), st.just(math.inf)), min_size=7, max_size=7), st.data())
def test_a_lying_probe_keeps_nothing_that_was_not_measured_to_fit(said, data):
    line, seen, left = Line(3.0), [], iter(said)

    def probe() -> torch.Tensor:
        seen.append((line.x.item(), next(left)))
        return torch.tensor([seen[-1][1]], dtype=F64)

    bound = data.draw(st.floats(1e-6, 1e3))
    try:
        done = retract(line, ZERO, probe, bound=bound, max_probes=6)
    except ValueError:
        assert all(not value <= bound for _, value in seen)
        assert (seen[-1][0], line.x.item()) == (0.0, 0.0)
        return
    assert done.value_after <= bound
    assert line.x.item() == max(x for x, value in seen if value <= bound)
    assert done.share == pytest.approx(line.x.item() / 3)
    assert done.probes == len(seen)


@pytest.mark.parametrize("said", [9.0, 0.1001])
def test_nothing_that_fits_means_the_old_weights_bit_for_bit(said):
    model = language(dtype=torch.bfloat16)
    old, _ = updated(model, 0.1)

    def probe():
        return torch.full((5,), 0.02 if torch.equal(model.head.weight, old["head.weight"]) else said)

    done = retract(model, old, probe, bound=0.1)
    assert (done.share, done.after.tokens) == (0.0, 5)
    assert done.value_after == done.after.mean == pytest.approx(0.02)  # measured, not assumed
    assert all(torch.equal(p, old[name]) for name, p in model.named_parameters())


def test_a_weight_that_no_token_reads_must_be_a_number_too():
    model = language()
    old = snapshot(model)
    with torch.no_grad():
        model.embed.weight[3] = math.nan
    done = retract(model, old, lambda: torch.zeros(5), bound=1.0)
    assert (done.share, done.probes) == (0.0, 2)
    assert math.isnan(done.before.mean)
    assert torch.equal(model.embed.weight, old["embed.weight"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_are_never_kept(bad):
    model = language()
    old, probe = updated(model, 0.1)
    with torch.no_grad():
        model.layer.weight[0, 0] = bad
    done = retract(model, old, probe, bound=1e3)
    assert (done.share, done.probes, done.value_after) == (0.0, 2, 0.0)
    assert math.isnan(done.value_before)
    assert all(torch.equal(p, old[name]) for name, p in model.named_parameters())


def test_one_token_without_a_distance_is_too_far_for_a_quantile_too():
    # p99.9 of two thousand zeros and one NaN is 0: a quantile would pass it by.
    line = Line(1.0)

    def probe():
        kl = torch.zeros(2001, dtype=F64)
        kl[7] = math.nan if line.x.item() else 0.0
        return kl

    assert retract(line, ZERO, probe, bound=1.0, statistic="p999").share == 0.0


def test_without_a_bound_it_measures_and_changes_nothing():
    line = Line(2.0)
    done = retract(line, ZERO, lambda: torch.tensor([math.nan], dtype=F64), bound=math.inf)
    assert (done.share, done.probes, line.x.item()) == (1.0, 1, 2.0)
    assert math.isnan(done.after.mean)


def test_frozen_weights_are_left_alone_unless_they_are_given():
    model = language()
    model.embed.weight.requires_grad_(False)  # as a base under an adapter is
    old, probe = updated(model, 2.0)
    assert "embed.weight" not in old
    frozen = model.embed.weight.clone()
    assert retract(model, old, probe, bound=0.01).share < 1
    assert torch.equal(model.embed.weight, frozen)

    line = Line(2.0)
    line.x.requires_grad_(False)
    assert retract(line, ZERO, line.squared, bound=1.0).share == pytest.approx(math.sqrt(0.97 / 4))


class Counted(Line):
    """A line with buffers of every kind, the cache of a rotary embedding among them."""

    def __init__(self, size: float) -> None:
        super().__init__(size)
        self.register_buffer("mean", torch.tensor([4.0, -math.inf], dtype=F64))
        self.register_buffer("steps", torch.tensor(10))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.part = nn.Module()
        self.part.register_buffer("shared", self.mean)


def counted(size: float) -> tuple[Counted, dict[str, torch.Tensor]]:
    """After an update that moved the weight to `size` and the buffers with it; and the state before."""
    line = Counted(0.0)
    old = snapshot(line)
    assert set(old) == {"x", "mean", "steps", "part.shared"}
    with torch.no_grad():
        line.x.fill_(size)
        line.mean[0] += 8
        line.steps += 5
        line.cache = torch.zeros(7)  # as a longer sequence makes it
    return line, old


def test_golden_buffers_go_back_with_the_weights():
    # D = x² = 4, δ = 1: s = √(.97/4) as before. mean = 4 + 8 s; an infinity that did not move stays one; the counter is the new
    # one, and a cache that modules recompute is left alone.
    line, old = counted(2.0)
    done = retract(line, old, line.squared, bound=1.0)
    assert done.share == pytest.approx(math.sqrt(0.97 / 4))
    assert line.mean.tolist() == [pytest.approx(4 + 8 * done.share), -math.inf]
    assert line.part.shared is line.mean
    assert (line.steps, len(line.cache)) == (15, 7)


def test_buffers_are_back_bit_for_bit_where_nothing_fits():
    line, old = counted(2.0)
    assert retract(line, old, line.squared, bound=1.0, max_probes=1).share == 0
    assert all(torch.equal(x, old[name]) for name, x in line.state_dict().items())
    line, old = counted(2.0)
    restore(line, old)
    assert all(torch.equal(x, old[name]) for name, x in line.state_dict().items())


@pytest.mark.parametrize("bound", [1e-9, 0.05, math.inf])
def test_what_a_probe_writes_into_buffers_is_undone(bound):
    model, inputs = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double(), torch.randn(9, 4, dtype=F64)
    was, old = model(inputs).detach(), snapshot(model)
    with torch.no_grad():
        model[0].weight += 1
        model(inputs)
    before = []

    def probe():  # in train mode: a forward pass moves the running statistics
        before.append(snapshot(model))
        return (model(inputs) - was).square().sum(-1)

    done = retract(model, old, probe, bound=bound)
    assert 0 <= done.share < 1 or bound == math.inf
    assert any(all(torch.equal(x, each[name]) for name, x in model.state_dict().items()) for each in before)
    if done.share == 0:
        assert all(torch.equal(x, old[name]) for name, x in model.state_dict().items())


class Parts(nn.Module):
    """A language model with what a retraction may meet."""

    def __init__(self, *, norm: bool, dropout: bool, tied: bool, frozen: bool) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(11, 4), nn.Linear(4, 4), nn.Linear(4, 11, bias=False)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.dropout = nn.Dropout(0.3 if dropout else 0.0)
        if tied:
            self.head.weight = self.embed.weight
        self.layer.requires_grad_(not frozen)
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self) -> torch.Tensor:
        hidden = self.norm(self.layer(self.embed.weight * self.scale))
        return self.head(self.dropout(hidden)).float().log_softmax(-1)


FLAGS = st.fixed_dictionaries({name: st.booleans() for name in ("norm", "dropout", "tied", "frozen")})


@given(
    parts=FLAGS,
    training=st.booleans(),
    outside=st.sampled_from(["nothing", "frozen", "cache", "trained"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    size=st.floats(1e-3, 10),
    bound=st.floats(1e-5, 1),
    seed=st.integers(0, 99),
)
def test_the_bound_holds_or_the_step_is_refused_whatever_the_module_has(parts, training, outside, dtype, size, bound, seed):
    torch.manual_seed(seed)
    model = Parts(**parts).to(dtype).train(training)
    with torch.no_grad():
        was, old = model(), {}
        old |= snapshot(model)
        for _ in range(3):  # updates, whose forward passes move running statistics
            model.train()()
            for p in model.parameters():
                p.add_(size * torch.randn_like(p) if p.requires_grad or outside == "frozen" else 0)
        if outside == "cache":
            model.scale += size
        model.train(training)
    if outside == "trained":
        del old["embed.weight"]
        with pytest.raises(ValueError, match=r"'embed\.weight' is trained and not in `old`"):
            retract(model, old, lambda: categorical_kl(model(), was), bound=bound)
        return
    moved = outside == "cache" or (outside == "frozen" and parts["frozen"])
    random = parts["dropout"] and training
    try:
        done = retract(model, old, lambda: categorical_kl(model(), was), bound=bound)
    except ValueError as error:
        done, refusal = None, str(error)
    if done is None:
        assert moved or random
        assert "the old weights are back" in refusal
    if done is None or done.share == 0:
        now = snapshot(model)
        assert all(torch.equal(x, now[name]) for name, x in old.items())
    if done is not None:
        assert done.value_after <= bound
        if not random:
            with torch.no_grad():
                assert float(categorical_kl(copy.deepcopy(model)(), was).double().mean()) == done.value_after


def test_what_moved_outside_the_old_weights_is_an_error_and_not_a_certificate():
    # x² + 3 after the step, x² + 3 at x = 0 too: 3 is not below the bound, nor is a NaN.
    says = r"the old weights are back\. With them the mean of the KL is (3|nan) and should be 0"
    for extra in (3.0, math.nan):
        line = Line(2.0)
        with pytest.raises(ValueError, match=says) as error:
            retract(line, ZERO, lambda line=line, extra=extra: line.squared() + extra, bound=1.0)
        assert line.x.item() == 0.0
        for cause in ("frozen parameter", "buffer", "dropout", "module.eval()"):
            assert cause in str(error.value)


def test_rounding_may_exceed_a_bound_at_the_old_weights_alone():
    line = Line(2.0)
    done = retract(line, ZERO, lambda: line.squared() + 5e-4, bound=1e-4, rounding=1e-3)
    assert (done.share, done.value_after) == (0.0, 5e-4)
    line = Line(2.0)
    with pytest.raises(ValueError, match="rounding alone"):
        retract(line, ZERO, lambda: line.squared() + 5e-4, bound=1e-4)


def test_an_adapter_alone_is_retracted():
    peft = pytest.importorskip("peft")
    base = language()
    before = copy.deepcopy(base.state_dict())
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["layer"], r=2, init_lora_weights=False))
    old = snapshot(model)
    assert {name.rpartition(".")[2] for name in old if "lora" not in name} == {"steps"}  # a buffer of the base
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
    "`bound` is a divergence and must be > 0 (inf measures alone); got 0": {"bound": 0},
    "`bound` is a divergence and must be > 0 (inf measures alone); got nan": {"bound": math.nan},
    "`statistic` is one of mean, p999, cvar, max; got 'median'": {"statistic": "median"},
    "`max_probes` is a whole number ≥ 1; got 0": {"max_probes": 0},
    "`rounding` is a divergence and must be finite and ≥ 0; got inf": {"rounding": math.inf},
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
