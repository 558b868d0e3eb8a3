"""The story of an audit: four cells, blocked or passed, inside the ball or outside, and one number in large."""

from collections.abc import Mapping
from typing import Any

from corral.audit.summary import Ball
from corral.audit.words import number, percent
from corral.report.audit.figures import REGIONS
from corral.report.html import Safe, join, tag
from corral.run.text import count

_CELLS = {
    "false": ("False alarm", "blocked, though the policy has hardly moved"),
    "right": ("Blocked rightly", "the policy has left the ball"),
    "passed": ("Passed", "inside, as it should be"),
    "missed": ("Missed", "outside and pushed further out, yet left alone"),
}
"""Row by row: blocked, then passed; inside the ball, then outside."""


_FEWER, _MORE = "≤ ", "≥ "
_BOUNDED = {
    "false": (_FEWER, "blocked, and inside as far as was logged"),
    "right": (_MORE, "the policy has left the ball for certain"),
    "passed": (_FEWER, "inside as far as was logged"),
    "missed": (_MORE, "outside for certain and pushed further out, yet left alone"),
}
"""The same where divergences are lower bounds: the true ones can only move tokens from inside to outside."""


def four_cells(ball: Ball, rules: Mapping[str, Any], *, certain: bool = True) -> Safe:
    """What clipping would do to all audited tokens in an update at the new policy, against the KL ball.

    `certain` unless divergences are lower bounds.
    """
    back = ball.passed_outside - ball.passed_outward
    counts = {"false": ball.blocked_inside, "right": ball.blocked_outside}
    counts |= {"passed": ball.passed_inside, "missed": ball.passed_outward}
    cells = []
    for kind, (name, exact) in _CELLS.items():
        sign, words = ("", exact) if certain else _BOUNDED[kind]
        more = f"; {percent(back / ball.tokens)} more are outside, on their way back" if kind == "missed" and back else ""
        cells.append(
            tag(
                "div",
                tag("b", name), tag("strong", f"{sign}{percent(counts[kind] / ball.tokens)}"),
                tag("span", f"{count(counts[kind], 'token')}: {words}{more}"),
                class_=f"cell-{kind} {REGIONS[kind][0]}",
            )
        )  # fmt: skip
    radius = number(rules["kl_bound"])
    heads = [tag("span", f"inside KL ≤ {radius}", class_="head"), tag("span", "outside", class_="head")]
    return join(_large(headline(ball, certain=certain)), tag("div", *heads, *cells, class_="cells"))


def headline(ball: Ball, *, certain: bool = True) -> str:
    """One number: how many of the tokens that would be blocked had hardly moved; where there are none, what would be missed.

    Of divergences that are lower bounds it says how many can have been inside the ball at most, or are missed at least.
    """
    if ball.blocked:
        share = percent(ball.blocked_inside / ball.blocked)
        moved = "had hardly moved" if certain else "were inside the KL ball"
        return f"{'' if certain else _FEWER}{share} of the tokens that clipping would block {moved}"
    missed = percent(ball.passed_outward / ball.tokens)
    return f"{'' if certain else _MORE}{missed} of the tokens would be missed: clipping would block none"


def _large(sentence: str) -> Safe:
    """The sentence with its number in large."""
    share, of, words = sentence.partition(" of ")
    return tag("p", tag("strong", share), of, words, class_="headline")
