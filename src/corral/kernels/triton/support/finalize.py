"""Rows finalized: its support, and the log mass of everything else.

Every logit counts once: in the support, in a tile's sum, or in the list of those that might have been members. Nothing is
subtracted from a sum, so the rest is exact however small it is.
"""

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.rows import HeadRequest, HeadRows
from corral.kernels.triton.gemm_stats import TileStatistics
from corral.kernels.triton.support.recompute_plan import LOWEST, WARPS, RecomputePlan, log_sum, whole_tiles


def finalize_given(stats: TileStatistics, plan: RecomputePlan, marks: Tensor, given: bool, out: HeadRows) -> None:
    """The rest of rows whose support, `out.kept`, is complete; and slot 0 of it where the support has the sampled token too."""
    rows, tiles = stats.peak.shape
    _given_kernel[(rows,)](
        stats.peak, stats.second, stats.others, plan.state, marks, out.lse, out.rest, out.rest_max, out.kept, tiles,
        marks.shape[1], GIVEN=given, TILES=triton.next_power_of_2(tiles),
        SLOTS=max(2, triton.next_power_of_2(marks.shape[1])), num_warps=WARPS,
    )  # fmt: skip


def finalize_own(stats: TileStatistics, plan: RecomputePlan, marks: Tensor, request: HeadRequest, out: HeadRows) -> None:
    """Fill in rows for the policy's own support, as `top_k_support` has it, unless what may be a member did not fit."""
    assert request.top_k is not None
    rows, tiles = stats.peak.shape
    _own_kernel[(rows,)](
        stats.peak, stats.second, stats.others, plan.state, plan.listed, plan.filled, marks, out.lse, out.logp, out.rest,
        out.rest_max, out.ids, out.kept, tiles, request.mass, request.top_k, THRESHOLD=request.mass < 1.0,
        TILES=triton.next_power_of_2(tiles), BEST=best_of(request.top_k), ROOM=plan.listed.shape[1],
        num_warps=1 if plan.listed.shape[1] <= 512 else WARPS,  # a sort within a warp waits for no other
    )  # fmt: skip


def best_of(top_k: int) -> int:
    """The next power of 2."""
    return max(2, triton.next_power_of_2(top_k))


@triton.jit
@no_type_check
def _left_in_tiles(peak, second, others, state, row, tiles, TILES: tl.constexpr):
    """log Σ e^z over what was taken out of no tile, and the largest of these logits."""
    tile = tl.arange(0, TILES)
    valid = tile < tiles
    here = row * tiles + tile
    top = tl.load(peak + here, mask=valid, other=-float("inf"))
    runner_up = tl.load(second + here, mask=valid, other=-float("inf"))
    without = tl.load(others + here, mask=valid, other=0.0)
    whole, _down = whole_tiles(top, runner_up, without)
    untouched = tl.load(state + here, mask=valid, other=2) == 0
    largest = tl.where(untouched, top, runner_up)
    return log_sum(largest, tl.where(untouched, whole, without)), tl.max(largest, 0)


@triton.jit
@no_type_check
def _given_kernel(
    peak, second, others, state, marks, lse, rest, rest_max, values, tiles, slots,
    GIVEN: tl.constexpr, TILES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    total = tl.load(lse + row)
    outside, largest = _left_in_tiles(peak, second, others, state, row, tiles, TILES)
    tl.store(rest + row, outside - total)
    tl.store(rest_max + row, largest - total)
    if GIVEN:
        slot = tl.arange(0, SLOTS)
        mark = tl.load(marks + row * slots + slot, mask=slot < slots, other=-1)
        same = (mark == tl.load(marks + row * slots)) & (slot > 0)
        value = tl.load(values + row * slots + slot, mask=same, other=-float("inf"))
        found = tl.max(same.to(tl.int32), 0) > 0
        tl.store(values + row * slots, tl.max(value, 0), mask=found)


@triton.jit
@no_type_check
def _own_kernel(
    peak, second, others, state, listed, filled, marks, lse, logp, rest, rest_max, ids, kept, tiles, mass, top_k,
    THRESHOLD: tl.constexpr, TILES: tl.constexpr, BEST: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(filled + row) > ROOM:  # no token, until the row is done again
        every = tl.arange(0, 2 * BEST)
        tl.store(ids + row * (top_k + 1) + every, tl.full((2 * BEST,), -1, tl.int64), mask=every <= top_k)
        return
    total = tl.load(lse + row)
    keys = tl.load(listed + row * ROOM + tl.arange(0, ROOM))
    if (tl.load(filled + row) <= 2 * BEST) & (2 * BEST < ROOM):  # as a rule; and the sort is what costs
        best = tl.topk(tl.load(listed + row * ROOM + tl.arange(0, 2 * BEST)), BEST)
    else:
        best = tl.topk(keys, BEST)
    rank = tl.arange(0, BEST)
    value = _value_of(best) - total
    token_id = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
    chosen = (rank < top_k) & (best > LOWEST)  # of a row of NaN nothing was listed
    if THRESHOLD:
        p64 = tl.where(chosen, tl.exp(value.to(tl.float64)), 0.0)
        before = tl.cumsum(p64, 0) - p64
        chosen = chosen & ((before == 0.0) | (before < mass - 2.384185791015625e-07))  # 2 eps of float32
    bar = tl.min(tl.where(chosen, best, 0x7FFFFFFFFFFFFFFF), 0)

    # Slot 0 the sampled token, then the others chosen, then padding.
    sampled = tl.load(marks + row)
    own = _value_of(tl.load(listed + row * ROOM)) - total
    base = row * (top_k + 1)
    tl.store(logp + row, own)
    tl.store(ids + base, sampled.to(tl.int64))
    tl.store(kept + base, own)
    stays = chosen & (token_id != sampled)
    goes = (rank < top_k) & ~stays
    slot = tl.where(
        stays, tl.cumsum(stays.to(tl.int32), 0), tl.sum(stays.to(tl.int32), 0) + tl.cumsum(goes.to(tl.int32), 0)
    )  # fmt: skip
    tl.store(ids + base + slot, tl.where(stays, token_id, -1).to(tl.int64), mask=rank < top_k)
    tl.store(kept + base + slot, tl.where(stays, value, -float("inf")), mask=rank < top_k)

    # The rest: what no tile has lost, and those of the list that were not chosen.
    outside, largest = _left_in_tiles(peak, second, others, state, row, tiles, TILES)
    free = (keys < bar) & (0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32) != sampled) & (keys > LOWEST)
    others_listed = tl.where(free, _value_of(keys), -float("inf"))
    more = log_sum(others_listed, tl.full((ROOM,), 1.0, tl.float32))
    tl.store(rest_max + row, tl.maximum(largest, tl.max(others_listed, 0)) - total)
    high = tl.maximum(outside, more)
    high = tl.where(high == -float("inf"), 0.0, high)
    tl.store(rest + row, high + tl.log(tl.exp(outside - high) + tl.exp(more - high)) - total)


@triton.jit
@no_type_check
def _value_of(key):
    """The logit of a rank key."""
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
