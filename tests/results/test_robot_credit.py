"""The study of credit on the hopper: runs' folders to curves, and the page is what the file says."""

import json
from pathlib import Path

import pytest

from results import packed
from results.robots import credit as robot_credit
from results.robots import runs as robot_runs
from results.robots.plans import PLANS


def test_every_row_of_the_plan_has_words() -> None:
    names = [job.name for job in PLANS["hopper-credit"](lambda _: (0.0, 0.0))]
    rows = {found["row"] for name in names if (found := robot_runs.CREDIT.fullmatch(name))}
    assert len(names) == 3 * len(rows)
    assert rows == set(robot_credit.SAID)


def test_finished_runs_are_read_and_compared(tmp_path: Path) -> None:
    for row, seed, paid in (("tce", 0, 14.0), ("tce", 1, 15.0), ("tce", 2, 14.5), ("bbrl", 0, 17.0), ("bbrl", 2, 18.0)):
        folder = tmp_path / f"hopper-2M-{row}-{seed}"
        folder.mkdir()
        lines = [{"step": 0, "env_steps": 0, "return": 3.0, "success": 0.0}]
        lines += [{"step": 125, "env_steps": 2_000_000, "return": paid, "success": 0.25}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "config.json").write_text("{}")
        if (row, seed) != ("tce", 1):
            (folder / "summary.json").write_text("{}")
    runs = list(robot_runs.read_credit(tmp_path))
    assert [(run["row"], run["seed"]) for run in runs] == [("bbrl", "0"), ("bbrl", "2"), ("tce", "0"), ("tce", "2")]
    assert runs[2]["curve"] == [[0, 3.0, 0.0], [2_000_000, 14.0, 0.25]]
    text = robot_credit.block(runs)
    assert "| TCE | 2 | 14.0, 14.5 | 14.2 | 25 | – | – |" in text
    assert "| BBRL | 2 | 17.0, 18.0 | 17.5 | 25 | +3.2 | 1 |" in text


def test_runs_are_added_to_those_that_the_file_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, folder = tmp_path / "held.parquet", tmp_path / "hopper-2M-bbrl-1"
    curve = [[0, 3.0, 0.0]]
    packed.write(file, [{"row": "tce", "seed": "0", "curve": curve}, {"row": "bbrl", "seed": "0", "curve": curve}])
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "summary.json").write_text("{}")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "env_steps": 0, "return": 4.0, "success": 0.5}) + "\n")
    monkeypatch.setattr("sys.argv", ["runs.py", str(tmp_path), "--into", "credit", "--out", str(file)])
    robot_runs.main()
    held = packed.read(file)
    assert [(run["row"], run["seed"]) for run in held] == [("tce", "0"), ("bbrl", "0"), ("bbrl", "1")]
    assert "| BBRL | 2 | 3.0, 4.0 | 3.5 | 25 |" in robot_credit.block(held)
