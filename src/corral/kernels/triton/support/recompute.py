"""Tiles recomputed: members are taken out one by one, and the statistics of what is left replace the tile's own.

Rows that wait for a tile are gathered, so that its weights are read once, and summed in the order of the first pass. Few wait
for most tiles, and nearly all for those of common tokens: all tiles' blocks of rows are dealt out to as many programs as there
are processors.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from corral.kernels.logits import LogitSpec
from corral.kernels.rows import HeadRows
from corral.kernels.triton.gemm_stats import TileStatistics, finish_logits, rank_bits, rank_key, spec_arguments, tile_of
from corral.kernels.triton.support.recompute_plan import NOTHING, RecomputePlan


def recompute_tiles(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spec: LogitSpec,
    stats: TileStatistics,
    plan: RecomputePlan,
    marks: Tensor,
    out: HeadRows,
    *,
    given: bool,
    own: bool,
) -> None:
    """Of a given support fill in `out.kept`; of an `own` one list every logit that may be a member."""
    tile, width = tile_of(hidden), hidden.shape[1]
    tiles, count = plan.queue.shape
    programs = torch.cuda.get_device_properties(hidden.device).multi_processor_count if hidden.is_cuda else 2
    _tile_kernel[(programs,)](
        hidden, TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]), bias, plan.queue, plan.length, plan.listed,
        plan.filled, plan.floor, plan.overflow, marks, out.lse, out.kept, stats.second, stats.others, count, len(weight),
        width, tiles, marks.shape[1], *spec_arguments(spec), BIAS=bias is not None, CAP=spec.softcap is not None, OWN=own,
        GIVEN=given, PROGRAMS=programs, TILES=triton.next_power_of_2(tiles), LISTED=plan.listed.shape[1], ROWS=tile.rows // 2,
        COLUMNS=tile.columns, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit
@no_type_check
def _tile_kernel(
    hidden, weight, bias, queue, length, listed, filled, floors, overflow, marks, lse, values, second, others, rows, vocabulary,
    width, tiles, slots, before, cap, after, BIAS: tl.constexpr, CAP: tl.constexpr, OWN: tl.constexpr, GIVEN: tl.constexpr,
    PROGRAMS: tl.constexpr, TILES: tl.constexpr, LISTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Every PROGRAMS-th block of ROWS rows that wait for one and the same tile of the vocabulary."""
    each = tl.arange(0, TILES)
    blocks = tl.cdiv(tl.load(length + each, mask=each < tiles, other=0), ROWS)
    up_to = tl.cumsum(blocks, 0)
    local = tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    for index in range(tl.program_id(0), tl.sum(blocks, 0), PROGRAMS):
        tile = tl.sum((up_to <= index).to(tl.int32), 0)
        begin = (index - tl.max(tl.where(up_to <= index, up_to, 0), 0)) * ROWS
        waiting = tl.load(length + tile)
        columns = tile * COLUMNS + local
        item = begin + tl.arange(0, ROWS)
        valid = item < waiting
        entry = tl.load(queue + tile.to(tl.int64) * rows + item, mask=valid, other=0)
        row = entry.to(tl.int64) if OWN else (entry // LISTED).to(tl.int64)
        dots = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, width, DEPTH):
            within = (k + depth) < width
            h = tl.load(hidden + row[:, None] * width + (k + depth)[None, :], mask=valid[:, None] & within[None, :], other=0.0)
            dots = tl.dot(h, weight.load([tile * COLUMNS, k]).T, dots, input_precision="ieee")
        z = finish_logits(dots, columns, bias, vocabulary, before, cap, after, BIAS, CAP)
        if OWN:
            z = _take_largest(z, row, valid, tile, listed, filled, floors, overflow, marks, LISTED, COLUMNS)
        else:
            z = _take_listed(z, row, valid, entry % LISTED, tile, listed, lse, values, slots, GIVEN, LISTED, COLUMNS)
        top = tl.max(z, 1)
        base = tl.where(top == -float("inf"), 0.0, top)
        tl.store(second + row * tiles + tile, top, mask=valid)
        tl.store(others + row * tiles + tile, tl.sum(tl.exp(z - base[:, None]), 1), mask=valid)


@triton.jit
@no_type_check
def _take_listed(
    z, row, valid, position, tile, listed, lse, values, slots, GIVEN: tl.constexpr, LISTED: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The logits listed for this tile go to their slots; members leave the tile."""
    local = tl.arange(0, COLUMNS)
    total = tl.load(lse + row, mask=valid, other=0.0)
    key = tl.load(listed + row * LISTED + position, mask=valid, other=NOTHING)
    here = valid & (key // (LISTED * COLUMNS) == tile)
    while tl.max(here.to(tl.int32), 0) > 0:
        column, slot = (key // LISTED % COLUMNS).to(tl.int32), (key % LISTED).to(tl.int32)
        hit = (local[None, :] == column[:, None]) & here[:, None]
        value = tl.sum(tl.where(hit, z, 0.0), 1) - total
        tl.store(values + row * slots + slot, value, mask=here)
        if GIVEN:  # the sampled token, where it is no member, stays
            hit = hit & (slot > 0)[:, None]
        z = tl.where(hit, -float("inf"), z)
        position += 1
        # Beyond a full list there is nothing, and nothing is in no tile; −1 would be in the first, division being what it is.
        key = tl.load(listed + row * LISTED + position, mask=here & (position < LISTED), other=NOTHING)
        here = here & (key // (LISTED * COLUMNS) == tile)
    return z


@triton.jit
@no_type_check
def _take_largest(
    z, row, valid, tile, listed, filled, floors, overflow, marks, LISTED: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The sampled token goes to the front of the list; whatever else reaches the row's floor behind what is there."""
    local = tl.arange(0, COLUMNS)
    token = tl.load(marks + row, mask=valid, other=-1)
    mine = valid & (token // COLUMNS == tile) & (token >= 0)
    hit = (local[None, :] == (token % COLUMNS)[:, None]) & mine[:, None]
    own = tl.sum(tl.where(hit, z, 0.0), 1)
    tl.store(listed + row * LISTED, rank_key(own, token), mask=mine)
    z = tl.where(hit, -float("inf"), z)

    floor = tl.load(floors + row, mask=valid, other=0)
    top = tl.max(z, 1)
    wanted = valid & (rank_bits(top) >= floor) & (top > -float("inf"))
    while tl.max(wanted.to(tl.int32), 0) > 0:
        at = tl.min(tl.where(z == top[:, None], local[None, :], COLUMNS - 1), 1)
        position = tl.atomic_add(filled + row, tl.full(at.shape, 1, tl.int32), mask=wanted, sem="relaxed")
        fits = position < LISTED
        tl.store(listed + row * LISTED + position, rank_key(top, tile * COLUMNS + at), mask=wanted & fits)
        tl.store(overflow + tl.zeros_like(at), tl.full(at.shape, 1, tl.int32), mask=wanted & ~fits)
        z = tl.where((local[None, :] == at[:, None]) & wanted[:, None], -float("inf"), z)
        top = tl.max(z, 1)
        wanted = wanted & fits & (rank_bits(top) >= floor) & (top > -float("inf"))
    return z
