"""Whether a batch is fit for the kernels: everything is asked on the device, in one kernel, and answered once."""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.later import Later
from corral.types import TokenBatch

ANCHOR_TOLERANCE = 1e-3
"""How far `dist_old` and `logp_old` may disagree on the sampled token before the objective is asked to say so."""
ROWS = 16


@dataclass(frozen=True, eq=False)
class Inspection:
    """What was found, on its way to the host."""

    counts: Tensor
    """Live tokens, those of them with an advantage and a weight, and those that an objective would refuse [3] int32."""
    answer: Later


def inspect_batch(batch: TokenBatch, tokens: Tensor, weights: Tensor | None, vocabulary: int) -> Inspection:
    """Count what there is to do, and what cannot be done.

    Shapes are right by now. Refused are token ids outside the vocabulary, a support whose slot 0 is not the sampled token, and
    whatever `objective.check` refuses that does not come from the new policy.
    """
    (sequences, length), old = batch.mask.shape, batch.dist_old
    counts = torch.zeros(3, dtype=torch.int32, device=batch.mask.device)
    advantages = batch.advantages[:, None].expand(sequences, length) if batch.advantages.ndim == 1 else batch.advantages
    slots = old.ids.shape[-1] if old is not None else 0
    # The kernel reads [B T …] one behind the other.
    tokens, logp_old, mask = tokens.contiguous(), batch.logp_old.contiguous(), batch.mask.contiguous()
    support = (None, None, None) if old is None else (old.ids, old.logp, old.rest)
    ids, kept, rest, rollout, weights = (None if x is None else x.contiguous() for x in (*support, batch.logp_rollout, weights))
    _inspect_kernel[(triton.cdiv(mask.numel(), ROWS),)](
        mask.view(torch.uint8), tokens, ids, kept, rest, logp_old, rollout, advantages, weights, counts,
        mask.numel(), length, *advantages.stride(), slots, vocabulary, ANCHOR_TOLERANCE, SUPPORT=old is not None,
        ROLLOUT=rollout is not None, WEIGHTS=weights is not None, SLOTS=max(2, triton.next_power_of_2(slots)), ROWS=ROWS,
        num_warps=4,
    )  # fmt: skip
    return Inspection(counts, Later(counts))


def compact(hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [B T H] of the live tokens one behind the other, and which they were; what is behind the last may be anything."""
    rows, width = mask.numel(), hidden.shape[-1]
    picked, index = hidden.new_empty(rows, width), torch.empty(rows, dtype=torch.int64, device=mask.device)
    block = min(4096, triton.next_power_of_2(width))
    _compact_kernel[(rows, triton.cdiv(width, block))](
        hidden.contiguous(), mask.contiguous().view(torch.uint8), mask.flatten().cumsum(0), picked, index, width, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return picked, index


@triton.jit
@no_type_check
def _compact_kernel(hidden, mask, position, picked, index, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(mask + row) != 0:
        to = tl.load(position + row) - 1
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(hidden + row * width + column, mask=column < width, other=0.0)
        tl.store(picked + to * width + column, x, mask=column < width)
        tl.store(index + to, row)


@triton.jit
@no_type_check
def _finite(x):
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
@no_type_check
def _inspect_kernel(
    mask, tokens, ids, kept, rest, logp_old, rollout, advantages, weights, counts, total, length, stride_b, stride_t, slots,
    vocabulary, tolerance, SUPPORT: tl.constexpr, ROLLOUT: tl.constexpr, WEIGHTS: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = row < total
    live = inside & (tl.load(mask + row, mask=inside, other=0) != 0)
    token = tl.load(tokens + row, mask=live, other=0)
    anchor = tl.load(logp_old + row, mask=live, other=0.0)
    advantage = tl.load(advantages + row // length * stride_b + row % length * stride_t, mask=live, other=0.0)
    fit = (token >= 0) & (token < vocabulary) & _finite(anchor) & _finite(advantage)
    credited = live & (advantage != 0.0)
    if ROLLOUT:
        fit = fit & _finite(tl.load(rollout + row, mask=live, other=0.0))
    if WEIGHTS:
        factor = tl.load(weights + row, mask=live, other=0.0)
        fit = fit & _finite(factor)
        credited = credited & (factor != 0.0)
    if SUPPORT:
        slot = tl.arange(0, SLOTS)
        here = live[:, None] & (slot < slots)[None, :]
        at = row[:, None] * slots + slot[None, :]
        id = tl.load(ids + at, mask=here, other=-1)
        value = tl.load(kept + at, mask=here, other=0.0).to(tl.float32)
        outer = tl.load(rest + row, mask=live, other=0.0).to(tl.float32)
        bad = (id < -1) | (id >= vocabulary) | ~(value < float("inf")) | ((slot == 0)[None, :] & (id != token[:, None]))
        fit = fit & (tl.max((bad & here).to(tl.int32), 1) == 0) & (outer < float("inf"))
        own = tl.load(kept + row * slots, mask=live, other=0.0).to(tl.float32)
        fit = fit & (tl.abs(own - anchor.to(tl.float32)) <= tolerance)
    tl.atomic_add(counts, tl.sum(live.to(tl.int32), 0))
    tl.atomic_add(counts + 1, tl.sum(credited.to(tl.int32), 0))
    tl.atomic_add(counts + 2, tl.sum((live & ~fit).to(tl.int32), 0))
