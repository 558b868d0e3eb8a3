"""One HTML file that tells how runs went. It asks the network for nothing, and runs no script but its own."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import corral
from corral.report import figures, outcomes
from corral.report.content import Report
from corral.report.html import Safe, data_block, join, shortened, tag, visible
from corral.report.read import Run
from corral.report.sections import body
from corral.run.files import RunError, write_whole

MOST_TEXT = 4000
"""Characters of a completion that a page shows."""

ALL_TEXT = 1_500_000
"""Characters of all completions together: the page stays below six megabytes whatever was sampled."""

LARGEST = 6_000_000
"""Bytes of a page."""


def write_page(report: Report, out: Path) -> int:
    """The page, whole or not at all. Returns its size in bytes."""
    content = page(report).encode()
    if len(content) > LARGEST:
        raise RunError(
            f"the page would have {len(content) / 1e6:.1f} MB. Report fewer runs at a time: {len(report.runs)} were given."
        )
    if not out.parent.is_dir():
        raise RunError(f"{out.parent} is no folder: make it first, or choose another --out.")
    write_whole(out, lambda beside: beside.write_bytes(content))
    return len(content)


def page(report: Report) -> str:
    """The whole HTML."""
    style, script = (files("corral.report").joinpath("static", name).read_text("utf-8") for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        f"base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"corral {corral.__version__}"),
        tag("title", report.title),
        Safe(f"<style>{style}</style>"),
    )
    inside = tag("body", body(report), data_block("data", page_data(report)), Safe(f"<script>{script}</script>"))
    return f"<!doctype html>\n{join(Safe('<html lang=' + chr(34) + 'en' + chr(34) + '>'), head, inside)}</html>\n"


def page_data(report: Report) -> dict[str, Any]:
    """What the page's script draws from. Texts in it are only ever shown as text."""
    objectives, settings = (
        list(dict.fromkeys(names)) for names in zip(*((g.objective, g.setting) for g in report.groups), strict=True)
    )
    place = {id(run): index for index, run in enumerate(report.runs)}
    return {
        "metrics": [
            {"key": m.key, "title": m.title, "caption": m.caption, "section": m.section, "percent": m.percent, "log": m.log}
            for m in report.metrics
        ],
        "groups": [
            {
                "key": group.key, "label": visible(group.label), "problem": visible(group.problem),
                "colour": objectives.index(group.objective) % 8, "dash": settings.index(group.setting) % 4,
            }
            for group in report.groups
        ],
        "runs": [
            {
                "group": group.key, "seed": visible(run.seed), "stopped": visible(run.stopped),
                "columns": _rounded(figures.points(run, report.metrics, report.every)),
            }
            for group in report.groups
            for run in group.runs
        ],
        "bands": {metric.key: _bands(report, metric) for metric in report.metrics if metric.section == "learning"},
        "every": report.every,
        "measure": {"key": report.measure.key, "name": report.measure.name, "percent": report.measure.factor == 100},
        "finals": _finals(report),
        "completions": _completions(report.runs, place),
        "tokens": _tokens(report.runs, place),
    }  # fmt: skip


def _bands(report: Report, metric: figures.Metric) -> dict[str, Any]:
    """Bootstrap intervals of the learning curves, group by group, for groups of two seeds and more."""
    found = {}
    for group in report.groups:
        if len(group.runs) > 1 and (curve := figures.curve(group, metric, report.every)) is not None:
            found[str(group.key)] = _rounded({"step": list(curve.step), "low": list(curve.low), "high": list(curve.high)})
    return found


def _finals(report: Report) -> list[dict[str, Any]]:
    """Where each group ended: its seeds, their interquartile mean and its interval."""
    found = []
    for group, row in zip(report.groups, report.tables["results"], strict=True):
        seeds = outcomes.finals(group, report.measure.key)
        if seeds:
            found.append(
                {
                    "group": group.key,
                    "seeds": {visible(seed): value for seed, value in seeds.items()},
                    "value": row["final"],
                    "low": row["final_low"],
                    "high": row["final_high"],
                }
            )
    return found


def _completions(runs: Sequence[Run], place: Mapping[int, int]) -> list[dict[str, Any]]:
    """Sampled completions, cut to what a page can hold."""
    count = sum(len(run.completions) for run in runs)
    most = min(MOST_TEXT, max(ALL_TEXT // max(count, 1), 200))
    return [
        {
            "run": place[id(run)],
            "step": int(row["step"] or 0),
            "prompt": visible(shortened(str(row.get("prompt") or ""), most // 2)),
            "completion": visible(shortened(str(row["completion"] or ""), most)),
            "reward": _number(row.get("reward")),
            "advantage": _number(row.get("advantage")),
        }
        for run in runs
        for row in run.completions
    ]


def _tokens(runs: Sequence[Run], place: Mapping[int, int]) -> list[dict[str, Any]]:
    """Token by token: text, what was done to it, and how far it wanted to go."""
    most = 600
    found = []
    for run in runs:
        for row in run.tokens:
            entry = {
                "run": place[id(run)],
                "step": int(row["step"] or 0),
                "token": [visible(shortened(str(text), 80)) for text in row["token"][:most]],
            }
            entry["action"] = [str(action or "") for action in row["action"][:most]]
            for name in ("kl_before", "kl_after", "log_ratio"):
                entry[name] = [_number(value) for value in row[name][:most]] if row.get(name) is not None else None
            entry |= {
                "reward": _number(row.get("reward")),
                "advantage": _number(row.get("advantage")),
                "bound": _number(row.get("bound")),
            }
            found.append(entry)
    return found[: max(1, ALL_TEXT // 10 // max((len(entry["token"]) for entry in found), default=1))]


def _number(value: Any) -> float | str | None:
    """As JSON can hold it, with five digits."""
    if not isinstance(value, int | float) or value != value:
        return None
    return float(f"{value:.5g}") if abs(value) != float("inf") else "inf" if value > 0 else "-inf"


def _rounded(columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    whole = ("step", "update", "tokens")
    return {
        key: [
            value if isinstance(value, str) or value is None else round(value) if key in whole else _number(value)
            for value in column
        ]
        for key, column in columns.items()
    }


def _hash(text: str) -> str:
    """What the policy calls an inline script or style by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
