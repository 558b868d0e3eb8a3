"""Colours and markers of objectives in charts, equal on every page and in every figure, safe for colour-blind readers."""

from collections.abc import Iterable
from zlib import crc32

from corral.objective import OBJECTIVES

LIGHT = ("#1b65c7", "#e5520a", "#2f996a", "#a63486", "#7e4b0b", "#0a94e0", "#71000c", "#303654")
DARK = ("#568bfb", "#ff9b02", "#32d290", "#d0a6ec", "#f2e967", "#b3eafa", "#cf3433", "#8896a1")
"""Colours of objectives on dark paper; `LIGHT` has the colours on light paper.

Their contrast with the paper is at least 3 : 1, and they differ under deuteranopia, protanopia and tritanopia."""

MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
"""Markers of points in charts, by matplotlib's names."""

SHAPES = (
    "M-4 0A4 4 0 1 0 4 0A4 4 0 1 0 -4 0Z",
    "M-3.6-3.6H3.6V3.6H-3.6Z",
    "M0-5L5 0L0 5L-5 0Z",
    "M0-5L4.8 3.6H-4.8Z",
    "M0 5L4.8-3.6H-4.8Z",
    "M-1.6-4.6H1.6V-1.6H4.6V1.6H1.6V4.6H-1.6V1.6H-4.6V-1.6H-1.6Z",
    "M0-1.9L2.6-4.5L4.5-2.6L1.9 0L4.5 2.6L2.6 4.5L0 1.9L-2.6 4.5L-4.5 2.6L-1.9 0L-4.5-2.6L-2.6-4.5Z",
    "M0-5.4L1.5-1.8L5.3-1.6L2.4.9L3.3 4.5L0 2.5L-3.3 4.5L-2.4.9L-5.3-1.6L-1.5-1.8Z",
)
"""Markers of points in charts as SVG path data (`d`) around the origin, in the order of `MARKERS`."""

_KNOWN = {name: place for place, name in enumerate(OBJECTIVES)} | {"tce": 13, "bbrl": 14, "sb3-ppo": 15, "sb3-ppo-gsde": 16}
"""Mapping from objective to the index of its fixed colour and marker.

No robot algorithm shares an index with an objective for language models."""

_LOOKS = len(LIGHT) * len(MARKERS)

Look = tuple[int, int]
"""Look of an objective in charts: index of its colour, and index of its marker."""


def assign_looks(names: Iterable[str]) -> dict[str, Look]:
    """Assign a colour and a marker to every method name, such as `troll` or `troll bound=0.1`.

    The first variant of an objective gets the objective's own.
    """
    found: dict[str, Look] = {}
    for name in dict.fromkeys(names):
        base = name.partition(" ")[0]
        wish = _KNOWN.get(base, crc32(base.encode(errors="replace")) % _LOOKS)
        # Another variant of an objective has another colour, if one is left, before it has another marker.
        used = {colour for colour, _ in found.values()}
        others = [(wish + place) % _LOOKS for place in range(_LOOKS)]
        places = [wish, *sorted(others, key=lambda place: _look(place)[0] in used)]
        found[name] = next((look for place in places if (look := _look(place)) not in found.values()), _look(wish))
    return found


def _look(place: int) -> Look:
    """Return the colour and marker at index `place`. The first eight looks differ in both; later looks are new combinations."""
    row, colour = divmod(place, len(LIGHT))
    return colour, (colour + 3 * row) % len(MARKERS)


def palette_css() -> str:
    """Write the colours as CSS variables --c0 … --c7 for the light and the dark theme, with light as the default."""
    light, dark = ("".join(f"--c{place}:{colour};" for place, colour in enumerate(colours)) for colours in (LIGHT, DARK))
    return (
        f":root{{{light}}}@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
        f":root[data-theme=dark]{{{dark}}}@media print{{:root:root:root{{{light}}}}}"
    )


def fit(label: str, most: int = 40) -> str:
    """Shorten a curve's label in its middle, because labels differ mostly at their ends."""
    return label if len(label) <= most else f"{label[: most // 2]}…{label[len(label) - most // 2 + 1 :]}"
