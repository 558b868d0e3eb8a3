"""Command `corral report DIR… --out page.html`: write a page that compares runs."""

import argparse
import sys
import webbrowser
from pathlib import Path

from corral.lab.cli import check_installed, say

NEEDED = ("rliable", "pandas", "pyarrow", "scipy", "jinja2")
"""Python packages needed for statistics and pages of reports."""

_EPILOG = """
DIR is a run's folder, or a folder that holds runs; several are shown together.
The page is one file that asks the network for nothing: send it to anybody.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `corral report` to the parser."""
    parser.epilog = _EPILOG
    parser.add_argument("runs", metavar="DIR", nargs="+", type=Path, help="a run, or a folder of runs")
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("report.html"), help="the page (report.html)")
    parser.add_argument(
        "--export", metavar="DIR", type=Path, help="also write every figure as SVG and PNG, and every table as CSV"
    )
    parser.add_argument("--title", metavar="TEXT", help="of the page; by default the task and the objectives")
    parser.add_argument(
        "--threshold", metavar="X", type=float, help="success (0 to 1) for the steps to it; by default .9 of the best end"
    )
    parser.add_argument("--open", action="store_true", help="then open the page in the default browser")
    parser.add_argument("--quiet", action="store_true", help="say only what is wrong")


def open_page(page: Path) -> str:
    """Open a page in the default browser. Returns "", or the reason why no browser opened."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):  # in a batch job a browser for text would wait for keys forever
        return f"--open works in a terminal alone, so no browser was started. The page is {page}."
    if webbrowser.open(page.resolve().as_uri()):
        return ""
    return f"no browser was found to open {page}. Copy the file to a computer that has one, or name it in the variable BROWSER."


def run(arguments: argparse.Namespace) -> int:
    """Write the report page and the exported files, then print the findings and the paths."""
    check_installed("reports need", NEEDED, "report")
    from corral.lab.report.content import make_report
    from corral.lab.report.export import export
    from corral.lab.report.page import write_page
    from corral.lab.report.read import read_comparisons, read_runs
    from corral.lab.run.text import count

    runs = read_runs(arguments.runs)
    comparisons, notes = read_comparisons(arguments.runs, runs)
    report = make_report(runs, comparisons, title=arguments.title, threshold=arguments.threshold, notes=notes)
    size = write_page(report, arguments.out)
    lines = [f"Usable {sweep.key} of {found.sentence}" for sweep in report.sweeps for found in sweep.ranges]
    lines += [row["sentence"] for row in report.tables["comparisons"] if row["measure"] == "final"]
    if arguments.export is not None:
        lines.append(f"{len(export(report, arguments.export))} figures and tables are in {arguments.export}")
    lines.append(f"The report of {count(len(report.runs), 'run')} is in {arguments.out} ({size / 1e6:.1f} MB).")
    if not arguments.quiet:
        say(*lines)
    if arguments.open and (problem := open_page(arguments.out)):
        say(problem)
    return 0
