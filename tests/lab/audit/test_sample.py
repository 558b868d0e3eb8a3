"""Completions that are kept to be looked at: those with the most errors, whole and in order."""

import math
from pathlib import Path

import numpy as np
import pytest
from audit.dumps import LINE, drawn_line, write_lines

from corral.lab.audit.dump import LoggedCompletion, find_dump
from corral.lab.audit.rules import Rules
from corral.lab.audit.stream import Columns, Sample, audit_dump, with_texts
from corral.lab.audit.summary import outside_ball, token_kinds
from corral.lab.audit.threshold import clip_family
from corral.lab.audit.tokens import join_completions


def sample(path: Path) -> Columns:
    return audit_dump(find_dump(path), Rules(), lambda _: None)[1]


def test_golden(tmp_path: Path) -> None:
    # ρ = e^½, 1, e⁻¹ with Â = 1: the first is beyond 1.2. Its binary KL is .11: outside .05, and blocked.
    columns = sample(write_lines(tmp_path / "run.jsonl", [{**LINE, "tokens": [4, 5, 6, 7], "mask": [0, 1, 1, 1]} | {
        "logp_old": [None, -1.0, -2.0, -0.5], "logp_new": [None, -0.5, -2.0, -1.5]}]))  # fmt: skip
    assert columns["token"].tolist() == [5, 6, 7]
    assert columns["position"].tolist() == [0, 1, 2], "from the first token that counts"
    assert columns["clipped"].tolist() == [True, False, False]
    kinds = token_kinds(columns, columns["clipped"], outside_ball(columns, Rules().as_dict(), "kl"))
    assert kinds.tolist() == ["right", "passed", "back"]
    assert with_texts(columns, None)["text"].tolist() == ["5 ", "6 ", "7 "]
    assert with_texts(columns, {5: "a", 6: "b", 7: "c"})["text"].tolist() == ["a", "b", "c"]


def test_a_block_that_is_right_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Step 1: .4 → .8 three times, blocked and outside. Step 2: .005 → .01 once, blocked though hardly moved.
    monkeypatch.setattr("corral.lab.audit.stream._MOST", 1)
    right = {"step": 1, "tokens": [1] * 3, "advantages": 1, "logp_old": [math.log(0.4)] * 3, "logp_new": [math.log(0.8)] * 3}
    false = {"step": 2, "tokens": [2], "advantages": 1, "logp_old": [math.log(0.005)], "logp_new": [math.log(0.01)]}
    for lines in ([right, false], [false, right]):
        assert sample(write_lines(tmp_path / "run.jsonl", lines))["update"].tolist() == [2]


@pytest.mark.parametrize("at_once", [1, 1 << 16])
def test_those_with_the_most_errors_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("corral.lab.audit.stream._AT_ONCE", at_once)
    monkeypatch.setattr("corral.lab.audit.stream._MOST", 3)
    monkeypatch.setattr("corral.lab.audit.stream._LONGEST", 30)
    # A drift of one size on each token; the seeds 8, 9 and 11 drift furthest.
    lines = [drawn_line(2, step=seed, size=1.0 if seed in (8, 9, 11) else 0.01) for seed in range(12)]
    columns = sample(write_lines(tmp_path / "run.jsonl", lines))
    assert np.unique(columns["update"]).tolist() == [8, 9, 11]
    assert columns["update"].tolist() == sorted(columns["update"].tolist())
    assert len(columns["token"]) == 3 * 30


def test_what_is_kept_does_not_keep_its_batch() -> None:
    completions = [LoggedCompletion(1, np.zeros(4, dtype=np.int64), *(np.full(4, x) for x in (1.0, -1.0, -0.5)))] * 3
    kept = Sample(0.05, clip_family(0.2, 0.2))
    kept.add(completions, join_completions(completions))
    assert all(column.base is None for _, _, columns in kept._kept for column in columns.values()), "copies, not views"
