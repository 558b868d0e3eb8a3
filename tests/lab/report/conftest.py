"""A real headless Chromium, for the tests of pages."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CONTRAST = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8").partition("\n")[2]
"""A function for a page: what on it is hard to see."""

BEYOND = """[...document.querySelectorAll("figure, figure .body, figure svg text")].filter(node => {
  const box = node.getBoundingClientRect(), room = (node.closest("svg") || document.body).getBoundingClientRect();
  return node.scrollWidth > node.clientWidth + 1 && node.tagName !== "text" || box.left < room.left || box.right > room.right;
}).map(node => node.textContent)"""
"""On a phone: figures that scroll sideways, and words that are cut at the edge of a drawing."""

FLAGS = ["--disable-gpu", "--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A browser with a profile of its own."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-browser")
    if CHROMIUM is None:
        pytest.skip("needs chromium: make test-browser")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def open_file(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page; at the end there must be no message of any kind, and no request but for the file."""
    said: list[str] = []
    contexts = []

    def opened(path: Path, **context: Any) -> Any:
        contexts.append(browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **context}))
        page = contexts[-1].new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        allowed = (path.as_uri(), "data:,")
        page.on("request", lambda request: None if request.url in allowed else said.append(f"asked for {request.url}"))
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []


@pytest.fixture
def open_page(open_file: Callable[..., Any]) -> Callable[..., Any]:
    """Opens a page and waits until it is drawn."""

    def opened(path: Path, **context: Any) -> Any:
        page = open_file(path, **context)
        page.wait_for_selector("html[data-ready=yes]", timeout=20_000)
        return page

    return opened
