"""Gradients from single entries: rows of the weight gathered for dH, hidden states gathered for dW. No atomics.

For dW the entries are sorted by token, and each token's row is summed by one program in the order of the batch, so that the
result is the same every time.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.row_gradient import RowGradient

BLOCK = 4096
"""Hidden width that one program writes of a row of dW."""


def sparse_hidden(weight: Tensor, rows: RowGradient, out: Tensor) -> None:
    """dH [N, H] of the sparse rows, 0 elsewhere."""
    vocabulary, width = weight.shape
    block = min(1024, triton.next_power_of_2(width))
    _hidden_kernel[(len(out), triton.cdiv(width, block))](
        weight, rows.key, rows.value, out, vocabulary, width, rows.key.shape[1], BLOCK=block, SOME=8, num_warps=2,
    )  # fmt: skip


def sort_by_token(rows: RowGradient, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The entries in the order of their tokens, and where each token's begin [V + 1]."""
    keys, order = rows.key.flatten().sort(stable=True)
    tokens = torch.arange(vocabulary + 1, dtype=torch.int32, device=keys.device)
    return order, torch.searchsorted(keys, tokens, out_int32=True)


def sparse_weight(
    hidden: Tensor,
    rows: RowGradient,
    by_token: tuple[Tensor, Tensor],
    d_weight: Tensor | None,
    d_bias: Tensor | None,
    *,
    add: bool,
) -> None:
    """dW [V, H] and db [V] of the sparse rows, every row of them written; or added to what is there."""
    order, starts = by_token
    vocabulary = len(starts) - 1
    width = hidden.shape[1]
    block = min(BLOCK, triton.next_power_of_2(width))
    _weight_kernel[(vocabulary, triton.cdiv(width, block) if d_weight is not None else 1)](
        hidden, rows.value, order, starts, d_weight, d_bias, width, rows.key.shape[1], ADD=add,
        WEIGHT=d_weight is not None, BIAS=d_bias is not None, BLOCK=block, SOME=2, num_warps=max(1, block // 512),
    )  # fmt: skip


@triton.jit
@no_type_check
def _hidden_kernel(weight, key, value, out, vocabulary, width, slots, BLOCK: tl.constexpr, SOME: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, slots, SOME):
        slot = k + tl.arange(0, SOME)
        id = tl.load(key + row * slots + slot, mask=slot < slots, other=vocabulary)
        some = id < vocabulary
        if tl.max(some.to(tl.int32), 0) > 0:
            g = tl.load(value + row * slots + slot, mask=some, other=0.0)
            w = tl.load(
                weight + id.to(tl.int64)[:, None] * width + column[None, :],
                mask=some[:, None] & (column < width)[None, :], other=0.0,
            )  # fmt: skip
            total += tl.sum(w.to(tl.float32) * g[:, None], 0)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit
@no_type_check
def _weight_kernel(
    hidden, value, order, starts, d_weight, d_bias, width, slots, ADD: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    sum_g = 0.0
    start, end = tl.load(starts + token), tl.load(starts + token + 1)
    if ADD:  # noqa: SIM102 (decided when compiling, and the other when running)
        if start == end:
            return
    for begin in range(start, end, SOME):
        item = begin + tl.arange(0, SOME)
        entry = tl.load(order + item, mask=item < end, other=0)
        g = tl.load(value + entry, mask=item < end, other=0.0)
        if WEIGHT:
            h = tl.load(
                hidden + (entry // slots)[:, None] * width + column[None, :],
                mask=(item < end)[:, None] & (column < width)[None, :], other=0.0,
            )  # fmt: skip
            total += tl.sum(h.to(tl.float32) * g[:, None], 0)
        if BIAS:
            sum_g += tl.sum(g, 0)
    if WEIGHT:
        here = d_weight + token.to(tl.int64) * width + column
        if ADD:
            total += tl.load(here, mask=column < width, other=0.0).to(tl.float32)
        tl.store(here, total.to(d_weight.dtype.element_ty), mask=column < width)
    if BIAS:  # noqa: SIM102 (decided when compiling, and the other when running)
        if tl.program_id(1) == 0:
            if ADD:
                sum_g += tl.load(d_bias + token).to(tl.float32)
            tl.store(d_bias + token, sum_g.to(d_bias.dtype.element_ty))
