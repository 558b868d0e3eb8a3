"""An objective's loss of a batch whose new policy a head has just computed: on a GPU in one kernel, where there is one.

`policy_loss_from_hidden` is head and loss in one call. A trainer that needs log-probs and entropy besides, for terms of its
own, calls `lm_head` and then this.
"""

from dataclasses import dataclass
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
        kernels: whether to use Triton's; by default on a GPU.
    Returns:
        Loss and metrics of the objective. It is called itself where no kernel computes it, and where something is not finite or
        no log-probability. It says what is wrong: where there is a gradient at the end of the backward pass, by when the device
        has long found out.
    """
    if kernels is None:
        kernels = batch.mask.is_cuda and has_triton()
    with torch.cuda.device_of(batch.mask):  # Triton launches on the current device, wherever the tensors are
        out = _in_one_kernel(objective, batch) if kernels else None
    return objective(batch) if out is None else out


def _in_one_kernel(objective: Any, batch: TokenBatch) -> ObjectiveOutput | None:
    from corral.head.triton.loss import OldRows, rule_of, summarize

    rule, old, new = rule_of(objective), batch.dist_old, batch.dist_new
    supported = old is not None and new is not None
    if rule is None or (rule.needs_support and not supported) or not has_token_shapes(batch):
        return None
    if rule.needs_rollout and batch.logp_rollout is None:
        return None
    if old is not None and old.ids.shape[-1] > MAX_GIVEN:
        return None
    packing = Packing(batch.mask)
    if not packing.count:
        return None

    def rows(x: Tensor | None) -> Any:
        return None if x is None else packing.pack(x).float().contiguous()

    kept, rest, tail_old = (rows(old.logp), rows(old.rest), old.rest_max) if supported and old is not None else (None,) * 3
    tail_new = None if new is None or tail_old is None else new.rest_max
    anchor = OldRows(
        rows(batch.logp_old), kept, rest, rows(token_advantages(batch)), rows(batch.logp_rollout),
        None if tail_new is None else rows(tail_old),
    ).each(Tensor.detach)  # fmt: skip
    found: dict[str, Any] = {"rest_max": rows(tail_new)}
    support = (rows(new.logp), rows(new.rest)) if supported and new is not None else (None, None)
    logp = rows(batch.logp_new)
    limits = LogpTolerance.of(logp, batch.logp_old, new, old) if objective.check else LogpTolerance()
    loss = _RuleLoss.apply(logp, *support, anchor, rule, limits, found)
    metrics, _, flawed = summarize(found["loss"], found["rows"], anchor, projects=rule.projects)
    found["check"] = _Check(objective, batch, AsyncCopy(flawed))
    if not loss.requires_grad:
        found["check"]()
    return ObjectiveOutput(packing.unpack(loss), metrics)


@dataclass(frozen=True, eq=False)
class _Check:
    """Refuses a batch in which something is not finite, or no log-probability, in the objective's own words."""

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


class _RuleLoss(torch.autograd.Function):
    """The gradient of every row is its own, so the kernel forms it with the loss, and the backward pass scales it."""

    @staticmethod
    def forward(
        ctx: Any,
        logp: Tensor,
        kept: Tensor | None,
        rest: Tensor | None,
        old: Any,
        rule: Any,
        limits: LogpTolerance,
        found: dict[str, Any],
    ) -> Tensor:
        from corral.head.triton.loss import LOSS

        none = logp[:, None] if kept is None else kept
        rest_max = logp if found["rest_max"] is None else found["rest_max"]
        rows = HeadRows(logp, logp, none, none, logp if rest is None else rest, logp, rest_max)
        out = rule(rows, old, limits)
        found |= {"loss": out, "rows": rows}
        ctx.grads, ctx.found = (out.own, out.kept, out.rest), found
        return out.fields[LOSS].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        # Checked here, the device would idle until the host has the answer.
        torch.autograd.Variable._execution_engine.queue_callback(ctx.found["check"])
        scaled = (None if g is None else g * (upstream[:, None] if g.ndim > 1 else upstream) for g in ctx.grads)
        return (*scaled, None, None, None, None)
