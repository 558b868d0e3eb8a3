"""An audit in plain sentences, the same in a terminal and on a page."""

import re
from collections.abc import Mapping
from typing import Any

from corral.lab.audit.summary import Ball, Summary
from corral.lab.run.text import count

RULES = {"clipped": "clipping", "dppo_binary": "DPPO, sampled token", "dppo_topk": "DPPO, top-K", "troll": "TROLL"}
"""Verdicts and their names."""


def sentences(summary: Summary, info: Mapping[str, Any]) -> list[str]:
    """What was compared, how far it went, what clipping did, and what it and others would do on one more update."""
    rules = info["rules"]
    found = [
        f"{count(summary.tokens, 'token')} of {count(summary.sequences, 'completion')}, {info.get('what') or 'compared'}"
        f"{'' if summary.updates == 1 else f', {summary.updates} times'}.",
        f"True KL to the old policy: {_spread(summary.kl)} nats. Total variation: {_spread(summary.tv)}.",
        *((said,) if (said := updates_sentence(info)) is not None else ()),
        _clipping(summary, rules),
    ]
    if summary.verdicts["clipped"]["kl"].blocked:
        found += [_other_ball(summary.verdicts["clipped"]["tv"], rules), _rare(summary)]
    found.append(_others(summary, rules))
    if summary.mismatch is None:
        found.append("The sampler reported no log-probs of its own, so there is no mismatch to measure.")
    else:
        found.append(f"Sampler and trainer differ on the sampled tokens by a TV of {_spread(summary.mismatch)}.")
    return [*found, *map(str, info.get("remarks") or ())]


def updates_sentence(info: Mapping[str, Any]) -> str | None:
    """A sentence: the share of tokens that clipping blocked during training, and TRL's clip ratio. None without a trainer."""
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
    """A sentence: what clipping would block in one more update on the same completions, and what it would miss."""
    ball: Ball = summary.verdicts["clipped"]["kl"]
    name = f"On one more update on these completions, clipping ({clip_range(rules['clip'])}) would block"
    radius = f"the KL ball of {number(rules['kl_bound'])}"
    missed = percent(ball.passed_outward / ball.tokens) if ball.passed_outward else "none"
    if not ball.blocked:
        return f"{name} no token, and would pass {missed} outside {radius} that {_are(missed)} pushed further out."
    inside = percent(ball.blocked_inside / ball.blocked)
    return (
        f"{name} {percent(ball.blocked / ball.tokens)} of tokens; {inside} of these are inside {radius}. It would "
        f"pass {missed} that {_are(missed)} outside and pushed further out."
    )


def _other_ball(ball: Ball, rules: Mapping[str, Any]) -> str:
    """The same by total variation."""
    return (
        f"By total variation, {percent(ball.blocked_inside / ball.blocked)} of the blocked tokens are within "
        f"{number(rules['tv_bound'])}, and {percent(ball.passed_outward / ball.tokens)} of all tokens would be passed outside "
        f"it and pushed further out."
    )


def _rare(summary: Summary) -> str:
    """What share of the blocks falls on tokens that hardly matter."""
    row, blocked = summary.rare, summary.verdicts["clipped"]["kl"].blocked
    if not row["blocked"]:
        return "None of the blocked tokens is rare: all had an old probability above 0.01."
    return (
        f"Rare tokens, with an old probability of 0.01 or less, are {percent(row['tokens'] / summary.tokens)} of all and "
        f"{percent(row['blocked'] / blocked)} of the blocked ones; where they are blocked, the policy has moved by a true TV "
        f"of {number(row['tv'])} on average."
    )


def _others(summary: Summary, rules: Mapping[str, Any]) -> str:
    """DPPO and TROLL on the same tokens."""
    shares = {name: percent(row["share"]) for name, row in summary.verdicts.items()}
    moved = f", and move each of those by a TV of {number(summary.troll_tv)} on average" if summary.troll_tv else ""
    return (
        f"On the same tokens DPPO would mask {shares['dppo_binary']} (TV of the sampled token above "
        f"{number(rules['tv_bound'])}) or {shares['dppo_topk']} (TV of its {rules['top_k']} likeliest tokens); TROLL would "
        f"project {shares['troll']} (KL above {number(rules['kl_bound'])}){moved}."
    )


def clip_range(clip: Mapping[str, Any]) -> str:
    """`ratio 0.8 … 1.2`."""
    if clip["name"] == "gmpo":
        return f"log-ratio within ±{number(clip['clip'])}"
    digits = 4 if clip["clip_low"] < 0.01 else 3
    whose = "completion's ratio" if clip["name"] == "gspo" else "ratio"
    dual = f", and {number(clip['dual_clip'])} where the advantage is negative" if clip.get("dual_clip") else ""
    return f"{whose} {1 - clip['clip_low']:.{digits}g} … {1 + clip['clip_high']:.{digits + 1}g}{dual}"


def _spread(row: Mapping[str, float]) -> str:
    """`mean 0.002, 99.9th percentile 0.3, largest 1.2`."""
    return f"mean {number(row['mean'])}, 99.9th percentile {number(row['p999'])}, largest {number(row['max'])}"


def percent(share: float) -> str:
    """With two digits that count; not 0 % unless it is 0, nor 100 % unless it is all."""
    if share in (0.0, 1.0):
        return f"{share:.0%}".replace("%", " %")
    if share < 1e-4:
        return "under 0.01 %"
    if share > 0.9999:
        return "over 99.99 %"
    rare = min(share, 1 - share)
    return f"{100 * share:.{2 if rare < 0.01 else 1 if rare < 0.1 else 0}f} %"


def number(value: float) -> str:
    """Two digits that count."""
    return "∞" if value == float("inf") else re.sub(r"e([-+])0*", r"e\1", f"{value:.2g}")


def _are(number_of_tokens: str) -> str:
    return "is" if number_of_tokens == "none" else "are"
