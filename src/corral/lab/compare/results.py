"""What a comparison found: the settings chosen; then, from the same report as the page, tables and sentences to print."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corral.lab.compare.plan import ChosenSettings
from corral.lab.compare.record import COUNTED, Comparison
from corral.lab.compare.view import align_columns
from corral.lab.report.content import RunReport, make_report
from corral.lab.report.outcomes import RETURN, Measure, main_metric
from corral.lab.report.page import write_page
from corral.lab.report.read import read_comparison, read_run, read_runs, value_text
from corral.lab.report.sweep import RULE, Sweep, SweepRow, choose_setting, sweep_row

_PAGE = "report.html"


def choose(comparison: Comparison) -> ChosenSettings:
    """The best setting of each contestant; none for one whose runs all failed."""
    alive = {record.contestant for record in comparison.sweep_records if record.state in COUNTED}
    return choose_setting([row for row in sweep_rows(comparison) if row.contestant in alive])


def sweep_rows(comparison: Comparison) -> list[SweepRow]:
    """One row per run of the sweep. One that failed counts as the worst there is."""
    done = [record for record in comparison.sweep_records if record.state in COUNTED]
    runs = {record.folder: read_run(comparison.folder(record)) for record in done}
    measure = main_metric([*runs.values()])
    return [
        sweep_row(record.contestant, record.setting, record.seed, runs.get(record.folder), measure)
        for record in comparison.sweep_records
    ]


def write_report(comparison: Comparison) -> tuple[RunReport, Path]:
    """DIR/report.html, and what it says."""
    report = make_report(read_runs([comparison.path]), [read_comparison(comparison.path)])
    page = comparison.path / _PAGE
    write_page(report, page)
    return report, page


def report_lines(report: RunReport) -> list[str]:
    """The sweep with the usable ranges, then the results of each contestant, then what may be claimed."""
    swept = [line for sweep in report.sweeps for line in [*_sweep_lines(sweep, report.measure), ""]]
    said = [row["sentence"] for row in report.tables["comparisons"] if row["measure"] == "final"]
    return [*swept, *_result_lines(report.tables["results"], report.measure), "", *said]


def _result_lines(results: Sequence[Mapping[str, Any]], measure: Measure) -> list[str]:
    """One line per contestant, with the setting that was chosen for it."""
    beside = [key for key in ("greedy", "return") if key != measure.key and any(row.get(key) is not None for row in results)]
    swept = any(row["setting"] for row in results)
    names = ["contestant", *(["setting"] if swept else []), "runs", f"final {measure.name}", "mean over the run"]
    rows = [[*names, *beside, "collapsed", "seconds"]]
    for row in results:
        cells = [row["objective"], *([row["setting"]] if swept else []), f"{row['counted']} of {row['runs']}"]
        for key in ("final", "area", *beside):
            of = RETURN if key == "return" else measure
            cells.append(of.estimate(row[key], row[f"{key}_low"], row[f"{key}_high"]))
        rows.append([*cells, str(row["collapsed"]), "—" if row["seconds"] is None else f"{row['seconds']:.0f}"])
    return align_columns(rows)


def _sweep_lines(sweep: Sweep, measure: Measure) -> list[str]:
    """One line per contestant and setting; then the usable ranges, by each one's own best and by the best of all."""
    settings = list(dict.fromkeys(name for cell in sweep.cells for name in cell.setting))
    greedy = any(cell.greedy is not None for cell in sweep.cells)
    rows = [["contestant", *settings, f"final {measure.name}", "mean over the run", *(["greedy"] if greedy else [])]]
    rows[0] += ["collapsed", "KL"]
    for cell in sweep.cells:
        values = [value_text(cell.setting.get(name)) for name in settings]
        numbers = [cell.final, cell.auc, *([cell.greedy] if greedy else [])]
        kl = "—" if cell.kl is None else f"{cell.kl:.3g}"
        rows.append([cell.contestant, *values, *(measure.estimate(number, None, None) for number in numbers)])
        rows[-1] += [f"{cell.collapsed:.0%}", kl]
    lead = f"Usable range of {sweep.key}, by final {measure.name} and its mean over the run ({sweep.seeds_text}): {RULE}"
    ranges = [f"{found.sentence}; by the best of all: {found.text(found.overall)}" for found in sweep.ranges]
    return [*align_columns(rows), "", lead, *ranges]
