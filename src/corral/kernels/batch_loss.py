"""An objective's loss of a batch whose new policy a head has just computed: on a GPU in one kernel, where there is one.

`policy_loss_from_hidden` is head and loss in one call. A trainer that needs log-probs and entropy besides, for terms of its
own, calls `lm_head` and then this.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from corral.kernels.live import Live
from corral.kernels.online import HeadRows
from corral.types import ObjectiveOutput, TokenBatch


def batch_loss(
    objective: Callable[[TokenBatch], ObjectiveOutput], batch: TokenBatch, *, kernels: bool | None = None
) -> ObjectiveOutput:
    """objective(batch), differentiable in its new policy.

    Args:
        objective: from `make_objective`, or any function TokenBatch → ObjectiveOutput.
        batch: new and old policy, advantages and mask, [B T].
        kernels: whether to use Triton's; by default on a GPU.
    Returns:
        What the objective returns. It is asked itself where no kernel computes it, and where something is not finite: it says
        what is wrong.
    """
    if kernels is None:
        kernels = batch.logp_new.is_cuda and find_spec("triton") is not None
    out = _in_one_kernel(objective, batch) if kernels else None
    return objective(batch) if out is None else out


def _in_one_kernel(objective: Any, batch: TokenBatch) -> ObjectiveOutput | None:
    from corral.kernels.loss_rows import ACTED, KL_AFTER, OldRows, metrics_of
    from corral.kernels.policy_loss import rule_of

    rule, live = rule_of(objective), Live(batch.mask)
    supported = batch.dist_new is not None and batch.dist_old is not None
    if rule is None or not live.count or (rule.needs_support and not supported):
        return None

    def rows(x: Tensor) -> Tensor:
        return live.pick(x).float().contiguous()

    advantages = batch.advantages if batch.advantages.ndim == 2 else batch.advantages[:, None].expand(batch.mask.shape)
    old, new = (batch.dist_old, batch.dist_new) if supported else (None, None)
    anchor = OldRows(
        logp=rows(batch.logp_old.detach()),
        kept=None if old is None else rows(old.logp.detach()),
        rest=None if old is None else rows(old.rest.detach()),
        advantages=rows(advantages.detach()),
        rollout=None if batch.logp_rollout is None else rows(batch.logp_rollout.detach()),
    )
    found: dict[str, Any] = {}
    support = (None, None) if new is None else (rows(new.logp), rows(new.rest))
    loss = _RuleLoss.apply(rows(batch.logp_new), *support, anchor, rule, found)
    metrics, flawed = metrics_of(found["loss"], found["rows"], anchor, projects=rule.projects)
    if float(flawed) > 0:
        return None
    fields = found["loss"].fields
    kl_after = live.spread(fields[KL_AFTER]) if rule.projects else None
    return ObjectiveOutput(live.spread(loss), metrics, live.spread(fields[ACTED] > 0), kl_after)


class _RuleLoss(torch.autograd.Function):
    """The gradient of every row is its own, so the kernel forms it with the loss, and the backward pass scales it."""

    @staticmethod
    def forward(
        ctx: Any, logp: Tensor, kept: Tensor | None, rest: Tensor | None, old: Any, rule: Any, found: dict[str, Any]
    ) -> Tensor:
        from corral.kernels.loss_rows import LOSS

        none = logp[:, None] if kept is None else kept
        rows = HeadRows(logp, logp, none, none, logp if rest is None else rest, logp)
        out = rule(rows, old)
        found |= {"loss": out, "rows": rows}
        ctx.grads = out.own, out.kept, out.rest
        return out.fields[LOSS].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        own, kept, rest = ctx.grads
        scaled = (None if g is None else g * (upstream[:, None] if g.ndim > 1 else upstream) for g in (own, kept, rest))
        return (*scaled, None, None, None)
