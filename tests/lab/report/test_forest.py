"""The forest plot: who is ahead, sorted, with the intervals of the sentences; ties folded where there are many."""

import re
from typing import Any

from corral.lab.report.forest import forest, sort_pairs
from corral.lab.report.html import NARROW, WIDE, macros, ticks
from corral.lab.report.looks import assign_looks
from corral.lab.report.page import sentence_pairs


def pair(ours: str, theirs: str, difference: float, claimed: bool, problem: str = "p") -> dict[str, Any]:
    low, high = (difference - 3, difference + 3) if claimed else (difference - 30, difference + 30)
    return {
        "problem": problem, "ours": ours, "theirs": theirs, "our_objective": ours, "their_objective": theirs, "unit": "points",
        "difference": difference, "low": low, "high": high, "claimed": claimed, "sentence": f"{ours} {theirs} {difference}",
    }  # fmt: skip


ROWS = [pair("a", "b", -10.0, True), pair("c", "a", 4.0, False), pair("c", "b", 20.0, True)]


def test_pairs_are_seen_from_who_is_ahead_claims_first_and_large_ones_first() -> None:
    found = [(row["ours"], row["theirs"], row["difference"], row["low"], row["high"]) for row in sort_pairs(ROWS)]
    assert found == [("c", "b", 20.0, 17.0, 23.0), ("b", "a", 10.0, 7.0, 13.0), ("c", "a", 4.0, -26.0, 34.0)]


def test_golden_places_of_means_and_intervals() -> None:
    """The axis holds −26 … 34 and 4 % of that to either side: −28.4 … 36.4, along 24 + 7 · 5 = 59 … 820 − 190 pixels."""
    drawn = str(forest(ROWS, assign_looks(["a", "b", "c"]), "final success"))
    wide = drawn.partition("</svg>")[0]
    px = lambda value: 59 + (value + 28.4) / 64.8 * (WIDE - 190 - 59)  # noqa: E731 - the formula above
    marks = [float(x) for x in re.findall(r'transform="translate\(([\d.]+) ', wide)]
    ends = [
        tuple(map(float, found)) for found in re.findall(r'<line x1="([\d.]+)" y1="[\d.]+" x2="([\d.]+)" [^>]*whisker', wide)
    ]
    assert [abs(x - px(value)) < 0.06 for x, value in zip(marks, (20, 10, 4), strict=True)] == [True] * 3
    assert all(
        abs(a - px(low)) < 0.06 and abs(b - px(high)) < 0.06
        for (a, b), (low, high) in zip(ends, ((17, 23), (7, 13), (-26, 34)), strict=True)
    )
    assert wide.count('class="dot ring"') == 1
    assert f'viewBox="0 0 {NARROW} ' in drawn
    assert "+20.0 [17.0…23.0]" in wide


def test_many_ties_are_folded_and_problems_kept_apart() -> None:
    names = [f"n{index}" for index in range(6)]
    many = [pair(a, b, 1.0, False) for index, a in enumerate(names) for b in names[:index]] + [pair("n1", "n0", 9.0, True)]
    looks = assign_looks(names)
    found = macros("report.html").verdict(sentence_pairs(sort_pairs(many)), forest(many, looks, "final success"))
    first, _, rest = found.partition("<details")
    assert first.count('pair claim">') == 2, "wide and narrow"
    assert "The figure of 15 of 15 pairs" in rest
    assert "No difference can be claimed between 15 of 16 pairs" in rest
    two = str(forest([*ROWS, pair("a", "b", 1.0, False, "other")], assign_looks(["a", "b", "c"]), "x"))
    assert two.count("<figure") == 2
    assert forest([], {}, "x") is None


def test_ticks_are_round() -> None:
    assert ticks(-28.4, 36.4, 7) == [-20, -10, 0, 10, 20, 30]
    assert ticks(0.0, 1.0, 4) == [0, 0.25, 0.5, 0.75, 1.0]
