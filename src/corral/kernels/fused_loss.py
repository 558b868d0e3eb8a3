"""Hidden states → loss of every token as one step of autograd: the head, the objective's kernel, and their way back."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from corral.kernels.formed import Early, Expected, Formed, head_in_parts
from corral.kernels.head_rows import HeadRequest, HeadRows
from corral.kernels.later import Later
from corral.kernels.live import Live
from corral.kernels.logits import LogitSpec
from corral.kernels.loss_rows import ACTED, KL_AFTER, LOSS, LossRows, OldRows, metrics_of
from corral.kernels.row_gradient import Upstream
from corral.kernels.rule import LossRule
from corral.kernels.select import HeadInput
from corral.kernels.triton_head import head_gradients
from corral.types import ObjectiveOutput


@dataclass(eq=False, kw_only=True)
class Job:
    """Everything but the parameters, and what came of it."""

    name: str
    live: Live
    tokens: Tensor
    ids: Tensor | None
    old: OldRows
    weights: Tensor | None
    """Of each live token's loss [N]."""
    rule: LossRule
    spec: LogitSpec
    request: HeadRequest
    tolerance: float
    part: slice
    """The live rows of which the gradients of Σ weights · loss are formed while the logits are there."""
    report: Tensor
    """Where the share of dense rows and the largest share dropped are written [2]."""
    early: Early | None = None
    """The live rows of the hidden states, and more behind them, and their products as far as they were begun."""
    rows: HeadRows | None = None
    loss: LossRows | None = None
    flawed: Later | None = None
    formed: Formed | None = None
    metrics: dict[str, Tensor] | None = None

    def input(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> HeadInput:
        return HeadInput(hidden, weight, bias, self.tokens, self.ids, self.spec, self.request)

    def know(self, rows: HeadRows, loss: LossRows | None) -> None:
        """All there is to know of the rows, and what is made of it."""
        self.rows, self.loss = rows, loss or self.rule(rows, self.old)
        self.metrics, flawed = metrics_of(self.loss, rows, self.old, projects=self.rule.projects)
        self.flawed = Later(flawed)

    def check(self) -> None:
        """Refuse what no check of the inputs could have told; the objective itself says more of it."""
        number = 0 if self.flawed is None else self.flawed.number()
        if number:
            raise ValueError(
                f"policy_loss_from_hidden: {self.name}'s loss is not finite at {number} live tokens. NaN comes from the "
                f"model, or from a support with a token twice; an impossible token means that both policies were not given the "
                f"same logit masks. The objective on the output of corral.lm_head says where."
            )


def fused_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job) -> ObjectiveOutput:
    """The loss [B T] and what the objective reports; flawed losses are refused here, or where there is a gradient behind it."""
    loss = _FusedLoss.apply(hidden, weight, bias, job)
    assert job.loss is not None
    assert job.metrics is not None
    if not loss.requires_grad:
        job.check()
    acted = job.live.spread(job.loss.fields[ACTED] > 0)
    kl_after = job.live.spread(job.loss.fields[KL_AFTER]) if job.rule.projects else None
    return ObjectiveOutput(loss, job.metrics, acted, kl_after)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: Job) -> Tensor:
        ctx.job, ctx.shape = job, hidden.shape
        early, job.early = job.early, None
        # Where all tokens are live, the hidden states are their own picked rows, and a copy need not be kept.
        picked = (
            job.live.pick(hidden).contiguous() if early is None or job.live.rows is None else early.packed[: job.live.count]
        )
        _, job.formed = head_in_parts(
            job.input(picked, weight, bias), job.part, early, Expected(job.rule, job.old, job.weights),
            ctx.needs_input_grad[:3], known=job.know,
        )  # fmt: skip
        assert job.loss is not None
        ctx.save_for_backward(picked, weight, bias)
        loss = job.loss.fields[LOSS]
        return job.live.spread(loss * job.weights if job.weights is not None else loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        job: Job = ctx.job
        assert job.rows is not None
        assert job.loss is not None
        hidden, weight, bias = ctx.saved_tensors
        formed, job.formed = job.formed, None  # it is used up: a second backward pass starts from nothing
        if formed is not None and formed.is_all_of(len(job.tokens)) and not any(upstream.stride()):
            # One number for all tokens, as the gradient of a sum is.
            grads = formed.times(upstream)
            job.report.zero_()[0] = 1.0
        else:
            given = Upstream(
                logp=job.loss.own, kept=job.loss.kept, rest=job.loss.rest, scale=job.live.pick(upstream), weights=job.weights
            )
            source, needed = job.input(hidden, weight, bias), ctx.needs_input_grad[:3]
            grads, routes = head_gradients(source, job.rows, given, job.tolerance, needed, formed)
            if routes is not None:
                job.report.copy_(routes.shares)
        job.check()
        d_hidden = None if grads[0] is None else job.live.spread(grads[0]).view(ctx.shape)
        return d_hidden, grads[1], grads[2], None
