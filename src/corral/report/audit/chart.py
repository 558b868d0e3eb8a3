"""Axes, curves and legends of an audit's charts, drawn for screens and for phones."""

import math
from collections.abc import Callable, Mapping, Sequence

from corral.report.html import Safe, tag
from corral.report.looks import SHAPES, Look
from corral.report.svg import NARROW, at, line, text

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
