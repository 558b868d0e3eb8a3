"""The page of logged tokens: what it says, any days that a dump may have had, and in a real browser."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from audit.dumps import LINE, audit_dump, drawn_line, write_lines
from report.conftest import BEYOND
from report.test_audit_page import charts_of

from corral.lab.audit.page import audit_page
from corral.lab.audit.rules import Rules

INFO = {"name": "a dump", "what": "compared", "rules": Rules().as_dict(), "settings": {"format": "corral"}}


def page_of(path: Path, lines: list[dict[str, Any]], texts: dict[int, str] | None = None, **info: Any) -> str:
    audit = audit_dump(write_lines(path / "run.jsonl", lines))
    return audit_page(replace(audit, info={**INFO, **info}, texts=texts or {}))


def run(steps: int = 6) -> list[dict[str, Any]]:
    return [drawn_line(seed, step=1 + seed // 4, length=60) for seed in range(4 * steps)]


def test_it_says_what_was_found(tmp_path: Path) -> None:
    page = page_of(tmp_path, run())
    assert "<h1>Audit of a dump</h1>" in page
    assert page.count("<section") == 10
    assert [len(charts) for charts in charts_of(page).values()] == [1, 2, 0, 2]
    assert "within 0.1 % of a value that occurs" in page
    assert "lower bounds of the true ones" in page
    rows = re.findall(r"<tr><th[^>]*>(?:<span[^>]*>)?DPPO, TV of the sampled token.*?</tr>", page)
    assert len(rows) == 7
    assert "δ = 0.2 ●" in rows[4]
    assert page.count("<strong>") == 10 + 5, "a bound of each rule that has the fewest errors; four cells and the headline"


def test_tables_are_those_of_any_audit(tmp_path: Path) -> None:
    """ρ = e^½ and e^−1 at Â = 1 and p_old = e⁻¹ and e^−½: the first is blocked, and outside KL ≤ .05."""
    line = {"tokens": [7, 8], "advantages": 1.0, "logp_old": [-1.0, -0.5], "logp_new": [-0.5, -1.5], "entropy": [0.3, 3.0]}
    page = page_of(tmp_path, [line], {7: " a"})
    blocked = page.partition('id="tokens"')[2].partition("</section>")[0]
    assert re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", blocked)[7:] == [
        "<code>␣a</code>",
        "7",
        "1",
        "1",
        "0 (0 %)",
        "0.37",
        "0.24",
    ]
    kinds = page.partition('id="kinds"')[2].partition("</section>")[0]
    assert re.findall(r'<th scope="row"[^>]*>(.*?)</th>', kinds) == [".1 … .5", "&gt; 2", "positive"]
    probability = page.partition('id="probability"')[2].partition("</section>")[0]
    row = re.findall(r"<td[^>]*>(.*?)</td>", probability.partition(".1 … .5</th>")[2].partition("</tr>")[0])
    assert row == ["1", "0.24", "0.24, 0.24", "0.12", "0.12, 0.12", "100 %", "100 %", "100 %", "100 %"]
    assert 'id="ratio"' not in page, "not every token of a dump is in memory"
    assert 'id="age"' not in page, "nobody logged when tokens were sampled"


def test_cells_of_a_dump_are_bounds(tmp_path: Path) -> None:
    """ρ = e^½ and e^2 at Â = 1, both blocked: binary KL .117 is outside .05, .001 inside as far as one token shows."""
    line = {"tokens": [1, 2], "advantages": 1.0, "logp_old": [-1.0, -9.0], "logp_new": [-0.5, -7.0]}
    page = page_of(tmp_path, [line])
    assert "<strong>≤ 50 %</strong> of the tokens that clipping would block were inside the KL ball" in page
    assert "hardly moved" not in page
    cells = re.findall(r'<div class="cell-(\w+) c\d"><b>[\w ]+</b><strong>([^<]+)</strong>', page)
    assert cells == [("false", "≤ 50 %"), ("right", "≥ 50 %"), ("passed", "≤ 0 %"), ("missed", "≥ 0 %")]
    page = page_of(tmp_path, [{**line, "logp_old": [-0.5, -0.02], "logp_new": [-0.4, -0.02]}])
    assert "<strong>≥ 0 %</strong> of the tokens would be missed: clipping would block none" in page


@pytest.mark.parametrize("day", ["nothing moved", "one token", "no advantage", "far", "one step", "a support"])
def test_odd_days(tmp_path: Path, day: str) -> None:
    lines = run()
    if day == "nothing moved":
        lines = [{**line, "logp_new": line["logp_old"], "logp_rollout": line["logp_old"]} for line in lines]
    if day == "one token":
        lines = [{"tokens": [1], "advantages": 1, "logp_old": [-1.0], "logp_new": [-1.0]}]
    if day == "no advantage":
        lines = [{**line, "advantages": 0} for line in lines]
    if day == "far":
        lines = [{**line, "logp_new": [-300.0] * 60} for line in lines]
    if day == "one step":
        lines = run(1)
    if day == "a support":
        top = {"top_ids": [[1]] * 4, "top_logp_old": [[-3.0]] * 4, "top_logp_new": [[-2.5]] * 4}
        lines = [{**LINE, **top}]
    page = page_of(tmp_path, lines)
    words = re.sub(r"<(style|script)[ >].*?</\1>", "", page, flags=re.DOTALL)
    assert not re.search(r"\bnan\b|NaN", words)
    assert page.count("<section") == (9 if day in ("one token", "a support") else 10), "only what there are numbers for"
    assert ("TROLL, projects" in page) == (day == "a support")


def test_the_first_alarm_is_marked(tmp_path: Path) -> None:
    lines = [drawn_line(step, length=200, step=step, size=0.05 if step < 4 else 4.0, logp_rollout=None) for step in range(1, 7)]
    page = page_of(tmp_path, lines)
    for chart in charts_of(page)["steps"]:
        assert chart["caption"].endswith("Dashed: step 4, where a collapse announces itself.")
        assert [bound["x"] for bound in chart["bounds"]] == [4]
    assert [chart["bounds"] for chart in charts_of(page_of(tmp_path, run()))["steps"]] == [[], []]


@pytest.mark.browser
def test_in_a_browser(open_page: Callable[..., Any], tmp_path: Path) -> None:
    hostile = "</script><script>window.owned = 1</script><img src=x onerror=window.owned=1>"
    html = tmp_path / "page.html"
    texts = dict.fromkeys(range(99), hostile)
    html.write_text(page_of(tmp_path, run(), texts, name=hostile, what=hostile, remarks=[hostile]))
    page = open_page(html)
    assert page.evaluate("window.owned") is None
    assert page.locator("img").count() == 0
    assert page.locator("#threshold .dot").count() > 20
    assert page.evaluate("getComputedStyle(document.querySelector('#threshold g .dot:not(.ring)')).fill") != "rgb(0, 0, 0)"
    paper = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(paper)
    page.check("input[name=theme][value=dark]")
    assert page.evaluate(paper) != before
    with page.expect_download() as download:
        page.get_by_role("button", name="SVG of Distance by step").click()
    saved = Path(download.value.path()).read_text()
    assert "1,440" in saved, "a saved figure says what was audited"
    assert "were inside the KL ball" in saved
    for width in (360, 390):
        phone = open_page(html, viewport={"width": width, "height": 740}, is_mobile=True)
        assert phone.evaluate("document.documentElement.scrollWidth") <= width
        assert phone.evaluate(BEYOND) == [], "charts fit and do not scroll"
