"""Hooks of mkdocs: what the documentation site needs beyond plain Markdown, so that docs/ reads the same on a code host.

- CONTRIBUTING, CHANGELOG, SECURITY and the code of conduct become pages of the site.
- Links out of docs/ lead to those pages, or to the repository that the variable REPOSITORY names; without one their text stays.
- ```python no-run is ```python; formulas become MathML when the site is built, so that no script and no font is fetched.
- In tables a number and its unit stay on one line, and so do the ends of an interval.
- Sections of docstrings may follow each other without an empty line.
"""

import os
import posixpath
import re
from html import unescape
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
FROM_ROOT = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "README.md": "index.md",
}
"""Files of the repository's root, and what they are called on the site; README's place is the home page."""

FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<image>!?)\[(?P<label>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
SECTION = re.compile(r"\n(Args|Returns|Raises|Ref):\n")
CELL = re.compile(r"<td[^>]*>(?:(?!<code).)*?</td>", re.DOTALL)
INTERVAL = re.compile(r"\((−?[\d.,]+) … (−?[\d.,]+)\)")
UNIT = re.compile(r"(?<=\d) (?=(?:ms|s|h|MiB|GiB|MB|GB|GEMMs?|%)(?!\w))")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_config(config: Any) -> Any:
    """A page per objective in the navigation: one that is added needs no line there."""
    pages = sorted(path.stem for path in (ROOT / "docs" / "objectives").glob("*.md") if path.stem != "index")
    section = next(entry["Objectives"] for entry in config.nav if "Objectives" in entry)
    section += [{name: f"objectives/{name}.md"} for name in pages]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that come from the repository's root."""
    for source, target in FROM_ROOT.items():
        if source != "README.md":
            files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that lead somewhere on the site, and code blocks that its highlighter knows."""
    here = page.file.src_uri
    at_root = next((source for source, target in FROM_ROOT.items() if target == here and source != "README.md"), None)
    folder = "" if at_root else posixpath.join("docs", posixpath.dirname(here))
    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(lambda found: _relink(found, folder, here), text) for text in parts[::2]]
    parts[1::2] = [code.replace("```python no-run", "```python", 1) for code in parts[1::2]]
    return "".join(parts)


def on_page_content(html: str, **_: Any) -> str:
    """TeX → MathML; no line ends between a number in a table and its unit, or within an interval."""
    space = "\N{NO-BREAK SPACE}"
    return CELL.sub(lambda cell: INTERVAL.sub(rf"(\1{space}…{space}\2)", UNIT.sub(space, cell[0])), FORMULA.sub(_mathml, html))


class SpacedSections(griffe.Extension):
    """An empty line before each section of a docstring, as the parser wants it; "Ref" becomes a note."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            spaced = SECTION.sub(lambda found: f"\n\n{found[1]}:\n", obj.docstring.value)
            obj.docstring.value = spaced.replace("\n\nRef:\n", "\n\nReference:\n")


def _relink(found: re.Match[str], folder: str, here: str) -> str:
    target, _, anchor = found["target"].partition("#")
    if not target or "://" in target or target.startswith("mailto:"):
        return found[0]
    path = posixpath.normpath(posixpath.join(folder, target))
    place = FROM_ROOT.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
    if place is not None:
        start = posixpath.dirname(here)
        whole = posixpath.relpath(place, start or ".") + (f"#{anchor}" if anchor else "")
        return f"{found['image']}[{found['label']}]({whole})"
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"{here} links to {found['target']}, and there is no {path}")
    repository = os.environ.get("REPOSITORY", "")
    return f"[{found['label']}]({repository}/blob/main/{path})" if repository else found["label"]


def _mathml(found: re.Match[str]) -> str:
    formula = unescape(found[3]).strip().replace(r"\arg\min", r"\operatorname{argmin}")
    written = convert(formula, display="block" if found[2] == "[" else "inline")
    if "\\" in written:
        raise ValueError(f"latex2mathml left a command of `{formula}` as it was. Write it with others.")
    return written
