"""HTML that cannot be broken out of: elements are made by `tag`, and every text in them is escaped and made visible."""

import json
import re
from collections.abc import Callable
from html import escape
from typing import Any

HIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""Controls, invisible and bidirectional marks, lone surrogates: what makes a text look like another one. Joiners stay."""

NUMBER = re.compile(r"[−+]?[\d.,…\[\]()/ −%–—∞]+( of \d+\)?)?")
"""A cell that is read by its digits; a column of such cells stands right."""

VOID = {"meta", "input", "br", "link"}


class Safe(str):
    """HTML made here."""


def tag(name: str, /, *children: Any, **attributes: Any) -> Safe:
    """An element. Children that are not `Safe` are texts; `class_`, `for_` and `data_x` stand for class, for and data-x."""
    head = name
    for key, value in attributes.items():
        if value is not None and value is not False:
            key = key.rstrip("_").replace("_", "-")
            head += f" {key}" if value is True else f' {key}="{escape(visible(str(value)))}"'
    if name in VOID:
        return Safe(f"<{head}>")
    return Safe(f"<{head}>{join(*children)}</{name}>")


def join(*children: Any) -> Safe:
    """Texts and elements, one after the other; None is nothing."""
    return Safe(
        "".join(child if isinstance(child, Safe) else escape(visible(str(child))) for child in children if child is not None)
    )


def note(*children: Any, good: bool = False) -> Safe:
    """A paragraph that is not to be missed."""
    return tag("p", *children, class_="note good" if good else "note")


def visible(text: str) -> str:
    """The text with everything hidden in it written out, as ⟨U+202E⟩."""
    return HIDDEN.sub(_name, text.replace("\r\n", "\n"))


def shortened(text: str, most: int) -> str:
    """The beginning of a long text, and how much more there is."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)"


def table(rows: list[dict[str, Any]], columns: dict[str, str], show: Callable[[str, Any], Any], **attributes: Any) -> Safe:
    """Rows under the headings of `columns`; `show` makes a cell of a key and a row."""
    cells = [[show(key, row) for key in columns] for row in rows]
    numeric = [all(NUMBER.fullmatch(str(line[index])) for line in cells) for index in range(len(columns))]
    wordy = [any(len(str(line[index])) > 12 for line in cells) for index in range(len(columns))]
    kinds = ["number" if digits else "words" if words else None for digits, words in zip(numeric, wordy, strict=True)]
    head = tag(
        "tr", *(tag("th", heading, scope="col", class_=kind) for heading, kind in zip(columns.values(), kinds, strict=True))
    )
    body = [
        tag(
            "tr",
            tag("th", line[0], scope="row", class_=kinds[0] if kinds[0] == "words" else None),
            *(tag("td", cell, class_=kind) for cell, kind in zip(line[1:], kinds[1:], strict=True)),
        )
        for line in cells
    ]
    return tag(
        "div", tag("table", tag("thead", head), tag("tbody", *body)), class_="scroll", tabindex="0", role="region", **attributes
    )


def data_block(name: str, content: Any) -> Safe:
    """JSON that a page's script reads; without < > & it cannot end the element that it is in."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return Safe(f'<script type="application/json" id="{name}">{text}</script>')


def _name(match: re.Match[str]) -> str:
    return f"⟨U+{ord(match.group()):04X}⟩"
