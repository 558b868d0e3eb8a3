"""The page of `corral explore`: three trust regions around a policy that one drags. Built from the parts beside this file."""

from pathlib import Path
from string import Template

import corral
from corral.lab.report.html import Safe, csp_hash, tag
from corral.lab.report.looks import SHAPES, Look, assign_looks, palette_css

_PARTS = Path(__file__).parent
_SCRIPTS = ("maths.js", "simplex.js", "methods.js", "support.js", "page.js")
"""In the order in which they use each other."""

_METHODS = {"clip": "ppo_clip", "dppo": "dppo", "troll": "troll"}


def explore_page() -> str:
    """Return a self-contained page whose Content-Security-Policy allows its own style and script alone, by their digests."""
    style = palette_css() + _read("style.css")
    script = "\n".join(_read(name) for name in _SCRIPTS)
    policy = (
        f"default-src 'none'; img-src data:; style-src {csp_hash(style)}; script-src {csp_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    looks = {name: _sign(look) for name, look in zip(_METHODS, assign_looks(_METHODS.values()).values(), strict=True)}
    return Template(_read("page.html")).substitute(
        policy=policy, style=style, script=script, version=corral.__version__, **looks
    )


def _sign(look: Look) -> Safe:
    """The colour and the marker that the objective has in reports."""
    return tag("svg", tag("path", d=SHAPES[look[1]]), viewBox="-6 -6 12 12", class_=f"sign c{look[0]}", aria_hidden="true")


def _read(name: str) -> str:
    return (_PARTS / name).read_text(encoding="utf-8")
