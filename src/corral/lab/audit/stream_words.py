"""A stream of tokens in plain sentences, the same in a terminal and on a page."""

from collections.abc import Mapping
from typing import Any

from corral.lab.audit.stream import StreamSummary
from corral.lab.audit.threshold import AUDITED, Threshold, fewest_errors
from corral.lab.audit.words import clip_range, number, percent
from corral.lab.run.text import count

MEASURES = {
    "sampled": "the sampled token against all others, a lower bound of the true one",
    "support": "the logged support and its tail, a lower bound of the true one",
    "whole": "the whole vocabulary",
}
"""What divergences are taken on, by `StreamSummary.measure`."""

_NAMES = {"clip": "clipping 1 ± ε", "dppo_tv": "DPPO on TV", "dppo_kl": "DPPO on KL", "troll": "TROLL"}


def stream_sentences(summary: StreamSummary, info: Mapping[str, Any]) -> list[str]:
    """The sentences of a summary: policies compared, their KL, what clipping would block, the best bound, and remarks."""
    rules = info["rules"]
    found = [
        f"{count(summary.tokens, 'token')} of {count(summary.sequences, 'completion')} in {count(summary.steps, 'step')}, "
        f"{info['what']}.",
        *info.get("remarks", ()),
        f"KL to the old policy, on {MEASURES[summary.measure]}: {_spread(summary, 'kl')} nats. Total variation: "
        f"{_spread(summary, 'tv')}.",
    ]
    audited = next((row for row in summary.thresholds if row.family == AUDITED), None)
    if audited is not None:
        found.append(_clipping(audited, rules, certain=summary.measure == "whole"))
    found += _threshold_sentences(summary)
    found += [_samples(summary), _mismatch(summary)]
    if summary.by_age:
        found.append(_staleness(summary))
    found += _alarms(summary)
    if summary.left_out:
        left = "; ".join(f"{number_of:,} {what}" for what, number_of in summary.left_out.items())
        found.append(f"Left out: {left}.")
    return found


def _threshold_sentences(summary: StreamSummary) -> list[str]:
    """Of the best-known rules, the bound with the fewest errors."""
    best = fewest_errors(summary.thresholds)
    parts = [
        f"{name} at {best[family].symbol} = {best[family].bound:g} ({_errors(best[family])})"
        for family, name in _NAMES.items()
        if family in best
    ]
    if not parts:
        return []
    known = "" if summary.measure == "whole" else ", as far as was logged"
    return [f"Fewest errors against the KL ball of {number(summary.kl_bound)}{known}: {'; '.join(parts)}."]


def _errors(row: Threshold) -> str:
    ball = row.kl
    return f"{percent(ball.blocked_inside / ball.tokens)} blocked inside, {percent(ball.passed_outward / ball.tokens)} missed"


def _clipping(row: Threshold, rules: Mapping[str, Any], *, certain: bool) -> str:
    """A sentence: the share of tokens that clipping would block, its part inside the KL ball, and the share it would miss."""
    ball = row.kl
    known = "" if certain else ", as far as these divergences show"
    inside = f"; {percent(ball.blocked_inside / ball.blocked)} of these are inside the KL ball{known}" if ball.blocked else ""
    sure = "" if certain else "certainly "
    return (
        f"In an update at the new policy, clipping ({clip_range(rules['clip'])}) would block {percent(row.share)} of "
        f"tokens{inside}. It would pass "
        f"{percent(ball.passed_outward / ball.tokens)} that are {sure}outside and pushed further out."
    )


def _samples(summary: StreamSummary) -> str:
    """Effective sample size, and the step where it is lowest."""
    text = f"Effective sample size of the tokens' ratios: {percent(summary.ess)} of their number"
    if summary.steps > 1:
        lowest = min(summary.by_step, key=lambda row: row["ess"])
        text += f"; at step {lowest['step']:,}, where it is lowest, {percent(lowest['ess'])}"
    return f"{text}."


def _mismatch(summary: StreamSummary) -> str:
    if "mismatch" not in summary.distances:
        return "The sampler reported no log-probs beside the old policy's, so mismatch is not told apart from the updates."
    return f"Sampler and trainer differ on the sampled tokens by a TV of {_spread(summary, 'mismatch')}."


def _staleness(summary: StreamSummary) -> str:
    first, last = summary.by_age[0], summary.by_age[-1]
    if first is last:
        return f"Every token was trained on {count(first['age'], 'step')} after it was sampled."
    return (
        f"Tokens were trained on {first['age']} to {count(last['age'], 'step')}{' or more' if last['older'] else ''} after "
        f"they were sampled: mean KL by the k3 estimate {number(first['k3'])} at first, {number(last['k3'])} at last."
    )


def _alarms(summary: StreamSummary) -> list[str]:
    """The step at which a collapse announces itself."""
    if summary.steps < 2:
        return []
    if not summary.alarms:
        return ["No step shows a sign of collapse in KL, effective samples, entropy or reward."]
    first = summary.alarms[0]
    said = [f"At step {first['step']:,} it announces itself: {first['sentence']}"]
    collapse = next((alarm for alarm in summary.alarms if alarm["collapse"]), None)
    if collapse is not None and collapse is not first:
        said.append(f"At step {collapse['step']:,}: {collapse['sentence']}")
    return said


def _spread(summary: StreamSummary, name: str) -> str:
    row = summary.distances[name]
    return f"mean {number(row['mean'])}, 99.9th percentile {number(row['p999'])}, largest {number(row['max'])}"
