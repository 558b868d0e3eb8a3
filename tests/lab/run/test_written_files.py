"""Order and care of what is written: synced before it gets its name, locked while it is written, refused where it cannot be."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corral.lab.run import files
from corral.lab.run.files import append_line, disk_errors, disk_sentence, lock, read_regular, write_json, write_whole
from corral.lab.run.folder import RunFolder, choose_checkpoint, damage
from corral.lab.run.life import changed_setting, extend
from corral.lab.run.text import visible
from corral.validate import RunError


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path / "run", "label")
    yield made
    made.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Names of files and folders in the order in which they were synced or renamed."""
    made: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def note_sync(file: int) -> None:
        made.append(("sync", Path(os.readlink(f"/proc/self/fd/{file}")).name))
        fsync(file)

    def note_replace(source: Any, target: Any) -> None:
        made.append(("rename", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    return made


def put(folder: RunFolder, number: int, **texts: str) -> Path:
    """Publish a checkpoint of these files."""
    source = folder.writing / f"checkpoint-{number}"
    source.mkdir(parents=True)
    for name, text in (texts or {"weights": "w", "state": "s"}).items():
        (source / name).write_text(text)
    folder.publish(source.name, step=number, keep=9)
    return folder.checkpoints / source.name


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_after(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    write_whole(tmp_path / "config.json", lambda beside: beside.write_text("{}"))
    (first, part), rename, last = calls
    assert (first, part[:13]) == ("sync", ".config.json.")
    assert rename == ("rename", "config.json")
    assert last == ("sync", tmp_path.name)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(folder: RunFolder, calls: list[tuple[str, str]]) -> None:
    put(folder, 1)
    renamed = calls.index(("rename", "checkpoint-1"))
    assert {("sync", "weights"), ("sync", "state"), ("rename", "manifest.json")} <= set(calls[:renamed])
    assert ("sync", "checkpoints") in calls[renamed:]
    assert calls.index(("rename", "manifest.json")) > max(calls.index(("sync", name)) for name in ("weights", "state"))


def test_a_line_is_on_the_disk_when_it_is_appended(tmp_path: Path, calls: list[tuple[str, str]]) -> None:
    append_line(tmp_path / "metrics.jsonl", {"step": 1})
    assert calls == [("sync", "metrics.jsonl")]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, kind in (("pipe", "a pipe"), ("folder", "a folder")):
        with pytest.raises(RunError, match=f"no file but {kind}"):
            write_json(tmp_path / name, {})
    with pytest.raises(RunError, match="is no file's name"):
        write_json(tmp_path / "a\0b", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe"]


def test_a_lock_is_exclusive_and_ends_with_its_holder(tmp_path: Path) -> None:
    held = lock(tmp_path)
    with pytest.raises(RunError, match="another process is writing"):
        lock(tmp_path)
    os.close(held)
    os.close(lock(tmp_path))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        read_regular(tmp_path / "pipe")


def test_a_limit_on_sizes_has_its_own_sentence(tmp_path: Path) -> None:
    wrapped = RuntimeError("saving failed")
    wrapped.__cause__ = OSError(27, "trop grand")
    for error in (wrapped, OSError(27, "Datei zu gross"), Exception("I/O error: File too large (os error 27)")):
        assert files.reached_limit(error)
        assert "ulimit -f" in disk_sentence(error, tmp_path)
    assert "ulimit" not in disk_sentence(OSError(28, "No space left on device"), tmp_path)


def test_the_newest_checkpoint_is_the_one_with_the_largest_number(folder: RunFolder) -> None:
    for number in (2, 10, 9):
        put(folder, number)
    (folder.checkpoints / "checkpoint-odd").mkdir()
    assert [path.name for path in folder.checkpoint_paths()] == ["checkpoint-10", "checkpoint-9", "checkpoint-2"]
    assert choose_checkpoint(folder, "latest")[0].step == 10
    assert choose_checkpoint(folder, "9")[0].step == 9
    with pytest.raises(RunError, match=r"no whole checkpoint of step 3\. It has whole checkpoints of steps 2, 9, 10\."):
        choose_checkpoint(folder, "3")
    for odd in ("³", "-1", "1.0", "", "9" * 30):
        with pytest.raises(RunError, match="is latest, best or the number of a step"):
            choose_checkpoint(folder, odd)


def test_the_best_checkpoint_is_the_newest_of_those_with_the_highest_success(folder: RunFolder) -> None:
    for number in (1, 2, 3, 4):
        put(folder, number)
    with pytest.raises(RunError, match="of a step where success was measured"):
        choose_checkpoint(folder, "best")
    for step, success in ((1, 0.5), (2, 0.75), (3, 0.75), (4, None), (5, 0.9)):  # of step 5 there is no checkpoint
        append_line(folder.metrics, {"step": step, "success": success})
    assert choose_checkpoint(folder, "best")[0].step == 3
    (folder.checkpoints / "checkpoint-3" / "weights").write_text("other")
    assert choose_checkpoint(folder, "best")[0].step == 2


@pytest.mark.parametrize("damage_it", ["size", "content", "link", "manifest", "pipe", "unlisted link"])
def test_damage_is_found(damage_it: str, folder: RunFolder, tmp_path: Path) -> None:
    path = put(folder, 1)
    assert damage(path) is None
    weights = path / "weights"
    if damage_it == "size":
        weights.write_text("ww")
    elif damage_it == "content":
        weights.write_text("v")
    elif damage_it == "link":
        (tmp_path / "same").write_text("w")
        weights.unlink()
        weights.symlink_to(tmp_path / "same")
    elif damage_it == "manifest":
        write_json(path / "manifest.json", {"step": 1, "files": {}})
    elif damage_it == "pipe":
        os.mkfifo(path / "pipe")
    else:
        (path / "more").symlink_to("/dev/zero")
    why = damage(path)
    assert why is not None
    assert (damage_it == "size") == ("has 2 bytes instead of 1" in why)


def test_lines_that_no_run_writes_are_left_out(folder: RunFolder) -> None:
    texts = [
        '{"step": 1}',
        "[]",
        "3",
        '{"step": "2"}',
        '{"no": 1}',
        "{" * 9,
        '{"a":' * 20_000 + "1" + "}" * 20_000,
        '{"step": 4}',
    ]
    folder.metrics.write_text("\n".join(texts))
    assert [line["step"] for line in folder.lines()] == [1, 4]


@pytest.mark.parametrize(
    "make", [lambda path: path.write_bytes(b"no"), os.mkfifo, lambda path: pq.write_table(pa.table({}), path)]
)
def test_completions_that_cannot_be_read_are_forgotten(make: Callable[[Path], None], folder: RunFolder) -> None:
    make(folder.completions)
    assert folder.cut_back(3) == []


def test_a_run_is_given_no_end_that_it_has_passed(folder: RunFolder) -> None:
    folder.write_config({"settings": {"steps": 5}})
    found = choose_checkpoint(folder, "latest")[0] if put(folder, 4) else None
    with pytest.raises(RunError, match="has done 4 steps, more than --steps 3"):
        extend(folder, folder.read_config(), "steps", 3, found)
    assert extend(folder, folder.read_config(), "steps", 8, found) == folder.read_config()
    assert changed_setting(folder.read_config(), "steps", 8, 4, "extended") == {}, "no change is none"
    content = json.loads(folder.config.read_text())
    assert content["settings"]["steps"] == 8
    assert content["extended"] == [{"from": 5, "to": 8, "after": 4}]


@pytest.mark.parametrize("code", [0x00, 0x07, 0x08, 0x0D, 0x1B, 0x7F, 0x85, 0x9B, 0xAD, 0x200B, 0x202E, 0x2066, 0xFEFF, 0xD800])
def test_hidden_characters_are_written_out(code: int) -> None:
    assert visible(f"a{chr(code)}b") == f"a⟨U+{code:04X}⟩b"


def test_letters_lines_and_tabs_stay() -> None:
    assert visible("é\n\tف👩‍🔬\r\n") == "é\n\tف👩‍🔬\n"


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"), "the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied"), "cannot be written: Permission denied"),
        (RunError("No space left is said already"), r"^No space left is said already$"),
    ],
)
def test_an_error_of_the_disk_says_what_to_do(error: Exception, raised: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=raised), disk_errors(tmp_path / "file"):
        raise error


def test_an_error_that_is_not_of_the_disk_passes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^no number$"), disk_errors(tmp_path / "file"):
        raise ValueError("no number")
