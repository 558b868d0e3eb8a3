"""Loads that carry a study: every byte arrives, in any order, and damage is noticed."""

import json
import random
from pathlib import Path

import pytest

from results.receive import receive
from results.travel import MIB, pack

pytestmark = pytest.mark.results


@pytest.fixture
def loads(tmp_path: Path) -> list[Path]:
    """A commit, a file of 2.5 MiB that does not compress, and a folder, in loads of 1 MiB."""
    big, folder = tmp_path / "weights.gguf", tmp_path / "data"
    big.write_bytes(random.Random(0).randbytes(5 * MIB // 2))
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "rows.jsonl").write_text("{}\n")
    return pack({"model": big, "data": folder}, tmp_path / "loads", mib=1)


def test_everything_arrives_in_any_order_and_twice(loads: list[Path], tmp_path: Path) -> None:
    there = tmp_path / "there"
    assert all(sum(piece.stat().st_size for piece in load.glob("piece-*")) <= MIB for load in loads)
    order = [*reversed(loads), loads[0]]
    left = [receive(load, there) for load in order]
    assert "model" in left[0]
    assert left[-1] == []
    assert (there / "model" / "weights.gguf").read_bytes() == (tmp_path / "weights.gguf").read_bytes()
    assert (there / "data" / "deep" / "rows.jsonl").read_text() == "{}\n"
    assert (there / "code" / "results" / "travel.py").is_file()
    assert json.loads((loads[0] / "manifest.json").read_text())["commit"].startswith((there / "COMMIT").read_text())


def test_a_damaged_piece_is_named(loads: list[Path], tmp_path: Path) -> None:
    name = json.loads((loads[0] / "manifest.json").read_text())["items"]["model"]["pieces"][0]
    damaged = next(load / name for load in loads if (load / name).exists())
    damaged.write_bytes(bytes(damaged.stat().st_size))
    for load in loads[:-1]:
        receive(load, tmp_path / "there")
    with pytest.raises(SystemExit, match=f"model is damaged.*{name}"):
        receive(loads[-1], tmp_path / "there")


def test_a_missing_item_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nothing at model="):
        pack({"model": tmp_path / "nowhere"}, tmp_path / "loads", mib=1)
    assert not (tmp_path / "loads").exists()
