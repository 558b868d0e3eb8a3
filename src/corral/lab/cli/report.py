"""`corral report DIR… --out page.html`: runs as a page."""

import argparse
from pathlib import Path

from corral.lab.cli import check_installed, refuse, say

NEEDED = ("rliable", "pandas", "pyarrow", "scipy", "jinja2")
"""Packages without which there are no statistics and no pages."""

_EPILOG = """
DIR is a run's folder, or a folder that holds runs; several are shown together.
The page is one file that asks the network for nothing: send it to anybody.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
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
    parser.add_argument("--quiet", action="store_true", help="say only what is wrong")


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Write the page and the exports; print what was found, and where it is."""
    if rest:
        return refuse(f"report has no {rest[0]!r}. `corral report --help` lists what it has.")
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
    return 0
