"""More than a hundred malformed folders: a page with a note, or a sentence; never a traceback, never an escape code."""

import re
from pathlib import Path

import pytest
from audit.four_tokens import RULES, completion
from report.malformed import AUDITS, COMPARISONS, RUNS, Damage
from report.synthetic import write_comparison_of_two, write_run

from corral.lab.audit.folder import AuditFolder
from corral.lab.cli import main

HARMLESS = re.compile(r"corral: .*\n", re.DOTALL)


def _run(folder: Path, damage: Damage) -> Path:
    """A damaged run beside a sound one at another learning rate: there is a sweep too."""
    path = write_run(folder / "runs/run", "troll", 0, steps=2, tokens=True, every=1)
    write_run(folder / "runs/other", "troll", 0, steps=2, every=1, learning_rate=1e-3)
    damage(path)
    return folder / "runs"


def _comparison(folder: Path, damage: Damage) -> Path:
    path = write_comparison_of_two(folder / "runs")
    damage(path)
    return path


def _audit(folder: Path, damage: Damage) -> Path:
    audit = AuditFolder(folder / "audit")
    audit.begin({"what": "compared", "model": "m", "rules": RULES.as_dict()})
    audit.add(1, [completion("tok")])
    audit.close()
    damage(folder / "audit")
    return folder / "audit"


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_a_hundred_malformed_folders_give_a_hundred_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], every: int
) -> None:
    said = 0
    kinds = (("report", RUNS, _run), ("report", COMPARISONS, _comparison), ("audit", AUDITS, _audit))
    cases = [(kind, name, damage, make) for kind, damages, make in kinds for name, damage in damages.items()][::every]
    for index, (kind, name, damage, make) in enumerate(cases):
        folder = make(tmp_path / str(index), damage)
        page = tmp_path / f"{index}.html"
        status = main([kind, str(folder), "--out" if kind == "report" else "--page", str(page)])
        out, err = capsys.readouterr()
        assert "\x1b" not in out + err, name
        if status:
            assert status == 1, name
            assert HARMLESS.fullmatch(err), name
            assert not page.exists(), name
        said += bool(status) or "<td>file</td>" in page.read_text() or "left out" in page.read_text()
    assert len(cases) >= 150 / every
    assert said >= 100 / every


def test_names_that_are_not_utf8_and_names_that_steer_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Folder, objective, task and sweep key say `ESC]52;…` or hold a byte that is no text."""
    evil = "\x1b]52;c;b3duZWQ=\x07\x1b[2J\x9b31m\ud800"
    for seed in range(2):
        folder = write_run(tmp_path / f"runs/{seed}", evil, 0, steps=2, every=1, task=evil, objective_config={evil: seed})
        folder.rename(folder.with_name(f"\udcff\x1b]0;owned\x07{seed}"))
    page = tmp_path / "\udcfe.html"
    assert main(["report", str(tmp_path / "runs"), "--out", str(page)]) == 0
    out = capsys.readouterr().out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", out)
    assert "⟨U+001B⟩]52;c;" in out
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "a\0b.html")]) == 1
    assert main(["report", "\x1b[2J\0nowhere"]) == 1
    err = capsys.readouterr().err
    assert "is no file's name" in err
    assert "⟨U+001B⟩[2J⟨U+0000⟩nowhere is no folder" in err
