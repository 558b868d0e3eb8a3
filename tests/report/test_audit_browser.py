"""The page of an audit in a real browser: nothing is fetched, nothing hostile runs, it fits a phone, light and dark."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from report.test_audit_page import HOSTILE, completion, drawn, page_of

pytestmark = pytest.mark.browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--disable-gpu", "--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-browser")
    if CHROMIUM is None:
        pytest.skip("needs chromium: make test-browser")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens a page; at the end there must be no message of any kind, and no request but for the file."""
    said: list[str] = []
    contexts = []

    def opened(html: str, **context: Any) -> Any:
        path = tmp_path / "page.html"
        path.write_text(html)
        contexts.append(browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **context}))
        page = contexts[-1].new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: None if request.url == path.as_uri() else said.append(f"asked for {request.url}"))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=yes]", timeout=20_000)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []


def test_hostile_text_does_not_run(open_page: Any, tmp_path: Path) -> None:
    page = open_page(page_of(tmp_path / "audit", {1: [completion(HOSTILE)], 2: [completion(HOSTILE)]}, {"model": HOSTILE}))
    assert page.evaluate("window.owned") is None
    assert page.locator("img").count() == 0
    assert "<script>window.owned = 1</script>" in page.inner_text("#completions")
    assert "⟨U+202E⟩" in page.inner_text("h1") + page.inner_text("#completions")


def test_it_is_drawn_in_both_themes_and_on_a_phone(open_page: Any, tmp_path: Path) -> None:
    rows = {update: [drawn(60, seed=update + index) for index in range(4)] for update in (2, 4, 6)}
    html = page_of(tmp_path / "audit", rows)
    page = open_page(html)
    assert page.locator("figure svg").count() == 3
    assert page.locator("#ratio rect.cell").count() > 10
    assert page.locator("#probability rect.bar").count() > 3
    colour = "getComputedStyle(document.querySelector('#probability rect.bar')).fill"
    paper = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(colour) != "rgb(0, 0, 0)", "the style is let in"
    before = page.evaluate(paper)
    page.check("input[name=theme][value=dark]")
    assert page.evaluate(paper) != before
    phone = open_page(html, viewport={"width": 360, "height": 740}, is_mobile=True)
    assert phone.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") < 2000
