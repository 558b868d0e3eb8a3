"""The page of old and new imports lists every path of the table that keeps old paths working."""

import re
from pathlib import Path
from pkgutil import resolve_name

from corral._moved import MOVED

PAGE = Path(__file__).parents[2] / "docs" / "imports.md"
FACADES = {"llm", "task"}
"""Still modules themselves: only what lay inside them has moved."""


def test_the_page_has_the_table_of_moved_modules() -> None:
    rows = [f"| `corral.{old}{'.…' if old in FACADES else ''}` | `corral.{new}` |" for old, new in sorted(MOVED.items())]
    assert re.findall(r"^\| `.*", PAGE.read_text(), re.MULTILINE) == rows, "\n".join(["The table should be:", *rows])


IMPORT = re.compile(r"^ *from (corral[\w.]*) import ([\w, ]+)$", re.MULTILINE)


def test_what_pages_import_is_there() -> None:
    # Blocks that are for reading only are not run, so that a name that has gone would show nowhere else.
    missing = []
    for page in sorted(PAGE.parent.rglob("*.md")):
        for module, names in IMPORT.findall(page.read_text()):
            if module.startswith("corral.engines."):
                continue  # adapters import their engines, most of which are not installed
            for name in names.split(", "):
                try:
                    resolve_name(f"{module}:{name.partition(' as ')[0]}")
                except (ImportError, AttributeError) as error:
                    missing.append(f"{page.relative_to(PAGE.parent)}: {error}")
    assert missing == []
