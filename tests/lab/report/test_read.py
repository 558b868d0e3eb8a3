"""Runs as tables, on good days and bad ones: files that are missing, torn, not finite, or not what they seem."""

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from report.synthetic import write_run

from corral.lab.report.read import find_runs, number, read_run, read_runs
from corral.validate import RunError


def test_a_whole_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", "troll", 3, tokens=True))
    assert (run.objective, run.task, run.model, run.seed, run.stopped) == ("troll", "countdown", "tiny", "3", "finished")
    assert (run.steps, run.planned_steps, len(run.lines)) == (8, 8, 9)
    assert [step for step, _ in run.values("success")] == [0, 2, 4, 6, 8]
    assert len(run.completions) == 8
    assert run.tokens[0]["action"][1] == "projected"
    assert run.notes == []


def test_runs_are_found_where_they_are(tmp_path: Path) -> None:
    for place in ("a", "b/c", "b/.hidden", "d/e/f/g"):
        write_run(tmp_path / place)
    assert find_runs([tmp_path]) == [tmp_path / "a", tmp_path / "b/c", tmp_path / "d/e/f/g"]
    assert find_runs([tmp_path / "a", tmp_path / "b" / ".." / "a", tmp_path / "b"]) == [
        tmp_path / "b" / ".." / "a",
        tmp_path / "b/c",
    ]


def test_what_is_inside_a_run_is_no_run(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run/checkpoints/checkpoint-8").mkdir(parents=True)
    (tmp_path / "run/checkpoints/checkpoint-8/config.json").write_text("{}")
    assert find_runs([tmp_path]) == [tmp_path / "run"]


def test_no_runs_is_a_sentence_that_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"no runs in .*config\.json, a metrics\.jsonl or a trainer's trainer_state\.json.*corral train --out"
    ):
        find_runs([tmp_path])
    with pytest.raises(RunError, match="is no folder"):
        find_runs([tmp_path / "nothing"])


def test_a_run_in_progress(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", stopped=None))
    assert (run.stopped, run.steps, run.planned_steps) == ("not ended", 4, 8)
    assert run.objective == "troll"  # from the settings
    assert run.notes == ["summary.json is missing: it has not ended, or was killed."]


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "summary.json", "completions.parquet"])
def test_a_missing_file_is_a_note(tmp_path: Path, name: str) -> None:
    path = write_run(tmp_path / "run")
    (path / name).unlink()
    run = read_run(path)
    assert any(note.startswith(f"{name} is missing") for note in run.notes)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "summary.json", "completions.parquet", "tokens.parquet"])
@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "list"])
def test_a_torn_file_is_a_note(tmp_path: Path, name: str, damage: str) -> None:
    path = write_run(tmp_path / "run", tokens=True)
    data = (path / name).read_bytes()
    (path / name).write_bytes({"cut": data[:-20], "noise": bytes(range(256)), "empty": b"", "list": b"[1, 2]"}[damage])
    run = read_run(path)
    whole = name == "metrics.jsonl" and damage == "empty"
    assert any(name in note for note in run.notes) or whole


def test_a_last_line_that_is_torn_leaves_the_others(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "succ')
    run = read_run(path)
    assert run.steps == 8
    assert "metrics.jsonl: 1 of 10 lines cannot be read and are left out." in run.notes


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    rows = [{"step": 0, "success": 0.5}, {"step": 1, "success": "nan", "kl": "inf"}, {"step": 2, "success": None, "kl": 0.1}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "success": NaN}\n')
    run = read_run(path)
    assert run.values("success") == [(0, 0.5)]
    assert run.lines[1]["kl"] == math.inf
    assert "not finite at some steps: kl, success." in run.notes
    assert [number(value) for value in (True, 3, "-inf", "infinite")] == [True, 3.0, -math.inf, "infinite"]
    assert isinstance(number(3), float)


def test_of_two_lines_with_one_step_the_later_counts(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").write_text(
        '{"step": 1, "success": 0.1}\n{"step": 0, "success": 0.0}\n{"step": 1, "success": 0.7}\n'
    )
    assert read_run(path).values("success") == [(0, 0.0), (1, 0.7)]


def test_completions_of_evenly_spaced_steps(tmp_path: Path) -> None:
    rows = [{"step": step, "completion": str(index)} for step in range(1, 1001) for index in range(16)]
    run = read_run(write_run(tmp_path / "run", completions=rows))
    steps = sorted({row["step"] for row in run.completions})
    assert len(run.completions) == 64
    assert (steps[0], steps[-1], len(steps)) == (1, 1000, 8)


def test_rows_of_tokens_whose_lists_differ_are_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", tokens=True)
    rows = pq.read_table(path / "tokens.parquet").to_pylist()
    rows.append({**rows[0], "kl_before": [0.1]})
    pq.write_table(pa.Table.from_pylist(rows), path / "tokens.parquet")
    run = read_run(path)
    assert len(run.tokens) == 1
    assert "tokens.parquet: 1 of 2 rows have lists of unlike lengths: left out." in run.notes


def test_an_empty_folder_with_a_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (run,) = read_runs([tmp_path])
    assert (run.objective, run.task, run.model, run.seed, run.stopped) == ("unknown", "unknown", "", "unknown", "not ended")
