"""HTML and SVG: escaped fragments, the macros of the templates beside this file, and the frame of a self-contained page."""

import base64
import hashlib
import json
import math
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
"""HTML made here; every other text is escaped before it stands on a page."""

LARGEST = 6_000_000
"""Bytes of a page."""

MOST_ROWS = 1000
"""Rows of a table on a page; `--export` writes all of them."""

_LONGEST_CELL = 1000
"""Characters of a cell of a table: one huge setting is no reason to show no page."""

_NUMBER = re.compile(r"[−+]?[\d.,…\[\]()/ −%–—∞]+( of \d+\)?)?")
"""A cell that is read by its digits; a column of such cells stands right."""

_VOID = {"meta", "input", "br", "link"}


def shorten(text: str, most: int) -> str:
    """The beginning of a long text, and how much more there is."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)"


def _markup(value: Any) -> Safe:
    """A value as it stands on a page: markup as it is, None as nothing, all else as visible, escaped text."""
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
    """The macros of a package's template, as functions that return markup; `known` holds more names that it may use."""
    return _TEMPLATES.overlay(loader=PackageLoader(package)).get_template(name, globals=known).module


_PARTS = macros("parts.html")


def tag(name: str, /, *children: Any, **attributes: Any) -> Safe:
    """An element. Children that are not `Safe` are texts; `class_`, `for_` and `data_x` stand for class, for and data-x."""
    head = f"<{name}{_attributes(attributes)}>"
    return Safe(head if name in _VOID else f"{head}{join(*children)}</{name}>")


def _attributes(given: Mapping[str, Any]) -> Safe:
    """Attributes of an element; None and False are left out."""
    words = ""
    for key, value in given.items():
        if value is not None and value is not False:
            key = key.rstrip("_").replace("_", "-")
            words += f" {key}" if value is True else f' {key}="{_markup(value)}"'
    return Safe(words)


def join(*children: Any) -> Safe:
    """Texts and elements, one after the other; None is nothing."""
    return Safe("".join(map(_markup, children)))


def note(*children: Any, good: bool = False) -> Safe:
    """A paragraph that is not to be missed."""
    return tag("p", *children, class_="note good" if good else "note")


def table(rows: list[dict[str, Any]], columns: dict[str, str], show: Callable[[str, Any], Any], **attributes: Any) -> Safe:
    """Rows under the headings of `columns`; `show` makes a cell of a key and a row. Endless texts are cut."""
    shown = ([show(key, row) for key in columns] for row in rows[:MOST_ROWS])
    cells = [[cell if isinstance(cell, Safe) else shorten(str(cell), _LONGEST_CELL) for cell in line] for line in shown]
    head = []
    for index, heading in enumerate(columns.values()):
        column = [str(line[index]) for line in cells]
        # The first column names its rows, and stands left whatever it holds.
        digits, words = index > 0 and all(map(_NUMBER.fullmatch, column)), any(len(cell) > 12 for cell in column)
        head.append((shorten(heading, 200), "number" if digits else "words" if words else None))
    return _PARTS.table(head, cells, _attributes(attributes), len(rows) - MOST_ROWS)


def data_block(name: str, content: Any) -> Safe:
    """JSON that a page's script reads."""
    return Safe(f'<script type="application/json" id="{name}">{page_json(content)}</script>')


def page_json(content: Any) -> str:
    """JSON as a page holds it: without < > & it cannot end the element that it is in."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def sections(parts: Mapping[str, tuple[str, Safe]], scripted: Sequence[str] = ()) -> dict[str, Safe]:
    """Parts of a page, each a heading and what is below it, as elements by the name that links go to.

    Args:
        scripted: those that are empty without a script, and not shown then.
    """
    return {
        name: tag("section", tag("h2", heading), content, id=name, class_="scripted" if name in scripted else None)
        for name, (heading, content) in parts.items()
    }


def page_body(
    title: str, lead: str, parts: Mapping[str, tuple[str, Safe]], main: Safe, footer: str, noscript: Safe | None = None
) -> Safe:
    """Header with the choice of a theme and a link to every part, what is in `main`, and a footer."""
    links = [(name, heading) for name, (heading, _) in parts.items()]
    return _PARTS.body(title, lead, links, main, f"Made by corral {corral.__version__} from {footer}.", noscript)


def document(
    title: str, inside: Safe, data: Mapping[str, Any], scripts: Sequence[str], styles: Sequence[str] = ("page.css",)
) -> str:
    """A page of its own, around this body.

    Args:
        inside: what stands in the body.
        data: what the scripts read as `data`.
        scripts, styles: their names in static/, in order; each kind is joined into one.
    """
    static = files("corral.lab.report") / "static"
    script, style = ("\n".join((static / name).read_text("utf-8") for name in names) for names in (scripts, styles))
    style = palette_css() + style
    policy = (
        f"default-src 'none'; script-src {csp_hash(script)}; style-src {csp_hash(style)}; img-src data:; "
        f"base-uri 'none'; form-action 'none'"
    )
    block = data_block("data", {**data, "shapes": SHAPES})
    # Markup, or what is hidden in scripts and styles would be written out: their digests are of the files as they are.
    return str(_PARTS.document(title, inside, block, Safe(style), Safe(script), policy, f"corral {corral.__version__}"))


def write_document(text: str, out: Path, too_large: str = "") -> int:
    """A page, whole or not at all. Returns its size in bytes.

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


def csp_hash(text: str) -> str:
    """The digest by which a Content-Security-Policy allows an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


WIDE, NARROW = 820, 360
"""Widths of the two drawings, of which a page shows the one that fits."""

Draw = Callable[[int], tuple[Sequence[Safe], int]]
"""A width → what is drawn, and how high it is."""


def drawn_figure(title: str, caption: str, draw: Draw, legend: Safe | None = None, **attributes: str) -> Safe:
    """A figure with both drawings; a page's script adds what reads and saves it."""
    drawings = []
    for width, kind in ((WIDE, "wide"), (NARROW, "narrow")):
        parts, height = draw(width)
        drawings.append((width, height, kind, join(*parts)))
    return _PARTS.figure(title, caption, legend, drawings, _attributes(attributes))


def text(content: str, x: float, y: float, anchor: str = "start", **more: str) -> Safe:
    """Words at a place."""
    return tag("text", content, x=at(x), y=at(y), text_anchor=anchor, **more)


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Safe:
    """A line from one point to another; `kind` is its class."""
    return tag("line", x1=at(x1), y1=at(y1), x2=at(x2), y2=at(y2), class_=kind)


def at(value: float) -> str:
    """A coordinate, with one decimal."""
    return f"{value:.1f}"


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round ticks in [low, high]."""
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
