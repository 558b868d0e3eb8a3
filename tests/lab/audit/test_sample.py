"""Completions that are kept to be looked at: those with the most errors, whole and in order."""

import math
from pathlib import Path

import pandas as pd
import pytest
from audit.dumps import LINE, audit_dump, drawn_line, write_lines

from corral.lab.audit.dump import find_dump
from corral.lab.audit.rules import Rules
from corral.lab.audit.tally import DumpAudit
from corral.lab.audit.tokens import kinds


def sample(path: Path) -> list[pd.DataFrame]:
    return [tokens for _, tokens in audit_dump(path).completions]


def test_golden(tmp_path: Path) -> None:
    # ρ = e^½, 1, e⁻¹ with Â = 1: the first is beyond 1.2. Its binary KL is .11: outside .05, and blocked.
    path = write_lines(tmp_path / "run.jsonl", [{**LINE, "tokens": [4, 5, 6, 7], "mask": [0, 1, 1, 1]} | {
        "logp_old": [None, -1.0, -2.0, -0.5], "logp_new": [None, -0.5, -2.0, -1.5]}])  # fmt: skip
    (found,) = sample(path)
    assert found.token.tolist() == [5, 6, 7]
    assert found.position.tolist() == [0, 1, 2], "from the first token that counts"
    assert found["clipped"].tolist() == [True, False, False]
    assert kinds(found, "kl", 0.05).tolist() == ["right", "passed", "back"]
    audit = DumpAudit(Rules())
    audit.read(find_dump(path), lambda _: None)
    texts = {5: "a", 6: "b", 7: "c"}
    assert [audit.result(find_dump(path)).text(token) for token in (5, 6, 7)] == ["5 ", "6 ", "7 "]
    assert [audit.result(find_dump(path), lambda ids: texts).text(token) for token in (5, 6, 7)] == ["a", "b", "c"]


def test_a_block_that_is_right_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Step 1: .4 → .8 three times, blocked and outside. Step 2: .005 → .01 once, blocked though hardly moved.
    monkeypatch.setattr("corral.lab.audit.tally._MOST", 1)
    right = {"step": 1, "tokens": [1] * 3, "advantages": 1, "logp_old": [math.log(0.4)] * 3, "logp_new": [math.log(0.8)] * 3}
    false = {"step": 2, "tokens": [2], "advantages": 1, "logp_old": [math.log(0.005)], "logp_new": [math.log(0.01)]}
    for lines in ([right, false], [false, right]):
        assert sample(write_lines(tmp_path / "run.jsonl", lines))[0].step.tolist() == [2]


@pytest.mark.parametrize("at_once", [1, 1 << 16])
def test_those_with_the_most_errors_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("corral.lab.audit.tally._AT_ONCE", at_once)
    monkeypatch.setattr("corral.lab.audit.tally._MOST", 3)
    monkeypatch.setattr("corral.lab.audit.tally._LONGEST", 30)
    # A drift of one size on each token; the seeds 8, 9 and 11 drift furthest.
    lines = [drawn_line(2, step=seed, size=1.0 if seed in (8, 9, 11) else 0.01) for seed in range(12)]
    audit = audit_dump(write_lines(tmp_path / "run.jsonl", lines))
    assert [tokens.step.iloc[0] for _, tokens in audit.completions] == [8, 9, 11]
    assert [(length, len(tokens)) for length, tokens in audit.completions] == 3 * [(40, 30)]
