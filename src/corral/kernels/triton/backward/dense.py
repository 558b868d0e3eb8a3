"""The exact gradient of some rows: logits recomputed, one part of the vocabulary at a time, and turned into their gradient."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.logits import slices
from corral.kernels.rows import HeadInput, HeadRows
from corral.kernels.triton.backward.route import PADDED
from corral.kernels.triton.backward.row_gradient import RowGradient
from corral.kernels.triton.gemm_stats import finish_logits, spec_arguments

LOGITS_AT_ONCE = 2**28
"""Held at once: 1 GiB of them in float32, and half as much of their gradient."""
ROWS_AT_ONCE = 16384


def dense_rows(
    source: HeadInput,
    rows: HeadRows,
    g_entropy: Tensor | None,
    gradient: RowGradient,
    picked: Tensor,
    count: int,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
    d_bias: Tensor | None,
    *,
    add: bool = False,
) -> None:
    """Write dH of the first `count` rows `picked`, −1 behind them, and their dW and db; or `add` these to what is there."""
    hidden, weight, bias, spec = source.hidden, source.weight, source.bias, source.spec
    for part in slices(triton.cdiv(count, PADDED) * PADDED, ROWS_AT_ONCE):
        add = add or part.start > 0
        row = picked[part]
        real = row[: max(count - part.start, 0)]
        h = hidden[row.clamp(min=0)]
        d_h = torch.empty(h.shape, dtype=torch.float32, device=h.device) if d_hidden is not None else None
        columns = max(2048, LOGITS_AT_ONCE // len(row) // 256 * 256)
        memory = h.new_empty(len(row) * min(columns, len(weight)), dtype=torch.float32)
        memory_dz = torch.empty_like(memory, dtype=h.dtype)
        for block in slices(len(weight), columns):
            w = weight[block]
            shape = (len(row), len(w))
            dots, dz = (x[: shape[0] * shape[1]].view(shape) for x in (memory, memory_dz))
            multiply(h, w.T, dots)
            _dense_kernel[(shape[0], triton.cdiv(shape[1], 4096))](
                dots, dz, bias, row, rows.lse, rows.rest, rows.entropy, g_entropy, gradient.factor, gradient.ids,
                gradient.value, block.start, shape[1], len(weight), gradient.ids.shape[1], *spec_arguments(spec),
                spec.slope,
                spec.curve, BIAS=bias is not None,
                CAP=spec.softcap is not None, ENTROPY=g_entropy is not None, BLOCK=4096,
                SLOTS=max(2, triton.next_power_of_2(gradient.ids.shape[1])), num_warps=8,
            )  # fmt: skip
            if d_h is not None:
                multiply(dz, w, d_h, add=block.start > 0)
            if d_weight is not None:
                multiply(dz.T, h, d_weight[block], add=add)
            if d_bias is not None:
                d_b = dz.sum(0, dtype=torch.float32)
                d_bias[block] = d_b + d_bias[block] if add else d_b
        if d_hidden is not None and d_h is not None:
            d_hidden.index_copy_(0, real, d_h[: len(real)].to(d_hidden.dtype))


def multiply(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
    """out = left @ right, or out += it, summed in float32 whatever the factors are."""
    if left.dtype == out.dtype and (left.is_cuda or left.dtype == torch.float32):
        torch.addmm(out, left, right, out=out) if add else torch.mm(left, right, out=out)
    elif left.is_cuda:
        if add:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
        else:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        dot = left.float() @ right.float()
        out.copy_(dot + out.float() if add else dot)


@triton.jit
@no_type_check
def _dense_kernel(
    dots, dz, bias, picked, lse, rest, entropy, g_entropy, factor, ids, value, start, width, vocabulary, slots, before, cap,
    after, slope, curve, BIAS: tl.constexpr, CAP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one row: the factor times p / p_rest everywhere, then the single entries in their places."""
    row = tl.load(picked + tl.program_id(0))
    real = row >= 0
    row = tl.where(real, row, 0)
    begin = tl.program_id(1) * BLOCK
    column = begin + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * width
    dot = tl.load(dots + at + column, mask=column < width, other=0.0)[None, :]
    z = finish_logits(dot, start + column, bias, vocabulary, before, cap, after, BIAS, CAP)
    log_p = z - tl.load(lse + row)
    log_rest = tl.load(rest + row)
    log_rest = tl.where(log_rest == -float("inf"), 0.0, log_rest)
    g = tl.exp(log_p - log_rest) * tl.load(factor + row)
    if ENTROPY:
        surprise = tl.where(log_p > -float("inf"), log_p + tl.load(entropy + row), 0.0)
        g -= tl.exp(log_p) * tl.load(g_entropy + row) * surprise
    g = tl.where(real, g * slope, 0.0)
    if CAP:
        u = z * curve
        g = tl.where(z > -float("inf"), g * (1.0 - u * u), 0.0)
    kind = dz.dtype.element_ty
    tl.store(dz + at + column[None, :], g.to(kind), mask=(column < width)[None, :])
    tl.debug_barrier()
    slot = tl.arange(0, SLOTS)
    id = tl.load(ids + row * slots + slot, mask=slot < slots, other=-1) - start
    single = tl.load(value + row * slots + slot, mask=slot < slots, other=0.0)
    tl.store(dz + at + id, single.to(kind), mask=real & (id >= begin) & (id < begin + BLOCK) & (id < width))
