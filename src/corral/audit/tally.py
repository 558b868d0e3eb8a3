"""Statistics of a stream of tokens in constant memory: distances, ratios, effective samples, over training and by staleness."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from corral.audit.dump.completion import Floats
from corral.audit.errors import NothingYet
from corral.audit.histogram import LogHistogram
from corral.audit.summary import PROBABILITY, PROBABILITY_NAMES
from corral.audit.threshold import FAMILIES, RuleFamily, Threshold, ThresholdTally
from corral.audit.tokens import Tokens, sampled_tv
from corral.run.watch import CollapseLimits, CollapseWatch
from corral.validate import RunError

_MOST_STEPS = 100_000
_OLDEST = 32
"""Steps of staleness that have a row of their own; the last one is for all that are older."""

_SHOWN_RULES = {"clip": 0.2, "dppo_tv": 0.2, "dppo_kl": 0.05}
"""Rules, with their bounds, whose share is told by old probability."""


@dataclass(eq=False)
class _Sums:
    """What a mean over tokens is made of; of a step, an age, or everything."""

    tokens: int = 0
    weight: float = 0.0
    weight_squared: float = 0.0
    k1: float = 0.0
    k3: float = 0.0
    tv: float = 0.0
    mismatch: float = 0.0
    mismatch_tokens: int = 0
    entropy: float = 0.0
    entropy_tokens: int = 0
    reward: float = 0.0
    rewards: int = 0
    furthest: float = 0.0
    """Largest |log new/old|."""

    def add(self, part: Mapping[str, Floats], here: Any) -> None:
        """Some tokens, by the columns of `_token_columns`."""
        weight, gap, entropy = part["weight"][here], part["mismatch"][here], part["entropy"][here]
        self.tokens += len(weight)
        self.weight += float(weight.sum())
        self.weight_squared += float((weight**2).sum())
        self.k1 += float(part["k1"][here].sum())
        self.k3 += float(part["k3"][here].sum())
        self.tv += float(part["tv"][here].sum())
        self.mismatch += float(np.nansum(gap))
        self.mismatch_tokens += int((~np.isnan(gap)).sum())
        self.entropy += float(np.nansum(entropy))
        self.entropy_tokens += int((~np.isnan(entropy)).sum())
        self.furthest = max(self.furthest, float(np.abs(part["k1"][here]).max(initial=0.0)))

    def row(self) -> dict[str, Any]:
        """Means; None where nothing was reported."""
        return {
            "tokens": self.tokens,
            "ess": self.weight**2 / (self.weight_squared * self.tokens) if self.tokens else None,
            "k1": self.k1 / self.tokens if self.tokens else None,
            "k3": self.k3 / self.tokens if self.tokens else None,
            "tv": self.tv / self.tokens if self.tokens else None,
            "mismatch": self.mismatch / self.mismatch_tokens if self.mismatch_tokens else None,
            "entropy": self.entropy / self.entropy_tokens if self.entropy_tokens else None,
            "reward": self.reward / self.rewards if self.rewards else None,
            "furthest": self.furthest,
        }


@dataclass(frozen=True, kw_only=True)
class StreamSummary:
    """All numbers of a stream of tokens."""

    measure: str
    tokens: int
    sequences: int
    steps: int
    kl_bound: float
    tv_bound: float
    ess: float
    """Effective sample size (Σw)² / (n Σw²) of the tokens' ratios new/behaviour, as a share: 1 when on-policy."""
    distances: Mapping[str, Mapping[str, float]]
    """`mean`, `p50`, `p99`, `p999`, `max` of kl, tv, |k1|, k2, k3, and of the mismatch where the sampler reported."""
    k1: float
    """Mean of log old − log new, which may be negative."""
    thresholds: list[Threshold]
    by_step: list[dict[str, Any]]
    by_age: list[dict[str, Any]]
    by_probability: list[dict[str, Any]]
    alarms: list[dict[str, Any]]
    """Steps at which a collapse announces itself, or is one, in the words of the guard."""
    left_out: Mapping[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "thresholds": [row.as_dict() for row in self.thresholds]}


class Tally:
    """Counts tokens as they come; its memory grows with the steps alone, by some hundred bytes for each."""

    def __init__(self, kl_bound: float, tv_bound: float, audited: RuleFamily | None = None) -> None:
        self.thresholds = ThresholdTally(kl_bound, tv_bound, audited)
        self.measure: str | None = None
        self.sequences = 0
        self.left_out: Counter[str] = Counter()
        self._histograms = {name: LogHistogram() for name in ("kl", "tv", "k1", "k2", "k3", "mismatch")}
        self._all = _Sums()
        self._by_step: dict[int, _Sums] = {}
        self._by_age: dict[int, _Sums] = {}
        self._buckets = np.zeros((len(PROBABILITY_NAMES), 3 + len(_SHOWN_RULES)))

    def add_reward(self, step: int, reward: float) -> None:
        """The reward of one completion."""
        sums = self._step(step)
        sums.reward, sums.rewards = sums.reward + reward, sums.rewards + 1

    def add(self, tokens: Tokens) -> None:
        """Count some more tokens."""
        if not len(tokens):
            return
        if self.measure not in (None, tokens.measure):
            raise RunError("some completions have `top_ids` and some have not: log them for all or for none.")
        self.measure = tokens.measure
        self.thresholds.add(tokens)
        part = _token_columns(tokens)
        self._all.add(part, slice(None))
        for name, histogram in self._histograms.items():
            values = np.abs(part[name])
            histogram.add(values[~np.isnan(values)])
        for step in np.unique(tokens.step).tolist():
            self._step(step).add(part, tokens.step == step)
        if tokens.age is not None:
            ages = np.clip(tokens.age, 0, _OLDEST)
            for age in np.unique(ages[~np.isnan(ages)]).astype(int).tolist():
                self._by_age.setdefault(age, _Sums()).add(part, ages == age)
        self._add_buckets(tokens)

    def _step(self, step: int) -> _Sums:
        if step not in self._by_step and len(self._by_step) >= _MOST_STEPS:
            raise RunError(f"there are more than {_MOST_STEPS:,} steps. Is `step` the number of the completion? Leave it out.")
        return self._by_step.setdefault(step, _Sums())

    def _add_buckets(self, tokens: Tokens) -> None:
        """Per bucket of old probability: tokens, sum of TV, tokens outside the KL ball, tokens that each rule blocks."""
        place = np.digitize(np.exp(tokens.logp_old), PROBABILITY, right=True)
        scores = {family.name: family.score(tokens) for family in FAMILIES if family.name in _SHOWN_RULES}
        columns = [np.ones(len(tokens)), tokens.tv, (tokens.kl > self.thresholds.kl_bound).astype(float)]
        columns += [(score > _SHOWN_RULES[name]).astype(float) for name, score in scores.items() if score is not None]
        for index, column in enumerate(columns):
            self._buckets[:, index] += np.bincount(place, weights=column, minlength=len(PROBABILITY_NAMES))

    def summary(self) -> StreamSummary:
        """Everything counted so far; a RunError if that is nothing."""
        if self.measure is None:
            raise NothingYet("there is no token to audit: no completion has one that was trained on and has finite log-probs.")
        by_step = [{"step": step, **sums.row()} for step, sums in sorted(self._by_step.items()) if sums.tokens]
        total = self._all.row()
        return StreamSummary(
            measure=self.measure,
            tokens=self._all.tokens,
            sequences=self.sequences,
            steps=len(by_step),
            kl_bound=self.thresholds.kl_bound,
            tv_bound=self.thresholds.tv_bound,
            ess=total["ess"],
            distances={name: one.spread() for name, one in self._histograms.items() if one.count},
            k1=total["k1"],
            thresholds=self.thresholds.rows(),
            by_step=by_step,
            by_age=[{"age": age, "older": age == _OLDEST, **sums.row()} for age, sums in sorted(self._by_age.items())],
            by_probability=[
                dict(
                    zip(
                        ("name", "tokens", "tv", "outside", *_SHOWN_RULES),
                        (name, int(row[0]), *(value / row[0] for value in row[1:])),
                        strict=True,
                    )
                )
                for name, row in zip(PROBABILITY_NAMES, self._buckets.tolist(), strict=True)
                if row[0]
            ],
            alarms=_find_alarms(by_step),
            left_out=dict(self.left_out),
        )


def _token_columns(tokens: Tokens) -> dict[str, Floats]:
    """Per token: weight new/behaviour, the estimates k1, k2, k3 of KL(old‖new), divergences, mismatch, entropy."""
    log_ratio = tokens.logp_new - tokens.logp_old
    gap = np.full(len(tokens), np.nan)
    reported = ~np.isnan(tokens.logp_rollout)
    gap[reported] = sampled_tv(tokens.logp_rollout[reported], tokens.logp_old[reported])
    return {
        "weight": np.exp(np.minimum(tokens.logp_new - tokens.anchor, 20.0)),
        "k1": -log_ratio,
        "k2": 0.5 * log_ratio**2,
        "k3": np.expm1(np.minimum(log_ratio, 20.0)) - np.minimum(log_ratio, 20.0),
        "kl": tokens.kl,
        "tv": tokens.tv,
        "mismatch": gap,
        "entropy": np.full(len(tokens), np.nan) if tokens.entropy is None else tokens.entropy,
    }


def _find_alarms(by_step: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the guard of corral's own runs would have said, and at which step. Rewards count as success within [0, 1] alone."""
    watch, found = CollapseWatch(CollapseLimits()), []
    shares = all(row["reward"] is None or 0 <= row["reward"] <= 1 for row in by_step)
    for row in by_step:
        line = {"tr/kl_before": row["k3"], "tr/ess": row["ess"], "entropy": row["entropy"]}
        for finding in watch.observe(line | ({"success": row["reward"]} if shares else {})):
            found.append({"step": row["step"], "sentence": finding.sentence, "collapse": finding.collapse})
    return found
