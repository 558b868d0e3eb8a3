"""The loss of an objective on a batch whose new policy a head has just computed: one kernel on a GPU, if it has one.

`policy_loss_from_hidden` is head and loss in one call. A trainer that needs log-probs and entropy besides, for terms of its
own, calls `lm_head` and then this.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from corral.head.dispatch import MAX_GIVEN, has_triton
from corral.head.packed import Packing, TokenObjective, has_token_shapes, token_advantages
from corral.head.rows import AsyncCopy, HeadRows
from corral.support import LogpTolerance
from corral.tensors import ObjectiveOutput, TokenBatch


def batch_loss(objective: TokenObjective, batch: TokenBatch, *, kernels: bool | None = None) -> ObjectiveOutput:
    """objective(batch), differentiable in its new policy.

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
    """The loss by the objective's kernel; None if it has none, or if the batch is empty or lacks what the kernel reads."""
    from corral.head.triton.loss import LOSS, OldRows, rule_of, summarize

    rule, old, new = rule_of(objective), batch.dist_old, batch.dist_new
    if rule is None or (rule.needs_support and (old is None or new is None)) or not has_token_shapes(batch):
        return None
    if rule.needs_rollout and batch.logp_rollout is None:
        return None
    if old is not None and old.ids.shape[-1] > MAX_GIVEN:
        return None
    packing = Packing(batch.mask)
    if not packing.count:
        return None

    def rows(x: Tensor) -> Tensor:
        return packing.pack(x).float().contiguous()

    logp, kept, rest, rest_max = rows(batch.logp_new), None, None, None
    anchor = OldRows(batch.logp_old, None, None, token_advantages(batch), batch.logp_rollout)
    if old is not None and new is not None:
        kept, rest = rows(new.logp), rows(new.rest)
        anchor = replace(anchor, kept=old.logp, rest=old.rest)
        if old.rest_max is not None and new.rest_max is not None:
            rest_max, anchor = rows(new.rest_max), replace(anchor, rest_max=old.rest_max)
    anchor = anchor.detach().map(rows)
    none = logp[:, None] if kept is None else kept  # stands for fields that this kernel does not read
    head = HeadRows(logp, logp, none, none, logp if rest is None else rest, logp, logp if rest_max is None else rest_max)
    limits = LogpTolerance.of(logp, batch.logp_old, new, old) if objective.check else LogpTolerance()
    found = rule(head.detach(), anchor, limits)
    metrics, _, flawed = summarize(found, head.detach(), anchor, projects=rule.projects)
    check = _Check(objective, batch, AsyncCopy(flawed))
    loss = _RowGradients.apply(found.field(LOSS), (found.logp, found.kept, found.rest), check, logp, kept, rest)
    if not loss.requires_grad:
        check()
    return ObjectiveOutput(packing.unpack(loss), metrics)


@dataclass(frozen=True, eq=False)
class _Check:
    """Refuses a batch in which a value is not finite, or no log-probability, in the objective's own words."""

    objective: TokenObjective
    batch: TokenBatch
    flawed: AsyncCopy

    def __call__(self) -> None:
        number = int(self.flawed.wait())
        if not number:
            return
        with torch.no_grad():
            self.objective(self.batch)
        raise ValueError(f"batch_loss: the loss is not finite at {number} unmasked tokens. NaN comes from the model.")


class _RowGradients(torch.autograd.Function):
    """Losses of rows with gradients that the kernel computed beside them; the backward pass scales each row's own."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: tuple[Tensor | None, ...], check: _Check, *inputs: Tensor | None) -> Tensor:
        ctx.gradients, ctx.check = gradients, check
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        # Checked here, the device would idle until the host has the answer.
        torch.autograd.Variable._execution_engine.queue_callback(ctx.check)
        scaled = (None if g is None else g * (upstream[:, None] if g.ndim > 1 else upstream) for g in ctx.gradients)
        return (None, None, None, *scaled)
