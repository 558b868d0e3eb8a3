"""`corral explore`: a page on which one drags a policy and sees the trust regions around it."""

import argparse
import sys
from pathlib import Path

from corral.cli import refuse
from corral.report.explore import explore_page
from corral.run.files import RunError, write_whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the page goes."""
    parser.add_argument("--out", metavar="PAGE", type=Path, default=Path("explore.html"), help="default: explore.html, here")


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Write the page, whole."""
    if rest:
        return refuse(f"explore takes --out and nothing else; got {' '.join(rest)}.")
    out: Path = arguments.out
    if out.is_dir():
        return refuse(f"--out is the file to write, and {out} is a folder. Try --out {out / 'explore.html'}")
    if not out.parent.is_dir():
        return refuse(f"there is no folder {out.parent} to write {out.name} into. Make it first, or choose another --out.")
    page = explore_page()
    try:
        write_whole(out, lambda beside: beside.write_text(page, encoding="utf-8"))
    except RunError as error:
        return refuse(str(error), status=1)
    sys.stdout.write(f"{out}: open it in a browser; it needs nothing else.\n")
    return 0
