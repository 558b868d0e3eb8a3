"""The streamed GEMM: what its tiles leave, and what it stores for a dense gradient; compiled or interpreted."""

import pytest
import torch

from corral.head.dispatch import tile_of
from corral.head.logits import LogitSpec
from corral.head.rows import HeadInput
from interpreted import DEVICE, small_tiles

from corral.head.triton.gemm_stats import gemm_stats  # isort: skip  # after `interpreted`

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # NumPy's, where the kernels compute with inf

ROWS, VOCABULARY, WIDTH = 37, 83, 24


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)


def source(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    spec: LogitSpec = LogitSpec(),  # noqa: B008 (frozen)
    entropy: bool = False,
) -> HeadInput:
    return HeadInput(hidden, weight, bias, torch.zeros(len(hidden), device=DEVICE).long(), None, spec, entropy=entropy)


def problem(bias: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(ROWS, WIDTH, generator=draw), torch.randn(VOCABULARY, WIDTH, generator=draw)
    shift = torch.randn(VOCABULARY, generator=draw) if bias else None
    if shift is not None:
        shift[3], shift[16:32] = -torch.inf, -torch.inf  # one impossible token, and a tile of them
    return hidden.to(DEVICE), weight.to(DEVICE), None if shift is None else shift.to(DEVICE)


@pytest.mark.parametrize("spec", [LogitSpec(0.7, None, 1.3), LogitSpec(1.0, 5.0, 0.8)])
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_stored_relative_to_a_reference(spec, bias):
    hidden, weight, shift = problem(bias)
    z = spec.scale * (hidden.double() @ weight.double().T + (0.0 if shift is None else shift.double()))
    z = (z if spec.softcap is None else spec.softcap * torch.tanh(z / spec.softcap)) / spec.temperature
    width = tile_of(hidden).columns
    tiles = -(-VOCABULARY // width)
    store = torch.full((ROWS, tiles * width), torch.nan, device=DEVICE)
    reference = z[:, 0].float() - 1.5
    gemm_stats(source(hidden, weight, shift, spec), store=store, reference=reference)
    wanted = torch.nn.functional.pad((z - reference.double()[:, None]).exp(), (0, tiles * width - VOCABULARY))
    torch.testing.assert_close(store.double(), wanted, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("step", [0.0, 0.25])
def test_what_would_be_infinite_is_stored_as_a_large_number(step):
    # All logits are 300 and more: e^(300 − 0) is no float32, and about 2¹⁰⁰ is what is kept of it.
    z = 300.0 + step * torch.arange(VOCABULARY).remainder(7).expand(ROWS, -1)
    hidden, weight = with_logits(z)
    width = tile_of(hidden).columns
    store = torch.full((ROWS, -(-VOCABULARY // width) * width), torch.nan, device=DEVICE)
    gemm_stats(source(hidden, weight), store=store, reference=torch.zeros(ROWS, device=DEVICE))
    kept = store[:, :VOCABULARY]
    assert bool(((kept >= 2.0**96) & (kept <= 2.0**100)).all())
    assert not store[:, VOCABULARY:].any()


def test_rows_behind_the_counter_are_not_written():
    hidden, weight, _ = problem(False)
    counter = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    whole = gemm_stats(source(hidden, weight, entropy=True))
    torch.use_deterministic_algorithms(True)  # new memory holds NaN then
    try:
        some = gemm_stats(source(hidden, weight, entropy=True), counter=counter)
    finally:
        torch.use_deterministic_algorithms(False)
    assert bool(some.peak[5:].isnan().all())
    assert all(torch.equal(x, y) for x, y in zip(vars(some[:5]).values(), vars(whole[:5]).values(), strict=True))


def with_logits(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states that pick their logits: each row is a unit vector, and its logits are a column of the weight."""
    return torch.eye(len(z), -(-len(z) // 8) * 8, device=DEVICE), torch.nn.functional.pad(z.T, (0, -len(z) % 8)).to(DEVICE)


CASES = {
    "spread": lambda draw: 6 * torch.randn(ROWS, VOCABULARY, generator=draw),
    "equals": lambda draw: torch.randint(-2, 3, (ROWS, VOCABULARY), generator=draw).float(),
    "all equal": lambda draw: torch.full((ROWS, VOCABULARY), -1.5),
    "one stands out": lambda draw: torch.randn(ROWS, VOCABULARY, generator=draw) + 120 * torch.eye(ROWS, VOCABULARY),
    "two stand out": lambda draw: (
        torch.randn(ROWS, VOCABULARY, generator=draw)
        + 120 * (torch.eye(ROWS, VOCABULARY) + torch.eye(ROWS, VOCABULARY).roll(1, 1)).round()
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_statistics_are_those_of_float64(case, scale):
    z = CASES[case](torch.Generator().manual_seed(1))
    hidden, weight = with_logits(z)
    got = gemm_stats(source(hidden, weight, spec=LogitSpec(scale, None, 1.0), entropy=True))
    width = tile_of(hidden).columns
    tiles = (scale * torch.nn.functional.pad(z, (0, -VOCABULARY % width), value=-torch.inf).double()).unflatten(-1, (-1, width))
    (peak, second), order = tiles.topk(2, -1).values.unbind(-1), tiles.sort(stable=True, dim=-1, descending=True)[1]
    others = tiles.scatter(-1, order[..., :1], -torch.inf) - second[..., None]
    e = others.exp()
    torch.testing.assert_close(got.peak.cpu().double(), peak, rtol=1e-6, atol=0)
    torch.testing.assert_close(got.second.cpu().double(), second, rtol=1e-6, atol=0)
    alone = peak > second
    assert torch.equal(got.place.cpu()[alone].long(), order[..., 0][alone])
    torch.testing.assert_close(got.others.cpu().double(), e.sum(-1), rtol=2e-5, atol=0)
    gaps = torch.where(e > 0, others * e, 0.0).sum(-1)
    torch.testing.assert_close(got.weighted.cpu().double(), gaps, rtol=2e-5, atol=5e-5)


def test_a_second_largest_far_below_still_counts():
    # 200 nats below the largest, beyond float32: of the others at least the second itself is known, e^0 = 1.
    z = torch.zeros(ROWS, VOCABULARY)
    z[:, ::16] = 200.0
    hidden, weight = with_logits(z)
    got = gemm_stats(source(hidden, weight))
    whole = got.others[:, :-1] if DEVICE == "cpu" else got.others  # the last tile is not whole, and exact
    assert bool((whole >= 1.0).all())
    assert bool(got.others.isfinite().all())
