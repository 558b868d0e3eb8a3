"""Validation of a TokenBatch: shapes, dtypes, finite values, valid log-probs, and the same top-k tokens for all policies."""

import logging
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from corral.support import ANCHOR_TOLERANCE, LogpTolerance
from corral.tensors import TokenBatch

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
"""Mean |log ρ| of a run's first batch above which a warning is logged. Old and new log-probs should be equal there."""


@dataclass
class FirstCall:
    """Warns once if old and new log-probs differ on a run's first batch, before any update.

    Trainers and engines, which start on-policy, ask for this. An objective by itself, an audit or a checkup does not: there
    policies differ on purpose.
    """

    over: bool = False
    """True once a batch has been checked, so that later batches are skipped."""

    def look(self, name: str, batch: TokenBatch) -> None:
        """Warn if the mean |log ρ| of the first batch with an unmasked token is large. Later batches are skipped.

        The values are read in one device transfer.
        """
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


def check_batch(name: str, batch: TokenBatch, needs: Iterable[str], *, check: bool = True) -> None:
    """Refuse a batch that the objective `name` cannot compute. Under torch.compile, only shapes and dtypes are checked.

    Values are read in one device transfer.

    Without `check` log-probabilities may be any numbers, but not NaN or inf.
    """
    if not isinstance(batch, TokenBatch):
        raise ValueError(f"{name}: takes one corral.TokenBatch, which holds everything it reads; got {type(batch).__name__}.")
    for field in sorted(needs, reverse=True):  # dist_old before dist_new, which stands on its support
        if getattr(batch, field) is None:  # `needs` holds names of TokenBatch's own fields
            raise ValueError(f"{name}: needs `{field}`, which this batch does not have. Pass {_SUPPLY.get(field, 'it')}.")

    # Types and shapes.
    logps = {"logp_new": batch.logp_new, "logp_old": batch.logp_old}
    if batch.logp_rollout is not None:
        logps["logp_rollout"] = batch.logp_rollout
    given: dict[str, Any] = logps | {"mask": batch.mask, "advantages": batch.advantages}
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
            stacklevel=3,
        )
    if batch.mask.dtype != torch.bool:
        raise ValueError(f"{name}: mask must be bool, True where a token is trained on; got {batch.mask.dtype}. Use .bool().")
    mask, new, old = batch.mask, batch.dist_new, batch.dist_old
    dists = {"dist_new": new, "dist_old": old, "dist_teacher": batch.dist_teacher}
    supports = {field: dist for field, dist in dists.items() if dist is not None}
    for field, dist in supports.items():
        if dist.rest.shape != shape:
            raise ValueError(
                f"{name}: {field} describes {list(dist.rest.shape)} positions but logp_new is {list(shape)}. Its ids and logp "
                f"are [B T K], one support per completion token. {_SHIFT}"
            )
    for field, dist in supports.items():
        if old is not None and dist.ids.shape != old.ids.shape:
            raise ValueError(
                f"{name}: {field} has {dist.ids.shape[-1]} slots and dist_old {old.ids.shape[-1]}. "
                f"{_ONE_SUPPORT.format(_POLICIES[field])}"
            )
    if torch.compiler.is_compiling():
        return

    # Values. Padding may have any value.
    limits = LogpTolerance.of(batch.logp_new, batch.logp_old, *dists.values()) if check else LogpTolerance()
    checks: list[tuple[Tensor, str, Tensor | None]] = []

    def refuse(bad: Tensor, message: str, value: Tensor | None = None) -> None:
        """Add one check: the tokens that fail it [B T], the error message, and the value to report."""
        checks.append((bad, message, value))

    refuse(~mask.any().expand_as(mask), "mask has no unmasked token, so there is nothing to train on. Skip this batch.")
    for field, x in logps.items():
        refuse(
            mask & ~x.isfinite(),
            f"{field} is not finite at an unmasked token. NaN comes from the model or the sampler; −inf means that the sampled "
            f"token is impossible under that policy: use the same temperature and logit masks everywhere.",
        )
        above = mask & (x > limits.logp)
        refuse(above, f"{field} is above 0 at an unmasked token, and log-probabilities are not. {_TAKE_LOG_SOFTMAX}", x)
    advantages = batch.advantages[:, None] if batch.advantages.ndim == 1 else batch.advantages
    refuse(mask & ~advantages.isfinite(), "advantages are not finite at an unmasked token. Look at the rewards first.")
    if new is not None and old is not None:  # a batch with a single policy has nothing to compare
        refuse(mask & (old.ids[..., 0] < 0), "slot 0 of dist_old.ids is padding. It must hold the sampled token.")
        for field, dist in supports.items():
            if dist.ids is not old.ids:
                apart = f"{field} and dist_old stand on different token ids. {_ONE_SUPPORT.format(_POLICIES[field])}"
                refuse(mask & (dist.ids != old.ids).any(-1), apart)
        for field, dist in supports.items():
            logp = dist.with_rest()
            refuse(
                mask & (logp.isnan() | (logp == torch.inf)).any(-1),
                f"{field} holds NaN or +inf at an unmasked token. Log-probabilities are ≤ 0; look at the model's logits first.",
            )
            mass = logp.detach().exp().sum(-1)
            refuse(
                mask & ((mass - 1).abs() > limits.mass),
                f"{field} is no distribution: at an unmasked token its support and tail do not sum to 1 ± {limits.mass:g}. "
                f"{_TAKE_LOG_SOFTMAX}",
                mass,
            )
        refuse(
            mask & ~((old.logp[..., 0] - batch.logp_old).abs() <= ANCHOR_TOLERANCE),
            f"dist_old.logp[..., 0] and logp_old differ by more than {ANCHOR_TOLERANCE} nats. Slot 0 must be the sampled "
            f"token, at the same position, and both must come from the same policy at the same temperature, in float32.",
        )
    failed = torch.stack([bad.any() for bad, _, _ in checks]).tolist()
    for hit, (bad, message, value) in zip(failed, checks, strict=True):
        if hit:
            b, t = bad.nonzero()[0].tolist()
            got = "it" if value is None else f"{value[b, t].item():.6g}"
            raise ValueError(
                f"{name}: {message} Got {got} at {int(bad.sum())} of {mask.numel()} tokens, first at [b t] = [{b}, {t}]."
            )
