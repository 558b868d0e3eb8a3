"""Autograd function of the head in Triton, with checks of its inputs."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from corral.head.logits import LogitSpec
from corral.head.rows import AsyncCopy, HeadInput, HeadRequest, HeadRows
from corral.head.triton.backward import head_gradients, row_gradient
from corral.head.triton.gemm_stats import lanes
from corral.head.triton.loss import Upstream
from corral.head.triton.support import stream_head
from corral.support import refuse_ids, refuse_repeats


class IdCheck:
    """Check of sampled tokens and a support: queued on the device first, raised after the head's kernels are queued.

    Kernels must therefore read no memory out of bounds, whatever the ids.
    """

    def __init__(self, where: str, tokens: Tensor, ids: Tensor | None, vocabulary: int) -> None:
        self._where, self._vocabulary = where, vocabulary
        given = {"tokens": (tokens, 0), "ids": (ids, -1)}
        self._asked = {name: (x, low) for name, (x, low) in given.items() if x is not None and x.numel()}
        found = [bound for x, _ in self._asked.values() for bound in x.aminmax()]
        if "ids" in self._asked:
            count, slots = (support := self._asked["ids"][0]).shape
            repeated = torch.zeros((), dtype=support.dtype, device=support.device)
            _repeat_kernel[(count,)](support, repeated, slots, SLOTS=lanes(slots), SOME=16, num_warps=4)
            found.append(repeated)
        self._found = AsyncCopy(torch.stack(found)) if found else None

    def wait(self) -> None:
        """Refuse ids outside the vocabulary, and supports that contain a token twice."""
        found = [] if self._found is None else self._found.wait()
        for i, (name, (_, lowest)) in enumerate(self._asked.items()):
            refuse_ids(self._where, name, *found[2 * i : 2 * i + 2], lowest=lowest, vocabulary=self._vocabulary)
        if "ids" in self._asked:
            refuse_repeats(self._where, "ids", bool(found[-1]))


@triton.jit
def _repeat_kernel(ids, found, slots, SLOTS: tl.constexpr, SOME: tl.constexpr):
    """Set `found` to 1 if a row contains a token twice."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    id = tl.load(ids + row * slots + slot, mask=slot < slots, other=-1)
    for begin in range(0, slots, SOME):
        before = begin + tl.arange(0, SOME)
        other = tl.load(ids + row * slots + before, mask=before < slots, other=-1)
        same = (id[:, None] == other[None, :]) & (slot[:, None] > before[None, :]) & (id >= 0)[:, None]
        tl.store(found, 1, mask=tl.max(tl.max(same.to(tl.int32), 1), 0) > 0)


class TritonHead(torch.autograd.Function):
    """Autograd function of the head on rows [N, H].

    Returns log-probs, entropy, the support's log-probs, tail mass, support, and the largest log-prob outside it.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, ids: Tensor | None, spec: LogitSpec,
        request: HeadRequest, tolerance: float, report: Tensor | None, joins: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.spec, ctx.request, ctx.tolerance, ctx.report = spec, request, tolerance, report
        source = HeadInput(hidden, weight, bias, tokens, ids, spec, request, joins)
        source = source.map(Tensor.contiguous, shared=True)  # kernels read one row behind the other
        check = IdCheck("lm_head", source.tokens, source.ids, len(weight))
        rows = stream_head(source, queued=check.wait)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(rows.ids, rows.rest_max)
        ctx.save_for_backward(source.hidden, weight, source.bias, source.tokens, *vars(rows).values())
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
        upstream = Upstream(logp=g_logp, kept=g_kept, rest=g_rest, entropy=g_entropy).map(Tensor.contiguous)
        gradient = row_gradient(rows, tokens, upstream, ctx.spec)
        pending = head_gradients(source, rows, gradient, ctx.tolerance, needed, g_entropy=upstream.entropy)
        if ctx.report is not None:
            ctx.report.copy_(pending.routes.shares)
        return (*pending.finish(), *nothing, None)
