"""Which tiles of each row hold more of the support than their largest logit, and have to be recomputed.

A tile whose only member is its largest logit needs no recomputing: its statistics say all. Every row's normaliser and entropy
come from here too: they need nothing but the statistics, of which those of a recomputed tile are replaced afterwards. Atomics
are relaxed: what they count is read by the next kernel, and a fence each would cost more than all the rest.
"""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.rows import HeadRows
from corral.kernels.triton.gemm_stats import TileStatistics, rank_bits, rank_key

WARPS = 4
"""That work on one row."""
LOWEST: tl.constexpr = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
NOTHING: tl.constexpr = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@dataclass(frozen=True, eq=False)
class RecomputePlan:
    """The tiles of N rows to recompute. Memory is there for any number of them, so that the host need not know it."""

    state: Tensor
    """[N, tiles] uint8: 0 nothing was taken out of this tile, 1 its largest logit was, 2 it is recomputed."""
    queue: Tensor
    length: Tensor
    """Rows that wait for each tile of the vocabulary [tiles, N], and how many they are [tiles]."""
    listed: Tensor
    """Of a given support [N, M]: id · M + slot, ascending. Of an own one [N, room]: rank keys of what was taken out so far."""
    filled: Tensor
    """For an own support: how many keys were taken out, more than `room` where they did not fit [N]."""
    floor: Tensor
    """For an own support: what every member reaches, as an integer that sorts as logits do [N]."""
    overflow: Tensor
    """For an own support: whether `filled` is more than `room` anywhere [1]."""


def plan_given(stats: TileStatistics, marks: Tensor, width: int, *, given: bool, out: HeadRows) -> RecomputePlan:
    """Of the support `marks` [N, 1 + K]. Slot 0, the sampled token, is a member only without a `given` support.

    Fills in the normaliser, the entropy, and `out.kept` of all marks in tiles that need no recomputing.
    """
    (count, tiles), slots = stats.peak.shape, marks.shape[1]
    padded = max(2, triton.next_power_of_2(slots))
    plan = _blank(stats, padded, own=False)
    _given_kernel[(count,)](
        stats.peak, stats.place, stats.second, stats.others, stats.weighted, marks, plan.state, plan.queue, plan.length,
        plan.listed, out.kept, out.lse, out.entropy, count, tiles, slots, GIVEN=given,
        ENTROPY=stats.weighted.numel() > 0, TILES=triton.next_power_of_2(tiles), SLOTS=padded, COLUMNS=width, num_warps=WARPS,
    )  # fmt: skip
    return plan


def plan_own(stats: TileStatistics, marks: Tensor, width: int, *, top_k: int, room: int, out: HeadRows) -> RecomputePlan:
    """Of the policy's own top k and the sampled token, `marks` [N, 1], −1 for none; `room` for what may be a member, a power
    of 2."""
    count, tiles = stats.peak.shape
    plan = _blank(stats, room, own=True)
    _own_kernel[(count,)](
        stats.peak, stats.place, stats.second, stats.others, stats.weighted, marks, plan.state, plan.queue, plan.length,
        plan.listed, plan.filled, plan.floor, plan.overflow, out.lse, out.entropy, count, tiles, top_k,
        ENTROPY=stats.weighted.numel() > 0, TILES=triton.next_power_of_2(tiles), ROOM=room, COLUMNS=width, num_warps=WARPS,
    )  # fmt: skip
    return plan


def _blank(stats: TileStatistics, listed: int, *, own: bool) -> RecomputePlan:
    (count, tiles), device = stats.peak.shape, stats.peak.device

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    zeros = torch.zeros(tiles + 1, dtype=torch.int32, device=device)
    length, overflow = zeros[:tiles], zeros[tiles:]
    filled, floor = (empty(count), empty(count)) if own else (overflow, overflow)  # which nobody reads
    return RecomputePlan(
        empty(count, tiles, dtype=torch.uint8), empty(tiles, count), length, empty(count, listed, dtype=torch.int64), filled,
        floor, overflow,
    )  # fmt: skip


@triton.jit
@no_type_check
def log_sum(peak, total):
    """log Σ total e^peak, −inf of nothing."""
    top = tl.max(peak, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    return top + tl.log(tl.sum(total * tl.exp(peak - top), 0))


@triton.jit
@no_type_check
def whole_tiles(top, runner_up, without):
    """Σ e^(z − top) of each tile, and second − top."""
    some = top > -float("inf")
    down = tl.where(runner_up > -float("inf"), runner_up - tl.where(some, top, 0.0), -float("inf"))
    return tl.where(some, 1.0, 0.0) + without * tl.exp(down), down


@triton.jit
@no_type_check
def _normaliser(top, runner_up, without, weighted, lse, entropy, row, tiles, ENTROPY: tl.constexpr, TILES: tl.constexpr):
    """log Σ e^z of a row, and its entropy."""
    whole, down = whole_tiles(top, runner_up, without)
    total = log_sum(top, whole)
    tl.store(lse + row, total)
    if ENTROPY:
        # −H = Σ p log p; around its own largest logit a tile adds e^(top − lse) Σ e^(z − top) ((z − top) + (top − lse)).
        tile = tl.arange(0, TILES)
        some = top > -float("inf")
        u = tl.load(weighted + row * tiles + tile, mask=tile < tiles, other=0.0)
        around = tl.exp(down) * (u + tl.where(down > -float("inf"), down, 0.0) * without)
        high = tl.where(some, top - total, 0.0)
        tl.store(entropy + row, -tl.sum(tl.where(some, tl.exp(high) * (around + whole * high), 0.0), 0))
    return total


@triton.jit
@no_type_check
def _given_kernel(
    peak, place, second, others, weighted, marks, state, queue, length, listed, values, lse, entropy, rows, tiles, slots,
    GIVEN: tl.constexpr, ENTROPY: tl.constexpr, TILES: tl.constexpr, SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    valid = tile < tiles
    here = row * tiles + tile
    top = tl.load(peak + here, mask=valid, other=-float("inf"))
    runner_up = tl.load(second + here, mask=valid, other=-float("inf"))
    without = tl.load(others + here, mask=valid, other=0.0)
    total = _normaliser(top, runner_up, without, weighted, lse, entropy, row, tiles, ENTROPY, TILES)
    tl.store(state + here, tl.zeros((TILES,), tl.uint8), mask=valid)

    slot = tl.arange(0, SLOTS)
    mark = tl.load(marks + row * slots + slot, mask=slot < slots, other=-1)
    tl.store(values + row * slots + slot, tl.full((SLOTS,), -float("inf"), tl.float32), mask=slot < slots)
    if GIVEN:  # where the support has the sampled token too, that is the one to look for
        twice = tl.max(((mark == tl.load(marks + row * slots)) & (slot > 0)).to(tl.int32), 0) > 0
        mark = tl.where((slot == 0) & twice, -1, mark)
    key = tl.sort(tl.where(mark >= 0, mark.to(tl.int64) * SLOTS + slot, NOTHING))
    tl.store(listed + row * SLOTS + slot, key)
    tl.debug_barrier()
    before = tl.load(listed + row * SLOTS + slot - 1, mask=slot > 0, other=-1)
    real = key != NOTHING
    if GIVEN:  # a token twice in a support: all that comes of the row is NaN
        repeated = real & (before >= 0) & (before // SLOTS == key // SLOTS)
        total = tl.where(tl.max(repeated.to(tl.int32), 0) > 0, float("nan"), total)
        tl.store(lse + row, total)
    id = tl.where(real, key // SLOTS, 0).to(tl.int32)
    at = id // COLUMNS
    own_slot = (key % SLOTS).to(tl.int32)
    # Of equals at the top of a tile it is not known which is where.
    alone = tl.load(peak + row * tiles + at) > tl.load(second + row * tiles + at)
    known = real & alone & (tl.load(place + row * tiles + at).to(tl.int32) == id % COLUMNS)
    member = real
    if GIVEN:
        member = member & (own_slot > 0)
    tl.store(state + row * tiles + at, tl.full((SLOTS,), 1, tl.uint8), mask=member & known)
    tl.debug_barrier()
    tl.store(state + row * tiles + at, tl.full((SLOTS,), 2, tl.uint8), mask=real & ~known)
    tl.debug_barrier()
    again = real & (tl.load(state + row * tiles + at, mask=real, other=0) == 2)
    value = tl.load(peak + row * tiles + at, mask=real, other=0.0) - total
    tl.store(values + row * slots + own_slot, value, mask=real & ~again)
    first = again & ((before < 0) | (before // (SLOTS * COLUMNS) != at))
    position = tl.atomic_add(length + at, tl.full((SLOTS,), 1, tl.int32), mask=first, sem="relaxed")
    tl.store(queue + at.to(tl.int64) * rows + position, (row * SLOTS + slot).to(tl.int32), mask=first)


@triton.jit
@no_type_check
def _own_kernel(
    peak, place, second, others, weighted, marks, state, queue, length, listed, filled, floors, overflow, lse, entropy, rows,
    tiles, top_k, ENTROPY: tl.constexpr, TILES: tl.constexpr, ROOM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of the largest and second largest of all tiles at least k reach the k-th largest of these, so all members do.

    A tile whose second largest does not holds one member at most. Nearly as good as the k-th largest is what a few more of them
    reach, which is found by halving.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    valid = tile < tiles
    here = row * tiles + tile
    top = tl.load(peak + here, mask=valid, other=-float("inf"))
    runner_up = tl.load(second + here, mask=valid, other=-float("inf"))
    without = tl.load(others + here, mask=valid, other=0.0)
    _normaliser(top, runner_up, without, weighted, lse, entropy, row, tiles, ENTROPY, TILES)

    bits = tl.where(valid, rank_bits(top), -0x80000000)
    next_bits = tl.where(valid, rank_bits(runner_up), -0x80000000)
    # There are as many tiles as members at least, and so as many of these reach the least of the tiles' largest.
    floor = tl.where(tiles >= top_k, tl.min(tl.where(valid, bits, 0x7FFFFFFF), 0), -0x80000000)
    ceiling = tl.max(bits, 0)
    while floor < ceiling:
        trial = (floor >> 1) + (ceiling >> 1) + ((floor | ceiling) & 1)  # the middle, rounded up; a sum might overflow
        reach = tl.sum((bits >= trial).to(tl.int32) + (next_bits >= trial).to(tl.int32), 0)
        floor = tl.where(reach >= top_k, trial, floor)
        near = (reach >= top_k) & (reach <= top_k + top_k // 8)
        ceiling = tl.where(near, trial, tl.where(reach >= top_k, ceiling, trial - 1))
    tl.store(floors + row, floor)

    token = tl.load(marks + row)
    largest = tile * COLUMNS + tl.load(place + here, mask=valid, other=0).to(tl.int32)
    sampled_here = valid & (tile == token // COLUMNS) & (token >= 0)
    again = valid & ((next_bits >= floor) | (sampled_here & ((largest != token) | (bits == next_bits))))
    # Where fewer than k logits are finite, impossible tokens are members, and that takes more than tiles' statistics.
    hopeless = floor <= -0x7F800001  # as −inf ranks
    again = again & ~hopeless

    # In front the sampled token, then those of the other tiles that reach the floor. Behind these there is room for what is
    # found in recomputed tiles.
    taken = valid & ~again & ~sampled_here & (bits >= floor)
    slot = tl.cumsum(taken.to(tl.int32), 0)
    tl.store(listed + row * ROOM + tl.arange(0, ROOM), tl.full((ROOM,), LOWEST, tl.int64))
    tl.debug_barrier()
    tl.store(listed + row * ROOM + slot, rank_key(top, largest), mask=taken & (slot < ROOM))
    done = sampled_here & ~again
    tl.store(listed + row * ROOM + tl.zeros((TILES,), tl.int32), rank_key(top, largest), mask=done)
    full = tl.where(hopeless, ROOM + 1, 1 + tl.sum(taken.to(tl.int32), 0))
    tl.store(filled + row, full)
    tl.store(overflow, 1, mask=full > ROOM)
    tl.store(state + here, tl.where(again, 2, tl.where(taken | done, 1, 0)).to(tl.uint8), mask=valid)
    position = tl.atomic_add(length + tile, tl.full((TILES,), 1, tl.int32), mask=again, sem="relaxed")
    tl.store(queue + tile.to(tl.int64) * rows + position, (row + tl.zeros((TILES,), tl.int64)).to(tl.int32), mask=again)
