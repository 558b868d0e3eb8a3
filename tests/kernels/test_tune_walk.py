"""The tuner of walks, with a clock of its own: it measures the usual walk first, and keeps what is clearly faster."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from interpreted import DEVICE

from corral.kernels import stream, walk  # isort: skip  # after `interpreted`
from corral.kernels.walk import Walk

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # NumPy's, where the kernels compute with inf

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tune_walk.py"


@pytest.fixture
def tuner():
    described = importlib.util.spec_from_file_location("tune_walk", SCRIPT)
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


@pytest.mark.parametrize("stored", [False, True])
def test_every_walk_is_run_and_the_usual_one_comes_first(tuner, monkeypatch, stored):
    if DEVICE == "cpu":
        monkeypatch.setitem(stream.TILES, torch.float32, stream.Tile(16, 16, 16, warps=4, stages=2))
    asked = []
    monkeypatch.setattr(tuner, "do_bench", lambda run, return_mode: asked.append(run()) or float(len(asked)))
    hidden, weight = torch.randn(8, 16, device=DEVICE), torch.randn(40, 16, device=DEVICE)
    taken = tuner.measure(hidden, weight, stored=stored)
    usual = walk.usual_walk(16, stream.tile_of(hidden).stages, stored=stored)
    assert next(iter(taken)) == usual
    assert set(taken) == {usual, *walk.CANDIDATES}
    assert all(torch.equal(one.peak, asked[0].peak) and torch.equal(one.others, asked[0].others) for one in asked)


@pytest.mark.parametrize(("gain", "kept"), [(0.9, Walk(4, 2)), (0.995, Walk(32, 4))])
def test_what_is_hardly_faster_is_not_kept(tuner, monkeypatch, capsys, gain, kept):
    remembered = {}
    monkeypatch.setattr(sys, "argv", ["tune_walk.py", "--widths", "896", "--rows", "8", "--vocabulary", "16"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "Generator", lambda device: FakeDraw())
    plain = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, generator, device: plain(*shape))
    monkeypatch.setattr(tuner, "measure", lambda hidden, weight, stored: {Walk(32, 4): 2.0, Walk(4, 2): 2.0 * gain})
    monkeypatch.setattr(
        tuner, "remember", lambda rows, walk, stored: remembered.__setitem__(stored, walk) or Path("walks.json")
    )
    tuner.main()
    assert remembered == {False: kept, True: kept}
    assert "kept in walks.json" in capsys.readouterr().out


class FakeDraw:
    def manual_seed(self, seed):
        return self
