"""The page of an audit in a real browser: nothing is fetched, nothing hostile runs, it fits a phone, light and dark."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report.conftest import BEYOND
from report.test_audit_page import HOSTILE, completion, drawn, page_of

pytestmark = pytest.mark.browser


@pytest.fixture
def open_audit(open_page: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Opens the page of an audit."""

    def opened(html: str, **context: Any) -> Any:
        path = tmp_path / "page.html"
        path.write_text(html)
        return open_page(path, **context)

    return opened


def test_hostile_text_does_not_run(open_audit: Any, tmp_path: Path) -> None:
    page = open_audit(page_of(tmp_path / "audit", {1: [completion(HOSTILE)], 2: [completion(HOSTILE)]}, {"model": HOSTILE}))
    assert page.evaluate("window.owned") is None
    assert page.locator("img").count() == 0
    assert "<script>window.owned = 1</script>" in page.inner_text("#completions")
    assert "⟨U+202E⟩" in page.inner_text("h1") + page.inner_text("#completions")


def test_it_is_drawn_in_both_themes_and_on_a_phone(open_audit: Any, tmp_path: Path) -> None:
    rows = {update: [drawn(60, seed=update + index) for index in range(4)] for update in (2, 4, 6)}
    html = page_of(tmp_path / "audit", rows)
    page = open_audit(html)
    assert page.locator("figure svg[role=img]:visible").count() == 5
    assert page.locator("#ratio rect.cell").count() > 10
    assert page.locator("#probability path.dot:visible").count() > 3
    colour = "getComputedStyle(document.querySelector('#probability path.dot')).fill"
    paper = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(colour) != "rgb(0, 0, 0)", "the style is let in"
    before = page.evaluate(paper)
    page.check("input[name=theme][value=dark]")
    assert page.evaluate(paper) != before
    page.locator("#ratio .body > svg").focus()
    page.keyboard.press("End")
    assert re.search(r"\d (passed|blocked)", page.locator("#ratio .tip").inner_text())
    with page.expect_download() as download:
        page.get_by_role("button", name="SVG of What clipping sees").click()
    saved = Path(download.value.path()).read_text()
    assert "m · 720 tokens, compared" in saved, "a saved figure says what was audited"
    assert "of the tokens that clipping would block had hardly moved" in saved
    assert "Tokens beyond the edges" in saved
    phone = open_audit(html, viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    assert phone.evaluate("document.documentElement.scrollWidth") <= 360
    assert phone.evaluate(BEYOND) == [], "figures fit and do not scroll"
    letters = "[...document.querySelectorAll('#ratio svg text')].map(node => node.getBoundingClientRect().height)"
    assert min(phone.evaluate(letters)) > 10, "and can be read there"
    style = "getComputedStyle(document.querySelector('.cell-missed')).borderTopStyle"
    assert page.evaluate(style) == "dashed", "errors are told apart by more than their colours"
    page.set_viewport_size({"width": 700, "height": 900})
    page.emulate_media(media="print")
    tables = "[...document.querySelectorAll('.scroll')].filter(node => node.firstChild.offsetWidth > node.clientWidth).length"
    assert page.evaluate(tables) == 0, "on paper tables keep their columns"
    heads = "[...document.querySelectorAll('thead th')].map(node => getComputedStyle(node).overflowWrap)"
    assert set(page.evaluate(heads)) == {"break-word"}, "and headings their words"


def test_a_live_page_is_read_again_unless_told_not_to(open_page: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page_of(tmp_path / "audit", {1: [completion()]}, live=10.0))
    page = open_page(path)
    page.clock.install()
    page.reload()
    page.get_by_label("Reload every 10 s").uncheck()
    path.write_text(page_of(tmp_path / "later", {1: [completion()], 2: [completion()]}, live=10.0))
    page.clock.run_for(60_000)
    assert page.locator("header .lead").inner_text().startswith("4 tokens")
    page.get_by_label("Reload every 10 s").check()
    with page.expect_navigation():
        page.clock.run_for(10_000)
    assert page.locator("header .lead").inner_text().startswith("8 tokens")
