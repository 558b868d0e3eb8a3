"""The page of old and new imports lists every path of the table that keeps old paths working."""

import re
from pathlib import Path

from corral._moved import MOVED

PAGE = Path(__file__).parents[2] / "docs" / "imports.md"
FACADES = {"llm", "task"}
"""Still modules themselves: only what lay inside them has moved."""


def test_the_page_has_the_table_of_moved_modules() -> None:
    rows = [f"| `corral.{old}{'.…' if old in FACADES else ''}` | `corral.{new}` |" for old, new in sorted(MOVED.items())]
    assert re.findall(r"^\| `.*", PAGE.read_text(), re.MULTILINE) == rows, "\n".join(["The table should be:", *rows])
