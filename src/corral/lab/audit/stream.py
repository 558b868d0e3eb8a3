"""The streaming audit: tallies over completions of any size in constant memory, with a random sample of tokens."""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.lab.audit.dump import Dump, FilePlace, Floats, LoggedCompletion, read_completions
from corral.lab.audit.folder import NothingYet
from corral.lab.audit.rules import Rules
from corral.lab.audit.summary import PROBABILITY, PROBABILITY_NAMES
from corral.lab.audit.threshold import FAMILIES, RuleFamily, Threshold, ThresholdTally, clip_family
from corral.lab.audit.tokens import Tokens, join_completions, sampled_tv
from corral.lab.run.guard import CollapseLimits, CollapseWatch
from corral.validate import RunError

ACCURACY = 0.01
"""Relative error of a quantile at most."""

_LOWEST, _HIGHEST = 1e-9, 1e9
_GROWTH = math.log((1 + ACCURACY) / (1 - ACCURACY))
_BINS = math.ceil(math.log(_HIGHEST / _LOWEST) / _GROWTH)


class LogHistogram:
    """Values ≥ 0, of which bins count how many there are: bin i holds (a γⁱ⁻¹, a γⁱ] with γ = (1 + α)/(1 − α).

    Mean and maximum are exact, a quantile is within α = 1 % of a value that occurs; what is below 1e-9 counts as 0.

    Ref:
        Masson et al. 2019, "DDSketch", with fixed bins. Invariant: |quantile − exact| ≤ 0.01 · exact.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(_BINS + 1, dtype=np.int64)  # bin 0 is for what counts as 0
        self.total, self.largest = 0.0, 0.0

    @property
    def count(self) -> int:
        """How many values there are."""
        return int(self.counts.sum())

    def add(self, values: NDArray[np.float64]) -> None:
        """Count some more; infinities are above every number."""
        if not len(values):
            return
        place = np.ceil(np.log(np.clip(values, _LOWEST, _HIGHEST) / _LOWEST) / _GROWTH).astype(np.int64).clip(0, _BINS)
        self.counts += np.bincount(place, minlength=_BINS + 1)
        self.total += float(values.sum())
        self.largest = max(self.largest, float(values.max()))

    def quantile(self, share: float) -> float:
        """The smallest value that is not below this share of the others, up to 1 %."""
        rank = math.ceil(share * (self.count - 1))
        place = int(np.searchsorted(self.counts.cumsum(), rank, side="right"))
        if place in (0, _BINS):
            return self.largest if place else 0.0
        upper = _LOWEST * math.exp(place * _GROWTH)
        return min(upper * (1 - ACCURACY), self.largest)

    def spread(self) -> dict[str, float]:
        """Mean, percentiles and largest."""
        count = self.count
        return {
            "mean": self.total / count if count else 0.0,
            "p50": self.quantile(0.5) if count else 0.0,
            "p99": self.quantile(0.99) if count else 0.0,
            "p999": self.quantile(0.999) if count else 0.0,
            "max": self.largest,
        }


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


_MOST = 24
_LONGEST = 600
"""Tokens of one completion that are kept."""


class Sample:
    """The completions with the most errors so far: tokens blocked inside the KL ball, and tokens missed outside it."""

    def __init__(self, kl_bound: float, rule: RuleFamily) -> None:
        self.kl_bound, self.rule = kl_bound, rule
        self._kept: list[tuple[int, int, dict[str, NDArray[Any]]]] = []
        self._seen = 0

    def add(self, completions: Sequence[LoggedCompletion], tokens: Tokens) -> None:
        """Completions, and their tokens joined."""
        score = self.rule.score(tokens)
        assert score is not None
        blocked, outside = score > self.rule.bounds[0], tokens.kl > self.kl_bound
        outward = (tokens.logp_new - tokens.logp_old) * tokens.advantage > 0
        wrong = np.where(blocked, ~outside, outside & outward)
        start = 0
        for one in completions:
            stop = start + len(one.tokens)
            errors, order = int(wrong[start:stop].sum()), -self._seen  # of equals the first
            if len(self._kept) < _MOST or (errors, order) > self._kept[0][:2]:
                last = min(stop, start + _LONGEST)
                item = (errors, order, self._columns(one, tokens, blocked, slice(start, last)))
                (heapq.heappush if len(self._kept) < _MOST else heapq.heapreplace)(self._kept, item)
            self._seen += 1
            start = stop

    def _columns(
        self, one: LoggedCompletion, tokens: Tokens, blocked: NDArray[np.bool_], here: slice
    ) -> dict[str, NDArray[Any]]:
        count = here.stop - here.start
        positions = np.arange(count) if one.positions is None else one.positions[:count] - one.positions[0]
        fixed = {"update": np.full(count, one.step), "sequence": np.full(count, self._seen), "position": positions}
        # Copies: a view would keep all tokens of its batch in memory.
        columns = {
            name: getattr(tokens, name)[here].copy() for name in ("token", "advantage", "logp_old", "logp_new", "kl", "tv")
        }
        return {**fixed, **columns, "clipped": blocked[here].copy()}

    def columns(self) -> dict[str, NDArray[Any]]:
        """All of them one after the other, as an audit's table has its columns, but for `text`."""
        kept = [columns for _, _, columns in sorted(self._kept, key=lambda item: -item[1])]
        return {name: np.concatenate([columns[name] for columns in kept]) for name in kept[0]} if kept else {}


def with_texts(columns: Mapping[str, NDArray[Any]], texts: Mapping[int, str] | None) -> dict[str, NDArray[Any]]:
    """The columns and what each token says; without a tokenizer its id."""
    ids = columns["token"].tolist()
    said = [f"{token} " if texts is None else texts[token] for token in ids]
    return {**columns, "text": np.array(said, dtype=object)}


Columns = dict[str, NDArray[Any]]

_AT_ONCE = 1 << 16
"""Tokens whose statistics are computed together."""


def audit_dump(dump: Dump, rules: Rules, progress: Callable[[int], object]) -> tuple[StreamSummary, Columns]:
    """Statistics of everything that was logged, and a few completions as columns of their tokens.

    Args:
        rules: the clip range that is audited, and the radii of the balls that tokens are held against.
        progress: told how many bytes were read.
    """
    audit = DumpAudit(rules)
    audit.read(dump, progress)
    return audit.result()


class DumpAudit:
    """What was counted of a dump so far, and how far its files were read."""

    def __init__(self, rules: Rules) -> None:
        bounds = rules.clip.config.bounds
        assert bounds is not None, "whatever clips has a range"
        self.rules, self._audited = rules, clip_family(*bounds)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._tally = Tally(self.rules.kl_bound, self.rules.tv_bound, self._audited)
        self._sample = Sample(self.rules.kl_bound, self._audited)
        self._places: dict[Path, FilePlace] = {}
        self._format: str | None = None

    def read(self, dump: Dump, progress: Callable[[int], object], *, growing: bool = False) -> bool:
        """Count what was not read yet; whether there was any. A dump whose files were replaced is read anew.

        Args:
            growing: whether more is to come, so that what is only half written is left for the next time.
        """
        if self._format not in (None, dump.format) or any(
            path in self._places and path.stat().st_size < self._places[path].bytes for path in dump.files
        ):
            self.clear()
        self._format = dump.format
        before, waiting, size = self._tally.sequences, list[LoggedCompletion](), 0
        for completion in read_completions(dump, progress, self._note, self._places, growing=growing):
            self._tally.left_out.update(completion.left_out)
            if not len(completion.tokens):
                self._note("completions without a token to audit")
                continue
            self._tally.sequences += 1
            if completion.reward is not None:
                self._tally.add_reward(completion.step, completion.reward)
            waiting.append(completion)
            size += len(completion.tokens)
            if size >= _AT_ONCE:
                self._count(waiting)
                waiting, size = [], 0
        if waiting:
            self._count(waiting)
        return self._tally.sequences != before

    def result(self) -> tuple[StreamSummary, Columns]:
        """Statistics so far, and a few completions as columns of their tokens; `NothingYet` if there are none."""
        return self._tally.summary(), self._sample.columns()

    def _note(self, what: str) -> None:
        self._tally.left_out[what] += 1

    def _count(self, completions: list[LoggedCompletion]) -> None:
        tokens = join_completions(completions)
        self._tally.add(tokens)
        self._sample.add(completions, tokens)
