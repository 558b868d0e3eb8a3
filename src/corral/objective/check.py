"""Validation of a TokenBatch: shapes, dtypes, finite values, log-probs, and equal top-k tokens for all policies."""

import logging
import warnings
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from corral.support import ANCHOR_TOLERANCE, LogpTolerance
from corral.tensors import SparseDist, TokenBatch

logger = logging.getLogger(__name__)

_SHIFT = "Both follow the completion tokens; was the last token dropped twice? See docs/data-flow.md#shift."

_TAKE_LOG_SOFTMAX = "Take log_softmax over the last axis, of logits in float32; check=False takes them as they are."

_ONE_SUPPORT = "Both must stand on one support: gather {} at dist_old.ids."
_POLICIES = {"dist_new": "the new policy", "dist_teacher": "the teacher or reference"}

_SUPPLY = {
    "dist_new": "the new policy on the old support: corral.gather_support(logp, dist_old.ids), or corral.lm_head(..., ids=)",
    "dist_old": "the old policy's support: corral.top_k_support(logp, tokens, k), or corral.lm_head(..., top_k=)",
    "dist_teacher": "the teacher, or the frozen reference, on the same support: corral.gather_support(logp, dist_old.ids)",
    "logp_rollout": "the log-probs that the sampler reported for the sampled tokens",
}


_LARGE_FIRST = 0.5
"""Mean |log ρ| on a run's first batch above which old and new log-probs are unlikely to come from one policy."""


class FirstCall:
    """Warns once if old and new log-probs differ on a run's first batch, before any update.

    Trainers and engines, which start on-policy, ask for this. An objective by itself, an audit or a checkup does not: there
    policies differ on purpose.
    """

    def __init__(self, *, over: bool = False) -> None:
        self.over = over

    def look(self, name: str, batch: TokenBatch) -> None:
        """Read the mean |log ρ| of the first batch that has a token, in one device transfer; skip later batches."""
        if self.over:
            return
        gap = torch.where(batch.mask, (batch.logp_new - batch.logp_old).detach().float(), 0.0).abs().sum()
        total, tokens = torch.stack([gap, batch.mask.sum()]).tolist()
        self.over = tokens > 0
        if self.over and (mean := total / tokens) > _LARGE_FIRST:
            logger.warning(
                f"{name}: at the first call new and old log-probs differ by {mean:.2f} nats on average; before any update that "
                f"should be 0. Is one of them shifted by a token, of another temperature, or of another model? logits[:, t] "
                f"belong to tokens[:, t + 1]. See docs/data-flow.md#shift."
            )


class _Check(NamedTuple):
    """One check of a batch: the failing tokens [B T], the message, and the value to report."""

    bad: Tensor
    message: str
    value: Tensor | None = None


def check_batch(name: str, batch: TokenBatch, needs: Iterable[str], *, check: bool = True) -> None:
    """Refuse a batch that the objective `name` cannot compute. Values are read in one transfer, and not during compilation.

    Without `check` log-probabilities may be any numbers, but not NaN or inf.
    """
    if not isinstance(batch, TokenBatch):
        raise ValueError(f"{name}: takes one corral.TokenBatch, which holds everything it reads; got {type(batch).__name__}.")
    for field in sorted(needs, reverse=True):  # dist_old before dist_new, which stands on its support
        if getattr(batch, field) is None:  # `needs` holds names of TokenBatch's own fields
            raise ValueError(f"{name}: needs `{field}`, which this batch does not have. Pass {_SUPPLY.get(field, 'it')}.")
    _check_shapes(name, batch)
    if not torch.compiler.is_compiling():
        policies = (batch.logp_new, batch.logp_old, batch.dist_new, batch.dist_old, batch.dist_teacher)
        limits = LogpTolerance.of(*policies) if check else LogpTolerance()
        checks = [*_bad_values(batch, limits), *_bad_supports(batch, limits)]
        failed = torch.stack([check.bad.any() for check in checks]).tolist()
        for hit, (bad, message, value) in zip(failed, checks, strict=True):
            if hit:
                b, t = bad.nonzero()[0].tolist()
                got = "it" if value is None else f"{value[b, t].item():.6g}"
                raise ValueError(
                    f"{name}: {message} Got {got} at {int(bad.sum())} of {batch.mask.numel()} tokens, first at [b t] = "
                    f"[{b}, {t}]."
                )


def _check_shapes(name: str, batch: TokenBatch) -> None:
    given = {"logp_new": batch.logp_new, "logp_old": batch.logp_old, "mask": batch.mask, "advantages": batch.advantages}
    if batch.logp_rollout is not None:
        given["logp_rollout"] = batch.logp_rollout
    for field, x in given.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: {field} must be a tensor; got {type(x).__name__}. Use torch.tensor(…).")
    shape = batch.logp_new.shape
    if len(shape) != 2 or not batch.logp_new.numel():
        raise ValueError(f"{name}: logp_new must be [B T] with at least one token; got {list(shape)}.")
    for field, x in given.items():
        per_sequence = field == "advantages" and x.shape == shape[:1]
        if x.shape != shape and not per_sequence:
            forms = f"Credit is {list(shape)}, token by token, or {list(shape[:1])}, one for each completion. "
            forms += "Use advantages.squeeze(-1). " if x.shape == (shape[0], 1) else ""
            raise ValueError(
                f"{name}: {field} is {list(x.shape)} but logp_new is {list(shape)}. {forms if field == 'advantages' else ''}"
                f"{_SHIFT}"
            )
    for field, x in given.items():
        if field != "mask" and not x.is_floating_point():
            raise ValueError(f"{name}: {field} must be floating point; got {x.dtype}. Convert it with .float().")
    if batch.logp_old.dtype.itemsize < 4 <= batch.logp_new.dtype.itemsize:
        short = str(batch.logp_old.dtype).removeprefix("torch.")
        warnings.warn(
            f"{name}: logp_old is {short}, which keeps three digits: ratios are off by about 1 % before any update. Keep old "
            f"log-probs in float32, computed as the new ones are.",
            stacklevel=4,
        )
    if batch.mask.dtype != torch.bool:
        raise ValueError(f"{name}: mask must be bool, True where a token is trained on; got {batch.mask.dtype}. Use .bool().")
    for field, dist in _dists(batch):
        if dist.rest.shape != shape:
            raise ValueError(
                f"{name}: {field} describes {list(dist.rest.shape)} positions but logp_new is {list(shape)}. Its ids and logp "
                f"are [B T K], one support per completion token. {_SHIFT}"
            )
    if batch.dist_old is None:
        return
    for field, dist in _dists(batch):
        if dist.ids.shape != batch.dist_old.ids.shape:
            raise ValueError(
                f"{name}: {field} has {dist.ids.shape[-1]} slots and dist_old {batch.dist_old.ids.shape[-1]}. "
                f"{_ONE_SUPPORT.format(_POLICIES[field])}"
            )


def _dists(batch: TokenBatch) -> list[tuple[str, SparseDist]]:
    """Return the distributions of a batch on their support (top-k tokens), by field name."""
    given = (("dist_new", batch.dist_new), ("dist_old", batch.dist_old), ("dist_teacher", batch.dist_teacher))
    return [(field, dist) for field, dist in given if dist is not None]


def _bad_values(batch: TokenBatch, limits: LogpTolerance) -> Iterable[_Check]:
    """List the checks of the sampled tokens; padding may have any value."""
    mask = batch.mask
    yield _Check(~mask.any().expand_as(mask), "mask has no unmasked token, so there is nothing to train on. Skip this batch.")
    given = (("logp_new", batch.logp_new), ("logp_old", batch.logp_old), ("logp_rollout", batch.logp_rollout))
    for field, x in given:
        if x is not None:
            yield _Check(
                mask & ~x.isfinite(),
                f"{field} is not finite at an unmasked token. NaN comes from the model or the sampler; −inf means that the "
                f"sampled token is impossible under that policy: use the same temperature and logit masks everywhere.",
            )
            yield _Check(
                mask & (x > limits.logp),
                f"{field} is above 0 at an unmasked token, and log-probabilities are not. {_TAKE_LOG_SOFTMAX}",
                x,
            )
    advantages = batch.advantages[:, None] if batch.advantages.ndim == 1 else batch.advantages
    yield _Check(mask & ~advantages.isfinite(), "advantages are not finite at an unmasked token. Look at the rewards first.")


def _bad_supports(batch: TokenBatch, limits: LogpTolerance) -> Iterable[_Check]:
    """List the checks of both policies' distributions on their shared support; none for a batch with a single policy."""
    mask, new, old = batch.mask, batch.dist_new, batch.dist_old
    if new is None or old is None:
        return
    yield _Check(mask & (old.ids[..., 0] < 0), "slot 0 of dist_old.ids is padding. It must hold the sampled token.")
    for field, dist in _dists(batch):
        if dist.ids is not old.ids:
            yield _Check(
                mask & (dist.ids != old.ids).any(-1),
                f"{field} and dist_old stand on different token ids. {_ONE_SUPPORT.format(_POLICIES[field])}",
            )
    for field, dist in _dists(batch):
        logp = dist.with_rest()
        yield _Check(
            mask & (logp.isnan() | (logp == torch.inf)).any(-1),
            f"{field} holds NaN or +inf at an unmasked token. Log-probabilities are ≤ 0; look at the model's logits first.",
        )
        mass = logp.detach().exp().sum(-1)
        yield _Check(
            mask & ((mass - 1).abs() > limits.mass),
            f"{field} is no distribution: at an unmasked token its support and tail do not sum to 1 ± {limits.mass:g}. "
            f"{_TAKE_LOG_SOFTMAX}",
            mass,
        )
    yield _Check(
        mask & ~((old.logp[..., 0] - batch.logp_old).abs() <= ANCHOR_TOLERANCE),
        f"dist_old.logp[..., 0] and logp_old differ by more than {ANCHOR_TOLERANCE} nats. Slot 0 must be the sampled token, "
        f"at the same position, and both must come from the same policy at the same temperature, in float32.",
    )
