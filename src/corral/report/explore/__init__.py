"""The page of `corral explore`: three trust regions around a policy that one drags. Built from the parts beside this file."""

from pathlib import Path
from string import Template

import corral
from corral.report.html import csp_hash

_PARTS = Path(__file__).parent
_SCRIPTS = ("maths.js", "simplex.js", "methods.js", "page.js")
"""In the order in which they use each other."""


def explore_page() -> str:
    """One self-contained page; its policy lets this style and this script in, by their digests, and nothing else."""
    style = _read("style.css")
    script = "\n".join(_read(name) for name in _SCRIPTS)
    policy = (
        f"default-src 'none'; img-src data:; style-src {csp_hash(style)}; script-src {csp_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return Template(_read("page.html")).substitute(policy=policy, style=style, script=script, version=corral.__version__)


def _read(name: str) -> str:
    return (_PARTS / name).read_text(encoding="utf-8")
