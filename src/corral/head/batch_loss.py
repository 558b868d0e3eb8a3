"""Compute an objective's loss from the output of `lm_head`; on a GPU, one fused kernel computes it for many objectives.

`policy_loss_from_hidden` is head and loss in one call. A trainer that needs log-probs and entropy besides, for terms of its
own, calls `lm_head` and then this.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from corral.head.dispatch import MAX_GIVEN, has_triton
from corral.head.packed import Packing, PrecomputedGradients, TokenObjective, token_advantages
from corral.head.rows import AsyncCopy
from corral.support import LogpTolerance
from corral.tensors import ObjectiveOutput, TokenBatch


def batch_loss(objective: TokenObjective, batch: TokenBatch, *, kernels: bool | None = None) -> ObjectiveOutput:
    """Compute an objective's loss for each token of a batch, differentiable in the new policy's log-probs.

    Args:
        objective: from `make_objective`, or any function TokenBatch → ObjectiveOutput.
        batch: new and old policy, advantages and mask, [B T].
        kernels: use Triton's; by default on a GPU.
    Returns:
        Loss and metrics of the objective. The objective itself is called where no kernel computes it, and where a value is not
        finite or no log-probability, to raise its own error. With a gradient it raises at the end of the backward pass, when
        the host need no longer wait for the device.
    """
    if kernels is None:
        kernels = batch.mask.is_cuda and has_triton()
    with torch.cuda.device_of(batch.mask):  # Triton launches on the current device, wherever the tensors are
        out = _in_one_kernel(objective, batch) if kernels else None
    return objective(batch) if out is None else out


def _in_one_kernel(objective: Any, batch: TokenBatch) -> ObjectiveOutput | None:
    """Compute an objective's per-token loss in its Triton kernel, or return None if the kernel cannot run on this batch.

    It cannot if there is no kernel, the batch is empty, or an input of the kernel is missing.

    None if there is no kernel, the batch is empty, or an input of the kernel is missing.
    """
    from corral.head.triton.loss import LOSS, kernel_rule, row_losses, summarize

    new, old = batch.dist_new, batch.dist_old
    if new is None or old is None:  # one policy's support alone is of no use
        new = old = None
    given = replace(batch, dist_new=new, dist_old=old, dist_teacher=None)
    rule, packing = kernel_rule(objective, given), Packing(batch.mask)
    if rule is None or not packing.count or (old is not None and old.ids.shape[-1] > MAX_GIVEN):
        return None
    packed = replace(given, advantages=token_advantages(batch)).map(lambda x: packing.pack(x)[None])
    packed = packed.to(dtype=torch.float32).map(Tensor.contiguous)
    limits = LogpTolerance.of(batch.logp_old, new, old) if objective.check else LogpTolerance()
    found = row_losses(rule, packed.detach(), limits=limits)
    metrics, _, flawed = summarize(rule, packed.detach(), found)
    flaws, dist = AsyncCopy(flawed), packed.dist_new

    def check() -> None:
        if number := int(flaws.wait()):
            with torch.no_grad():
                objective(batch)  # raises its own message, unless only the kernel has noticed
            raise ValueError(f"batch_loss: the loss is not finite at {number} unmasked tokens. NaN comes from the model.")

    def gradients(upstream: Tensor) -> Iterable[Tensor | None]:
        # Checked right here, the device would idle until the host has the answer.
        torch.autograd.Variable._execution_engine.queue_callback(check)
        for g in (found.logp, found.kept, found.rest):
            yield None if g is None else g * (upstream[:, None] if g.ndim > 1 else upstream)

    inputs = packed.logp_new[0], *((None, None) if dist is None else (dist.logp[0], dist.rest[0]))
    loss = PrecomputedGradients.apply(found.field(LOSS), gradients, *inputs)
    if not loss.requires_grad:
        check()
    return ObjectiveOutput(packing.unpack(loss), metrics)
