"""What a page's script draws from, as JSON: few enough numbers for a page that opens at once. Texts in it are shown as text."""

from collections.abc import Mapping, Sequence
from typing import Any

import corral
from corral.report import figures, outcomes
from corral.report.content import RunReport, report_looks
from corral.report.html import MOST_ROWS, page_json, shorten
from corral.report.looks import Look, short_labels
from corral.report.page.forest import sort_pairs
from corral.report.read import Run
from corral.report.sweep.find import Sweep
from corral.report.sweep.ranges import ordered, value_at, value_text
from corral.run.text import visible

_MOST_TEXT = 4000
"""Characters of a completion that a page shows."""

_ALL_TEXT = 1_500_000
"""Bytes of all completions, as the page holds them: it stays below six megabytes whatever was sampled."""

_ALL_TOKENS, _ALL_TOKEN_TEXT = 25_000, 2_000_000
"""Tokens that are shown one by one, of all runs together, and their bytes as the page holds them."""

_LONGEST = 600
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
        "completions": _completions(report.runs, place),
        "tokens": _tokens(report.runs, place),
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


def _completions(runs: Sequence[Run], place: Mapping[int, int]) -> list[dict[str, Any]]:
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


def _tokens(runs: Sequence[Run], place: Mapping[int, int]) -> list[dict[str, Any]]:
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
    entry["token"] = [visible(shorten(str(text), 80)) for text in row["token"][:_LONGEST]]
    entry["action"] = [visible(shorten(action or "", 20)) for action in row["action"][:_LONGEST]]
    for name in ("kl_before", "kl_after", "log_ratio"):
        entry[name] = [_number(value) for value in row[name][:_LONGEST]] if row.get(name) is not None else None
    return entry | {name: _number(row.get(name)) for name in ("reward", "advantage", "bound")}


def _fitting(rows: Sequence[Mapping[str, Any]], most: int) -> Sequence[Mapping[str, Any]]:
    """Every row, every other one, every fourth …: as many as have at most `most` tokens, and one at least."""
    while len(rows) > 1 and sum(min(len(row["token"]), _LONGEST) for row in rows) > most:
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
