"""Hidden states → loss of every token as one step of autograd: the head, the objective's kernel, and their way back."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from corral.kernels.dense_forward import Begun, dense_forward, scale
from corral.kernels.later import Later
from corral.kernels.live import Live
from corral.kernels.logits import LogitSpec
from corral.kernels.loss_rows import ACTED, KL_AFTER, LOSS, LossRows, OldRows, metrics_of
from corral.kernels.online import HeadRequest, HeadRows
from corral.kernels.row_gradient import Upstream
from corral.kernels.select import HeadInput, stream_head
from corral.kernels.stream import TileStatistics
from corral.kernels.token_loss import TokenLoss
from corral.kernels.triton_head import Gradients, head_gradients
from corral.kernels.troll_loss import TrollLoss
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
    rule: TrollLoss | TokenLoss
    spec: LogitSpec
    request: HeadRequest
    tolerance: float
    at_once: bool
    """Whether to form the gradients of Σ weights · loss while the logits are there."""
    report: Tensor
    """Where the share of dense rows and the largest share dropped are written [2]."""
    early: tuple[Tensor, TileStatistics | Begun] | None = None
    """The live rows of the hidden states, and more behind them, and their product begun before they were counted."""
    rows: HeadRows | None = None
    loss: LossRows | None = None
    flawed: Later | None = None
    formed: Gradients | None = None
    metrics: dict[str, Tensor] | None = None

    def input(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> HeadInput:
        return HeadInput(hidden, weight, bias, self.tokens, self.ids, self.spec, self.request)

    def check(self) -> None:
        """Refuse what no check of the inputs could have told; the objective itself says more of it."""
        number = 0 if self.flawed is None else self.flawed.number()
        if number:
            raise ValueError(
                f"policy_loss_from_hidden: {self.name}'s loss is not finite at {number} live tokens. NaN comes from the model; "
                f"an impossible token means that both policies were not given the same logit masks. The objective on the "
                f"output of corral.lm_head says where."
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
        count = job.live.count
        picked = job.live.pick(hidden).contiguous() if early is None or job.live.rows is None else early[0][:count]
        source = job.input(picked, weight, bias)
        needed = ctx.needs_input_grad[:3]
        if job.at_once and any(needed):
            begun = early[1] if early is not None and isinstance(early[1], Begun) else None
            job.rows, job.loss, job.formed = dense_forward(source, job.old, job.weights, job.rule, needed, begun)
        else:
            stats = early[1].first(count) if early is not None and isinstance(early[1], TileStatistics) else None
            job.rows = stream_head(picked, weight, bias, job.tokens, job.ids, job.spec, job.request, stats)
            job.loss = job.rule(job.rows, job.old)
        job.metrics, flawed = metrics_of(job.loss, job.rows, job.old, projects=job.rule.projects)
        job.flawed = Later(flawed)
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
        if job.formed is not None and not any(upstream.stride()):
            # One number for all tokens, as the gradient of a sum is. What was formed is used up: it is scaled in place.
            grads, job.formed = job.formed, None
            for x in grads:
                if x is not None:
                    scale(x, upstream)
            job.report.copy_(torch.tensor([1.0, 0.0]))
        else:
            given = Upstream(
                logp=job.loss.own, kept=job.loss.kept, rest=job.loss.rest, scale=job.live.pick(upstream), weights=job.weights
            )
            source = job.input(hidden, weight, bias)
            grads, gradient = head_gradients(source, job.rows, given, job.tolerance, ctx.needs_input_grad[:3])
            if gradient is not None:
                job.report.copy_(gradient.report())
        job.check()
        d_hidden = None if grads[0] is None else job.live.spread(grads[0]).view(ctx.shape)
        return d_hidden, grads[1], grads[2], None
