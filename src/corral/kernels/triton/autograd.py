"""The head on a GPU, differentiable: one streamed GEMM forward, `head_gradients` backward."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from corral.kernels.logits import LogitSpec
from corral.kernels.rows import HeadInput, HeadRequest, HeadRows
from corral.kernels.triton.backward.row_gradient import Upstream, row_gradient
from corral.kernels.triton.gradients import head_gradients
from corral.kernels.triton.support.select import stream_head
from corral.kernels.triton.validate import IdCheck


class TritonHead(torch.autograd.Function):
    """Rows [N, H] → log-probs, entropy, the support's log-probs, tail mass, support, largest log-prob outside it."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, ids: Tensor | None, spec: LogitSpec,
        request: HeadRequest, tolerance: float, report: Tensor | None, joins: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.spec, ctx.request, ctx.tolerance, ctx.report = spec, request, tolerance, report
        # Kernels read what lies one behind the other.
        hidden, tokens = hidden.contiguous(), tokens.contiguous()
        bias, ids = (None if x is None else x.contiguous() for x in (bias, ids))
        check = IdCheck("lm_head", tokens, ids, len(weight))
        rows = stream_head(HeadInput(hidden, weight, bias, tokens, ids, spec, request, joins), queued=check.wait)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(rows.ids, rows.rest_max)
        ctx.save_for_backward(hidden, weight, bias, tokens, *vars(rows).values())
        return rows.logp, rows.entropy, rows.kept, rows.rest, rows.ids, rows.rest_max

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logp: Any, g_entropy: Any, g_kept: Any, g_rest: Any, *_: Any) -> tuple[Any, ...]:
        hidden, weight, bias, tokens, *fields = ctx.saved_tensors
        nothing, needed = (None,) * 6, ctx.needs_input_grad[:3]
        if not len(hidden):
            none = (torch.zeros_like(x) if need else None for x, need in zip((hidden, weight, bias), needed, strict=True))
            return (*none, *nothing, None)
        rows, source = HeadRows(*fields), HeadInput(hidden, weight, bias, tokens, None, ctx.spec, ctx.request)
        upstream = Upstream(logp=g_logp, kept=g_kept, rest=g_rest, entropy=g_entropy)
        gradient = row_gradient(rows, tokens, upstream, ctx.spec)
        g_entropy = None if g_entropy is None else g_entropy.contiguous()
        pending = head_gradients(source, rows, gradient, ctx.tolerance, needed, g_entropy=g_entropy)
        if ctx.report is not None:
            ctx.report.copy_(pending.routes.shares)
        return (*pending.finish(), *nothing, None)
