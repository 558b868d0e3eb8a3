"""Figures of an audit, drawn here as SVG: the page needs no script to show them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from corral.audit.summary import Column, Row, outside_ball, token_kinds
from corral.audit.words import RULES, number, percent
from corral.report.html import Safe, note, tag

_COLOURS = {"clipped": "c3", "dppo_binary": "c1", "dppo_topk": "c4", "troll": "c0"}
_WIDTH, _LEFT, _RIGHT = 860, 70, 16

REGIONS = {
    "passed": ("c7", "passed, inside"),
    "false": ("c3", "blocked though inside: false alarm"),
    "right": ("c2", "blocked, outside"),
    "missed": ("c6", "passed though outside and pushed further: missed"),
    "back": ("c5", "passed outside, on its way back"),
}
"""Colours of the 2-d histogram; the first of two that share a cell is the one with more tokens."""

_CELLS = (72, 40)
_LOWEST_TV = 1e-6
_TICKS = (0.001, 0.01, 0.1, 0.2, 0.5, 1, 2, 5, 10, 100, 1000)


def bucket_figure(rows: Sequence[Row]) -> Safe:
    """Above, how far tokens of each bucket really went; below, on what share of them each rule acts."""
    height, top, middle, bottom = 420, 16, 190, 54
    each = (_WIDTH - _LEFT - _RIGHT) / len(rows)
    values = [value for row in rows for value in (row["tv"]["mean"], row["tv"]["p999"]) if value > 0]
    tv = LogAxis(min(values, default=1e-3), 1.0, top, middle - 28)
    share = LogAxis(1e-4, 1.0, middle + 12, height - bottom)
    parts = [*tv.grid(number), *share.grid(lambda value: f"{100 * value:g} %")]
    parts += [_side("true TV", top, middle - 28), _side("acts on", middle, height - bottom)]
    for place, row in enumerate(rows):
        x = _LEFT + (place + 0.5) * each
        parts.append(_distance(row, x, tv))
        width = each * 0.8 / len(RULES)
        for index, (name, title) in enumerate(RULES.items()):
            if row[name] > 0:
                y = share(row[name])
                box = {"x": _at(x - each * 0.4 + index * width), "y": _at(y), "height": _at(height - bottom - y)}
                said = tag("title", f"{row['name']}: {title} acts on {percent(row[name])}")
                parts.append(tag("g", tag("rect", said, **box, width=_at(width - 2), class_="bar"), class_=_COLOURS[name]))
        parts.append(_text(row["name"], x, height - bottom + 18, "middle", class_="name"))
        parts.append(_text(f"{row['tokens']:,}", x, height - bottom + 34, "middle"))
    parts.append(_text("old probability of the sampled token, and how many there are", _WIDTH - _RIGHT, height - 4, "end"))
    caption = (
        "Above: true total variation, mean (●) and 99.9th percentile (—). Below: share of the tokens on which each rule acts."
    )
    legend = _keys({title: _COLOURS[name] for name, title in RULES.items()})
    return _figure("Where tokens went, and who acts on them", caption, legend, parts, height)


def _distance(row: Row, x: float, tv: "LogAxis") -> Safe:
    """Mean and 99.9th percentile of a bucket's true TV."""
    mean, high = row["tv"]["mean"], row["tv"]["p999"]
    said = f"{row['name']}: {row['tokens']:,} tokens, true TV mean {number(mean)}, 99.9th percentile {number(high)}"
    marks = [tag("title", said)]
    if mean > 0:
        marks.append(tag("circle", cx=_at(x), cy=_at(tv(mean)), r=5, class_="dot"))
    if high > 0:
        marks.append(tag("line", x1=_at(x - 14), x2=_at(x + 14), y1=_at(tv(high)), y2=_at(tv(high)), class_="high"))
    return tag("g", *marks, class_="c2")


def ratio_figure(columns: Mapping[str, Column], rules: Mapping[str, Any]) -> Safe:
    """2-d histogram: ratio of the sampled token, across, against the true TV, up."""
    log_ratio = np.nan_to_num(columns["logp_new"].clip(-80, 0).astype(float) - columns["logp_old"].clip(-80, 0))
    low = min(float(np.quantile(log_ratio, 0.001)), -0.5)
    high = max(float(np.quantile(log_ratio, 0.999)), 0.5)
    tv = columns["tv"].astype(float)
    height, top, bottom = 440, 14, 44
    up = LogAxis(_LOWEST_TV, 1.0, top, height - bottom)
    inner, tall = _WIDTH - _LEFT - _RIGHT, height - top - bottom
    across = _cell((log_ratio - low) / (high - low), _CELLS[0])
    upward = _cell(np.log10(tv.clip(_LOWEST_TV, 1) / _LOWEST_TV) / -math.log10(_LOWEST_TV), _CELLS[1])
    cells, most = _cells(
        across * _CELLS[1] + upward, token_kinds(columns, columns["clipped"], outside_ball(columns, rules, "tv"))
    )
    parts = up.grid(number)
    for cell, counts in cells.items():
        column, row = divmod(cell, _CELLS[1])
        shade = 0.3 + 0.7 * math.log1p(sum(counts.values())) / math.log1p(most)
        said = tag("title", "; ".join(f"{count:,} {REGIONS[name][1]}" for name, count in counts.items() if count))
        place = {"x": _at(_LEFT + column * inner / _CELLS[0]), "y": _at(height - bottom - (row + 1) * tall / _CELLS[1])}
        size = {"width": _at(inner / _CELLS[0] - 0.5), "height": _at(tall / _CELLS[1] - 0.5)}
        box = tag("rect", said, **place, **size, fill_opacity=f"{shade:.2f}", class_="cell")
        parts.append(tag("g", box, class_=REGIONS[max(counts, key=lambda name: counts[name])][0]))

    def at_ratio(ratio: float) -> float | None:
        inside = ratio > 0 and low <= math.log(ratio) <= high
        return _LEFT + (math.log(ratio) - low) / (high - low) * inner if inside else None

    for ratio in _TICKS:
        if (x := at_ratio(ratio)) is not None:
            parts.append(_text(f"{ratio:g}", x, height - bottom + 18, "middle"))
    for edge in _clip_edges(rules["clip"]):
        if (x := at_ratio(edge)) is not None:
            parts.append(tag("line", x1=_at(x), x2=_at(x), y1=top, y2=height - bottom, class_="bound"))
    y = _at(up(min(rules["tv_bound"], 1.0)))
    parts.append(tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="bound"))
    parts += [
        _side("true TV", top, height - bottom),
        _text("ratio new/old of the sampled token", _WIDTH - _RIGHT, height - 6, "end"),
    ]
    caption = (
        f"Dashed: the clip range, and the ball TV ≤ {number(rules['tv_bound'])}. The stronger a cell, the more tokens; its "
        "colour is that of most of them. Tokens beyond the edges are drawn at the edge."
    )
    legend = _keys({text: colour for colour, text in REGIONS.values()})
    return _figure("What clipping sees, and what happened", caption, legend, parts, height)


def _clip_edges(clip: Mapping[str, Any]) -> tuple[float, ...]:
    """Ratios at which clipping begins; none where it looks at whole completions."""
    if clip["name"] == "gspo":
        return ()
    if clip["name"] == "gmpo":
        return math.exp(-clip["clip"]), math.exp(clip["clip"])
    return 1 - clip["clip_low"], 1 + clip["clip_high"]


def _cell(share: Column, cells: int) -> Column:
    """In which of so many cells a share of the axis lies."""
    return (share.clip(0, 1) * cells).astype(int).clip(0, cells - 1)


def update_figure(rows: Sequence[Row]) -> Safe:
    """True KL over training: mean, 99.9th percentile and largest."""
    if len(rows) < 2:
        return note("There is one audited update, so nothing to draw over time.")
    height, top, bottom = 260, 14, 40
    lines = {"mean": "c0", "p999": "c1", "max": "c6"}
    values = [row["kl"][name] for row in rows for name in lines if 0 < row["kl"][name] < math.inf]
    axis = LogAxis(min(values, default=1e-4), max(values, default=1.0), top, height - bottom)
    first, last = rows[0]["update"], rows[-1]["update"]
    x_of = [_LEFT + (row["update"] - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT) for row in rows]
    parts = [*axis.grid(number), _side("true KL, nats", top, height - bottom)]
    for name, colour in lines.items():
        drawn = [(x, axis(row["kl"][name])) for x, row in zip(x_of, rows, strict=True) if 0 < row["kl"][name] < math.inf]
        path = "".join(f"{'L' if index else 'M'}{_at(x)} {_at(y)}" for index, (x, y) in enumerate(drawn))
        parts.append(tag("g", tag("path", d=path, class_="curve"), class_=colour))
    for index in sorted({round(place * (len(rows) - 1) / 5) for place in range(6)}):
        parts.append(
            tag("text", f"{rows[index]['update']:,}", x=_at(x_of[index]), y=height - bottom + 18, text_anchor="middle")
        )
    parts.append(tag("text", "updates", x=_WIDTH - _RIGHT, y=height - 4, text_anchor="end"))
    names = {"mean": "mean", "99.9th percentile": "p999", "largest": "max"}
    legend = _keys({title: lines[name] for title, name in names.items()})
    return _figure(
        "True KL to the old policy", "of the tokens that were audited after each of these updates", legend, parts, height
    )


class LogAxis:
    """A logarithmic axis from `low` (bottom) to `high` (top), in decades."""

    def __init__(self, low: float, high: float, top: float, bottom: float) -> None:
        self.low, self.high = math.floor(math.log10(low)), math.ceil(math.log10(max(high, low * 1.001)))
        self.high = max(self.high, self.low + 1)
        self.top, self.bottom = top, bottom

    def __call__(self, value: float) -> float:
        place = (math.log10(max(value, 10.0**self.low)) - self.low) / (self.high - self.low)
        return self.bottom - min(place, 1.0) * (self.bottom - self.top)

    def grid(self, label: Any) -> list[Safe]:
        """A line and a number per decade, few enough to read."""
        every = max(1, math.ceil((self.high - self.low) * 22 / (self.bottom - self.top)))
        parts = []
        for power in range(self.high, self.low - 1, -every):
            y = _at(self(10.0**power))
            parts.append(tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="grid"))
            parts.append(_text(label(10.0**power), _LEFT - 7, self(10.0**power) + 4, "end"))
        return parts


def _cells(index: Column, found: Column) -> tuple[dict[int, dict[str, int]], int]:
    """Tokens of each kind in each cell that has any, and the most in one."""
    cells: dict[int, dict[str, int]] = {}
    for kind in REGIONS:
        places, counts = np.unique(index[found == kind], return_counts=True)
        for cell, count in zip(places.tolist(), counts.tolist(), strict=True):
            cells.setdefault(cell, dict.fromkeys(REGIONS, 0))[kind] = count
    return cells, max((sum(counts.values()) for counts in cells.values()), default=1)


def _figure(title: str, caption: str, legend: Safe, parts: Sequence[Safe], height: int) -> Safe:
    drawn = tag("svg", *parts, viewBox=f"0 0 {_WIDTH} {height}", role="img", aria_label=f"{title}. {caption}")
    scrolled = tag("div", drawn, class_="audit-figure", tabindex="0", role="region", aria_label=title)
    return tag("figure", tag("h3", title), tag("figcaption", caption), legend, scrolled)


def _keys(colours: Mapping[str, str]) -> Safe:
    return tag("div", *(tag("span", tag("i"), text, class_=colour) for text, colour in colours.items()), class_="keys")


def _side(text: str, top: float, bottom: float) -> Safe:
    """The name of an axis, along it."""
    middle = (top + bottom) / 2
    return _text(text, 12, middle, "middle", transform=f"rotate(-90 12 {_at(middle)})")


def _text(text: str, x: float, y: float, anchor: str, **more: str) -> Safe:
    return tag("text", text, x=_at(x), y=_at(y), text_anchor=anchor, **more)


def _at(value: float) -> str:
    return f"{value:.1f}"
