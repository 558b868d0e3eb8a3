"""The HTML page of an audit."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import corral
from corral.lab.audit.figures import (
    REGIONS,
    Axis,
    bucket_figure,
    curve,
    legend,
    mark,
    plane,
    ratio_figure,
    sides,
    update_figure,
)
from corral.lab.audit.stream import ACCURACY, StreamSummary
from corral.lab.audit.stream_words import MEASURES, stream_sentences
from corral.lab.audit.summary import Ball, Column, Row, Summary, outside_ball, table_columns, token_kinds
from corral.lab.audit.threshold import AUDITED, Threshold, ThresholdTally, fewest_errors
from corral.lab.audit.tokens import audit_tokens
from corral.lab.audit.words import RULES, number, percent, sentences, updates_sentence
from corral.lab.report.html import (  # fmt: skip
    Safe,
    at,
    document,
    drawn_figure,
    join,
    note,
    page_body,
    sections,
    shorten,
    table,
    tag,
    text,
    write_document,
)
from corral.lab.report.looks import Look, assign_looks
from corral.lab.run.text import count, visible

_CELLS = {
    "false": ("False alarm", "blocked, though the policy has hardly moved"),
    "right": ("Blocked rightly", "the policy has left the ball"),
    "passed": ("Passed", "inside, as it should be"),
    "missed": ("Missed", "outside and pushed further out, yet left alone"),
}
"""Row by row: blocked, then passed; inside the ball, then outside."""


_FEWER, _MORE = "≤ ", "≥ "
_BOUNDED = {
    "false": (_FEWER, "blocked, and inside as far as was logged"),
    "right": (_MORE, "the policy has left the ball for certain"),
    "passed": (_FEWER, "inside as far as was logged"),
    "missed": (_MORE, "outside for certain and pushed further out, yet left alone"),
}
"""The same where divergences are lower bounds: the true ones can only move tokens from inside to outside."""


def four_cells(ball: Ball, rules: Mapping[str, Any], *, certain: bool = True) -> Safe:
    """What clipping would do to all audited tokens in an update at the new policy, against the KL ball.

    `certain` unless divergences are lower bounds.
    """
    back = ball.passed_outside - ball.passed_outward
    counts = {"false": ball.blocked_inside, "right": ball.blocked_outside}
    counts |= {"passed": ball.passed_inside, "missed": ball.passed_outward}
    cells = []
    for kind, (name, exact) in _CELLS.items():
        sign, words = ("", exact) if certain else _BOUNDED[kind]
        more = f"; {percent(back / ball.tokens)} more are outside, on their way back" if kind == "missed" and back else ""
        cells.append(
            tag(
                "div",
                tag("b", name), tag("strong", f"{sign}{percent(counts[kind] / ball.tokens)}"),
                tag("span", f"{count(counts[kind], 'token')}: {words}{more}"),
                class_=f"cell-{kind} {REGIONS[kind][0]}",
            )
        )  # fmt: skip
    radius = number(rules["kl_bound"])
    heads = [tag("span", f"inside KL ≤ {radius}", class_="head"), tag("span", "outside", class_="head")]
    return join(_large(headline(ball, certain=certain)), tag("div", *heads, *cells, class_="cells"))


def headline(ball: Ball, *, certain: bool = True) -> str:
    """One number: how many of the tokens that would be blocked had hardly moved; where there are none, what would be missed.

    Of divergences that are lower bounds it says how many can have been inside the ball at most, or are missed at least.
    """
    if ball.blocked:
        share = percent(ball.blocked_inside / ball.blocked)
        moved = "had hardly moved" if certain else "were inside the KL ball"
        return f"{'' if certain else _FEWER}{share} of the tokens that clipping would block {moved}"
    missed = percent(ball.passed_outward / ball.tokens)
    return f"{'' if certain else _MORE}{missed} of the tokens would be missed: clipping would block none"


def _large(sentence: str) -> Safe:
    """The sentence with its number in large."""
    share, of, words = sentence.partition(" of ")
    return tag("p", tag("strong", share), of, words, class_="headline")


_DRAWN = {
    "clip": "ppo_clip",
    "dppo_tv": "dppo",
    "dppo_topk_tv": "dppo top-K",
    "troll": "troll",
    "clip_higher": "clip_higher",
    "dppo_kl": "dppo KL",
    "dppo_tv_symmetric": "dppo symmetric",
}
"""Rules on the chart, with the objective whose look they have; the others are in the table alone."""

_LOOKS = dict(zip(_DRAWN, assign_looks(_DRAWN.values()).values(), strict=True))

_COLUMNS = {"title": "Rule", "bound": "Bound", "share": "Would block"}


def threshold_section(rows: Sequence[Threshold], measure: str, kl_bound: float, tv_bound: float) -> Safe:
    """What the columns mean, the chart and the table."""
    sure = measure == "whole"
    columns = dict(_COLUMNS)
    for ball, bound in (("kl", kl_bound), ("tv", tv_bound)):
        name, radius = ball.upper(), number(bound)
        columns |= {f"{ball} false": f"blocked, {name} ≤ {radius}", f"{ball} missed": f"missed, {name} > {radius}"}
    best = fewest_errors(list(rows))
    cells: list[Row] = [
        {"row": row, "best": best.get(row.family) is row, "first": not index or rows[index - 1].family != row.family}
        for index, row in enumerate(rows)
    ]
    shown = table(cells, columns, _cell, aria_label="Which threshold?")
    return join(tag("p", _explanation(sure=sure)), _error_chart(rows, kl_bound, sure=sure), shown)


def audit_thresholds(columns: Mapping[str, Column], rules: Mapping[str, Any]) -> Safe:
    """The section of an audit that knows true divergences, from its columns."""
    tally = ThresholdTally(rules["kl_bound"], rules["tv_bound"])
    tally.add(audit_tokens(columns))
    return threshold_section(tally.rows(), "whole", rules["kl_bound"], rules["tv_bound"])


def _explanation(*, sure: bool) -> str:
    first = (
        "Every rule at every bound, on the same tokens, as shares of all of them. Blocked inside the ball is a false alarm; a "
        "token is missed if it is outside the ball and pushed further out, yet left alone. Bold: "
        "the bound with the fewest errors of both kinds against the KL ball; ●: the published one. "
    )
    same = "A rule that reads the same number as the ball is right by construction."
    if sure:
        return f"{first}Divergences are those over the whole vocabulary. {same}"
    return first + (
        "Divergences here are lower bounds of the true ones: what is missed is missed for certain, and may be more; what is "
        "blocked inside is inside as far as was logged, and may be less; so the bound in bold errs on the loose side. "
        f"{same}"
    )


def _cell(key: str, cell: Row) -> object:
    row: Threshold = cell["row"]
    if key == "title":
        return row.title if cell["first"] else tag("span", row.title, class_="again")
    if key == "bound":
        name = "—" if row.family == AUDITED else f"{row.symbol} = {row.bound:g}{' ●' if row.default else ''}"
        return tag("strong", name) if cell["best"] else name
    if key == "share":
        return _exact_percent(row.share)
    ball: Ball = row.kl if key.startswith("kl") else row.tv
    return _exact_percent((ball.blocked_inside if key.endswith("false") else ball.passed_outward) / ball.tokens)


def _exact_percent(share: float) -> str:
    """With digits that a column of numbers can be read by."""
    return f"{100 * share:.4f} %" if 0 < share < 1e-4 else percent(share)


def _error_chart(rows: Sequence[Threshold], kl_bound: float, *, sure: bool) -> Safe:
    """Across, the share of tokens blocked inside the KL ball; up, the share missed. Bounds of a rule are one curve."""
    drawn = {name: own for name in _DRAWN if (own := [row for row in rows if row.family == name])}
    points = [_errors(row) for own in drawn.values() for row in own]
    furthest = [max((point[side] for point in points), default=0.0) or 1e-4 for side in (0, 1)]

    def draw(width: int) -> tuple[list[Safe], int]:
        height = 400
        left, right, bottom, top = plane(width, height)
        x, y = Axis(0.0, furthest[0], left, right, math.sqrt), Axis(0.0, furthest[1], bottom, top, math.sqrt)
        parts = sides(x, y, ("blocked inside the KL ball", "missed outside it"), (_share, _share))
        for name, own in drawn.items():
            places = [(x(a), y(b)) for a, b in map(_errors, own)]
            parts.append(curve(places, _LOOKS[name]))
            for (a, b), row in zip(places, own, strict=True):
                said = f"{row.title}, {row.symbol} = {row.bound:g}: {_said(row)}"
                parts.append(mark(_LOOKS[name], a, b, said, hollow=not row.default, size=1.3 if row.default else 1.0))
                if row.default or name == "clip":
                    end = a > right - 40  # a number at the right edge stands before its point
                    parts.append(
                        text(f"{row.bound:g}", a + (-8 if end else 8), b - 6, "end" if end else "start", class_="name")
                    )
        return parts, height

    caption = (
        f"Against the ball KL ≤ {number(kl_bound)}{'' if sure else ', as far as was logged'}. Nearer to the lower left is "
        "better; filled: the published bound. Axes grow like a square root. The other rules are in the table."
    )
    keys = legend({own[0].title: _LOOKS[name] for name, own in drawn.items()})
    return drawn_figure("Two ways to be wrong", caption, draw, keys)


def _errors(row: Threshold) -> tuple[float, float]:
    return row.kl.blocked_inside / row.kl.tokens, row.kl.passed_outward / row.kl.tokens


def _said(row: Threshold) -> str:
    inside, missed = _errors(row)
    return f"would block {percent(row.share)}, {percent(inside)} of all tokens inside the ball, and miss {percent(missed)}"


def _share(value: float) -> str:
    return f"{100 * value:.3g} %"


_MOST = 24
"""Completions on a page: those with most tokens that clipping would be wrong about."""

_LONGEST = 600
"""Tokens of one of them."""

_SHADES = 9

_KINDS = {
    "false": "blocked though inside the KL ball",
    "right": "blocked outside it",
    "missed": "outside, pushed further out, not blocked",
}


def render_token(text: str, most: int = 60) -> str:
    """A token as it can be read: hidden characters written out, white space made visible."""
    text = visible(shorten(text, most)).replace("\n", "⏎").replace("\t", "⇥")
    inner = text.strip(" ")
    before, _, after = text.partition(inner) if inner else (text, "", "")
    return f"{'␣' * len(before)}{inner}{'␣' * len(after)}" or "∅"


def completion_heat(
    columns: Mapping[str, Column], rules: Mapping[str, Any], distance: str = "true KL", moment: str = "Update"
) -> Safe:
    """The darker a token, the further its distribution went; its line says what clipping would do. `moment` names `update`."""
    found = token_kinds(columns, columns["clipped"], outside_ball(columns, rules, "kl"))
    keys = list(zip(columns["update"].tolist(), columns["sequence"].tolist(), strict=True))
    starts = [index for index, key in enumerate(keys) if index == 0 or key != keys[index - 1]]
    spans = [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(keys)], strict=True)]
    wrong = np.isin(found, ("false", "missed"))
    spans = sorted(sorted(spans, key=lambda span: -wrong[span].sum())[:_MOST], key=lambda span: span.start)
    if not spans:
        return note("No completions were audited.")
    finite = columns["kl"][np.isfinite(columns["kl"])]
    most = float(np.quantile(finite, 0.995)) if len(finite) else 1.0
    legend = [tag("span", text, class_=f"token {kind}") for kind, text in _KINDS.items()]
    text = (
        f"Those in which clipping would be wrong most often. The darker a token, the further it went: its {distance} to the "
        f"old policy. "
    )
    made = []
    for place, span in enumerate(spans):
        update, sequence = keys[span.start]
        advantage = float(columns["advantage"][span.start])
        title = f"{moment} {update}, completion {sequence}: advantage {advantage:.2g}".replace("-", "−")
        made.append(
            tag("details", tag("summary", title), _heat(columns, found, span, most or 1.0), open=place == 0, class_="audited")
        )
    return join(tag("p", text, *legend, class_="legend"), *made)


def _heat(columns: Mapping[str, Column], found: Column, span: slice, most: float) -> Safe:
    indices = range(span.start, min(span.stop, span.start + _LONGEST))
    spans, last = [], -1
    for index in indices:
        position, kl = int(columns["position"][index]), float(columns["kl"][index])
        if position != last + 1:
            spans.append(tag("span", " … ", class_="gap"))
        last = position
        shade = _SHADES if kl >= most else int(_SHADES * np.sqrt(max(kl, 0.0) / most))
        before, after = (np.exp(float(columns[name][index])) for name in ("logp_old", "logp_new"))
        said = _KINDS.get(str(found[index]), "left alone")
        title = f"{said}: p {number(before)} → {number(after)}, KL {number(kl)}, TV {number(float(columns['tv'][index]))}"
        text = visible(shorten(str(columns["text"][index]), 80))
        spans.append(tag("span", text, class_=f"token heat{shade} {found[index]}", title=title))
    if span.stop - span.start > _LONGEST:
        spans.append(tag("span", f" … {span.stop - span.start - _LONGEST} more", class_="gap"))
    return tag("div", *spans, class_="heat")


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


_DISTANCES = {
    "kl": "KL(new‖old), nats",
    "tv": "total variation",
    "k1": "|k1|: |log old − log new|",
    "k2": "k2: ½ (log ratio)²",
    "k3": "k3: ratio − 1 − log ratio",
    "mismatch": "TV of sampler and trainer",
}
_QUANTILES = {"mean": "Mean", "p50": "Median", "p99": "99th percentile", "p999": "99.9th percentile", "max": "Largest"}

_STEPS: dict[str, tuple[Look, str]] = {
    "k3": ((0, 0), "mean KL by k3, nats"),
    "tv": ((1, 1), "mean TV"),
    "mismatch": ((3, 3), "mean TV of sampler and trainer"),
}
_ESS: tuple[Look, str] = ((2, 4), "effective sample size, as a share of the tokens")
_POINTS, _MARKS = 600, 80
"""Steps that a curve shows, and those of them that have a marker."""

_STREAM_METHOD = f"""
Log-probs are those that the engine logged, of the sampled tokens that were trained on. k1, k2 and k3 estimate KL(old‖new) from
them; the effective sample size is (Σ w)² / (n Σ w²) with w the ratio of the new policy to the one that sampled.

Everything was computed in one pass. Counts, means and largest values are exact; medians and percentiles come from logarithmic
histograms and are within {100 * ACCURACY:g} % of a value that occurs.

Rules look at the very same tokens at the same moment; a run that had been trained with another rule would have come to others.
Signs of a collapse are those that the guard of corral train warns of: KL beyond 1 nat, effective samples below 70 %, entropy
or reward that fell for good.
"""


def write_stream_page(
    summary: StreamSummary, sample: Mapping[str, Column], info: Mapping[str, Any], out: Path, live: float | None = None
) -> int:
    """The page, whole or not at all. Returns its size in bytes."""
    return write_document(stream_page(summary, sample, info, live), out, "This should not happen: please report it.")


def stream_page(
    summary: StreamSummary, sample: Mapping[str, Column], info: Mapping[str, Any], live: float | None = None
) -> str:
    """The whole HTML.

    Args:
        sample: columns of a few completions, with `text`.
        live: seconds after which it is written again, and read again by itself.
    """
    title = f"Audit of {shorten(str(info['name']), 80)}"
    said = stream_sentences(summary, info)
    audited = next((row for row in summary.thresholds if row.family == AUDITED), None)
    found = tag("ul", *(tag("li", sentence, class_="finding") for sentence in said[1:]), class_="sentences")
    parts = {
        "findings": ("Findings", join(live_note(live), _cells(audited, summary.measure, info["rules"]), found)),
        "threshold": (
            "Which threshold?",
            threshold_section(summary.thresholds, summary.measure, summary.kl_bound, summary.tv_bound),
        ),
        "distances": ("How far", _distances(summary)),
        "steps": ("Over training", _step_charts(summary.by_step, summary.alarms)),
        "probability": ("By old probability", _buckets(summary)),
        "age": ("By staleness", _ages(summary.by_age)),
        "completions": ("Completions", completion_heat(sample, info["rules"], "KL", "Step")),
        "measured": ("How this was measured", _stream_method(info)),
    }
    main = tag("main", *sections(parts).values(), class_="audited-page")
    body = page_body(title, said[0], parts, main, count(summary.tokens, "logged token"))
    data = {"about": about_figures(info["name"], summary.tokens, info["what"]), "headline": ""}
    if audited is not None:
        data["headline"] = headline(audited.kl, certain=summary.measure == "whole")
    return audit_document(title, body, data, live)


def _cells(audited: Threshold | None, measure: str, rules: Mapping[str, Any]) -> Safe | None:
    """The audited rule against the KL ball."""
    if audited is None:
        return None
    sure = f"Divergences are those of {MEASURES[measure]}: false alarms may be fewer, and more may be missed."
    certain = measure == "whole"
    moment = tag("p", "In an update at the new policy:", class_="count")
    return join(moment, four_cells(audited.kl, rules, certain=certain), None if certain else tag("p", sure, class_="count"))


def _distances(summary: StreamSummary) -> Safe:
    rows: list[Row] = [{"what": _DISTANCES[name], **row} for name, row in summary.distances.items()]
    columns = {"what": "Distance", **_QUANTILES}
    shown = table(rows, columns, lambda key, row: row[key] if key == "what" else number(row[key]), aria_label="Distances")
    return join(tag("p", f"Divergences are those of {MEASURES[summary.measure]}.", class_="count"), shown)


def _step_charts(by_step: Sequence[Row], alarms: Sequence[Row]) -> Safe:
    """Distances on a logarithmic axis, and effective samples on a plain one, over the steps; dashed: the first alarm."""
    if len(by_step) < 2:
        return note("There is one step, so nothing to draw over time.")
    rows = by_step[:: math.ceil(len(by_step) / _POINTS)]
    told = f" Dashed: step {alarms[0]['step']:,}, where a collapse announces itself." if alarms else ""
    distances = {name: [(row["step"], row[name]) for row in rows if row[name]] for name in _STEPS}
    distances = {name: points for name, points in distances.items() if points}
    values = [value for points in distances.values() for _, value in points]
    low, high = math.floor(math.log10(min(values, default=0.1))), math.ceil(math.log10(max(values, default=0.5)))
    decades = (10.0**low, 10.0 ** max(high, low + 1), math.log10)
    share = {"ess": [(row["step"], row["ess"]) for row in rows]}
    return join(
        drawn_figure(
            "Distance by step",
            f"Of the tokens that were logged at each step.{told}",
            lambda width: _draw_steps(width, distances, decades, "distance", number, alarms),
            legend({_STEPS[name][1]: _STEPS[name][0] for name in distances}),
        ),
        drawn_figure(
            "Effective samples by step",
            f"100 % means on-policy; below 70 % a few tokens with large ratios decide the updates.{told}",
            lambda width: _draw_steps(width, share, (0.0, 1.0, float), "effective samples", _percent, alarms),
            legend({_ESS[1]: _ESS[0]}),
        ),
    )


def _draw_steps(
    width: int,
    curves: Mapping[str, Sequence[tuple[int, float]]],
    upward: tuple[float, float, Callable[[float], float]],
    label: str,
    show: Callable[[float], str],
    alarms: Sequence[Row],
) -> tuple[list[Safe], int]:
    """Curves by step, with a marker for each of a few steps."""
    height = 300
    left, right, bottom, top = plane(width, height)
    steps = [step for points in curves.values() for step, _ in points] or [0, 1]
    x, y = Axis(min(steps), max(steps), left, right), Axis(upward[0], upward[1], bottom, top, upward[2])
    parts = sides(x, y, ("step", label), (_whole, show))
    for name, points in curves.items():
        look, title = _STEPS.get(name, _ESS)
        parts.append(curve([(x(step), y(value)) for step, value in points], look))
        few = points[:: math.ceil(len(points) / _MARKS)]
        parts += [mark(look, x(step), y(value), f"step {step:,}: {title} {show(value)}") for step, value in few]
    parts += [_upright(x(alarm["step"]), top, bottom, alarm["sentence"]) for alarm in alarms[:1]]
    return parts, height


def _upright(x: float, top: float, bottom: float, title: str) -> Safe:
    return tag("line", tag("title", title), x1=at(x), x2=at(x), y1=at(top), y2=at(bottom), class_="bound")


def _buckets(summary: StreamSummary) -> Safe:
    bound = number(summary.kl_bound)
    columns = {"name": "Old probability", "tokens": "Tokens", "tv": "Mean TV", "outside": f"outside KL ≤ {bound}"}
    columns |= {"clip": "clip 1 ± 0.2 blocks", "dppo_tv": "DPPO TV 0.2 blocks", "dppo_kl": "DPPO KL 0.05 blocks"}

    def show(key: str, row: Row) -> str:
        if key in ("name", "tokens"):
            return row[key] if key == "name" else f"{row[key]:,}"
        return number(row[key]) if key == "tv" else percent(row[key])

    return table(summary.by_probability, columns, show, aria_label="By old probability")


def _ages(by_age: Sequence[Row]) -> Safe:
    if not by_age:
        return note("Nothing was logged about when tokens were sampled.")
    columns = {"age": "Steps since it was sampled", "tokens": "Tokens", "k3": "Mean KL by k3", "tv": "Mean TV"}
    columns |= {"mismatch": "Mean TV of sampler and trainer", "ess": "Effective samples"}

    def show(key: str, row: Row) -> str:
        if row[key] is None:
            return "—"
        if key == "age":
            return f"{row[key]}{' or more' if row['older'] else ''}"
        return f"{row[key]:,}" if key == "tokens" else percent(row[key]) if key == "ess" else number(row[key])

    return table(list(by_age), columns, show, aria_label="By staleness")


def _stream_method(info: Mapping[str, Any]) -> Safe:
    """The method, and what was asked for."""
    asked = {**{f"rules {key}": value for key, value in info["rules"].items()}, **info.get("settings", {})}
    rows: list[Row] = [{"setting": key, "value": shorten(str(value), 300)} for key, value in asked.items()]
    shown = table(rows, {"setting": "Setting", "value": "Value"}, lambda key, row: visible(row[key]), aria_label="Settings")
    return join(
        *(tag("p", part) for part in _STREAM_METHOD.strip().split("\n\n")),
        tag("details", tag("summary", f"{len(rows)} rules and settings"), shown),
    )


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _whole(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else ""
