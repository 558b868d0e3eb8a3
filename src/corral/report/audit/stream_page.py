"""The page of an audit of logged tokens: one file that asks the network for nothing."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from corral.audit.histogram import ACCURACY
from corral.audit.stream_words import MEASURES, stream_sentences
from corral.audit.summary import Column, Row
from corral.audit.tally import StreamSummary
from corral.audit.threshold import AUDITED, Threshold
from corral.audit.words import number, percent
from corral.report.audit.cells import four_cells, headline
from corral.report.audit.chart import Axis, curve, legend, plane, sides
from corral.report.audit.figures import mark
from corral.report.audit.page import about_figures, audit_document, live_note
from corral.report.audit.thresholds import threshold_section
from corral.report.audit.tokens import completion_heat
from corral.report.html import (
    Safe,
    join,
    note,
    page_body,
    sections,
    shorten,
    table,
    tag,
    write_document,
)  # fmt: skip
from corral.report.looks import Look
from corral.report.svg import at, drawn_figure
from corral.run.text import count, visible

_DISTANCES = {
    "kl": "KL(new‖old), nats",
    "tv": "total variation",
    "k1": "|k1|: |log old − log new|",
    "k2": "k2: ½ (log ratio)²",
    "k3": "k3: ratio − 1 − log ratio",
    "mismatch": "TV of sampler and trainer",
}
_QUANTILES = {"mean": "Mean", "p50": "Median", "p99": "99th percentile", "p999": "99.9th percentile", "max": "Largest"}

_STEPS: dict[str, tuple[Look, str]] = {
    "k3": ((0, 0), "mean KL by k3, nats"),
    "tv": ((1, 1), "mean TV"),
    "mismatch": ((3, 3), "mean TV of sampler and trainer"),
}
_ESS: tuple[Look, str] = ((2, 4), "effective sample size, as a share of the tokens")
_POINTS, _MARKS = 600, 80
"""Steps that a curve shows, and those of them that have a marker."""

_METHOD = f"""
Log-probs are those that the engine logged, of the sampled tokens that were trained on. k1, k2 and k3 estimate KL(old‖new) from
them; the effective sample size is (Σ w)² / (n Σ w²) with w the ratio of the new policy to the one that sampled.

Everything was computed in one pass. Counts, means and largest values are exact; medians and percentiles come from logarithmic
histograms and are within {100 * ACCURACY:g} % of a value that occurs.

Rules look at the very same tokens at the same moment; a run that had been trained with another rule would have come to others.
Signs of a collapse are those that the guard of corral train warns of: KL beyond 1 nat, effective samples below 70 %, entropy
or reward that fell for good.
"""


def write_stream_page(
    summary: StreamSummary, sample: Mapping[str, Column], info: Mapping[str, Any], out: Path, live: float | None = None
) -> int:
    """The page, whole or not at all. Returns its size in bytes."""
    return write_document(stream_page(summary, sample, info, live), out, "This should not happen: please report it.")


def stream_page(
    summary: StreamSummary, sample: Mapping[str, Column], info: Mapping[str, Any], live: float | None = None
) -> str:
    """The whole HTML.

    Args:
        sample: columns of a few completions, with `text`.
        live: seconds after which it is written again, and read again by itself.
    """
    title = f"Audit of {shorten(str(info['name']), 80)}"
    said = stream_sentences(summary, info)
    audited = next((row for row in summary.thresholds if row.family == AUDITED), None)
    found = tag("ul", *(tag("li", sentence, class_="finding") for sentence in said[1:]), class_="sentences")
    parts = {
        "findings": ("Findings", join(live_note(live), _cells(audited, summary.measure, info["rules"]), found)),
        "threshold": (
            "Which threshold?",
            threshold_section(summary.thresholds, summary.measure, summary.kl_bound, summary.tv_bound),
        ),
        "distances": ("How far", _distances(summary)),
        "steps": ("Over training", _step_charts(summary.by_step, summary.alarms)),
        "probability": ("By old probability", _buckets(summary)),
        "age": ("By staleness", _ages(summary.by_age)),
        "completions": ("Completions", completion_heat(sample, info["rules"], "KL", "Step")),
        "measured": ("How this was measured", _method(info)),
    }
    main = tag("main", *sections(parts).values(), class_="audited-page")
    body = page_body(title, said[0], parts, main, count(summary.tokens, "logged token"))
    data = {"about": about_figures(info["name"], summary.tokens, info["what"]), "headline": ""}
    if audited is not None:
        data["headline"] = headline(audited.kl, certain=summary.measure == "whole")
    return audit_document(title, body, data, live)


def _cells(audited: Threshold | None, measure: str, rules: Mapping[str, Any]) -> Safe | None:
    """The audited rule against the KL ball."""
    if audited is None:
        return None
    sure = f"Divergences are those of {MEASURES[measure]}: false alarms may be fewer, and more may be missed."
    certain = measure == "whole"
    moment = tag("p", "In an update at the new policy:", class_="count")
    return join(moment, four_cells(audited.kl, rules, certain=certain), None if certain else tag("p", sure, class_="count"))


def _distances(summary: StreamSummary) -> Safe:
    rows: list[Row] = [{"what": _DISTANCES[name], **row} for name, row in summary.distances.items()]
    columns = {"what": "Distance", **_QUANTILES}
    shown = table(rows, columns, lambda key, row: row[key] if key == "what" else number(row[key]), aria_label="Distances")
    return join(tag("p", f"Divergences are those of {MEASURES[summary.measure]}.", class_="count"), shown)


def _step_charts(by_step: Sequence[Row], alarms: Sequence[Row]) -> Safe:
    """Distances on a logarithmic axis, and effective samples on a plain one, over the steps; dashed: the first alarm."""
    if len(by_step) < 2:
        return note("There is one step, so nothing to draw over time.")
    rows = by_step[:: math.ceil(len(by_step) / _POINTS)]
    told = f" Dashed: step {alarms[0]['step']:,}, where a collapse announces itself." if alarms else ""
    distances = {name: [(row["step"], row[name]) for row in rows if row[name]] for name in _STEPS}
    distances = {name: points for name, points in distances.items() if points}
    values = [value for points in distances.values() for _, value in points]
    low, high = math.floor(math.log10(min(values, default=0.1))), math.ceil(math.log10(max(values, default=0.5)))
    decades = (10.0**low, 10.0 ** max(high, low + 1), math.log10)
    share = {"ess": [(row["step"], row["ess"]) for row in rows]}
    return join(
        drawn_figure(
            "Distance by step",
            f"Of the tokens that were logged at each step.{told}",
            lambda width: _draw_steps(width, distances, decades, "distance", number, alarms),
            legend({_STEPS[name][1]: _STEPS[name][0] for name in distances}),
        ),
        drawn_figure(
            "Effective samples by step",
            f"100 % means on-policy; below 70 % a few tokens with large ratios decide the updates.{told}",
            lambda width: _draw_steps(width, share, (0.0, 1.0, float), "effective samples", _percent, alarms),
            legend({_ESS[1]: _ESS[0]}),
        ),
    )


def _draw_steps(
    width: int,
    curves: Mapping[str, Sequence[tuple[int, float]]],
    upward: tuple[float, float, Callable[[float], float]],
    label: str,
    show: Callable[[float], str],
    alarms: Sequence[Row],
) -> tuple[list[Safe], int]:
    """Curves by step, with a marker for each of a few steps."""
    height = 300
    left, right, bottom, top = plane(width, height)
    steps = [step for points in curves.values() for step, _ in points] or [0, 1]
    x, y = Axis(min(steps), max(steps), left, right), Axis(upward[0], upward[1], bottom, top, upward[2])
    parts = sides(x, y, ("step", label), (_whole, show))
    for name, points in curves.items():
        look, title = _STEPS.get(name, _ESS)
        parts.append(curve([(x(step), y(value)) for step, value in points], look))
        few = points[:: math.ceil(len(points) / _MARKS)]
        parts += [mark(look, x(step), y(value), f"step {step:,}: {title} {show(value)}") for step, value in few]
    parts += [_upright(x(alarm["step"]), top, bottom, alarm["sentence"]) for alarm in alarms[:1]]
    return parts, height


def _upright(x: float, top: float, bottom: float, title: str) -> Safe:
    return tag("line", tag("title", title), x1=at(x), x2=at(x), y1=at(top), y2=at(bottom), class_="bound")


def _buckets(summary: StreamSummary) -> Safe:
    bound = number(summary.kl_bound)
    columns = {"name": "Old probability", "tokens": "Tokens", "tv": "Mean TV", "outside": f"outside KL ≤ {bound}"}
    columns |= {"clip": "clip 1 ± 0.2 blocks", "dppo_tv": "DPPO TV 0.2 blocks", "dppo_kl": "DPPO KL 0.05 blocks"}

    def show(key: str, row: Row) -> str:
        if key in ("name", "tokens"):
            return row[key] if key == "name" else f"{row[key]:,}"
        return number(row[key]) if key == "tv" else percent(row[key])

    return table(summary.by_probability, columns, show, aria_label="By old probability")


def _ages(by_age: Sequence[Row]) -> Safe:
    if not by_age:
        return note("Nothing was logged about when tokens were sampled.")
    columns = {"age": "Steps since it was sampled", "tokens": "Tokens", "k3": "Mean KL by k3", "tv": "Mean TV"}
    columns |= {"mismatch": "Mean TV of sampler and trainer", "ess": "Effective samples"}

    def show(key: str, row: Row) -> str:
        if row[key] is None:
            return "—"
        if key == "age":
            return f"{row[key]}{' or more' if row['older'] else ''}"
        return f"{row[key]:,}" if key == "tokens" else percent(row[key]) if key == "ess" else number(row[key])

    return table(list(by_age), columns, show, aria_label="By staleness")


def _method(info: Mapping[str, Any]) -> Safe:
    """The method, and what was asked for."""
    asked = {**{f"rules {key}": value for key, value in info["rules"].items()}, **info.get("settings", {})}
    rows: list[Row] = [{"setting": key, "value": shorten(str(value), 300)} for key, value in asked.items()]
    shown = table(rows, {"setting": "Setting", "value": "Value"}, lambda key, row: visible(row[key]), aria_label="Settings")
    return join(
        *(tag("p", part) for part in _METHOD.strip().split("\n\n")),
        tag("details", tag("summary", f"{len(rows)} rules and settings"), shown),
    )


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _whole(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else ""
