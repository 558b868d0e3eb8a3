"""The HTML page of an audit."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import corral
from corral.lab.audit.figures import REGIONS, bucket_charts, ratio_chart, step_chart, threshold_chart
from corral.lab.audit.tally import ACCURACY, AUDITED, Audit, Row, Summary
from corral.lab.audit.threshold import Threshold, fewest_errors
from corral.lab.audit.tokens import Tokens
from corral.lab.audit.words import MEASURES, RULES, number, percent, sentences, updates_sentence
from corral.lab.report.html import (
    Columns,
    Safe,
    cell,
    document,
    macros,
    note,
    page_body,
    sections,
    shorten,
    table,
    write_document,
)
from corral.lab.run.text import count, visible

_PARTS = macros(
    "audit.html", "corral.lab.audit", number=number, percent=percent, count=count, regions=REGIONS, measures=MEASURES
)

_LOGGED_RULES = {"clip": "clip 1 ± 0.2", "dppo_tv": "DPPO TV 0.2", "dppo_kl": "DPPO KL 0.05"}
"""Rules whose shares are shown if DPPO and TROLL could not be computed on full distributions."""


def write_page(audit: Audit, out: Path, live: float | None = None) -> int:
    """Write the page atomically and return its size in bytes."""
    return write_document(audit_page(audit, live), out, "This should not happen: please report it.")


def audit_page(audit: Audit, live: float | None = None) -> str:
    """The complete HTML page. `live` is the interval in seconds at which the page is rewritten and reloads itself."""
    summary, info = audit.summary, audit.info
    whole = summary.measure == "whole"
    name = str(info.get("name") or info.get("model") or "a run")
    title, said, did = f"Audit of {shorten(name, 80)}", sentences(summary, info), updates_sentence(info)
    share, words = headline(summary)
    others, now = [sentence for sentence in said[1:] if sentence != did], time.strftime("%H:%M:%S")
    rules = RULES if whole else _LOGGED_RULES
    kinds = {"Entropy, nats": summary.by_entropy, "Advantage": summary.by_sign}
    charts = {
        "threshold": [threshold_chart(summary.thresholds, summary.kl_bound, certain=whole)],
        "probability": bucket_charts(summary.by_probability, rules, "true TV" if whole else "TV, as far as was logged"),
        "ratio": [] if audit.tokens is None else [ratio_chart(audit.tokens, info["rules"])],
        "steps": _step_charts(summary),
    }
    thresholds = Safe(_PARTS.charts("threshold")) + _threshold_table(summary)
    by_probability = Safe(_PARTS.charts("probability")) + _bucket_table(
        "Old probability", summary.by_probability, rules, summary
    )
    few = f"There is one {'audited update' if whole else 'step'}, so nothing to draw over time."
    parts: dict[str, tuple[str, Any]] = {
        "findings": (
            "Findings",
            _PARTS.findings(audit, live, now, did, others, (share, words), _verdict_tables(summary) if whole else []),
        ),
        "threshold": ("Which threshold?", _PARTS.thresholds(whole, thresholds)),
        "probability": ("By old probability", by_probability),
        "ratio": ("Ratio against true distance", _PARTS.charts("ratio") if charts["ratio"] else None),
        "tokens": ("Tokens that clipping would block most", _blocked_table(audit)),
        "kinds": (
            "By entropy and by advantage",
            Safe("").join(_bucket_table(title, rows, rules, summary) for title, rows in kinds.items() if rows),
        ),
        "distances": ("How far", _PARTS.distances(MEASURES[summary.measure], _distance_table(summary))),
        "steps": ("Over training", _PARTS.charts("steps") if charts["steps"] else note(few)),
        "age": ("By staleness", _age_table(summary.by_age) if summary.by_age else None),
        "completions": ("Completions", _completions(audit)),
        "measured": ("How this was measured", _method(audit)),
    }
    found = {key: part for key, part in parts.items() if part[1] is not None}
    about = f"{shorten(name, 60)} · {count(summary.tokens, 'token')}, {info.get('what') or 'compared'}"
    about = visible(shorten(f"{about} · corral {corral.__version__}", 240))  # what a figure that stands alone says
    data = {"about": about, "headline": f"{share} of {words}", "charts": charts, **({} if live is None else {"live": live})}
    body = page_body(title, said[0], found, _PARTS.main(sections(found).values()), count(summary.tokens, "token"))
    scripts = ["base.js", "audit.js", *([] if live is None else ["live.js"])]
    return document(title, body, data, scripts, ["page.css", "audit.css"])


def headline(summary: Summary) -> tuple[str, str]:
    """Sentence on the share of tokens blocked although they had hardly moved, or on the share missed if none is blocked.

    Of divergences that are lower bounds it says how many can have been inside the ball at most, or are missed at least.
    """
    ball, whole = summary.verdicts["clipped"]["kl"], summary.measure == "whole"
    if ball.blocked:
        moved = "had hardly moved" if whole else "were inside the KL ball"
        share = percent(ball.blocked_inside / ball.blocked)
        return f"{'' if whole else '≤ '}{share}", f"the tokens that clipping would block {moved}"
    missed = percent(ball.passed_outward / ball.tokens)
    return f"{'' if whole else '≥ '}{missed}", "the tokens would be missed: clipping would block none"


def _distance_table(summary: Summary) -> Safe:
    """Table of the spread of each distance."""
    whole = summary.measure == "whole"
    names = {
        "kl": "true KL(new‖old), nats" if whole else "KL(new‖old), nats",
        "tv": "true total variation" if whole else "total variation",
        "k1": "|k1|: |log old − log new|",
        "k2": "k2: ½ (log ratio)²",
        "k3": "k3: ratio − 1 − log ratio",
        "mismatch": "sampler mismatch, TV",
    }
    shown = {"Mean": "mean", "Median": "p50", "99th percentile": "p99", "99.9th percentile": "p999", "Largest": "max"}
    columns: Columns = {"Distance": cell("what"), **{heading: cell(key, number) for heading, key in shown.items()}}
    return table([{"what": names[name], **row} for name, row in summary.distances.items()], columns, "Distances")


def _method(audit: Audit) -> Any:
    """Section on the method, with a folded table of rules, settings and versions."""
    settings = [
        {"setting": f"{part} {key}", "value": shorten(str(value), 300)}
        for part in ("rules", "settings", "versions")
        if isinstance(given := audit.info.get(part), Mapping)
        for key, value in given.items()
        if value is not None
    ]
    shown = table(settings, {"Setting": cell("setting"), "Value": cell("value")}, "Settings")
    return _PARTS.method(audit.summary.measure == "whole", len(settings), shown, 100 * ACCURACY)


def _verdict_tables(summary: Summary) -> list[tuple[str, Safe]]:
    """Tables of each rule against the KL ball and the TV ball."""
    found = []
    for name, bound in (("kl", summary.kl_bound), ("tv", summary.tv_bound)):
        rows = [{**vars(row[name]), "ball": row[name], "rule": RULES[rule]} for rule, row in summary.verdicts.items()]
        columns: Columns = {
            "Rule": cell("rule"),
            "Would act on": lambda row: percent(row["ball"].blocked / row["ball"].tokens),
            "…of which outside": lambda row: _part(row["blocked_outside"], row["ball"].blocked),
            "…of which inside": lambda row: _part(row["blocked_inside"], row["ball"].blocked),
            "Would miss": lambda row: _part(row["passed_outward"], row["ball"].tokens),
        }
        heading = f"{name.upper()} ≤ {number(bound)}"
        found.append((heading, table(rows, columns, heading)))
    return found


def _part(tokens: int, of: int) -> str:
    """A number of tokens with its share."""
    return f"{tokens:,} ({percent(tokens / of)})" if of else "—"


def _threshold_table(summary: Summary) -> Safe:
    """Every rule at every bound: the share it blocks, its errors inside each ball, and the share it misses."""
    best = fewest_errors(summary.thresholds)
    first = {row.family: row for row in reversed(summary.thresholds)}

    def title(row: Threshold) -> str:
        return row.title if first[row.family] is row else Safe('<span class="again">{}</span>').format(row.title)

    def bound(row: Threshold) -> str:
        shown = "—" if row.family == AUDITED else f"{row.symbol} = {row.bound:g}{' ●' if row.default else ''}"
        return Safe("<strong>{}</strong>").format(shown) if best.get(row.family) is row else shown

    def exact(share: float) -> str:
        """A percentage with enough digits to compare a column of numbers."""
        return f"{100 * share:.4f} %" if 0 < share < 1e-4 else percent(share)

    rows = [
        {
            "title": title(row), "bound": bound(row), "share": exact(row.share), "kl_false": exact(row.kl.wrong),
            "kl_missed": exact(row.kl.missed), "tv_false": exact(row.tv.wrong), "tv_missed": exact(row.tv.missed),
        }
        for row in summary.thresholds
    ]  # fmt: skip
    columns: Columns = {"Rule": lambda row: row["title"], "Bound": lambda row: row["bound"], "Would block": cell("share")}
    for name, radius in (("kl", number(summary.kl_bound)), ("tv", number(summary.tv_bound))):
        columns |= {f"blocked, {name.upper()} ≤ {radius}": cell(f"{name}_false")}
        columns |= {f"missed, {name.upper()} > {radius}": cell(f"{name}_missed")}
    return table(rows, columns, "Which threshold?")


def _bucket_table(title: str, rows: Sequence[Row], rules: Mapping[str, str], summary: Summary) -> Safe:
    """Table by bucket: the distances of its tokens, and the share of tokens on which each rule would act."""

    def spread(name: str) -> Any:
        return lambda row: ", ".join(number(row[key]) for key in (name, f"{name}_p999", f"{name}_max"))

    columns: Columns = {title: cell("name"), "Tokens": cell("tokens", "{:,}".format)}
    columns |= {f"{name.upper()}: mean, 99.9 %, largest": spread(name) for name in ("tv", "kl")}
    columns |= {} if summary.measure == "whole" else {f"outside KL ≤ {number(summary.kl_bound)}": cell("outside", percent)}
    return table(rows, {**columns, **{words: cell(rule, percent) for rule, words in rules.items()}}, title)


def _blocked_table(audit: Audit) -> Safe:
    """Table of the tokens most often blocked."""
    if not audit.summary.blocked_tokens:
        return note("Clipping would block no token here.", good=True)
    texts = {token: Safe("<code>{}</code>").format(render_token(text)) for token, text in audit.texts.items()}
    columns: Columns = {
        "Token": lambda row: texts.get(row["token"], "—"),
        "Id": cell("token", "{:,}".format),
        "Seen": cell("seen", "{:,}".format),
        "Would be blocked": cell("blocked", "{:,}".format),
        "…inside the KL ball": lambda row: _part(row["inside"], row["blocked"]),
        "Mean probability before": cell("p_old", number),
        "Mean true TV" if audit.summary.measure == "whole" else "Mean TV": cell("tv", number),
    }
    return table(audit.summary.blocked_tokens, columns, "Blocked tokens")


def _step_charts(summary: Summary) -> list[Row]:
    """True KL over training. If it is unknown, distances and effective sample size by step."""
    rows = summary.by_step
    if len(rows) < 2:
        return []
    if summary.measure == "whole":
        caption = "Of the tokens that were audited after each of these updates."
        curves = {"kl": ("mean", (0, 0)), "kl_p999": ("99.9th percentile", (4, 1)), "kl_max": ("largest", (6, 3))}
        return [step_chart("True KL to the old policy", caption, rows, curves, moment="update", label="true KL, nats")]
    alarm = summary.alarms[0] if summary.alarms else None
    curves = {"k3": ("mean KL by k3, nats", (0, 0)), "tv": ("mean TV", (1, 1))}
    curves["mismatch"] = ("mean TV of sampler and trainer", (3, 3))
    caption = "Of the tokens that were logged at each step."
    ess = "100 % means on-policy; below 70 % a few tokens with large ratios decide the updates."
    share = {"ess": ("effective sample size, as a share of the tokens", (2, 4))}
    return [
        step_chart("Distance by step", caption, rows, curves, label="distance", alarm=alarm),
        step_chart("Effective samples by step", ess, rows, share, label="effective samples", share=True, alarm=alarm),
    ]


def _age_table(by_age: Sequence[Row]) -> Safe:
    """Table by the number of steps between sampling and training."""
    columns: Columns = {
        "Steps since it was sampled": lambda row: f"{row['age']}{' or more' if row['older'] else ''}",
        "Tokens": cell("tokens", "{:,}".format),
        "Mean KL by k3": cell("k3", number),
        "Mean TV": cell("tv", number),
        "Mean TV of sampler and trainer": cell("mismatch", number),
        "Effective samples": cell("ess", percent),
    }
    return table(by_age, columns, "By staleness")


_KINDS = {
    "false": "blocked though inside the KL ball",
    "right": "blocked outside it",
    "missed": "outside, pushed further out, not blocked",
}
_SHADES = 9


def render_token(text: str, most: int = 60) -> str:
    """A readable form of a token: hidden characters written out, white space made visible."""
    text = visible(shorten(text, most)).replace("\n", "⏎").replace("\t", "⇥")
    inner = text.strip(" ")
    before, _, after = text.partition(inner) if inner else (text, "", "")
    return f"{'␣' * len(before)}{inner}{'␣' * len(after)}" or "∅"


def _completions(audit: Audit) -> Any:
    """Section with completions token by token."""
    kl = np.concatenate([tokens.kl for _, tokens in audit.completions])
    finite, found = kl[np.isfinite(kl)], []
    most = float(np.quantile(finite, 0.995)) if len(finite) else 1.0
    whole = audit.summary.measure == "whole"
    for length, tokens in audit.completions:
        advantage = f"advantage {tokens.advantage[0]:.2g}".replace("-", "−")
        heading = f"{'Update' if whole else 'Step'} {tokens.step[0]}, completion {tokens.sequence[0]}: {advantage}"
        found.append((heading, _heat(audit, tokens, most or 1.0), length - len(tokens)))
    return _PARTS.completions(_KINDS, "true KL" if whole else "KL", found)


def _heat(audit: Audit, tokens: Tokens, most: float) -> list[tuple[bool, int, str, str, str]]:
    """For each token of a completion: a mark for omitted tokens before it, its shade, kind, numbers and text."""
    cells, last = [], -1
    old, new = np.exp(tokens.logp_old).tolist(), np.exp(tokens.logp_new).tolist()
    columns = (tokens.position, tokens.kinds("kl", audit.summary.kl_bound), tokens.kl, tokens.tv, tokens.token)
    for p, q, (position, kind, kl, tv, token) in zip(old, new, zip(*map(np.ndarray.tolist, columns), strict=True), strict=True):
        shade = _SHADES if kl >= most else int(_SHADES * (max(kl, 0.0) / most) ** 0.5)
        said = _KINDS.get(kind, "left alone")
        title = f"{said}: p {number(p)} → {number(q)}, KL {number(kl)}, TV {number(tv)}"
        cells.append((position != last + 1, shade, kind, title, shorten(audit.text(token), 80)))
        last = position
    return cells
