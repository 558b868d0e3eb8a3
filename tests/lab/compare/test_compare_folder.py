"""Runs seen from outside: how far, how they ended, what their logs say, whatever state their files are in."""

import json
import os
import signal
from pathlib import Path

import pytest

from corral.lab.compare.record import (
    Progress,
    failure_reason,
    log_tail,
    open_log,
    read_state,
)
from corral.lab.run.files import write_whole
from corral.lab.run.folder import LOG, RunFolder


def add(path: Path, *lines: dict[str, object]) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def test_progress_reads_what_is_new_and_only_whole_lines(tmp_path: Path) -> None:
    progress = Progress(tmp_path, 4)
    progress.begin()
    assert (progress.step, progress.success, progress.left, progress.share) == (0, None, "", 0.0)
    add(tmp_path, {"step": 0, "success": 0.2}, {"step": 1, "success": None})
    progress.update()
    assert (progress.step, progress.success, progress.share) == (1, 0.2, 0.25)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "succ')
    progress.update()
    assert progress.step == 1
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('ess": 0.5}\nno line\n')
    progress.update()
    assert (progress.step, progress.success) == (2, 0.5)
    assert progress.left == "0:00"  # two steps took no time at all


def test_progress_goes_back_with_a_run_that_is_resumed(tmp_path: Path) -> None:
    add(tmp_path, *({"step": step, "success": 0.1 * step} for step in range(4)))
    progress = Progress(tmp_path, 4)
    progress.begin()
    assert (progress.step, progress.left) == (3, "")
    # As `corral train --resume` does: what came after the checkpoint of step 1 is cut off, and the file is another one.
    kept = "".join((tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)[:2])
    write_whole(tmp_path / "metrics.jsonl", lambda beside: beside.write_text(kept))
    progress.update()
    assert progress.step == 1
    assert progress.clock is not None
    assert progress.clock.first == 1
    add(tmp_path, {"step": 2})
    progress.update()
    assert progress.step == 2


@pytest.mark.parametrize(
    ("files", "state"),
    [
        ({}, "waiting"),
        ({"log.txt": ""}, "waiting"),
        ({"config.json": "{}"}, "interrupted"),
        ({"config.json": "{}", "summary.json": '{"stopped": "interrupted"}'}, "interrupted"),
        ({"config.json": "{}", "summary.json": '{"stopped": "finished"}'}, "finished"),
        ({"config.json": "{}", "summary.json": '{"stopped": "collapsed"}'}, "collapsed"),
        ({"config.json": "{}", "summary.json": '{"stopped": "failed"}'}, "failed"),
        ({"config.json": "{}", "summary.json": '{"stopp'}, "interrupted"),
        ({"config.json": "{}", "summary.json": "[]"}, "interrupted"),
    ],
)
def test_files_tell_the_state(tmp_path: Path, files: dict[str, str], state: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert read_state(tmp_path) == state


def test_a_run_that_never_began_keeps_its_log_when_it_is_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    log = open_log(folder)
    os.write(log, b"first\n")
    os.close(log)
    (folder / "checkpoints").mkdir()
    (folder / ".lock").touch()
    os.close(open_log(folder))
    assert [path.name for path in folder.iterdir()] == [LOG]  # `corral train --out` wants it so
    RunFolder.create(folder, "x").close()
    (folder / "config.json").touch()
    log = open_log(folder)
    os.write(log, b"second\n")
    os.close(log)
    assert log_tail(folder, 2) == ["first", "second"]
    assert (folder / "checkpoints").is_dir()


def test_silence_counts_from_the_last_growth_and_not_before_there_is_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = Progress(tmp_path, 4)
    silences = []
    for log in (None, None, "a", "a", "ab"):
        if log is not None:
            (tmp_path / LOG).write_text(log)
        now[0] += 5.0
        silences.append(progress.silence())
    assert silences == [0.0, 0.0, 0.0, 5.0, 0.0]


def test_one_line_says_why(tmp_path: Path) -> None:
    assert failure_reason(tmp_path, 1) == "ended with status 1 and without a word"
    (tmp_path / LOG).write_bytes(b"Traceback\n  ...\nValueError: \x1b[31mred\x1b[0m \xff\n\n")
    assert failure_reason(tmp_path, 1) == "ValueError: ⟨U+001B⟩[31mred⟨U+001B⟩[0m \ufffd"
    (tmp_path / LOG).write_text("corral: there is no task 'x'.\n")
    assert failure_reason(tmp_path, 2) == "there is no task 'x'."
    (tmp_path / LOG).write_text("x" * 50_000)
    assert len(failure_reason(tmp_path, 1)) == 300
    assert failure_reason(tmp_path, -signal.SIGSEGV) == "killed by SIGSEGV"
