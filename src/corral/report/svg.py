"""Figures that are drawn in Python, for pages that show them without a script: once wide and once narrow, for phones."""

import math
from collections.abc import Callable, Sequence

from corral.report.html import Safe, tag

WIDE, NARROW = 820, 360
"""Widths of the two drawings, of which a page shows the one that fits."""

Draw = Callable[[int], tuple[Sequence[Safe], int]]
"""A width → what is drawn, and how high it is."""


def drawn_figure(title: str, caption: str, draw: Draw, legend: Safe | None = None, **attributes: str) -> Safe:
    """A figure with both drawings; a page's script adds what reads and saves it."""
    pictures = []
    for width, kind in ((WIDE, "wide"), (NARROW, "narrow")):
        parts, height = draw(width)
        label = f"{title}. {caption} Arrow keys read it."
        pictures.append(tag("svg", *parts, viewBox=f"0 0 {width} {height}", role="img", aria_label=label, class_=kind))
    return tag(
        "figure", tag("h3", title), tag("figcaption", caption), legend, tag("div", *pictures, class_="body"),
        class_="drawn", **attributes,
    )  # fmt: skip


def text(content: str, x: float, y: float, anchor: str = "start", **more: str) -> Safe:
    """Words at a place."""
    return tag("text", content, x=at(x), y=at(y), text_anchor=anchor, **more)


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Safe:
    """From here to there; `kind` is its class."""
    return tag("line", x1=at(x1), y1=at(y1), x2=at(x2), y2=at(y2), class_=kind)


def at(value: float) -> str:
    """A coordinate."""
    return f"{value:.1f}"


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers between two, about so many."""
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
