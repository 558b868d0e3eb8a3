"""The site's pages, the public names and a release's papers are whole, without building any of them."""

import importlib
import re
from pathlib import Path

import pytest
import yaml

from corral.lab.cli import COMMANDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
FROM_ROOT = {"contributing.md", "changelog.md", "security.md", "conduct.md"}
"""Pages that scripts/docs_site.py makes of files in the root."""


class Loader(yaml.SafeLoader):
    """mkdocs.yml without its Python objects."""


Loader.add_multi_constructor("", lambda loader, suffix, node: None)


def leaves(nav: object) -> list[str]:
    """Pages of a navigation."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    assert not isinstance(parts, str)
    return [page for part in parts for page in leaves(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    pages = leaves(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    of_objectives = {page for page in written if page.startswith("objectives/") and page != "objectives/index.md"}
    assert sorted(pages) == sorted((written - of_objectives) | FROM_ROOT)


def documented(page: str) -> set[str]:
    """Names that a page of the reference describes."""
    paths = [path.split(".") for path in re.findall(r"^::: (\S+)$", (REFERENCE / page).read_text(), re.MULTILINE)]
    return {path[-1] for path in paths if not path[-2][0].isupper()}  # methods are no public names of a package


PACKAGES = {"llm.md": "corral.llm", "task.md": "corral.task", "robot.md": "corral.robot", "deployed.md": "corral.deployed"}
"""Pages of one package each; all others are of `corral` itself."""


@pytest.mark.parametrize("page", PACKAGES)
def test_the_reference_of_a_package_is_its_public_names(page: str) -> None:
    assert documented(page) == set(importlib.import_module(PACKAGES[page]).__all__)


def test_the_reference_has_every_public_name_of_the_package_itself() -> None:
    public = set(importlib.import_module("corral").__all__)
    others = [path.name for path in REFERENCE.glob("*.md") if path.name not in PACKAGES]
    written = set().union(*(documented(page) for page in others))
    assert written | (documented("deployed.md") & public) == public


def test_the_reference_has_every_command() -> None:
    assert re.findall(r"^\| `corral (\w+)`", (REFERENCE / "cli.md").read_text(), re.MULTILINE) == list(COMMANDS)


PAPERS = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
    ".github/pull_request_template.md",
]


@pytest.mark.parametrize("paper", PAPERS)
def test_links_of_a_paper_lead_somewhere(paper: str) -> None:
    text = (ROOT / paper).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", text) + re.findall(r"(?:src|srcset)=\"([^\"]+)", text):
        assert ((ROOT / paper).parent / target).exists(), f"{paper} links to {target}"


def test_workflows_call_targets_that_there_are() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called: list[str] = []
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text()
        called += [name for line in re.findall(r"run: make ([a-z -]+)", text) for name in line.split()]
        called += re.findall(r"^          - ([a-z-]+)$", text, re.MULTILINE)  # of `run: make ${{ matrix.target }}`
    assert {"test", "docs", "release-check", "test-verl"} <= set(called) <= targets


def test_the_changelog_has_short_entries_for_this_version() -> None:
    import corral

    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{re.escape(corral.__version__)}\] - \d{{4}}-\d\d-\d\d$", text, re.MULTILINE)
    assert text.index("## [Unreleased]") < text.index(f"## [{corral.__version__}]")
    entries = re.findall(r"^- .*(?:\n  .*)*", text, re.MULTILINE)
    assert max(len(entry.splitlines()) for entry in entries) <= 4
