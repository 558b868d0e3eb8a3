"""The forest plot of a comparison: every difference of two contestants with the interval that its sentence is about."""

from collections.abc import Mapping, Sequence
from typing import Any

from corral.lab.report.html import NARROW, Safe, at, drawn_figure, line, shorten, tag, text, ticks
from corral.lab.report.looks import SHAPES, Look, short_labels
from corral.lab.report.statistics import plain, signed

_FEW = 8
"""Pairs that are drawn together whatever they say; of more, those without a claim are folded."""

_MOST = 40
"""Ties that are drawn; the table has all."""

_CAPTION = (
    "differences of runs with equal seeds, {what}: mean and Student's 95 % interval, which the sentences are about · filled: a "
    "claim that holds among all pairs (Holm) · hollow: no difference can be claimed"
)

_Row = dict[str, Any]


def forest(rows: Sequence[_Row], looks: Mapping[str, Look], what: str) -> Safe | None:
    """A figure per problem, the winner first; ties folded where there are many. None where nothing was compared."""
    made = []
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    for problem in problems:
        ordered = sort_pairs([row for row in rows if row["problem"] == problem])
        claims = [row for row in ordered if row["claimed"]]
        first = ordered if len(ordered) <= _FEW else (claims or ordered[:_FEW])
        rest = ordered[len(first) :]
        title = "Who is better, and by how much" + (f": {shorten(problem, 60)}" if len(problems) > 1 else "")
        ends = _ends(ordered)
        made.append(_figure(title, first, looks, what, ends))
        if rest:
            folded = f"The figure of {min(len(rest), _MOST)} of {len(rest)} pairs between which no difference can be claimed"
            made.append(tag("details", tag("summary", folded), _figure(f"{title}: ties", rest[:_MOST], looks, what, ends)))
    return tag("div", *made, class_="figures wide", id="forest") if made else None


def sort_pairs(rows: Sequence[_Row]) -> list[_Row]:
    """Each pair from the side of who is ahead; claims first, the largest difference first."""
    turned = [_turn(row) if row["difference"] < 0 else row for row in rows]
    return sorted(turned, key=lambda row: (not row["claimed"], -row["difference"]))


def _turn(row: _Row) -> _Row:
    """Swap the two sides of a difference."""
    low, high = (None if end is None else -end for end in (row["high"], row["low"]))
    return {
        **row, "ours": row["theirs"], "theirs": row["ours"], "our_objective": row["their_objective"],
        "their_objective": row["our_objective"], "difference": -row["difference"], "low": low, "high": high,
    }  # fmt: skip


def _ends(rows: Sequence[_Row]) -> tuple[float, float]:
    """The ends of the axis, which holds every interval and 0."""
    values = [0.0, *(end for row in rows for end in (row["difference"], row["low"], row["high"]) if end is not None)]
    low, high = min(values), max(values)
    room = 0.04 * (high - low) or 1.0
    return low - room, high + room


def _figure(title: str, rows: Sequence[_Row], looks: Mapping[str, Look], what: str, ends: tuple[float, float]) -> Safe:
    both = list(dict.fromkeys(row[side] for row in rows for side in ("ours", "theirs")))
    short = dict(zip(both, short_labels(both, 24), strict=True))
    names = [f"{short[row['ours']]} − {short[row['theirs']]}" for row in rows]
    unit = rows[0]["unit"]

    def draw(width: int) -> tuple[list[Safe], int]:
        narrow = width == NARROW
        left = 10.0 if narrow else min(320.0, 24 + 7.0 * max(map(len, names)))
        right = 14.0 if narrow else 190.0
        each, top = (50, 14) if narrow else (30, 8)
        height = top + each * len(rows) + 40

        def px(value: float) -> float:
            return left + (value - ends[0]) / (ends[1] - ends[0]) * (width - left - right)

        parts = []
        for tick in ticks(*ends, 4 if narrow else 7):
            parts.append(line(px(tick), top, px(tick), height - 34, "zero" if tick == 0 else "grid"))
            parts.append(text(f"{tick:+g}".replace("-", "−") if tick else "0", px(tick), height - 18, "middle"))
        parts.append(text(f"{what}, {unit}" if unit else what, width - right, height - 3, "end"))
        for place, (row, name) in enumerate(zip(rows, names, strict=True)):
            y = top + each * (place + 0.5) + (10 if narrow else 0)
            parts.append(
                text(
                    shorten(name, 80),
                    left if narrow else left - 12,
                    y - 14 if narrow else y + 4,
                    "start" if narrow else "end",
                    class_="name",
                )
            )
            if narrow:
                parts.append(text(_numbers(row), width - right, y - 14, "end"))
            else:
                parts.append(text(_numbers(row), width - right + 14, y + 4, class_="name" if row["claimed"] else ""))
            parts.append(_mark(row, looks[row["our_objective"]], px, y))
        return parts, height

    return drawn_figure(title, _CAPTION.format(what=what), draw, data_table="comparisons")


def _mark(row: _Row, look: Look, px: Any, y: float) -> Safe:
    """Interval and mean of a pair, in the colour and with the marker of who is ahead."""
    inside = [tag("title", row["sentence"])]
    if row["low"] is not None:
        inside.append(line(px(row["low"]), y, px(row["high"]), y, "whisker"))
    place = f"translate({at(px(row['difference']))} {at(y)}) scale(1.5)"
    inside.append(tag("path", d=SHAPES[look[1]], transform=place, class_="dot" if row["claimed"] else "dot ring"))
    return tag("g", *inside, class_=f"c{look[0]} pair {'claim' if row['claimed'] else 'tie'}")


def _numbers(row: _Row) -> str:
    """`+13.6 [10.8…16.4]`."""
    interval = "" if row["low"] is None else f" [{plain(row['low'])}…{plain(row['high'])}]"
    return f"{signed(row['difference'])}{interval}"
