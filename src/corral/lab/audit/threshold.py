"""Comparison of thresholds: for every rule and bound, the share of tokens blocked, wrongly blocked and missed."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from corral.lab.audit.tokens import VERDICTS, Floats, sampled_kl, sampled_tv

_Score = Callable[[pd.DataFrame], Floats | pd.Series]
"""Score function of a rule: the rule blocks a token at bound b if and only if the token's score is above b.

A score is NaN if a column that the rule needs is missing."""

_CLIP = 0.2


@dataclass(frozen=True)
class RuleFamily:
    """Rule that blocks or projects tokens, such as clipping or DPPO, with several bounds to compare."""

    name: str
    title: str
    symbol: str
    """Symbol of the bound: ε, δ or c; empty for the audited clip range, which has no bound to choose."""
    bounds: tuple[float, ...]
    default: float
    """Published bound of the method, such as ε = 0.2 for PPO's clipping."""
    score: _Score = field(compare=False)


def _ratio(log_ratio: pd.Series) -> pd.Series:
    return np.exp(log_ratio.clip(upper=20.0))


def _directed(rise: Callable[[pd.Series], Any], fall: Callable[[pd.Series], Any], column: str = "log_ratio") -> _Score:
    """Build a rule's score from a token's ratio: `rise` for positive advantages, `fall` for negative advantages, −inf for 0."""

    def score(tokens: pd.DataFrame) -> Floats:
        ratio = _ratio(tokens[column])
        none = ratio.where(ratio.isna(), -np.inf)  # NaN stays NaN
        return np.select([tokens["advantage"] > 0, tokens["advantage"] < 0], [rise(ratio), fall(ratio)], none)

    return score


def _beyond(far: pd.Series) -> Floats:
    """Score of tokens that are blocked whatever the bound: +inf for tokens in `far`, −inf for all others."""
    return np.where(far, np.inf, -np.inf)


def _gmpo(tokens: pd.DataFrame) -> pd.Series:
    return np.sign(tokens["advantage"]) * tokens["log_ratio"]


def _ripo(tokens: pd.DataFrame) -> pd.Series:
    ratio = _ratio(tokens["log_ratio"])
    outward = tokens["advantage"] * (ratio - 1) > 0
    return (np.exp(tokens["logp_old"]) * (ratio - 1) ** 2).where(outward, -np.inf)


def _dppo(divergence: Callable[[pd.DataFrame], Any], *, symmetric: bool = False) -> _Score:
    """Build DPPO's score: divergence from the sampling policy, or −inf for tokens that did not move along their advantage."""

    def score(tokens: pd.DataFrame) -> Floats:
        moved, outward = divergence(tokens), (tokens["logp_new"] - tokens["anchor"]) * tokens["advantage"] > 0
        return np.where(np.isnan(moved) | (tokens["advantage"] != 0 if symmetric else outward), moved, -np.inf)

    return score


def _anchor_tv(tokens: pd.DataFrame) -> Floats:
    return sampled_tv(tokens["anchor"], tokens["logp_new"])


def _anchor_kl(tokens: pd.DataFrame) -> Floats:
    return sampled_kl(tokens["anchor"], tokens["logp_new"])


def _troll(tokens: pd.DataFrame) -> pd.Series:
    return tokens["kl"].where(tokens["support_tv"].notna())  # the sampled token alone is no distribution to project


_TV, _KL = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5), (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
_clip, _gspo = (
    _directed(lambda ratio: ratio - 1, lambda ratio: 1 - ratio, column) for column in ("log_ratio", "sequence_log_ratio")
)
_clip_higher = _directed(lambda ratio: ratio - 1, lambda ratio: _beyond(1 - ratio > _CLIP))
_dual_clip = _directed(lambda ratio: _beyond(ratio - 1 > _CLIP), lambda ratio: np.where(1 - ratio > _CLIP, np.inf, ratio))

FAMILIES = (
    RuleFamily("clip", "Clip, 1 ± ε", "ε", (0.05, 0.1, 0.2, 0.3, 0.5, 1.0), _CLIP, _clip),
    RuleFamily("clip_higher", "Clip-higher, 0.8 … 1 + ε", "ε", (0.24, 0.28, 0.4, 1.0), 0.28, _clip_higher),
    RuleFamily("dual_clip", "Dual clip, 1 ± 0.2 and c", "c", (2.0, 3.0, 5.0, 10.0), 3.0, _dual_clip),
    RuleFamily("gspo", "GSPO, completion's ratio 1 ± ε", "ε", (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), 3e-4, _gspo),
    RuleFamily("gmpo", "GMPO, log-ratio ± ε", "ε", (0.1, 0.2, 0.4, 0.8), 0.4, _gmpo),
    RuleFamily("ripo", "RIPO, π_old (ρ − 1)²", "δ", _KL, 0.05, _ripo),
    RuleFamily("dppo_tv", "DPPO, TV of the sampled token", "δ", _TV, 0.2, _dppo(_anchor_tv)),
    RuleFamily("dppo_kl", "DPPO, KL of the sampled token", "δ", _KL, 0.05, _dppo(_anchor_kl)),
    RuleFamily("dppo_tv_symmetric", "DPPO symmetric (IPO), TV", "δ", _TV, 0.2, _dppo(_anchor_tv, symmetric=True)),
    RuleFamily("dppo_kl_symmetric", "DPPO symmetric, KL", "δ", _KL, 0.05, _dppo(_anchor_kl, symmetric=True)),
    RuleFamily("dppo_topk_tv", "DPPO, TV on the support", "δ", _TV, 0.2, _dppo(lambda tokens: tokens["support_tv"])),
    RuleFamily("dppo_topk_kl", "DPPO, KL on the support", "δ", _KL, 0.05, _dppo(lambda tokens: tokens["support_kl_old_new"])),
    RuleFamily("troll", "TROLL, projects", "ε", _KL, 0.05, _troll),
)
"""Rules that an audit compares: each sets a token's gradient to zero, or projects the token, independently of other tokens.

Not included are rules that act on the same tokens as a rule in this list (`spo` and `decoupled_ppo` as `clip`, `drpo` as
`dppo_tv`), rules that weigh tokens, and rules that depend on neighbouring tokens (`cppo`, `bapo`, `m2po`, `clip_cov`,
`kl_cov`), which a log may lack."""


AUDITED = "audited"
"""Name of the rule for the clip range that an audit of logged tokens examines."""


def range_rule(low: float, high: float) -> RuleFamily:
    """Make the rule for the clip range 1 − low … 1 + high. It blocks tokens that have left the range along their advantage."""
    score = _directed(lambda ratio: ratio - (1 + high), lambda ratio: (1 - low) - ratio)
    return RuleFamily(AUDITED, f"Clip, {1 - low:.4g} … {1 + high:.4g}, as audited", "", (0.0,), 0.0, score)


@dataclass(frozen=True)
class Ball:
    """Counts of tokens that a rule blocks and passes, inside and outside a ball of KL or total variation."""

    blocked_inside: int
    """Number of tokens blocked although they are inside the ball: the rule's false alarms."""
    blocked_outside: int
    passed_inside: int
    passed_outside: int
    passed_outward: int
    """Number of tokens missed by the rule: outside the ball, pushed further out by the update, and not blocked."""

    @property
    def blocked(self) -> int:
        """Number of tokens that the rule blocks, inside or outside the ball."""
        return self.blocked_inside + self.blocked_outside

    @property
    def tokens(self) -> int:
        """Number of all tokens, blocked or passed, inside or outside the ball."""
        return self.blocked + self.passed_inside + self.passed_outside

    @property
    def share(self) -> float:
        """Share of all tokens that the rule blocks."""
        return self.blocked / self.tokens

    @property
    def inside(self) -> float:
        """Share of blocked tokens that are inside the ball. At least one token must be blocked."""
        return self.blocked_inside / self.blocked

    @property
    def wrong(self) -> float:
        """Share of all tokens that the rule blocks although they are inside the ball."""
        return self.blocked_inside / self.tokens

    @property
    def missed(self) -> float:
        """Share of all tokens that are outside the ball, pushed further out and not blocked."""
        return self.passed_outward / self.tokens

    @property
    def errors(self) -> int:
        """Number of errors: tokens blocked inside the ball plus tokens missed outside it."""
        return self.blocked_inside + self.passed_outward


@dataclass(frozen=True)
class Threshold:
    """Rule at one bound, with counts of its errors against the balls of KL and of total variation."""

    rule: RuleFamily
    bound: float
    kl: Ball
    tv: Ball

    @property
    def default(self) -> bool:
        """True if this is the published bound of the method."""
        return math.isclose(self.bound, self.rule.default)

    def as_dict(self) -> dict[str, Any]:
        """Return the rule's counts of tokens, and shares of all tokens, as a mapping for JSON."""
        balls = {
            name: {**vars(ball), "wrongly_blocked_share": ball.wrong, "missed_share": ball.missed}
            for name, ball in (("kl", self.kl), ("tv", self.tv))
        }
        return {"rule": self.rule.name, "bound": self.bound, "default": self.default, "blocked_share": self.kl.share, **balls}


class ThresholdTally:
    """Counter of tokens for each rule, by number of exceeded bounds and by position inside or outside the KL and TV balls."""

    def __init__(self, kl_bound: float, tv_bound: float, families: Sequence[RuleFamily] = FAMILIES) -> None:
        self.kl_bound, self.tv_bound, self.families = kl_bound, tv_bound, families
        self._counts: defaultdict[str, NDArray[np.int64]] = defaultdict(lambda: np.zeros((8, 2, 2, 2), dtype=np.int64))
        """Mapping from rule to counts [exceeded bounds, pushed further out, outside the TV ball, outside the KL ball]."""
        self.tokens = 0

    def add(self, tokens: pd.DataFrame) -> None:
        """Count a table of tokens for every rule. A rule that cannot be computed on some tokens is left out of the table."""
        cell = (tokens["kl"] > self.kl_bound) + 2 * (tokens["tv"] > self.tv_bound) + 4 * tokens["outward"]
        self.tokens += len(tokens)
        levels = {f"{name} acts": tokens[name].astype(np.int64) for name in VERDICTS if name in tokens}
        for family in self.families:
            if not np.isnan(score := family.score(tokens)).any():
                levels[family.name] = np.searchsorted(family.bounds, score, side="left")  # how many bounds it is above
        for name, level in levels.items():
            self._counts[name] += np.bincount(8 * level + cell, minlength=64).reshape(8, 2, 2, 2)

    def balls(self, name: str, place: int = 0) -> dict[str, Ball]:
        """Return counts in the `kl` and `tv` balls for a rule at bound number `place`, or a verdict such as "clipped acts"."""
        blocked, passed = self._counts[name][place + 1 :].sum(0), self._counts[name][: place + 1].sum(0)
        found = {}
        for ball, other in (("kl", 1), ("tv", 2)):  # the axis of the other ball is summed over
            counts = *blocked.sum((0, other)), *passed.sum((0, other)), passed.sum(other)[1, 1]
            found[ball] = Ball(*map(int, counts))
        return found

    def rows(self) -> list[Threshold]:
        """List each rule that could be computed on all tokens, at every bound of the rule."""
        return [
            Threshold(family, bound, **self.balls(family.name, place))
            for family in self.families
            if self.tokens and self._counts[family.name].sum() == self.tokens
            for place, bound in enumerate(family.bounds)
        ]


def fewest_errors(rows: Sequence[Threshold]) -> list[Threshold]:
    """Select each rule's bound with the fewest errors against the KL ball, the largest on a tie. Skips rules with one bound."""
    families = {row.rule.name: [one for one in rows if one.rule is row.rule] for row in rows}
    return [min(own, key=lambda row: (row.kl.errors, -row.bound)) for own in families.values() if len(own) > 1]
