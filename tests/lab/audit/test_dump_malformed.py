"""Whatever a dump holds: an audit, or one sentence that names the place. Never a traceback, never a raw control character."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from audit.dumps import EXPORT, LINE, write_lines

from corral.lab.cli import main

HUGE = 10**400
ESCAPE = "\x1b]52;c;aGk=\x07"

WRONG: list[Any] = [
    None,
    True,
    7,
    "far",
    ESCAPE,
    {},
    [],
    ["far"],
    [[1.0]],
    [{}],
    [True],
    [HUGE],
    HUGE,
    1e308,
    [1e308],
    [-1e308] * 4,
    [None],
]


def line_cases() -> list[dict[str, Any]]:
    """Each field of each format, with each kind of thing that it is not."""
    own = [{**LINE, field: value} for field in ("tokens", "mask", "logp_new") for value in WRONG]
    rare = [
        {**LINE, field: value} for field in ("step", "reward", "sampled_at", "advantages", "entropy") for value in WRONG[3:13]
    ]
    top = {"top_ids": [[1]] * 4, "top_logp_old": [[-3.0]] * 4, "top_logp_new": [[-3.0]] * 4}
    supports = [{**LINE, **top, field: value} for field in top for value in [*WRONG[1:8], [[1.0]] * 4, [[1, 2]] * 4, [[1]] * 3]]
    prime = [{**EXPORT, field: value} for field in ("token_ids", "loss_mask", "losses", "trainer_logprobs") for value in WRONG]
    return own + rare + supports + prime


RAW = {
    "empty": b"", "blank": b"\n\n", "no JSON": b"hello\n", "a list": b"[1]\n", "a number": b"1e999\n", "null": b"null\n",
    "half": b'{"tokens": [1\n', "deep": b'{"tokens": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    "not UTF-8": b'{"tokens": "\xff\xfe"}\n', "many digits": b"9" * 5000 + b"\n", "a mark": b"\xef\xbb\xbf{}\n",
    "nul": b"\x00\x00\x00\n", "surrogate": b'{"tokens": "\\ud800"}\n', "empty object": b"{}\n", "twice": b"{}{}\n",
    "escape as a field": b'{"\\u001b]0;x\\u0007": 1}\n',
}  # fmt: skip


def outcome(path: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """The exit status, after a look at everything that was said."""
    status = main(["audit", str(path), "--quiet"])
    said = capsys.readouterr()
    for text in (said.out, said.err):
        assert not any(ord(character) < 32 and character != "\n" for character in text)
    if status:
        assert status == 1
        assert said.err.startswith("corral: ")
        assert said.err.count("\n") == 1, "one sentence"
        assert len(said.err) < 700
    return status


def test_lines_of_wrong_types(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused = 0
    cases = line_cases()
    for case in cases:
        good = EXPORT if "token_ids" in case else LINE
        status = outcome(write_lines(tmp_path / "dump.jsonl", [good, case]), capsys)
        refused += status
    assert refused > 100
    assert refused < len(cases), "null in the place of what is optional is fine"


@pytest.mark.parametrize("name", RAW)
def test_bytes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dump.jsonl").write_bytes(RAW[name])
    assert outcome(tmp_path / "dump.jsonl", capsys) == 1
    good = json.dumps(LINE).encode() + b"\n"
    (tmp_path / "dump.jsonl").write_bytes(good + RAW[name] + good)
    assert outcome(tmp_path / "dump.jsonl", capsys) == (0 if name in ("empty", "blank") else 1)


def test_odd_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nothing").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "torn.pt").write_bytes(b"PK\x03\x04torn")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"rollout_data": {"tokens": 3}}, tmp_path / "fields.pt")
    torch.save({"samples": [{"tokens": [1], "response_lengths": 9}]}, tmp_path / "length.pt")
    (tmp_path / "table.parquet").write_bytes(b"PAR1")
    for name in (
        "x" * 5000,
        "a\0b",
        "nothing",
        "none",
        "pipe.jsonl",
        "torn.pt",
        "list.pt",
        "fields.pt",
        "length.pt",
        "table.parquet",
    ):
        assert outcome(tmp_path / name, capsys) == 1, name


def test_names_that_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "dump"
    folder.mkdir()
    for name in (b"\xff\xfe.jsonl", b"\x1b]0;x\x07.jsonl", "\u202e.jsonl".encode()):
        path = folder / os.fsdecode(name)
        write_lines(path, [LINE])
        assert outcome(path, capsys) == 0
        write_lines(path, [LINE, 7])
        assert outcome(folder, capsys) == 1
        path.unlink()
