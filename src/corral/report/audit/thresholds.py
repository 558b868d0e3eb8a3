"""Which threshold? One table of every rule at every bound, and one chart of their errors."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from corral.audit.summary import Ball, Column, Row
from corral.audit.threshold import AUDITED, Threshold, ThresholdTally, fewest_errors
from corral.audit.tokens import audit_tokens
from corral.audit.words import number, percent
from corral.report.audit.chart import Axis, curve, legend, plane, sides
from corral.report.audit.figures import mark
from corral.report.html import Safe, join, table, tag
from corral.report.looks import assign_looks
from corral.report.svg import drawn_figure, text

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
