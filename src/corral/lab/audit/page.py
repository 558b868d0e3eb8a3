"""The HTML page of an audit."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import corral
from corral.lab.audit.figures import REGIONS, bucket_figure, ratio_figure, step_figure, threshold_figure
from corral.lab.audit.tally import ACCURACY, AUDITED, Audit, Row, Summary
from corral.lab.audit.threshold import Ball, fewest_errors
from corral.lab.audit.tokens import Tokens
from corral.lab.audit.words import MEASURES, RULES, number, percent, sentences, updates_sentence
from corral.lab.report.html import Safe, document, join, macros, note, page_body, sections, shorten, table, tag, write_document
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
    name = str(info.get("name") or info.get("model") or "a run")
    title, said, did = f"Audit of {shorten(name, 80)}", sentences(summary, info), updates_sentence(info)
    share, words = headline(summary)
    parts = {
        "findings": (
            "Findings",
            _PARTS.findings(
                audit,
                live,
                time.strftime("%H:%M:%S"),
                did,
                [sentence for sentence in said[1:] if sentence != did],
                (share, words),
                _verdict_tables(summary) if summary.measure == "whole" else [],
            ),
        ),
        **_parts(audit),
    }
    found = {key: part for key, part in parts.items() if part[1] is not None}
    about = f"{shorten(name, 60)} · {count(summary.tokens, 'token')}, {info.get('what') or 'compared'}"
    about = visible(shorten(f"{about} · corral {corral.__version__}", 240))  # what a figure that stands alone says
    data = {"about": about, "headline": f"{share} of {words}", **({} if live is None else {"live": live})}
    main = tag("main", *sections(found).values(), class_="audited-page")
    body = page_body(title, said[0], found, main, count(summary.tokens, "token"))
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


def _parts(audit: Audit) -> dict[str, tuple[str, Any]]:
    """Titles and contents of the sections below the findings; None for an empty section."""
    summary, rules = audit.summary, audit.info["rules"]
    whole = summary.measure == "whole"
    shown = RULES if whole else _LOGGED_RULES
    figure = bucket_figure(summary.by_probability, shown, "true TV" if whole else "TV, as far as was logged")
    kinds = {"Entropy, nats": summary.by_entropy, "Advantage": summary.by_sign}
    far = {"what": "Distance", "mean": "Mean", "p50": "Median", "p99": "99th percentile", "p999": "99.9th percentile"}
    far["max"] = "Largest"
    names = {
        "kl": "true KL(new‖old), nats" if whole else "KL(new‖old), nats",
        "tv": "true total variation" if whole else "total variation",
        "k1": "|k1|: |log old − log new|",
        "k2": "k2: ½ (log ratio)²",
        "k3": "k3: ratio − 1 − log ratio",
        "mismatch": "sampler mismatch, TV",
    }
    distances: list[Row] = [{"what": names[name], **row} for name, row in summary.distances.items()]
    settings = [
        {"setting": f"{part} {key}", "value": shorten(str(value), 300)}
        for part in ("rules", "settings", "versions")
        if isinstance(given := audit.info.get(part), Mapping)
        for key, value in given.items()
        if value is not None
    ]
    asked = table(settings, {"setting": "Setting", "value": "Value"}, lambda key, row: visible(row[key]), aria_label="Settings")
    return {
        "threshold": (
            "Which threshold?",
            _PARTS.thresholds(
                whole, threshold_figure(summary.thresholds, summary.kl_bound, certain=whole), _threshold_table(summary)
            ),
        ),
        "probability": (
            "By old probability",
            join(figure, _bucket_table("Old probability", summary.by_probability, shown, summary)),
        ),
        "ratio": ("Ratio against true distance", None if audit.tokens is None else ratio_figure(audit.tokens, rules)),
        "tokens": ("Tokens that clipping would block most", _blocked_table(audit)),
        "kinds": (
            "By entropy and by advantage",
            join(*(_bucket_table(title, rows, shown, summary) for title, rows in kinds.items() if rows)),
        ),
        "distances": (
            "How far",
            join(
                tag("p", f"Divergences are those of {MEASURES[summary.measure]}.", class_="count"),
                table(distances, far, lambda key, row: row[key] if key == "what" else number(row[key]), aria_label="Distances"),
            ),
        ),
        "steps": ("Over training", _step_figures(summary)),
        "age": ("By staleness", _age_table(summary.by_age) if summary.by_age else None),
        "completions": ("Completions", _completions(audit)),
        "measured": ("How this was measured", _PARTS.method(whole, len(settings), asked, 100 * ACCURACY)),
    }


def _verdict_tables(summary: Summary) -> list[tuple[str, Safe]]:
    """Tables of each rule against the KL ball and the TV ball."""
    columns = {"rule": "Rule", "share": "Would act on", "right": "…of which outside", "false": "…of which inside"}
    columns["missed"] = "Would miss"
    found = []
    for name, heading in (("kl", f"KL ≤ {number(summary.kl_bound)}"), ("tv", f"TV ≤ {number(summary.tv_bound)}")):
        rows = []
        for rule, title in RULES.items():
            ball: Ball = summary.verdicts[rule][name]
            row = {"rule": title, "share": percent(summary.verdicts[rule]["share"])}
            for key, part in (("right", ball.blocked_outside), ("false", ball.blocked_inside)):
                row[key] = f"{part:,} ({percent(part / ball.blocked)})" if ball.blocked else "—"
            rows.append(row | {"missed": f"{ball.passed_outward:,} ({percent(ball.passed_outward / ball.tokens)})"})
        found.append((heading, table(rows, columns, lambda key, row: row[key], aria_label=heading)))
    return found


def _threshold_table(summary: Summary) -> Safe:
    """Every rule at every bound: the share it blocks, its errors inside each ball, and the share it misses."""
    columns = {"title": "Rule", "bound": "Bound", "share": "Would block"}
    for name, bound in (("kl", summary.kl_bound), ("tv", summary.tv_bound)):
        inside, outside = f"{name.upper()} ≤ {number(bound)}", f"{name.upper()} > {number(bound)}"
        columns |= {f"{name} false": f"blocked, {inside}", f"{name} missed": f"missed, {outside}"}
    best, rows, last = fewest_errors(summary.thresholds), [], ""
    for row in summary.thresholds:
        shown = "—" if row.family == AUDITED else f"{row.symbol} = {row.bound:g}{' ●' if row.default else ''}"
        cells: Row = {
            "title": tag("span", row.title, class_="again") if row.family == last else row.title,
            "bound": tag("strong", shown) if best.get(row.family) is row else shown,
            "share": _exact_percent(row.share),
        }
        for name, ball in (("kl", row.kl), ("tv", row.tv)):
            cells[f"{name} false"] = _exact_percent(ball.blocked_inside / ball.tokens)
            cells[f"{name} missed"] = _exact_percent(ball.passed_outward / ball.tokens)
        rows.append(cells)
        last = row.family
    return table(rows, columns, lambda key, row: row[key], aria_label="Which threshold?")


def _exact_percent(share: float) -> str:
    """A percentage with enough digits to compare a column of numbers."""
    return f"{100 * share:.4f} %" if 0 < share < 1e-4 else percent(share)


def _bucket_table(title: str, rows: Sequence[Row], rules: Mapping[str, str], summary: Summary) -> Safe:
    """Table by bucket: the distances of its tokens, and the share of tokens on which each rule would act."""
    columns = {"name": title, "tokens": "Tokens", "tv": "TV: mean, 99.9 %, largest", "kl": "KL: mean, 99.9 %, largest"}
    columns |= {} if summary.measure == "whole" else {"outside": f"outside KL ≤ {number(summary.kl_bound)}"}

    def show(key: str, row: Row) -> str:
        if key in ("tv", "kl"):
            return ", ".join(number(row[name]) for name in (key, f"{key}_p999", f"{key}_max"))
        return row[key] if key == "name" else f"{row[key]:,}" if key == "tokens" else percent(row[key])

    return table(list(rows), {**columns, **rules}, show, aria_label=title)


def _blocked_table(audit: Audit) -> Safe:
    """Table of the tokens most often blocked."""
    if not audit.summary.blocked_tokens:
        return note("Clipping would block no token here.", good=True)
    columns = {"text": "Token", "token": "Id", "seen": "Seen", "blocked": "Would be blocked", "inside": "…inside the KL ball"}
    columns |= {"p_old": "Mean probability before", "tv": "Mean true TV" if audit.summary.measure == "whole" else "Mean TV"}

    def show(key: str, row: Row) -> Any:
        if key == "text":
            return tag("code", render_token(audit.texts[row["token"]])) if row["token"] in audit.texts else "—"
        if key == "inside":
            return f"{row[key]:,} ({percent(row[key] / row['blocked'])})"
        return number(row[key]) if key in ("p_old", "tv") else f"{row[key]:,}"

    return table(audit.summary.blocked_tokens, columns, show, aria_label="Blocked tokens")


def _step_figures(summary: Summary) -> Safe:
    """True KL over training. If it is unknown, distances and effective sample size by step."""
    rows = summary.by_step
    if summary.measure == "whole":
        if len(rows) < 2:
            return note("There is one audited update, so nothing to draw over time.")
        caption = "Of the tokens that were audited after each of these updates."
        curves = {"kl": ("mean", (0, 0)), "kl_p999": ("99.9th percentile", (4, 1)), "kl_max": ("largest", (6, 3))}
        return step_figure("True KL to the old policy", caption, rows, curves, moment="update", label="true KL, nats")
    if len(rows) < 2:
        return note("There is one step, so nothing to draw over time.")
    alarm = summary.alarms[0] if summary.alarms else None
    curves = {"k3": ("mean KL by k3, nats", (0, 0)), "tv": ("mean TV", (1, 1))}
    curves["mismatch"] = ("mean TV of sampler and trainer", (3, 3))
    caption = "Of the tokens that were logged at each step."
    ess = "100 % means on-policy; below 70 % a few tokens with large ratios decide the updates."
    share = {"ess": ("effective sample size, as a share of the tokens", (2, 4))}
    return join(
        step_figure("Distance by step", caption, rows, curves, label="distance", alarm=alarm),
        step_figure("Effective samples by step", ess, rows, share, label="effective samples", share=True, alarm=alarm),
    )


def _age_table(by_age: Sequence[Row]) -> Safe:
    columns = {"age": "Steps since it was sampled", "tokens": "Tokens", "k3": "Mean KL by k3", "tv": "Mean TV"}
    columns |= {"mismatch": "Mean TV of sampler and trainer", "ess": "Effective samples"}

    def show(key: str, row: Row) -> str:
        if row[key] is None:
            return "—"
        if key == "age":
            return f"{row[key]}{' or more' if row['older'] else ''}"
        return f"{row[key]:,}" if key == "tokens" else percent(row[key]) if key == "ess" else number(row[key])

    return table(list(by_age), columns, show, aria_label="By staleness")


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
