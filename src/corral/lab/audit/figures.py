"""Data of the charts on an audit's HTML page. The page's script draws them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from corral.lab.audit.tally import Audit, Row
from corral.lab.audit.threshold import Threshold
from corral.lab.audit.tokens import kinds
from corral.lab.audit.words import number, percent, shown_rules
from corral.lab.report.looks import Look, assign_looks
from corral.lab.run.text import count

_OBJECTIVES = {
    "clip": "ppo_clip", "dppo_tv": "dppo", "dppo_topk_tv": "dppo top-K", "troll": "troll", "clip_higher": "clip_higher",
    "dppo_kl": "dppo KL", "dppo_tv_symmetric": "dppo symmetric",
}  # fmt: skip
"""Mapping from rule to the objective whose colour and marker it takes in charts. Other rules are in the table only."""

LOOKS: dict[str, Look] = dict(zip(_OBJECTIVES, assign_looks(_OBJECTIVES.values()).values(), strict=True))
LOOKS |= {"clipped": LOOKS["clip"], "dppo_binary": LOOKS["dppo_tv"], "dppo_topk": LOOKS["dppo_topk_tv"]}
"""Colour and marker of each rule in the charts of an audit."""

REGIONS = {
    "passed": ("c7", "passed, inside"),
    "false": ("c1", "blocked though inside: false alarm"),
    "right": ("c2", "blocked, outside"),
    "missed": ("c3", "passed though outside and pushed further: missed"),
    "back": ("c5", "passed outside, on its way back"),
}
"""Mapping from kind of token to colour and legend in the 2-d histogram. A cell takes the colour of its most frequent kind."""

_LOWEST_TV = 1e-6
_TICKS = (0.001, 0.01, 0.1, 0.2, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 2, 3, 5, 10, 100, 1000)
_COLUMNS, _ROWS = 60, 40
"""Number of columns and rows of cells in the 2-d histogram."""

_FEW = 30
"""Number of tokens below which a bucket has a hollow marker in the charts."""

_POINTS, _MARKS = 600, 80
"""Largest number of points, and of markers, on a curve of a chart."""


def _series(label: str, look: Look, points: Sequence[Row], *, line: bool = False) -> Row:
    """Build a series of a chart: points of one colour and marker, joined by a line if `line` is True."""
    return {"label": label, "colour": look[0], "marker": look[1], "dash": look[1] % 4, "line": line, "points": points}


def _point(x: float, y: float, said: str, **more: Any) -> Row:
    """Build a point of a chart with its tooltip. `hollow` draws the point as a ring; `name` is a label beside the point."""
    return {"x": x, "y": y, "said": said, **more}


def charts(audit: Audit) -> dict[str, list[Row]]:
    """Build the data of all charts on an audit's page, by section."""
    return {
        "threshold": [_threshold_chart(audit)],
        "probability": _bucket_charts(audit),
        "ratio": [] if audit.rows is None else [_ratio_chart(audit.rows, audit.info["rules"])],
        "steps": _step_charts(audit),
    }


def _bucket_charts(audit: Audit) -> list[Row]:
    """Build two charts by old probability of tokens: how far tokens moved, and the share on which each rule would act."""
    rows, rules, distance = audit.by_probability, shown_rules(audit), "true TV" if audit.whole else "TV, as far as was logged"
    x = {"title": "old probability of the sampled token", "names": [row["name"] for row in rows]}
    names = [f"{row['name']}: {count(row['tokens'], 'token')}" for row in rows]
    far = {"tv": ("mean", 0), "tv_p999": ("99.9th percentile", 2), "tv_max": ("largest", 3)}
    distances, acts = [], []
    for key, (words, marker) in far.items():
        points = [
            _point(place, row[key], f"{names[place]}, {distance} {words} {number(row[key])}", hollow=key != "tv")
            for place, row in enumerate(rows)
            if row[key] > 0
        ]
        distances.append(_series(words, (7, marker), points))
    for index, (rule, title) in enumerate(rules.items()):
        aside = 0.2 * (index - (len(rules) - 1) / 2)
        points = [
            _point(place + aside, row[rule], f"{names[place]}, {title} {percent(row[rule])}", hollow=row["tokens"] < _FEW)
            for place, row in enumerate(rows)
        ]
        acts.append(_series(title, LOOKS[rule], points))
    most = max((row[name] for row in rows for name in rules if row["tokens"] >= _FEW), default=0.0) or 0.01
    return [
        {
            "title": "Where tokens went", "height": 260, "x": x, "y": {"title": distance, "scale": "log"}, "series": distances,
            "caption": f"Mean, 99.9th percentile and largest {distance} of the tokens, by their old probability.",
        },
        {
            "title": "Who would act on them", "height": 260, "x": x, "series": acts,
            "y": {"title": "share of the tokens", "scale": "root", "ends": [0.0, min(1.0, 1.1 * most)]},
            "caption": f"On an axis that grows like a square root. Hollow: fewer than {_FEW} tokens.",
        },
    ]  # fmt: skip


def _threshold_chart(audit: Audit) -> Row:
    """Build the chart of thresholds: for each rule, tokens blocked inside the KL ball (x) and missed outside the ball (y)."""

    def point(row: Threshold) -> Row:
        said = f"{row.rule.title}, {row.rule.symbol} = {row.bound:g}: would block {percent(row.kl.share)}, "
        said += f"{percent(row.kl.wrong)} of all tokens inside the ball, and miss {percent(row.kl.missed)}"
        name = f"{row.bound:g}" if row.default or row.rule.name == "clip" else None
        return _point(row.kl.wrong, row.kl.missed, said, hollow=not row.default, name=name)

    drawn = {name: own for name in _OBJECTIVES if (own := [row for row in audit.thresholds if row.rule.name == name])}
    return {
        "title": "Two ways to be wrong",
        "caption": (
            f"Against the ball KL ≤ {number(audit.kl_bound)}{'' if audit.whole else ', as far as was logged'}. Nearer to the "
            "lower left is better; filled: the published bound. Axes grow like a square root. The other rules are in the table."
        ),
        "height": 400,
        "x": {"title": "blocked inside the KL ball", "scale": "root"},
        "y": {"title": "missed outside it", "scale": "root"},
        "series": [_series(own[0].rule.title, LOOKS[name], [*map(point, own)], line=True) for name, own in drawn.items()],
    }


def _step_charts(audit: Audit) -> list[Row]:
    """Build the charts over training steps: true KL, or distances and effective sample size if true KL is unknown.

    A dashed line marks the first alarm.
    """
    if audit.steps < 2:
        return []
    rows, moment = audit.by_step[:: math.ceil(audit.steps / _POINTS)], "update" if audit.whole else "step"
    alarms = [] if audit.whole else audit.alarms[:1]

    def chart(title: str, caption: str, label: str, curves: Mapping[str, tuple[str, Look]], *, share: bool = False) -> Row:
        """Build a chart of some columns over training steps, on a logarithmic axis unless the columns are shares."""
        series, show = [], percent if share else number
        for name, (words, look) in curves.items():
            points: list[Row] = [{"x": row["step"], "y": row[name]} for row in rows if row[name] and row[name] < math.inf]
            for point in points[:: math.ceil(len(points) / _MARKS) or 1]:
                point["said"] = f"{moment} {point['x']:,}: {words} {show(point['y'])}"
            series += [_series(words, look, points, line=True)] if points else []
        announced = f" Dashed: step {alarms[0]['step']:,}, where a collapse announces itself." if alarms else ""
        return {
            "title": title,
            "caption": caption + announced,
            "height": 300,
            "x": {"title": moment, "scale": "whole", "ends": [rows[0]["step"], rows[-1]["step"]]},
            "y": {"title": label, **({"scale": "share", "ends": [0.0, 1.0]} if share else {"scale": "log"})},
            "series": series,
            "bounds": [{"x": alarm["step"], "said": alarm["sentence"]} for alarm in alarms],
        }

    if audit.whole:
        caption = "Of the tokens that were audited after each of these updates."
        curves = {"kl": ("mean", (0, 0)), "kl_p999": ("99.9th percentile", (4, 1)), "kl_max": ("largest", (6, 3))}
        return [chart("True KL to the old policy", caption, "true KL, nats", curves)]
    curves = {"k3": ("mean KL by k3, nats", (0, 0)), "tv": ("mean TV", (1, 1))}
    curves["mismatch"] = ("mean TV of sampler and trainer", (3, 3))
    ess = "100 % means on-policy; below 70 % a few tokens with large ratios decide the updates."
    effective = {"ess": ("effective sample size, as a share of the tokens", (2, 4))}
    return [
        chart("Distance by step", "Of the tokens that were logged at each step.", "distance", curves),
        chart("Effective samples by step", ess, "effective samples", effective, share=True),
    ]


def _ratio_chart(tokens: pd.DataFrame, rules: Mapping[str, Any]) -> Row:
    """Build the 2-d histogram of tokens: probability ratio new/old (x), centred on the clip range, and true TV (y)."""
    log_ratio = tokens["logp_new"].clip(-80, 0) - tokens["logp_old"].clip(-80, 0)
    edges = _clip_edges(rules["clip"])
    # The visible part has 99.5 % of the tokens, within three to twelve clip ranges.
    ends = [math.log(max(edge, 1e-3)) for edge in edges] or [-0.2, 0.2]
    middle, half = (ends[0] + ends[1]) / 2, (ends[1] - ends[0]) / 2
    reach = min(max(float((log_ratio - middle).abs().quantile(0.995)), 3 * half), 12 * half)
    across = (log_ratio - middle + reach) / (2 * reach)
    up = 1 - np.log10(tokens["tv"].clip(_LOWEST_TV, 1)) / math.log10(_LOWEST_TV)
    column, row = ((share.clip(0, 1) * most).astype(int).clip(0, most - 1) for share, most in ((across, _COLUMNS), (up, _ROWS)))
    counts = pd.crosstab([column, row], kinds(tokens, "tv", rules["tv_bound"])).reindex(columns=[*REGIONS], fill_value=0)
    most = counts.to_numpy().sum(1).max()
    cells = [
        {
            "place": [*place],
            "share": 0.3 + 0.7 * math.log1p(here.sum()) / math.log1p(most),
            "kind": REGIONS[here.idxmax()][0],
            "said": "; ".join(f"{here[kind]:,} {words}" for kind, (_, words) in REGIONS.items() if here[kind]),
        }
        for place, here in counts.iterrows()
    ]
    return {
        "title": "What clipping sees, and what happened",
        "caption": (
            f"Dashed: the clip range, and the ball TV ≤ {number(rules['tv_bound'])}. The stronger a cell, the more tokens; its "
            "colour is that of most of them. Tokens beyond the edges are drawn at the edge."
        ),
        "height": 440,
        # The edges of the range have their numbers before round numbers have theirs.
        "x": {
            "title": "ratio new/old of the sampled token", "scale": "log", "ticks": [*filter(None, edges), *_TICKS],
            "ends": [math.exp(middle - reach), math.exp(middle + reach)],
        },
        "y": {"title": "true TV", "scale": "log", "ends": [_LOWEST_TV, 1.0]},
        "series": [],
        "grid": [_COLUMNS, _ROWS],
        "cells": cells,
        "keys": [*REGIONS.values()],
        "bounds": [*({"x": edge} for edge in edges if edge > 0), {"y": min(rules["tv_bound"], 1.0)}],
    }  # fmt: skip


def _clip_edges(clip: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the smallest and largest ratio that clipping leaves unchanged. Empty for GSPO, which clips whole completions."""
    if clip["name"] == "gspo":
        return ()
    if clip["name"] == "gmpo":
        return math.exp(-clip["clip"]), math.exp(clip["clip"])
    return 1 - clip["clip_low"], 1 + clip["clip_high"]
