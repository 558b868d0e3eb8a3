"""Everything that needs a GPU by one command, shown with programs that need none: order, limits, going on, what is missing."""

import importlib
import json
import sys
import time
from pathlib import Path

import everything_on_gpu
import gpu_parts
import head_vs_naive
import pytest
import results
import torch
import update_tables
from gpu_parts import Part, parts_of

KEEPER = """
import json, sys, time
from pathlib import Path
path, section, rows, pause = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(), float(sys.argv[4])
for row in rows:
    held = json.loads(path.read_text()) if path.exists() else {}
    kept = held.setdefault(section, {"machine": {}, "rows": []})["rows"]
    if row not in kept:
        kept.append(row)
        path.write_text(json.dumps(held))
        time.sleep(pause)
"""


def part(file: Path, name: str, rows: str, pause: float = 0.0, **more: object) -> Part:
    """A program that keeps rows one by one, and leaves out those that it has kept."""

    def missing() -> dict[str, list[str]]:
        return {name: [row for row in rows.split() if row not in gpu_parts.rows_of(file, name)]}

    command = [sys.executable, "-c", KEEPER, str(file), name, rows, str(pause)]
    return Part(**{"name": name, "seconds": 30.0, "command": command, "missing": missing, "file": file, **more})


@pytest.fixture(autouse=True)
def never_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everything_on_gpu, "TOO_LATE", 0.0)


def test_what_is_cut_short_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The first part keeps one row and would take an hour for the next; its limit ends it, and the second part has its turn.
    file = tmp_path / "head.json"
    slow, quick = part(file, "slow", "a b", pause=3600.0, seconds=3.0), part(file, "quick", "c")
    assert everything_on_gpu.drive([slow, quick], 60.0, tmp_path)
    assert "slow: cut short after 3 s" in capsys.readouterr().out
    assert (slow.lacks(), quick.lacks()) == (["b"], [])
    everything_on_gpu.say_missing([slow, quick])
    assert capsys.readouterr().out == "missing: slow: b\n"
    # Only what is whole replaces what was published before.
    published = tmp_path / "results"
    results.write_results(
        {"slow": {"rows": ["old"]}, "quick": {"rows": ["old"]}, "other": {"rows": []}}, published / "head.json"
    )
    assert everything_on_gpu.publish([slow, quick], published) == ["quick"]
    held = results.read_results(published / "head.json")
    assert {name: kept["rows"] for name, kept in held.items()} == {"slow": ["old"], "quick": ["c"], "other": []}

    again = part(file, "slow", "a b")
    assert everything_on_gpu.drive([again, quick], 60.0, tmp_path)
    said = capsys.readouterr().out
    assert "slow: done" in said
    assert "quick" not in said
    assert gpu_parts.rows_of(file, "slow") == ["a", "b"]


def test_nothing_outlives_the_limit(tmp_path: Path) -> None:
    # A child that would write after the end is ended with its parent.
    late = tmp_path / "late"
    child = f"import time; time.sleep(2); open({str(late)!r}, 'w')"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert everything_on_gpu.run_within([sys.executable, "-c", parent], 1.0).startswith("cut short")
    time.sleep(2)
    assert not late.exists()


def test_kernels_are_compiled_together_and_before_anything_is_timed(tmp_path: Path) -> None:
    # Two that wait for each other end only if they run at once; what is timed afterwards finds both.
    wait = """
import sys, time
from pathlib import Path
Path(sys.argv[1]).touch()
while not Path(sys.argv[2]).exists():
    time.sleep(0.01)
"""
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    compiling = ([sys.executable, "-c", wait, one, two], [sys.executable, "-c", wait, two, one])
    timed = "import sys; from pathlib import Path; sys.exit(not all(Path(p).exists() for p in sys.argv[1:]))"
    some = part(tmp_path / "head.json", "some", "a", command=[sys.executable, "-c", timed, one, two], compiling=compiling)
    everything_on_gpu.compile_all([some], 30.0, 2, tmp_path)
    assert everything_on_gpu.measure_all([some], time.monotonic() + 30)


def test_a_failure_is_told_and_the_others_have_their_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "head.json"
    broken = part(file, "broken", "a", command=[sys.executable, "-c", "raise SystemExit(3)"])
    barred = part(file, "barred", "b", blocked=lambda: "no TRL")
    fine = part(file, "fine", "c")
    assert not everything_on_gpu.drive([broken, barred, fine], 60.0, tmp_path)
    assert "broken: failed with status 3" in capsys.readouterr().out
    assert gpu_parts.rows_of(file, "fine") == ["c"]
    everything_on_gpu.say_missing([broken, barred, fine])
    assert capsys.readouterr().out.splitlines() == ["missing: broken: a", "missing: barred (no TRL): b"]


def test_what_needs_no_gpu_waits_and_what_waits_for_it_comes_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "head.json"
    drawn = part(file, "drawn", "a", gpu=False)
    rollouts = part(file, "rollouts", "b", blocked=lambda: "; ".join(drawn.lacks()) or None)
    assert everything_on_gpu.drive([drawn, rollouts, part(file, "others", "c")], 60.0, tmp_path)
    begun = [line.split(",")[0] for line in capsys.readouterr().out.splitlines() if line.endswith("left")]
    assert begun == ["== others", "== drawn", "== rollouts"]


@pytest.mark.llm  # imports TRL
def test_every_program_understands_how_it_is_called(tmp_path: Path) -> None:
    for each in parts_of(tmp_path):
        for command in (each.command, *each.compiling):
            program = importlib.import_module(Path(command[1]).stem)
            program.arguments().parse_args(command[2:])
        assert each.command[0] == sys.executable


def test_at_first_everything_is_missing(tmp_path: Path) -> None:
    lacks = {each.name: each.lacks() for each in parts_of(tmp_path, tmp_path / "rollouts.pt")}
    assert [len(missing) for missing in lacks.values()] == [4, 6, 6, 1, 1, 1, 22]
    assert lacks["the head at the usual shapes"][0] == "N=8192, V=151936, H=4096, K=64, peaked, bfloat16"
    assert lacks["the trainer's update phase"][0] == "8B, 4 of 36 layers, peaked"


def test_what_was_published_counts_shape_by_shape(tmp_path: Path) -> None:
    (tmp_path / "head.json").write_text(results.HEAD.read_text())
    usual, others = (parts_of(tmp_path)[i] for i in (0, -1))
    held = gpu_parts.rows_of(results.HEAD, "head on cuda, other shapes")
    assert usual.lacks() == []
    assert len(others.lacks()) == 22 - len({tuple(row[key] for key in ("N", "V", "H", "K", "policy")) for row in held})


def test_rollouts_count_once_learning_has_come_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.pt"
    assert gpu_parts.stored_sets(path) == []
    torch.save({"sets": {"sums, before": {"step": 0}, "sums, after 20 steps": {"step": 20}}}, path)
    assert gpu_parts.stored_sets(path) == []
    torch.save({"sets": {"sums, before": {"step": 0}, "sums, after 80 steps": {"step": 80}}}, path)
    assert gpu_parts.stored_sets(path) == ["sums, before", "sums, after 80 steps"]
    assert gpu_parts.sets_without([{"rewards": []}, {"set": "sums, before"}], gpu_parts.stored_sets(path)) == [
        "sums, after 80 steps"
    ]


def test_a_policy_is_finished_with_all_rounds_and_its_longest_micro_batch() -> None:
    timed = [
        {"policy": policy, "contender": name, "rounds": 9} for policy in ("peaked", "flat") for name in update_tables.CONTENDERS
    ]
    assert update_tables.finished(timed, "peaked")
    assert not update_tables.finished(timed, "flat")
    assert update_tables.finished([row | {"longest": 5} for row in timed], "flat")
    assert not update_tables.finished(timed[:2], "peaked")
    assert not update_tables.finished([*timed[:2], timed[2] | {"rounds": 8}], "peaked")


def test_rows_of_another_gpu_are_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "head.json"
    results.save_results("head", [{"a": 1}], path)
    assert results.saved_rows("head", path) == [{"a": 1}]
    assert results.saved_rows("other", path) == []
    held = json.loads(path.read_text())
    held["head"]["machine"]["gpu"] = "another"
    path.write_text(json.dumps(held))
    with pytest.raises(SystemExit, match=r"was measured with \('another'"):
        results.saved_rows("head", path)


def test_a_selection_of_contenders_is_not_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["head_vs_naive.py", "--device", "cpu", "--only", "corral", "--save"])
    with pytest.raises(SystemExit):
        head_vs_naive.main()
    assert "not with --only" in capsys.readouterr().err


def test_all_of_it_by_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file, written = tmp_path / "rows" / "head.json", []
    found = [part(file, "one", "a b", gpu=False), part(file, "two", "c", gpu=False, blocked=lambda: "no TRL")]
    monkeypatch.setattr(everything_on_gpu, "parts_of", lambda folder: found)
    monkeypatch.setattr(everything_on_gpu, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(everything_on_gpu.head_page, "main", lambda: written.append("page"))
    monkeypatch.setattr(everything_on_gpu.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["everything_on_gpu.py", "--prepare", "--folder", str(file.parent)])
    with pytest.raises(SystemExit) as ended:
        everything_on_gpu.main()
    assert ended.value.code == 0
    assert written == ["page"]
    assert list(results.read_results(tmp_path / "results" / "head.json")) == ["one"]
    assert "missing: two (no TRL): c\n" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what is said where there is no GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["everything_on_gpu.py"])
    with pytest.raises(SystemExit):
        everything_on_gpu.main()
    assert "there is no GPU here" in capsys.readouterr().err


def test_a_folder_is_gone_on_with_on_request_and_by_the_same_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert everything_on_gpu.begin(tmp_path, resume=False) is None
    assert "holds rows already" in (everything_on_gpu.begin(tmp_path, resume=False) or "")
    assert everything_on_gpu.begin(tmp_path, resume=True) is None
    monkeypatch.setattr(everything_on_gpu, "MEASURED", ("kernels",))
    assert "was begun with" in (everything_on_gpu.begin(tmp_path, resume=True) or "")
