"""Validation of a batch, and which of its rows are planned to be dense: found on the device, read by the host once.

Planned from the old policy. Where the loss is about a ratio, its gradient is dz = g (1_a − p) with g = |Â| w c. A sparse
gradient drops Σ |dz| = g p_rest of a row's g (1 − p_a + Σ_{v≠a} p_v) = 2 g (1 − p_a): the row is dense where that is more than
may be dropped of it, or of the mean row if that is larger, as `route` has it of the new policy. Without a given support, what
the policy's own likeliest tokens leave out is not known. The mean of −log p_a is about the policy's entropy, though: where that
is more than the uniform policy's on so many tokens, all rows are dense.
"""

import math
from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.async_copy import AsyncCopy
from corral.kernels.packed import LossTerms, token_advantages
from corral.kernels.triton.loss.rows import TOLERATED
from corral.support import LogpTolerance

FEWEST, SMALLEST_SHARE = 128, 0.03
"""Rows planned to be dense, and their share of all, below which they are not worth GEMMs of their own; nor are others."""
SMALL = 10**12
"""Operations of a GEMM so small that two parts take the host longer than they save the device: then it is all or none."""
ROWS = 8


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The order in which the unmasked tokens of a batch are worked on, and how many they are, on its way to the host."""

    order: Tensor
    """Their places in the flattened batch, those of streamed rows first; 0 behind the last [B · T]."""
    counts: Tensor
    """Streamed rows, whose gradient is sparse unless `route` finds it dense; all rows, the others being dense; and those that
    the objective would refuse [3] int32."""
    copy: AsyncCopy

    def wait(self) -> tuple[int, int] | None:
        """Streamed rows, and all; None where there are none, or one to refuse."""
        streamed, count, refused = self.copy.wait()
        return None if refused or not count else (streamed, count)


def plan_batch(
    terms: LossTerms, tokens: Tensor, weight: Tensor, *, own: int | None, dense: bool, tolerance: float, limits: LogpTolerance
) -> BatchPlan:
    """Validate a batch and put its rows in order.

    Shapes are right by now. Refused are token ids outside the vocabulary, a support whose slot 0 is not the sampled token, and
    whatever `objective.check` refuses that does not come from the new policy, its `limits` of log-probs included. Without
    `dense` no row is planned to be dense; where nothing may be dropped, all with a gradient are; where `own` tokens are to be
    found that carry the gradient, all rows of a flat policy are.
    """
    batch = terms.batch
    length, old, total = batch.mask.shape[1], batch.dist_old, batch.mask.numel()
    small, device, every = 2 * total * weight.numel() < SMALL, batch.mask.device, dense and tolerance == 0
    counts = torch.empty(3, dtype=torch.int32, device=device)
    order = torch.zeros(total, dtype=torch.int64, device=device)
    off, size = (torch.empty(total, device=device) for _ in range(2))
    advantages = token_advantages(batch)
    slots = old.ids.shape[-1] if old is not None else 0
    # The kernel reads [B T …] one behind the other.
    support = (None, None, None) if old is None else (old.ids, old.logp, old.rest)
    given = (batch.mask, tokens, *support, batch.logp_old, batch.logp_rollout, terms.weights, terms.policy_weights)
    mask, picked, ids, kept, rest, logp_old, rollout, weights, policy_weights = (
        None if x is None else x.contiguous() for x in given
    )
    assert mask is not None
    _inspect_kernel[(triton.cdiv(total, ROWS),)](
        mask.view(torch.uint8), picked, ids, kept, rest, logp_old, rollout, advantages, weights, policy_weights, off, size,
        total, length, *advantages.stride(), slots, len(weight), *limits, SUPPORT=old is not None,
        ROLLOUT=rollout is not None, POLICY=policy_weights is not None, ANCHOR=not terms.on_policy, DENSE=dense, EVERY=every,
        SLOTS=max(2, triton.next_power_of_2(slots)), ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    least = (1, 0.0, 0.0) if every else (FEWEST, SMALLEST_SHARE, 1.0 if small else SMALLEST_SHARE)
    flat = math.inf if own is None else math.log(own)
    _order_kernel[(1,)](
        off, size, order, counts, total, tolerance, flat, *least, BLOCK=min(4096, triton.next_power_of_2(total)), num_warps=8
    )
    return BatchPlan(order, counts, AsyncCopy(counts))


@triton.jit
@no_type_check
def _finite(x):
    return tl.abs(x.to(tl.float32)) < float("inf")


@triton.jit
@no_type_check
def _inspect_kernel(
    mask, tokens, ids, kept, rest, logp_old, rollout, advantages, weights, policy_weights, off, size, total, length, stride_b,
    stride_t, slots, vocabulary, highest, slack, SUPPORT: tl.constexpr, ROLLOUT: tl.constexpr, POLICY: tl.constexpr,
    ANCHOR: tl.constexpr, DENSE: tl.constexpr, EVERY: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of each row Σ |dz| and what a sparse backward drops of it; a size of −1 is no row, and −1 dropped a row to refuse.

    Without a support the size is −log p_a.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = row < total
    unmasked = inside & (tl.load(mask + row, mask=inside, other=0) != 0)
    token = tl.load(tokens + row, mask=unmasked, other=0)
    anchor = tl.load(logp_old + row, mask=unmasked & ANCHOR, other=0.0)
    advantage = tl.load(advantages + row // length * stride_b + row % length * stride_t, mask=unmasked, other=0.0)
    fit = (token >= 0) & (token < vocabulary) & _finite(anchor) & _finite(advantage)
    fit = fit & ~(anchor.to(tl.float32) > highest)
    gain = tl.abs(advantage.to(tl.float32))
    if ROLLOUT:
        sampled = tl.load(rollout + row, mask=unmasked, other=0.0)
        fit = fit & _finite(sampled) & ~(sampled.to(tl.float32) > highest)
    factor = tl.load(weights + row, mask=unmasked, other=0.0).to(tl.float32)
    if POLICY:
        c = tl.load(policy_weights + row, mask=unmasked, other=0.0).to(tl.float32)
        fit = fit & _finite(c)
        factor = tl.where(c != 0.0, factor * c, 0.0)
    fit = fit & _finite(factor)
    gain = tl.where(factor != 0.0, gain * tl.abs(factor), 0.0)
    whole, dropped = tl.maximum(-anchor.to(tl.float32), 0.0), tl.zeros((ROWS,), tl.float32)
    if SUPPORT:
        whole = tl.zeros((ROWS,), tl.float32)
        slot = tl.arange(0, SLOTS)
        real = (slot < slots)[None, :]
        at = row[:, None] * slots + slot[None, :]
        id = tl.load(ids + at, mask=unmasked[:, None] & real, other=-1)
        value = tl.load(kept + at, mask=unmasked[:, None] & real, other=0.0).to(tl.float32)
        outer = tl.load(rest + row, mask=unmasked, other=0.0).to(tl.float32)
        misplaced = (slot == 0)[None, :] & unmasked[:, None] & (id != token[:, None])
        bad = (id < -1) | (id >= vocabulary) | ~(value < float("inf")) | misplaced
        fit = fit & (tl.max(bad.to(tl.int32), 1) == 0) & (outer < float("inf"))
        own = tl.sum(tl.where((slot == 0)[None, :], value, 0.0), 1)
        fit = fit & (tl.abs(own - anchor.to(tl.float32)) <= TOLERATED)
        mass = tl.sum(tl.where(real, tl.exp(value), 0.0), 1) + tl.exp(outer)
        fit = fit & ~(unmasked & (tl.abs(mass - 1.0) > slack))
        if DENSE:
            whole = tl.where(gain > 0.0, gain * 2.0 * (1.0 - tl.exp(own)), 0.0)
            dropped = tl.where(gain > 0.0, gain * tl.exp(outer), 0.0)
    if EVERY:
        dropped = tl.where(gain > 0.0, float("inf"), 0.0)
    tl.store(size + row, tl.where(unmasked, whole, -1.0), mask=inside)
    tl.store(off + row, tl.where(fit, dropped, -1.0), mask=inside)


@triton.jit
@no_type_check
def _ways(off, size, row, total, mean, tolerance):
    """Which rows there are, and which of them are planned to be dense."""
    whole = tl.load(size + row, mask=row < total, other=-1.0)
    dropped = tl.load(off + row, mask=row < total, other=0.0)
    unmasked = ~(whole < 0.0)
    return unmasked, unmasked & (dropped > 0.0) & (dropped >= tolerance * tl.maximum(whole, mean))


@triton.jit
@no_type_check
def _order_kernel(
    off, size, order, counts, total, tolerance, flat, fewest, share, rest, BLOCK: tl.constexpr
):  # fmt: skip
    """One program, so that the mean and with it every row's way are the same each time."""
    sizes = tl.zeros((BLOCK,), tl.float32)
    rows, refused, dense = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, total, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        whole = tl.load(size + row, mask=row < total, other=-1.0)
        unmasked = ~(whole < 0.0)
        sizes += tl.where(unmasked, whole, 0.0)
        rows += unmasked.to(tl.int32)
        refused += (unmasked & (tl.load(off + row, mask=row < total, other=0.0) < 0.0)).to(tl.int32)
    every = tl.sum(rows, 0)
    mean = tl.sum(sizes, 0) / tl.maximum(every, 1).to(tl.float32)
    for begin in range(0, total, BLOCK):
        _live, is_dense = _ways(off, size, begin + tl.arange(0, BLOCK), total, mean, tolerance)
        dense += is_dense.to(tl.int32)
    planned = tl.sum(dense, 0)
    planned = tl.where((planned < fewest) | (planned.to(tl.float32) < share * every.to(tl.float32)), 0, planned)
    planned = tl.where((planned > 0) & ((every - planned).to(tl.float32) <= rest * every.to(tl.float32)), every, planned)
    planned = tl.where(mean > flat, every, planned)
    first = every - planned
    tl.store(counts, first)
    tl.store(counts + 1, every)
    tl.store(counts + 2, tl.sum(refused, 0))
    in_front, behind = first * 0, first
    for begin in range(0, total, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        unmasked, is_dense = _ways(off, size, row, total, mean, tolerance)
        sooner = unmasked & ~((is_dense | (planned == every)) & (planned > 0))
        later = unmasked & ~sooner
        to = tl.where(
            sooner, in_front + tl.cumsum(sooner.to(tl.int32), 0) - 1, behind + tl.cumsum(later.to(tl.int32), 0) - 1
        )  # fmt: skip
        tl.store(order + to, row.to(tl.int64), mask=unmasked & (row < total))
        in_front += tl.sum(sooner.to(tl.int32), 0)
        behind += tl.sum(later.to(tl.int32), 0)
