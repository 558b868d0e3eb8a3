"""Statistics of an audit, summed up token by token: means, percentiles, and the completions with the most errors."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from corral.lab.audit.dump import Dump, FilePlace, read_completions
from corral.lab.audit.folder import NothingYet
from corral.lab.audit.rules import Rules
from corral.lab.audit.threshold import FAMILIES, Ball, RuleFamily, Threshold, ThresholdTally, fewest_errors, range_rule
from corral.lab.audit.tokens import VERDICTS, kinds, make_tokens, sampled_tv
from corral.lab.run.guard import CollapseLimits, CollapseWatch
from corral.validate import RunError

Row = dict[str, Any]

PROBABILITY = (1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9, float(np.nextafter(0.99, 0)))
"""Upper edges of the buckets of a sampled token's old probability. The last bucket is "≥ .99"."""
PROBABILITY_NAMES = ("≤ 1e-4", "1e-4 … 1e-3", "1e-3 … .01", ".01 … .1", ".1 … .5", ".5 … .9", ".9 … .99", "≥ .99")
_RARE = 3
"""Number of buckets of old probability that hold rare tokens, of probability 0.01 or less. They are the first buckets."""
_ENTROPY = (0.01, 0.1, 0.5, 1.0, 2.0)
_ENTROPY_NAMES = ("≤ .01", ".01 … .1", ".1 … .5", ".5 … 1", "1 … 2", "> 2")
_SIGN_NAMES = ("negative", "zero", "positive")

SHOWN_RULES = {"clip": "clip 1 ± 0.2", "dppo_tv": "DPPO TV 0.2", "dppo_kl": "DPPO KL 0.05"}
"""Mapping from rule, at its published bound, to the rule's name in the table by old probability."""

_OLDEST = 32
"""Age of tokens, in steps, in the last row of the table by age. The row also counts all older tokens."""
_MOST_STEPS = 100_000
_BLOCKED_TOKENS = 20
"""Number of vocabulary tokens that are listed as most often blocked by clipping."""
_AT_ONCE = 1 << 16
"""Number of tokens whose statistics are computed at a time."""
_MOST = 24
"""Number of completions that an audit shows token by token."""
_LONGEST = 600
"""Largest number of tokens stored for each completion that is shown."""


class Sums:
    """Running count, sum and maximum of each column of a table, grouped by integer keys. NaN is skipped."""

    def __init__(self) -> None:
        self.count: Any = None
        """Number of values by key, as a data frame. None before the first values, like `sum` and `max`."""
        self.sum: Any = None
        self.max: Any = None

    def add(self, keys: Sequence[pd.Series], values: pd.DataFrame) -> None:
        """Add a table of values, grouped by integer keys, to the running sums."""

        def merge(before: Any, more: pd.DataFrame) -> Any:
            return pd.concat([before, more]).groupby(level=[*range(len(keys))])

        here = values.groupby([*keys])
        self.count, self.sum = merge(self.count, here.count()).sum(), merge(self.sum, here.sum()).sum()
        self.max = merge(self.max, here.max()).max()


ACCURACY = 0.001
"""Largest relative error of an audit's percentiles."""
_LOWEST, _HIGHEST = 1e-9, 1e9


class Spreads:
    """Mean, percentiles and maximum of values ≥ 0, grouped by an integer key, from bins of 0.1 % relative width.

    Mean and maximum are exact. A percentile is the largest value in its bin: a value that occurs, and exact if it is alone.

    Ref:
        Masson et al. 2019, "DDSketch", with fixed bins. Invariant: exact ≤ quantile ≤ 1.001 · exact from 1e-9 to 1e9.
    """

    def __init__(self) -> None:
        self._bins = Sums()

    def add(self, keys: pd.Series, values: pd.Series) -> None:
        """Add values, grouped by integer keys. Infinities count as the largest values, and NaN is skipped."""
        keys, values = keys[values.notna()], values[values.notna()]
        place = np.ceil(np.log(values.clip(_LOWEST, _HIGHEST) / _LOWEST) / math.log1p(ACCURACY))
        self._bins.add([keys.rename("key"), place.rename("bin")], values.to_frame("value"))

    def row(self, key: int = 0) -> dict[str, float] | None:
        """Return `mean`, `p50`, `p99`, `p999` (percentiles) and `max` of a key's values, or None for a key without values."""
        if self._bins.count is None or key not in self._bins.count.index:
            return None
        count, total, largest = (table.loc[key, "value"].to_numpy() for table in vars(self._bins).values())
        reached = count.cumsum()

        def quantile(share: float) -> float:
            """Compute the quantile of the values at `share`, from 0 to 1, with a relative error of at most 0.1 %."""
            return float(largest[np.searchsorted(reached, math.ceil(share * (reached[-1] - 1)), side="right")])

        shares = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}
        return {"mean": float(total.sum() / reached[-1]), **{name: quantile(share) for name, share in shares.items()}}


@dataclass(frozen=True, kw_only=True)
class Audit:
    """All numbers of an audit, and a description of the audited data."""

    info: Mapping[str, Any]
    """Content of audit.json, or a mapping with the same keys for a dump: `rules`, `what` was compared, `settings`, …."""
    measure: str
    """Distributions that divergences are computed on: "sampled", "support" or "whole".

    These are the sampled token against all others, the logged top-k tokens and the remaining probability, or the whole
    vocabulary."""
    tokens: int
    sequences: int
    steps: int
    """Number of different training steps among the audited tokens."""
    kl_bound: float
    tv_bound: float
    ess: float
    """Effective sample size (Σw)² / (n Σw²) as a share of all n tokens, with w = π_new / π_behaviour; 1 on-policy."""
    distances: Mapping[str, Mapping[str, float]]
    """Mapping from distance (kl, tv, k1 for |k1|, k2, k3, mismatch with the sampler) to its mean, percentiles and maximum."""
    k1: float
    """Mean of log π_old − log π_new (the k1 estimate of KL), which can be negative."""
    verdicts: Mapping[str, Mapping[str, Ball]]
    """Mapping from each rule that acts on tokens to the counts of tokens inside and outside the `kl` and `tv` balls."""
    thresholds: list[Threshold]
    troll_tv: float
    """Mean TV by which TROLL's projection moves the policy at projected tokens; 0 if no token is projected."""
    rare: Row
    """Numbers on rare tokens, with p_old ≤ .01: `tokens`, tokens `blocked` by clipping, and mean `tv` of blocked tokens."""
    by_step: list[Row]
    by_age: list[Row]
    by_probability: list[Row]
    by_entropy: list[Row]
    by_sign: list[Row]
    blocked_tokens: list[Row]
    """Vocabulary tokens that clipping blocks most often, with the number of blocked occurrences inside the KL ball."""
    alarms: list[Row]
    """Training steps with a sign of collapse, each with the sentence of `corral train`'s collapse guard."""
    left_out: Mapping[str, int]
    completions: Sequence[tuple[int, pd.DataFrame]]
    """Completions with the most clipping errors, as (length, first tokens), in order of arrival.

    An error is a token blocked inside the KL ball or missed outside it."""
    texts: Mapping[int, str] = field(default_factory=dict)
    """Mapping from token id to the token's text."""
    rows: pd.DataFrame | None = None
    """Table of all audited tokens; None for a dump, whose tokens are not kept in memory."""

    @property
    def whole(self) -> bool:
        """True if divergences are over the whole vocabulary. Otherwise they are lower bounds."""
        return self.measure == "whole"

    @property
    def best(self) -> list[Threshold]:
        """For each rule, the threshold with the fewest errors against the KL ball."""
        return fewest_errors(self.thresholds)

    def text(self, token: int) -> str:
        """Return the text of a token, or its id if the text is unknown."""
        return self.texts.get(token, f"{token} ")

    def as_dict(self) -> Row:
        """Return all numbers of the audit as a mapping for JSON."""
        numbers = {name: value for name, value in vars(self).items() if name not in ("info", "completions", "texts", "rows")}
        verdicts = {
            rule: {"share": balls["kl"].share, **{name: vars(ball) for name, ball in balls.items()}}
            for rule, balls in self.verdicts.items()
        }
        return {**numbers, "verdicts": verdicts, "thresholds": [row.as_dict() for row in self.thresholds], **self.info}


class Tally:
    """Running statistics of an audit, fed with tables of tokens. Memory grows by some hundred bytes per training step."""

    def __init__(self, kl_bound: float, tv_bound: float, families: Sequence[RuleFamily] = FAMILIES) -> None:
        self.thresholds = ThresholdTally(kl_bound, tv_bound, families)
        self.measure: str | None = None
        self.sequences = 0
        self.left_out: Counter[str] = Counter()
        self._groups = {name: Sums() for name in ("all", "step", "age", "probability", "entropy", "sign", "token")}
        self._spreads: defaultdict[tuple[str, str], Spreads] = defaultdict(Spreads)
        self._kept: list[tuple[int, int, int, pd.DataFrame]] = []
        """Completions with the most clipping errors, as (−errors, number, length, first tokens)."""

    def add(self, tokens: pd.DataFrame, measure: str) -> None:
        """Add a table of tokens, sorted by completion, to the statistics. `measure` names how divergences were computed."""
        self.measure = measure
        self.thresholds.add(tokens)
        values = _statistics(tokens, self.thresholds.kl_bound)
        keys = {
            "all": pd.Series(0, tokens.index),
            "step": tokens["step"],
            "age": tokens["age"].clip(0, _OLDEST),
            "probability": pd.cut(values["p_old"], [-np.inf, *PROBABILITY, np.inf], labels=False),
            "entropy": pd.cut(tokens["entropy"], [-np.inf, *_ENTROPY, np.inf], labels=False),
            "sign": np.sign(tokens["advantage"]) + 1,
            "token": tokens["token"],
        }
        for group, key in keys.items():
            self._groups[group].add([key], values[_BLOCKED] if group == "token" else values)
            if group == "token" or (group == "step" and measure != "whole"):
                continue  # a percentile takes memory, and a dump may have a hundred thousand steps
            for name in _DISTANCES if group == "all" else ("kl", "tv"):
                self._spreads[group, name].add(key, values[_DISTANCES[name]])
        if len(self._groups["step"].count) > _MOST_STEPS:
            raise RunError(f"there are more than {_MOST_STEPS:,} steps. Is `step` the number of the completion? Leave it out.")
        self._keep_completions(tokens)

    def _keep_completions(self, tokens: pd.DataFrame) -> None:
        """Number new completions, and store the completions with the most clipping errors. On a tie, the earliest stay."""
        number = self.sequences + (tokens[["step", "sequence"]].diff() != 0).any(axis=1).cumsum()
        wrong = pd.Series(np.isin(kinds(tokens, "kl", self.thresholds.kl_bound), ("false", "missed")), tokens.index)
        errors = wrong.groupby(number).sum().nlargest(_MOST)
        for place, wrong_tokens in errors.items():
            rows = tokens[number == place]
            self._kept.append((-wrong_tokens, place, len(rows), rows[:_LONGEST].copy()))
        self._kept = sorted(self._kept, key=lambda one: one[:2])[:_MOST]
        self.sequences = int(number.iloc[-1])

    def result(self, info: Mapping[str, Any], **more: Any) -> Audit:
        """Build the audit of all tokens added so far. Raises `NothingYet` if there are none."""
        if self.measure is None:
            raise NothingYet("there is no token to audit: no completion has one that was trained on and has finite log-probs.")
        (total,), by_step = self._rows("all"), self._rows("step", "step")
        by_probability = self._rows("probability", "name", PROBABILITY_NAMES)
        rare = [row for row in by_probability if row["name"] in PROBABILITY_NAMES[:_RARE]]
        blocked = sum(row["blocked"] for row in rare)
        distances = {name: row for name in _DISTANCES if (row := self._spreads["all", name].row()) is not None}
        verdicts = VERDICTS if self.measure == "whole" else VERDICTS[:1]
        return Audit(
            info=info,
            measure=self.measure,
            tokens=total["tokens"],
            sequences=self.sequences,
            steps=len(by_step),
            kl_bound=self.thresholds.kl_bound,
            tv_bound=self.thresholds.tv_bound,
            ess=total["ess"],
            distances=distances,
            k1=total["k1"],
            verdicts={name: self.thresholds.balls(f"{name} acts") for name in verdicts},
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
            completions=[(length, tokens) for _, _, length, tokens in sorted(self._kept, key=lambda one: one[1])],
            **more,
        )

    def _rows(self, group: str, label: str = "name", names: Sequence[str] = ()) -> list[Row]:
        """Build the rows of a table by step, age or another key: number of tokens, means, and upper percentiles of KL and TV.

        A mean is None where nothing was reported.
        """
        sums = self._groups[group]
        rows, keys = sums.sum / sums.count, sums.count.index.astype(int)
        rows.insert(0, label, [names[key] for key in keys] if names else keys)
        rows.insert(1, "tokens", sums.count["p_old"])
        squares = rows["weight_squared"]
        ess = (rows["weight"] ** 2 / squares).where(squares > 0, 0.0)  # every ratio may have underflowed
        rows = rows.assign(blocked=sums.count["blocked_tv"], ess=ess, furthest=sums.max["furthest"])
        for name in ("kl", "tv"):
            if (group, name) in self._spreads:
                found = [self._spreads[group, name].row(key) for key in keys]
                rows[[f"{name}_p999", f"{name}_max"]] = pd.DataFrame(found, rows.index, ["p999", "max"])
        return rows.astype(object).where(rows.notna(), None).to_dict("records")

    def _blocked_tokens(self) -> list[Row]:
        """List the vocabulary tokens that clipping blocks most often. Ties go to the lowest token ids."""
        count, total = self._groups["token"].count, self._groups["token"].sum
        rows = pd.DataFrame(
            {"seen": count["p_old"], "blocked": count["blocked_tv"], "inside": total["blocked_inside"].astype(int)}
        )
        rows["p_old"], rows["tv"] = (total[name] / rows["blocked"] for name in ("blocked_p_old", "blocked_tv"))
        most = rows[rows["blocked"] > 0].sort_values("blocked", ascending=False, kind="stable")[:_BLOCKED_TOKENS]
        return most.rename_axis("token").reset_index().astype(object).to_dict("records")


_DISTANCES = {"kl": "kl", "tv": "tv", "k1": "furthest", "k2": "k2", "k3": "k3", "mismatch": "mismatch"}
"""Mapping from distance between the policies to a column of `_statistics`. Distances ≥ 0 have percentiles."""

_BLOCKED = ["p_old", "blocked_inside", "blocked_p_old", "blocked_tv"]
"""Columns that are summed by token id: old probability and blocked tokens."""


def _statistics(tokens: pd.DataFrame, kl_bound: float) -> pd.DataFrame:
    """Compute statistics of each token: ratio new/behaviour, KL estimates k1, k2 and k3, distances, and 1 where a rule acts."""
    log_ratio, weight = tokens["log_ratio"], np.exp((tokens["logp_new"] - tokens["anchor"]).clip(upper=20.0))
    capped, p_old = log_ratio.clip(upper=20.0), np.exp(tokens["logp_old"])
    blocked, outside = tokens["clipped"], tokens["kl"] > kl_bound
    shown = {rule.name: rule.score(tokens) > rule.default for rule in FAMILIES if rule.name in SHOWN_RULES}
    acts = {"outside": outside, **shown, **{name: tokens[name] for name in VERDICTS if name in tokens}}
    return pd.DataFrame(
        {
            "weight": weight,
            "weight_squared": weight**2,
            "k1": -log_ratio,
            "furthest": log_ratio.abs(),
            "k2": 0.5 * log_ratio**2,
            "k3": np.expm1(capped) - capped,
            **{name: tokens[name] for name in ("kl", "tv", "entropy", "reward")},
            "mismatch": sampled_tv(tokens["logp_rollout"], tokens["logp_old"]),
            "p_old": p_old,
            "blocked_inside": (~outside).where(blocked).astype(float),
            "blocked_p_old": p_old.where(blocked),
            "blocked_tv": tokens["tv"].where(blocked),
            "troll_tv": tokens["troll_tv"].where(tokens["troll"]) if "troll" in tokens else np.nan,
            **{name: np.asarray(column, dtype=float) for name, column in acts.items()},
        }
    )


def _find_alarms(by_step: list[Row]) -> list[Row]:
    """Find steps with signs of collapse as `corral train`'s guard does. Rewards count as success only if all are in [0, 1]."""
    watch, found = CollapseWatch(CollapseLimits()), []
    shares = all(row["reward"] is None or 0 <= row["reward"] <= 1 for row in by_step)
    for row in by_step:
        line = {"tr/kl_before": row["k3"], "tr/ess": row["ess"], "entropy": row["entropy"]}
        for finding in watch.observe(line | ({"success": row["reward"]} if shares else {})):
            found.append({"step": row["step"], "sentence": finding.sentence, "collapse": finding.collapse})
    return found


def audit_table(info: Mapping[str, Any], rows: pd.DataFrame) -> Audit:
    """Compute an audit's statistics from the table of tokens that `read_audit` returned."""
    certain = {name: rows[name].clip(upper=0.0) for name in ("logp_old", "logp_new")}
    tokens = make_tokens(rows.rename(columns={"update": "step"}).assign(support_tv=rows["tv_topk"], **certain))
    tally = Tally(info["rules"]["kl_bound"], info["rules"]["tv_bound"])
    tally.left_out.update(info.get("left_out") or {})
    tally.add(tokens, "whole")
    texts = dict(zip(rows["token"].tolist(), rows["text"].tolist(), strict=True))
    return tally.result({key: value for key, value in info.items() if key != "left_out"}, texts=texts, rows=tokens)


class DumpAudit:
    """Audit of logged completions, whose files may still grow: running statistics, and the position in each file."""

    def __init__(self, rules: Rules) -> None:
        assert rules.clip.config.bounds is not None, "whatever clips has a range"
        self.rules, self._clip = rules, range_rule(*rules.clip.config.bounds)
        self._tally = Tally(self.rules.kl_bound, self.rules.tv_bound, (self._clip, *FAMILIES))
        self._places: dict[Path, FilePlace] = {}
        self._format: str | None = None
        """Format of the files that were read; None before the first read."""

    def read(self, dump: Dump, progress: Callable[[int], object], *, growing: bool = False) -> bool:
        """Read and count new completions of a dump. Returns True if there were any. If files were replaced, all are read again.

        Args:
            growing: True if the dump may still be written: incomplete lines and files are left for the next call.
        """
        if self._format not in (None, dump.format) or any(
            path in self._places and path.stat().st_size < self._places[path].bytes for path in dump.files
        ):
            self._tally = Tally(self.rules.kl_bound, self.rules.tv_bound, (self._clip, *FAMILIES))
            self._places = {}
        self._format = dump.format
        before, waiting, size = self._tally.sequences, list[pd.DataFrame](), 0

        def note(reason: str, number: int = 1) -> None:
            self._tally.left_out[reason] += number

        for completion in read_completions(dump, progress, note, self._places, growing=growing):
            waiting.append(completion)
            size += len(completion)
            if size >= _AT_ONCE:
                self._count(waiting)
                waiting, size = [], 0
        if waiting:
            self._count(waiting)
        return self._tally.sequences != before

    def _count(self, completions: list[pd.DataFrame]) -> None:
        first = self._tally.sequences
        rows = pd.concat(completions, keys=range(first, first + len(completions)))
        tokens = make_tokens(rows.assign(sequence=rows.index.get_level_values(0)).reset_index(drop=True))
        tokens["clipped"] = self._clip.score(tokens) > 0
        measures = {"support" if known else "sampled" for known in tokens["support_tv"].notna().unique()}
        if measures - {self._tally.measure or min(measures)}:
            raise RunError("some completions have `top_ids` and some have not: log them for all or for none.")
        self._tally.add(tokens, *measures)

    def result(self, dump: Dump, texts: Callable[[list[int]], Mapping[int, str]] = lambda ids: {}) -> Audit:
        """Build the audit of all completions read so far. Raises `NothingYet` without a token. `texts` maps ids to texts."""
        rules = self.rules.as_dict()
        info = {
            "name": dump.path.resolve().name or "dump",
            "what": dump.form.compared,
            "remarks": dump.remarks,
            "rules": {key: rules[key] for key in ("clip", "own", "kl_bound", "tv_bound")},
            "settings": {"format": dump.format, "files": len(dump.files), "bytes": dump.bytes},
        }
        audit = self._tally.result(info)
        shown = {token for _, one in audit.completions for token in one["token"].tolist()}
        return replace(audit, texts=texts(sorted(shown | {row["token"] for row in audit.blocked_tokens})))
