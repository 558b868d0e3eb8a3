"""The head on a GPU: one streamed product forward; backward sparse where the row's own bound allows, dense elsewhere."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from corral.kernels.dense_backward import dense_rows
from corral.kernels.few_rows import few_rows
from corral.kernels.foreseen import Expect, ExpectedLoss
from corral.kernels.formed import Expected, Formed, Gradients, head_in_parts, start_early, start_formed
from corral.kernels.head_rows import HeadRequest, HeadRows
from corral.kernels.ids_later import IdsLater
from corral.kernels.inspect_batch import inspect_batch
from corral.kernels.later import Later
from corral.kernels.logits import LogitSpec
from corral.kernels.loss_rows import OldRows
from corral.kernels.route import FEW, Routes, route_rows
from corral.kernels.row_gradient import DENSE, Upstream, row_gradient
from corral.kernels.rule import LossRule, rule_of
from corral.kernels.select import HeadInput, stream_head
from corral.kernels.sparse_backward import sort_by_token, sparse_hidden, sparse_weight
from corral.types import SparseDist, TokenBatch


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


class TritonHead(torch.autograd.Function):
    """Rows [N, H] → log-probs, entropy, support and rest, as the torch head has them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, ids: Tensor | None, plan: Plan
    ) -> tuple[Tensor, ...]:
        # Kernels read what lies one behind the other.
        hidden, tokens = hidden.contiguous(), tokens.contiguous()
        bias, ids = (None if x is None else x.contiguous() for x in (bias, ids))
        check = IdsLater("lm_head", tokens, ids, len(weight))
        source = HeadInput(hidden, weight, bias, tokens, ids, plan.spec, plan.request)
        rows, ctx.formed = _forward(source, plan.expect, plan.tolerance, ctx.needs_input_grad[:3], check.answer)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(rows.ids, rows.rest_max)
        ctx.save_for_backward(hidden, weight, bias, tokens, *vars(rows).values())
        return rows.logp, rows.entropy, rows.kept, rows.rest, rows.ids, rows.rest_max

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logp: Any, g_nats: Any, g_kept: Any, g_rest: Any, *_: Any) -> tuple[Any, ...]:
        hidden, weight, bias, tokens, *fields = ctx.saved_tensors
        plan, rows = ctx.plan, HeadRows(*fields)
        source = HeadInput(hidden, weight, bias, tokens, None, plan.spec, plan.request)
        upstream = Upstream(logp=g_logp, kept=g_kept, rest=g_rest, entropy=g_nats)
        formed, ctx.formed = ctx.formed, None  # it is used up: a second backward pass starts from nothing
        grads, routes = head_gradients(source, rows, upstream, plan.tolerance, ctx.needs_input_grad[:3], formed)
        if plan.report is not None and routes is not None:
            plan.report.copy_(routes.shares)
        return (*grads, None, None, None)


def _forward(
    source: HeadInput, expect: Expect | None, tolerance: float, needed: Sequence[bool], check: Callable[[], None]
) -> tuple[HeadRows, Formed | None]:
    """What `stream_head` finds of rows, and the gradients of some if that loss is expected: of those foreseen to be dense.

    `check` is asked what it makes of the ids once the device has something to do.
    """
    rule = _rule_for(expect, source, tolerance) if any(needed) else None
    if rule is None or not isinstance(expect, ExpectedLoss):
        return stream_head(source, queued=check), None
    inspection = inspect_batch(
        _on_support(expect.batch, source), source.tokens[None], expect.weights, source.weight, form=True,
        tolerance=tolerance, masked_too=True,
    )  # fmt: skip
    early = start_early(source, inspection)
    check()
    first, count, refused = inspection.answer.numbers()
    if refused:  # somebody else will say what is wrong with them
        return stream_head(source), None
    part = inspection.formed(first, count)
    early = start_formed(source, inspection, early, part)
    expected = _as_kernels_have_it(rule, expect, source)
    if early is None or part in (slice(0, 0), slice(0, count)):  # in the order in which they came
        return head_in_parts(source, part, early, expected, needed)
    index = early.index
    ids = None if source.ids is None else source.ids[index]
    ordered = dataclasses.replace(source, hidden=early.packed, tokens=source.tokens[index], ids=ids)
    rows, formed = head_in_parts(ordered, part, early, expected.each(lambda x: x[index]), needed, index)
    return HeadRows(*(torch.empty_like(x).index_copy_(0, index, x) for x in vars(rows).values())), formed


def _on_support(batch: TokenBatch, source: HeadInput) -> TokenBatch:
    """The batch with the support that the head has been given, if it has."""
    old = batch.dist_old
    if old is None:
        return batch
    anchor = None if source.ids is None else SparseDist(source.ids[None], old.logp, old.rest)
    return dataclasses.replace(batch, dist_old=anchor)


def _rule_for(expect: Expect | None, source: HeadInput, tolerance: float) -> LossRule | None:
    """The kernel that computes what is expected; None where there is none, or where it would tell of no dense row."""
    if not isinstance(expect, ExpectedLoss) or source.request.top_k is not None or not len(source.tokens):
        return None
    rule, supported = rule_of(expect.objective), _on_support(expect.batch, source).dist_old is not None
    return None if rule is None or not (supported or (tolerance == 0 and not rule.needs_support)) else rule


def _as_kernels_have_it(rule: LossRule, expect: ExpectedLoss, source: HeadInput) -> Expected:
    """The loss as the kernels compute it."""
    batch = _on_support(expect.batch, source)

    def rows(x: Tensor) -> Tensor:
        return x.detach()[0].float().contiguous()

    support = batch.dist_old
    kept, rest = (None, None) if support is None else (rows(support.logp), rows(support.rest))
    rollout = None if batch.logp_rollout is None else rows(batch.logp_rollout)
    old = OldRows(rows(batch.logp_old), kept, rest, rows(batch.advantages), rollout)
    live = batch.mask[0]
    weights = live.float() if expect.weights is None else torch.where(live, rows(expect.weights), 0.0)
    if not expect.at_rest:
        return Expected(rule, old, weights)
    return Expected(lambda new, old: rule(new, dataclasses.replace(old, logp=new.logp.contiguous())), old, weights)


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
    nats = None if upstream.entropy is None else upstream.entropy.contiguous()
    d_hidden, d_weight = (torch.empty_like(x) if need else None for x, need in zip((hidden, weight), needed, strict=False))
    d_bias = torch.empty_like(bias) if bias is not None and needed[2] else None
    found, by_token = (d_hidden, d_weight, d_bias), None
    if tolerance > 0 and (d_weight is not None or d_bias is not None):
        by_token = sort_by_token(routes, len(weight))  # which waits for nothing but what was queued before it
    numbers = Later(routes.counts)
    if tolerance > 0:
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
