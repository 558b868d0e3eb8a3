"""Audited tokens as columns, from a dump's completions or an audit's rows: the input of rules and statistics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from corral.divergence import binary_kl, binary_tv
from corral.lab.audit.dump import Floats, LoggedCompletion
from corral.numerics import CERTAIN

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

VERDICTS = ("clipped", "dppo_binary", "dppo_topk", "troll")
"""Columns of an audit's rows that mark the tokens on which a rule acts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """Columns [N]. A missing number is NaN; a column without any number may be None."""

    measure: Literal["sampled", "support", "whole"]
    """Distributions of the divergences: the sampled token against all others, a support and its tail, or the whole
    vocabulary."""
    step: Ints
    sequence: Ints
    """Number of the completion within its step or the dump."""
    position: Ints
    token: Ints
    advantage: Floats
    logp_old: Floats
    logp_new: Floats
    logp_rollout: Floats
    entropy: Floats
    reward: Floats
    """Reward of the completion, stored at its first token."""
    age: Floats
    """Number of steps between sampling and training."""
    troll_tv: Floats
    """TV by which TROLL's projection moves the policy."""
    kl: Floats
    """KL(new‖old) on the distributions of `measure`; a lower bound of the true KL unless `measure` is "whole"."""
    tv: Floats
    support_tv: Floats | None = None
    support_kl_old_new: Floats | None = None
    """KL(old‖new) on a support: the divergence of DPPO with divergence="kl"."""
    sequence_log_ratio: Floats | None = None
    """Mean of log new/old over the token's completion, if all of its tokens were logged."""
    verdicts: Mapping[str, Bools] = field(default_factory=dict)
    """Tokens on which each rule acts, by rule; `clipped` is the audited clipping."""

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, here: slice) -> "Tokens":
        """Select tokens, as copies: a view would keep all tokens of its batch in memory."""
        columns: dict[str, Any] = {
            name: column[here].copy() for name, column in vars(self).items() if isinstance(column, np.ndarray)
        }
        return replace(self, **columns, verdicts={name: column[here].copy() for name, column in self.verdicts.items()})

    @property
    def starts(self) -> Ints:
        """Indices at which completions begin."""
        changes = (np.diff(self.step) != 0) | (np.diff(self.sequence) != 0)
        return np.flatnonzero(np.concatenate([[len(self) > 0], changes]))

    @property
    def anchor(self) -> Floats:
        """Log π of the sampler if it was reported, otherwise `logp_old`: the centre of DPPO."""
        return np.where(np.isnan(self.logp_rollout), self.logp_old, self.logp_rollout)

    @property
    def log_ratio(self) -> Floats:
        """Log new/old of the sampled token."""
        return self.logp_new - self.logp_old

    def kinds(self, ball: str, bound: float) -> NDArray[Any]:
        """The kind of each token under `clipped` and the `kl` or `tv` ball, as in `token_kinds`."""
        return token_kinds(self.verdicts["clipped"], vars(self)[ball] > bound, self.log_ratio * self.advantage > 0)


def token_kinds(blocked: Bools, outside: Bools, outward: Bools) -> NDArray[Any]:
    """The kind of each token: blocked inside or outside the ball, passed inside it, or passed outside and pushed out or back.

    `false` and `missed` are a rule's errors, `right`, `passed` and `back` are not.
    """
    return np.select(
        [blocked & ~outside, blocked & outside, outside & outward, outside], ["false", "right", "missed", "back"], "passed"
    )


@dataclass(frozen=True, kw_only=True)
class Ball:
    """Counts of tokens inside and outside a divergence ball under a rule. The first four fields cover all tokens."""

    blocked_inside: int
    """Tokens blocked although near: clipping's false alarms."""
    blocked_outside: int
    passed_inside: int
    passed_outside: int
    passed_outward: int
    """Passed tokens outside whose update pushes them further out: clipping misses them. Other tokens are on their way back."""

    @property
    def blocked(self) -> int:
        """Number of blocked tokens, inside or outside."""
        return self.blocked_inside + self.blocked_outside

    @property
    def tokens(self) -> int:
        """Number of all tokens."""
        return self.blocked + self.passed_inside + self.passed_outside


def join_completions(completions: Sequence[LoggedCompletion], first: int = 0) -> Tokens:
    """Join completions, numbered from `first`. Divergences are taken on the support if all completions have one."""
    lengths = [len(one.tokens) for one in completions]

    def join(name: str) -> Any:
        return np.concatenate([vars(one)[name] for one in completions])

    def join_or_nan(name: str) -> Floats:
        columns = (vars(one)[name] for one in completions)
        return np.concatenate([np.full(n, np.nan) if x is None else x for n, x in zip(lengths, columns, strict=True)])

    old, new = join("logp_old"), join("logp_new")
    support = all(one.support is not None for one in completions)
    kl, kl_old_new, tv = (
        np.concatenate([one.support for one in completions if one.support is not None], axis=1)
        if support
        else (sampled_kl(new, old), None, sampled_tv(new, old))
    )
    reward = np.full(len(old), np.nan)
    for place, one in zip(np.cumsum([0, *lengths]).tolist(), completions, strict=False):
        if len(one.tokens) and one.reward is not None:
            reward[place] = one.reward
    return Tokens(
        measure="support" if support else "sampled",
        step=np.repeat([one.step for one in completions], lengths),
        sequence=np.repeat(np.arange(first, first + len(completions)), lengths),
        position=np.concatenate(
            [np.arange(n) if (p := one.positions) is None else p - p[:1] for n, one in zip(lengths, completions, strict=True)]
        ),
        token=join("tokens"),
        advantage=join("advantages"),
        logp_old=old,
        logp_new=new,
        logp_rollout=join_or_nan("logp_rollout"),
        entropy=join_or_nan("entropy"),
        reward=reward,
        troll_tv=np.full(len(old), np.nan),
        kl=kl,
        tv=tv,
        support_tv=tv if support else None,
        support_kl_old_new=kl_old_new,
        sequence_log_ratio=np.repeat(
            [(one.logp_new - one.logp_old).sum() / max(len(one.tokens), 1) for one in completions], lengths
        ),
        age=np.repeat([np.nan if one.age is None else float(one.age) for one in completions], lengths),
    )


def audit_tokens(columns: Mapping[str, NDArray[Any]]) -> Tokens:
    """Tokens from the rows of an audit's own table, which hold true divergences."""
    nothing = np.full(len(columns["update"]), np.nan)
    floats = {name: column.astype(np.float64) for name, column in columns.items() if column.dtype.kind == "f"}
    return Tokens(
        measure="whole",
        step=columns["update"].astype(np.int64),
        sequence=columns["sequence"].astype(np.int64),
        position=columns["position"].astype(np.int64),
        token=columns["token"].astype(np.int64),
        logp_old=np.minimum(floats["logp_old"], 0.0),
        logp_new=np.minimum(floats["logp_new"], 0.0),
        support_tv=floats["tv_topk"],
        reward=nothing,
        age=nothing,
        **{name: floats[name] for name in ("advantage", "logp_rollout", "entropy", "kl", "tv", "troll_tv")},
        verdicts={name: columns[name].astype(np.bool_) for name in VERDICTS},
    )


def sampled_kl(logp_p: Floats, logp_q: Floats) -> Floats:
    """KL(p‖q) of the sampled token against all other tokens, from float64 log-probs."""
    p, q = (torch.from_numpy(x).clamp(max=CERTAIN) for x in (logp_p, logp_q))
    return binary_kl(p, q).numpy()


def sampled_tv(logp_p: Floats, logp_q: Floats) -> Floats:
    """|p − q| of the sampled token."""
    return binary_tv(torch.from_numpy(logp_p), torch.from_numpy(logp_q)).numpy()
