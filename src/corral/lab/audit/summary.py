"""Statistics of an audit: divergences, how many tokens each rule blocks, false alarms and misses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from corral.divergence import binary_tv

Column = NDArray[Any]
Row = dict[str, Any]

VERDICTS = ("clipped", "dppo_binary", "dppo_topk", "troll")
"""Columns that say who acts on a token."""

# ≤ at every edge but the last, so that the buckets end with "≥ .99".
PROBABILITY = (1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9, float(np.nextafter(0.99, 0)))
PROBABILITY_NAMES = ("≤ 1e-4", "1e-4 … 1e-3", "1e-3 … .01", ".01 … .1", ".1 … .5", ".5 … .9", ".9 … .99", "≥ .99")
_ENTROPY = (0.01, 0.1, 0.5, 1.0, 2.0)
_ENTROPY_NAMES = ("≤ .01", ".01 … .1", ".1 … .5", ".5 … 1", "1 … 2", "> 2")
_SIGNS = ("negative", "zero", "positive")

_RARE = 0.01
"""Old probability up to which a token counts as rare."""

_BLOCKED_TOKENS = 20
"""How many of the tokens that are blocked most often are listed."""


@dataclass(frozen=True, kw_only=True)
class Ball:
    """Tokens inside and outside a ball of true divergence, against one verdict. The first four are all tokens."""

    blocked_inside: int
    """Stopped though near: clipping's false alarms."""
    blocked_outside: int
    passed_inside: int
    passed_outside: int
    passed_outward: int
    """Of those, tokens whose update pushes them further out: what clipping misses. The others are on their way back."""

    @property
    def blocked(self) -> int:
        """Inside or outside."""
        return self.blocked_inside + self.blocked_outside

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.blocked + self.passed_inside + self.passed_outside


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All numbers of an audit."""

    tokens: int
    sequences: int
    updates: int
    """Moments at which the policy was compared with the old one."""
    kl: Row
    """`mean`, `p999` and `max` of KL(new‖old)."""
    tv: Row
    mismatch: Row | None
    """The same of |p_old − p_rollout| on sampled tokens; None where the sampler reported nothing."""
    verdicts: Mapping[str, Row]
    """By verdict: `share` of tokens, and `kl` and `tv`, the Ball of each radius."""
    troll_tv: float
    """How far TROLL moves a token that it projects, in TV; 0 if none."""
    rare: Row
    """Of tokens with p_old ≤ .01: `tokens`, how many are `blocked` by clipping, and the mean true `tv` of those."""
    by_probability: list[Row]
    by_entropy: list[Row]
    by_sign: list[Row]
    by_update: list[Row]
    blocked_tokens: list[Row]


def table_columns(table: pa.Table) -> dict[str, Column]:
    """NumPy columns; what is null is NaN."""
    return {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}


def summarise(table: pa.Table, rules: Mapping[str, Any]) -> Summary:
    """Statistics of an audit's rows, with the bounds of its own rules."""
    columns = table_columns(table)
    pairs = np.unique(np.stack([columns["update"], columns["sequence"]]), axis=1)
    p_old = np.exp(columns["logp_old"].astype(float))
    reported = ~np.isnan(columns["logp_rollout"])
    gap = binary_tv(*(torch.from_numpy(columns[name][reported]) for name in ("logp_rollout", "logp_old"))).numpy()
    projected = columns["troll_tv"][columns["troll"]]
    sign = np.sign(columns["advantage"]).astype(int) + 1
    return Summary(
        tokens=len(table),
        sequences=pairs.shape[1],
        updates=len(np.unique(columns["update"])),
        kl=spread(columns["kl"]),
        tv=spread(columns["tv"]),
        mismatch=spread(gap) if len(gap) else None,
        verdicts={
            name: {
                "share": float(columns[name].mean()),
                "kl": classify(columns, columns[name], outside_ball(columns, rules, "kl")),
                "tv": classify(columns, columns[name], outside_ball(columns, rules, "tv")),
            }
            for name in VERDICTS
        },
        troll_tv=float(projected.mean()) if len(projected) else 0.0,
        rare=_rare_tokens(columns, p_old <= _RARE),
        by_probability=_bucket_rows(columns, np.digitize(p_old, PROBABILITY, right=True), PROBABILITY_NAMES),
        by_entropy=_bucket_rows(columns, np.digitize(columns["entropy"], _ENTROPY, right=True), _ENTROPY_NAMES),
        by_sign=_bucket_rows(columns, sign, _SIGNS),
        by_update=_update_rows(columns),
        blocked_tokens=_blocked_token_rows(columns, rules),
    )


def spread(values: Column) -> Row:
    """Mean, 99.9th percentile (a value that occurs) and maximum."""
    values = values.astype(float)
    return {
        "mean": float(values.mean()),
        "p999": float(np.quantile(values, 0.999, method="higher")),
        "max": float(values.max()),
    }


def token_kinds(columns: Mapping[str, Column], blocked: Column, outside: Column) -> Column:
    """The kind of each token: blocked inside or outside the ball, passed inside it, or passed outside and pushed out or back.

    `false` and `missed` are a rule's errors, `right`, `passed` and `back` are not.
    """
    outward = (columns["logp_new"] - columns["logp_old"]) * columns["advantage"] > 0
    return np.select(
        [blocked & ~outside, blocked & outside, outside & outward, outside], ["false", "right", "missed", "back"], "passed"
    )


def outside_ball(columns: Mapping[str, Column], rules: Mapping[str, Any], ball: str) -> Column:
    """Which tokens went further than the radius of the `kl` or the `tv` ball."""
    return columns[ball] > np.float32(rules[f"{ball}_bound"])


def classify(columns: Mapping[str, Column], blocked: Column, outside: Column) -> Ball:
    """How many there are of each kind."""
    counted = dict(zip(*np.unique(token_kinds(columns, blocked, outside), return_counts=True), strict=True))
    false, right, missed, back, passed = (int(counted.get(kind, 0)) for kind in ("false", "right", "missed", "back", "passed"))
    return Ball(
        blocked_inside=false,
        blocked_outside=right,
        passed_inside=passed,
        passed_outside=missed + back,
        passed_outward=missed,
    )


def _bucket_rows(columns: Mapping[str, Column], index: Column, names: tuple[str, ...]) -> list[Row]:
    """One row per bucket that has tokens."""
    return [{"name": name, **_numbers(columns, index == place)} for place, name in enumerate(names) if (index == place).any()]


def _rare_tokens(columns: Mapping[str, Column], rare: Column) -> Row:
    """How many there are, how many of them clipping blocks, and how far those really went."""
    blocked = rare & columns["clipped"]
    moved = columns["tv"][blocked].astype(float)
    return {"tokens": int(rare.sum()), "blocked": int(blocked.sum()), "tv": float(moved.mean()) if len(moved) else 0.0}


def _update_rows(columns: Mapping[str, Column]) -> list[Row]:
    """One row per audited update."""
    return [
        {"update": int(update), **_numbers(columns, columns["update"] == update)} for update in np.unique(columns["update"])
    ]


def _blocked_token_rows(columns: Mapping[str, Column], rules: Mapping[str, Any]) -> list[Row]:
    """The tokens that clipping blocks most often, and how many of those blocks were inside the KL ball."""
    clipped, inside = columns["clipped"], ~outside_ball(columns, rules, "kl")
    ids, counts = np.unique(columns["token"][clipped], return_counts=True)
    rows = []
    for token, count in sorted(zip(ids, counts, strict=True), key=lambda pair: (-pair[1], pair[0]))[:_BLOCKED_TOKENS]:
        here = columns["token"] == token
        blocked = here & clipped
        rows.append(
            {
                "token": int(token),
                "text": str(columns["text"][here.argmax()]),
                "seen": int(here.sum()),
                "blocked": int(count),
                "inside": int((blocked & inside).sum()),
                "p_old": float(np.exp(columns["logp_old"][blocked].astype(float)).mean()),
                "tv": float(columns["tv"][blocked].mean()),
            }
        )
    return rows


def _numbers(columns: Mapping[str, Column], here: Column) -> Row:
    """How many tokens, how far they went, and on which share each rule acts."""
    return {
        "tokens": int(here.sum()),
        "kl": spread(columns["kl"][here]),
        "tv": spread(columns["tv"][here]),
        **{name: float(columns[name][here].mean()) for name in VERDICTS},
    }
