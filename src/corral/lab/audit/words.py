"""Sentences and tables of an audit, for the terminal and the HTML page."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from corral.lab.audit.tally import SHOWN_RULES, Audit, Row
from corral.lab.audit.threshold import AUDITED, Threshold
from corral.lab.run.text import count, visible

RULES = {"clipped": "clipping", "dppo_binary": "DPPO, sampled token", "dppo_topk": "DPPO, top-K", "troll": "TROLL"}
"""Mapping from column of verdicts, such as "troll", to the name of the rule in an audit's tables."""

MEASURES = {
    "sampled": "the sampled token against all others, a lower bound of the true one",
    "support": "the logged support and its tail, a lower bound of the true one",
    "whole": "the whole vocabulary",
}
"""Mapping from `Audit.measure` to a description of the distributions that divergences are computed on."""

_NAMES = {"clip": "clipping 1 ± ε", "dppo_tv": "DPPO on TV", "dppo_kl": "DPPO on KL", "troll": "TROLL"}

_FEW = 1000
"""Number of tokens below which the first sentence of an audit calls its shares rough."""


def sentences(audit: Audit) -> list[str]:
    """List the sentences of an audit: compared policies, their distances, effect of clipping, and effect of other rules."""
    info, whole, distances, steps = audit.info, audit.whole, audit.distances, audit.steps
    remarks = list(map(str, info.get("remarks") or ()))
    first = f"{count(audit.tokens, 'token')} of {count(audit.sequences, 'completion')}"
    first += ", " if whole else f" in {count(steps, 'step')}, "
    first += f"{info.get('what') or 'compared'}{f', {steps} times' if whole and steps > 1 else ''}"
    first += "; shares of so few tokens are rough." if audit.tokens < _FEW else "."
    far = "True KL to the old policy" if whole else f"KL to the old policy, on {MEASURES[audit.measure]}"
    far += f": {_spread(distances['kl'])} nats. Total variation: {_spread(distances['tv'])}."
    if whole:
        did = updates_sentence(info)
        found = [first, far, *([] if did is None else [did]), _clipping(audit), *_true_distances(audit)]
        found += [_mismatch(audit, "of its own, so there is no mismatch to measure"), *remarks]
    else:
        found = [first, *remarks, far, _clipping(audit), _fewest(audit), _samples(audit)]
        found.append(_mismatch(audit, "beside the old policy's, so mismatch is not told apart from the updates"))
        found += [*_staleness(audit), *_alarms(audit)]
    left_out = "; ".join(f"{number_of:,} {what}" for what, number_of in audit.left_out.items())
    return [*found, f"Left out: {left_out}."] if left_out else found


def updates_sentence(info: Mapping[str, Any]) -> str | None:
    """Write the sentence on the share of tokens that clipping blocked in training, or return None if no trainer was audited."""
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


def _clipping(audit: Audit) -> str:
    """Write the sentence on the tokens that clipping would block, the share of these inside the KL ball, and missed tokens."""
    whole, ball = audit.whole, audit.verdicts["clipped"]["kl"]
    moment = "On one more update on these completions" if whole else "In an update at the new policy"
    missed = percent(ball.missed) if ball.passed_outward else "none"
    said = f"{moment}, clipping ({clip_range(audit.info['rules']['clip'])}) would block"
    radius = f"the KL ball of {number(audit.kl_bound)}"
    are, certainly = "is" if missed == "none" else "are", "" if whole else "certainly "
    if not ball.blocked:
        return f"{said} no token, and would pass {missed} {certainly}outside {radius} that {are} pushed further out."
    known = "" if whole else ", as far as these divergences show"
    return (
        f"{said} {percent(ball.share)} of tokens; {percent(ball.inside)} of these are inside {radius}{known}. It would pass "
        f"{missed} that {are} {certainly}outside and pushed further out."
    )


def _true_distances(audit: Audit) -> list[str]:
    """Sentences that need true divergences, on total variation, rare tokens, DPPO and TROLL."""
    ball, rare, found = audit.verdicts["clipped"]["tv"], audit.rare, []
    if ball.blocked:
        found.append(
            f"By total variation, {percent(ball.inside)} of the blocked tokens are within {number(audit.tv_bound)}, and "
            f"{percent(ball.missed)} of all tokens would be passed outside it and pushed further out."
        )
        found.append(
            f"Rare tokens, with an old probability of 0.01 or less, are {percent(rare['tokens'] / audit.tokens)} of all and "
            f"{percent(rare['blocked'] / ball.blocked)} of the blocked ones; where they are blocked, the policy has moved by a "
            f"true TV of {number(rare['tv'])} on average."
            if rare["blocked"]
            else "None of the blocked tokens is rare: all had an old probability above 0.01."
        )
    shares = {name: percent(balls["kl"].share) for name, balls in audit.verdicts.items()}
    moved = f", and move each of those by a TV of {number(audit.troll_tv)} on average" if audit.troll_tv else ""
    return [
        *found,
        f"On the same tokens DPPO would mask {shares['dppo_binary']} (TV of the sampled token above "
        f"{number(audit.tv_bound)}) or {shares['dppo_topk']} (TV of its {audit.info['rules']['top_k']} likeliest tokens); "
        f"TROLL would project {shares['troll']} (KL above {number(audit.kl_bound)}){moved}.",
    ]


def _fewest(audit: Audit) -> str:
    """Sentence on the bound with the fewest errors, for each of the best-known rules."""
    best = {row.rule.name: row for row in audit.best}
    parts = [
        f"{name} at {row.rule.symbol} = {row.bound:g} ({percent(row.kl.wrong)} blocked inside, {percent(row.kl.missed)} missed)"
        for family, name in _NAMES.items()
        if (row := best.get(family)) is not None
    ]
    return f"Fewest errors against the KL ball of {number(audit.kl_bound)}, as far as was logged: {'; '.join(parts)}."


def _samples(audit: Audit) -> str:
    """Sentence on the effective sample size and the step of its minimum."""
    text = f"Effective sample size of the tokens' ratios: {percent(audit.ess)} of their number"
    if audit.steps > 1:
        lowest = min(audit.by_step, key=lambda row: row["ess"])
        text += f"; at step {lowest['step']:,}, where it is lowest, {percent(lowest['ess'])}"
    return f"{text}."


def _mismatch(audit: Audit, silent: str) -> str:
    """Sentence on the TV between sampler and trainer. `silent` completes the sentence if the sampler logged no log-probs."""
    if "mismatch" not in audit.distances:
        return f"The sampler reported no log-probs {silent}."
    return f"Sampler and trainer differ on the sampled tokens by a TV of {_spread(audit.distances['mismatch'])}."


def _staleness(audit: Audit) -> list[str]:
    """Sentence on the age of tokens: the number of steps from sampling to training."""
    if not audit.by_age:
        return []
    first, last = audit.by_age[0], audit.by_age[-1]
    if first is last:
        return [f"Every token was trained on {count(first['age'], 'step')} after it was sampled."]
    return [
        f"Tokens were trained on {first['age']} to {count(last['age'], 'step')}{' or more' if last['older'] else ''} after "
        f"they were sampled: mean KL by the k3 estimate {number(first['k3'])} at first, {number(last['k3'])} at last."
    ]


def _alarms(audit: Audit) -> list[str]:
    """Sentences on the first step with a sign of collapse, and on the first step that has collapsed."""
    if audit.steps < 2:
        return []
    if not audit.alarms:
        return ["No step shows a sign of collapse in KL, effective samples, entropy or reward."]
    first, collapse = audit.alarms[0], next((alarm for alarm in audit.alarms if alarm["collapse"]), audit.alarms[0])
    said = [f"At step {first['step']:,} it announces itself: {first['sentence']}"]
    return said if collapse is first else [*said, f"At step {collapse['step']:,}: {collapse['sentence']}"]


def status(audit: Audit) -> str:
    """Write a line of at most 70 characters on progress and the share of tokens that clipping would block, for --live."""
    ball = audit.verdicts["clipped"]["kl"]
    newest = f"{'update' if audit.whole else 'step'} {audit.by_step[-1]['step']:,}"
    inside = f", {percent(ball.inside)} of these inside the KL ball" if ball.blocked else ""
    return f"{newest}, {count(ball.tokens, 'token')}: would clip {percent(ball.share)}{inside}"


def shown_rules(audit: Audit) -> Mapping[str, str]:
    """Return the rules in an audit's tables by bucket, as a mapping from column to name of the rule."""
    return RULES if audit.whole else SHOWN_RULES


def verdict_rows(audit: Audit, ball: str) -> list[Row]:
    """Build the table rows that compare each rule with the `kl` or `tv` ball."""
    found = {RULES[rule]: row[ball] for rule, row in audit.verdicts.items()}
    return [
        {
            "Rule": rule,
            "Would act on": percent(one.share),
            "…of which outside": _part(one.blocked_outside, one.blocked),
            "…of which inside": _part(one.blocked_inside, one.blocked),
            "Would miss": _part(one.passed_outward, one.tokens),
        }
        for rule, one in found.items()
    ]


def threshold_row(row: Threshold, audit: Audit) -> Row:
    """Build the table row of a rule at one bound: share blocked, and shares blocked inside and missed outside each ball."""
    bound = "—" if row.rule.name == AUDITED else f"{row.rule.symbol} = {row.bound:g}{' ●' if row.default else ''}"
    found = {"Rule": row.rule.title, "Bound": bound, "Would block": _exact(row.kl.share)}
    for name, ball, radius in (("KL", row.kl, audit.kl_bound), ("TV", row.tv, audit.tv_bound)):
        found[f"blocked inside {name} ≤ {number(radius)}"] = _exact(ball.wrong)
        found[f"missed, {name} > {number(radius)}"] = _exact(ball.missed)
    return found


def bucket_rows(title: str, rows: Sequence[Row], audit: Audit) -> list[Row]:
    """Build a table with one row per bucket of tokens, such as a range of old probability: KL, TV, and share acted on."""
    outside = {} if audit.whole else {"outside": f"outside KL ≤ {number(audit.kl_bound)}"}
    shares = {**outside, **shown_rules(audit)}
    return [
        {
            title: row["name"],
            "Tokens": f"{row['tokens']:,}",
            "mean TV": number(row["tv"]),
            "99.9 %, largest TV": f"{number(row['tv_p999'])}, {number(row['tv_max'])}",
            "mean KL": number(row["kl"]),
            "99.9 %, largest KL": f"{number(row['kl_p999'])}, {number(row['kl_max'])}",
            **{words: percent(row[name]) for name, words in shares.items()},
        }
        for row in rows
    ]


def blocked_rows(audit: Audit) -> list[Row]:
    """Build the table rows of the tokens that clipping blocks most often."""
    return [
        {
            "Token": render_token(audit.texts[row["token"]]) if row["token"] in audit.texts else "—",
            "Id": f"{row['token']:,}",
            "Seen": f"{row['seen']:,}",
            "Would be blocked": f"{row['blocked']:,}",
            "…inside the KL ball": _part(row["inside"], row["blocked"]),
            "Mean probability before": number(row["p_old"]),
            "Mean true TV" if audit.whole else "Mean TV": number(row["tv"]),
        }
        for row in audit.blocked_tokens
    ]


def render_token(text: str, most: int = 60) -> str:
    """Make the text of a token readable: hidden characters are written out, white space is made visible."""
    text = visible(text if len(text) <= most else f"{text[:most]} …").replace("\n", "⏎").replace("\t", "⇥")
    inner = text.strip(" ")
    before, _, after = text.partition(inner) if inner else (text, "", "")
    return f"{'␣' * len(before)}{inner}{'␣' * len(after)}" or "∅"


def _part(tokens: int, of: int) -> str:
    """Format a number of tokens with its share of a total: `12 (3.4 %)`."""
    return f"{tokens:,} ({percent(tokens / of)})" if of else "—"


def _exact(share: float) -> str:
    """Format a share in percent, with enough digits to compare small numbers in a column."""
    return f"{100 * share:.4f} %" if 0 < share < 1e-4 else percent(share)


def clip_range(clip: Mapping[str, Any]) -> str:
    """Format the clip range of an objective: `ratio 0.8 … 1.2`."""
    if clip["name"] == "gmpo":
        return f"log-ratio within ±{number(clip['clip'])}"
    digits = 4 if clip["clip_low"] < 0.01 else 3
    whose = "completion's ratio" if clip["name"] == "gspo" else "ratio"
    dual = f", and {number(clip['dual_clip'])} where the advantage is negative" if clip.get("dual_clip") else ""
    return f"{whose} {1 - clip['clip_low']:.{digits}g} … {1 + clip['clip_high']:.{digits + 1}g}{dual}"


def _spread(row: Mapping[str, float]) -> str:
    """Format statistics of a distance: `mean 0.002, 99.9th percentile 0.3, largest 1.2`."""
    return f"mean {number(row['mean'])}, 99.9th percentile {number(row['p999'])}, largest {number(row['max'])}"


def percent(share: float) -> str:
    """Format a share in percent with about two significant digits. Only exact values become 0 % and 100 %."""
    if share in (0.0, 1.0):
        return f"{share:.0%}".replace("%", " %")
    if share < 1e-4:
        return "under 0.01 %"
    if share > 0.9999:
        return "over 99.99 %"
    rare = min(share, 1 - share)
    return f"{100 * share:.{2 if rare < 0.01 else 1 if rare < 0.1 else 0}f} %"


def number(value: float) -> str:
    """Format a number with two significant digits."""
    return "∞" if value == float("inf") else re.sub(r"e([-+])0*", r"e\1", f"{value:.2g}")
