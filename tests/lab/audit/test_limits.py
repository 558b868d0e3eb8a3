"""Limits of `corral audit --fail-if`: what they find, what they say, and where docs/symptoms.md says more."""

import re
from pathlib import Path

import pytest
from audit.dumps import LINE, audit_dump, write_lines

from corral.lab.audit.limits import QUANTITIES, quantities, read_limit
from corral.lab.cli import main
from corral.validate import RunError

DOCS = Path(__file__).parents[3] / "docs"


def test_every_quantity_has_an_entry_and_is_documented() -> None:
    headings = re.findall(r"^## (.+)$", (DOCS / "symptoms.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert {symptom for _, symptom in QUANTITIES.values()} <= anchors
    table = (DOCS / "audit.md").read_text().partition("## In CI")[2].partition("## What it costs")[0]
    for name, (_, symptom) in QUANTITIES.items():
        (row,) = [line for line in table.splitlines() if line.startswith("|") and f"`{name}`" in line]
        assert f"symptoms.md#{symptom}" in row


def test_golden(tmp_path: Path) -> None:
    # LINE: log ρ = ½, 0, −1 at Â = 1. The first of three tokens is blocked, outside the ball; nothing is missed.
    line = {**LINE, "logp_rollout": LINE["logp_old"], "entropy": [0.5, 0.5, 0.8, None], "sampled_at": 1}
    audit = audit_dump(write_lines(tmp_path / "run.jsonl", [line]))
    found = quantities(audit)
    assert found.keys() == QUANTITIES.keys()
    assert (found["blocked"], found["wrong"], found["missed"]) == (pytest.approx(1 / 3), 0, 0)
    assert (found["entropy"], found["age"], found["mismatch"]) == (pytest.approx(0.6), 2, 0)
    assert read_limit("blocked>33%").exceeded(audit) == (
        "clipping would block 33.3 % of all tokens, more than 33 %: see docs/symptoms.md#which-threshold."
    )
    assert read_limit(" blocked < 0.34 ").exceeded(audit) is not None
    assert read_limit("blocked>34 %").exceeded(audit) is read_limit("age>2").exceeded(audit) is None
    assert read_limit("age>1").exceeded(audit) is not None


@pytest.mark.parametrize(("flags", "status"), [("ess<0.5", 0), ("ess<1", 3), ("age>3", 1), ("kl>1 kl<5 ess<1", 3)])
def test_the_exit_status(
    flags: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "run.jsonl", [LINE])
    given = [word for limit in flags.split() for word in ("--fail-if", limit)]
    assert main(["audit", "run.jsonl", "--quiet", *given]) == status
    said = capsys.readouterr().err
    assert said.count("\n") == {0: 0, 1: 1, 3: len(given) // 2 - flags.count("kl>1")}[status]
    assert ("nobody logged" in said) == (status == 1)


@pytest.mark.parametrize("text", ["ess", "ess=1", "ess<", "ess<x", "<1", "ess<1<2", "es<1", "ess<1e", "ess<inf"])
def test_mistakes(text: str) -> None:
    with pytest.raises(RunError, match="--fail-if"):
        read_limit(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("blocked>5", "--fail-if: `blocked` is a share from 0 to 1, so 5 is 500 %. Write 'blocked>5%' or 'blocked>0.05'."),
        ("ess < 70", "--fail-if: `ess` is a share from 0 to 1, so 70 is 7000 %. Write 'ess<70%' or 'ess<0.7'."),
        ("mismatch>200", "--fail-if: `mismatch` is a share, at most 1 or 100 %; got 'mismatch>200'."),
        ("wrong>150%", "--fail-if: `wrong` is a share, at most 1 or 100 %; got 'wrong>150%'."),
    ],
)
def test_a_share_above_one_is_refused(text: str, said: str) -> None:
    with pytest.raises(RunError) as caught:
        read_limit(text)
    assert str(caught.value) == said


@pytest.mark.parametrize("text", ["blocked>5%", "blocked>1", "ess<100 %", "kl>5", "age>3", "entropy<2", "alarms>4"])
def test_limits_that_are_taken(text: str) -> None:
    assert read_limit(text).name in text
