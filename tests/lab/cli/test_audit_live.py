"""`corral audit … --live`: files that grow while they are followed, by a clock that is the test's own."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from audit.dumps import LINE, drawn_line, write_exports, write_lines
from audit.four_tokens import RULES, completion
from audit.test_dump_formats import SAMPLE

from corral.lab.audit.folder import AuditFolder
from corral.lab.cli import audit as audit_live
from corral.lab.cli import main

LIVE = 'id="reload"'


@pytest.fixture
def meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What happens between two looks, one after the other; then comes Ctrl-C."""
    monkeypatch.chdir(tmp_path)

    def plan(*events: Callable[[], object]) -> None:
        left = iter(events)

        def wait(seconds: float) -> None:
            event = next(left, None)
            if event is None:
                raise KeyboardInterrupt
            event()

        monkeypatch.setattr(audit_live, "wait", wait)

    return plan


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def numbers(path: Path, *flags: str) -> dict[str, object]:
    assert main(["audit", str(path), "--json", "n.json", "--page", "p.html", "--quiet", *flags]) == 0
    # Sums in another order: equal but for the last digits.
    return json.loads(Path("n.json").read_text(), parse_float=lambda text: round(float(text), 12))


def test_a_dump_that_grows_is_counted_once(
    tmp_path: Path, meanwhile: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(drawn_line(seed, step=1 + seed // 4)) + "\n" for seed in range(16)]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(lines[:4]))
    pages = []

    def grow(text: str) -> Callable[[], None]:
        return lambda: (pages.append(Path("p.html").read_text()), add(path, text))[0]

    meanwhile(grow("".join(lines[4:9]) + lines[9][:50]), grow(lines[9][50:] + "".join(lines[10:])), lambda: None)
    followed = numbers(path, "--live")
    said = capsys.readouterr().out
    assert all(LIVE in page for page in pages)
    assert "160 tokens of 4 completions" in pages[0]
    assert "360 tokens of 9 completions" in pages[1], "the tenth line is only half there"
    assert LIVE not in Path("p.html").read_text(), "what is left at the end is not live"
    assert said.startswith("640 tokens of 16 completions in 4 steps")
    assert followed == numbers(path)


def test_the_status_is_one_line(tmp_path: Path, meanwhile: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dump").mkdir()
    path = tmp_path / "dump" / "a.jsonl"
    meanwhile(lambda: None, lambda: write_lines(path, [LINE]), lambda: None, lambda: add(path, json.dumps(LINE) + "\n"))
    assert main(["audit", "dump", "--live", "--interval", "5"]) == 0
    waiting, first, second, sentence = capsys.readouterr().out.splitlines()[:4]
    assert waiting.startswith("Waiting: dump holds nothing to audit")
    assert first.endswith("step 3, 3 tokens: would clip 33 %, 0 % of these inside the KL ball")
    assert "step 3, 6 tokens" in second
    assert sentence.startswith("6 tokens of 2 completions")


def test_in_a_terminal_it_stays_in_place(
    tmp_path: Path, meanwhile: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "\x1b[2Ja.jsonl", [LINE])
    monkeypatch.setenv("FORCE_COLOR", "1")
    meanwhile(lambda: None)
    assert main(["audit", str(tmp_path), "--live"]) == 0
    printed = capsys.readouterr().out
    assert "3 tokens: would clip 33 %" in printed
    assert printed.index("\x1b[2K") < printed.index("3 tokens of 1 completion"), "the line is taken away before the sentences"
    assert "\x1b[2J" not in printed


def test_an_audit_that_a_trainer_fills(
    tmp_path: Path, meanwhile: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = AuditFolder(tmp_path / "audit")
    (tmp_path / "audit").mkdir()
    begin = {"what": "compared", "model": "m", "rules": {**RULES.as_dict(), "own": True}}
    meanwhile(
        lambda: folder.begin(begin), lambda: folder.add(1, [completion()]), lambda: None, lambda: folder.add(2, [completion()])
    )
    assert main(["audit", "audit", "--live", "--quiet", "--fail-above", "20"]) == 3
    folder.close()
    found = capsys.readouterr()
    assert found.out.startswith("8 tokens")
    assert found.out.count("The page is in") == 1
    assert LIVE not in (tmp_path / "audit" / "audit.html").read_text()
    meanwhile(lambda: None)
    assert main(["audit", "audit", "--live"]) == 0
    assert capsys.readouterr().out.startswith(("0", "1", "2")), "the time"


def test_steps_of_prime_rl_are_read_when_they_are_complete(tmp_path: Path, meanwhile: Callable[..., None]) -> None:
    outputs = write_exports(tmp_path / "outputs", [1, 2], stable=False)
    step = outputs / "token_exports" / "step_1"
    counts = []

    def finish() -> None:
        (step / "STABLE").touch()

    def look() -> None:
        counts.append(json.loads(Path("n.json").read_text())["steps"])
        (step.with_name("step_2") / "STABLE").touch()

    meanwhile(finish, look, lambda: None)
    assert numbers(outputs, "--live")["steps"] == 2
    assert counts == [1]


def test_a_file_of_slime_is_read_once_it_no_longer_grows(tmp_path: Path, meanwhile: Callable[..., None]) -> None:
    torch.save({"rollout_id": 0, "format_version": 2, "samples": [SAMPLE]}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    path = tmp_path / "dump" / "data_0_0.pt"
    path.parent.mkdir()
    path.write_bytes(whole[:100])
    meanwhile(lambda: path.write_bytes(whole), lambda: None, lambda: None)
    assert numbers(path.parent, "--live") == numbers(path.parent)


def test_a_dump_that_was_replaced_is_read_anew(tmp_path: Path, meanwhile: Callable[..., None]) -> None:
    path = write_lines(tmp_path / "run.jsonl", [drawn_line(seed) for seed in range(5)])
    meanwhile(lambda: write_lines(path, [drawn_line(7)]))
    assert numbers(path, "--live") == numbers(path)


def test_damage_ends_it_with_a_sentence(
    tmp_path: Path, meanwhile: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "run.jsonl", [LINE])
    meanwhile(lambda: add(path, "{}}\n"))
    assert main(["audit", str(path), "--live", "--page", "p.html"]) == 1
    assert "run.jsonl, line 2: is no JSON" in capsys.readouterr().err
    page = Path("p.html").read_text()
    assert "3 tokens of 1 completion" in page
    assert LIVE not in page


def test_nothing_until_it_is_interrupted(
    tmp_path: Path, meanwhile: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    meanwhile()
    assert main(["audit", str(tmp_path), "--live", "--quiet"]) == 130
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", "corral: interrupted before there was anything to audit.\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--interval 5", "--interval is the time between two looks of --live, which is not given."),
        ("--live --interval 0", "--interval is a number of seconds, 0.1 or more; got 0."),
        ("--live --interval nan", "--interval is a number of seconds"),
        ("--live --json -", "name a file for --json"),
        ("--live --old tiny", "--live loads no model, so --old cannot be given with it."),
    ],
)
def test_mistakes(flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path), *flags.split()]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{}", "the checkpoints of a run, and two models, are compared without it."),
        ("1.jsonl", json.dumps({"input": "a", "output": "b", "score": 1}) + "\n", "audit it without --live."),
    ],
)
def test_what_cannot_be_followed(
    file: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / file).write_text(content)
    assert main(["audit", str(tmp_path), "--live"]) == 1
    assert message in capsys.readouterr().err


def test_flags_that_a_measured_audit_does_not_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "audit.json").write_text("{}")
    assert main(["audit", str(tmp_path), "--live", "--clip", "0.1"]) == 1
    assert "is an audit that was measured already, so --clip cannot be given with it." in capsys.readouterr().err
