"""The part of a page on a sweep: the usable range in words, places for its figures, and the grid in numbers."""

from collections.abc import Sequence
from typing import Any

from corral.report.content import RunReport
from corral.report.html import Safe, join, note, table, tag
from corral.report.page.findings import sentence_list
from corral.report.sweep.find import Sweep
from corral.report.sweep.ranges import setting_text, value_text
from corral.report.sweep.usable import RULE

_MEASURES = {
    "final": "Final", "area": "Mean over the run", "greedy": "Greedy", "collapsed": "Collapsed", "kl": "Mean KL",
}  # fmt: skip
"""What a sweep is shown by."""


def sweep_headline(report: RunReport) -> Safe | None:
    """For the findings: how far off each contestant's setting may be."""
    parts = []
    for sweep in report.sweeps:
        of = f" on {sweep.problem}" if len(report.sweeps) > 1 else ""
        by = f"by final {report.measure.name} and its mean over the run ({sweep.seeds_text})"
        lead = f"Usable range of {sweep.key}{of}, {by}: {RULE}."
        parts.append(join(tag("p", tag("b", lead)), _range_list(sweep)))
    return join(*parts) if parts else None


def _range_list(sweep: Sweep) -> Safe:
    """One sentence per contestant, the widest range first."""
    ranges = sorted(sweep.ranges, key=lambda found: -len(found.own))
    return sentence_list([(f"{found.sentence}; by the best of all: {found.text(found.overall)}.", "range") for found in ranges])


def sweep_section(report: RunReport) -> Safe:
    """Of every sweep: how it was made, figures and table."""
    return join(*(_one(report, index, sweep) for index, sweep in enumerate(report.sweeps)))


def _one(report: RunReport, index: int, sweep: Sweep) -> Safe:
    rows = [row for row in report.tables["sweep"] if (row["problem"], row["axis"]) == (sweep.problem, sweep.key)]
    kept = {key: text for key, text in _MEASURES.items() if any(row[key] is not None for row in rows)}
    options = [tag("option", text, value=key) for key, text in kept.items()]
    chooser = tag("label", "Measure ", tag("select", *options, name="measure"), class_="field")
    return join(
        tag("h3", sweep.problem) if len(report.sweeps) > 1 else None,
        _basis(sweep),
        tag("form", chooser, class_="controls sweep-filters", data_sweep=index),
        tag("div", class_="figures two sweep-figures", data_sweep=index),
        tag("details", tag("summary", "The sweep in numbers"), _table(report, rows, kept)),
    )


def _basis(sweep: Sweep) -> Safe:
    """What the numbers rest on."""
    if not sweep.planned:
        return note(
            "This sweep was found in the settings of the runs, and all their seeds are in it. A setting that is chosen by it "
            "has not been tried on fresh seeds: the best of several noisy numbers is too good."
        )
    tried = _seeds(sweep.choose_seeds)
    if not sweep.chosen:
        return tag("p", f"The sweep is run on {tried}. No settings are chosen yet.", class_="count")
    chosen = "; ".join(f"{name} {setting_text(setting)}" for name, setting in sweep.chosen.items())
    text = f"Settings were chosen on {tried}, and are reported on {_seeds(sweep.report_seeds)}, which the choice never saw."
    return tag("p", f"{text} Chosen: {chosen}.", class_="count")


def _seeds(seeds: Sequence[int]) -> str:
    """`seed 0`, `seeds 0, 1`."""
    return f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}"


def _table(report: RunReport, rows: list[dict[str, Any]], kept: dict[str, str]) -> Safe:
    columns = {"objective": "Objective", "value": rows[0]["axis"]}
    if any(row["other"] for row in rows):
        columns["other"] = "Other settings"
    columns |= {"seeds": "Seeds", **kept, "usable": "Usable", "usable_of_all": "By the best of all"}
    if any(row["chosen"] is not None for row in rows):
        columns["chosen"] = "Chosen"

    def show(key: str, row: dict[str, Any]) -> str:
        if isinstance(row[key], bool):
            return "yes" if row[key] else "no"
        if row[key] is None:
            return "—"
        if key in ("final", "area", "greedy"):
            return report.measure.text(row[key])
        return f"{row[key]:.0%}".replace("%", " %") if key == "collapsed" else value_text(row[key])

    return table(rows, columns, show, aria_label="Sweep", data_table="sweep")
