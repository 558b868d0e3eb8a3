"""The head on a GPU: one streamed product forward; backward sparse where the row's own bound allows, dense elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from corral.kernels.dense_backward import dense_rows
from corral.kernels.dispatch import MAX_TOP_K
from corral.kernels.later import Later
from corral.kernels.logits import LogitSpec
from corral.kernels.online import HeadRequest, HeadRows
from corral.kernels.row_gradient import DENSE, RowGradient, Upstream, row_gradient
from corral.kernels.select import HeadInput, stream_head
from corral.kernels.sparse_backward import sort_by_token, sparse_hidden, sparse_weight
from corral.kernels.stream import tile_of

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


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
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(rows.ids)
        ctx.save_for_backward(
            hidden, weight, bias, tokens, rows.lse, rows.logp, rows.ids, rows.kept, rows.rest, rows.entropy
        )  # fmt: skip
        return rows.logp, rows.entropy, rows.kept, rows.rest, rows.ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logp: Any, g_nats: Any, g_kept: Any, g_rest: Any, _: Any) -> tuple[Any, ...]:
        hidden, weight, bias, tokens, *fields = ctx.saved_tensors
        plan, rows = ctx.plan, HeadRows(*fields)
        source = HeadInput(hidden, weight, bias, tokens, None, plan.spec, plan.request)
        upstream = Upstream(logp=g_logp, kept=g_kept, rest=g_rest, entropy=g_nats)
        grads, gradient = head_gradients(source, rows, upstream, plan.tolerance, ctx.needs_input_grad[:3])
        if plan.report is not None and gradient is not None:
            plan.report.copy_(gradient.report())
        return (*grads, None, None, None)


def head_gradients(
    source: HeadInput, rows: HeadRows, upstream: Upstream, tolerance: float, needed: Sequence[bool]
) -> tuple[Gradients, RowGradient | None]:
    """Gradients of hidden states, weight and bias, those that are needed, and how they were made.

    The host has to know how many rows are dense: while it asks, the device has dH and a sort to do.
    """
    hidden, weight, bias = source.hidden, source.weight, source.bias
    if not len(hidden):
        inputs = (hidden, weight, bias)
        none = [torch.zeros_like(x) if need and x is not None else None for x, need in zip(inputs, needed, strict=True)]
        return (none[0], none[1], none[2]), None
    gradient = row_gradient(rows, source.tokens, upstream, source.spec, len(weight), tolerance)
    numbers = Later(gradient.counts)
    d_hidden, d_weight = (torch.empty_like(x) if need else None for x, need in zip((hidden, weight), needed, strict=False))
    d_bias = torch.empty_like(bias) if bias is not None and needed[2] else None
    sparse, by_token = tolerance > 0, None
    if sparse and d_hidden is not None:
        sparse_hidden(weight, gradient, d_hidden)
    if sparse and (d_weight is not None or d_bias is not None):
        by_token = sort_by_token(gradient, len(weight))
    live, dense = numbers.numbers()
    if not sparse and d_hidden is not None and dense < len(hidden):
        d_hidden.zero_()
    if dense:
        picked = (gradient.route != DENSE).byte().argsort(stable=True)[:dense]  # without asking again how many there are
        nats = None if upstream.entropy is None else upstream.entropy.contiguous()
        dense_rows(hidden, weight, bias, source.spec, rows, nats, gradient, picked, d_hidden, d_weight, d_bias)
    if by_token is not None and (live > dense or not dense):
        sparse_weight(hidden, gradient, by_token, d_weight, d_bias, add=dense > 0)
    elif not dense:
        for x in (d_weight, d_bias):
            if x is not None:
                x.zero_()
    return (d_hidden, d_weight, d_bias), gradient
