"""HTML building blocks of a page: escaped text, template macros, and the frame of a self-contained page."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import corral
from corral.lab.report.looks import SHAPES, palette_css
from corral.lab.run.files import write_whole
from corral.lab.run.text import visible
from corral.validate import RunError

Safe = Markup
"""Class of HTML markup that is inserted into a page as it is. Every other text is escaped."""

LARGEST = 6_000_000
"""Largest size of an HTML page in bytes."""

MOST_ROWS = 1000
"""Largest number of rows in a table on a page. `corral report --export` writes all rows."""

_LONGEST_CELL = 1000
"""Largest number of characters in a table cell, so that one huge setting does not prevent a page."""

_NUMBER = re.compile(r"[−+]?[\d.,…\[\]()/ −%–—∞]+( of \d+\)?)?")
"""Pattern of numeric table cells. A column whose cells all match is aligned right."""


def shorten(text: str, most: int) -> str:
    """Cut a text to `most` characters, and append the number of characters left out."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)"


def _markup(value: Any) -> Safe:
    """Convert a value to HTML markup: markup is unchanged, None is empty, all else becomes escaped text."""
    return value if isinstance(value, Safe) else Safe("" if value is None else escape(visible(str(value))))


_TEMPLATES = Environment(
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
    finalize=_markup,
)
_TEMPLATES.filters["shorten"] = shorten


def macros(name: str, package: str = "corral.lab.report", **known: Any) -> Any:
    """Load the macros of an HTML template as functions that return markup. `known` adds names for the template."""
    return _TEMPLATES.overlay(loader=PackageLoader(package)).get_template(name, globals=known).module


_PARTS = macros("parts.html")


Row = dict[str, Any]

Columns = dict[str, str | Callable[[Row], object]]
"""Mapping from a table column's heading to the key of its values in a row, or to a function that makes a cell from a row."""


def cell(key: str, form: Callable[[Any], object] = str) -> Callable[[Row], object]:
    """Return a function that makes a table cell from a row: the value at `key`, formatted, or a dash for None."""
    return lambda row: "—" if row[key] is None else form(row[key])


def note(text: str, good: bool = False) -> Safe:
    """Build a highlighted paragraph of a page as HTML."""
    return Safe(_PARTS.note(text, good))


def table(rows: Sequence[Row], columns: Columns, label: str, data: str | None = None) -> Safe:
    """Build an HTML table from rows. Very long texts are cut.

    Args:
        data: name of the rows in the page's data, from which a reader saves them.
    """
    shows = [cell(column) if isinstance(column, str) else column for column in columns.values()]
    made = ([show(row) for show in shows] for row in rows[:MOST_ROWS])
    cells = [[one if isinstance(one, Safe) else shorten(str(one), _LONGEST_CELL) for one in line] for line in made]
    head = []
    for index, heading in enumerate(columns):
        column = [str(line[index]) for line in cells]
        # The first column names its rows, and stands left whatever it holds.
        digits, words = index > 0 and all(map(_NUMBER.fullmatch, column)), any(len(text) > 12 for text in column)
        head.append((shorten(heading, 200), "number" if digits else "words" if words else None))
    return Safe(_PARTS.table(head, cells, label, data, len(rows) - MOST_ROWS))


def page_json(content: Any) -> str:
    """Encode a page's data as JSON without < > &, so that the text cannot close its HTML element."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def sections(parts: Mapping[str, tuple[str, Safe]], scripted: Sequence[str] = ()) -> dict[str, Safe]:
    """Build the HTML of a page's sections, each with heading and content, by the section's name in links.

    Args:
        scripted: names of sections that are empty without a script, and hidden then.
    """
    return {name: _PARTS.section(name, heading, part, name in scripted) for name, (heading, part) in parts.items()}


def page_body(title: str, lead: str, parts: Mapping[str, tuple[str, Safe]], main: Safe, made_from: str) -> Safe:
    """Build the HTML body of a page: header with theme selector and links to every section, `main`, and footer."""
    links = [(name, heading) for name, (heading, _) in parts.items()]
    return Safe(_PARTS.body(title, lead, links, main, f"Made by corral {corral.__version__} from {made_from}."))


def document(
    title: str, inside: Safe, data: Mapping[str, Any], scripts: Sequence[str], styles: Sequence[str] = ("page.css",)
) -> str:
    """Build a complete self-contained HTML page around the body `inside`, with data, scripts and styles.

    Args:
        inside: what stands in the body.
        data: what the scripts read as `data`.
        scripts, styles: their names in static/, in order; each kind is joined into one.
    """
    static = files("corral.lab.report") / "static"
    script, style = ("\n".join((static / name).read_text("utf-8") for name in names) for names in (scripts, styles))
    style = palette_css() + style
    content = page_json({**data, "shapes": SHAPES})
    # Markup, since escaping would change scripts and styles, and their digests are of the files as they are.
    made = [Safe(text) for text in (content, style, script)]
    return str(_PARTS.document(title, inside, *made, content_policy(script, style), f"corral {corral.__version__}"))


def write_document(text: str, out: Path, too_large: str = "") -> int:
    """Write an HTML page atomically, and return its size in bytes. Raises RunError if the page is too large.

    Args:
        too_large: what to do about it if it has more than six megabytes, as a sentence.
    """
    content = text.encode(errors="replace")  # no lone surrogate is left in texts that were made visible
    if len(content) > LARGEST:
        raise RunError(f"the page would have {len(content) / 1e6:.1f} MB. {too_large}".strip())
    if out.is_dir():
        raise RunError(f"{out} is a folder, and the page is a file: name one in it, such as {out / 'page.html'}.")
    if not out.parent.is_dir():
        raise RunError(f"there is no folder {out.parent} to write {out.name} into: make it first, or choose another place.")
    write_whole(out, lambda beside: beside.write_bytes(content))
    return len(content)


def content_policy(script: str, style: str) -> str:
    """Build the Content-Security-Policy of a page that may run only this script and style and may not use the network."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style))
    script_hash, style_hash = (f"'sha256-{digest}'" for digest in digests)
    allowed = f"default-src 'none'; script-src {script_hash}; style-src {style_hash}; img-src data:"
    return f"{allowed}; base-uri 'none'; form-action 'none'"
