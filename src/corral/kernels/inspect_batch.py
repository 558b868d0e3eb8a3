"""Whether a batch is fit for the kernels, and in which order its rows are worked on: found on the device, told once.

A row is foreseen to be dense from the old policy. Where the loss is about a ratio, its gradient is dz = g (1_a − p) with
g = |Â| w. A sparse backward drops Σ |dz| = g p_rest of a row's g (1 − p_a + Σ_{v≠a} p_v) = 2 g (1 − p_a): the row is dense
where that is more than may be dropped of it, or of the mean row if that is larger, as `route` will have it of the new policy.
"""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.later import Later
from corral.kernels.live import advantages_of
from corral.kernels.loss_rows import TOLERATED, UNCHECKED
from corral.support import Limits
from corral.types import TokenBatch

FEWEST, SMALLEST_SHARE = 128, 0.03
"""Rows foreseen to be dense, and their share of all, below which they are not worth products of their own; nor are others."""
SMALL = 10**12
"""Operations of a product so small that two parts take the host longer than they save the device: then it is all or none."""
ROWS = 8


@dataclass(frozen=True, eq=False)
class Inspection:
    """What was found, on its way to the host."""

    counts: Tensor
    """Rows of the first part, live tokens, and those of them that an objective would refuse [3] int32."""
    position: Tensor
    """Where the row of each token goes: the first part's in their order, then the second part's; −1 for masked ones."""
    formed_first: bool
    """The first part is that whose gradients are formed at once; else the second is."""
    small: bool
    """The product takes no longer than the host does to start what follows it."""
    answer: Later

    def formed(self, first: int, count: int) -> slice:
        """Which of `count` ordered rows are formed, of which `first` are in the first part; slice(0, 0) for none."""
        part = slice(0, first) if self.formed_first else slice(first, count)
        return part if part.start < part.stop else slice(0, 0)


def inspect_batch(
    batch: TokenBatch,
    tokens: Tensor,
    weights: Tensor | None,
    weight: Tensor,
    *,
    form: bool,
    tolerance: float,
    masked_too: bool = False,
    limits: Limits = UNCHECKED,
) -> Inspection:
    """Count what there is to do, and what cannot be done; and put the rows in order.

    Shapes are right by now. Refused are token ids outside the vocabulary, a support whose slot 0 is not the sampled token, and
    whatever `objective.check` refuses that does not come from the new policy, its `limits` of log-probs included. With `form`
    gradients are to be formed at once: of rows that are foreseen to be dense and, where nothing may be dropped, of all that
    have an advantage and a weight. Masked tokens have no row, or with `masked_too` one without a gradient.
    """
    length, old, total = batch.mask.shape[1], batch.dist_old, batch.mask.numel()
    vocabulary, small = len(weight), 2 * total * weight.numel() < SMALL
    device, every = batch.mask.device, form and tolerance == 0
    counts = torch.empty(3, dtype=torch.int32, device=device)
    position = torch.empty(total, dtype=torch.int32, device=device)
    off, size = (torch.empty(total, device=device) for _ in range(2))
    advantages = advantages_of(batch)
    slots = old.ids.shape[-1] if old is not None else 0
    # The kernel reads [B T …] one behind the other.
    tokens, logp_old, mask = tokens.contiguous(), batch.logp_old.contiguous(), batch.mask.contiguous()
    support = (None, None, None) if old is None else (old.ids, old.logp, old.rest)
    ids, kept, rest, rollout, weights = (None if x is None else x.contiguous() for x in (*support, batch.logp_rollout, weights))
    _inspect_kernel[(triton.cdiv(total, ROWS),)](
        mask.view(torch.uint8), tokens, ids, kept, rest, logp_old, rollout, advantages, weights, off, size,
        total, length, *advantages.stride(), slots, vocabulary, *limits, SUPPORT=old is not None,
        ROLLOUT=rollout is not None, WEIGHTS=weights is not None, FORM=form, EVERY=every, MASKED_TOO=masked_too,
        SLOTS=max(2, triton.next_power_of_2(slots)), ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    least = (1, 0.0, 0.0) if every else (FEWEST, SMALLEST_SHARE, 1.0 if small else SMALLEST_SHARE)
    _order_kernel[(1,)](
        off, size, position, counts, total, tolerance, *least, FORMED_FIRST=every,
        BLOCK=min(4096, triton.next_power_of_2(total)), num_warps=8,
    )  # fmt: skip
    return Inspection(counts, position, every, small, Later(counts))


def compact(hidden: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [R, H] in their order, and which they were; what is behind the last may be anything."""
    (rows, width), hidden = hidden.shape, hidden.contiguous()
    picked, index = torch.empty_like(hidden), torch.empty(rows, dtype=torch.int64, device=hidden.device)
    block = min(4096, triton.next_power_of_2(width))
    _compact_kernel[(rows, triton.cdiv(width, block))](hidden, position, picked, index, width, BLOCK=block, num_warps=4)
    return picked, index


@triton.jit
@no_type_check
def _compact_kernel(hidden, position, picked, index, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    to = tl.load(position + row).to(tl.int64)
    if to >= 0:
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
    mask, tokens, ids, kept, rest, logp_old, rollout, advantages, weights, off, size, total, length, stride_b, stride_t, slots,
    vocabulary, highest, slack, SUPPORT: tl.constexpr, ROLLOUT: tl.constexpr, WEIGHTS: tl.constexpr, FORM: tl.constexpr,
    EVERY: tl.constexpr, MASKED_TOO: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of each row Σ |dz| and what a sparse backward drops of it; a size of −1 is no row, and −1 dropped a row to refuse."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = row < total
    live = inside & (tl.load(mask + row, mask=inside, other=0) != 0)
    there = inside if MASKED_TOO else live
    token = tl.load(tokens + row, mask=there, other=0)
    anchor = tl.load(logp_old + row, mask=live, other=0.0)
    advantage = tl.load(advantages + row // length * stride_b + row % length * stride_t, mask=live, other=0.0)
    fit = (token >= 0) & (token < vocabulary) & _finite(anchor) & _finite(advantage)
    fit = fit & ~(anchor.to(tl.float32) > highest)
    gain = tl.abs(advantage.to(tl.float32))
    if ROLLOUT:
        sampled = tl.load(rollout + row, mask=live, other=0.0)
        fit = fit & _finite(sampled) & ~(sampled.to(tl.float32) > highest)
    if WEIGHTS:
        factor = tl.load(weights + row, mask=live, other=0.0).to(tl.float32)
        fit = fit & _finite(factor)
        gain = tl.where(factor != 0.0, gain * tl.abs(factor), 0.0)
    whole, dropped = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    if SUPPORT:
        slot = tl.arange(0, SLOTS)
        real = (slot < slots)[None, :]
        at = row[:, None] * slots + slot[None, :]
        id = tl.load(ids + at, mask=there[:, None] & real, other=-1)
        value = tl.load(kept + at, mask=live[:, None] & real, other=0.0).to(tl.float32)
        outer = tl.load(rest + row, mask=live, other=0.0).to(tl.float32)
        misplaced = (slot == 0)[None, :] & live[:, None] & (id != token[:, None])
        bad = (id < -1) | (id >= vocabulary) | ~(value < float("inf")) | misplaced
        fit = fit & (tl.max(bad.to(tl.int32), 1) == 0) & (outer < float("inf"))
        own = tl.sum(tl.where((slot == 0)[None, :], value, 0.0), 1)
        fit = fit & (tl.abs(own - anchor.to(tl.float32)) <= TOLERATED)
        mass = tl.sum(tl.where(real, tl.exp(value), 0.0), 1) + tl.exp(outer)
        fit = fit & ~(live & (tl.abs(mass - 1.0) > slack))
        if FORM:
            whole = tl.where(gain > 0.0, gain * 2.0 * (1.0 - tl.exp(own)), 0.0)
            dropped = tl.where(gain > 0.0, gain * tl.exp(outer), 0.0)
    if EVERY:
        dropped = tl.where(gain > 0.0, float("inf"), 0.0)
    tl.store(size + row, tl.where(there, whole, -1.0), mask=inside)
    tl.store(off + row, tl.where(fit, dropped, -1.0), mask=inside)


@triton.jit
@no_type_check
def _ways(off, size, row, total, mean, tolerance):
    """Which rows there are, and which of them are foreseen to be dense."""
    whole = tl.load(size + row, mask=row < total, other=-1.0)
    dropped = tl.load(off + row, mask=row < total, other=0.0)
    live = ~(whole < 0.0)
    return live, live & (dropped > 0.0) & (dropped >= tolerance * tl.maximum(whole, mean))


@triton.jit
@no_type_check
def _order_kernel(
    off, size, position, counts, total, tolerance, fewest, share, rest, FORMED_FIRST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program, so that the mean and with it every row's way are the same each time."""
    sizes = tl.zeros((BLOCK,), tl.float32)
    rows, refused, dense = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, total, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        whole = tl.load(size + row, mask=row < total, other=-1.0)
        live = ~(whole < 0.0)
        sizes += tl.where(live, whole, 0.0)
        rows += live.to(tl.int32)
        refused += (live & (tl.load(off + row, mask=row < total, other=0.0) < 0.0)).to(tl.int32)
    every = tl.sum(rows, 0)
    mean = tl.sum(sizes, 0) / tl.maximum(every, 1).to(tl.float32)
    for begin in range(0, total, BLOCK):
        _live, flat = _ways(off, size, begin + tl.arange(0, BLOCK), total, mean, tolerance)
        dense += flat.to(tl.int32)
    formed = tl.sum(dense, 0)
    formed = tl.where((formed < fewest) | (formed.to(tl.float32) < share * every.to(tl.float32)), 0, formed)
    formed = tl.where((formed > 0) & ((every - formed).to(tl.float32) <= rest * every.to(tl.float32)), every, formed)
    first = formed if FORMED_FIRST else every - formed
    tl.store(counts, first)
    tl.store(counts + 1, every)
    tl.store(counts + 2, tl.sum(refused, 0))
    in_front, behind = first * 0, first
    for begin in range(0, total, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        live, flat = _ways(off, size, row, total, mean, tolerance)
        flat = live & (flat | (formed == every)) & (formed > 0)
        sooner = live & (flat if FORMED_FIRST else ~flat)
        later = live & ~sooner
        to = tl.where(
            sooner, in_front + tl.cumsum(sooner.to(tl.int32), 0) - 1, behind + tl.cumsum(later.to(tl.int32), 0) - 1
        )  # fmt: skip
        tl.store(position + row, tl.where(live, to, -1), mask=row < total)
        in_front += tl.sum(sooner.to(tl.int32), 0)
        behind += tl.sum(later.to(tl.int32), 0)
