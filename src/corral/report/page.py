"""One HTML file that tells how runs went. It asks the network for nothing, and runs no script but its own.

Whoever has other things to tell makes a page of the same kind: `document` from a body of `corral.report.html` elements, data
for the script, and the names of scripts in static/, of which base.js comes first; then `write_document`.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import corral
from corral.report.content import Report
from corral.report.data import page_data
from corral.report.html import Safe, data_block, join, tag
from corral.report.sections import body
from corral.run.files import RunError, write_whole

SCRIPTS = ("base.js", "curves.js", "sweep.js", "tokens.js", "page.js")
"""In static/; each needs those before it."""

LARGEST = 6_000_000
"""Bytes of a page."""


def write_page(report: Report, out: Path) -> int:
    """The page, whole or not at all. Returns its size in bytes."""
    return write_document(page(report), out, f"Report fewer runs at a time: {len(report.runs)} were given.")


def page(report: Report) -> str:
    """The whole HTML."""
    return document(report.title, body(report), page_data(report), SCRIPTS)


def document(title: str, inside: Safe, data: Mapping[str, Any], scripts: Sequence[str]) -> str:
    """A page of its own, around this body.

    Args:
        inside: what stands in the body.
        data: what the scripts read as `data`.
        scripts: their names in static/, in order; they run as one.
    """
    style, *parts = (files("corral.report").joinpath("static", name).read_text("utf-8") for name in ("page.css", *scripts))
    script = "\n".join(parts)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        f"base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"corral {corral.__version__}"),
        tag("title", title),
        Safe(f"<style>{style}</style>"),
    )
    shell = tag("body", inside, data_block("data", data), Safe(f"<script>{script}</script>"))
    return f"<!doctype html>\n{join(Safe('<html lang=' + chr(34) + 'en' + chr(34) + '>'), head, shell)}</html>\n"


def write_document(text: str, out: Path, too_large: str) -> int:
    """A page, whole or not at all. Returns its size in bytes.

    Args:
        too_large: what to do about it if it has more than six megabytes, as a sentence.
    """
    content = text.encode()
    if len(content) > LARGEST:
        raise RunError(f"the page would have {len(content) / 1e6:.1f} MB. {too_large}")
    if not out.parent.is_dir():
        raise RunError(f"{out.parent} is no folder: make it first, or choose another --out.")
    write_whole(out, lambda beside: beside.write_bytes(content))
    return len(content)


def _hash(text: str) -> str:
    """What the policy calls an inline script or style by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
