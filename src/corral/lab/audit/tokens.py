"""Audited tokens as columns, from a dump's completions or an audit's rows: what rules and statistics are computed on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from corral.divergence import binary_kl, binary_tv
from corral.lab.audit.dump import Floats, LoggedCompletion
from corral.numerics import CERTAIN

_Measure = Literal["sampled", "support", "whole"]
"""What divergences are known on: the sampled token against all others, a support and its tail, or the whole vocabulary."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """Columns [N]. What the dump does not say is NaN, or None where it says it of no token."""

    step: NDArray[np.int64]
    token: NDArray[np.int64]
    advantage: Floats
    logp_old: Floats
    logp_new: Floats
    anchor: Floats
    """log π of the sampler where it reported, else `logp_old`: what DPPO is centred on."""
    logp_rollout: Floats
    kl: Floats
    """KL(new‖old) on what `measure` says; a lower bound of the true one unless it is "whole"."""
    tv: Floats
    measure: _Measure
    support_kl_old_new: Floats | None = None
    """KL(old‖new) on a support: what DPPO with divergence="kl" reads there."""
    support_tv: Floats | None = None
    sequence_log_ratio: Floats | None = None
    """Mean of log new/old over the token's completion, where all of it was logged."""
    entropy: Floats | None = None
    age: Floats | None = None

    def __len__(self) -> int:
        return len(self.step)


def join_completions(completions: Sequence[LoggedCompletion]) -> Tokens:
    """Completions one after the other. Divergences are those on the support where every one of them has it."""
    lengths = [len(one.tokens) for one in completions]
    logp_old, logp_new = (np.concatenate([getattr(one, name) for one in completions]) for name in ("logp_old", "logp_new"))
    rollout = _column(completions, [one.logp_rollout for one in completions])
    supports = [one.support for one in completions]
    known = all(support is not None for support in supports)
    ratios = [np.full(n, (one.logp_new - one.logp_old).mean()) for n, one in zip(lengths, completions, strict=True) if n]
    ages = [np.nan if one.age is None else float(one.age) for one in completions]
    return Tokens(
        step=np.repeat([one.step for one in completions], lengths),
        token=np.concatenate([one.tokens for one in completions]),
        advantage=np.concatenate([one.advantages for one in completions]),
        logp_old=logp_old,
        logp_new=logp_new,
        anchor=np.where(np.isnan(rollout), logp_old, rollout),
        logp_rollout=rollout,
        kl=np.concatenate([s.kl for s in supports if s]) if known else sampled_kl(logp_new, logp_old),
        tv=np.concatenate([s.tv for s in supports if s]) if known else sampled_tv(logp_new, logp_old),
        measure="support" if known else "sampled",
        support_kl_old_new=np.concatenate([s.kl_old_new for s in supports if s]) if known else None,
        support_tv=np.concatenate([s.tv for s in supports if s]) if known else None,
        sequence_log_ratio=np.concatenate(ratios) if ratios else np.empty(0),
        entropy=_column(completions, [one.entropy for one in completions]),
        age=np.repeat(ages, lengths),
    )


def audit_tokens(columns: Mapping[str, NDArray[Any]]) -> Tokens:
    """Rows of an audit's own table, which knows true divergences."""
    floats = {name: column.astype(np.float64) for name, column in columns.items() if column.dtype.kind == "f"}
    rollout = floats["logp_rollout"]
    return Tokens(
        step=columns["update"].astype(np.int64),
        token=columns["token"].astype(np.int64),
        advantage=floats["advantage"],
        logp_old=np.minimum(floats["logp_old"], 0.0),
        logp_new=np.minimum(floats["logp_new"], 0.0),
        anchor=np.where(np.isnan(rollout), floats["logp_old"], rollout),
        logp_rollout=rollout,
        kl=floats["kl"],
        tv=floats["tv"],
        measure="whole",
        support_tv=floats["tv_topk"],
        entropy=floats["entropy"],
    )


def sampled_kl(logp_p: Floats, logp_q: Floats) -> Floats:
    """KL(p‖q) of "the sampled token or any other", from float64 log-probs."""
    p, q = (torch.from_numpy(x).clamp(max=CERTAIN) for x in (logp_p, logp_q))
    return binary_kl(p, q).numpy()


def sampled_tv(logp_p: Floats, logp_q: Floats) -> Floats:
    """|p − q| of the sampled token."""
    return binary_tv(torch.from_numpy(logp_p), torch.from_numpy(logp_q)).numpy()


def _column(completions: Sequence[LoggedCompletion], given: Sequence[Floats | None]) -> Floats:
    """One after the other, NaN for completions that have none."""
    return np.concatenate(
        [np.full(len(one.tokens), np.nan) if x is None else x for one, x in zip(completions, given, strict=True)]
    )
