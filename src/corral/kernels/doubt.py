"""Which tiles of each row hold more of the support than their largest logit, and have to be made again."""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.stream import TileStatistics, rank_bits, rank_key

WARPS = 4
"""That work on one row."""


@dataclass(frozen=True, eq=False)
class Doubt:
    """The doubtful tiles of some rows, numbered in any order: only where their logits are kept hangs on it."""

    state: Tensor
    """[N, tiles] int32: 0 untouched, 1 its largest logit is a member and no other, 2 + p where recomputed as the p-th."""
    count: Tensor
    first: Tensor
    """Doubtful tiles of each row, and the number of the first [N]; −1 where there was no room for all of them."""
    tile: Tensor
    row: Tensor
    """Of each doubtful tile [room]."""
    queue: Tensor
    """Numbers of the doubtful tiles at each place of the vocabulary [tiles, N]."""
    length: Tensor
    """Of each queue [tiles], and behind them how many there are in all."""
    candidates: Tensor
    """For a top k, rank keys of the settled tiles' largest logits that may be members [N, k or a little more]."""


def doubts(stats: TileStatistics, marks: Tensor, width: int, *, given: bool, top_k: int | None, room: int) -> Doubt:
    """Of the support `marks` [N, 1 + K], whose first slot is the sampled token, or of the policy's own top k and that token."""
    count, tiles = stats.peak.shape
    best = max(2, triton.next_power_of_2(top_k)) if top_k is not None else 1

    def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=marks.device)

    doubt = Doubt(
        integers(count, tiles), integers(count), integers(count), integers(room), integers(room), integers(tiles, count),
        integers(tiles + 1).zero_(), integers(count, best, dtype=torch.int64),
    )  # fmt: skip
    _doubt_kernel[(count,)](
        stats.peak, stats.place, stats.second, marks, doubt.state, doubt.count, doubt.first, doubt.tile, doubt.row,
        doubt.queue, doubt.length, doubt.candidates, count, tiles, marks.shape[1], top_k or 0, room,
        GIVEN=given, TOP_K=top_k is not None, TILES=max(triton.next_power_of_2(tiles), best), BEST=best,
        SLOTS=max(2, triton.next_power_of_2(marks.shape[1])), COLUMNS=width, num_warps=WARPS,
    )  # fmt: skip
    return doubt


@triton.jit
@no_type_check
def _doubt_kernel(
    peak, place, second, marks, state, count, first, of_tile, of_row, queue, length, candidates, rows, tiles, slots, top_k,
    room, GIVEN: tl.constexpr, TOP_K: tl.constexpr, TILES: tl.constexpr, BEST: tl.constexpr, SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    live = tile < tiles
    if TOP_K:
        again = _own_doubts(peak, place, second, marks + row * slots, candidates, row, tiles, top_k, TILES, BEST, COLUMNS)
        level = tl.zeros((TILES,), tl.int32)
    else:
        level = _given_levels(place, marks + row * slots, state, row, tiles, slots, GIVEN, TILES, SLOTS, COLUMNS)
        again = level == 2

    many = tl.sum(again.to(tl.int32), 0)
    start = tl.atomic_add(length + tiles, many)
    fits = start + many <= room
    tl.store(count + row, many)
    tl.store(first + row, tl.where(fits, start, -1))
    number = start + tl.cumsum(again.to(tl.int32), 0) - 1
    tl.store(state + row * tiles + tile, tl.where(again, number + 2, level), mask=live)
    again = again & fits
    tl.store(of_tile + number, tile, mask=again)
    tl.store(of_row + number, (row + tl.zeros((TILES,), tl.int64)).to(tl.int32), mask=again)
    place_in_queue = tl.atomic_add(length + tile, tl.full((TILES,), 1, tl.int32), mask=again)
    tl.store(queue + tile.to(tl.int64) * rows + place_in_queue, number, mask=again)


@triton.jit
@no_type_check
def _own_doubts(
    peak, place, second, sampled, candidates, row, tiles, top_k, TILES: tl.constexpr, BEST: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Where the row's own top k and its sampled token leave doubt; the largest of all other tiles become candidates.

    At least k logits reach the k-th largest tile maximum, so all members do. A tile whose second largest logit does not holds
    one member at most. The k-th largest is found bit by bit, as an integer that sorts as the logits do.
    """
    tile = tl.arange(0, TILES)
    live = tile < tiles
    here = row * tiles + tile
    top = tl.load(peak + here, mask=live, other=-float("inf"))
    bits = tl.where(live, rank_bits(top).to(tl.int64), -0x80000001)
    floor = tl.full((), -0x80000000, tl.int64)
    for step in tl.static_range(32):
        trial = floor + (1 << (31 - step))
        floor = tl.where(tl.sum((bits >= trial).to(tl.int32), 0) >= top_k, trial, floor)
    again = live & (rank_bits(tl.load(second + here, mask=live, other=-float("inf"))).to(tl.int64) >= floor)
    largest = tile * COLUMNS + tl.load(place + here, mask=live, other=0).to(tl.int32)
    token = tl.load(sampled)
    again = again | (live & (tile == token // COLUMNS) & (largest != token))

    # Settled tiles above the floor come first, then those at it by lower id: what no longer fits cannot be a member.
    above = live & ~again & (bits > floor)
    level = live & ~again & (bits == floor)
    tie = tl.sum(above.to(tl.int32), 0) + tl.cumsum(level.to(tl.int32), 0) - 1
    slot = tl.where(above, tl.cumsum(above.to(tl.int32), 0) - 1, tie)
    tl.store(candidates + row * BEST + tl.arange(0, BEST), tl.full((BEST,), -0x7FFFFFFFFFFFFFFF, tl.int64))
    tl.debug_barrier()
    tl.store(candidates + row * BEST + slot, rank_key(top, largest), mask=(above | level) & (slot < BEST))
    return again


@triton.jit
@no_type_check
def _given_levels(
    place, marks, state, row, tiles, slots, GIVEN: tl.constexpr, TILES: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """0 where a tile holds no mark, 1 where its largest logit is the only one and a member, 2 where there is any other.

    The sampled token, in slot 0, belongs to a given support only if it stands there again.
    """
    tile = tl.arange(0, TILES)
    live = tile < tiles
    here = state + row * tiles
    tl.store(here + tile, tl.zeros((TILES,), tl.int32), mask=live)
    tl.debug_barrier()
    slot = tl.arange(0, SLOTS)
    mark = tl.load(marks + slot, mask=slot < slots, other=-1)
    at = tl.where(mark >= 0, mark // COLUMNS, 0)
    known = tl.load(place + row * tiles + at).to(tl.int32) + at * COLUMNS == mark
    member = mark >= 0
    if GIVEN:
        member = member & (slot > 0)
    tl.store(here + at, tl.full((SLOTS,), 1, tl.int32), mask=member & known)
    tl.debug_barrier()
    tl.store(here + at, tl.full((SLOTS,), 2, tl.int32), mask=(mark >= 0) & ~known)
    tl.debug_barrier()
    return tl.load(here + tile, mask=live, other=0)
