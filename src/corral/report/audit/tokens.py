"""Completions of an audit, token by token: how far each went, and whether clipping would be right about it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from corral.audit.summary import Column, outside_ball, token_kinds
from corral.audit.words import number
from corral.report.html import Safe, join, note, shorten, tag
from corral.run.text import visible

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
