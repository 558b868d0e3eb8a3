"""HTML page of `corral explore`, on which the reader drags a policy's probabilities and sees three trust regions."""

from pathlib import Path
from string import Template

import corral
from corral.lab.report.html import Safe, content_policy
from corral.lab.report.looks import SHAPES, assign_looks, palette_css

_PARTS = Path(__file__).parent
_SCRIPTS = ("maths.js", "simplex.js", "methods.js", "support.js", "page.js")
"""JavaScript files of the explore page, in the order of their dependencies."""

_METHODS = {"clip": "ppo_clip", "dppo": "dppo", "troll": "troll"}


def explore_page() -> str:
    """Build the self-contained HTML page of `corral explore`, whose Content-Security-Policy allows only its own scripts."""
    style = palette_css() + _read("style.css")
    script = "\n".join(_read(name) for name in _SCRIPTS)
    sign = Safe('<svg viewBox="-6 -6 12 12" class="sign c{}" aria-hidden="true"><path d="{}"></path></svg>')
    looks = {
        name: sign.format(colour, SHAPES[marker])
        for name, (colour, marker) in zip(_METHODS, assign_looks(_METHODS.values()).values(), strict=True)
    }
    return Template(_read("page.html")).substitute(
        policy=content_policy(script, style), style=style, script=script, version=corral.__version__, **looks
    )


def _read(name: str) -> str:
    return (_PARTS / name).read_text(encoding="utf-8")
