"""HTML page of a report: findings, curves, sweeps, tables and an appendix, with their data as JSON."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import corral
from corral.lab.report import figures, html, outcomes
from corral.lab.report.content import RunReport, compare_command, name_seeds
from corral.lab.report.html import Columns, Row, Safe, cell, shorten, table
from corral.lab.report.looks import fit
from corral.lab.report.outcomes import BESIDE
from corral.lab.report.read import setting_text, value_text
from corral.lab.report.statistics import ENOUGH, bracketed, plains, signed
from corral.lab.report.sweep import RULE, Sweep, ordered, value_at, without
from corral.lab.run.text import count, duration, visible

_SCRIPTS = ("base.js", "curves.js", "sweep.js", "tokens.js", "page.js")
"""JavaScript files of the report's page in static/, in the order of their dependencies."""

_FILTERED = ("curves", "region", "motion", "tokens")
"""Sections of the report's page that the reader's filters apply to."""

_HTML = html.macros("report.html")

AXES = {
    "step": "steps", "update": "updates", "rollouts": "rollouts", "env_steps": "environment steps", "tokens": "tokens",
    "seconds": "seconds",
}  # fmt: skip
"""Mapping from column to name of the horizontal axis of learning curves."""


def write_page(report: RunReport, out: Path) -> int:
    """Write a report's HTML page atomically, and return its size in bytes."""
    return html.write_document(page(report), out, f"Report fewer runs at a time: {len(report.runs)} were given.")


def page(report: RunReport) -> str:
    """Build the whole HTML page of a report."""
    runs, tables, single = report.runs, report.tables, report.is_single
    robots = all(run.is_robot for run in runs)
    moves = any(metric.section == "motion" for metric in report.metrics)
    swept = [_sweep_part(report, index, sweep) for index, sweep in enumerate(report.sweeps)]
    what: Columns = {"Objective": "objective", "Seed": "seed", "Step": "step", "Kind": "kind", "What happened": "what"}
    healthy = html.note("None: every run finished, the guard had nothing to say, and every file could be read.", good=True)
    compared = [text for plan in report.comparisons if (text := compare_command(plan.command))]
    versions = table(tables["versions"], {"Package": "package", "Version": "versions"}, "Versions")
    found = {
        "findings": ("Findings", _single_run(report) if single else _findings(report)),
        "sweep": ("Sweep", Safe("").join(swept)) if swept else None,
        "curves": ("Learning curves", _HTML.curves()),
        "region": ("Trust region", _HTML.region(report)),
        "motion": ("Motion", _HTML.motion()) if moves else None,
        "tokens": None if robots else ("Tokens", _HTML.tokens(report)),
        "completions": None if robots else ("Completions", _HTML.completions(report)),
        "events": ("Failures and warnings", _table(tables, "events", what, "Failures and warnings") or healthy),
        "runs": None if single else ("Runs", _run_table(report)),
        "configuration": ("Configuration", _configuration(report)),
        "reproduce": ("Reproduce", _HTML.reproduce(report, compared, versions)),
    }
    parts = {name: part for name, part in found.items() if part is not None}
    made = {"sweep": None, **html.sections(parts, (*_FILTERED, "completions"))}

    logged = {key for run in runs for line in run.lines for key in line}
    there = {"rollouts": all(run.rollouts_per_step for run in runs)}
    there |= {"env_steps": "env_steps" in logged, "tokens": "num_tokens" in logged}
    names = ["env_steps", *AXES] if robots else [*AXES]
    axes = {name: AXES[name] for name in names if there.get(name, True)}

    how = ", ".join(f"{number} {stopped}" for stopped, number in sorted(Counter(run.stopped for run in runs).items()))
    seeds = {len(group.runs) for group in report.groups}
    each = "" if single else f", {count(max(seeds), 'seed')} {'each' if len(seeds) == 1 else 'at most'}"
    tried = sum(len(group.runs) for group in report.sweep_groups)
    more = f" Their settings were chosen on {count(tried, 'run')} of a sweep." if tried else ""
    lead = f"{count(len(runs), 'run')}{each}: {how}.{more}"
    main = _HTML.main(_HTML.controls(report, axes), made, _FILTERED)
    body = html.page_body(report.title, lead, parts, main, f"the files of {count(len(runs), 'run')}")
    return html.document(report.title, body, page_data(report), _SCRIPTS)


def _table(tables: Mapping[str, Sequence[Row]], name: str, columns: Columns, label: str) -> Safe | None:
    """Build one of a report's tables, whose rows a reader can save. Returns None if the table has no rows."""
    return table(tables[name], columns, label, name) if tables[name] else None


# ------------------------------------------------------------------------------------------------------------- findings


def _findings(report: RunReport) -> Safe:
    """Build the report's findings: sentences, the plot of final values, tables, and the method."""
    name, compared = report.measure.name, report.tables["comparisons"]
    swept = []
    for sweep in report.sweeps:
        of = f" on {sweep.problem}" if len(report.sweeps) > 1 else ""
        lead = f"Usable range of {sweep.key}{of}, by final {name} and its mean over the run ({sweep.seeds_text}): {RULE}."
        ranges = sorted(sweep.ranges, key=lambda found: -len(found.own))
        swept.append((lead, [(f"{one.sentence}; by the best of all: {one.text(one.overall)}.", "range") for one in ranges]))
    others = {f"On the mean {name} over the run": "area", "On the final return": "return"}
    claims_first = sorted(compared, key=lambda row: not row["claimed"])
    more = {title: sentence_pairs([row for row in claims_first if row["measure"] == key]) for title, key in others.items()}
    columns: Columns = {
        "Objective": "objective", "Tasks": "tasks", "Seeds": "seeds", "Interquartile mean": _spread("middle", _three),
        "Mean": _spread("mean", _three), "Chance to be better": cell("chance", "{:.2f}".format),
    }  # fmt: skip
    threshold = "90 % of the best end" if report.threshold is None else report.measure.text(report.threshold)
    return _HTML.findings(
        report, _warnings(report), swept, sentence_pairs(report.final_pairs), more, _comparison_table(report),
        _result_table(report), _table(report.tables, "overall", columns, "All tasks together"), threshold,
    )  # fmt: skip


def sentence_pairs(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the sentence of each comparison with its kind, "claim" or "tie", which sets the mark beside the sentence."""
    return [(row["sentence"], "claim" if row["claimed"] else "tie") for row in rows]


def _warnings(report: RunReport) -> list[tuple[str, str | None]]:
    """List the warnings above a report's findings, each with a link or None."""
    rows, out = report.tables["comparisons"], sum(row["kind"] == "left out" for row in report.tables["events"])
    left_out = f"{count(out, 'run')} did not finish and {'is' if out == 1 else 'are'} not in these numbers: "
    few = {  # the first that applies
        "There is one objective with one setting, so nothing to compare it with.": len(report.groups) == 1,
        "No two groups can be compared: they have no runs that finished on the same problem and setting.": not rows,
        f"Fewer than {ENOUGH} seeds: differences are shown, none can be claimed.": all(row["seeds"] < ENOUGH for row in rows),
    }
    found: list[tuple[str, str | None]] = [(left_out, "#events")] if out else []
    return found + [(text, None) for text, applies in few.items() if applies][:1]


def _single_run(report: RunReport) -> Safe:
    """Build the findings of a report on a single run, with large numbers."""
    (run,), (row,) = report.runs, report.tables["runs"]
    text = report.measure.text
    numbers = {f"{name} {report.measure.name}": row[name] for name in ("start", "best", "final")}
    shown = {name: text(value) for name, value in numbers.items() if value is not None}
    if greedy := [value for _, value in run.values("greedy")]:
        shown["greedy success"] = text(greedy[0]) if len(greedy) == 1 else f"{text(greedy[0])} → {text(greedy[-1])}"
    reached = report.tables["results"][0]["steps_to_threshold"]
    if report.threshold is not None and reached is not None:
        shown[f"steps to {text(report.threshold)}"] = f"{reached:,.0f}"
    shown |= {"steps": f"{run.steps:,} of {run.planned_steps:,}", "time": str(cell("seconds", duration)(row))}
    ended = run.stopped if run.stopped != "not ended" else "goes on, or was killed"
    verb = "" if not run.summary else "has " if ended == "finished" else "was "
    return _HTML.single_run(run, shown, verb + ended)


# --------------------------------------------------------------------------------------------------------------- tables


def _yes(value: object) -> str:
    return "yes" if value else "no"


_three, _four = (partial(plains, digits=digits) for digits in (3, 4))


def _spread(key: str, form: Callable[..., Iterable[str]] = _four) -> Callable[[Row], str]:
    """Return a function that formats a table row's number at `key` and its interval, if there is one, with `form`."""

    def show(row: Row) -> str:
        numbers = [row[name] for name in (key, f"{key}_low", f"{key}_high") if row.get(name) is not None]
        return bracketed(*form(*numbers)) if numbers else "—"

    return show


def _whole(value: Any) -> str:
    return f"{value:,.0f}" if isinstance(value, float) else str(value)


def _comparison_table(report: RunReport) -> Safe | None:
    """Build the table of comparisons, a row per pair of groups and score."""
    columns: Columns = {
        "Difference": "{ours} − {theirs}".format_map,
        "Of": "measure",
        report.measure.unit.capitalize() or "Value": cell("difference", lambda value: signed(value)[0]),
        "95 % interval": lambda row: "—" if row["low"] is None else "…".join(plains(row["low"], row["high"])),
        "p": cell("p", "{:.2g}".format),
        "Claimed": cell("claimed", _yes),
        "Probability of improvement": _spread("probability", lambda *shares: map("{:.2f}".format, shares)),
    }
    return _table(report.tables, "comparisons", columns, "Comparisons")


def _result_table(report: RunReport) -> Safe:
    """Build the table of results, a row per group of runs."""
    rows, measure = report.tables["results"], report.measure
    chosen = any(group.chosen for group in report.groups)

    def estimate(key: str) -> Callable[[Row], str]:
        return lambda row: measure.estimate(row[key], row[f"{key}_low"], row[f"{key}_high"])

    columns: Columns = {"Objective": lambda row: row["objective"] if chosen else f"{row['objective']} {row['setting']}".strip()}
    columns |= {"Chosen setting": "setting"} if chosen else {}
    columns |= {"Problem": "problem"} if len(report.problems) > 1 else {}
    columns |= {
        "Runs": lambda row: f"{row['counted']:,} of {row['runs']}",
        f"Final {measure.name}": estimate("final"),
        "Mean over the run": estimate("area"),
    }
    for key in BESIDE:
        if key != measure.name and any(row[key] is not None for row in rows):
            columns[key.capitalize()] = _spread(key) if key == "return" else estimate(key)
    reached = cell("steps_to_threshold", _whole)
    threshold = "90 % of the best" if report.threshold is None else measure.text(report.threshold)
    columns |= {
        f"Steps to {threshold}": lambda row: f"{reached(row)} ({row['reached']} of {row['counted']})",
        "Collapsed": lambda row: f"{row['collapsed']:,} of {row['counted']}",
        "Seconds": cell("seconds", _whole),
    }
    return table(rows, columns, "Results", "results")


def _run_table(report: RunReport) -> Safe:
    """Build the table of a report's runs, a row per run."""
    rows, text = report.tables["runs"], report.measure.text
    columns: Columns = {
        "Objective": "objective", "Seed": "seed", "Ended": "stopped",
        "Steps": lambda row: f"{row['steps']} of {row['planned']}",
        "Start": cell("start", text), "Best": cell("best", text), "Final": cell("final", text),
        "Greedy": cell("greedy", text), "Return": _spread("return"),
        "Seconds": cell("seconds", _whole), "Tokens": cell("tokens", _whole),
        "Environment steps": cell("env_steps", _whole), "Skipped updates": cell("skipped", _whole), "Folder": "run",
    }  # fmt: skip
    for heading, key in {"Greedy": "greedy", "Return": "return", "Tokens": "tokens", "Environment steps": "env_steps"}.items():
        if all(row[key] is None for row in rows):
            del columns[heading]
    return table(rows, columns, "Runs", "runs")


def _configuration(report: RunReport) -> Safe:
    """Build the table of settings in which groups of runs differ, and a folded table of the settings that all share."""
    differ, same = report.tables["differences"], report.tables["settings"]
    columns: Columns = {"Setting" if key == "setting" else key: key for row in differ[:1] for key in row}
    shown = table(differ, columns, "Settings that differ") if differ else None
    shared = table(same, {"Setting": "setting", "Value": "value"}, "Settings that all share")
    shared_by = " that all share" if len(report.groups) > 1 else ""
    return _HTML.configuration(report, shown, f"{count(len(same), 'setting')}{shared_by}" if same else None, shared)


def _sweep_part(report: RunReport, index: int, sweep: Sweep) -> Safe:
    """Build the section of a sweep: seeds, chosen settings, figures and table."""
    rows = [row for row in report.tables["sweep"] if (row["problem"], row["axis"]) == (sweep.problem, sweep.key)]
    measures: dict[str, tuple[str, Callable[[Any], object]]] = {
        "final": ("Final", report.measure.text),
        "area": ("Mean over the run", report.measure.text),
        "greedy": ("Greedy", report.measure.text),
        "collapsed": ("Collapsed", lambda value: f"{value:.0%}".replace("%", " %")),
        "kl": ("Mean KL", value_text),
    }
    kept = {key: found for key, found in measures.items() if any(row[key] is not None for row in rows)}
    columns: Columns = {"Objective": "objective", sweep.key: cell("value", value_text)}
    columns |= {"Other settings": "other"} if any(row["other"] for row in rows) else {}
    columns |= {"Seeds": "seeds", **{heading: cell(key, form) for key, (heading, form) in kept.items()}}
    columns |= {"Usable": cell("usable", _yes), "By the best of all": cell("usable_of_all", _yes)}
    columns |= {"Chosen": cell("chosen", _yes)} if any(row["chosen"] is not None for row in rows) else {}
    plan = sweep.comparison
    tried, reported = ("", "") if plan is None else map(name_seeds, (plan.choose_seeds, plan.report_seeds))
    chosen = "; ".join(f"{name} {setting_text(setting)}" for name, setting in sweep.chosen.items())
    title = sweep.problem if len(report.sweeps) > 1 else None
    headings = {key: heading for key, (heading, _) in kept.items()}
    return _HTML.sweep(sweep, index, title, tried, reported, chosen, headings, table(rows, columns, "Sweep", "sweep"))


# ----------------------------------------------------------------------------------------------------------------- data

_TABLES = ("results", "comparisons", "overall", "sweep", "runs", "events")
"""Tables whose rows a reader can save from the page."""

_MOST_TEXT, _ALL_TEXT = 4000, 1_500_000
"""Limits on the completions on a report's page: characters of each completion, and bytes of all of them."""

_ALL_TOKENS, _ALL_TOKEN_TEXT = 25_000, 2_000_000
"""Limits on tokens shown one by one on a report's page: their number over all runs, and their total bytes."""

_LONGEST = 600
"""Largest number of tokens of one completion on a report's page."""


_MOST_PAIRS = 40
"""Largest number of compared pairs in the figure of differences; the table has all of them."""


def _forest(report: RunReport) -> list[Row]:
    """Build the data of the figure of differences between groups, for each problem. Significant differences come first."""
    made: list[Row] = []
    for problem in report.problems:
        pairs = []
        for row in [row for row in report.final_pairs if row["problem"] == problem]:
            colour, marker = report.looks[row["our_objective"]]
            value, *interval = signed(row["difference"], *(() if row["low"] is None else (row["low"], row["high"])))
            pairs.append(
                {
                    "name": visible(f"{fit(row['ours'], 24)} − {fit(row['theirs'], 24)}"), "colour": colour, "marker": marker,
                    "value": row["difference"], "low": row["low"], "high": row["high"], "hollow": not row["claimed"],
                    "numbers": bracketed(value, *interval), "said": visible(row["sentence"]),
                    "kind": f"pair {'claim' if row['claimed'] else 'tie'}",
                }
            )  # fmt: skip
        if pairs:
            where = f": {shorten(problem, 60)}" if len(report.problems) > 1 else ""
            unit = f", {report.measure.unit}" if report.measure.unit else ""
            ends = [end for pair in pairs for end in (pair["value"], pair["low"], pair["high"]) if end is not None]
            made.append(
                {
                    "title": visible(f"Who is better, and by how much{where}"), "problem": _text(problem, 200),
                    "of": f"final {report.measure.name}{unit}", "ends": [0.0, *ends], "rows": pairs[:_MOST_PAIRS],
                }
            )  # fmt: skip
    return made


def page_data(report: RunReport) -> dict[str, Any]:
    """Collect the data of a report's page that its scripts draw and save."""
    groups = []
    for group in report.groups:
        colour, marker, dash = report.styles[group.key]
        groups.append(
            {
                "key": group.key, "label": visible(group.label), "short": visible(fit(group.label)),
                "problem": _text(group.problem, 200), "bound": figures.kl_bound(group),
                "colour": colour, "marker": marker, "dash": dash,
            }
        )  # fmt: skip
    claims = [_text(row["sentence"], 300) for row in report.final_pairs if row["claimed"]]
    return {
        "metrics": [asdict(metric) for metric in report.metrics],
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
        "about": _text(f"{', '.join(report.problems)} · {name_seeds(report.seeds)} · corral {corral.__version__}", 300),
        "headline": next(iter(claims), ""),
        "measure": {"key": report.measure.key, "name": report.measure.name, "percent": report.measure.factor == 100},
        "finals": [
            {
                "group": group.key, "seeds": {_text(seed, 60): value for seed, value in ends.items()},
                "value": row["final"], "low": row["final_low"], "high": row["final_high"],
            }
            for group, row in zip(report.groups, report.tables["results"], strict=True)
            if (ends := outcomes.by_seed(report.scores, group))
        ],
        "forest": _forest(report),
        "sweeps": [_sweep_data(report, sweep) for sweep in report.sweeps],
        "completions": _fitting(lambda most: _completions(report, most), _MOST_TEXT, 20, _ALL_TEXT),
        "tokens": _fitting(lambda most: _tokens(report, most), _ALL_TOKENS, 100, _ALL_TOKEN_TEXT),
        "tables": {
            name: [{visible(key): _value(value) for key, value in row.items()} for row in report.tables[name][:html.MOST_ROWS]]
            for name in _TABLES
        },
    }  # fmt: skip


def _text(text: object, most: int) -> str:
    """Cut a text to `most` characters and make hidden characters visible."""
    return visible(shorten(str(text), most))


def _value(value: Any) -> Any:
    """Convert a table cell to a value that JSON supports."""
    return _text(value, 1000) if isinstance(value, str) else value if isinstance(value, bool) else _number(value)


def _number(value: Any) -> float | str | None:
    """Convert a number to a value that JSON supports, with five digits. NaN becomes None, infinity a text."""
    if not isinstance(value, int | float) or value != value:
        return None
    value = float(value)
    return float(f"{value:.5g}") if abs(value) != float("inf") else "inf" if value > 0 else "-inf"


def _rounded(columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Round the columns of a curve: counts to whole numbers, other numbers to five digits; texts are unchanged."""
    whole = ("step", "update", "tokens", "env_steps", "rollouts")
    return {
        key: [value if isinstance(value, str) else round(value) if key in whole else _number(value) for value in column]
        for key, column in columns.items()
    }


def _bands(report: RunReport, metric: figures.Metric) -> dict[str, Any]:
    """Compute bootstrap intervals of the learning curves of a metric, for each group of at least two runs."""
    curves = {group.key: figures.curve(group, metric, report.every) for group in report.groups if len(group.runs) > 1}
    return {
        str(key): _rounded(curve[["step", "low", "high"]].to_dict("list")) for key, curve in curves.items() if curve is not None
    }


def _sweep_data(report: RunReport, sweep: Sweep) -> dict[str, Any]:
    """Build the data of a sweep's figure: a line per compared method, with the scores of all seeds at each swept value."""
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


def _fitting(make: Callable[[int], list[Row]], most: int, least: int, size: int) -> list[Row]:
    """Make rows of texts or tokens with `most` elements, and halve `most` down to `least` until they fit into `size` bytes."""
    rows = make(most)
    while most > least and len(html.page_json(rows).encode()) > size:
        most //= 2
        rows = make(most)
    return rows


def _completions(report: RunReport, most: int) -> list[Row]:
    """Collect the runs' sampled completions for the page, each cut to `most` characters."""
    return [
        {
            "run": index, "step": int(row["step"] or 0), "prompt": _text(row.get("prompt") or "", most // 2),
            "completion": _text(row["completion"] or "", most), "reward": _number(row.get("reward")),
            "advantage": _number(row.get("advantage")),
        }
        for index, run in enumerate(report.runs)
        for row in run.completions
    ]  # fmt: skip


def _tokens(report: RunReport, most: int) -> list[Row]:
    """Collect the runs' tokens for the page: text, effect of the trust region, KLs, log-ratio. Runs share `most` equally."""
    kept = {index: run.tokens for index, run in enumerate(report.runs) if run.tokens}
    found = []
    for index, rows in kept.items():
        # Every row, every other one, every fourth …: as many as fit, and one at least.
        while len(rows) > 1 and sum(min(len(row["token"]), _LONGEST) for row in rows) > most // len(kept):
            rows = rows[::2]
        for row in rows:
            entry: Row = {"run": index, "step": int(row["step"] or 0)}
            entry["token"] = [_text(text, 80) for text in row["token"][:_LONGEST]]
            entry["action"] = [_text(action or "", 20) for action in row["action"][:_LONGEST]]
            for name in ("kl_before", "kl_after", "log_ratio"):
                values = row.get(name)
                entry[name] = None if values is None else [_number(value) for value in values[:_LONGEST]]
            found.append(entry | {name: _number(row.get(name)) for name in ("reward", "advantage", "bound")})
    return found
