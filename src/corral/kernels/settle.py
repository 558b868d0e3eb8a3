"""The last word on each row: its support, the log mass of everything else, and its entropy, from tiles and tiles' statistics.

Every logit counts once: in the support, in a tile's sum, or in a recomputed tile. Nothing is subtracted from a sum, so the
rest is exact however small it is.
"""

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.doubt import WARPS, Doubt
from corral.kernels.online import HeadRequest, HeadRows
from corral.kernels.stream import TileStatistics, rank_key


def settle_given(stats: TileStatistics, doubt: Doubt, z: Tensor, marks: Tensor, given: bool, out: HeadRows) -> None:
    """Fill in rows for a given support. Slot 0 of `marks` [N, 1 + K] is the sampled token; `out.kept` holds its value too."""
    (rows, tiles), slots = stats.peak.shape, marks.shape[1]
    _given_kernel[(rows,)](
        stats.peak, stats.second, stats.others, stats.weighted, doubt.state, doubt.first, doubt.count, z, marks,
        out.lse, out.rest, out.entropy, out.kept, tiles, slots, GIVEN=given, ENTROPY=stats.weighted.numel() > 0,
        TILES=triton.next_power_of_2(tiles), SLOTS=max(2, triton.next_power_of_2(slots)), COLUMNS=z.shape[1], SOME=16,
        num_warps=WARPS,
    )  # fmt: skip


def settle_top_k(
    stats: TileStatistics, doubt: Doubt, z: Tensor, marks: Tensor, vocabulary: int, request: HeadRequest, out: HeadRows
) -> None:
    """Fill in rows for the policy's own support, as `top_k_support` has it."""
    rows, tiles = stats.peak.shape
    best = doubt.candidates.shape[1]
    _top_k_kernel[(rows,)](
        stats.peak, stats.place, stats.second, stats.others, stats.weighted, doubt.state, doubt.first, doubt.count, doubt.tile,
        doubt.candidates, z, marks, out.lse, out.logp, out.rest, out.entropy, out.ids, out.kept, vocabulary, tiles,
        marks.shape[1], request.mass, request.top_k, ENTROPY=stats.weighted.numel() > 0, THRESHOLD=request.mass < 1.0,
        TILES=triton.next_power_of_2(tiles), BEST=best, WIDE=max(best, z.shape[1]), COLUMNS=z.shape[1], num_warps=WARPS,
    )  # fmt: skip


@triton.jit
@no_type_check
def _log_sum(peak, total):
    """log Σ total e^peak, −inf of nothing."""
    top = tl.max(peak, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    return top + tl.log(tl.sum(total * tl.exp(peak - top), 0))


@triton.jit
@no_type_check
def _log_add(x, y):
    high = tl.maximum(x, y)
    high = tl.where(high == -float("inf"), 0.0, high)
    return high + tl.log(tl.exp(x - high) + tl.exp(y - high))


@triton.jit
@no_type_check
def _tile_sums(peak, second, others, weighted, lse, nats, row, tiles, ENTROPY: tl.constexpr, TILES: tl.constexpr):
    """Of each tile of a row: largest, second largest, the sums without and with the largest; and log Σ e^z of all."""
    tile = tl.arange(0, TILES)
    here = row * tiles + tile
    live = tile < tiles
    top = tl.load(peak + here, mask=live, other=-float("inf"))
    runner_up = tl.load(second + here, mask=live, other=-float("inf"))
    without = tl.load(others + here, mask=live, other=0.0)
    some = top > -float("inf")
    down = tl.where(runner_up > -float("inf"), runner_up - tl.where(some, top, 0.0), -float("inf"))
    whole = tl.where(some, 1.0, 0.0) + without * tl.exp(down)
    total = _log_sum(top, whole)
    tl.store(lse + row, total)
    if ENTROPY:
        # −H = Σ p log p; around its own largest logit a tile adds e^(top − lse) Σ e^(z − top) ((z − top) + (top − lse)).
        u = tl.load(weighted + here, mask=live, other=0.0)
        around = tl.exp(down) * (u + tl.where(down > -float("inf"), down, 0.0) * without)
        high = tl.where(some, top - total, 0.0)
        tl.store(nats + row, -tl.sum(tl.where(some, tl.exp(high) * (around + whole * high), 0.0), 0))
    return top, runner_up, without, whole, total


@triton.jit
@no_type_check
def _given_kernel(
    peak, second, others, weighted, state, first, count, z, marks, lse, rest, nats, values, tiles, slots,
    GIVEN: tl.constexpr, ENTROPY: tl.constexpr, TILES: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
    SOME: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(first + row)
    if start < 0:
        return
    top, runner_up, without, whole, total = _tile_sums(
        peak, second, others, weighted, lse, nats, row, tiles, ENTROPY, TILES
    )  # fmt: skip
    slot = tl.arange(0, SLOTS)
    mark = tl.load(marks + row * slots + slot, mask=slot < slots, other=-1)
    member = mark >= 0
    at = tl.where(member, mark // COLUMNS, 0)
    number = tl.load(state + row * tiles + at, mask=member, other=0) - 2
    again = tl.load(z + number.to(tl.int64) * COLUMNS + mark % COLUMNS, mask=member & (number >= 0), other=-float("inf"))
    once = tl.load(peak + row * tiles + at, mask=member & (number < 0), other=-float("inf"))
    value = tl.where(member, tl.where(number >= 0, again, once) - total, -float("inf"))
    tl.store(values + row * slots + slot, value, mask=slot < slots)

    # The rest: whole tiles, tiles without their largest, and what the support leaves of the recomputed ones.
    tile = tl.arange(0, TILES)
    level = tl.load(state + row * tiles + tile, mask=tile < tiles, other=2)
    left = tl.where(level == 0, top, tl.where(level == 1, runner_up, -float("inf")))
    outside = _log_sum(left, tl.where(level == 0, whole, tl.where(level == 1, without, 0.0)))
    column = tl.arange(0, COLUMNS)
    source = z + start.to(tl.int64) * COLUMNS + column
    for p in range(start, start + tl.load(count + row)):
        taken = tl.zeros((COLUMNS,), tl.int32)
        for k in range(0, slots, SOME):
            some = k + tl.arange(0, SOME)
            token = tl.load(marks + row * slots + some, mask=some < slots, other=-1)
            hit = (token >= 0) & (tl.load(state + row * tiles + token // COLUMNS, mask=token >= 0, other=0) == p + 2)
            if GIVEN:
                hit = hit & (some > 0)
            here = ((token % COLUMNS)[None, :] == column[:, None]) & hit[None, :]
            taken = tl.maximum(taken, tl.max(here.to(tl.int32), 1))
        logits = tl.where(taken > 0, -float("inf"), tl.load(source))
        outside = _log_add(outside, _log_sum(logits, tl.full((COLUMNS,), 1.0, tl.float32)))
        source += COLUMNS
    tl.store(rest + row, outside - total)


@triton.jit
@no_type_check
def _top_k_kernel(
    peak, place, second, others, weighted, state, first, count, of_tile, candidates, z, marks,
    lse, logp, rest, nats, ids, kept, vocabulary, tiles, slots, mass, top_k, ENTROPY: tl.constexpr, THRESHOLD: tl.constexpr,
    TILES: tl.constexpr, BEST: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(first + row)
    if start < 0:
        return
    top, runner_up, without, whole, total = _tile_sums(
        peak, second, others, weighted, lse, nats, row, tiles, ENTROPY, TILES
    )  # fmt: skip
    end = start + tl.load(count + row)

    # The k best of the settled tiles' largest and of everything in the recomputed ones.
    lowest = tl.full((1,), -0x7FFFFFFFFFFFFFFF, tl.int64)
    rank = tl.arange(0, BEST)
    best = tl.topk(tl.load(candidates + row * BEST + rank), BEST)
    column = tl.arange(0, WIDE)
    source = z + start.to(tl.int64) * COLUMNS + column
    for p in range(start, end):
        token = tl.load(of_tile + p) * COLUMNS + column
        real = (column < COLUMNS) & (token < vocabulary)
        more = tl.topk(tl.where(real, rank_key(tl.load(source, mask=real, other=0.0), token), lowest), BEST)
        best = tl.topk(tl.reshape(tl.join(best, more), (2 * BEST,)), BEST)
        source += COLUMNS
    bits = (best >> 32).to(tl.int32)
    value = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True) - total
    token_id = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
    chosen = rank < top_k
    if THRESHOLD:
        p64 = tl.where(chosen, tl.exp(value.to(tl.float64)), 0.0)
        before = tl.cumsum(p64, 0) - p64
        chosen = chosen & ((before == 0.0) | (before < mass - 2.384185791015625e-07))  # 2 eps of float32
    bar = tl.min(tl.where(chosen, best, 0x7FFFFFFFFFFFFFFF), 0)

    # Slot 0 the sampled token, then the others chosen, then padding.
    sampled = tl.load(marks + row * slots)
    number = tl.load(state + row * tiles + sampled // COLUMNS) - 2
    if number >= 0:
        own = tl.load(z + number.to(tl.int64) * COLUMNS + sampled % COLUMNS) - total
    else:
        own = tl.load(peak + row * tiles + sampled // COLUMNS) - total
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

    tile = tl.arange(0, TILES)
    live = tile < tiles
    settled = live & (tl.load(state + row * tiles + tile, mask=live, other=2) < 2)
    largest = tile * COLUMNS + tl.load(place + row * tiles + tile, mask=live, other=0).to(tl.int32)
    taken = (rank_key(top, largest) >= bar) | (largest == sampled)
    left = tl.where(settled, tl.where(taken, runner_up, top), -float("inf"))
    outside = _log_sum(left, tl.where(settled, tl.where(taken, without, whole), 0.0))
    source = z + start.to(tl.int64) * COLUMNS + column
    for p in range(start, end):
        token = tl.load(of_tile + p) * COLUMNS + column
        real = (column < COLUMNS) & (token < vocabulary)
        logits = tl.load(source, mask=real, other=-float("inf"))
        free = real & (rank_key(logits, token) < bar) & (token != sampled)
        more = _log_sum(tl.where(free, logits, -float("inf")), tl.full((WIDE,), 1.0, tl.float32))
        outside = _log_add(outside, more)
        source += COLUMNS
    tl.store(rest + row, outside - total)
