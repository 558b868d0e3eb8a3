"""Which threshold? Every rule at every bound, on the same tokens: how much it blocks, how often wrongly, what it misses."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.lab.audit.dump import Floats
from corral.lab.audit.summary import Ball
from corral.lab.audit.tokens import Tokens, sampled_kl, sampled_tv

_Score = Callable[[Tokens], Floats | None]
"""Tokens → how far each has gone by the rule's own measure: it is blocked at bound b iff its score is above b. None: the
tokens do not say what the rule would need."""

_CLIP = 0.2

AUDITED = "audited"
"""Name of the rule that an audit is about."""


@dataclass(frozen=True)
class RuleFamily:
    """One rule at several bounds."""

    name: str
    title: str
    symbol: str
    """What the bound is called: ε, δ, c."""
    bounds: tuple[float, ...]
    default: float
    score: _Score


def _directed(advantage: Floats, rise: Floats, fall: Floats) -> Floats:
    """`rise` where the advantage is positive, `fall` where it is negative, −inf where there is none."""
    return np.where(advantage > 0, rise, np.where(advantage < 0, fall, -np.inf))


def _ratio(log_ratio: Floats) -> Floats:
    return np.exp(np.minimum(log_ratio, 20.0))


def _clip(tokens: Tokens) -> Floats:
    ratio = _ratio(tokens.logp_new - tokens.logp_old)
    return _directed(tokens.advantage, ratio - 1, 1 - ratio)


def _clip_higher(tokens: Tokens) -> Floats:
    ratio = _ratio(tokens.logp_new - tokens.logp_old)
    return _directed(tokens.advantage, ratio - 1, np.where(1 - ratio > _CLIP, np.inf, -np.inf))


def _dual_clip(tokens: Tokens) -> Floats:
    ratio = _ratio(tokens.logp_new - tokens.logp_old)
    fall = np.where(1 - ratio > _CLIP, np.inf, ratio)
    return _directed(tokens.advantage, np.where(ratio - 1 > _CLIP, np.inf, -np.inf), fall)


def _gspo(tokens: Tokens) -> Floats | None:
    if tokens.sequence_log_ratio is None:
        return None
    ratio = _ratio(tokens.sequence_log_ratio)
    return _directed(tokens.advantage, ratio - 1, 1 - ratio)


def _gmpo(tokens: Tokens) -> Floats:
    log_ratio = tokens.logp_new - tokens.logp_old
    return _directed(tokens.advantage, log_ratio, -log_ratio)


def _ripo(tokens: Tokens) -> Floats:
    ratio = _ratio(tokens.logp_new - tokens.logp_old)
    moved = np.exp(tokens.logp_old) * (ratio - 1) ** 2
    return _directed(tokens.advantage, np.where(ratio > 1, moved, -np.inf), np.where(ratio < 1, moved, -np.inf))


def _dppo(divergence: Callable[[Tokens], Floats | None], *, symmetric: bool = False) -> _Score:
    """DPPO's mask on a divergence from the anchor: where tokens moved along their advantage, or wherever they have one."""

    def score(tokens: Tokens) -> Floats | None:
        moved = divergence(tokens)
        if moved is None:
            return None
        outward = (tokens.logp_new - tokens.anchor) * tokens.advantage > 0
        return np.where(tokens.advantage != 0 if symmetric else outward, moved, -np.inf)

    return score


def _anchor_tv(tokens: Tokens) -> Floats:
    return sampled_tv(tokens.anchor, tokens.logp_new)


def _anchor_kl(tokens: Tokens) -> Floats:
    return sampled_kl(tokens.anchor, tokens.logp_new)


_TV_BOUNDS, _KL_BOUNDS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5), (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)

FAMILIES = (
    RuleFamily("clip", "Clip, 1 ± ε", "ε", (0.05, 0.1, 0.2, 0.3, 0.5, 1.0), _CLIP, _clip),
    RuleFamily("clip_higher", "Clip-higher, 0.8 … 1 + ε", "ε", (0.24, 0.28, 0.4, 1.0), 0.28, _clip_higher),
    RuleFamily("dual_clip", "Dual clip, 1 ± 0.2 and c", "c", (2.0, 3.0, 5.0, 10.0), 3.0, _dual_clip),
    RuleFamily("gspo", "GSPO, completion's ratio 1 ± ε", "ε", (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), 3e-4, _gspo),
    RuleFamily("gmpo", "GMPO, log-ratio ± ε", "ε", (0.1, 0.2, 0.4, 0.8), 0.4, _gmpo),
    RuleFamily("ripo", "RIPO, π_old (ρ − 1)²", "δ", _KL_BOUNDS, 0.05, _ripo),
    RuleFamily("dppo_tv", "DPPO, TV of the sampled token", "δ", _TV_BOUNDS, 0.2, _dppo(_anchor_tv)),
    RuleFamily("dppo_kl", "DPPO, KL of the sampled token", "δ", _KL_BOUNDS, 0.05, _dppo(_anchor_kl)),
    RuleFamily("dppo_tv_symmetric", "DPPO symmetric (IPO), TV", "δ", _TV_BOUNDS, 0.2, _dppo(_anchor_tv, symmetric=True)),
    RuleFamily("dppo_kl_symmetric", "DPPO symmetric, KL", "δ", _KL_BOUNDS, 0.05, _dppo(_anchor_kl, symmetric=True)),
    RuleFamily("dppo_topk_tv", "DPPO, TV on the support", "δ", _TV_BOUNDS, 0.2, _dppo(lambda tokens: tokens.support_tv)),
    RuleFamily(
        "dppo_topk_kl", "DPPO, KL on the support", "δ", _KL_BOUNDS, 0.05, _dppo(lambda tokens: tokens.support_kl_old_new)
    ),
    RuleFamily(
        "troll", "TROLL, projects", "ε", _KL_BOUNDS, 0.05, lambda tokens: None if tokens.measure == "sampled" else tokens.kl
    ),
)
"""Rules that leave a token without a gradient, or project it, each on its own. Left out are those that act on the tokens of
another one here (`spo` and `decoupled_ppo` of `clip`, `drpo` of `dppo_tv`), that weigh tokens, or whose choice depends on the
tokens before or beside (`cppo`, `bapo`, `m2po`, `clip_cov`, `kl_cov`), which a log may not show."""


def clip_family(low: float, high: float) -> RuleFamily:
    """The clip range 1 − low … 1 + high alone, as `audited`: its one bound is 0, and a score how far a ratio is beyond."""

    def score(tokens: Tokens) -> Floats:
        ratio = _ratio(tokens.logp_new - tokens.logp_old)
        return _directed(tokens.advantage, ratio - (1 + high), (1 - low) - ratio)

    return RuleFamily(AUDITED, f"Clip, {1 - low:.4g} … {1 + high:.4g}, as audited", "", (0.0,), 0.0, score)


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """One rule at one bound, against the balls of KL and of total variation."""

    family: str
    title: str
    symbol: str
    bound: float
    default: bool
    """Whether this is the bound that the method is published with."""
    kl: Ball
    tv: Ball

    @property
    def share(self) -> float:
        """Of tokens that are blocked."""
        return self.kl.blocked / self.kl.tokens

    @property
    def errors(self) -> int:
        """Tokens blocked inside the KL ball, and tokens missed outside it."""
        return self.kl.blocked_inside + self.kl.passed_outward

    def as_dict(self) -> dict[str, Any]:
        """For JSON: counts and shares of all tokens."""
        balls = {name: _ball_shares(ball) for name, ball in (("kl", self.kl), ("tv", self.tv))}
        return {"rule": self.family, "bound": self.bound, "default": self.default, "blocked_share": self.share, **balls}


class ThresholdTally:
    """Counts of tokens by rule, by the bounds that they are beyond, and by cell: outside either ball, pushed further out."""

    def __init__(self, kl_bound: float, tv_bound: float, audited: RuleFamily | None = None) -> None:
        self.kl_bound, self.tv_bound = kl_bound, tv_bound
        self.families = FAMILIES if audited is None else (audited, *FAMILIES)
        self._counts: dict[str, NDArray[np.int64]] = {}
        self._seen: dict[str, int] = {}
        self.tokens = 0

    def add(self, tokens: Tokens) -> None:
        """Count some more. A rule that cannot be computed on some tokens is left out of the table."""
        outward = (tokens.logp_new - tokens.logp_old) * tokens.advantage > 0
        cell = (tokens.kl > self.kl_bound) + 2 * (tokens.tv > self.tv_bound) + 4 * outward
        self.tokens += len(tokens)
        for family in self.families:
            score = family.score(tokens)
            if score is None:
                continue
            level = np.searchsorted(family.bounds, score, side="left")  # how many bounds are below the score
            size = 8 * (len(family.bounds) + 1)
            found = np.bincount(8 * level + cell, minlength=size)
            self._counts[family.name] = self._counts.get(family.name, 0) + found
            self._seen[family.name] = self._seen.get(family.name, 0) + len(tokens)

    def rows(self) -> list[Threshold]:
        """Every rule that could be computed on all tokens, at every bound."""
        return [
            row
            for family in self.families
            if self.tokens and self._seen.get(family.name) == self.tokens
            for row in self._family_rows(family)
        ]

    def _family_rows(self, family: RuleFamily) -> list[Threshold]:
        levels = self._counts[family.name].reshape(-1, 8)
        rows = []
        for place, bound in enumerate(family.bounds):
            blocked, passed = levels[place + 1 :].sum(0), levels[: place + 1].sum(0)
            balls = {name: _ball(blocked, passed, bit) for name, bit in (("kl", 1), ("tv", 2))}
            default = math.isclose(bound, family.default)
            rows.append(
                Threshold(family=family.name, title=family.title, symbol=family.symbol, bound=bound, default=default, **balls)
            )
        return rows


def _ball(blocked: NDArray[np.int64], passed: NDArray[np.int64], bit: int) -> Ball:
    """The four cells of a ball from counts by cell."""
    outside = np.arange(8) & bit > 0
    outward = np.arange(8) & 4 > 0
    return Ball(
        blocked_inside=int(blocked[~outside].sum()),
        blocked_outside=int(blocked[outside].sum()),
        passed_inside=int(passed[~outside].sum()),
        passed_outside=int(passed[outside].sum()),
        passed_outward=int(passed[outside & outward].sum()),
    )


def _ball_shares(ball: Ball) -> dict[str, float]:
    return {
        **vars(ball),
        "wrongly_blocked_share": ball.blocked_inside / ball.tokens,
        "missed_share": ball.passed_outward / ball.tokens,
    }


def fewest_errors(rows: list[Threshold]) -> dict[str, Threshold]:
    """By rule, the bound that errs least against the KL ball; the larger one of equals. Rules with one bound have none."""
    families: dict[str, list[Threshold]] = {}
    for row in rows:
        families.setdefault(row.family, []).append(row)
    return {name: min(own, key=lambda row: (row.errors, -row.bound)) for name, own in families.items() if len(own) > 1}
