"""Terminal view of an audit: sentences, then tables of the rules' effects on tokens."""

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from corral.lab.audit.page import render_token
from corral.lab.audit.tally import AUDITED, Audit, Row, Summary
from corral.lab.audit.threshold import fewest_errors
from corral.lab.audit.words import RULES, number, percent, sentences
from corral.lab.run.text import visible
from corral.lab.run.view import PatientConsole

_SHORT = {"clipped": "clip", "dppo_binary": "DPPO", "dppo_topk": "DPPO-K", "troll": "TROLL"}
"""Rules → short names for narrow columns."""

_LISTED = 8
"""Largest number of blocked tokens listed in a terminal; the page has more."""


def show(audit: Audit, last: str, *, quiet: bool) -> None:
    """Print the sentences, the tables unless quiet, and the path of the page."""
    console, summary = PatientConsole(), audit.summary
    for sentence in sentences(summary, audit.info):
        console.print(Text(visible(sentence)), soft_wrap=not console.is_terminal)
    if not quiet and summary.measure == "whole":
        console.print(_verdict_table(summary))
        kinds = {"old p": summary.by_probability, "entropy": summary.by_entropy, "advantage": summary.by_sign}
        for title, rows in kinds.items():
            console.print(_bucket_table(title, rows))
        if summary.blocked_tokens:
            console.print(_token_table(audit))
    elif not quiet:
        console.print(_threshold_table(summary))
    console.print(Text(visible(last)), soft_wrap=True)


def _threshold_table(summary: Summary) -> Table:
    """Table of each rule at its published bound and at the bound with the fewest errors; the page has all bounds."""
    best = fewest_errors(summary.thresholds)
    table = _table("Which threshold?", "bound", "would block", "inside KL ball", "missed")
    for row in summary.thresholds:
        if row.default or best.get(row.family) is row:
            marks = f"{'●' if row.default else ''}{'*' if best.get(row.family) is row else ''}"
            bound = "" if row.family == AUDITED else f"{row.symbol} {row.bound:g} {marks:<2}"
            cells = [percent(value / row.kl.tokens) for value in (row.kl.blocked_inside, row.kl.passed_outward)]
            table.add_row(row.title, bound, percent(row.share), *cells)
    table.caption = "shares of all tokens; ● published, * fewest errors against the KL ball"
    return table


def _verdict_table(summary: Summary) -> Table:
    """Table of each rule's decisions compared with a trust region in true KL."""
    table = _table("", "would act on", "inside KL ball", "missed outside")
    for name, title in RULES.items():
        ball = summary.verdicts[name]["kl"]
        inside = percent(ball.blocked_inside / ball.blocked) if ball.blocked else "—"
        table.add_row(title, percent(summary.verdicts[name]["share"]), inside, percent(ball.passed_outward / ball.tokens))
    return table


def _bucket_table(title: str, rows: Sequence[Row]) -> Table:
    """Table of tokens, grouped by a property before the updates."""
    table = _table(title, "tokens", "mean TV", "99.9 %", *_SHORT.values())
    for row in rows:
        far = map(number, (row["tv"], row["tv_p999"]))
        table.add_row(row["name"], f"{row['tokens']:,}", *far, *(percent(row[name]) for name in _SHORT))
    return table


def _token_table(audit: Audit) -> Table:
    """Table of the most frequently blocked tokens."""
    table = _table("token", "seen", "would clip", "inside KL ball", "mean old p", "mean TV")
    for row in audit.summary.blocked_tokens[:_LISTED]:
        inside = percent(row["inside"] / row["blocked"])
        far = map(number, (row["p_old"], row["tv"]))
        text = Text(render_token(audit.text(row["token"]), 24))
        table.add_row(text, f"{row['seen']:,}", f"{row['blocked']:,}", inside, *far)
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table
