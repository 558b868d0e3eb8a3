"""The head on any device: logits are made some rows at a time, read and dropped, and recomputed block by block in backward."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from corral.kernels.logits import LogitSpec
from corral.kernels.rows import HeadInput, HeadRequest
from corral.kernels.torch.backward import HeadGradients, HeadState, head_backward
from corral.kernels.torch.online import head_forward
from corral.kernels.torch.sharded import Shard
from corral.support import check_ids, check_unique


class TorchHead(torch.autograd.Function):
    """Rows [N, H] → log-probs, entropy, the support's log-probs, tail mass, support, largest log-prob outside it."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, ids: Tensor | None, spec: LogitSpec,
        request: HeadRequest, shard: Shard, joins: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.spec, ctx.request, ctx.shard = spec, request, shard
        check_ids("lm_head", "tokens", tokens, lowest=0, vocabulary=ctx.shard.vocabulary)
        if ids is not None:
            check_ids("lm_head", "ids", ids, lowest=-1, vocabulary=ctx.shard.vocabulary)
            check_unique("lm_head", "ids", ids)
        rows = head_forward(HeadInput(hidden, weight, bias, tokens, ids, spec, request, joins), shard)
        ctx.mark_non_differentiable(rows.ids, rows.rest_max)
        ctx.save_for_backward(hidden, weight, bias, tokens, rows.ids, rows.lse, rows.rest, rows.entropy)
        return rows.logp, rows.entropy, rows.kept, rows.rest, rows.ids, rows.rest_max

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logp: Tensor, g_entropy: Tensor, g_kept: Tensor, g_rest: Tensor, *_: Any) -> tuple[Any, ...]:
        hidden, weight, bias, tokens, ids, lse, rest, entropy = ctx.saved_tensors
        entropy = entropy if ctx.request.entropy else None
        state = HeadState(hidden, weight, bias, tokens, ids, lse, rest, entropy=entropy, shard=ctx.shard)
        grads = HeadGradients(g_logp, g_kept, g_rest, g_entropy)
        found = head_backward(ctx.spec, state, grads, ctx.needs_input_grad[:3])
        return (*found, None, None, None, None, None, None)
