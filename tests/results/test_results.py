"""The packed rows of the studies are readable, and the pages on disk are what their generators write (seconds)."""

import json
import math
from pathlib import Path

import pytest

from results import make, packed, pages


def test_the_pages_say_what_the_raw_rows_say() -> None:
    found = make.pages()
    assert {path.relative_to(pages.ROOT).as_posix() for path in found} == {
        "README.md", "docs/results/deployed.md", "docs/results/llm.md", "docs/results/robots.md", "docs/results/index.md",
        "docs/performance.md", "docs/design/head.md", "docs/warp.md",
    }  # fmt: skip
    for path, text in found.items():
        assert path.read_text() == text, f"{path.name} is not what its raw rows say: run `make results`"


def test_every_raw_file_is_readable_and_packed() -> None:
    files = sorted(packed.FOLDER.rglob("*.parquet"))
    for file in files:
        assert (rows := packed.read(file)), f"{file.name} has no rows"
        assert "/tmp" not in str(rows), f"{file.name} names a place on a machine"
    assert sum(file.stat().st_size for file in files) < 4e6, "1.3 kB a run: what the pages read, and no more"
    assert not list(packed.FOLDER.rglob("*.json*"))


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [
        {
            "rate": "auto",
            "bound": math.inf,
            "lines": [{"step": 0, "success": 0.1}, {"step": 1, "tr/x": 2.0}],
            "at": [1.0, None],
        },
        {"rate": 1e-3, "bound": 0.1, "lines": [], "seed": 3, "held": {"share": True, "rate": 1}},
        {"rate": 1e-3, "lines": [], "seed": 4, "held": {"share": 0.5}},
    ]
    file = tmp_path / "rows.parquet"
    packed.write(file, rows)
    assert packed.read(file) == rows
    assert packed.read(tmp_path / "none.parquet") == []


def test_lines_of_json_are_added_in_place_of_those_of_the_same_run(tmp_path: Path) -> None:
    file, lines = tmp_path / "rows.parquet", tmp_path / "new" / "rows.jsonl"
    packed.write(file, [{"key": "a", "reward": 1.0}, {"key": "b", "reward": 2.0}])
    lines.parent.mkdir()
    lines.write_text("".join(json.dumps(row) + "\n" for row in ({"key": "b", "bound": "inf"}, {"key": "c", "reward": None})))
    assert packed.add(file, packed.read(lines.parent), "key") == 3
    assert packed.read(file) == [{"key": "a", "reward": 1.0}, {"key": "b", "bound": math.inf}, {"key": "c"}]


def test_blocks_are_written_anew_and_the_rest_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- study: one -->\nold\n<!-- /study -->\nb\n<!-- study: two -->\n\nold\n\n<!-- /study: two -->\n")
    blocks = {"one": lambda: "1\n", "two": lambda: "2\n\n"}
    assert pages.fill(Path.read_text, (page,), "study", blocks)[page] == (
        "a\n<!-- study: one -->\n1\n<!-- /study -->\nb\n<!-- study: two -->\n\n2\n\n<!-- /study: two -->\n"
    )
    with pytest.raises(ValueError, match="not those that are written: two"):
        pages.fill(Path.read_text, (page,), "study", {"one": blocks["one"]})
