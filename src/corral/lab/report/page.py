"""The report page: findings, curves, sweeps, tables and an appendix, with their data as JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import corral
from corral.lab.report import figures, outcomes
from corral.lab.report.content import RunReport, report_looks
from corral.lab.report.forest import hero, sort_pairs
from corral.lab.report.html import (
    MOST_ROWS,
    Safe,
    document,
    join,
    note,
    page_body,
    page_json,
    sections,
    shorten,
    table,
    tag,
    write_document,
)
from corral.lab.report.looks import Look, short_labels
from corral.lab.report.outcomes import BESIDE
from corral.lab.report.ranges import ordered, setting_text, value_at, value_text
from corral.lab.report.read import Run
from corral.lab.report.statistics import ENOUGH, plain, signed
from corral.lab.report.sweep import RULE, Sweep
from corral.lab.report.tables import compare_command
from corral.lab.run.text import count, visible

_MOST_TEXT = 4000
"""Characters of a completion that a page shows."""

_ALL_TEXT = 1_500_000
"""Bytes of all completions, as the page holds them: it stays below six megabytes whatever was sampled."""

_ALL_TOKENS, _ALL_TOKEN_TEXT = 25_000, 2_000_000
"""Tokens that are shown one by one, of all runs together, and their bytes as the page holds them."""

_LONGEST_TEXT = 600
"""Tokens of one completion that are."""

_TABLES = ("results", "comparisons", "overall", "sweep", "runs", "events")
"""Tables whose numbers a page can save as they are."""


def page_data(report: RunReport) -> dict[str, Any]:
    """Everything."""
    settings = list(dict.fromkeys(group.setting for group in report.groups))
    looks = report_looks(report)
    place = {id(run): index for index, run in enumerate(report.runs)}
    return {
        "metrics": [
            {
                "key": m.key, "title": m.title, "caption": visible(shorten(m.caption, 400)), "section": m.section,
                "percent": m.percent, "log": m.log,
            }
            for m in report.metrics
        ],
        "groups": [
            {
                "key": group.key, "label": visible(group.label), "problem": visible(shorten(group.problem, 200)),
                "short": visible(short), "colour": looks[group.objective][0],
                "marker": looks[group.objective][1] + (0 if group.chosen else settings.index(group.setting) // 4),
                "dash": 0 if group.chosen else settings.index(group.setting) % 4, "bound": figures.kl_bound(group),
            }
            for group, short in zip(report.groups, short_labels([group.label for group in report.groups]), strict=True)
        ],
        "runs": [
            {
                "group": group.key, "seed": visible(shorten(run.seed, 60)), "stopped": visible(shorten(run.stopped, 60)),
                "columns": _rounded(figures.points(run, report.metrics, report.every)),
            }
            for group in report.groups
            for run in group.runs
        ],
        "bands": {metric.key: _bands(report, metric) for metric in report.metrics if metric.section == "learning"},
        "every": report.every,
        "about": visible(shorten(_about(report), 300)), "headline": visible(shorten(_headline(report), 300)),
        "measure": {"key": report.measure.key, "name": report.measure.name, "percent": report.measure.factor == 100},
        "finals": _finals(report),
        "sweeps": [_sweep(sweep, looks) for sweep in report.sweeps],
        "completions": _completion_data(report.runs, place),
        "tokens": _token_data(report.runs, place),
        "tables": {name: [_plain(row) for row in report.tables[name][:MOST_ROWS]] for name in _TABLES},
    }  # fmt: skip


def _bands(report: RunReport, metric: figures.Metric) -> dict[str, Any]:
    """Bootstrap intervals of the learning curves, group by group, for groups of two seeds and more."""
    found = {}
    for group in report.groups:
        if len(group.runs) > 1 and (curve := figures.curve(group, metric, report.every)) is not None:
            found[str(group.key)] = _rounded({"step": list(curve.step), "low": list(curve.low), "high": list(curve.high)})
    return found


def _finals(report: RunReport) -> list[dict[str, Any]]:
    """Where each group ended: its seeds, their interquartile mean and its interval."""
    found = []
    for group, row in zip(report.groups, report.tables["results"], strict=True):
        seeds = outcomes.finals(group, report.measure.key)
        if seeds:
            found.append(
                {
                    "group": group.key,
                    "seeds": {visible(shorten(seed, 60)): value for seed, value in seeds.items()},
                    "value": row["final"],
                    "low": row["final_low"],
                    "high": row["final_high"],
                }
            )
    return found


def _headline(report: RunReport) -> str:
    """The largest claim, for figures that are about it."""
    rows = sort_pairs([row for row in report.tables["comparisons"] if row["measure"] == "final"])
    return rows[0]["sentence"] if rows and rows[0]["claimed"] else ""


def _about(report: RunReport) -> str:
    """What a figure that stands alone says of its runs: task and model, seeds, and what a band is."""
    seeds = list(dict.fromkeys(run.seed for run in report.runs))
    problems = list(dict.fromkeys(group.problem for group in report.groups))
    return f"{', '.join(problems)} · seed{'' if len(seeds) == 1 else 's'} {', '.join(seeds)} · corral {corral.__version__}"


def _sweep(sweep: Sweep, looks: Mapping[str, Look]) -> dict[str, Any]:
    """Lines of a sweep: one per contestant and other settings, with a cell per value of the axis and its seeds' numbers."""
    found, values = [], [*ordered([value_at(row.setting, sweep.key) for row in sweep.rows])]
    for index, line in enumerate(sweep.ranges):
        mine = sweep.rows_of(line)
        chosen = sweep.chosen.get(line.contestant, {})
        here = sweep.others(chosen) == line.setting and chosen.get(sweep.key) in values
        found.append(
            {
                "label": visible(line.label),
                "colour": looks[line.contestant][0], "marker": looks[line.contestant][1],
                "dash": sum(other.contestant == line.contestant for other in sweep.ranges[:index]) % 4,
                "usable": [values.index(value) for value in line.own],
                "overall": [values.index(value) for value in line.overall],
                "chosen": values.index(value_at(chosen, sweep.key)) if here else None,
                "cells": [
                    {
                        name: [_number(vars(row)[field]) for row in mine if row.setting[sweep.key] == value]
                        for name, field in (
                            ("final", "final"), ("area", "auc"), ("greedy", "greedy"), ("kl", "kl"), ("collapsed", "collapsed"),
                        )
                    }
                    for value in values
                ],
            }
        )  # fmt: skip
    return {"key": visible(sweep.key), "values": values, "names": [value_text(value) for value in values], "lines": found}


def _completion_data(runs: Sequence[Run], place: Mapping[int, int]) -> list[dict[str, Any]]:
    """Sampled completions, cut to what a page can hold."""
    most = 2 * _MOST_TEXT
    found: list[dict[str, Any]] = []
    while most == 2 * _MOST_TEXT or (most > 20 and _size(found) > _ALL_TEXT):
        most //= 2
        found = _cut_completions(runs, place, most)
    return found


def _size(rows: Sequence[Mapping[str, Any]]) -> int:
    """Bytes of rows, as a page holds them."""
    return len(page_json(rows).encode())


def _cut_completions(runs: Sequence[Run], place: Mapping[int, int], most: int) -> list[dict[str, Any]]:
    """Each with so many characters at most."""
    return [
        {
            "run": place[id(run)],
            "step": int(row["step"] or 0),
            "prompt": visible(shorten(str(row.get("prompt") or ""), most // 2)),
            "completion": visible(shorten(str(row["completion"] or ""), most)),
            "reward": _number(row.get("reward")),
            "advantage": _number(row.get("advantage")),
        }
        for run in runs
        for row in run.completions
    ]


def _token_data(runs: Sequence[Run], place: Mapping[int, int]) -> list[dict[str, Any]]:
    """Token by token: text, what was done to it, and how far it wanted to go. Every run has an equal share of the page."""
    kept, most = [run for run in runs if run.tokens], 2 * _ALL_TOKENS
    found: list[dict[str, Any]] = []
    while most == 2 * _ALL_TOKENS or (most > 100 and _size(found) > _ALL_TOKEN_TEXT):
        most //= 2
        each = most // max(len(kept), 1)
        found = [_token_row(row, place[id(run)]) for run in kept for row in _fitting(run.tokens, each)]
    return found


def _token_row(row: Mapping[str, Any], run: int) -> dict[str, Any]:
    entry: dict[str, Any] = {"run": run, "step": int(row["step"] or 0)}
    entry["token"] = [visible(shorten(str(text), 80)) for text in row["token"][:_LONGEST_TEXT]]
    entry["action"] = [visible(shorten(action or "", 20)) for action in row["action"][:_LONGEST_TEXT]]
    for name in ("kl_before", "kl_after", "log_ratio"):
        entry[name] = [_number(value) for value in row[name][:_LONGEST_TEXT]] if row.get(name) is not None else None
    return entry | {name: _number(row.get(name)) for name in ("reward", "advantage", "bound")}


def _fitting(rows: Sequence[Mapping[str, Any]], most: int) -> Sequence[Mapping[str, Any]]:
    """Every row, every other one, every fourth …: as many as have at most `most` tokens, and one at least."""
    while len(rows) > 1 and sum(min(len(row["token"]), _LONGEST_TEXT) for row in rows) > most:
        rows = rows[::2]
    return rows


def _number(value: Any) -> float | str | None:
    """As JSON can hold it, with five digits."""
    if not isinstance(value, int | float) or value != value:
        return None
    value = float(value)
    return float(f"{value:.5g}") if abs(value) != float("inf") else "inf" if value > 0 else "-inf"


def _rounded(columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    whole = ("step", "update", "tokens", "env_steps", "rollouts")
    return {
        key: [
            value if isinstance(value, str) or value is None else round(value) if key in whole else _number(value)
            for value in column
        ]
        for key, column in columns.items()
    }


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a table as JSON can hold it."""
    return {
        visible(key): visible(shorten(value, 1000)) if isinstance(value, str) else _as_is(value) for key, value in row.items()
    }


def _as_is(value: Any) -> Any:
    return value if value is None or isinstance(value, bool) else _number(value)


_METHOD = """
Final is the last measured {name}; area is its mean over the run by steps (trapezia), where a run that was stopped early keeps
its last value to the end of its budget. Both are interquartile means over seeds, which of fewer than four seeds are plain
means, with 95 % stratified bootstrap intervals (rliable); those of the probability of improvement are bootstrapped too. With
fewer than ten seeds such intervals are too narrow: they show where the runs lie, and decide nothing.

A claim rests on the differences of runs with equal seeds, which saw the same problems: their mean, Student's 95 % interval, and
Holm's correction over all pairs that are shown for the same measure. It needs three seeds, and between two objectives one
reduction and one advantage.

Steps to threshold is the median over seeds of the first measurement at {threshold} or above. A run collapsed if it ended below
half of its best {name} and at least .1 lower, or if the guard stopped it; one that began below zero must also have lost half
of what it had gained.

Runs that were interrupted, failed or still go on are drawn, and left out of every number. Where they failed because of their
objective, that flatters it: look at the failures below. A curve is of the runs that measured something at a step: once one was
stopped, it is of the others alone, which flatters it too.
"""


_CHOSEN = "Each contestant has the setting that was chosen for it in the sweep, and runs with seeds that the choice never saw."

_ACROSS = """
Over all tasks together, on one scale: success as it is; returns so that 0 is where a task's runs began and 1 what the best
contestant ended with there. Interquartile mean and mean over tasks and seeds, with 95 % bootstrap intervals that draw runs
within each task (rliable); chance is how likely a run ends above one of another contestant, on a task drawn at random.
"""


def findings(report: RunReport, headline: Safe | None = None) -> Safe:
    """Sentences, the picture of where everybody ended, the table, and the method.

    Args:
        headline: what a sweep has to say, where there is one.
    """
    rows = sorted(report.tables["comparisons"], key=lambda row: not row["claimed"])
    final, area, returns = ([row for row in rows if row["measure"] == name] for name in ("final", "area", "return"))
    titles = {f"On the mean {report.measure.name} over the run": area, "On the final return": returns}
    more = [tag("details", tag("summary", title), _sentences(part)) for title, part in titles.items() if part]
    text = _METHOD.format(
        name=report.measure.name,
        threshold="90 % of the best end" if report.threshold is None else report.measure.text(report.threshold),
    )
    if report.is_single:
        return _single_run(report)
    return join(
        *_warnings(report),
        headline,
        tag("p", _CHOSEN, class_="count") if rows and any(group.chosen for group in report.groups) else None,
        hero(final, report_looks(report), f"final {report.measure.name}", _sentences) if final else None,
        *more,
        tag("details", tag("summary", "All comparisons in numbers"), _comparison_table(report)) if rows else None,
        tag("div", id="finals", class_="figures wide"),
        _result_table(report),
        _overall_table(report),
        tag("details", tag("summary", "How this was judged"), *(tag("p", part) for part in text.strip().split("\n\n"))),
    )


def _single_run(report: RunReport) -> Safe:
    """One run: its numbers, large. There is nothing to compare it with, and no interval."""
    (run,), (row,) = report.runs, report.tables["runs"]
    numbers = {f"{name} {report.measure.name}": row[name] for name in ("start", "best", "final")}
    shown = {name: report.measure.text(value) for name, value in numbers.items() if value is not None}
    if row["greedy"] is not None:
        shown["final greedy success"] = report.measure.text(row["greedy"])
    reached = report.tables["results"][0]["steps_to_threshold"]
    if report.threshold is not None and reached is not None:
        shown[f"steps to {report.measure.text(report.threshold)}"] = f"{reached:,.0f}"
    shown |= {"steps": f"{run.steps:,} of {run.planned_steps:,}", "time": _duration(row["seconds"])}
    boxes = [tag("div", tag("dt", name), tag("dd", text)) for name, text in shown.items()]
    ended = run.stopped if run.stopped != "not ended" else "goes on, or was killed"
    verb = "" if not run.summary else "has " if ended == "finished" else "was "
    text = f"One run of {run.objective}, seed {run.seed}: it {verb}{ended}. "
    text += "With three seeds or more of two objectives, this page says who is better."
    return join(tag("dl", *boxes, class_="big"), tag("p", text, class_="count"))


def _duration(seconds: float | None) -> str:
    """`57 s`, `12 min`, `3.4 h`."""
    if seconds is None:
        return "—"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _sentences(rows: Sequence[dict[str, Any]]) -> Safe:
    """A list, claims first."""
    return sentence_list([(row["sentence"], "claim" if row["claimed"] else "tie") for row in rows])


def sentence_list(said: list[tuple[str, str]]) -> Safe:
    """Sentences, each with its kind, which is its mark: claim, tie or range."""
    return tag("ul", *(tag("li", text, class_=kind) for text, kind in said), class_="sentences")


def _comparison_table(report: RunReport) -> Safe:
    """One row per pair and measure."""
    columns = {"pair": "Difference", "measure": "Of", "difference": report.measure.unit.capitalize() or "Value"}
    columns |= {"interval": "95 % interval", "p": "p", "claimed": "Claimed", "probability": "Probability of improvement"}

    def show(key: str, row: dict[str, Any]) -> str:
        if key == "pair":
            return f"{row['ours']} − {row['theirs']}"
        if key == "interval":
            return "—" if row["low"] is None else f"{plain(row['low'])}…{plain(row['high'])}"
        if key == "probability":
            low, high = row["probability_low"], row["probability_high"]
            return f"{row[key]:.2f}" + ("" if low is None else f" [{low:.2f}…{high:.2f}]")
        if key == "difference":
            return signed(row[key])
        if key == "p":
            return "—" if row[key] is None else f"{row[key]:.2g}"
        return ("yes" if row[key] else "no") if key == "claimed" else row[key]

    return table(report.tables["comparisons"], columns, show, aria_label="Comparisons", data_table="comparisons")


def _warnings(report: RunReport) -> list[Safe]:
    """What to know before reading on."""
    found, rows = [], report.tables["comparisons"]
    out = sum(row["kind"] == "left out" for row in report.tables["events"])
    if out:
        said = f"{count(out, 'run')} did not finish and {'is' if out == 1 else 'are'} not in these numbers: "
        found.append(note(said, tag("a", "see below", href="#events"), "."))
    if len(report.groups) == 1:
        found.append(note("There is one objective with one setting, so nothing to compare it with."))
    elif not rows:
        found.append(note("No two groups can be compared: they have no runs that finished on the same problem and setting."))
    elif all(row["seeds"] < ENOUGH for row in rows):
        found.append(note(f"Fewer than {ENOUGH} seeds: differences are shown, none can be claimed."))
    return found


def _result_table(report: RunReport) -> Safe:
    """One row per group."""
    rows, name = report.tables["results"], report.measure.name
    columns = {"group": "Objective"}
    if any(group.chosen for group in report.groups):
        columns["setting"] = "Chosen setting"
    if len({row["problem"] for row in rows}) > 1:
        columns["problem"] = "Problem"
    columns |= {"counted": "Runs", "final": f"Final {name}", "area": "Mean over the run"}
    columns |= {key: key.capitalize() for key in BESIDE if key != name and any(row[key] is not None for row in rows)}
    threshold = "90 % of the best" if report.threshold is None else report.measure.text(report.threshold)
    columns |= {"steps_to_threshold": f"Steps to {threshold}", "collapsed": "Collapsed", "seconds": "Seconds"}

    def show(key: str, row: dict[str, Any]) -> str:
        if key == "group":
            return row["objective"] if "setting" in columns else f"{row['objective']} {row['setting']}".strip()
        if key in ("final", "area", "greedy"):
            return report.measure.estimate(row[key], row[f"{key}_low"], row[f"{key}_high"])
        if key == "return":
            return spread(row[key], row["return_low"], row["return_high"])
        number = "—" if row[key] is None else row[key] if isinstance(row[key], str) else f"{row[key]:,.0f}"
        of = {"counted": f" of {row['runs']}", "collapsed": f" of {row['counted']}"}
        of["steps_to_threshold"] = f" ({row['reached']} of {row['counted']})"
        return number + of.get(key, "")

    return table(rows, columns, show, aria_label="Results", data_table="results")


def _overall_table(report: RunReport) -> Safe | None:
    """Over several tasks, where there are."""
    rows = report.tables["overall"]
    if not rows:
        return None
    columns = {"objective": "Objective", "tasks": "Tasks", "seeds": "Seeds", "middle": "Interquartile mean", "mean": "Mean"}
    columns["chance"] = "Chance to be better"

    def show(key: str, row: dict[str, Any]) -> str:
        if key in ("middle", "mean"):
            return spread(row[key], row[f"{key}_low"], row[f"{key}_high"], digits=3)
        return f"{row[key]:.2f}" if key == "chance" else str(row[key])

    shown = table(rows, columns, show, aria_label="All tasks together", data_table="overall")
    return join(tag("h3", "All tasks together"), tag("p", _ACROSS, class_="count"), shown)


def spread(middle: float | None, low: float | None, high: float | None, digits: int = 4) -> str:
    """A number of no unit with its interval."""
    numbers = [None if end is None else f"{end:.{digits}g}".replace("-", "−") for end in (middle, low, high)]
    return (numbers[0] or "—") + ("" if numbers[1] is None else f" [{numbers[1]}…{numbers[2]}]")


_EVENTS = {"objective": "Objective", "seed": "Seed", "step": "Step", "kind": "Kind", "what": "What happened"}

_LONGEST = 20_000
"""Characters of a command, or of a file of settings."""

_RUNS = {
    "objective": "Objective", "seed": "Seed", "stopped": "Ended", "steps": "Steps", "start": "Start", "best": "Best",
    "final": "Final", "greedy": "Greedy", "return": "Return",
    "seconds": "Seconds", "tokens": "Tokens", "env_steps": "Environment steps", "skipped": "Skipped updates", "run": "Folder",
}  # fmt: skip


def event_table(report: RunReport) -> Safe:
    """Warnings of the guard, incomplete runs, files that could not be read."""
    rows = report.tables["events"]
    if not rows:
        return note("None: every run finished, the guard had nothing to say, and every file could be read.", good=True)
    return table(
        rows,
        _EVENTS,
        lambda key, row: "—" if row[key] is None else str(row[key]),
        aria_label="Failures and warnings",
        data_table="events",
    )


def run_table(report: RunReport) -> Safe:
    """One row per run."""

    def show(key: str, row: dict[str, Any]) -> str:
        if key == "steps":
            return f"{row['steps']} of {row['planned']}"
        if row[key] is None:
            return "—"
        if key in ("start", "best", "final", "greedy"):
            return report.measure.text(row[key])
        if key == "return":
            return spread(row[key], None, None)
        return f"{row[key]:,.0f}" if isinstance(row[key], float) else str(row[key])

    rows = report.tables["runs"]
    optional = ("greedy", "return", "tokens", "env_steps")
    columns = {key: text for key, text in _RUNS.items() if key not in optional or any(row[key] is not None for row in rows)}
    return table(rows, columns, show, aria_label="Runs", data_table="runs")


def configuration(report: RunReport) -> Safe:
    """What differs between groups, and what they share."""
    differ, same = report.tables["differences"], report.tables["settings"]
    first = note("The groups differ in no setting.", good=True)
    if differ:
        columns = {key: key for key in differ[0]} | {"setting": "Setting"}
        first = table(differ, columns, lambda key, row: row[key], aria_label="Settings that differ")
    shared = table(
        same, {"setting": "Setting", "value": "Value"}, lambda key, row: row[key], aria_label="Settings that all share"
    )
    return join(
        first, tag("details", tag("summary", f"{count(len(same), 'setting')} that all share"), shared) if same else None
    )


def reproduce(report: RunReport) -> Safe:
    """Versions, and a command or a file of settings per run."""
    rows = report.tables["versions"]
    differ = [row["package"] for row in rows if row["differ"]]
    how = "The same from a file: save this as settings.json, then run corral train --config settings.json."
    items = [tag("pre", text, tabindex="0") for plan in report.comparisons if (text := compare_command(plan.command))]
    for row in report.tables["commands"]:
        command = tag("p", "It was started from Python, or its command is unknown.")
        if row["command"]:
            command = tag("pre", shorten(row["command"], _LONGEST), tabindex="0")
        settings = tag("pre", shorten(row["settings"], _LONGEST), tabindex="0")
        words: tuple[object, ...] = (command, tag("p", how))
        if row["script"] is not None:  # its task and rewards are no names that `corral train` knows
            script = f"A script made the trainer: {shorten(str(row['script']), _LONGEST)}. It had these settings, among others."
            words = (tag("p", script),)
        items.append(tag("details", tag("summary", f"{row['objective']}, seed {row['seed']}"), *words, settings))
    return join(
        note(f"The runs were made with different versions of {', '.join(differ)}.") if differ else None,
        *items,
        tag("h3", "Versions"),
        table(rows, {"package": "Package", "versions": "Version"}, lambda key, row: row[key], aria_label="Versions"),
    )


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


_AXES = {
    "update": "updates", "step": "steps", "rollouts": "rollouts", "env_steps": "environment steps", "tokens": "tokens",
    "seconds": "seconds",
}  # fmt: skip
_LOGGED = {"env_steps": "env_steps", "tokens": "num_tokens"}
"""What a line of metrics calls them."""
_BANDS = {"interval": "95 % interval", "range": "range of seeds", "seeds": "each seed"}
_ACTIONS = {"projected": "projected back", "masked": "masked", "clipped": "clipped"}
_SIGNS = {"": "any", "high": "above its group's mean", "low": "below"}

_FILTERED = ("curves", "region", "motion", "tokens")
"""Parts that the filters are for."""

_DARK = """
A few completions of every step, as its last update saw them. The darker a token, the further it wanted to go: the KL between
the new and the old policy before the region acted, on the support and its tail where the objective has one, else of the sampled
token against all others. Both are lower bounds of the KL over all tokens.
"""

_BAND = "Lines are interquartile means over seeds (means of fewer than four); bands reach from the smallest to the largest."
_MOTION = "On held-out contexts, without exploration and with it. Medians over episodes."

_NO_TOKENS = """
These runs have no tokens.parquet, so there is no picture of single tokens: which ones were projected, masked or clipped, and
how far they wanted to go.
"""


def body(report: RunReport) -> Safe:
    """Header, parts, footer."""
    moves = any(metric.section == "motion" for metric in report.metrics)
    speaks = not all(run.is_robot for run in report.runs)
    alone = report.is_single
    wanted = {
        "findings": ("Findings", findings(report, sweep_headline(report))),
        "sweep": ("Sweep", sweep_section(report)) if report.sweeps else None,
        "curves": ("Learning curves", tag("div", id="learning", class_="figures wide")),
        "region": ("Trust region", _figures("" if alone else _BAND, "trust")),
        "motion": ("Motion", _figures(_MOTION, "motion-figures")) if moves else None,
        "tokens": ("Tokens", _tokens(report)) if speaks else None,
        "completions": ("Completions", _completions(report)) if speaks else None,
        "events": ("Failures and warnings", event_table(report)),
        "runs": None if alone else ("Runs", run_table(report)),
        "configuration": ("Configuration", configuration(report)),
        "reproduce": ("Reproduce", reproduce(report)),
    }
    parts = {name: part for name, part in wanted.items() if part is not None}
    made = sections(parts, (*_FILTERED, "completions"))
    middle = tag("div", _controls(report), *(made.pop(name) for name in _FILTERED if name in made))
    return page_body(
        report.title,
        _summary(report),
        parts,
        tag("main", made.pop("findings"), made.pop("sweep", None), middle, *made.values()),
        f"the files of {count(len(report.runs), 'run')}",
        tag(
            "noscript",
            note(
                "Scripts are switched off: curves, tokens and completions need this page's own. Findings and tables are here."
            ),
        ),
    )


def _summary(report: RunReport) -> str:
    """How many runs of what, and how they ended."""
    ends: dict[str, int] = {}
    for run in report.runs:
        ends[run.stopped] = ends.get(run.stopped, 0) + 1
    how = ", ".join(f"{number} {stopped}" for stopped, number in sorted(ends.items()))
    seeds = {len(group.runs) for group in report.groups}
    each = "" if report.is_single else f", {count(max(seeds), 'seed')} {'each' if len(seeds) == 1 else 'at most'}"
    swept = sum(len(group.runs) for group in report.sweep_groups)
    more = f" Their settings were chosen on {count(swept, 'run')} of a sweep." if swept else ""
    return f"{count(len(report.runs), 'run')}{each}: {how}.{more}"


def _controls(report: RunReport) -> Safe:
    """Filters: real form controls, for all figures at once. The boxes of the objectives are the figures' legend."""
    seeds = list(dict.fromkeys(run.seed for run in report.runs))
    problems = list(dict.fromkeys(group.problem for group in report.groups))
    learning = {metric.key: metric.title for metric in report.metrics if metric.section == "learning"}
    boxes = []
    for group in report.groups:
        box = tag("input", type="checkbox", name="group", value=group.key, checked=True)
        swatch = tag("span", class_="swatch", data_group=group.key)
        boxes.append(tag("label", box, swatch, shorten(group.label, 120), data_problem=problems.index(group.problem)))
    picks = [
        tag("label", tag("input", type="checkbox", name="seed", value=shorten(seed, 60), checked=True), shorten(seed, 60))
        for seed in seeds
    ]
    return tag(
        "form",
        _select("problem", "Problem", {place: shorten(name, 120) for place, name in enumerate(problems)})
        if len(problems) > 1
        else None,
        tag("fieldset", tag("legend", "Objective"), *boxes, hidden=report.is_single),
        tag("fieldset", tag("legend", "Seed"), *picks, hidden=report.is_single),
        _select("axis", "Over", _axes(report)),
        _select("band", "Band", _BANDS) if not report.is_single else None,
        _select("smooth", "Long lines", {"yes": "smoothed", "no": "as they are"}),
        _select("metric", "Metric", learning) if learning else None,
        id="filters",
        class_="controls scripted",
    )


def _axes(report: RunReport) -> dict[str, str]:
    """What the curves can be drawn over; environment steps or tokens, as it was robots or language models that learned."""
    logged = {key for run in report.runs for line in run.lines for key in line}
    always = {"update", "step", "seconds"} | ({"rollouts"} if all(run.rollouts_per_step for run in report.runs) else set())
    found = {key: text for key, text in _AXES.items() if key in always or _LOGGED.get(key) in logged}
    first = {"env_steps": _AXES["env_steps"]} if all(run.is_robot for run in report.runs) and "env_steps" in found else {}
    return first | found


def _figures(text: str, name: str) -> Safe:
    """The place of small figures, one per metric, below a line of text."""
    return join(tag("p", text, class_="count"), tag("div", id=name, class_="figures"))


def _tokens(report: RunReport) -> Safe:
    """Heat-map and histogram, where runs kept tokens."""
    if not any(run.tokens for run in report.runs):
        return note(_NO_TOKENS)
    marks = [tag("span", text, class_=f"token {name}") for name, text in _ACTIONS.items()]
    picks = (_select("run", "Run", {}), _select("step", "Step", {}), _select("tokens", "Completion", {}))
    return join(
        tag("p", _DARK, class_="count"),
        tag("p", *marks, class_="legend"),
        tag("form", *picks, id="token-filters", class_="controls scripted"),
        tag("p", id="heat-about", class_="count"),
        tag(
            "div",
            id="heat",
            class_="heat scripted",
            tabindex="0",
            role="group",
            aria_label="Tokens; arrow keys read their values",
        ),
        tag("p", id="heat-status", class_="count", role="status"),
        tag("div", id="histograms", class_="figures"),
        tag("div", id="tails", class_="figures wide"),
    )


def _completions(report: RunReport) -> Safe:
    """A browser of sampled completions."""
    if not any(run.completions for run in report.runs):
        return note("These runs kept no completions.")
    search = tag("label", "Contains ", tag("input", type="search", name="text", autocomplete="off"), class_="field")
    picks = (_select("run", "Run", {}), _select("step", "Step", {}), _select("sign", "Advantage", _SIGNS), search)
    return join(
        tag("form", *picks, id="completion-filters", class_="controls scripted"),
        tag("p", id="completion-count", class_="count", role="status"),
        tag("ol", id="completion-list", class_="completions"),
    )


def _select(name: str, heading: str, options: dict[str, str] | dict[int, str]) -> Safe:
    """A list to pick from."""
    items = [tag("option", text, value=key) for key, text in options.items()]
    return tag("label", f"{heading} ", tag("select", *items, name=name), class_="field")


_SCRIPTS = ("base.js", "curves.js", "sweep.js", "tokens.js", "page.js")
"""In static/; each needs those before it."""


def write_page(report: RunReport, out: Path) -> int:
    """The page, whole or not at all. Returns its size in bytes."""
    return write_document(page(report), out, f"Report fewer runs at a time: {len(report.runs)} were given.")


def page(report: RunReport) -> str:
    """The whole HTML."""
    return document(report.title, body(report), page_data(report), _SCRIPTS)
