"""The report page: findings, curves, sweeps, tables and an appendix, with their data as JSON."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import corral
from corral.lab.report import figures, outcomes
from corral.lab.report.content import RunReport
from corral.lab.report.forest import forest, sort_pairs
from corral.lab.report.html import (
    MOST_ROWS,
    Safe,
    document,
    macros,
    note,
    page_body,
    page_json,
    sections,
    shorten,
    table,
    write_document,
)
from corral.lab.report.looks import short_labels
from corral.lab.report.outcomes import BESIDE
from corral.lab.report.read import setting_text, value_text
from corral.lab.report.statistics import ENOUGH, plain, signed
from corral.lab.report.sweep import RULE, Sweep, ordered, value_at, without
from corral.lab.report.tables import compare_command
from corral.lab.run.text import count, visible

_SCRIPTS = ("base.js", "curves.js", "sweep.js", "tokens.js", "page.js")
"""In static/; each needs those before it."""

_FILTERED = ("curves", "region", "motion", "tokens")
"""Parts that the filters are for."""

_HTML = macros("report.html")

_Row = dict[str, Any]


def write_page(report: RunReport, out: Path) -> int:
    """The page, whole or not at all. Returns its size in bytes."""
    return write_document(page(report), out, f"Report fewer runs at a time: {len(report.runs)} were given.")


def page(report: RunReport) -> str:
    """The whole HTML."""
    tables = report.tables
    speaks = not all(run.is_robot for run in report.runs)
    moves = any(metric.section == "motion" for metric in report.metrics)
    swept = [_sweep_part(report, index, sweep) for index, sweep in enumerate(report.sweeps)]
    found = {
        "findings": ("Findings", _single_run(report) if report.is_single else _findings(report)),
        "sweep": ("Sweep", Safe("").join(swept)) if swept else None,
        "curves": ("Learning curves", _HTML.curves()),
        "region": ("Trust region", _HTML.region(report)),
        "motion": ("Motion", _HTML.motion()) if moves else None,
        "tokens": ("Tokens", _HTML.tokens(report)) if speaks else None,
        "completions": ("Completions", _HTML.completions(report)) if speaks else None,
        "events": ("Failures and warnings", _event_table(tables["events"])),
        "runs": None if report.is_single else ("Runs", _run_table(report)),
        "configuration": ("Configuration", _configuration(report)),
        "reproduce": ("Reproduce", _reproduce(report)),
    }
    parts = {name: part for name, part in found.items() if part is not None}
    made = {"sweep": None, **sections(parts, (*_FILTERED, "completions"))}
    learning = {metric.key: metric.title for metric in report.metrics if metric.section == "learning"}
    body = page_body(
        report.title,
        _summary(report),
        parts,
        _HTML.main(_HTML.controls(report, _axes(report), learning), made, _FILTERED),
        f"the files of {count(len(report.runs), 'run')}",
        _HTML.noscript(),
    )
    return document(report.title, body, page_data(report), _SCRIPTS)


def _summary(report: RunReport) -> str:
    """The line below the title: the number of runs, and how they ended."""
    how = ", ".join(f"{number} {stopped}" for stopped, number in sorted(Counter(run.stopped for run in report.runs).items()))
    seeds = {len(group.runs) for group in report.groups}
    each = "" if report.is_single else f", {count(max(seeds), 'seed')} {'each' if len(seeds) == 1 else 'at most'}"
    swept = sum(len(group.runs) for group in report.sweep_groups)
    more = f" Their settings were chosen on {count(swept, 'run')} of a sweep." if swept else ""
    return f"{count(len(report.runs), 'run')}{each}: {how}.{more}"


_AXES = {
    "update": "updates", "step": "steps", "rollouts": "rollouts", "env_steps": "environment steps", "tokens": "tokens",
    "seconds": "seconds",
}  # fmt: skip
"""What the curves can be drawn over."""


def _axes(report: RunReport) -> dict[str, str]:
    """The axes for which something was logged; for robots environment steps come first."""
    logged = {key for run in report.runs for line in run.lines for key in line}
    there = {"rollouts": all(run.rollouts_per_step for run in report.runs)}
    there |= {"env_steps": "env_steps" in logged, "tokens": "num_tokens" in logged}
    names = ["env_steps", *_AXES] if all(run.is_robot for run in report.runs) else [*_AXES]
    return {name: _AXES[name] for name in names if there.get(name, True)}


# ------------------------------------------------------------------------------------------------------------- findings


def _findings(report: RunReport) -> Safe:
    """Sentences, the picture of where everybody ended, the tables, and the method."""
    name = report.measure.name
    rows = [row for row in report.tables["comparisons"] if row["measure"] == "final"]
    swept = []
    for sweep in report.sweeps:
        of = f" on {sweep.problem}" if len(report.sweeps) > 1 else ""
        lead = f"Usable range of {sweep.key}{of}, by final {name} and its mean over the run ({sweep.seeds_text}): {RULE}."
        ranges = sorted(sweep.ranges, key=lambda found: -len(found.own))
        said = [(f"{found.sentence}; by the best of all: {found.text(found.overall)}.", "range") for found in ranges]
        swept.append((lead, said))
    more = {f"On the mean {name} over the run": _said(report, "area"), "On the final return": _said(report, "return")}
    threshold = "90 % of the best end" if report.threshold is None else report.measure.text(report.threshold)
    plot = forest(rows, report.looks, f"final {name}")
    return _HTML.findings(
        report, _warnings(report), swept, sentence_pairs(sort_pairs(rows)), plot, more, _comparison_table(report),
        _result_table(report), _overall_table(report), threshold,
    )  # fmt: skip


def sentence_pairs(rows: Sequence[_Row]) -> list[tuple[str, str]]:
    """The sentence of each row with its kind, which is its mark on the page."""
    return [(row["sentence"], "claim" if row["claimed"] else "tie") for row in rows]


def _said(report: RunReport, measure: str) -> list[tuple[str, str]]:
    """Sentences about one measure, claims first."""
    rows = [row for row in report.tables["comparisons"] if row["measure"] == measure]
    return sentence_pairs(sorted(rows, key=lambda row: not row["claimed"]))


def _warnings(report: RunReport) -> list[tuple[str, str | None]]:
    """Warnings above the findings, each with a link or None."""
    found: list[tuple[str, str | None]] = []
    rows, out = report.tables["comparisons"], sum(row["kind"] == "left out" for row in report.tables["events"])
    if out:
        said = f"{count(out, 'run')} did not finish and {'is' if out == 1 else 'are'} not in these numbers: "
        found.append((said, "#events"))
    if len(report.groups) == 1:
        found.append(("There is one objective with one setting, so nothing to compare it with.", None))
    elif not rows:
        found.append(("No two groups can be compared: they have no runs that finished on the same problem and setting.", None))
    elif all(row["seeds"] < ENOUGH for row in rows):
        found.append((f"Fewer than {ENOUGH} seeds: differences are shown, none can be claimed.", None))
    return found


def _single_run(report: RunReport) -> Safe:
    """The findings of a single run: its numbers, large."""
    (run,), (row,) = report.runs, report.tables["runs"]
    text = report.measure.text
    numbers = {f"{name} {report.measure.name}": row[name] for name in ("start", "best", "final")}
    numbers["final greedy success"] = row["greedy"]
    shown = {name: text(value) for name, value in numbers.items() if value is not None}
    reached = report.tables["results"][0]["steps_to_threshold"]
    if report.threshold is not None and reached is not None:
        shown[f"steps to {text(report.threshold)}"] = f"{reached:,.0f}"
    shown |= {"steps": f"{run.steps:,} of {run.planned_steps:,}", "time": _duration(row["seconds"])}
    ended = run.stopped if run.stopped != "not ended" else "goes on, or was killed"
    verb = "" if not run.summary else "has " if ended == "finished" else "was "
    return _HTML.single_run(run, shown, verb + ended)


def _duration(seconds: float | None) -> str:
    """`57 s`, `12 min`, `3.4 h`."""
    if seconds is None:
        return "—"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# --------------------------------------------------------------------------------------------------------------- tables

_Columns = dict[str, Callable[[_Row], object]]
"""Headings of a table, and how each column's cell is made of a row."""


def _table(rows: list[_Row], columns: _Columns, label: str, data: str | None = None) -> Safe:
    """A table; `data` names its rows among the data of the page, so that they can be saved."""
    headings = {heading: heading for heading in columns}
    return table(rows, headings, lambda heading, row: columns[heading](row), aria_label=label, data_table=data)


def _cell(key: str, form: Callable[[Any], object] = str) -> Callable[[_Row], object]:
    """A column's cells: this value of a row, or a dash where there is none."""
    return lambda row: "—" if row[key] is None else form(row[key])


def _yes(key: str) -> Callable[[_Row], str]:
    return lambda row: "—" if row[key] is None else "yes" if row[key] else "no"


def _spread(key: str, digits: int = 4) -> Callable[[_Row], str]:
    """A number of no unit with its interval, where the row has one."""

    def show(row: _Row) -> str:
        ends = (row[key], row.get(f"{key}_low"), row.get(f"{key}_high"))
        middle, low, high = (None if end is None else f"{end:.{digits}g}".replace("-", "−") for end in ends)
        return (middle or "—") + ("" if low is None else f" [{low}…{high}]")

    return show


def _whole(value: Any) -> str:
    return f"{value:,.0f}" if isinstance(value, float) else str(value)


def _comparison_table(report: RunReport) -> Safe | None:
    """One row per pair and measure."""

    def probability(row: _Row) -> str:
        low, high = row["probability_low"], row["probability_high"]
        return f"{row['probability']:.2f}" + ("" if low is None else f" [{low:.2f}…{high:.2f}]")

    columns: _Columns = {
        "Difference": lambda row: f"{row['ours']} − {row['theirs']}",
        "Of": _cell("measure"),
        report.measure.unit.capitalize() or "Value": _cell("difference", signed),
        "95 % interval": lambda row: "—" if row["low"] is None else f"{plain(row['low'])}…{plain(row['high'])}",
        "p": _cell("p", "{:.2g}".format),
        "Claimed": _yes("claimed"),
        "Probability of improvement": probability,
    }
    rows = report.tables["comparisons"]
    return _table(rows, columns, "Comparisons", "comparisons") if rows else None


def _result_table(report: RunReport) -> Safe:
    """One row per group."""
    rows, measure = report.tables["results"], report.measure
    chosen = any(group.chosen for group in report.groups)

    def estimate(key: str) -> Callable[[_Row], str]:
        return lambda row: measure.estimate(row[key], row[f"{key}_low"], row[f"{key}_high"])

    columns: _Columns = {
        "Objective": lambda row: row["objective"] if chosen else f"{row['objective']} {row['setting']}".strip()
    }
    columns |= {"Chosen setting": _cell("setting")} if chosen else {}
    columns |= {"Problem": _cell("problem")} if len(report.problems) > 1 else {}
    columns |= {
        "Runs": lambda row: f"{row['counted']:,} of {row['runs']}",
        f"Final {measure.name}": estimate("final"),
        "Mean over the run": estimate("area"),
    }
    for key in BESIDE:
        if key != measure.name and any(row[key] is not None for row in rows):
            columns[key.capitalize()] = _spread(key) if key == "return" else estimate(key)
    reached = _cell("steps_to_threshold", _whole)
    threshold = "90 % of the best" if report.threshold is None else measure.text(report.threshold)
    columns |= {
        f"Steps to {threshold}": lambda row: f"{reached(row)} ({row['reached']} of {row['counted']})",
        "Collapsed": lambda row: f"{row['collapsed']:,} of {row['counted']}",
        "Seconds": _cell("seconds", _whole),
    }
    return _table(rows, columns, "Results", "results")


def _overall_table(report: RunReport) -> Safe | None:
    """One row per contestant over several tasks, where there are."""
    rows = report.tables["overall"]
    columns: _Columns = {
        "Objective": _cell("objective"), "Tasks": _cell("tasks"), "Seeds": _cell("seeds"),
        "Interquartile mean": _spread("middle", 3), "Mean": _spread("mean", 3),
        "Chance to be better": _cell("chance", "{:.2f}".format),
    }  # fmt: skip
    return _table(rows, columns, "All tasks together", "overall") if rows else None


def _event_table(rows: list[_Row]) -> Safe:
    """Warnings of the guard, incomplete runs, files that could not be read."""
    if not rows:
        return note("None: every run finished, the guard had nothing to say, and every file could be read.", good=True)
    names = {"Objective": "objective", "Seed": "seed", "Step": "step", "Kind": "kind", "What happened": "what"}
    columns: _Columns = {heading: _cell(key) for heading, key in names.items()}
    return _table(rows, columns, "Failures and warnings", "events")


def _run_table(report: RunReport) -> Safe:
    """One row per run."""
    rows, text = report.tables["runs"], report.measure.text
    columns: _Columns = {
        "Objective": _cell("objective"), "Seed": _cell("seed"), "Ended": _cell("stopped"),
        "Steps": lambda row: f"{row['steps']} of {row['planned']}",
        "Start": _cell("start", text), "Best": _cell("best", text), "Final": _cell("final", text),
        "Greedy": _cell("greedy", text), "Return": _spread("return"),
        "Seconds": _cell("seconds", _whole), "Tokens": _cell("tokens", _whole),
        "Environment steps": _cell("env_steps", _whole), "Skipped updates": _cell("skipped", _whole), "Folder": _cell("run"),
    }  # fmt: skip
    for heading, key in {"Greedy": "greedy", "Return": "return", "Tokens": "tokens", "Environment steps": "env_steps"}.items():
        if all(row[key] is None for row in rows):
            del columns[heading]
    return _table(rows, columns, "Runs", "runs")


def _configuration(report: RunReport) -> Safe:
    """Settings in which groups differ, a column per group; folded, those that all share."""
    differ, same = report.tables["differences"], report.tables["settings"]
    shown = None
    if differ:
        columns = {key: key for key in differ[0]} | {"setting": "Setting"}
        shown = table(differ, columns, lambda key, row: row[key], aria_label="Settings that differ")
    shared = _table(same, {"Setting": _cell("setting"), "Value": _cell("value")}, "Settings that all share")
    return _HTML.configuration(shown, f"{count(len(same), 'setting')} that all share" if same else None, shared)


def _reproduce(report: RunReport) -> Safe:
    """Versions, and a command or a file of settings per run."""
    compared = [text for plan in report.comparisons if (text := compare_command(plan.command))]
    versions = _table(report.tables["versions"], {"Package": _cell("package"), "Version": _cell("versions")}, "Versions")
    return _HTML.reproduce(report, compared, versions)


def _sweep_part(report: RunReport, index: int, sweep: Sweep) -> Safe:
    """The part of a sweep: its seeds and choices, the place of its figures, and its table."""
    rows = [row for row in report.tables["sweep"] if (row["problem"], row["axis"]) == (sweep.problem, sweep.key)]
    measures: dict[str, tuple[str, Callable[[Any], object]]] = {
        "final": ("Final", report.measure.text),
        "area": ("Mean over the run", report.measure.text),
        "greedy": ("Greedy", report.measure.text),
        "collapsed": ("Collapsed", lambda value: f"{value:.0%}".replace("%", " %")),
        "kl": ("Mean KL", value_text),
    }
    kept = {key: found for key, found in measures.items() if any(row[key] is not None for row in rows)}
    columns: _Columns = {"Objective": _cell("objective"), sweep.key: _cell("value", value_text)}
    columns |= {"Other settings": _cell("other")} if any(row["other"] for row in rows) else {}
    columns |= {"Seeds": _cell("seeds"), **{heading: _cell(key, form) for key, (heading, form) in kept.items()}}
    columns |= {"Usable": _yes("usable"), "By the best of all": _yes("usable_of_all")}
    columns |= {"Chosen": _yes("chosen")} if any(row["chosen"] is not None for row in rows) else {}
    tried, reported = (
        f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}"
        for seeds in (sweep.choose_seeds, sweep.report_seeds)
    )
    chosen = "; ".join(f"{name} {setting_text(setting)}" for name, setting in sweep.chosen.items())
    title = sweep.problem if len(report.sweeps) > 1 else None
    headings = {key: heading for key, (heading, _) in kept.items()}
    return _HTML.sweep(sweep, index, title, tried, reported, chosen, headings, _table(rows, columns, "Sweep", "sweep"))


# ----------------------------------------------------------------------------------------------------------------- data

_TABLES = ("results", "comparisons", "overall", "sweep", "runs", "events")
"""Tables whose numbers a page can save as they are."""

_MOST_TEXT, _ALL_TEXT = 4000, 1_500_000
"""Characters of a completion that a page shows, and bytes of all of them: it stays below six megabytes whatever was sampled."""

_ALL_TOKENS, _ALL_TOKEN_TEXT = 25_000, 2_000_000
"""Tokens that are shown one by one, of all runs together, and their bytes as the page holds them."""

_LONGEST = 600
"""Tokens of one completion that are shown."""


def page_data(report: RunReport) -> dict[str, Any]:
    """Everything that the scripts draw and save."""
    groups = []
    for group, short in zip(report.groups, short_labels([group.label for group in report.groups]), strict=True):
        colour, marker, dash = report.styles[group.key]
        groups.append(
            {
                "key": group.key, "label": visible(group.label), "problem": _text(group.problem, 200), "short": visible(short),
                "colour": colour, "marker": marker, "dash": dash, "bound": figures.kl_bound(group),
            }
        )  # fmt: skip
    seeds = f"seed{'' if len(report.seeds) == 1 else 's'} {', '.join(report.seeds)}"
    claims = sort_pairs([row for row in report.tables["comparisons"] if row["measure"] == "final"])
    return {
        "metrics": [
            {
                "key": metric.key, "title": metric.title, "caption": _text(metric.caption, 400), "section": metric.section,
                "percent": metric.percent, "log": metric.log,
            }
            for metric in report.metrics
        ],
        "groups": groups,
        "runs": [
            {
                "group": group.key, "seed": _text(run.seed, 60), "stopped": _text(run.stopped, 60),
                "columns": _rounded(figures.points(run, report.metrics, report.every)),
            }
            for group in report.groups
            for run in group.runs
        ],
        "bands": {metric.key: _bands(report, metric) for metric in report.metrics if metric.section == "learning"},
        "every": report.every,
        "about": _text(f"{', '.join(report.problems)} · {seeds} · corral {corral.__version__}", 300),
        "headline": _text(claims[0]["sentence"], 300) if claims and claims[0]["claimed"] else "",
        "measure": {"key": report.measure.key, "name": report.measure.name, "percent": report.measure.factor == 100},
        "finals": [
            {
                "group": group.key, "seeds": {_text(seed, 60): value for seed, value in ends.items()},
                "value": row["final"], "low": row["final_low"], "high": row["final_high"],
            }
            for group, row in zip(report.groups, report.tables["results"], strict=True)
            if (ends := outcomes.finals(group, report.measure.key))
        ],
        "sweeps": [_sweep_data(report, sweep) for sweep in report.sweeps],
        "completions": _fitting(lambda most: _completions(report, most), _MOST_TEXT, 20, _ALL_TEXT),
        "tokens": _fitting(lambda most: _tokens(report, most), _ALL_TOKENS, 100, _ALL_TOKEN_TEXT),
        "tables": {
            name: [{visible(key): _value(value) for key, value in row.items()} for row in report.tables[name][:MOST_ROWS]]
            for name in _TABLES
        },
    }  # fmt: skip


def _text(text: object, most: int) -> str:
    """The beginning of a text, visible."""
    return visible(shorten(str(text), most))


def _value(value: Any) -> Any:
    """A cell of a table as JSON can hold it."""
    return _text(value, 1000) if isinstance(value, str) else value if isinstance(value, bool) else _number(value)


def _number(value: Any) -> float | str | None:
    """A number as JSON can hold it, with five digits."""
    if not isinstance(value, int | float) or value != value:
        return None
    value = float(value)
    return float(f"{value:.5g}") if abs(value) != float("inf") else "inf" if value > 0 else "-inf"


def _rounded(columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Columns of a curve: counts as whole numbers, all else with five digits; texts stay."""
    whole = ("step", "update", "tokens", "env_steps", "rollouts")
    return {
        key: [value if isinstance(value, str) else round(value) if key in whole else _number(value) for value in column]
        for key, column in columns.items()
    }


def _bands(report: RunReport, metric: figures.Metric) -> dict[str, Any]:
    """Bootstrap intervals of the learning curves, group by group, for groups of two seeds and more."""
    curves = {group.key: figures.curve(group, metric, report.every) for group in report.groups if len(group.runs) > 1}
    return {
        str(key): _rounded(curve[["step", "low", "high"]].to_dict("list")) for key, curve in curves.items() if curve is not None
    }


def _sweep_data(report: RunReport, sweep: Sweep) -> dict[str, Any]:
    """Lines of a sweep: one per contestant and other settings, with a cell per value of the axis and its seeds' numbers."""
    lines, values = [], [*ordered([value_at(row.setting, sweep.key) for row in sweep.rows])]
    fields = {"final": "final", "area": "auc", "greedy": "greedy", "kl": "kl", "collapsed": "collapsed"}
    for index, line in enumerate(sweep.ranges):
        runs = sweep.along(line)
        chosen = sweep.chosen.get(line.contestant, {})
        here = without(chosen, sweep.key) == line.setting and chosen.get(sweep.key) in values
        colour, marker = report.looks[line.contestant]
        lines.append(
            {
                "label": visible(line.label), "colour": colour, "marker": marker,
                "dash": sum(other.contestant == line.contestant for other in sweep.ranges[:index]) % 4,
                "usable": [values.index(value) for value in line.own],
                "overall": [values.index(value) for value in line.overall],
                "chosen": values.index(value_at(chosen, sweep.key)) if here else None,
                "cells": [
                    {name: [_number(vars(row)[field]) for row in runs.get(value, [])] for name, field in fields.items()}
                    for value in values
                ],
            }
        )  # fmt: skip
    return {"key": visible(sweep.key), "values": values, "names": [value_text(value) for value in values], "lines": lines}


def _fitting(make: Callable[[int], list[_Row]], most: int, least: int, size: int) -> list[_Row]:
    """Rows made with `most`, or half of it and so on down to `least`, until the page needs at most `size` bytes for them."""
    rows = make(most)
    while most > least and len(page_json(rows).encode()) > size:
        most //= 2
        rows = make(most)
    return rows


def _completions(report: RunReport, most: int) -> list[_Row]:
    """Sampled completions, each with `most` characters at most."""
    return [
        {
            "run": index, "step": int(row["step"] or 0), "prompt": _text(row.get("prompt") or "", most // 2),
            "completion": _text(row["completion"] or "", most), "reward": _number(row.get("reward")),
            "advantage": _number(row.get("advantage")),
        }
        for index, run in enumerate(report.runs)
        for row in run.completions
    ]  # fmt: skip


def _tokens(report: RunReport, most: int) -> list[_Row]:
    """Token by token: text, what was done to it, and how far it wanted to go. Every run has an equal share of `most`."""
    kept = {index: run.tokens for index, run in enumerate(report.runs) if run.tokens}
    found = []
    for index, rows in kept.items():
        # Every row, every other one, every fourth …: as many as fit, and one at least.
        while len(rows) > 1 and sum(min(len(row["token"]), _LONGEST) for row in rows) > most // len(kept):
            rows = rows[::2]
        for row in rows:
            entry: _Row = {"run": index, "step": int(row["step"] or 0)}
            entry["token"] = [_text(text, 80) for text in row["token"][:_LONGEST]]
            entry["action"] = [_text(action or "", 20) for action in row["action"][:_LONGEST]]
            for name in ("kl_before", "kl_after", "log_ratio"):
                values = row.get(name)
                entry[name] = None if values is None else [_number(value) for value in values[:_LONGEST]]
            found.append(entry | {name: _number(row.get(name)) for name in ("reward", "advantage", "bound")})
    return found
