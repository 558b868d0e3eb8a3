"""The page of an audit: one file that asks the network for nothing. Tokens and names are shown as text, whatever they say."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import corral
from corral.audit.summary import Ball, Row, Summary, table_columns
from corral.audit.words import RULES, number, percent, sentences, updates_sentence
from corral.report.audit.cells import four_cells, headline
from corral.report.audit.figures import bucket_figure, ratio_figure, update_figure
from corral.report.audit.thresholds import audit_thresholds
from corral.report.audit.tokens import completion_heat, render_token
from corral.report.html import (
    Safe,
    document,
    join,
    note,
    page_body,
    sections,
    shorten,
    table,
    tag,
    write_document,
)  # fmt: skip
from corral.run.text import count, visible

_VERDICTS = {
    "rule": "Rule", "share": "Would act on", "right": "…of which outside", "false": "…of which inside", "missed": "Would miss",
}  # fmt: skip

_METHOD = """
The old policy is the one that the completions were sampled from, the new one is compared with it on their tokens, both over the
whole vocabulary and at the temperature that was sampled with. KL is KL(new‖old) in nats, TV is ½ Σ |p − q|.

Clipping blocks a token when its ratio new/old has left the range in the direction in which its advantage pushes: then it has
no gradient. That looks at one probability. A rare token doubles its probability while the policy hardly moves, and a likely one
may lose a fifth of the whole within the range. So a block inside the ball is a false alarm, and a token outside the ball that
is pushed further out without being blocked is missed.

Rules are computed at the new policy, where the last update on these completions has left it: they say what one more update
would do. What clipping did in the updates that a trainer made is measured in each of them, on all of their tokens, and averaged
over micro-batches, as TRL averages its own clip ratio.

DPPO masks a token once the total variation is beyond its bound, on the sampled token alone or on the likeliest tokens, and only
where it is pushed further out. TROLL projects the whole distribution back into the KL ball, whatever the advantage. Both are
computed here on the very same tokens at the same moment; a run that had been trained with them would have come to other tokens.
"""


def write_audit_page(info: Mapping[str, Any], rows: pa.Table, summary: Summary, out: Path, live: float | None = None) -> int:
    """The page, whole or not at all. Returns its size in bytes."""
    return write_document(audit_page(info, rows, summary, live), out, "This should not happen: please report it.")


def audit_page(info: Mapping[str, Any], rows: pa.Table, summary: Summary, live: float | None = None) -> str:
    """The whole HTML; `live`: seconds after which it is written again, and read again by itself."""
    title = f"Audit of {shorten(str(info.get('model') or 'a run'), 80)}"
    about = about_figures(info.get("model"), summary.tokens, info.get("what"))
    data = {"about": about, "headline": headline(summary.verdicts["clipped"]["kl"])}
    return audit_document(title, _body(title, info, rows, summary, live), data, live)


def audit_document(title: str, body: Safe, data: Mapping[str, Any], live: float | None) -> str:
    """The page of an audit around its body."""
    scripts, more = (["base.js", "audit.js"], {}) if live is None else (["base.js", "audit.js", "live.js"], {"live": live})
    return document(title, body, {**data, **more}, scripts, ["page.css", "audit.css"])


def live_note(live: float | None) -> Safe | None:
    """When the page of a live audit was written, and a switch that stops it from being read again."""
    if live is None:
        return None
    switch = tag(
        "label", tag("input", type="checkbox", id="reload", checked=True), f"Reload every {live:g} s", class_="scripted"
    )
    return note(f"Live: as of {time.strftime('%H:%M:%S')}, while the run goes on. ", switch)


def about_figures(name: object, tokens: int, what: object) -> str:
    """What a figure that stands alone says of what was audited."""
    text = f"{shorten(str(name or 'a run'), 60)} · {count(tokens, 'token')}, {what or 'compared'}"
    return visible(shorten(f"{text} · corral {corral.__version__}", 240))


def _body(title: str, info: Mapping[str, Any], tokens: pa.Table, summary: Summary, live: float | None) -> Safe:
    """Header, parts, footer."""
    columns, rules = table_columns(tokens), info["rules"]
    said, did = sentences(summary, info), updates_sentence(info)
    probability, kinds = summary.by_probability, (("Entropy, nats", summary.by_entropy), ("Advantage", summary.by_sign))
    found = tag("ul", *(tag("li", sentence, class_="finding") for sentence in said[1:] if sentence != did), class_="sentences")
    out = info.get("left_out")
    missing = note(f"{count(out, 'token')} without a number in every column are left out.") if out else None
    parts = {
        "findings": (
            "Findings",
            join(
                live_note(live),
                missing,
                None if did is None else tag("p", did, class_="finding"),
                tag("p", "On one more update:", class_="count"),
                four_cells(summary.verdicts["clipped"]["kl"], rules),
                found,
                _verdict_tables(summary, rules),
            ),
        ),
        "probability": ("By old probability", join(bucket_figure(probability), _bucket_table("Old probability", probability))),
        "threshold": ("Which threshold?", audit_thresholds(columns, rules)),
        "ratio": ("Ratio against true distance", ratio_figure(columns, rules)),
        "tokens": ("Tokens that clipping would block most", _blocked_table(summary.blocked_tokens)),
        "kinds": ("By entropy and by advantage", join(*(_bucket_table(title, rows) for title, rows in kinds))),
        "updates": ("Over training", update_figure(summary.by_update)),
        "completions": ("Completions", completion_heat(columns, rules)),
        "measured": ("How this was measured", _method(info)),
    }
    main = tag("main", *sections(parts).values(), class_="audited-page")
    return page_body(title, said[0], parts, main, count(len(tokens), "audited token"))


def _verdict_tables(summary: Summary, rules: Mapping[str, Any]) -> Safe:
    """Divergences of the tokens, and each rule against the KL ball and the TV ball."""
    far = {"what": "Distance", "mean": "Mean", "p999": "99.9th percentile", "max": "Largest"}
    rows = [{"what": "true KL, nats", **summary.kl}, {"what": "true TV", **summary.tv}]
    rows += [] if summary.mismatch is None else [{"what": "sampler mismatch, TV", **summary.mismatch}]
    distances = table(rows, far, lambda key, row: row[key] if key == "what" else number(row[key]), aria_label="Distances")
    made = []
    for ball, heading in (("kl", f"KL ≤ {number(rules['kl_bound'])}"), ("tv", f"TV ≤ {number(rules['tv_bound'])}")):
        rows = [
            {"rule": title, **summary.verdicts[name], "ball": summary.verdicts[name][ball]} for name, title in RULES.items()
        ]
        made += [tag("h3", f"Against the ball {heading}"), table(rows, _VERDICTS, _verdict, aria_label=heading)]
    text = "Would miss: outside the ball and pushed further out, yet left alone. TROLL acts whatever the advantage says."
    return join(distances, *made, tag("p", text, class_="count"))


def _verdict(key: str, row: Row) -> str:
    ball: Ball = row["ball"]
    counts = {"right": ball.blocked_outside, "false": ball.blocked_inside}
    if key in counts:
        return f"{counts[key]:,} ({percent(counts[key] / ball.blocked)})" if ball.blocked else "—"
    if key == "missed":
        return f"{ball.passed_outward:,} ({percent(ball.passed_outward / ball.tokens)})"
    return row[key] if key == "rule" else percent(row[key])


def _bucket_table(title: str, rows: Sequence[Row]) -> Safe:
    """One row per bucket."""
    columns = {"name": title, "tokens": "Tokens", "tv": "TV: mean, 99.9 %, largest", "kl": "KL: mean, 99.9 %, largest", **RULES}

    def show(key: str, row: Row) -> str:
        if key in ("tv", "kl"):
            return ", ".join(number(row[key][name]) for name in ("mean", "p999", "max"))
        return row[key] if key == "name" else f"{row[key]:,}" if key == "tokens" else percent(row[key])

    return table(list(rows), columns, show, aria_label=title)


def _blocked_table(rows: Sequence[Row]) -> Safe:
    """The tokens most often blocked."""
    if not rows:
        return note("Clipping would block no token here.", good=True)
    columns = {"text": "Token", "token": "Id", "seen": "Seen", "blocked": "Would be blocked", "inside": "…inside the KL ball"}
    columns |= {"p_old": "Mean probability before", "tv": "Mean true TV"}

    def show(key: str, row: Row) -> Any:
        if key == "text":
            return tag("code", render_token(row["text"]))
        if key == "inside":
            return f"{row[key]:,} ({percent(row[key] / row['blocked'])})"
        return number(row[key]) if key in ("p_old", "tv") else f"{row[key]:,}"

    return table(list(rows), columns, show, aria_label="Blocked tokens")


def _method(info: Mapping[str, Any]) -> Safe:
    """The method, the rules and the settings."""
    parts = {part: info[part] for part in ("rules", "settings", "versions") if isinstance(info.get(part), Mapping)}
    rows = [
        {"setting": f"{part} {key}", "value": shorten(str(value), 300)}
        for part, found in parts.items()
        for key, value in found.items()
        if value is not None
    ]
    asked = table(rows, {"setting": "Setting", "value": "Value"}, lambda key, row: visible(row[key]), aria_label="Settings")
    return join(
        *(tag("p", part) for part in _METHOD.strip().split("\n\n")),
        tag("details", tag("summary", f"{len(rows)} rules, settings and versions"), asked),
    )
