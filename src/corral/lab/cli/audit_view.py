"""Terminal view of an audit: sentences, then the page's tables with fewer columns."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from corral.lab.audit.tally import Audit, Row
from corral.lab.audit.words import blocked_rows, bucket_rows, sentences, threshold_row, verdict_rows
from corral.lab.run.text import visible
from corral.lab.run.view import PatientConsole

_LISTED = 8
"""Largest number of blocked tokens listed in a terminal; the page has more."""


def show(audit: Audit, last: str, *, quiet: bool) -> None:
    """Print the sentences, the tables unless quiet, and the path of the page."""
    console = PatientConsole()
    for sentence in sentences(audit):
        console.print(Text(visible(sentence)), soft_wrap=not console.is_terminal)
    if not quiet and audit.whole:
        _print_table(console, verdict_rows(audit, "kl"))
        for title, rows in {"old p": audit.by_probability, "entropy": audit.by_entropy, "advantage": audit.by_sign}.items():
            _print_table(console, bucket_rows(title, rows, audit), "99.9 %, largest TV", "mean KL", "99.9 %, largest KL")
        _print_table(console, blocked_rows(audit)[:_LISTED], "Id")
    elif not quiet:
        best = audit.best
        rows = [
            {**(row := threshold_row(one, audit)), "Bound": f"{row['Bound']}{' *' if one in best else ''}"}
            for one in audit.thresholds
            if one.default or one in best
        ]
        _print_table(
            console, rows, *[*rows[0]][-2:], caption="shares of all tokens; ● published, * fewest errors against the KL ball"
        )
    console.print(Text(visible(last)), soft_wrap=True)


def _print_table(console: Console, rows: Sequence[Row], *left_out: str, caption: str | None = None) -> None:
    """Print rows of texts as a table without some of their columns."""
    table = Table(box=box.SIMPLE_HEAD, caption=caption, pad_edge=False)
    headings = [heading for heading in rows[0] if heading not in left_out] if rows else []
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", no_wrap=place < 2)
    for row in rows:
        table.add_row(*(Text(row[heading]) for heading in headings))
    if rows:
        console.print(table)
