"""Figures of an audit's page."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from corral.lab.audit.summary import Column, Row, outside_ball, token_kinds
from corral.lab.audit.words import RULES, number, percent
from corral.lab.report.html import NARROW, Safe, at, drawn_figure, line, note, tag, text
from corral.lab.report.looks import SHAPES, Look, assign_looks
from corral.lab.run.text import count

_NAMES = {"clipped": "ppo_clip", "dppo_binary": "dppo", "dppo_topk": "dppo top-K", "troll": "troll"}
RULE_LOOKS: dict[str, Look] = dict(zip(_NAMES, assign_looks(_NAMES.values()).values(), strict=True))
"""Colour and marker of each rule: those of its objective."""

REGIONS = {
    "passed": ("c7", "passed, inside"),
    "false": ("c1", "blocked though inside: false alarm"),
    "right": ("c2", "blocked, outside"),
    "missed": ("c3", "passed though outside and pushed further: missed"),
    "back": ("c5", "passed outside, on its way back"),
}
"""Colours of the 2-d histogram; the first of two that share a cell is the one with more tokens."""

_LOWEST_TV = 1e-6
_TICKS = (0.001, 0.01, 0.1, 0.2, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 2, 3, 5, 10, 100, 1000)
_FEW = 30
"""Tokens of a bucket below which its numbers are hollow."""


def bucket_figure(rows: Sequence[Row]) -> Safe:
    """Above, how far tokens of each bucket really went; below, on what share of them each rule would act."""

    def draw(width: int) -> tuple[list[Safe], int]:
        narrow = width == NARROW
        height, top, middle, bottom, left, right = 430, 16, 200, 64 if narrow else 54, 54 if narrow else 76, 8
        each = (width - left - right) / len(rows)
        values = [value for row in rows for value in (row["tv"]["mean"], row["tv"]["max"]) if value > 0]
        tv = LogAxis(min(values, default=1e-3), 1.0, top, middle - 28)
        most = max((row[name] for row in rows for name in RULES if row["tokens"] >= _FEW), default=0.0) or 0.01
        share = _RootAxis(min(1.0, 1.1 * most), middle + 12, height - bottom)
        parts = [*tv.grid(number, left, width - right), *share.grid(left, width - right)]
        if not narrow:
            parts += [_side("true TV", top, middle - 28), _side("would act on", middle, height - bottom)]
        for place, row in enumerate(rows):
            x = left + (place + 0.5) * each
            parts.append(_distance(row, x, tv, min(14.0, each * 0.3)))
            for index, (name, title) in enumerate(RULES.items()):
                said = f"{row['name']}: {title} would act on {percent(row[name])} of {count(row['tokens'], 'token')}"
                beside = x + (index - 1.5) * each * 0.2
                parts.append(mark(RULE_LOOKS[name], beside, share(row[name]), said, hollow=row["tokens"] < _FEW))
            down = 18 + (14 * (place % 2) if narrow else 0)
            parts.append(text(row["name"], x, height - bottom + down, "middle", class_="name"))
            if not narrow:
                parts.append(text(f"{row['tokens']:,}", x, height - bottom + 34, "middle"))
        unit = "old probability" if narrow else "old probability of the sampled token, and how many there are"
        parts.append(text(unit, width - right, height - 4, "end"))
        return parts, height

    caption = (
        "Above: true total variation, mean (●), 99.9th percentile (—), largest (▲). Below: share of the tokens on which each "
        f"rule would act, on an axis that grows like a square root. Hollow: fewer than {_FEW} tokens."
    )
    legend = _keys({title: f"c{RULE_LOOKS[name][0]}" for name, title in RULES.items()}, [*RULE_LOOKS.values()])
    return drawn_figure("Where tokens went, and who would act on them", caption, draw, legend)


def mark(look: Look, x: float, y: float, said: str, *, hollow: bool = False, size: float = 1.0) -> Safe:
    """A marker in its colour that says what it is."""
    place = f"translate({at(x)} {at(y)})" + ("" if size == 1 else f" scale({size:g})")
    drawn = tag("path", tag("title", said), d=SHAPES[look[1]], transform=place, class_="dot ring" if hollow else "dot")
    return tag("g", drawn, class_=f"c{look[0]}")


def _distance(row: Row, x: float, tv: "LogAxis", half: float) -> Safe:
    """Mean, 99.9th percentile and largest of a bucket's true TV."""
    mean, high, largest = (row["tv"][name] for name in ("mean", "p999", "max"))
    said = f"{row['name']}: {count(row['tokens'], 'token')}, true TV mean {number(mean)}, 99.9th percentile {number(high)}, "
    marks = [tag("title", f"{said}largest {number(largest)}")]
    if mean > 0:
        marks.append(tag("circle", cx=at(x), cy=at(tv(mean)), r=5, class_="dot"))
    if high > 0:
        marks.append(line(x - half, tv(high), x + half, tv(high), "high"))
    if largest > 0:
        marks.append(tag("path", d=SHAPES[3], transform=f"translate({at(x)} {at(tv(largest))})", class_="dot ring"))
    return tag("g", *marks, class_="c7")


def ratio_figure(columns: Mapping[str, Column], rules: Mapping[str, Any]) -> Safe:
    """2-d histogram: ratio of the sampled token, across, against the true TV, up. The clip range is in the middle."""
    log_ratio = np.nan_to_num(columns["logp_new"].clip(-80, 0).astype(float) - columns["logp_old"].clip(-80, 0))
    low, high = _window(log_ratio, clip_edges(rules["clip"]))
    tv = np.log10(columns["tv"].astype(float).clip(_LOWEST_TV, 1) / _LOWEST_TV) / -math.log10(_LOWEST_TV)
    kinds = token_kinds(columns, columns["clipped"], outside_ball(columns, rules, "tv"))

    def draw(width: int) -> tuple[list[Safe], int]:
        narrow = width == NARROW
        height, top, bottom, left, right = 300 if narrow else 440, 14, 44, 54 if narrow else 76, 10
        across, upward = (34, 26) if narrow else (72, 40)
        up = LogAxis(_LOWEST_TV, 1.0, top, height - bottom)
        wide, tall = (width - left - right) / across, (height - top - bottom) / upward
        index = _cell((log_ratio - low) / (high - low), across) * upward + _cell(tv, upward)
        cells, most = _cells(index, kinds)
        parts = up.grid(number, left, width - right)
        for cell, counts in cells.items():
            column, row = divmod(cell, upward)
            shade = 0.3 + 0.7 * math.log1p(sum(counts.values())) / math.log1p(most)
            said = tag("title", "; ".join(f"{count:,} {REGIONS[name][1]}" for name, count in counts.items() if count))
            place = {"x": at(left + column * wide), "y": at(height - bottom - (row + 1) * tall)}
            size = {"width": at(wide - 0.5), "height": at(tall - 0.5)}
            box = tag("rect", said, **place, **size, fill_opacity=f"{shade:.2f}", class_="cell")
            parts.append(tag("g", box, class_=REGIONS[max(counts, key=lambda name: counts[name])][0]))

        def at_ratio(ratio: float) -> float | None:
            inside = ratio > 0 and low <= math.log(ratio) <= high
            return left + (math.log(ratio) - low) / (high - low) * (width - left - right) if inside else None

        shown: list[float] = []
        for ratio in (*(edges := clip_edges(rules["clip"])), *_TICKS):  # the edges of the range before round numbers
            if (x := at_ratio(ratio)) is not None and all(abs(x - other) > 34 for other in shown):
                parts.append(text(f"{ratio:.3g}", x, height - bottom + 18, "middle"))
                shown.append(x)
        for edge in edges:
            if (x := at_ratio(edge)) is not None:
                parts.append(line(x, top, x, height - bottom, "bound"))
        y = up(min(rules["tv_bound"], 1.0))
        parts.append(line(left, y, width - right, y, "bound"))
        parts += [] if narrow else [_side("true TV", top, height - bottom)]
        parts.append(text("ratio new/old of the sampled token", width - right, height - 6, "end"))
        return parts, height

    caption = (
        f"Dashed: the clip range, and the ball TV ≤ {number(rules['tv_bound'])}. The stronger a cell, the more tokens; its "
        "colour is that of most of them. Tokens beyond the edges are drawn at the edge."
    )
    legend = _keys({words: colour for colour, words in REGIONS.values()})
    return drawn_figure("What clipping sees, and what happened", caption, draw, legend)


def _window(log_ratio: Column, edges: Sequence[float]) -> tuple[float, float]:
    """What of the axis of log ratios is drawn: 99.5 % of the tokens, if that is three to twelve times the clip range."""
    ends = [math.log(max(edge, 1e-3)) for edge in edges] or [-0.2, 0.2]
    middle, half = (ends[0] + ends[1]) / 2, (ends[1] - ends[0]) / 2
    reach = float(np.quantile(np.abs(log_ratio - middle), 0.995))
    reach = min(max(reach, 3 * half), 12 * half)
    return middle - reach, middle + reach


def clip_edges(clip: Mapping[str, Any]) -> tuple[float, ...]:
    """Ratios at which clipping begins; none where it looks at whole completions."""
    if clip["name"] == "gspo":
        return ()
    if clip["name"] == "gmpo":
        return math.exp(-clip["clip"]), math.exp(clip["clip"])
    return 1 - clip["clip_low"], 1 + clip["clip_high"]


def _cell(share: Column, cells: int) -> Column:
    """In which of so many cells a share of the axis lies."""
    return (share.clip(0, 1) * cells).astype(int).clip(0, cells - 1)


_LINES: dict[str, tuple[str, Look, int]] = {
    "mean": ("mean", (0, 0), 0),
    "p999": ("99.9th percentile", (4, 1), 1),
    "max": ("largest", (6, 3), 2),
}
"""Of true KL over training: name, look and dash."""


def update_figure(rows: Sequence[Row]) -> Safe:
    """True KL over training: mean, 99.9th percentile and largest."""
    if len(rows) < 2:
        return note("There is one audited update, so nothing to draw over time.")
    values = [row["kl"][name] for row in rows for name in _LINES if 0 < row["kl"][name] < math.inf]
    first, last = rows[0]["update"], rows[-1]["update"]

    def draw(width: int) -> tuple[list[Safe], int]:
        narrow = width == NARROW
        height, top, bottom, left, right = 260, 14, 40, 54 if narrow else 76, 14
        axis = LogAxis(min(values, default=1e-4), max(values, default=1.0), top, height - bottom)
        x_of = [left + (row["update"] - first) / (last - first) * (width - left - right) for row in rows]
        parts = [*axis.grid(number, left, width - right), *([] if narrow else [_side("true KL, nats", top, height - bottom)])]
        for name, (title, look, dash) in _LINES.items():
            known = [(x, row) for x, row in zip(x_of, rows, strict=True) if 0 < row["kl"][name] < math.inf]
            path = "".join(
                f"{'L' if index else 'M'}{at(x)} {at(axis(row['kl'][name]))}" for index, (x, row) in enumerate(known)
            )
            parts.append(tag("g", tag("path", d=path, class_=f"curve dash{dash}"), class_=f"c{look[0]}"))
            for x, row in known[:: max(1, len(known) // 24)]:
                said = f"after {row['update']:,} updates: {title} {number(row['kl'][name])} nats"
                parts.append(mark(look, x, axis(row["kl"][name]), said))
        for index in sorted({round(place * (len(rows) - 1) / 5) for place in range(6)}):
            parts.append(text(f"{rows[index]['update']:,}", x_of[index], height - bottom + 18, "middle"))
        parts.append(text("updates", width - right, height - 4, "end"))
        return parts, height

    legend = _keys({title: f"c{look[0]}" for title, look, _ in _LINES.values()}, [look for _, look, _ in _LINES.values()])
    return drawn_figure(
        "True KL to the old policy", "Of the tokens that were audited after each of these updates.", draw, legend
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

    def grid(self, label: Any, left: float, right: float) -> list[Safe]:
        """A line and a number per decade, few enough to read."""
        every = max(1, math.ceil((self.high - self.low) * 22 / (self.bottom - self.top)))
        parts = []
        for power in range(self.high, self.low - 1, -every):
            y = self(10.0**power)
            parts += [line(left, y, right, y, "grid"), text(label(10.0**power), left - 7, y + 4, "end")]
        return parts


class _RootAxis:
    """Shares from 0 (bottom) to `high` (top), by their square roots: small ones are seen, and 0 is 0."""

    def __init__(self, high: float, top: float, bottom: float) -> None:
        self.high, self.top, self.bottom = high, top, bottom

    def __call__(self, value: float) -> float:
        return self.bottom - math.sqrt(min(value / self.high, 1.0)) * (self.bottom - self.top)

    def grid(self, left: float, right: float) -> list[Safe]:
        """Lines at round shares that are far enough apart."""
        parts, last = [], math.inf
        for value in (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0):
            if value <= self.high and last - self(value) >= 18:
                last = self(value)
                parts += [line(left, last, right, last, "grid"), text(f"{100 * value:g} %", left - 7, last + 4, "end")]
        return parts


def _cells(index: Column, found: Column) -> tuple[dict[int, dict[str, int]], int]:
    """Tokens of each kind in each cell that has any, and the most in one."""
    cells: dict[int, dict[str, int]] = {}
    for kind in REGIONS:
        places, counts = np.unique(index[found == kind], return_counts=True)
        for cell, tokens in zip(places.tolist(), counts.tolist(), strict=True):
            cells.setdefault(cell, dict.fromkeys(REGIONS, 0))[kind] = tokens
    return cells, max((sum(counts.values()) for counts in cells.values()), default=1)


def _keys(colours: Mapping[str, str], looks: Sequence[Look] = ()) -> Safe:
    """Names with their colours, and their markers where they have one."""
    items = []
    for place, (words, colour) in enumerate(colours.items()):
        sign = tag("i")
        if looks:
            shape = tag("path", d=SHAPES[looks[place][1]], class_="dot")
            sign = tag("svg", shape, viewBox="-6 -6 12 12", class_="sign", aria_hidden="true")
        items.append(tag("span", sign, words, class_=colour))
    return tag("div", *items, class_="keys")


def _side(words: str, top: float, bottom: float) -> Safe:
    """The name of an axis, along it."""
    middle = (top + bottom) / 2
    return text(words, 12, middle, "middle", transform=f"rotate(-90 12 {at(middle)})")


_STEPS = (1.0, 2.0, 5.0)


class Axis:
    """Values from `low` to `high` along `start` to `stop`, which may run down; `scale` is applied to values first."""

    def __init__(
        self, low: float, high: float, start: float, stop: float, scale: Callable[[float], float] = lambda value: value
    ) -> None:
        self.low, self.high, self.start, self.stop, self.scale = low, high if high > low else low + 1.0, start, stop, scale

    def __call__(self, value: float) -> float:
        """Where a value is drawn; what is beyond an end is drawn there."""
        bottom, top = self.scale(self.low), self.scale(self.high)
        share = (self.scale(min(max(value, self.low), self.high)) - bottom) / (top - bottom)
        return self.start + share * (self.stop - self.start)

    def ticks(self, apart: float) -> list[float]:
        """Round numbers from low to high, drawn at least so far apart."""
        found: list[float] = []
        for value in self._round_numbers():
            if not found or abs(self(value) - self(found[-1])) >= apart:
                found.append(value)
        return found

    def _round_numbers(self) -> list[float]:
        if self.scale is math.log10:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            return [10.0**power for power in powers if self.low <= 10.0**power <= self.high]
        top = math.floor(math.log10(self.high - self.low))
        spread = sorted(
            step * 10.0**power for power in range(top - 3, top + 1) for step in _STEPS if step * 10.0**power <= self.high
        )
        if self.scale is math.sqrt:
            return [0.0, *spread]
        step = next(step for step in spread if (self.high - self.low) / step <= 8)
        first = math.ceil(self.low / step)
        return [round((first + index) * step, 12) for index in range(math.floor(self.high / step) - first + 1)]


def plane(width: int, height: int) -> tuple[float, float, float, float]:
    """Left, right, bottom and top of where values are drawn in a figure of this size."""
    return (60, width - 10, height - 50, 16) if width == NARROW else (76, width - 20, height - 50, 16)


def sides(x: Axis, y: Axis, labels: tuple[str, str], show: tuple[Callable[[float], str], Callable[[float], str]]) -> list[Safe]:
    """Lines of the grid with their numbers, and what the axes are called."""
    parts = []
    for value in y.ticks(26):
        parts += [line(x.start, y(value), x.stop, y(value), "grid"), text(show[1](value), x.start - 7, y(value) + 4, "end")]
    for value in x.ticks(56):
        parts += [line(x(value), y.start, x(value), y.stop, "grid"), text(show[0](value), x(value), y.start + 18, "middle")]
    middle = (y.start + y.stop) / 2
    if x.stop > NARROW:
        parts.append(text(labels[1], 12, middle, "middle", transform=f"rotate(-90 12 {at(middle)})"))
    across = labels[0] if x.stop > NARROW else f"across: {labels[0]}; up: {labels[1]}"
    return [*parts, text(across, x.stop, y.start + 38, "end")]


def curve(points: Sequence[tuple[float, float]], look: Look) -> Safe:
    """A line through points, told apart by its dashes as well."""
    path = "".join(f"{'L' if index else 'M'}{at(x)} {at(y)}" for index, (x, y) in enumerate(points))
    dash = look[1] % 4
    return tag("g", tag("path", d=path, class_=f"curve dash{dash}" if dash else "curve"), class_=f"c{look[0]}")


def legend(names: Mapping[str, Look]) -> Safe:
    """Names with the colour and the marker that stand for them."""
    items = []
    for name, (colour, shape) in names.items():
        sign = tag("svg", tag("path", d=SHAPES[shape], class_="dot"), viewBox="-6 -6 12 12", class_="sign", aria_hidden="true")
        items.append(tag("span", sign, name, class_=f"c{colour}"))
    return tag("div", *items, class_="keys")
