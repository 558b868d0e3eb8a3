"""The head on a GPU: one streamed product forward; backward sparse where the row's own bound allows, dense elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from corral.kernels.dense_backward import dense_rows
from corral.kernels.dispatch import MAX_TOP_K
from corral.kernels.few_rows import few_rows
from corral.kernels.foreseen import Expect
from corral.kernels.formed import Formed, Gradients, foreseen_head
from corral.kernels.later import IdsLater, Later
from corral.kernels.logits import LogitSpec
from corral.kernels.online import HeadRequest, HeadRows
from corral.kernels.route import FEW, Routes, route_rows
from corral.kernels.row_gradient import DENSE, Upstream, row_gradient
from corral.kernels.select import HeadInput
from corral.kernels.sparse_backward import sort_by_token, sparse_hidden, sparse_weight
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
    expect: Expect | None = None
    """The loss that will follow."""


def most_top_k(hidden: Tensor, vocabulary: int) -> int:
    """The largest support of its own that the head can find: no more than there are tiles."""
    return min(MAX_TOP_K, -(-vocabulary // tile_of(hidden).columns))


class TritonHead(torch.autograd.Function):
    """Rows [N, H] → log-probs, entropy, support and rest, as the torch head has them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, ids: Tensor | None, plan: Plan
    ) -> tuple[Tensor, ...]:
        hidden, check = hidden.contiguous(), IdsLater("lm_head", tokens, ids, len(weight))
        source = HeadInput(hidden, weight, bias, tokens, ids, plan.spec, plan.request)
        rows, ctx.formed = foreseen_head(source, plan.expect, plan.tolerance, ctx.needs_input_grad[:3])
        check.answer()
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
        formed, ctx.formed = ctx.formed, None  # it is used up: a second backward pass starts from nothing
        grads, routes = head_gradients(source, rows, upstream, plan.tolerance, ctx.needs_input_grad[:3], formed)
        if plan.report is not None and routes is not None:
            plan.report.copy_(routes.report())
        return (*grads, None, None, None)


def head_gradients(
    source: HeadInput,
    rows: HeadRows,
    upstream: Upstream,
    tolerance: float,
    needed: Sequence[bool],
    formed: Formed | None = None,
) -> tuple[Gradients, Routes | None]:
    """Gradients of hidden states, weight and bias, those that are needed, and how they were made.

    The host has to know how many rows are dense. It asks when all is queued that there is to do unless they are many.
    """
    hidden, weight, bias = source.hidden, source.weight, source.bias
    if not len(hidden):
        inputs = (hidden, weight, bias)
        none = [torch.zeros_like(x) if need and x is not None else None for x, need in zip(inputs, needed, strict=True)]
        return (none[0], none[1], none[2]), None
    if formed is not None:
        return formed.gradients(source, rows, upstream, tolerance, needed)
    gradient = row_gradient(rows, source.tokens, upstream, source.spec)
    routes = route_rows(gradient, source.spec, len(weight), tolerance)
    numbers = Later(routes.counts)
    nats = None if upstream.entropy is None else upstream.entropy.contiguous()
    d_hidden, d_weight = (torch.empty_like(x) if need else None for x, need in zip((hidden, weight), needed, strict=False))
    d_bias = torch.empty_like(bias) if bias is not None and needed[2] else None
    found, by_token = (d_hidden, d_weight, d_bias), None
    if tolerance > 0:
        if d_weight is not None or d_bias is not None:
            by_token = sort_by_token(routes, len(weight))
        few = few_rows(source, rows, nats, gradient, routes, want_hidden=d_hidden is not None)
        if d_hidden is not None:
            sparse_hidden(weight, gradient, routes, few, d_hidden)
        if by_token is not None:
            sparse_weight(hidden, gradient, routes, by_token, few, d_weight, d_bias)
    live, dense = numbers.numbers()
    if dense <= (FEW if tolerance > 0 else 0):
        if tolerance == 0:  # no row has a gradient
            for x in found:
                if x is not None:
                    x.zero_()
        return found, routes
    if tolerance == 0 and d_hidden is not None and dense < len(hidden):
        d_hidden.zero_()
    picked = (routes.route != DENSE).byte().argsort(stable=True)[:dense]  # without asking again how many there are
    dense_rows(source, rows, nats, gradient, picked, d_hidden, d_weight, d_bias)
    if by_token is not None and live > dense:
        sparse_weight(hidden, gradient, routes, by_token, None, d_weight, d_bias)
    return found, routes
