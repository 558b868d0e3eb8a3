"""The head on a GPU: one streamed product forward; backward sparse where the row's own bound allows, dense elsewhere."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from corral.kernels.dense_backward import dense_rows
from corral.kernels.dispatch import MAX_TOP_K
from corral.kernels.head_backward import HeadGradients
from corral.kernels.logits import LogitSpec
from corral.kernels.online import HeadRequest, HeadRows
from corral.kernels.row_gradient import DENSE, SPARSE, RowGradient, row_gradient
from corral.kernels.select import stream_head
from corral.kernels.sparse_backward import sparse_hidden, sparse_weight
from corral.kernels.stream import tile_of


@dataclass(frozen=True, eq=False)
class Plan:
    """How a head is run."""

    spec: LogitSpec
    request: HeadRequest
    tolerance: float = 0.0
    """Share of a row's gradient that a sparse backward may drop; 0 drops none."""
    report: Tensor | None = None
    """Where the backward pass writes the share of dense rows and the largest share dropped [2]."""


def most_top_k(hidden: Tensor, vocabulary: int) -> int:
    """The largest support of its own that the head can find: no more than there are tiles."""
    return min(MAX_TOP_K, -(-vocabulary // tile_of(hidden).columns))


class TritonHead(torch.autograd.Function):
    """Rows [N, H] → log-probs, entropy, support and rest, as the torch head has them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, ids: Tensor | None, plan: Plan
    ) -> tuple[Tensor, ...]:
        hidden = hidden.contiguous()
        rows = stream_head(hidden, weight, bias, tokens, ids, plan.spec, plan.request)
        ctx.plan = plan
        ctx.mark_non_differentiable(rows.ids)
        ctx.save_for_backward(
            hidden, weight, bias, tokens, rows.lse, rows.logp, rows.ids, rows.kept, rows.rest, rows.entropy
        )  # fmt: skip
        return rows.logp, rows.entropy, rows.kept, rows.rest, rows.ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logp: Tensor, g_nats: Tensor, g_kept: Tensor, g_rest: Tensor, _: Any) -> tuple[Any, ...]:
        hidden, weight, bias, tokens, *fields = ctx.saved_tensors
        grads = HeadGradients(g_logp, g_kept, g_rest, g_nats)
        rows = HeadRows(*fields)
        if not len(hidden):
            grads_of_nothing = (
                torch.zeros_like(x) if needed else None
                for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
            )
            return (*grads_of_nothing, None, None, None)
        gradient = row_gradient(rows, tokens, grads, ctx.plan.spec, len(weight), ctx.plan.tolerance)
        picked = (gradient.route == DENSE).nonzero().squeeze(-1)
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        d_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        if d_hidden is not None:
            sparse_hidden(weight, gradient, d_hidden)
        fresh = len(picked) == len(hidden)
        if not fresh and (d_weight is not None or d_bias is not None):
            sparse_weight(hidden, gradient, d_weight, d_bias, len(weight))
        if len(picked):
            dense_rows(
                hidden, weight, bias, ctx.plan.spec, rows, g_nats.contiguous(), gradient, picked, d_hidden, d_weight, d_bias,
                fresh=fresh,
            )  # fmt: skip
        if ctx.plan.report is not None:
            _report(gradient, ctx.plan.report)
        return d_hidden, d_weight, d_bias, None, None, None


def _report(gradient: RowGradient, report: Tensor) -> None:
    report[0] = gradient.counts[1] / gradient.counts[0].clamp(min=1)
    report[1] = torch.where(gradient.route == SPARSE, gradient.dropped, 0.0).amax()
