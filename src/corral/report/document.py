"""A page as one HTML file. It asks the network for nothing, and runs no script but its own."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import corral
from corral.report.html import Safe, data_block, tag
from corral.run.files import RunError, write_whole

LARGEST = 6_000_000
"""Bytes of a page."""


def document(
    title: str, inside: Safe, data: Mapping[str, Any], scripts: Sequence[str], styles: Sequence[str] = ("page.css",)
) -> str:
    """A page of its own, around this body.

    Args:
        inside: what stands in the body.
        data: what the scripts read as `data`.
        scripts, styles: their names in static/, in order; each kind is joined into one.
    """
    static = files("corral.report") / "static"
    script, style = ("\n".join((static / name).read_text("utf-8") for name in names) for names in (scripts, styles))
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
    return f'<!doctype html>\n<html lang="en">{head}{shell}</html>\n'


def write_document(text: str, out: Path, too_large: str = "") -> int:
    """A page, whole or not at all. Returns its size in bytes.

    Args:
        too_large: what to do about it if it has more than six megabytes, as a sentence.
    """
    content = text.encode()
    if len(content) > LARGEST:
        raise RunError(f"the page would have {len(content) / 1e6:.1f} MB. {too_large}".strip())
    if out.is_dir():
        raise RunError(f"{out} is a folder, and the page is a file: name one in it, such as {out / 'page.html'}.")
    if not out.parent.is_dir():
        raise RunError(f"there is no folder {out.parent} to write {out.name} into: make it first, or choose another place.")
    write_whole(out, lambda beside: beside.write_bytes(content))
    return len(content)


def _hash(text: str) -> str:
    """What the policy calls an inline script or style by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
