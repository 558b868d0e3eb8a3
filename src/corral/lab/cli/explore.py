"""Command `corral explore`: write a page that shows trust regions around a policy that can be dragged with the mouse."""

import argparse
from pathlib import Path

from corral.lab.cli import say
from corral.lab.cli.report import open_page
from corral.lab.report.explore import explore_page
from corral.lab.report.html import write_document


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the page's path, and the flag --open, to the parser."""
    parser.add_argument("--out", metavar="PAGE", type=Path, default=Path("explore.html"), help="default: explore.html, here")
    parser.add_argument("--open", action="store_true", help="then open the page in the default browser")


def run(arguments: argparse.Namespace) -> int:
    """Write the interactive page to its path atomically."""
    write_document(explore_page(), arguments.out)
    say(f"{arguments.out}: open it in a browser; it needs nothing else.")
    if arguments.open and (problem := open_page(arguments.out)):
        say(problem)
    return 0
