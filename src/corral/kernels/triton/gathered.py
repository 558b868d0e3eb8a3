"""Log-probs of a few more tokens of a policy on a GPU: a row's tokens one after the other, their weights read once."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.logits import LogitSpec
from corral.kernels.triton.gemm_stats import finish_logits, spec_arguments


def gather_logp(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: LogitSpec, tokens: Tensor, logp: Tensor, ids: Tensor
) -> Tensor:
    """`torch.gathered.gather_logp` is the reference. Padding costs nothing where it comes last."""
    out, width = torch.empty(ids.shape, device=ids.device), hidden.shape[1]
    hidden, tokens, logp, ids = (x.contiguous() for x in (hidden, tokens, logp, ids))
    _gather_kernel[(len(ids),)](
        hidden, weight, bias, tokens, logp, ids, out, len(weight), width, ids.shape[1], *spec_arguments(spec),
        BIAS=bias is not None, CAP=spec.softcap is not None, BLOCK=min(512, triton.next_power_of_2(width)), SOME=8,
        SLOTS=max(2, triton.next_power_of_2(ids.shape[1])), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
@no_type_check
def _logits(
    hidden, weight, bias, id, row, vocabulary, width, before, cap, after, BIAS: tl.constexpr, CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Logits of some tokens [1, n] of one row."""
    dots, member = tl.zeros(id.shape, tl.float32), (id >= 0) & (id < vocabulary)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        within = column < width
        h = tl.load(hidden + row * width + column, mask=within, other=0.0).to(tl.float32)
        at = weight + id.to(tl.int64)[:, None] * width + column[None, :]
        w = tl.load(at, mask=member[:, None] & within[None, :], other=0.0).to(tl.float32)
        dots += tl.sum(w * h[None, :], 1)
    return finish_logits(dots[None, :], tl.where(member, id, vocabulary), bias, vocabulary, before, cap, after, BIAS, CAP)


@triton.jit
@no_type_check
def _gather_kernel(
    hidden, weight, bias, tokens, logp, ids, out, vocabulary, width, slots, before, cap, after, BIAS: tl.constexpr,
    CAP: tl.constexpr, BLOCK: tl.constexpr, SOME: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    wanted = tl.load(ids + row * slots + slot, mask=slot < slots, other=-1) >= 0
    last = tl.max(tl.where(wanted, slot + 1, 0), 0)
    tl.store(out + row * slots + slot, tl.full((SLOTS,), -float("inf"), tl.float32), mask=(slot >= last) & (slot < slots))
    if last > 0:
        sampled = tl.load(tokens + row) + tl.zeros((1,), tl.int64)
        own = _logits(hidden, weight, bias, sampled, row, vocabulary, width, before, cap, after, BIAS, CAP, BLOCK)
        level = tl.load(logp + row).to(tl.float32) - tl.max(tl.max(own, 1), 0)
        for begin in range(0, last, SOME):
            some = begin + tl.arange(0, SOME)
            id = tl.load(ids + row * slots + some, mask=some < slots, other=-1)
            z = _logits(hidden, weight, bias, id, row, vocabulary, width, before, cap, after, BIAS, CAP, BLOCK)
            value = tl.where((id >= 0)[None, :], z + level, -float("inf"))
            tl.store((out + row * slots + some)[None, :], value, mask=(some < last)[None, :])
