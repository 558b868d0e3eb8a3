"""Figures of an audit's page."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from corral.lab.audit.tally import Row
from corral.lab.audit.threshold import Threshold
from corral.lab.audit.tokens import Floats, Tokens
from corral.lab.audit.words import number, percent
from corral.lab.report.html import NARROW, Safe, at, drawn_figure, line, tag, text
from corral.lab.report.looks import SHAPES, Look, assign_looks
from corral.lab.run.text import count

_OBJECTIVES = {
    "clip": "ppo_clip", "dppo_tv": "dppo", "dppo_topk_tv": "dppo top-K", "troll": "troll", "clip_higher": "clip_higher",
    "dppo_kl": "dppo KL", "dppo_tv_symmetric": "dppo symmetric",
}  # fmt: skip
"""Rules in the chart of thresholds, each with the objective whose style it takes. Other rules are in the table only."""

LOOKS: dict[str, Look] = dict(zip(_OBJECTIVES, assign_looks(_OBJECTIVES.values()).values(), strict=True))
LOOKS |= {"clipped": LOOKS["clip"], "dppo_binary": LOOKS["dppo_tv"], "dppo_topk": LOOKS["dppo_topk_tv"]}
"""Colour and marker of each rule, taken from its objective."""

REGIONS = {
    "passed": ("c7", "passed, inside"),
    "false": ("c1", "blocked though inside: false alarm"),
    "right": ("c2", "blocked, outside"),
    "missed": ("c3", "passed though outside and pushed further: missed"),
    "back": ("c5", "passed outside, on its way back"),
}
"""Colours of the 2-d histogram; a cell shared by several regions takes the region with most tokens."""

_LOWEST_TV = 1e-6
_TICKS = (0.001, 0.01, 0.1, 0.2, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 2, 3, 5, 10, 100, 1000)
_FEW = 30
"""Number of tokens below which a bucket's markers are hollow."""


class Axis:
    """Axis with values from `low` to `high` along `start` to `stop`, which may run down; `scale` transforms values first."""

    def __init__(
        self, low: float, high: float, start: float, stop: float, scale: Callable[[float], float] = lambda value: value
    ) -> None:
        self.low, self.high, self.start, self.stop, self.scale = low, high if high > low else low + 1.0, start, stop, scale

    @classmethod
    def decades(cls, values: Sequence[float], start: float, stop: float) -> "Axis":
        """A logarithmic axis over the decades of the positive finite values, at least one decade."""
        known = [value for value in values if 0 < value < math.inf] or [1e-3, 1.0]
        low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
        return cls(10.0**low, 10.0 ** max(high, low + 1), start, stop, math.log10)

    def __call__(self, value: float) -> float:
        """The position of a value; values beyond an end are drawn at that end."""
        bottom, top = self.scale(self.low), self.scale(self.high)
        share = (self.scale(min(max(value, self.low), self.high)) - bottom) / (top - bottom)
        return self.start + share * (self.stop - self.start)

    def ticks(self, apart: float) -> list[float]:
        """Round numbers from low to high with a minimum distance on the page."""
        if self.scale is math.log10:
            low, high = round(math.log10(self.low)), round(math.log10(self.high))
            every = max(1, math.ceil(apart * (high - low) / abs(self.stop - self.start)))
            return [10.0**power for power in range(high, low - 1, -every)]
        top = math.floor(math.log10(self.high - self.low))
        steps = [step * 10.0**power for power in range(top - 3, top + 1) for step in (1.0, 2.0, 5.0)]
        values = [0.0, *(step for step in steps if step <= self.high)]
        if self.scale is not math.sqrt:
            step = next(step for step in steps if (self.high - self.low) / step <= 8)
            first = math.ceil(self.low / step)
            values = [round((first + index) * step, 12) for index in range(math.floor(self.high / step) - first + 1)]
        found: list[float] = []
        for value in values:
            if not found or abs(self(value) - self(found[-1])) >= apart:
                found.append(value)
        return found

    def lines(self, show: Callable[[float], str], left: float, right: float, apart: float = 22) -> list[Safe]:
        """Horizontal grid lines with the numbers of an upright axis."""
        parts = []
        for value in self.ticks(apart):
            y = self(value)
            parts += [line(left, y, right, y, "grid"), text(show(value), left - 7, y + 4, "end")]
        return parts


def mark(look: Look, x: float, y: float, said: str, *, hollow: bool = False, size: float = 1.0) -> Safe:
    """A coloured marker with its numbers as a tooltip."""
    place = f"translate({at(x)} {at(y)})" + ("" if size == 1 else f" scale({size:g})")
    drawn = tag("path", tag("title", said), d=SHAPES[look[1]], transform=place, class_="dot ring" if hollow else "dot")
    return tag("g", drawn, class_=f"c{look[0]}")


def _curve(points: Sequence[tuple[float, float]], look: Look) -> Safe:
    """A line through points, distinguishable by its dashes as well as its colour."""
    path = "".join(f"{'L' if index else 'M'}{at(x)} {at(y)}" for index, (x, y) in enumerate(points))
    dash = look[1] % 4
    return tag("g", tag("path", d=path, class_=f"curve dash{dash}" if dash else "curve"), class_=f"c{look[0]}")


def _legend(names: Mapping[str, Look]) -> Safe:
    """Legend of names with their colours and markers."""
    items = []
    for name, (colour, shape) in names.items():
        sign = tag("svg", tag("path", d=SHAPES[shape], class_="dot"), viewBox="-6 -6 12 12", class_="sign", aria_hidden="true")
        items.append(tag("span", sign, name, class_=f"c{colour}"))
    return tag("div", *items, class_="keys")


def _side(words: str, top: float, bottom: float) -> Safe:
    """The title of an axis, written along it."""
    middle = (top + bottom) / 2
    return text(words, 12, middle, "middle", transform=f"rotate(-90 12 {at(middle)})")


def _share(value: float) -> str:
    return f"{100 * value:.3g} %"


def bucket_figure(rows: Sequence[Row], rules: Mapping[str, str], distance: str) -> Safe:
    """Two panels by bucket: above, the distances of tokens; below, the share of tokens on which each rule would act.

    Args:
        rules: names and titles of the rules.
        distance: what the total variation is called.
    """

    def draw(width: int) -> tuple[list[Safe], int]:
        narrow = width == NARROW
        height, top, middle, bottom, left, right = 430, 16, 200, 64 if narrow else 54, 54 if narrow else 76, 8
        each = (width - left - right) / len(rows)
        tv = Axis.decades([1.0, *(row[name] for row in rows for name in ("tv", "tv_max"))], middle - 28, top)
        most = max((row[name] for row in rows for name in rules if row["tokens"] >= _FEW), default=0.0) or 0.01
        share = Axis(0.0, min(1.0, 1.1 * most), height - bottom, middle + 12, math.sqrt)
        parts = [*tv.lines(number, left, width - right), *share.lines(_share, left, width - right, 18)]
        if not narrow:
            parts += [_side(distance, top, middle - 28), _side("would act on", middle, height - bottom)]
        for place, row in enumerate(rows):
            x = left + (place + 0.5) * each
            parts.append(_spread_mark(row, x, tv, min(14.0, each * 0.3), distance))
            for index, (name, title) in enumerate(rules.items()):
                said = f"{row['name']}: {title} would act on {percent(row[name])} of {count(row['tokens'], 'token')}"
                beside = x + (index - (len(rules) - 1) / 2) * each * 0.2
                parts.append(mark(LOOKS[name], beside, share(row[name]), said, hollow=row["tokens"] < _FEW))
            down = 18 + (14 * (place % 2) if narrow else 0)
            parts.append(text(row["name"], x, height - bottom + down, "middle", class_="name"))
            if not narrow:
                parts.append(text(f"{row['tokens']:,}", x, height - bottom + 34, "middle"))
        unit = "old probability" if narrow else "old probability of the sampled token, and how many there are"
        parts.append(text(unit, width - right, height - 4, "end"))
        return parts, height

    caption = (
        f"Above: {distance}, mean (●), 99.9th percentile (—), largest (▲). Below: share of the tokens on which each "
        f"rule would act, on an axis that grows like a square root. Hollow: fewer than {_FEW} tokens."
    )
    keys = _legend({title: LOOKS[name] for name, title in rules.items()})
    return drawn_figure("Where tokens went, and who would act on them", caption, draw, keys)


def _spread_mark(row: Row, x: float, tv: Axis, half: float, distance: str) -> Safe:
    """Mean, 99.9th percentile and largest TV of a bucket."""
    mean, high, largest = row["tv"], row["tv_p999"], row["tv_max"]
    said = f"{row['name']}: {count(row['tokens'], 'token')}, {distance} mean {number(mean)}, 99.9th percentile {number(high)}, "
    marks = [tag("title", f"{said}largest {number(largest)}")]
    if mean > 0:
        marks.append(tag("circle", cx=at(x), cy=at(tv(mean)), r=5, class_="dot"))
    if high > 0:
        marks.append(line(x - half, tv(high), x + half, tv(high), "high"))
    if largest > 0:
        marks.append(tag("path", d=SHAPES[3], transform=f"translate({at(x)} {at(tv(largest))})", class_="dot ring"))
    return tag("g", *marks, class_="c7")


def threshold_figure(rows: Sequence[Threshold], kl_bound: float, *, certain: bool) -> Safe:
    """Share of tokens blocked inside the KL ball (across) against the share missed (up), with a curve for each rule."""
    drawn = {name: own for name in _OBJECTIVES if (own := [row for row in rows if row.family == name])}

    def errors(row: Threshold) -> tuple[float, float]:
        return row.kl.blocked_inside / row.kl.tokens, row.kl.passed_outward / row.kl.tokens

    points = [errors(row) for own in drawn.values() for row in own]
    furthest = [max((point[side] for point in points), default=0.0) or 1e-4 for side in (0, 1)]

    def draw(width: int) -> tuple[list[Safe], int]:
        x, y, parts, height = _plane(width, 400, "blocked inside the KL ball", "missed outside it")
        across, up = Axis(0.0, furthest[0], *x, math.sqrt), Axis(0.0, furthest[1], *y, math.sqrt)
        parts += _grid(across, up, _share, _share)
        for name, own in drawn.items():
            places = [(across(a), up(b)) for a, b in map(errors, own)]
            parts.append(_curve(places, LOOKS[name]))
            for (a, b), row in zip(places, own, strict=True):
                inside, missed = errors(row)
                said = (
                    f"{row.title}, {row.symbol} = {row.bound:g}: would block {percent(row.share)}, {percent(inside)} of all "
                    f"tokens inside the ball, and miss {percent(missed)}"
                )
                parts.append(mark(LOOKS[name], a, b, said, hollow=not row.default, size=1.3 if row.default else 1.0))
                if row.default or name == "clip":
                    end = a > x[1] - 40  # a number at the right edge stands before its point
                    parts.append(
                        text(f"{row.bound:g}", a + (-8 if end else 8), b - 6, "end" if end else "start", class_="name")
                    )
        return parts, height

    caption = (
        f"Against the ball KL ≤ {number(kl_bound)}{'' if certain else ', as far as was logged'}. Nearer to the lower left is "
        "better; filled: the published bound. Axes grow like a square root. The other rules are in the table."
    )
    return drawn_figure(
        "Two ways to be wrong", caption, draw, _legend({own[0].title: LOOKS[name] for name, own in drawn.items()})
    )


_POINTS, _MARKS = 600, 80
"""Number of steps on a curve, and number of markers."""


def step_figure(
    title: str,
    caption: str,
    rows: Sequence[Row],
    curves: Mapping[str, tuple[str, Look]],
    *,
    moment: str = "step",
    label: str,
    share: bool = False,
    alarm: Row | None = None,
) -> Safe:
    """Columns of values by step with a few markers; a dashed line marks the first alarm.

    Args:
        curves: title and look of each column that is drawn; values of 0 and of infinity are left out.
        moment, label: what the axes are called.
        share: whether values are shares, on a plain axis; else the axis is logarithmic.
    """
    rows = rows[:: math.ceil(len(rows) / _POINTS)]
    found = {name: [(row["step"], row[name]) for row in rows if row[name] and row[name] < math.inf] for name in curves}
    found = {name: points for name, points in found.items() if points}
    steps = [row["step"] for row in rows]
    show = _share if share else number

    def draw(width: int) -> tuple[list[Safe], int]:
        x, y, parts, height = _plane(width, 300, moment, label)
        across = Axis(min(steps), max(steps), *x)
        up = Axis(0.0, 1.0, *y) if share else Axis.decades([value for own in found.values() for _, value in own], *y)
        parts += _grid(across, up, lambda value: f"{value:,.0f}" if value == round(value) else "", show)
        for name, points in found.items():
            words, look = curves[name]
            parts.append(_curve([(across(step), up(value)) for step, value in points], look))
            few = points[:: math.ceil(len(points) / _MARKS)]
            parts += [mark(look, across(step), up(value), f"{moment} {step:,}: {words} {show(value)}") for step, value in few]
        if alarm is not None:
            place = {"x1": at(across(alarm["step"])), "x2": at(across(alarm["step"])), "y1": at(y[1]), "y2": at(y[0])}
            parts.append(tag("line", tag("title", alarm["sentence"]), **place, class_="bound"))
        return parts, height

    if alarm is not None:
        caption += f" Dashed: step {alarm['step']:,}, where a collapse announces itself."
    return drawn_figure(title, caption, draw, _legend({curves[name][0]: curves[name][1] for name in found}))


_Ends = tuple[float, float]


def _plane(width: int, height: int, across: str, upward: str) -> tuple[_Ends, _Ends, list[Safe], int]:
    """Ends of both axes of a figure of this size, from low to high, the axis titles, and the height."""
    narrow = width == NARROW
    x, y = (60 if narrow else 76, width - (10 if narrow else 20)), (height - 50, 16)
    parts = [] if narrow else [_side(upward, y[1], y[0])]
    words = f"across: {across}; up: {upward}" if narrow else across
    return x, y, [*parts, text(words, x[1], y[0] + 38, "end")], height


def _grid(x: Axis, y: Axis, across: Callable[[float], str], upward: Callable[[float], str]) -> list[Safe]:
    """Lines of the grid with their numbers."""
    parts = y.lines(upward, x.start, x.stop, 26)
    for value in x.ticks(56):
        parts += [line(x(value), y.start, x(value), y.stop, "grid"), text(across(value), x(value), y.start + 18, "middle")]
    return parts


def ratio_figure(tokens: Tokens, rules: Mapping[str, Any]) -> Safe:
    """2-d histogram: ratio of the sampled token, across, against the true TV, up. The clip range is in the middle."""
    log_ratio = np.nan_to_num(tokens.logp_new.clip(-80, 0) - tokens.logp_old.clip(-80, 0))
    edges = clip_edges(rules["clip"])
    low, high = _window(log_ratio, edges)
    tv = np.log10(tokens.tv.clip(_LOWEST_TV, 1) / _LOWEST_TV) / -math.log10(_LOWEST_TV)
    kinds = tokens.kinds("tv", rules["tv_bound"])

    def draw(width: int) -> tuple[list[Safe], int]:
        narrow = width == NARROW
        height, top, bottom, left, right = 300 if narrow else 440, 14, 44, 54 if narrow else 76, 10
        columns, rows = (34, 26) if narrow else (72, 40)
        up = Axis(_LOWEST_TV, 1.0, height - bottom, top, math.log10)
        wide, tall = (width - left - right) / columns, (height - top - bottom) / rows
        index = _place((log_ratio - low) / (high - low), columns) * rows + _place(tv, rows)
        cells = {cell: dict.fromkeys(REGIONS, 0) for cell in np.unique(index).tolist()}
        for kind in REGIONS:
            for cell, tokens in zip(*map(np.ndarray.tolist, np.unique(index[kinds == kind], return_counts=True)), strict=True):
                cells[cell][kind] = tokens
        most = max(sum(counts.values()) for counts in cells.values())
        parts = up.lines(number, left, width - right)
        for cell, counts in cells.items():
            column, row = divmod(cell, rows)
            shade = 0.3 + 0.7 * math.log1p(sum(counts.values())) / math.log1p(most)
            said = tag("title", "; ".join(f"{counts[kind]:,} {words}" for kind, (_, words) in REGIONS.items() if counts[kind]))
            corner = {"x": at(left + column * wide), "y": at(height - bottom - (row + 1) * tall)}
            size = {"width": at(wide - 0.5), "height": at(tall - 0.5)}
            box = tag("rect", said, **corner, **size, fill_opacity=f"{shade:.2f}", class_="cell")
            parts.append(tag("g", box, class_=REGIONS[max(counts, key=lambda kind: counts[kind])][0]))
        shown: list[float] = []
        for place, ratio in enumerate((*edges, *_TICKS)):  # the edges of the range before round numbers
            if not (ratio > 0 and low <= math.log(ratio) <= high):
                continue
            x = left + (math.log(ratio) - low) / (high - low) * (width - left - right)
            if all(abs(x - other) > 34 for other in shown):
                parts.append(text(f"{ratio:.3g}", x, height - bottom + 18, "middle"))
                shown.append(x)
            if place < len(edges):
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
    keys = tag("div", *(tag("span", tag("i"), words, class_=colour) for colour, words in REGIONS.values()), class_="keys")
    return drawn_figure("What clipping sees, and what happened", caption, draw, keys)


def _window(log_ratio: Floats, edges: Sequence[float]) -> tuple[float, float]:
    """The visible part of the axis of log ratios: 99.5 % of the tokens, limited to between three and twelve clip ranges."""
    ends = [math.log(max(edge, 1e-3)) for edge in edges] or [-0.2, 0.2]
    middle, half = (ends[0] + ends[1]) / 2, (ends[1] - ends[0]) / 2
    reach = float(np.quantile(np.abs(log_ratio - middle), 0.995))
    reach = min(max(reach, 3 * half), 12 * half)
    return middle - reach, middle + reach


def clip_edges(clip: Mapping[str, Any]) -> tuple[float, ...]:
    """Ratios at which clipping begins; empty if clipping looks at whole completions."""
    if clip["name"] == "gspo":
        return ()
    if clip["name"] == "gmpo":
        return math.exp(-clip["clip"]), math.exp(clip["clip"])
    return 1 - clip["clip_low"], 1 + clip["clip_high"]


def _place(share: Floats, cells: int) -> Any:
    """Index of the cell, among `cells` cells, for a share of the axis."""
    return (share.clip(0, 1) * cells).astype(int).clip(0, cells - 1)
