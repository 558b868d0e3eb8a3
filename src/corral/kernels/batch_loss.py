"""An objective's loss of a batch whose new policy a head has just computed: on a GPU in one kernel, where there is one.

`policy_loss_from_hidden` is head and loss in one call. A trainer that needs log-probs and entropy besides, for terms of its
own, calls `lm_head` and then this.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from corral.kernels.async_copy import AsyncCopy
from corral.kernels.dispatch import MAX_GIVEN, has_triton
from corral.kernels.packed import Packing, TokenObjective, has_token_shapes, token_advantages
from corral.kernels.rows import HeadRows
from corral.support import LogpTolerance
from corral.types import ObjectiveOutput, SparseDist, TokenBatch


@dataclass(frozen=True, eq=False)
class NewRows:
    """The new policy at the unmasked tokens of a batch, packed as a head has them."""

    logp: Float[Tensor, " N"]
    dist: SparseDist | None
    packing: Packing

    @classmethod
    def of(cls, batch: TokenBatch) -> "NewRows":
        """Those of a batch that has its new policy in it."""
        packing, new = Packing(batch.mask), batch.dist_new
        return cls(packing.pack(batch.logp_new), None if new is None else new.map(packing.pack), packing)

    def only(self, kept: Int[Tensor, " M"], mask: Bool[Tensor, "B T"]) -> "NewRows":
        """Some of the rows: those where `mask` is True."""
        places = kept if self.packing.rows is None else self.packing.rows[kept]
        dist = None if self.dist is None else self.dist.map(lambda x: x[kept])
        return NewRows(self.logp[kept], dist, Packing(mask, places))

    def within(self, batch: TokenBatch) -> TokenBatch:
        """The batch with this new policy in it, on the old one's support if there is one; anything at masked tokens."""
        new, old = self.dist, batch.dist_old
        if new is not None:
            new = new.map(self.packing.unpack)
            new = new if old is None else dataclasses.replace(new, ids=old.ids)
        return dataclasses.replace(batch, logp_new=self.packing.unpack(self.logp), dist_new=new)


def batch_loss(
    objective: TokenObjective,
    batch: TokenBatch,
    new: NewRows | None = None,
    *,
    kernels: bool | None = None,
) -> ObjectiveOutput:
    """objective(batch), differentiable in its new policy.

    Args:
        objective: from `make_objective`, or any function TokenBatch → ObjectiveOutput.
        batch: new and old policy, advantages and mask, [B T].
        new: the new policy as rows, in the place of the batch's, which is then not read; the host need not count them again.
        kernels: whether to use Triton's; by default on a GPU.
    Returns:
        Loss and metrics of the objective. It is called itself where no kernel computes it, and where something is not finite or
        no log-probability. It says what is wrong: where there is a gradient at the end of the backward pass, by when the device
        has long found out.
    """
    if kernels is None:
        kernels = batch.mask.is_cuda and has_triton()
    with torch.cuda.device_of(batch.mask):  # Triton launches on the current device, wherever the tensors are
        out = _in_one_kernel(objective, batch, new) if kernels else None
    return objective(batch if new is None else new.within(batch)) if out is None else out


def _in_one_kernel(objective: Any, batch: TokenBatch, new: NewRows | None) -> ObjectiveOutput | None:
    from corral.kernels.triton.loss.rows import OldRows, summarize
    from corral.kernels.triton.loss.rule import rule_of

    rule, old = rule_of(objective), batch.dist_old
    supported = old is not None and (batch.dist_new if new is None else new.dist) is not None
    if rule is None or (rule.needs_support and not supported) or not has_token_shapes(batch):
        return None
    if old is not None and old.ids.shape[-1] > MAX_GIVEN:
        return None
    new = NewRows.of(batch) if new is None else new
    packing = new.packing
    if not packing.count:
        return None

    def rows(x: Tensor) -> Tensor:
        return packing.pack(x.detach()).float().contiguous()

    tail = None if old is None or new.dist is None or new.dist.rest_max is None else old.rest_max
    anchor = OldRows(
        logp=rows(batch.logp_old),
        kept=rows(old.logp) if supported and old is not None else None,
        rest=rows(old.rest) if supported and old is not None else None,
        advantages=rows(token_advantages(batch)),
        rollout=None if batch.logp_rollout is None else rows(batch.logp_rollout),
        rest_max=None if tail is None else rows(tail),
    )
    found: dict[str, Any] = {}
    support: tuple[Tensor | None, Tensor | None] = (None, None)
    if supported and new.dist is not None:
        kept = new.dist.logp.float()  # rows may lie apart, as a head's do; their slots may not
        support = (kept if kept.stride(-1) == 1 else kept.contiguous()), new.dist.rest.float().contiguous()
    found["rest_max"] = None if tail is None or new.dist is None else new.dist.rest_max
    limits = LogpTolerance.of(new.logp, batch.logp_old, new.dist, old) if objective.check else LogpTolerance()
    loss = _RuleLoss.apply(new.logp.float(), *support, anchor, rule, limits, found)
    metrics, _, flawed = summarize(found["loss"], found["rows"], anchor, projects=rule.projects)
    found["check"] = _Check(objective, batch, new, AsyncCopy(flawed))
    if not loss.requires_grad:
        found["check"]()
    return ObjectiveOutput(packing.unpack(loss), metrics)


@dataclass(frozen=True, eq=False)
class _Check:
    """Refuses a batch in which something is not finite, or no log-probability, in the objective's own words."""

    objective: TokenObjective
    batch: TokenBatch
    new: NewRows
    flawed: AsyncCopy

    def __call__(self) -> None:
        number = int(self.flawed.wait())
        if not number:
            return
        with torch.no_grad():
            self.objective(self.new.within(self.batch))
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
        from corral.kernels.triton.loss.rows import LOSS

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
