"""The HTML page of an audit."""

import math
import time
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import corral
from corral.lab.audit import words
from corral.lab.audit.figures import REGIONS, charts
from corral.lab.audit.tally import ACCURACY, Audit, Row
from corral.lab.audit.tokens import kinds
from corral.lab.audit.words import number, percent
from corral.lab.report import html
from corral.lab.report.html import Columns, Safe, cell, note, shorten, table
from corral.lab.run.text import count, visible

_PARTS = html.macros(
    "audit.html", "corral.lab.audit", number=number, percent=percent, count=count, regions=REGIONS, measures=words.MEASURES
)


def write_page(audit: Audit, out: Path, live: float | None = None) -> int:
    """Write the HTML page of an audit atomically and return the page's size in bytes."""
    return html.write_document(audit_page(audit, live), out, "This should not happen: please report it.")


def audit_page(audit: Audit, live: float | None = None) -> str:
    """Build an audit's complete HTML page. `live` is the interval in seconds at which the page is written and loaded anew."""
    info, whole = audit.info, audit.whole
    name = str(info.get("name") or info.get("model") or "a run")
    title, said, did = f"Audit of {shorten(name, 80)}", words.sentences(audit), words.updates_sentence(info)
    share, of = headline(audit)
    others, now = [sentence for sentence in said[1:] if sentence != did], time.strftime("%H:%M:%S")
    balls = {"kl": audit.kl_bound, "tv": audit.tv_bound} if whole else {}
    verdicts = [
        (heading := f"{ball.upper()} ≤ {number(bound)}", _table(words.verdict_rows(audit, ball), heading))
        for ball, bound in balls.items()
    ]
    drawn = charts(audit)
    by_probability, by_entropy, by_sign = (
        _table(words.bucket_rows(heading, rows, audit), heading)
        for heading, rows in (
            ("Old probability", audit.by_probability), ("Entropy, nats", audit.by_entropy), ("Advantage", audit.by_sign)
        )
    )  # fmt: skip
    few = note(f"There is one {'audited update' if whole else 'step'}, so nothing to draw over time.")
    parts: dict[str, tuple[str, Any]] = {
        "findings": ("Findings", _PARTS.findings(audit, live, now, did, others, (share, of), verdicts)),
        "threshold": ("Which threshold?", _PARTS.thresholds(whole, _threshold_table(audit))),
        "probability": ("By old probability", _PARTS.charts("probability") + _PARTS.folded("In numbers", by_probability)),
        "ratio": ("Ratio against true distance", _PARTS.charts("ratio") if drawn["ratio"] else None),
        "tokens": ("Tokens that clipping would block most", _blocked_table(audit)),
        "kinds": ("By entropy and by advantage", by_entropy + by_sign),
        "distances": ("How far", _PARTS.distances(words.MEASURES[audit.measure], _distance_table(audit))),
        "steps": ("Over training", _PARTS.charts("steps") if drawn["steps"] else few),
        "age": ("By staleness", _age_table(audit.by_age) if audit.by_age else None),
        "completions": ("Completions", _completions(audit)),
        "measured": ("How this was measured", _method(audit)),
    }
    found = {key: part for key, part in parts.items() if part[1] is not None}
    about = f"{shorten(name, 60)} · {count(audit.tokens, 'token')}, {info.get('what') or 'compared'}"
    about = visible(shorten(f"{about} · corral {corral.__version__}", 240))  # what a figure that stands alone says
    data = {"about": about, "headline": f"{share} of {of}", "charts": drawn, **({} if live is None else {"live": live})}
    body = html.page_body(title, said[0], found, _PARTS.main(html.sections(found).values()), count(audit.tokens, "token"))
    scripts = ["base.js", "audit.js", *([] if live is None else ["live.js"])]
    return html.document(title, body, data, scripts, ["page.css", "audit.css"])


def headline(audit: Audit) -> tuple[str, str]:
    """Return the headline of an audit as (share, words), on blocked tokens that hardly moved, or on missed tokens.

    It is on missed tokens if none is blocked. If divergences are lower bounds, its share is an upper bound on blocked tokens
    inside the ball, or a lower bound on missed tokens.
    """
    ball = audit.verdicts["clipped"]["kl"]
    if ball.blocked:
        moved = "had hardly moved" if audit.whole else "were inside the KL ball"
        return f"{'' if audit.whole else '≤ '}{percent(ball.inside)}", f"the tokens that clipping would block {moved}"
    return f"{'' if audit.whole else '≥ '}{percent(ball.missed)}", "the tokens would be missed: clipping would block none"


def _table(rows: Sequence[Row], label: str) -> Safe:
    """Build an HTML table from rows {heading: text}. The result is empty if there are no rows."""
    return table(rows, {heading: itemgetter(heading) for heading in rows[0]}, label) if rows else Safe("")


def _distance_table(audit: Audit) -> Safe:
    """Build the table of distances between old and new policy: mean, percentiles and largest value of each distance."""
    names = {
        "kl": "true KL(new‖old), nats" if audit.whole else "KL(new‖old), nats",
        "tv": "true total variation" if audit.whole else "total variation",
        "k1": "|k1|: |log old − log new|",
        "k2": "k2: ½ (log ratio)²",
        "k3": "k3: ratio − 1 − log ratio",
        "mismatch": "sampler mismatch, TV",
    }
    shown = {"Mean": "mean", "Median": "p50", "99th percentile": "p99", "99.9th percentile": "p999", "Largest": "max"}
    columns: Columns = {"Distance": "name", **{heading: cell(key, number) for heading, key in shown.items()}}
    return table([{"name": names[name], **row} for name, row in audit.distances.items()], columns, "Distances")


def _method(audit: Audit) -> Any:
    """Build the section on how the audit measured, with a folded table of rules, settings and versions."""
    settings = [
        {"Setting": f"{part} {key}", "Value": shorten(str(value), 300)}
        for part in ("rules", "settings", "versions")
        if isinstance(given := audit.info.get(part), Mapping)
        for key, value in given.items()
        if value is not None
    ]
    return _PARTS.method(audit.whole, len(settings), _table(settings, "Settings"), 100 * ACCURACY)


def _threshold_table(audit: Audit) -> Safe:
    """Build the table of every trust-region rule at every bound. For each rule, the bound with the fewest errors is bold."""
    rows, best, last = [], audit.best, None
    for one in audit.thresholds:
        row = words.threshold_row(one, audit)
        if one.rule is last:
            row["Rule"] = Safe('<span class="again">{}</span>').format(row["Rule"])
        if one in best:
            row["Bound"] = Safe("<strong>{}</strong>").format(row["Bound"])
        rows.append(row)
        last = one.rule
    return _table(rows, "Which threshold?")


def _blocked_table(audit: Audit) -> Safe:
    """Build the table of the tokens that clipping blocks most often."""
    rows = [{**row, "Token": Safe("<code>{}</code>").format(row["Token"])} for row in words.blocked_rows(audit)]
    return _table(rows, "Blocked tokens") if rows else note("Clipping would block no token here.", good=True)


def _age_table(by_age: Sequence[Row]) -> Safe:
    """Build the table of distances by staleness, the number of steps between sampling and training."""
    columns: Columns = {
        "Steps since it was sampled": lambda row: f"{row['age']}{' or more' if row['older'] else ''}",
        "Tokens": cell("tokens", "{:,}".format),
        "Mean KL by k3": cell("k3", number),
        "Mean TV": cell("tv", number),
        "Mean TV of sampler and trainer": cell("mismatch", number),
        "Effective samples": cell("ess", percent),
    }
    return table(by_age, columns, "By staleness")


_KINDS = {
    "false": "blocked though inside the KL ball",
    "right": "blocked outside it",
    "missed": "outside, pushed further out, not blocked",
}
_SHADES = 9


def _completions(audit: Audit) -> Any:
    """Build the section that shows the completions with the most clipping errors, token by token."""
    kl = np.concatenate([tokens["kl"] for _, tokens in audit.completions])
    finite, found = kl[np.isfinite(kl)], []
    most = float(np.quantile(finite, 0.995)) if len(finite) else 1.0
    for length, tokens in audit.completions:
        first = tokens.iloc[0]
        advantage = f"advantage {first['advantage']:.2g}".replace("-", "−")
        heading = f"{'Update' if audit.whole else 'Step'} {first['step']:.0f}, completion {first['sequence']:.0f}: {advantage}"
        found.append((heading, _heat(audit, tokens, most or 1.0), length - len(tokens)))
    return _PARTS.completions(_KINDS, "true KL" if audit.whole else "KL", found)


def _heat(audit: Audit, tokens: pd.DataFrame, most: float) -> list[tuple[bool, int, str, str, str]]:
    """Build the heat map of a completion: for each token a shade by KL, its kind, a tooltip, its text and a mark for gaps."""
    cells, last = [], -1
    for token, kind in zip(tokens.itertuples(), kinds(tokens, "kl", audit.kl_bound).tolist(), strict=True):
        shade = _SHADES if token.kl >= most else int(_SHADES * (max(token.kl, 0.0) / most) ** 0.5)
        moved = f"p {number(math.exp(token.logp_old))} → {number(math.exp(token.logp_new))}"
        title = f"{_KINDS.get(kind, 'left alone')}: {moved}, KL {number(token.kl)}, TV {number(token.tv)}"
        cells.append((token.position != last + 1, shade, kind, title, shorten(audit.text(token.token), 80)))
        last = token.position
    return cells
