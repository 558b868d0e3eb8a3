"""The page of a report, as one HTML file: its sections, and the data that its scripts draw."""

from pathlib import Path

from corral.report.content import RunReport
from corral.report.html import document, write_document
from corral.report.page.body import body
from corral.report.page.data import page_data

_SCRIPTS = ("base.js", "curves.js", "sweep.js", "tokens.js", "page.js")
"""In static/; each needs those before it."""


def write_page(report: RunReport, out: Path) -> int:
    """The page, whole or not at all. Returns its size in bytes."""
    return write_document(page(report), out, f"Report fewer runs at a time: {len(report.runs)} were given.")


def page(report: RunReport) -> str:
    """The whole HTML."""
    return document(report.title, body(report), page_data(report), _SCRIPTS)
