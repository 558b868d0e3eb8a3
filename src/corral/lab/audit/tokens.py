"""Audited tokens as columns, from a dump's completions or an audit's rows: the input of rules and statistics."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from corral.divergence import binary_kl, binary_tv
from corral.numerics import CERTAIN

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

VERDICTS = ("clipped", "dppo_binary", "dppo_topk", "troll")
"""Columns of an audit's rows that mark the tokens on which a rule acts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """Columns [N] of tokens in order. A missing number is NaN."""

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
    """Log-probs of the sampler."""
    entropy: Floats
    reward: Floats
    """Reward of the completion, stored at its first token."""
    age: Floats
    """Number of steps between sampling and training."""
    kl: Floats
    """KL(new‖old) on the distributions of `measure`; a lower bound of the true KL unless `measure` is "whole"."""
    tv: Floats
    support_tv: Floats
    support_kl_old_new: Floats
    """KL(old‖new) on a support: the divergence of DPPO with divergence="kl"."""
    troll_tv: Floats
    """TV by which TROLL's projection moves the policy."""
    sequence_log_ratio: Floats
    """Mean of log new/old over the token's completion, if all of its tokens were logged."""
    verdicts: Mapping[str, Bools] = field(default_factory=dict)
    """Tokens on which each rule acts, by rule; `clipped` is the audited clipping."""

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, here: Any) -> "Tokens":
        """Select tokens, as copies: a view would keep all tokens of its batch in memory."""
        columns = {name: column[here].copy() for name, column in vars(self).items() if isinstance(column, np.ndarray)}
        verdicts = {name: column[here].copy() for name, column in self.verdicts.items()}
        return dataclasses.replace(self, **columns, verdicts=verdicts)

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


_TYPES = {one.name: one.type for one in dataclasses.fields(Tokens) if one.type in (Ints, Floats)}


def make_tokens(measure: Literal["sampled", "support", "whole"], columns: Mapping[str, Any], **more: Any) -> Tokens:
    """Tokens from columns, and from numbers that hold for all of them. A missing column becomes NaN."""
    count = len(columns["token"])
    given = {name: np.broadcast_to(columns.get(name, np.nan), count) for name in _TYPES}
    typed: dict[str, Any] = {
        name: column.astype(np.int64 if _TYPES[name] is Ints else np.float64) for name, column in given.items()
    }
    return Tokens(measure=measure, **typed, **more)


def join_tokens(parts: Sequence[Tokens], first: int = 0) -> Tokens:
    """Join completions of one measure, one per part, and number them from `first`."""
    columns = {name: np.concatenate([vars(part)[name] for part in parts]) for name in _TYPES}
    columns["sequence"] = np.repeat(np.arange(first, first + len(parts)), list(map(len, parts)))
    return make_tokens(parts[0].measure, columns)


def audit_tokens(columns: Mapping[str, NDArray[Any]]) -> Tokens:
    """Tokens from the rows of an audit's own table, which hold true divergences."""
    certain = {name: np.minimum(columns[name].astype(np.float64), 0.0) for name in ("logp_old", "logp_new")}
    renamed = {"step": columns["update"], "support_tv": columns["tv_topk"], **certain}
    return make_tokens("whole", {**columns, **renamed}, verdicts={name: columns[name].astype(np.bool_) for name in VERDICTS})


def token_kinds(blocked: Bools, outside: Bools, outward: Bools) -> NDArray[Any]:
    """The kind of each token: blocked inside or outside the ball, passed inside it, or passed outside and pushed out or back.

    `false` and `missed` are a rule's errors, `right`, `passed` and `back` are not.
    """
    return np.select(
        [blocked & ~outside, blocked & outside, outside & outward, outside], ["false", "right", "missed", "back"], "passed"
    )


def sampled_kl(logp_p: Floats, logp_q: Floats) -> Floats:
    """KL(p‖q) of the sampled token against all other tokens, from float64 log-probs."""
    p, q = (torch.from_numpy(x).clamp(max=CERTAIN) for x in (logp_p, logp_q))
    return binary_kl(p, q).numpy()


def sampled_tv(logp_p: Floats, logp_q: Floats) -> Floats:
    """|p − q| of the sampled token."""
    return binary_tv(torch.from_numpy(logp_p), torch.from_numpy(logp_q)).numpy()
