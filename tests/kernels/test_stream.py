"""The streamed product: what its tiles leave, and what it stores for a dense gradient; compiled or interpreted."""

import pytest
import torch

from interpreted import DEVICE

from corral.kernels import stream  # isort: skip  # after `interpreted`
from corral.kernels.logits import LogitSpec

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # NumPy's, where the kernels compute with inf

ROWS, VOCABULARY, WIDTH = 37, 83, 24
TILE = stream.Tile(16, 16, 16, warps=4, stages=1)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setitem(stream.TILES, torch.float32, TILE)


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
    width = stream.tile_of(hidden).columns
    tiles = -(-VOCABULARY // width)
    store = torch.full((ROWS, tiles * width), torch.nan, device=DEVICE)
    reference = z[:, 0].float() - 1.5
    stream.stream(hidden, weight, shift, spec, entropy=False, store=store, reference=reference)
    wanted = torch.nn.functional.pad((z - reference.double()[:, None]).exp(), (0, tiles * width - VOCABULARY))
    torch.testing.assert_close(store.double(), wanted, rtol=1e-4, atol=1e-12)


def test_what_would_be_infinite_is_stored_as_a_large_number():
    # Row by row all 83 logits are 300 · 1: e^(300 − 0) is no float32, and 2¹⁰⁰ is what is kept of it.
    hidden, weight = torch.full((ROWS, WIDTH), 12.5, device=DEVICE), torch.ones(VOCABULARY, WIDTH, device=DEVICE)
    width = stream.tile_of(hidden).columns
    store = torch.full((ROWS, -(-VOCABULARY // width) * width), torch.nan, device=DEVICE)
    stream.stream(
        hidden, weight, None, LogitSpec(), entropy=False, store=store, reference=torch.zeros(ROWS, device=DEVICE)
    )  # fmt: skip
    assert torch.equal(store[:, :VOCABULARY], torch.full_like(store[:, :VOCABULARY], 2.0**100))
    assert not store[:, VOCABULARY:].any()
