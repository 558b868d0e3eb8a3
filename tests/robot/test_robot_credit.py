"""The study of credit on the hopper: runs' folders to curves, and the page is what the file says."""

import json
from pathlib import Path

import pytest
import robot_credit
from robot_plans import PLANS


def test_every_row_of_the_plan_has_words() -> None:
    names = [job.name for job in PLANS["hopper-credit"](lambda _: (0.0, 0.0))]
    rows = {found["row"] for name in names if (found := robot_credit.NAME.fullmatch(name))}
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
    runs = robot_credit.read(tmp_path)
    assert runs["tce"] == {"0": [(0, 3.0, 0.0), (2_000_000, 14.0, 0.25)], "2": [(0, 3.0, 0.0), (2_000_000, 14.5, 0.25)]}
    text = robot_credit.block(runs)
    assert "| TCE | 2 | 14.0, 14.5 | 14.2 | 25 |" in text
    assert "No difference can be claimed between BBRL and TCE on return: +3.2, 2 seeds" in text


def test_runs_are_added_to_those_that_the_file_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, page, folder = tmp_path / "held.json", tmp_path / "page.md", tmp_path / "hopper-2M-bbrl-1"
    monkeypatch.setattr(robot_credit, "FILE", file)
    monkeypatch.setattr(robot_credit, "PAGE", page)
    monkeypatch.setattr("sys.argv", ["robot_credit.py", "--runs", str(tmp_path)])
    page.write_text("before <!-- measured: credit --> old <!-- /measured: credit --> after")
    file.write_text(json.dumps({"tce": {"0": [(0, 3.0, 0.0)]}, "bbrl": {"0": [(0, 3.0, 0.0)]}}))
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "summary.json").write_text("{}")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "env_steps": 0, "return": 4.0, "success": 0.5}) + "\n")
    robot_credit.main()
    held = json.loads(file.read_text())
    assert {row: set(seeds) for row, seeds in held.items()} == {"tce": {"0"}, "bbrl": {"0", "1"}}
    assert "| BBRL | 2 | 3.0, 4.0 | 3.5 | 25 |" in page.read_text()


def test_the_page_is_what_the_file_says() -> None:
    runs = json.loads(robot_credit.FILE.read_text())
    assert robot_credit.block(runs).rstrip() in robot_credit.PAGE.read_text(), "run python benchmarks/robot_credit.py"
