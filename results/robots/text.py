"""Tables and environment steps as docs/results/robots.md writes them."""

from functools import partial

from results.pages import markdown

spaced_table = partial(markdown, rule=" --- ")


def thousands(steps: float) -> str:
    """Environment steps for people."""
    return f"{steps / 1e6:.2f} million" if steps >= 1e6 else f"{steps / 1e3:.0f} thousand"
