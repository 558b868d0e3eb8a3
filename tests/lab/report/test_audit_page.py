"""The page of an audit: what it says, what it may not do, and any days that a run may have had."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from audit.four_tokens import RULES, completion

from corral.lab.audit.folder import AuditFolder, read_audit
from corral.lab.audit.measure import measure
from corral.lab.audit.page import audit_page, write_page
from corral.lab.audit.rules import Rules
from corral.lab.audit.tally import audit_table
from corral.lab.audit.words import render_token
from corral.objective import make_objective
from corral.validate import RunError

HOSTILE = "</script><script>window.owned = 1</script><img src=x onerror=window.owned=1>\"'\u202egnp"


def page_of(
    path: Path, completions: dict[int, list[pd.DataFrame]], info: dict[str, Any] | None = None, live: float | None = None
) -> str:
    folder = AuditFolder(path)
    folder.begin({"what": "compared", "model": "m", "rules": RULES.as_dict(), **(info or {})})
    for update, rows in completions.items():
        folder.add(update, rows)
    folder.close()
    return audit_page(audit_table(*read_audit(path)), live)


def charts_of(page: str) -> dict[str, list[dict[str, Any]]]:
    """The charts in a page's data, by the section that they are drawn in."""
    found: dict[str, list[dict[str, Any]]] = json.loads(re.findall(r'id="data">(.*?)</script>', page)[0])["charts"]
    return found


def drawn(count: int, vocabulary: int = 12, seed: int = 0, size: float = 0.6, rules: Rules = RULES) -> pd.DataFrame:
    """A completion of random policies."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, vocabulary, generator=generator)
    moved = logits + size * torch.randn(count, vocabulary, generator=generator)
    tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    advantages = torch.full((count,), float(seed % 3 - 1))
    columns = measure(tokens, logits.log_softmax(-1), moved.log_softmax(-1), advantages, rules)
    rows = {"token": tokens, "text": [f"w{token}" for token in tokens.tolist()], "position": torch.arange(count)}
    return pd.DataFrame({name: np.asarray(column) for name, column in {**columns, **rows, "advantage": advantages}.items()})


def test_it_says_what_was_found(tmp_path: Path) -> None:
    page = page_of(tmp_path / "audit", {1: [completion("thing")]}, {"model": "a model"})
    assert "<h1>Audit of a model</h1>" in page
    assert "50 % of these are inside the KL ball of 0.05" in page
    assert '<td class="number">1 (50 %)</td>' in page
    assert page.count("<section") == 10
    assert "There is one audited update" in page


def test_distances_have_medians_and_estimates(tmp_path: Path) -> None:
    page = page_of(tmp_path / "audit", {1: [completion("thing")]})
    far = page.partition('id="distances"')[2].partition("</section>")[0]
    assert re.findall(r'<th scope="row"[^>]*>(.*?)</th>', far) == [
        *("true KL(new‖old), nats", "true total variation", "|k1|: |log old − log new|", "k2: ½ (log ratio)²"),
        "k3: ratio − 1 − log ratio",
    ]
    # KL .00195, .135, .136, .136: the median is at rank ⌈1.5⌉, the third.
    assert re.findall(r"<td[^>]*>(.*?)</td>", far)[:5] == ["0.1", "0.14", "0.14", "0.14", "0.14"]


def test_what_clipping_did_stands_once_and_before_what_it_would_do(tmp_path: Path) -> None:
    page = page_of(tmp_path / "audit", {1: [completion()]}, {"kind": "trainer", "rules": {**RULES.as_dict(), "own": True}})
    did, would = "What clipping did in the updates that were made was not recorded.", "On one more update:"
    assert page.count(did) == page.count(would) == 1
    assert page.index(did) < page.index(would) < page.index("had hardly moved")


def test_one_of_a_thing_is_not_several(tmp_path: Path) -> None:
    page = page_of(tmp_path / "audit", {1: [completion("tok")]})
    assert "<span>1 token: blocked, though" in page
    assert not re.search(r"\b1 tokens", page)


def test_the_story_is_four_cells_and_one_number(tmp_path: Path) -> None:
    """One token of each kind but `passed`: half of the blocked ones had hardly moved, one is missed, one on its way back."""
    page = page_of(tmp_path / "audit", {1: [completion("tok")]})
    assert "<strong>50 %</strong> of the tokens that clipping would block had hardly moved" in page
    cells = re.findall(r'<div class="cell-(\w+) c\d"><b>[\w ]+</b><strong>([\d. %]+)</strong><span>(\d) tokens?:', page)
    assert cells == [("false", "25 %", "1"), ("right", "25 %", "1"), ("passed", "0 %", "0"), ("missed", "25 %", "1")]
    assert "25 % more are outside, on their way back" in page


def test_the_clip_range_is_in_the_middle(tmp_path: Path) -> None:
    """In the logarithm of the ratio: ln .8 … ln 1.2, of a window of 99.5 % of the tokens or twelve times the range."""
    page = page_of(tmp_path / "audit", {1: [drawn(60, seed=1, size=3.0)]})
    (chart,) = charts_of(page)["ratio"]
    (low, high), edges = chart["x"]["ends"], [bound["x"] for bound in chart["bounds"] if "x" in bound]
    assert edges == pytest.approx([0.8, 1.2])
    assert math.log(low * high) == pytest.approx(math.log(0.8 * 1.2)), "the edges are equally far from the ends"
    assert 0.05 < math.log(1.2 / 0.8) / math.log(high / low) < 0.4
    assert chart["x"]["ticks"][:2] == pytest.approx([0.8, 1.2]), "the edges of the range have their numbers"


def test_the_heat_map_marks_errors(tmp_path: Path) -> None:
    page = page_of(tmp_path / "audit", {1: [completion("tok")]})
    kinds = re.findall(r'<span class="token heat\d (\w+)" title="([^"]*)">tok</span>', page)
    assert [kind for kind, _ in kinds] == ["false", "missed", "right", "back"]
    assert kinds[0][1].startswith("blocked though inside the KL ball: p 0.005 → 0.01, KL 0.002")


def test_tokens_left_out_leave_a_gap(tmp_path: Path) -> None:
    page = page_of(tmp_path / "audit", {1: [completion("t", position=torch.tensor([2, 3, 7, 8]))]})
    assert page.count('class="gap"') == 2


@pytest.mark.parametrize("where", ["text", "model", "what"])
def test_hostile_text_stays_text(tmp_path: Path, where: str) -> None:
    info = {where: HOSTILE} if where != "text" else {}
    page = page_of(tmp_path / "audit", {1: [completion(HOSTILE if where == "text" else "t")]}, info)
    assert page.count("<script") == 2, "its data, of which there are none, and its own"
    assert "<img" not in page
    assert "\u202e" not in page
    assert "onerror=window" in page, "it is shown"


def test_the_policy_lets_in_nothing_but_its_own(tmp_path: Path) -> None:
    page = page_of(tmp_path / "audit", {1: [completion()]})
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src &#x27;none&#x27;; script-src &#x27;sha256-")
    assert "unsafe" not in policy[1]
    assert not re.search(r"\sstyle=", page)
    assert not re.search(r"(src|href)=\"(?!#)", page)


@pytest.mark.parametrize(
    "rules",
    [
        Rules(),
        Rules(clip=make_objective("gspo")),
        Rules(clip=make_objective("gmpo"), own=True),
        Rules(clip=make_objective("dual_clip"), own=True),
        Rules(clip=make_objective("ppo_clip", clip_low=1.0, clip_high=5.0), tv_bound=3.0),
    ],
    ids=["ppo_clip", "gspo", "gmpo", "dual_clip", "wide"],
)
def test_every_kind_of_clipping_has_a_page(tmp_path: Path, rules: Rules) -> None:
    completions = {update: [drawn(40, seed=update + index, rules=rules) for index in range(3)] for update in (4, 8, 12)}
    page = page_of(tmp_path / "audit", completions, {"rules": rules.as_dict()})
    assert {name: len(charts) for name, charts in charts_of(page).items()} == {
        "threshold": 1, "probability": 2, "ratio": 1, "steps": 1
    }  # fmt: skip
    assert "NaN" not in page
    assert "nan" not in re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)


@pytest.mark.parametrize("day", ["nothing moved", "one token", "infinitely far", "no advantage"])
def test_odd_days(tmp_path: Path, day: str) -> None:
    rows = drawn(1 if day == "one token" else 30, size=0.0 if day == "nothing moved" else 0.6, seed=2)
    if day == "infinitely far":
        rows["kl"] = np.inf
    if day == "no advantage":
        rows["advantage"] = 0.0
    page = page_of(tmp_path / "audit", {1: [rows], 2: [rows]})
    assert page.count("<section") == 10
    assert ("∞" in re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)) == (day == "infinitely far")


def test_a_large_audit_fits(tmp_path: Path) -> None:
    rows = drawn(2000, vocabulary=60)
    rows["text"] = ["x" * 300] * 2000
    folder = AuditFolder(tmp_path / "audit")
    folder.begin({"rules": RULES.as_dict()})
    for update in range(20):
        folder.add(update + 1, [rows, rows])
    folder.close()
    assert write_page(audit_table(*read_audit(tmp_path / "audit")), tmp_path / "page.html") < 6_000_000


def test_a_page_needs_a_folder(tmp_path: Path) -> None:
    folder = AuditFolder(tmp_path / "audit")
    folder.begin({"rules": RULES.as_dict()})
    folder.add(1, [completion()])
    folder.close()
    audit = audit_table(*read_audit(tmp_path / "audit"))
    with pytest.raises(RunError, match="make it first, or choose another place"):
        write_page(audit, tmp_path / "no" / "page.html")


def test_tokens_can_be_read() -> None:
    assert render_token(" \n") == "␣⏎"
    assert render_token(" a b\tc ") == "␣a b⇥c␣"
    assert render_token("  ") == "␣␣"
    assert render_token("") == "∅"
    assert render_token("\u202eabc") == "⟨U+202E⟩abc"
