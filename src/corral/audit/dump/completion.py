"""A completion of a dump: the tokens it was trained on, with the log-probs that were logged for them."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from corral.audit.dump.record import DumpRecord
from corral.divergence import categorical_kl, categorical_tv

Floats = NDArray[np.float64]

_TAIL_FLOOR = 1e-8
"""A tail known as 1 − Σ p alone is at least this under both policies: below it there is rounding and nothing else."""

_LARGEST_SUM = 1.05
"""Up to which rounding in half precision may bring a sum of probabilities."""


@dataclass(frozen=True, eq=False)
class SupportDivergence:
    """Divergences on a logged support and its tail, per token: lower bounds of the true ones, near them where K is large."""

    kl: Floats
    """KL(new‖old)."""
    kl_old_new: Floats
    tv: Floats


@dataclass(frozen=True, eq=False)
class LoggedCompletion:
    """Unmasked tokens of one completion whose log-probs are finite, in order."""

    step: int
    tokens: NDArray[np.int64]
    advantages: Floats
    logp_old: Floats
    logp_new: Floats
    logp_rollout: Floats | None = None
    """NaN where the sampler said nothing."""
    support: SupportDivergence | None = None
    entropy: Floats | None = None
    reward: float | None = None
    age: int | None = None
    """Steps between sampling and training."""
    positions: NDArray[np.int64] | None = None
    """Of these tokens among all that were logged; None: they are all."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Unmasked tokens that are not among these, by reason."""


def take_completion(
    *,
    step: int,
    tokens: NDArray[np.int64],
    mask: NDArray[np.bool_],
    advantages: Floats,
    logp_old: Floats,
    logp_new: Floats,
    logp_rollout: Floats | None = None,
    support: SupportDivergence | None = None,
    entropy: Floats | None = None,
    reward: float | None = None,
    age: int | None = None,
) -> LoggedCompletion:
    """The tokens that can be audited among all of a completion, each argument [T]; what is masked may hold anything."""
    finite = ~(np.isnan(logp_old) | np.isnan(logp_new))
    credited = ~np.isnan(advantages)
    kept = mask & finite & credited
    counts = {
        "tokens with a log-prob that is null or not finite": int((mask & ~finite).sum()),
        "trained tokens without an advantage": int((mask & finite & ~credited).sum()),
    }
    return LoggedCompletion(
        step=step,
        tokens=tokens[kept],
        advantages=advantages[kept],
        logp_old=logp_old[kept],
        logp_new=logp_new[kept],
        logp_rollout=None if logp_rollout is None else logp_rollout[kept],
        support=None if support is None else SupportDivergence(support.kl[kept], support.kl_old_new[kept], support.tv[kept]),
        entropy=None if entropy is None else entropy[kept],
        reward=reward,
        age=age,
        positions=np.flatnonzero(kept),
        left_out={reason: count for reason, count in counts.items() if count},
    )


def read_support(
    record: DumpRecord, tokens: NDArray[np.int64], mask: NDArray[np.bool_], logp_old: Floats, logp_new: Floats
) -> SupportDivergence:
    """Divergences on the `top_ids` of a record, with the sampled token and everything else as one more category each.

    Both policies' log-probs are of the full softmax. A token that one of them has no number for counts as part of the tail;
    what is masked may hold anything.
    """
    length = len(tokens)
    used = mask & ~np.isnan(logp_old) & ~np.isnan(logp_new)
    ids = record.table("top_ids", length)
    given = {name: record.table(name, length) for name in ("top_logp_old", "top_logp_new")}
    for name, logp in given.items():
        if logp.shape != ids.shape:
            raise record.error(f"`{name}` has {logp.shape[-1]} entries per token and `top_ids` {ids.shape[-1]}.")
    unknown = np.isnan(given["top_logp_old"]) | np.isnan(given["top_logp_new"]) | (ids == tokens[:, None]) | ~used[:, None]
    old, new = (
        _with_tail(record, name, np.where(unknown, -np.inf, given[name]), np.where(used, sampled, 0.0))
        for name, sampled in (("top_logp_old", logp_old), ("top_logp_new", logp_new))
    )
    return SupportDivergence(
        categorical_kl(new, old).numpy(), categorical_kl(old, new).numpy(), categorical_tv(new, old).numpy()
    )


def _with_tail(record: DumpRecord, name: str, logp: Floats, sampled: Floats) -> torch.Tensor:
    """The sampled token, the support and the mass of everything else, as whole distributions [T, K + 2]."""
    known = np.concatenate([sampled[:, None], logp], axis=1)
    mass = np.exp(np.minimum(known, 1.0)).sum(-1)
    over = np.flatnonzero(mass > _LARGEST_SUM)
    if len(over):
        raise record.error(
            f"`{name}` and the sampled token sum to {mass[over[0]]:.3g} at token {over[0]}; log-probs of the full softmax sum "
            f"to 1 at most. Is an id repeated in `top_ids`?"
        )
    tail = np.log(np.maximum(1 - mass, _TAIL_FLOOR))
    return torch.from_numpy(np.concatenate([known, tail[:, None]], axis=1)).log_softmax(-1)
