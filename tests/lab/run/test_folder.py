"""The run folder: files whole or not at all, checkpoints that prove themselves, errors in sentences."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from corral.lab.run import files
from corral.lab.run.files import append_line, disk_sentence, reached_limit, write_json, write_whole
from corral.lab.run.folder import RunFolder, damage
from corral.lab.run.guard import Guard
from corral.provenance import commit, plain, versions
from corral.validate import RunError

FULL = OSError(errno.ENOSPC, "No space left on device")


def write_checkpoint(folder: RunFolder, update: int, keep: int = 9) -> Path:
    source = folder.writing / f"checkpoint-{update}"
    source.mkdir(parents=True)
    (source / "weights").write_bytes(bytes(range(update)))
    (source / "inner").mkdir()
    (source / "inner" / "state").write_text("state")
    folder.publish(source.name, step=update // 2, keep=keep)
    return folder.checkpoints / source.name


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path / "run", "label")
    yield made
    made.close()


def test_a_file_is_replaced_whole_or_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write_json(path, {"bound": 0.05})

    def fail(beside: Path) -> None:
        beside.write_text('{"bound": 0')
        raise FULL

    with pytest.raises(RunError, match="disk is full"):
        write_whole(path, fail)
    assert json.loads(path.read_text()) == {"bound": 0.05}
    assert list(tmp_path.iterdir()) == [path]


def test_json_has_no_nan_and_no_infinity() -> None:
    given = {"loss": float("nan"), "bound": float("inf"), "path": Path("a"), "pair": (1, None), "flag": True}
    assert plain(given) == {"loss": None, "bound": "inf", "path": "a", "pair": [1, None], "flag": True}


def test_a_line_that_does_not_fit_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"step": 0})
    write = os.write
    monkeypatch.setattr(files.os, "write", lambda file, data: write(file, data[:5]))
    with pytest.raises(RunError, match="disk is full"):
        append_line(path, {"step": 1})
    monkeypatch.undo()
    append_line(path, {"step": 2})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 2]


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        # What torch.save and safetensors say when a disk is full.
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["python", "quota", "torch", "safetensors"],
)
def test_a_full_disk_is_recognised_whoever_says_so(error: Exception, tmp_path: Path) -> None:
    assert reached_limit(error)
    assert "Free some space, then resume" in disk_sentence(error, tmp_path / "not" / "there")
    wrapped = RuntimeError("saving failed")
    wrapped.__cause__ = error
    assert reached_limit(wrapped)
    assert not reached_limit(RuntimeError("something else"))


@pytest.mark.refuses("run: a folder that is not empty", door="command line")
def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"not an empty folder: choose another --out"):
        RunFolder.create(tmp_path, "label")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RunError, match=r"continue that run with --resume"):
        RunFolder.create(tmp_path, "label")
    with pytest.raises(RunError, match="not an empty folder"):
        RunFolder.create(tmp_path / "notes.txt", "label")
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.refuses("run: a folder that cannot be written", door="command line")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="could not be written"):
        RunFolder.create(tmp_path / "file" / "run", "label")

    def denied(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)  # root may write everywhere, so permissions alone would test nothing
    with pytest.raises(RunError, match=r"cannot be written: Permission denied. Choose another folder with --out"):
        RunFolder.create(tmp_path / "run", "label")
    with pytest.raises(RunError, match="cannot be written"):
        RunFolder.create(None, "label")


def test_a_read_only_disk_is_named_although_nothing_can_be_removed_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", denied)  # as of a file that is not there
    with pytest.raises(RunError, match=r"page\.html cannot be written: Read-only file system\. Choose another folder"):
        write_whole(tmp_path / "page.html", denied)


def test_a_folder_that_may_not_be_looked_into_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "exists", denied)
    with pytest.raises(RunError, match=r"run cannot be written: Permission denied\. Choose another folder with --out"):
        RunFolder.create(tmp_path / "run", "label")
    with pytest.raises(RunError, match=r"page\.html cannot be written: Permission denied"):
        write_whole(tmp_path / "page.html", denied)


def test_default_folders_are_new_ones_under_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20260101-000000")
    paths = []
    for _ in range(3):
        made = RunFolder.create(None, "countdown-troll-0")
        made.close()
        paths.append(str(made.path))
    assert paths == [f"runs/20260101-000000-countdown-troll-0{end}" for end in ("", "-2", "-3")]


@pytest.mark.refuses("run: two processes in one folder", door="command line")
def test_one_process_at_a_time(folder: RunFolder) -> None:
    folder.write_config({})
    with pytest.raises(RunError, match="another process is writing"):
        RunFolder.open(folder.path)
    folder.close()
    RunFolder.open(folder.path).close()


def test_a_folder_without_a_config_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is no run"):
        RunFolder.open(tmp_path)
    (tmp_path / "config.json").write_text("{")
    opened = RunFolder.open(tmp_path)
    with pytest.raises(RunError, match="cannot be read"):
        opened.read_config()
    opened.close()


def test_the_config_names_versions_and_commit(folder: RunFolder) -> None:
    folder.write_config({"settings": {"bound": float("inf")}})
    content = folder.read_config()
    assert content["settings"] == {"bound": "inf"}
    assert content["versions"] == versions()
    assert content["versions"]["torch"]
    assert content["commit"] == commit()


def test_cutting_back_forgets_what_comes_after(folder: RunFolder) -> None:
    for step in range(5):
        append_line(folder.metrics, {"step": step})
        row = {"step": step, "update": 2 * step, "prompt": "p", "completion": "c", "reward": 1.0, "advantage": 0.0}
        folder.completions_kept += [row]
    folder.write_completions()
    write_json(folder.summary, {"stopped": "interrupted"})
    with folder.metrics.open("a") as file:
        file.write('{"step": 5, "rew')  # the machine went down here
    again = RunFolder(folder.path)
    assert [line["step"] for line in again.cut_back(2)] == [0, 1, 2]
    assert [line["step"] for line in again.lines()] == [0, 1, 2]
    assert not again.summary.exists()
    again.write_completions()
    assert pq.read_table(again.completions)["step"].to_pylist() == [0, 1, 2]


def test_infinities_come_back_as_numbers(folder: RunFolder) -> None:
    """A guard that is restored compares them with its limits; the file itself stays JSON."""
    append_line(folder.metrics, {"step": 1, "kl": float("inf"), "std": float("-inf"), "reward": None, "warnings": ["inf"]})
    line = {"step": 1, "kl": float("inf"), "std": float("-inf"), "reward": None, "warnings": ["inf"]}
    assert folder.lines() == folder.cut_back(1) == folder.lines() == [line]
    assert json.loads(folder.metrics.read_text())["kl"] == "inf"
    guard = Guard()
    guard.restore(folder.lines() * 2)
    guard.observe({"kl": float("inf")})
    assert "kl is inf nats" in guard.news[0]


def test_damaged_completions_do_not_stop_a_resume(folder: RunFolder) -> None:
    folder.completions.write_bytes(b"PAR1 no more")
    assert folder.cut_back(3) == []
    folder.write_completions()
    assert pq.read_table(folder.completions).num_rows == 0


def test_checkpoints_appear_whole_and_old_ones_go(folder: RunFolder) -> None:
    for update in (2, 4, 10):
        path = write_checkpoint(folder, update, keep=2)
        assert damage(path) is None
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["checkpoint-10", "checkpoint-4"]
    newest, complaints = folder.last_whole_checkpoint()
    assert newest is not None
    assert (newest.path.name, newest.step, complaints) == ("checkpoint-10", 5, [])


def no_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def torn_manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text[: len(text) // 2])


def missing_file(path: Path) -> None:
    (path / "inner" / "state").unlink()


def truncated(path: Path) -> None:
    (path / "weights").write_bytes(b"\x00")


def flipped_bit(path: Path) -> None:
    data = bytearray((path / "weights").read_bytes())
    data[1] ^= 1
    (path / "weights").write_bytes(data)


@pytest.mark.parametrize("harm", [no_manifest, torn_manifest, missing_file, truncated, flipped_bit])
def test_a_damaged_checkpoint_is_found_and_the_one_before_is_used(folder: RunFolder, harm: Any) -> None:
    write_checkpoint(folder, 4)
    harm(write_checkpoint(folder, 6))
    found, complaints = folder.last_whole_checkpoint()
    assert found is not None
    assert found.path.name == "checkpoint-4"
    assert len(complaints) == 1
    assert complaints[0].startswith("checkpoint-6 is damaged")
    harm(folder.checkpoints / "checkpoint-4")
    assert folder.last_whole_checkpoint()[0] is None


def test_an_unfinished_checkpoint_is_never_seen(folder: RunFolder) -> None:
    write_checkpoint(folder, 2)
    (folder.writing / "checkpoint-8").mkdir(parents=True)
    found, complaints = folder.last_whole_checkpoint()
    assert found is not None
    assert (found.path.name, complaints) == ("checkpoint-2", [])
    folder.drop_unfinished()
    assert not folder.writing.exists()
