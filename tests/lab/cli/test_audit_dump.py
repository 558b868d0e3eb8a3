"""`corral audit DUMP`: sentences, the table of thresholds, a page, JSON, and an exit status for CI."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from audit.dumps import LINE, drawn_line, write_exports, write_lines
from audit.four_tokens import RULES, completion

from corral.lab.audit.folder import AuditFolder
from corral.lab.cli import main

DOCS = Path(__file__).parents[3] / "docs" / "audit.md"


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_lines(tmp_path / "run.jsonl", [drawn_line(seed, step=1 + seed // 4) for seed in range(16)])


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """An audit whose clipping blocks one token of four inside the KL ball."""
    folder = AuditFolder(tmp_path / "audit")
    folder.begin({"what": "compared", "model": "m", "rules": {**RULES.as_dict(), "own": True}})
    folder.add(1, [completion()])
    folder.close()
    return tmp_path / "audit"


def test_a_dump_is_shown_and_gets_a_page(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(dump.parent.iterdir())
    assert main(["audit", str(dump)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("640 tokens of 16 completions in 4 steps, compared under the old and the new policy as logged; ")
    assert re.search(r"Clip, 0.8 … 1.2, as audited +— +\d", printed)
    assert re.search(r"DPPO, TV of the sampled token +δ = 0.2 ●", printed)
    assert "The page is in audits/run.jsonl.html" in printed
    page = (dump.parent / "audits" / "run.jsonl.html").read_text()
    assert '<section id="threshold"><h2>Which threshold?</h2>' in page
    assert sorted(dump.parent.iterdir()) == sorted([*before, dump.parent / "audits"]), "nothing is written beside the dump"


def test_completions_are_shown_token_by_token(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(dump), "--quiet"]) == 0
    page = (dump.parent / "audits" / "run.jsonl.html").read_text()
    assert page.count('class="audited"') == 16
    first = json.loads(dump.read_text().splitlines()[0])["tokens"][0]
    assert f">{first} </span>" in page, "an id, as nobody said whose tokens these are"
    assert main(["audit", str(dump), "--quiet", "--tokenizer", "tiny"]) == 0
    assert f">{first} </span>" not in (dump.parent / "audits" / "run.jsonl.html").read_text()
    assert main(["audit", str(dump), "--tokenizer", "./none"]) == 1
    assert "there is no folder ./none. A model is a run" in capsys.readouterr().err


def test_prime_rl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_exports(tmp_path / "outputs", [1, 2, 3])
    assert main(["audit", str(tmp_path / "outputs"), "--page", str(tmp_path / "page.html"), "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "The old policy here is the sampler, as the engine logs no other" in printed
    assert "Which threshold?" in (tmp_path / "page.html").read_text()


def test_json_and_the_range_that_is_audited(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["audit", str(dump), "--json", "-", "--clip", "0.1,0.3", "--kl-bound", "0.02", "--page", "p.html"]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["measure"], found["kl_bound"]) == (640, "sampled", 0.02)
    assert found["rules"]["clip"]["clip_high"] == 0.3
    first = found["thresholds"][0]
    assert first["rule"] == "audited"
    assert 0 < first["kl"]["wrongly_blocked_share"] <= first["blocked_share"]
    assert found["verdicts"]["clipped"]["share"] == first["blocked_share"], "as in the audit of a trainer"
    assert sum(row["tokens"] for row in found["by_sign"]) == 640
    assert {"clip", "dppo_tv", "dppo_kl", "outside", "tv", "tv_p999", "kl_max"} <= found["by_probability"][0].keys()
    assert main([*argv[:2], "--json", "numbers.json", "--page", "p.html", "--quiet"]) == 0
    assert json.loads(Path("numbers.json").read_text())["sequences"] == 16


def test_json_of_a_measured_audit(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(measured), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measure"] == "whole"
    assert found["verdicts"]["clipped"]["kl"]["blocked_inside"] == 1
    rows = {(row["rule"], row["bound"]): row["kl"] for row in found["thresholds"]}
    assert rows["clip", 0.2]["blocked_inside"] == 1
    assert rows["dppo_topk_tv", 0.2]["missed_share"] == 0
    assert 'id="threshold"' in (measured / "audit.html").read_text()


@pytest.mark.parametrize(("limit", "status"), [("25", 0), ("24.9", 3), ("0", 3), ("100", 0)])
def test_fail_above(measured: Path, limit: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(measured), "--quiet", "--fail-above", limit]) == status
    said = capsys.readouterr().err
    assert ("clipping would block 25 % of all tokens though inside the KL ball" in said) == (status == 3)


def test_fail_above_of_a_dump(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(dump), "--quiet", "--fail-above", "0"]) == 3
    assert main(["audit", str(dump), "--quiet", "--fail-above", "0", "--clip", "1,99"]) == 0
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--fail-above 101", "--fail-above is a percentage from 0 to 100; got 101."),
        ("--fail-above nan", "--fail-above is a percentage"),
        ("--json none/x.json", "there is no folder none"),
        ("--page none/x.html", "there is no folder none"),
        ("--task countdown", "is a dump of logged tokens, so --task cannot be given with it."),
        ("--old tiny", "so --old cannot be given with it."),
        ("--out x", "so --out cannot be given with it."),
        ("--clip wide", "--clip takes LOW,HIGH"),
        ("--kl-bound -1", "`kl_bound` is the radius of a ball"),
    ],
)
def test_mistakes_get_a_sentence(flags: str, message: str, dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(dump), *flags.split()]) == 1
    assert message in capsys.readouterr().err


HOSTILE = "</script><script>window.owned = 1</script>\x1b]52;c;x\x07\u202e"


def test_hostile_names_stay_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / HOSTILE.replace("/", "-")
    write_lines(folder / "a.jsonl", [{**LINE, "answer": HOSTILE}])
    assert main(["audit", str(folder)]) == 0
    assert not any(ord(character) < 32 and character != "\n" for character in capsys.readouterr().out)
    (page,) = (tmp_path / "audits").iterdir()
    text = page.read_text()
    assert text.count("<script") == 2
    assert "\u202e" not in text
    assert "⟨U+202E⟩" in text


def test_the_writer_of_the_docs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the function in docs/audit.md writes of a loop is audited as it says."""
    monkeypatch.chdir(tmp_path)
    (script,) = re.findall(r"```python no-run\n(import json\n.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(script.partition("def log_tokens")[2].splitlines()) <= 12
    names: dict[str, Any] = {}
    exec(compile(script, "docs", "exec"), names)
    logits, mask = torch.zeros(16, 50), torch.ones(8, 16, dtype=torch.bool)  # one distribution per position
    for step in range(20):
        old = logits.log_softmax(-1)
        tokens = torch.multinomial(old.exp(), 8, replacement=True).T
        logits = logits + 0.3 * torch.randn(16, 50)
        old, new = (dist.expand(8, -1, -1).gather(-1, tokens[..., None])[..., 0] for dist in (old, logits.log_softmax(-1)))
        names["log_tokens"]("tokens.jsonl", step, tokens, mask, torch.randn(8), old, new)
    assert main(["audit", "tokens.jsonl", "--quiet", "--page", "p.html"]) == 0
    assert "in 20 steps" in capsys.readouterr().out


def test_progress_is_drawn_in_a_terminal_alone(
    dump: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["audit", str(dump)]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["audit", str(dump)]) == 0
    assert "reading" in capsys.readouterr().err
    assert main(["audit", str(dump), "--quiet"]) == 0
    assert capsys.readouterr().err == ""
