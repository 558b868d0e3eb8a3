"""Axes, markers and lines of an audit's charts, as SVG without a script."""

import math
from collections.abc import Callable, Mapping, Sequence

from corral.report.html import Safe, tag
from corral.report.looks import SHAPES

WIDTH, LEFT, RIGHT = 860, 70, 20

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


def sides(x: Axis, y: Axis, labels: tuple[str, str], show: tuple[Callable[[float], str], Callable[[float], str]]) -> list[Safe]:
    """Lines of the grid with their numbers, and what the axes are called."""
    parts = []
    for value in y.ticks(26):
        parts.append(tag("line", x1=at(x.start), x2=at(x.stop), y1=at(y(value)), y2=at(y(value)), class_="grid"))
        parts.append(text(show[1](value), x.start - 7, y(value) + 4, "end"))
    for value in x.ticks(56):
        parts.append(tag("line", x1=at(x(value)), x2=at(x(value)), y1=at(y.start), y2=at(y.stop), class_="grid"))
        parts.append(text(show[0](value), x(value), y.start + 18, "middle"))
    middle = (y.start + y.stop) / 2
    parts.append(text(labels[1], 12, middle, "middle", transform=f"rotate(-90 12 {at(middle)})"))
    parts.append(text(labels[0], x.stop, y.start + 36, "end"))
    return parts


def line(points: Sequence[tuple[float, float]], dash: int = 0) -> Safe:
    """A curve through points; `dash` tells curves apart without their colours."""
    path = "".join(f"{'L' if index else 'M'}{at(x)} {at(y)}" for index, (x, y) in enumerate(points))
    return tag("path", d=path, class_=f"curve dash{dash}" if dash else "curve")


def marker(shape: int, x: float, y: float, size: float, title: str, *, hollow: bool = False) -> Safe:
    """One of the markers that objectives have, around a point, with its numbers as a title."""
    place = f"translate({at(x)} {at(y)}) scale({size / 4:g})"
    style = "dot ring" if hollow else "dot"
    return tag("path", tag("title", title), d=SHAPES[shape % len(SHAPES)], transform=place, class_=style)


def legend(names: Mapping[str, tuple[int, int]]) -> Safe:
    """Names with the colour and the marker that stand for them."""
    items = []
    for name, (colour, shape) in names.items():
        sign = tag("svg", marker(shape, 7, 7, 4.5, name), viewBox="0 0 14 14", class_="sign", aria_hidden="true")
        items.append(tag("span", sign, name, class_=f"c{colour}"))
    return tag("div", *items, class_="keys")


def figure(title: str, caption: str, keys: Safe, parts: Sequence[Safe], height: float) -> Safe:
    """A chart with its heading, its words and its legend."""
    drawn = tag("svg", *parts, viewBox=f"0 0 {WIDTH} {at(height)}", role="img", aria_label=f"{title}. {caption}")
    scrolled = tag("div", drawn, class_="audit-figure", tabindex="0", role="region", aria_label=title)
    return tag("figure", tag("h3", title), tag("figcaption", caption), keys, scrolled)


def text(content: str, x: float, y: float, anchor: str, **more: str) -> Safe:
    """Some words."""
    return tag("text", content, x=at(x), y=at(y), text_anchor=anchor, **more)


def at(value: float) -> str:
    """A coordinate."""
    return f"{value:.1f}"
