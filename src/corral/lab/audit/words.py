"""Plain sentences of an audit, for a terminal and for its page."""

import re
from collections.abc import Mapping
from typing import Any

from corral.lab.audit.tally import Summary
from corral.lab.audit.threshold import Ball, Threshold, fewest_errors
from corral.lab.run.text import count

RULES = {"clipped": "clipping", "dppo_binary": "DPPO, sampled token", "dppo_topk": "DPPO, top-K", "troll": "TROLL"}
"""Names of verdicts."""

MEASURES = {
    "sampled": "the sampled token against all others, a lower bound of the true one",
    "support": "the logged support and its tail, a lower bound of the true one",
    "whole": "the whole vocabulary",
}
"""Names of the distributions that divergences are computed on, by `Summary.measure`."""

_NAMES = {"clip": "clipping 1 ± ε", "dppo_tv": "DPPO on TV", "dppo_kl": "DPPO on KL", "troll": "TROLL"}


def sentences(summary: Summary, info: Mapping[str, Any]) -> list[str]:
    """Sentences on the compared policies, their distances, the effect of clipping, and the effect of other rules."""
    whole, distances, steps = summary.measure == "whole", summary.distances, summary.steps
    tokens, remarks = count(summary.tokens, "token"), list(map(str, info.get("remarks") or ()))
    tokens += f" of {count(summary.sequences, 'completion')}"
    tokens += ", " if whole else f" in {count(steps, 'step')}, "
    tokens += f"{info.get('what') or 'compared'}{f', {steps} times' if whole and steps > 1 else ''}."
    far = "True KL to the old policy" if whole else f"KL to the old policy, on {MEASURES[summary.measure]}"
    far += f": {_spread(distances['kl'])} nats. Total variation: {_spread(distances['tv'])}."
    found = [tokens, *([] if whole else remarks), far]
    if whole:
        found += [did] if (did := updates_sentence(info)) is not None else []
        found += [_clipping(summary, info["rules"]), *_true_distances(summary, info["rules"])]
        found += [_mismatch(summary, "of its own, so there is no mismatch to measure"), *remarks]
    else:
        found += [_clipping(summary, info["rules"]), *_fewest(summary), _samples(summary)]
        found.append(_mismatch(summary, "beside the old policy's, so mismatch is not told apart from the updates"))
        found += [*_staleness(summary), *_alarms(summary)]
    left_out = "; ".join(f"{number_of:,} {what}" for what, number_of in summary.left_out.items())
    return [*found, f"Left out: {left_out}."] if left_out else found


def updates_sentence(info: Mapping[str, Any]) -> str | None:
    """Sentence on the share of tokens that clipping blocked during training, and TRL's clip ratio. None without a trainer."""
    if info.get("kind") != "trainer":
        return None
    rules, made = info["rules"], info.get("updates_made")
    if not rules.get("own"):
        return f"The run's own loss, {info.get('loss')}, does not clip."
    if made is None:
        return "What clipping did in the updates that were made was not recorded."
    were = "was" if made["updates"] == 1 else "were"
    did = f"the {count(made['updates'], 'update')} that {were} made, clipping ({clip_range(rules['clip'])}) blocked "
    did += f"{percent(made['blocked'])} of tokens"
    if made["trl"] is not None:
        whose = ", of completions," if rules["clip"]["name"] == "gspo" else ""
        did += f"; TRL's own clip ratio{whose} is {percent(made['trl'])}"
    if info.get("one_update_per_batch") and not made["blocked"]:
        return f"With one update per batch of rollouts every ratio is 1, so no clip ever acts in this run: in {did}."
    return f"In {did}."


def _clipping(summary: Summary, rules: Mapping[str, Any]) -> str:
    """Sentence on the share of tokens that clipping would block, its part inside the KL ball, and the share it would miss."""
    whole, ball = summary.measure == "whole", summary.verdicts["clipped"]["kl"]
    moment = "On one more update on these completions" if whole else "In an update at the new policy"
    missed = percent(ball.passed_outward / ball.tokens) if ball.passed_outward else "none"
    said, radius = f"{moment}, clipping ({clip_range(rules['clip'])}) would block", f"the KL ball of {number(summary.kl_bound)}"
    certainly = "" if whole else "certainly "
    if not ball.blocked:
        are = "is" if missed == "none" else "are"
        return f"{said} no token, and would pass {missed} {certainly}outside {radius} that {are} pushed further out."
    known = "" if whole else ", as far as these divergences show"
    return (
        f"{said} {percent(ball.blocked / ball.tokens)} of tokens; {percent(ball.blocked_inside / ball.blocked)} of these are "
        f"inside {radius}{known}. It would pass {missed} that {'is' if missed == 'none' else 'are'} {certainly}outside and "
        f"pushed further out."
    )


def _true_distances(summary: Summary, rules: Mapping[str, Any]) -> list[str]:
    """Sentences that need true divergences: the ball of total variation, rare tokens, and DPPO and TROLL."""
    ball, rare, found = summary.verdicts["clipped"]["tv"], summary.rare, []
    if ball.blocked:
        found.append(
            f"By total variation, {percent(ball.blocked_inside / ball.blocked)} of the blocked tokens are within "
            f"{number(summary.tv_bound)}, and {percent(ball.passed_outward / ball.tokens)} of all tokens would be passed "
            f"outside it and pushed further out."
        )
        found.append(
            f"Rare tokens, with an old probability of 0.01 or less, are {percent(rare['tokens'] / summary.tokens)} of all and "
            f"{percent(rare['blocked'] / ball.blocked)} of the blocked ones; where they are blocked, the policy has moved by a "
            f"true TV of {number(rare['tv'])} on average."
            if rare["blocked"]
            else "None of the blocked tokens is rare: all had an old probability above 0.01."
        )
    shares = {name: percent(row["share"]) for name, row in summary.verdicts.items()}
    moved = f", and move each of those by a TV of {number(summary.troll_tv)} on average" if summary.troll_tv else ""
    return [
        *found,
        f"On the same tokens DPPO would mask {shares['dppo_binary']} (TV of the sampled token above "
        f"{number(summary.tv_bound)}) or {shares['dppo_topk']} (TV of its {rules['top_k']} likeliest tokens); TROLL would "
        f"project {shares['troll']} (KL above {number(summary.kl_bound)}){moved}.",
    ]


def _fewest(summary: Summary) -> list[str]:
    """The bound with the fewest errors, for each of the best-known rules."""

    def errors(row: Threshold) -> str:
        ball: Ball = row.kl
        inside, missed = (percent(part / ball.tokens) for part in (ball.blocked_inside, ball.passed_outward))
        return f"{row.symbol} = {row.bound:g} ({inside} blocked inside, {missed} missed)"

    best = fewest_errors(summary.thresholds)
    parts = [f"{name} at {errors(best[family])}" for family, name in _NAMES.items() if family in best]
    return [f"Fewest errors against the KL ball of {number(summary.kl_bound)}, as far as was logged: {'; '.join(parts)}."]


def _samples(summary: Summary) -> str:
    """Sentence on the effective sample size and the step of its minimum."""
    text = f"Effective sample size of the tokens' ratios: {percent(summary.ess)} of their number"
    if summary.steps > 1:
        lowest = min(summary.by_step, key=lambda row: row["ess"])
        text += f"; at step {lowest['step']:,}, where it is lowest, {percent(lowest['ess'])}"
    return f"{text}."


def _mismatch(summary: Summary, silent: str) -> str:
    """Sentence on the distance of sampler and trainer; `silent` gives the reason if the sampler reported nothing."""
    if "mismatch" not in summary.distances:
        return f"The sampler reported no log-probs {silent}."
    return f"Sampler and trainer differ on the sampled tokens by a TV of {_spread(summary.distances['mismatch'])}."


def _staleness(summary: Summary) -> list[str]:
    """Sentence on the ages of tokens when they were trained on."""
    if not summary.by_age:
        return []
    first, last = summary.by_age[0], summary.by_age[-1]
    if first is last:
        return [f"Every token was trained on {count(first['age'], 'step')} after it was sampled."]
    return [
        f"Tokens were trained on {first['age']} to {count(last['age'], 'step')}{' or more' if last['older'] else ''} after "
        f"they were sampled: mean KL by the k3 estimate {number(first['k3'])} at first, {number(last['k3'])} at last."
    ]


def _alarms(summary: Summary) -> list[str]:
    """Sentence on the step of the first sign of collapse."""
    if summary.steps < 2:
        return []
    if not summary.alarms:
        return ["No step shows a sign of collapse in KL, effective samples, entropy or reward."]
    first, collapse = summary.alarms[0], next((alarm for alarm in summary.alarms if alarm["collapse"]), summary.alarms[0])
    said = [f"At step {first['step']:,} it announces itself: {first['sentence']}"]
    return said if collapse is first else [*said, f"At step {collapse['step']:,}: {collapse['sentence']}"]


def clip_range(clip: Mapping[str, Any]) -> str:
    """Text of the clip range: `ratio 0.8 … 1.2`."""
    if clip["name"] == "gmpo":
        return f"log-ratio within ±{number(clip['clip'])}"
    digits = 4 if clip["clip_low"] < 0.01 else 3
    whose = "completion's ratio" if clip["name"] == "gspo" else "ratio"
    dual = f", and {number(clip['dual_clip'])} where the advantage is negative" if clip.get("dual_clip") else ""
    return f"{whose} {1 - clip['clip_low']:.{digits}g} … {1 + clip['clip_high']:.{digits + 1}g}{dual}"


def _spread(row: Mapping[str, float]) -> str:
    """Text of a distribution: `mean 0.002, 99.9th percentile 0.3, largest 1.2`."""
    return f"mean {number(row['mean'])}, 99.9th percentile {number(row['p999'])}, largest {number(row['max'])}"


def percent(share: float) -> str:
    """A percentage with two significant digits; 0 % and 100 % only for exact values."""
    if share in (0.0, 1.0):
        return f"{share:.0%}".replace("%", " %")
    if share < 1e-4:
        return "under 0.01 %"
    if share > 0.9999:
        return "over 99.99 %"
    rare = min(share, 1 - share)
    return f"{100 * share:.{2 if rare < 0.01 else 1 if rare < 0.1 else 0}f} %"


def number(value: float) -> str:
    """A number with two significant digits."""
    return "∞" if value == float("inf") else re.sub(r"e([-+])0*", r"e\1", f"{value:.2g}")
