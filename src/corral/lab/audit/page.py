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
from corral.lab.audit.figures import REGIONS, bucket_charts, ratio_chart, step_chart, threshold_chart
from corral.lab.audit.tally import ACCURACY, Audit, Row
from corral.lab.audit.tokens import kinds
from corral.lab.audit.words import (
    MEASURES,
    blocked_rows,
    bucket_rows,
    number,
    percent,
    sentences,
    shown_rules,
    threshold_row,
    updates_sentence,
    verdict_rows,
)
from corral.lab.report.html import Safe, document, macros, note, page_body, sections, shorten, table, write_document
from corral.lab.run.text import count, visible

_PARTS = macros(
    "audit.html", "corral.lab.audit", number=number, percent=percent, count=count, regions=REGIONS, measures=MEASURES
)


def write_page(audit: Audit, out: Path, live: float | None = None) -> int:
    """Write the page atomically and return its size in bytes."""
    return write_document(audit_page(audit, live), out, "This should not happen: please report it.")


def audit_page(audit: Audit, live: float | None = None) -> str:
    """Build the complete HTML page. `live` is the interval in seconds at which the page is rewritten and reloads itself."""
    info, whole = audit.info, audit.whole
    name = str(info.get("name") or info.get("model") or "a run")
    title, said, did = f"Audit of {shorten(name, 80)}", sentences(audit), updates_sentence(info)
    share, words = headline(audit)
    others, now = [sentence for sentence in said[1:] if sentence != did], time.strftime("%H:%M:%S")
    balls = {"kl": audit.kl_bound, "tv": audit.tv_bound} if whole else {}
    verdicts = [
        (heading := f"{ball.upper()} ≤ {number(bound)}", _table(verdict_rows(audit, ball), heading))
        for ball, bound in balls.items()
    ]
    charts = {
        "threshold": [threshold_chart(audit.thresholds, audit.kl_bound, certain=whole)],
        "probability": bucket_charts(
            audit.by_probability, shown_rules(audit), "true TV" if whole else "TV, as far as was logged"
        ),
        "ratio": [] if audit.rows is None else [ratio_chart(audit.rows, info["rules"])],
        "steps": _step_charts(audit),
    }
    by_probability, by_entropy, by_sign = (
        _table(bucket_rows(heading, rows, audit), heading)
        for heading, rows in (
            ("Old probability", audit.by_probability), ("Entropy, nats", audit.by_entropy), ("Advantage", audit.by_sign)
        )
    )  # fmt: skip
    few = f"There is one {'audited update' if whole else 'step'}, so nothing to draw over time."
    parts: dict[str, tuple[str, Any]] = {
        "findings": ("Findings", _PARTS.findings(audit, live, now, did, others, (share, words), verdicts)),
        "threshold": ("Which threshold?", _PARTS.thresholds(whole, _threshold_table(audit))),
        "probability": ("By old probability", _PARTS.charts("probability") + _PARTS.folded("In numbers", by_probability)),
        "ratio": ("Ratio against true distance", _PARTS.charts("ratio") if charts["ratio"] else None),
        "tokens": ("Tokens that clipping would block most", _blocked_table(audit)),
        "kinds": ("By entropy and by advantage", by_entropy + by_sign),
        "distances": ("How far", _PARTS.distances(MEASURES[audit.measure], _distance_table(audit))),
        "steps": ("Over training", _PARTS.charts("steps") if charts["steps"] else note(few)),
        "age": ("By staleness", _age_table(audit.by_age) if audit.by_age else None),
        "completions": ("Completions", _completions(audit)),
        "measured": ("How this was measured", _method(audit)),
    }
    found = {key: part for key, part in parts.items() if part[1] is not None}
    about = f"{shorten(name, 60)} · {count(audit.tokens, 'token')}, {info.get('what') or 'compared'}"
    about = visible(shorten(f"{about} · corral {corral.__version__}", 240))  # what a figure that stands alone says
    data = {"about": about, "headline": f"{share} of {words}", "charts": charts, **({} if live is None else {"live": live})}
    body = page_body(title, said[0], found, _PARTS.main(sections(found).values()), count(audit.tokens, "token"))
    scripts = ["base.js", "audit.js", *([] if live is None else ["live.js"])]
    return document(title, body, data, scripts, ["page.css", "audit.css"])


def headline(audit: Audit) -> tuple[str, str]:
    """Headline as (share, words): blocked tokens that had hardly moved, or missed tokens if none is blocked.

    Of divergences that are lower bounds it says how many can have been inside the ball at most, or are missed at least.
    """
    ball = audit.verdicts["clipped"]["kl"]
    if ball.blocked:
        moved = "had hardly moved" if audit.whole else "were inside the KL ball"
        return f"{'' if audit.whole else '≤ '}{percent(ball.inside)}", f"the tokens that clipping would block {moved}"
    return f"{'' if audit.whole else '≥ '}{percent(ball.missed)}", "the tokens would be missed: clipping would block none"


def _table(rows: Sequence[Row], label: str) -> Safe:
    """Build a table from rows {heading: text}; empty without rows."""
    return table(rows, {heading: itemgetter(heading) for heading in rows[0]}, label) if rows else Safe("")


def _distance_table(audit: Audit) -> Safe:
    """Build the table of distances between the policies: mean, percentiles and largest value of each."""
    names = {
        "kl": "true KL(new‖old), nats" if audit.whole else "KL(new‖old), nats",
        "tv": "true total variation" if audit.whole else "total variation",
        "k1": "|k1|: |log old − log new|",
        "k2": "k2: ½ (log ratio)²",
        "k3": "k3: ratio − 1 − log ratio",
        "mismatch": "sampler mismatch, TV",
    }
    shown = {"Mean": "mean", "Median": "p50", "99th percentile": "p99", "99.9th percentile": "p999", "Largest": "max"}
    rows = [
        {"Distance": names[name], **{heading: number(row[key]) for heading, key in shown.items()}}
        for name, row in audit.distances.items()
    ]
    return _table(rows, "Distances")


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
    """Build the table of every rule at every bound. For each rule, the bound with the fewest errors is bold."""
    rows, best, last = [], audit.best, None
    for one in audit.thresholds:
        row = threshold_row(one, audit)
        if one.rule is last:
            row["Rule"] = Safe('<span class="again">{}</span>').format(row["Rule"])
        if one in best:
            row["Bound"] = Safe("<strong>{}</strong>").format(row["Bound"])
        rows.append(row)
        last = one.rule
    return _table(rows, "Which threshold?")


def _blocked_table(audit: Audit) -> Safe:
    """Build the table of the tokens that clipping blocks most often."""
    rows = [{**row, "Token": Safe("<code>{}</code>").format(row["Token"])} for row in blocked_rows(audit)]
    return _table(rows, "Blocked tokens") if rows else note("Clipping would block no token here.", good=True)


def _step_charts(audit: Audit) -> list[Row]:
    """Build the charts over training: true KL, or distances and effective sample size if true KL is unknown."""
    rows = audit.by_step
    if len(rows) < 2:
        return []
    if audit.whole:
        caption = "Of the tokens that were audited after each of these updates."
        curves = {"kl": ("mean", (0, 0)), "kl_p999": ("99.9th percentile", (4, 1)), "kl_max": ("largest", (6, 3))}
        return [step_chart("True KL to the old policy", caption, rows, curves, moment="update", label="true KL, nats")]
    alarm = audit.alarms[0] if audit.alarms else None
    curves = {"k3": ("mean KL by k3, nats", (0, 0)), "tv": ("mean TV", (1, 1))}
    curves["mismatch"] = ("mean TV of sampler and trainer", (3, 3))
    caption = "Of the tokens that were logged at each step."
    ess = "100 % means on-policy; below 70 % a few tokens with large ratios decide the updates."
    share = {"ess": ("effective sample size, as a share of the tokens", (2, 4))}
    return [
        step_chart("Distance by step", caption, rows, curves, label="distance", alarm=alarm),
        step_chart("Effective samples by step", ess, rows, share, label="effective samples", share=True, alarm=alarm),
    ]


def _age_table(by_age: Sequence[Row]) -> Safe:
    """Build the table by staleness, the number of steps between sampling and training."""
    rows = [
        {
            "Steps since it was sampled": f"{row['age']}{' or more' if row['older'] else ''}",
            "Tokens": f"{row['tokens']:,}",
            "Mean KL by k3": number(row["k3"]),
            "Mean TV": number(row["tv"]),
            "Mean TV of sampler and trainer": "—" if row["mismatch"] is None else number(row["mismatch"]),
            "Effective samples": percent(row["ess"]),
        }
        for row in by_age
    ]
    return _table(rows, "By staleness")


_KINDS = {
    "false": "blocked though inside the KL ball",
    "right": "blocked outside it",
    "missed": "outside, pushed further out, not blocked",
}
_SHADES = 9


def _completions(audit: Audit) -> Any:
    """Build the section that shows the completions with the most errors, token by token."""
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
    """Build a cell for each token of a completion: mark for omitted tokens before it, shade, kind, tooltip and text."""
    cells, last = [], -1
    for token, kind in zip(tokens.itertuples(), kinds(tokens, "kl", audit.kl_bound).tolist(), strict=True):
        shade = _SHADES if token.kl >= most else int(_SHADES * (max(token.kl, 0.0) / most) ** 0.5)
        moved = f"p {number(math.exp(token.logp_old))} → {number(math.exp(token.logp_new))}"
        title = f"{_KINDS.get(kind, 'left alone')}: {moved}, KL {number(token.kl)}, TV {number(token.tv)}"
        cells.append((token.position != last + 1, shade, kind, title, shorten(audit.text(token.token), 80)))
        last = token.position
    return cells
