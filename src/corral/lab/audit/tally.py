"""The engine of every audit: tallies over tokens in constant memory, and the completions with the most errors."""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from corral.lab.audit.dump import FORMATS, Dump, FilePlace, read_completions
from corral.lab.audit.folder import NothingYet, table_columns
from corral.lab.audit.rules import Rules
from corral.lab.audit.threshold import FAMILIES, Threshold, ThresholdTally, outside_range
from corral.lab.audit.tokens import VERDICTS, Floats, Ints, Tokens, audit_tokens, join_tokens, sampled_tv
from corral.lab.run.guard import CollapseLimits, CollapseWatch
from corral.validate import RunError

Row = dict[str, Any]

AUDITED = "audited"
"""Name of the rule that an audit of logged tokens examines."""

PROBABILITY = (1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9, float(np.nextafter(0.99, 0)))
"""Upper edges of the buckets of old probability. The last bucket is "≥ .99"."""
PROBABILITY_NAMES = ("≤ 1e-4", "1e-4 … 1e-3", "1e-3 … .01", ".01 … .1", ".1 … .5", ".5 … .9", ".9 … .99", "≥ .99")
_RARE = 3
"""Number of buckets of rare tokens, with an old probability of 0.01 or less."""
_ENTROPY = (0.01, 0.1, 0.5, 1.0, 2.0)
_ENTROPY_NAMES = ("≤ .01", ".01 … .1", ".1 … .5", ".5 … 1", "1 … 2", "> 2")
_SIGN_NAMES = ("negative", "zero", "positive")

SHOWN_RULES = {"clip": 0.2, "dppo_tv": 0.2, "dppo_kl": 0.05}
"""Rules, with their bounds, whose shares are shown by old probability."""

_OLDEST = 32
"""Number of rows by staleness in steps; the last row counts all older tokens."""
_MOST_STEPS = 100_000
_BLOCKED_TOKENS = 20
"""Number of tokens listed as most often blocked by clipping."""
_AT_ONCE = 1 << 16
"""Number of tokens whose statistics are computed together."""


class Sums:
    """Count, sum and largest value of each column, by an integer key; NaN is skipped."""

    def __init__(self) -> None:
        self.keys: Ints = np.empty(0, dtype=np.int64)
        self.columns: dict[str, Floats] = {}
        """By column name: counts, sums and largest values, [3, number of keys]."""

    def add(self, keys: Ints, columns: Mapping[str, Floats]) -> None:
        """Add values with their keys."""
        before = len(self.keys)
        self.keys, place = np.unique(np.concatenate([self.keys, keys]), return_inverse=True)
        known, here = place[:before], place[before:]
        for name, values in columns.items():
            finite = ~np.isnan(values)
            grown = np.zeros((3, len(self.keys)))
            grown[2] = -np.inf
            if name in self.columns:
                grown[:, known] = self.columns[name]
            grown[0] += np.bincount(here, weights=finite, minlength=len(self.keys))
            grown[1] += np.bincount(here, weights=np.where(finite, values, 0.0), minlength=len(self.keys))
            np.maximum.at(grown[2], here[finite], values[finite])
            self.columns[name] = grown


ACCURACY = 0.001
"""Largest relative error of a percentile."""
_LOWEST, _HIGHEST = 1e-9, 1e9
_BINS = math.ceil(math.log(_HIGHEST / _LOWEST) / math.log1p(ACCURACY)) + 1


class Spreads:
    """Mean, percentiles and largest of values ≥ 0, by an integer key, from bins of 0.1 % relative width.

    Mean and maximum are exact. A percentile is the largest value in its bin: a value that occurs, and exact if it is alone.

    Ref:
        Masson et al. 2019, "DDSketch", with fixed bins. Invariant: exact ≤ quantile ≤ 1.001 · exact from 1e-9 to 1e9.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._bins = Sums()

    def add(self, keys: Ints, values: Floats) -> None:
        """Add values with their keys; infinities count as above every number, and NaN is skipped."""
        known = ~np.isnan(values)
        found, place = np.unique(keys[known], return_inverse=True)
        first = np.array([self._places.setdefault(key, len(self._places)) for key in found.tolist()], dtype=np.int64)
        steps = np.log(np.clip(values[known], _LOWEST, _HIGHEST) / _LOWEST) / math.log1p(ACCURACY)
        self._bins.add(_BINS * first[place] + np.ceil(steps).astype(np.int64).clip(0, _BINS - 1), {"value": values[known]})

    def row(self, key: int = 0) -> dict[str, float] | None:
        """`mean`, `p50`, `p99`, `p999` and `max` of a key, or None for a key without values."""
        if key not in self._places:
            return None
        first = _BINS * self._places[key]
        start, stop = np.searchsorted(self._bins.keys, [first, first + _BINS])
        counts, sums, largest = self._bins.columns["value"][:, start:stop]
        reached = counts.cumsum()

        def quantile(share: float) -> float:
            """The smallest value at or above this share of all values, with 0.1 % relative error."""
            return float(largest[np.searchsorted(reached, math.ceil(share * (reached[-1] - 1)), side="right")])

        shares = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}
        return {"mean": float(sums.sum() / reached[-1]), **{name: quantile(share) for name, share in shares.items()}}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All numbers of an audit."""

    measure: str
    """Distributions that divergences are computed on, as in `Tokens`."""
    tokens: int
    sequences: int
    steps: int
    """Number of training steps, or of comparisons between policy and old policy."""
    kl_bound: float
    tv_bound: float
    ess: float
    """Effective sample size (Σw)² / (n Σw²) of the tokens' ratios new/behaviour, as a share: 1 when on-policy."""
    distances: Mapping[str, Mapping[str, float]]
    """`mean`, `p50`, `p99`, `p999`, `max` of kl, tv, |k1|, k2, k3, and of the mismatch where the sampler reported."""
    k1: float
    """Mean of log old − log new, which may be negative."""
    verdicts: Mapping[str, Row]
    """By rule that acts on tokens: its `share` of tokens, and its Ball in `kl` and in `tv`."""
    thresholds: list[Threshold]
    troll_tv: float
    """Mean TV by which TROLL moves a projected token, or 0 without projected tokens."""
    rare: Row
    """Rare tokens, with p_old ≤ .01: number of `tokens`, number `blocked` by clipping, and mean `tv` of the blocked tokens."""
    by_step: list[Row]
    by_age: list[Row]
    by_probability: list[Row]
    by_entropy: list[Row]
    by_sign: list[Row]
    blocked_tokens: list[Row]
    """Tokens that clipping blocks most often, and the number of those blocks inside the KL ball."""
    alarms: list[Row]
    """Steps with a sign of collapse, in the sentences of the guard."""
    left_out: Mapping[str, int] = field(default_factory=dict)

    def as_dict(self) -> Row:
        """A mapping for JSON."""
        return {**asdict(self), "thresholds": [row.as_dict() for row in self.thresholds]}


class Tally:
    """Counts of tokens. Memory grows with the number of steps only, by some hundred bytes per step."""

    def __init__(self, kl_bound: float, tv_bound: float) -> None:
        self.thresholds = ThresholdTally(kl_bound, tv_bound)
        self.measure: str | None = None
        self.sequences = 0
        self.left_out: Counter[str] = Counter()
        self._groups = {name: Sums() for name in ("all", "step", "age", "probability", "entropy", "sign", "token")}
        self._spreads: defaultdict[tuple[str, str], Spreads] = defaultdict(Spreads)

    def add(self, tokens: Tokens) -> None:
        """Count the tokens of these completions."""
        if not len(tokens):
            return
        self.measure = tokens.measure
        self.sequences += len(tokens.starts)
        self.thresholds.add(tokens)
        columns = _columns(tokens, self.thresholds.kl_bound)
        keys = {
            "all": np.zeros(len(tokens)),
            "step": tokens.step,
            "age": np.clip(tokens.age, 0, _OLDEST),
            "probability": np.digitize(columns["p_old"], PROBABILITY, right=True),
            "entropy": np.where(np.isnan(tokens.entropy), np.nan, np.digitize(tokens.entropy, _ENTROPY, right=True)),
            "sign": np.sign(tokens.advantage) + 1,
            "token": tokens.token,
        }
        for group, key in keys.items():
            here = ~np.isnan(key)
            names = _BLOCKED if group == "token" else columns
            places = key[here].astype(np.int64)
            self._groups[group].add(places, {name: columns[name][here] for name in names})
            if group == "token" or (group == "step" and tokens.measure != "whole"):
                continue  # a percentile takes memory, and a dump may have a hundred thousand steps
            for name in ("kl", "tv", "furthest", "k2", "k3", "mismatch") if group == "all" else ("kl", "tv"):
                self._spreads[group, name].add(places, columns[name][here])
        if len(self._groups["step"].keys) > _MOST_STEPS:
            raise RunError(f"there are more than {_MOST_STEPS:,} steps. Is `step` the number of the completion? Leave it out.")

    def summary(self) -> Summary:
        """The summary of all tokens so far; raises `NothingYet` if there are none."""
        if self.measure is None:
            raise NothingYet("there is no token to audit: no completion has one that was trained on and has finite log-probs.")
        (total,), by_step = self._rows("all"), self._rows("step", "step")
        by_probability = self._rows("probability", "name", PROBABILITY_NAMES)
        rare = [row for row in by_probability if row["name"] in PROBABILITY_NAMES[:_RARE]]
        blocked = sum(row["blocked"] for row in rare)
        names = {"kl": "kl", "tv": "tv", "k1": "furthest", "k2": "k2", "k3": "k3", "mismatch": "mismatch"}
        distances = {name: self._spreads["all", column].row() for name, column in names.items()}
        verdicts = {name: self.thresholds.verdict(name) for name in VERDICTS if self.measure == "whole" or name == "clipped"}
        return Summary(
            measure=self.measure,
            tokens=total["tokens"],
            sequences=self.sequences,
            steps=len(by_step),
            kl_bound=self.thresholds.kl_bound,
            tv_bound=self.thresholds.tv_bound,
            ess=total["ess"],
            distances={name: row for name, row in distances.items() if row is not None},
            k1=total["k1"],
            verdicts={name: {"share": balls["kl"].blocked / balls["kl"].tokens, **balls} for name, balls in verdicts.items()},
            thresholds=self.thresholds.rows(),
            troll_tv=total["troll_tv"] or 0.0,
            rare={
                "tokens": sum(row["tokens"] for row in rare),
                "blocked": blocked,
                "tv": sum(row["blocked"] * (row["blocked_tv"] or 0.0) for row in rare) / max(blocked, 1),
            },
            by_step=by_step,
            by_age=[{**row, "older": row["age"] == _OLDEST} for row in self._rows("age", "age")],
            by_probability=by_probability,
            by_entropy=self._rows("entropy", "name", _ENTROPY_NAMES),
            by_sign=self._rows("sign", "name", _SIGN_NAMES),
            blocked_tokens=self._blocked_tokens(),
            alarms=_find_alarms(by_step),
            left_out=dict(self.left_out),
        )

    def _rows(self, group: str, label: str = "name", names: Sequence[str] = (), places: Ints | None = None) -> list[Row]:
        """Rows of a group by key, or by the keys at these indices: numbers of tokens, means, tails of KL and TV.

        A mean is None where nothing was reported.
        """
        sums, rows = self._groups[group], []
        for place in range(len(sums.keys)) if places is None else places.tolist():
            key = int(sums.keys[place])
            found = {name: column[:, place].tolist() for name, column in sums.columns.items()}
            row: Row = {label: names[key] if names else key, "tokens": int(found["p_old"][0])}
            row |= {name: total / count if count else None for name, (count, total, _) in found.items()}
            row["blocked"] = int(found["blocked_tv"][0])
            if "weight" in found:
                squares = found["weight_squared"][1] * row["tokens"]
                row["ess"] = found["weight"][1] ** 2 / squares if squares else 0.0  # every ratio may have underflowed
                row["furthest"] = found["furthest"][2]
            for name in ("kl", "tv"):
                if (spread := self._spreads[group, name].row(key)) is not None:
                    row |= {f"{name}_{tail}": spread[tail] for tail in ("p999", "max")}
            rows.append(row)
        return rows

    def _blocked_tokens(self) -> list[Row]:
        """The tokens that clipping blocks most often; ties go to the lowest ids."""
        sums = self._groups["token"]
        places = np.lexsort((sums.keys, -sums.columns["blocked_tv"][0]))[:_BLOCKED_TOKENS]
        return [
            {
                "token": row["token"],
                "seen": row["tokens"],
                "blocked": row["blocked"],
                "inside": round(row["blocked"] * row["blocked_inside"]),
                "p_old": row["blocked_p_old"],
                "tv": row["blocked_tv"],
            }
            for row in self._rows("token", "token", places=places)
            if row["blocked"]
        ]


_BLOCKED = ("p_old", "blocked_inside", "blocked_p_old", "blocked_tv")
"""Columns that are summed by token: old probability and blocked tokens."""


def _columns(tokens: Tokens, kl_bound: float) -> dict[str, Floats]:
    """Columns per token: weight new/behaviour, the estimates k1, k2, k3 of KL(old‖new), distances, and 1 where a rule acts."""
    log_ratio, p_old = tokens.log_ratio, np.exp(tokens.logp_old)
    capped, weight = np.minimum(log_ratio, 20.0), np.exp(np.minimum(tokens.logp_new - tokens.anchor, 20.0))
    scores = {family.name: family.score(tokens) for family in FAMILIES if family.name in SHOWN_RULES}
    blocked, outside = tokens.verdicts["clipped"], tokens.kl > kl_bound
    return {
        "weight": weight,
        "weight_squared": weight**2,
        "k1": -log_ratio,
        "furthest": np.abs(log_ratio),
        "k2": 0.5 * log_ratio**2,
        "k3": np.expm1(capped) - capped,
        "kl": tokens.kl,
        "tv": tokens.tv,
        "mismatch": sampled_tv(tokens.logp_rollout, tokens.logp_old),
        "entropy": tokens.entropy,
        "reward": tokens.reward,
        "p_old": p_old,
        "blocked_inside": np.where(blocked, ~outside, np.nan),
        "blocked_p_old": np.where(blocked, p_old, np.nan),
        "blocked_tv": np.where(blocked, tokens.tv, np.nan),
        "troll_tv": np.where(tokens.verdicts.get("troll", False), tokens.troll_tv, np.nan),
        "outside": outside.astype(float),
        **{name: (score > SHOWN_RULES[name]).astype(float) for name, score in scores.items()},
        **{name: acts.astype(float) for name, acts in tokens.verdicts.items()},
    }


def _find_alarms(by_step: list[Row]) -> list[Row]:
    """Findings of `corral train`'s guard on these steps. Rewards count as success only within [0, 1]."""
    watch, found = CollapseWatch(CollapseLimits()), []
    shares = all(row["reward"] is None or 0 <= row["reward"] <= 1 for row in by_step)
    for row in by_step:
        line = {"tr/kl_before": row["k3"], "tr/ess": row["ess"], "entropy": row["entropy"]}
        for finding in watch.observe(line | ({"success": row["reward"]} if shares else {})):
            found.append({"step": row["step"], "sentence": finding.sentence, "collapse": finding.collapse})
    return found


_MOST = 24
_LONGEST = 600
"""Number of tokens stored per completion."""


class Sample:
    """The completions with the most errors so far: tokens blocked inside the KL ball, and tokens missed outside it."""

    def __init__(self, kl_bound: float) -> None:
        self.kl_bound = kl_bound
        self._kept: list[tuple[int, int, int, Tokens]] = []
        self._seen = 0

    def add(self, tokens: Tokens) -> None:
        """Consider successive whole completions for the sample."""
        wrong = np.isin(tokens.kinds("kl", self.kl_bound), ("false", "missed"))
        starts = tokens.starts.tolist()
        for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
            errors, order = int(wrong[start:stop].sum()), -self._seen  # of equals the first
            if len(self._kept) < _MOST or (errors, order) > self._kept[0][:2]:
                item = (errors, order, stop - start, tokens[start : min(stop, start + _LONGEST)])
                (heapq.heappush if len(self._kept) < _MOST else heapq.heapreplace)(self._kept, item)
            self._seen += 1

    def completions(self) -> list[tuple[int, Tokens]]:
        """Length and first tokens of each completion, in order of arrival."""
        return [(length, tokens) for _, _, length, tokens in sorted(self._kept, key=lambda item: -item[1])]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """An audit: its numbers and its metadata."""

    summary: Summary
    info: Mapping[str, Any]
    """Content of audit.json, or its equal for a dump: `rules`, `what` was compared, `settings`, …."""
    completions: Sequence[tuple[int, Tokens]]
    """Completions with the most errors, as `Sample` keeps them."""
    texts: Mapping[int, str] = field(default_factory=dict)
    """Texts of tokens by id."""
    tokens: Tokens | None = None
    """All tokens, for an audit whose rows are in memory."""

    def text(self, token: int) -> str:
        """The text of a token, or its id if the text is unknown."""
        return self.texts.get(token, f"{token} ")

    def as_dict(self) -> Row:
        """All numbers of the audit as a mapping for JSON."""
        return {**self.summary.as_dict(), **self.info}


def audit_table(info: Mapping[str, Any], table: pa.Table) -> Audit:
    """The audit of a folder's rows, in the form of `read_audit`."""
    columns, rules = table_columns(table), info["rules"]
    tally, sample, tokens = Tally(rules["kl_bound"], rules["tv_bound"]), Sample(rules["kl_bound"]), audit_tokens(columns)
    tally.left_out.update(info.get("left_out") or {})
    tally.add(tokens)
    sample.add(tokens)
    texts = dict(zip(tokens.token.tolist(), columns["text"].tolist(), strict=True))
    about = {key: value for key, value in info.items() if key != "left_out"}
    return Audit(summary=tally.summary(), info=about, completions=sample.completions(), texts=texts, tokens=tokens)


class DumpAudit:
    """The audit of a dump that may grow: the counts so far, and the progress of reading its files."""

    def __init__(self, rules: Rules) -> None:
        assert rules.clip.config.bounds is not None, "whatever clips has a range"
        self.rules, self._range = rules, rules.clip.config.bounds
        self._clear()

    def _clear(self) -> None:
        """Reset all counts."""
        self._tally, self._sample = Tally(self.rules.kl_bound, self.rules.tv_bound), Sample(self.rules.kl_bound)
        self._places: dict[Path, FilePlace] = {}
        self._format: str | None = None

    def read(self, dump: Dump, progress: Callable[[int], object], *, growing: bool = False) -> bool:
        """Count new completions, and return True if there were any. A dump whose files were replaced is read again.

        Args:
            growing: True if the dump may still be written: incomplete lines and files are left for the next call.
        """
        if self._format not in (None, dump.format) or any(
            path in self._places and path.stat().st_size < self._places[path].bytes for path in dump.files
        ):
            self._clear()
        self._format = dump.format
        before, waiting, size = self._tally.sequences, list[Tokens](), 0
        for completion in read_completions(dump, progress, self._note, self._places, growing=growing):
            waiting += [completion] if len(completion) else []
            size += len(completion)
            if size >= _AT_ONCE:
                self._count(waiting)
                waiting, size = [], 0
        if waiting:
            self._count(waiting)
        return self._tally.sequences != before

    def _note(self, reason: str, number: int = 1) -> None:
        self._tally.left_out[reason] += number

    def _count(self, completions: list[Tokens]) -> None:
        if {one.measure for one in completions} - {self._tally.measure or completions[0].measure}:
            raise RunError("some completions have `top_ids` and some have not: log them for all or for none.")
        tokens = join_tokens(completions, self._tally.sequences)
        tokens = replace(tokens, verdicts={"clipped": outside_range(tokens, *self._range)})
        self._tally.add(tokens)
        self._sample.add(tokens)

    def result(self, dump: Dump, texts: Callable[[list[int]], Mapping[int, str]] = lambda ids: {}) -> Audit:
        """The audit so far; raises `NothingYet` if there is no token. `texts` maps token ids to texts."""
        summary, completions = self._tally.summary(), self._sample.completions()
        low, high = self._range
        clip = Threshold(
            family=AUDITED, title=f"Clip, {1 - low:.4g} … {1 + high:.4g}, as audited", symbol="", bound=0.0, default=True,
            **self._tally.thresholds.verdict("clipped"),
        )  # fmt: skip
        summary = replace(summary, thresholds=[clip, *summary.thresholds])
        rules = self.rules.as_dict()
        info = {
            "name": dump.path.resolve().name or "dump",
            "what": FORMATS[dump.format].compared,
            "remarks": dump.remarks,
            "rules": {key: rules[key] for key in ("clip", "own", "kl_bound", "tv_bound")},
            "settings": {"format": dump.format, "files": len(dump.files), "bytes": dump.bytes},
        }
        shown = {token for _, one in completions for token in one.token.tolist()}
        shown |= {row["token"] for row in summary.blocked_tokens}
        return Audit(summary=summary, info=info, completions=completions, texts=texts(sorted(shown)))
