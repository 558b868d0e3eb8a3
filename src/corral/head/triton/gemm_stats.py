"""One GEMM of hidden states and the head's weights that keeps statistics of each tile of logits, never the logits."""

import functools
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from corral.head.logits import LogitSpec

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
FAR: tl.constexpr = tl.constexpr(1e30)
"""Below every logit."""
ROOM: tl.constexpr = tl.constexpr(96.0)
"""Powers of two above the largest logit, so that sums reach as far below it: those 150 below it are 0."""


@triton.jit
@no_type_check
def reduce_any(z, ENTROPY: tl.constexpr, COLUMNS: tl.constexpr):
    """Of logits some or all of which may be −inf."""
    local = tl.arange(0, COLUMNS)
    # The place by comparison: faster than a maximum that carries its index along. NaN has none, and takes any.
    top = tl.max(z, 1)
    place = tl.min(tl.where(z == top[:, None], local[None, :], COLUMNS - 1), 1)
    is_top = local[None, :] == place[:, None]
    z = tl.where(is_top, -float("inf"), z)
    second = tl.max(z, 1)
    # Where nothing but the largest is finite, the sum is 0 whatever it is relative to.
    base = tl.where(second == -float("inf"), 0.0, second)
    e = tl.exp2((z - base[:, None]) * LOG2_E)
    gaps = base
    if ENTROPY:
        gaps = tl.sum(tl.where(z > -float("inf"), z - base[:, None], 0.0) * e, 1)
    return top, place, second, tl.sum(e, 1), gaps, e, base * LOG2_E, is_top.to(tl.float32)


@triton.jit
@no_type_check
def reduce_plain(z, factor, ENTROPY: tl.constexpr, COMPILED: tl.constexpr, COLUMNS: tl.constexpr):
    """Of finite h Wᵀ, whose logits are larger by a positive factor.

    Comparing and selecting are what costs beside a GEMM; multiplying costs next to nothing. So the largest is marked with
    1 and everything else with 0, and its place, how many equals it has, and what is left without it are sums of these. Sums of
    exponentials are relative to the largest, so that they need not wait for the second. Equals leave together, and are put
    back into the sums: they are the second largest.
    """
    local = tl.arange(0, COLUMNS)
    top = tl.max(z, 1)
    if COMPILED:  # one instruction, where comparing and selecting are two
        is_top = tl.inline_asm_elementwise(
            "set.eq.f32.f32 $0, $1, $2;", "=f,f,f", [z, tl.broadcast_to(top[:, None], z.shape)], dtype=tl.float32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        is_top = (z == top[:, None]).to(tl.float32)
    marks = tl.sum(is_top * (local.to(tl.float32) + 65536.0)[None, :], 1)
    z = z - is_top * FAR
    second = tl.max(z, 1)
    exponent = factor * LOG2_E
    base = top * exponent - ROOM
    arguments = z * exponent - base[:, None]
    e = tl.exp2(arguments)

    equals = (marks * (1 / 65536)).to(tl.int32)
    place = tl.where(equals == 1, marks.to(tl.int32) - 65536, 0)
    second = tl.where(equals > 1, top, second)
    up = (top - second) * exponent
    back = tl.exp2(tl.minimum(up - ROOM, 126.0))
    others = (equals - 1).to(tl.float32) + tl.sum(e, 1) * back
    gaps = others
    if ENTROPY:
        gaps = (tl.sum((arguments - ROOM) * e, 1) * back + up * others) * (1 / LOG2_E)
    others = tl.where(others < 1.0, 1.0, others)  # the second alone is 1, also where it was too far below
    return top * factor, place, second * factor, others, gaps, e, base, is_top


@dataclass(frozen=True)
class Tile:
    """Tokens × vocabulary × hidden of one tile of the GEMM, and how many warps and pipeline stages work on it."""

    rows: int
    columns: int
    depth: int
    warps: int = 8
    stages: int = 3


TILES = {
    torch.bfloat16: Tile(128, 256, 64, stages=4),
    torch.float16: Tile(128, 256, 64, stages=4),
    torch.float32: Tile(64, 128, 32, warps=4),
}
"""Measured best on an H200. A tile is at most 256 columns wide, so that a place in it fits a byte."""

SMALL_TILES = {
    torch.bfloat16: Tile(64, 128, 64, warps=4, stages=2),
    torch.float16: Tile(64, 128, 64, warps=4, stages=2),
    torch.float32: Tile(32, 64, 32, warps=4, stages=2),
}
"""For GPUs whose blocks get less than 160 KiB of shared memory."""


@dataclass(frozen=True, eq=False)
class TileStatistics:
    """What one tile of the vocabulary, C columns wide, leaves of each token; [N, V/C] each.

    The largest logit stands apart, and the sum is relative to the second largest: what is left of a tile once its largest
    logit has gone to the support is then known to full precision, however peaked the policy.
    """

    peak: Tensor
    """Largest logit."""
    place: Tensor
    """Its column within the tile; where the second largest is its equal, any; uint8."""
    second: Tensor
    """Largest logit but that one."""
    others: Tensor
    """Σ e^(z − second) over all columns but `place`; where these are 150 below the largest, at least 1."""
    weighted: Tensor
    """Σ (z − second) e^(z − second) over the same; for the entropy, empty unless asked for."""

    def first(self, count: int) -> "TileStatistics":
        """Those of the first tokens."""
        if count == len(self.peak):
            return self
        return TileStatistics(*(x[:count] for x in (self.peak, self.place, self.second, self.others, self.weighted)))

    def copy(self) -> "TileStatistics":
        """The same, with a copy of what recomputed tiles replace; nothing for the entropy."""
        return TileStatistics(self.peak, self.place, self.second.clone(), self.others.clone(), self.weighted[:0])


def tile_of(x: Tensor) -> Tile:
    """The tile for this dtype on this device."""
    return (SMALL_TILES if x.is_cuda and _little_memory(x.device) else TILES)[x.dtype]


@functools.cache
def _little_memory(device: torch.device) -> bool:
    properties: Any = torch.cuda.get_device_properties(device)  # its stub lacks this field
    return bool(properties.shared_memory_per_block_optin < 160 * 1024)


def gemm_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spec: LogitSpec,
    *,
    entropy: bool,
    store: Tensor | None = None,
    reference: Tensor | None = None,
    counter: Tensor | None = None,
) -> TileStatistics:
    """Every logit of hidden [N, H] over weight [V, H], once, reduced where it was made.

    `store` [N, tiles · C] gets e^(z − second) of every logit but its tile's largest, where it is 0: what a dense gradient is
    made of, as exact in half precision as the gradient itself will be. With a `reference` [N] it gets e^(z − reference) of
    every logit, at most 2¹⁰⁰. Only the first `counter` [1] rows count, where the host does not know how many there are.
    """
    tile = tile_of(hidden)
    count, vocabulary = len(hidden), len(weight)
    tiles = triton.cdiv(vocabulary, tile.columns)
    peak, second, others = (hidden.new_empty(count, tiles, dtype=torch.float32) for _ in range(3))
    place = hidden.new_empty(count, tiles, dtype=torch.uint8)
    weighted = torch.empty_like(others) if entropy else others[:0]
    programs = _processors(hidden.device) if hidden.is_cuda else 2
    # A positive factor changes no order: it goes into the exponent and the results.
    plain = bias is None and spec.softcap is None and spec.scale > 0 and (store is None) == (reference is None)
    group = 16 if hidden.shape[1] >= 2048 else 32  # row blocks that share a tile's weights: best on an H200
    stages = tile.stages if store is None else min(tile.stages, 3)  # what is stored takes the memory of a step
    _stats_kernel[(programs,)](
        TensorDescriptor.from_tensor(hidden, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
        None if store is None else TensorDescriptor.from_tensor(store, [tile.rows, tile.columns]),
        bias, reference, peak, place, second, others, weighted, counter, count, vocabulary, hidden.shape[1], tiles,
        *spec_arguments(spec), COUNTER=counter is not None, STORE=store is not None, REFERENCE=reference is not None,
        BIAS=bias is not None, CAP=spec.softcap is not None, PLAIN=plain, ENTROPY=entropy,
        COMPILED=hidden.is_cuda and torch.version.hip is None, PROGRAMS=programs, ROWS=tile.rows, COLUMNS=tile.columns,
        DEPTH=tile.depth, GROUP=group, num_warps=tile.warps, num_stages=stages,
    )  # fmt: skip
    return TileStatistics(peak, place, second, others, weighted)


def spec_arguments(spec: LogitSpec) -> tuple[float, float, float]:
    """`before`, `cap` and `after` of `finish_logits`."""
    if spec.softcap is None:
        return spec.scale / spec.temperature, 1.0, 1.0
    return spec.scale, spec.softcap, 1 / spec.temperature


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
@no_type_check
def finish_logits(dots, columns, bias, vocabulary, before, cap, after, BIAS: tl.constexpr, CAP: tl.constexpr):
    """z = softcap(scale · (h Wᵀ + b)) / temperature; −inf beyond the vocabulary."""
    if BIAS:
        dots += tl.load(bias + columns, mask=columns < vocabulary, other=0.0).to(tl.float32)[None, :]
    z = dots * before
    if CAP:
        e = tl.exp(-2.0 * tl.abs(z) / cap)
        z = cap * after * tl.where(z < 0.0, e - 1.0, 1.0 - e) / (1.0 + e)
    return tl.where((columns < vocabulary)[None, :], z, -float("inf"))


@triton.jit
@no_type_check
def rank_bits(z):
    """An integer that sorts as the logit does."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)  # + 0 turns −0 into 0, its equal
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
@no_type_check
def rank_key(z, ids):
    """An integer that sorts as (logit, then lower id first) does."""
    return (rank_bits(z).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
@no_type_check
def _stats_kernel(
    hidden, weight, store, bias, reference, peak, place, second, others, weighted, counter, count, vocabulary, width, tiles,
    before, cap, after, COUNTER: tl.constexpr, STORE: tl.constexpr, REFERENCE: tl.constexpr, BIAS: tl.constexpr,
    CAP: tl.constexpr, PLAIN: tl.constexpr, ENTROPY: tl.constexpr, COMPILED: tl.constexpr, PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Persistent: each program takes every PROGRAMS-th tile, GROUP row blocks at a time so that they share the weights.

    First whole tiles of plain logits, which take fewer steps to reduce, then the others: as a rule the last of each row.
    """
    if COUNTER:
        count = tl.minimum(tl.load(counter), count)
    row_blocks = tl.cdiv(count, ROWS)
    whole = vocabulary // COLUMNS if PLAIN else 0
    if PLAIN:
        for index in tl.range(tl.program_id(0), row_blocks * whole, PROGRAMS, flatten=True):
            row_block, column_block = _tile_at(index, row_blocks, whole, GROUP)
            z = _multiply(hidden, weight, row_block, column_block, width, ROWS, COLUMNS, DEPTH)
            top, at, next_top, total, gaps, e, base, is_top = reduce_plain(z, before, ENTROPY, COMPILED, COLUMNS)
            rows = row_block * ROWS + tl.arange(0, ROWS)
            if STORE:
                level = tl.load(reference + rows, mask=rows < count, other=0.0)
                kept = _relative(e, base, is_top, top, level, 100.0 - ROOM)
                store.store([row_block * ROWS, column_block * COLUMNS], kept.to(store.dtype))
            here = rows.to(tl.int64) * tiles + column_block
            _leave(peak, place, second, others, weighted, here, rows < count, top, at, next_top, total, gaps, ENTROPY)
    first = (tl.program_id(0) + PROGRAMS - row_blocks * whole % PROGRAMS) % PROGRAMS
    for index in tl.range(first, row_blocks * (tiles - whole), PROGRAMS, flatten=True):
        row_block, column_block = _tile_at(index, row_blocks, tiles - whole, GROUP)
        column_block += whole
        z = _multiply(hidden, weight, row_block, column_block, width, ROWS, COLUMNS, DEPTH)
        columns = column_block * COLUMNS + tl.arange(0, COLUMNS)
        z = finish_logits(z, columns, bias, vocabulary, before, cap, after, BIAS, CAP)
        top, at, next_top, total, gaps, e, base, is_top = reduce_any(z, ENTROPY, COLUMNS)
        rows = row_block * ROWS + tl.arange(0, ROWS)
        if STORE:
            kept = e
            if REFERENCE:
                level = tl.load(reference + rows, mask=rows < count, other=0.0)
                kept = _relative(e, base, is_top, top, level, 100.0)
            store.store([row_block * ROWS, column_block * COLUMNS], kept.to(store.dtype))
        here = rows.to(tl.int64) * tiles + column_block
        _leave(peak, place, second, others, weighted, here, rows < count, top, at, next_top, total, gaps, ENTROPY)


@triton.jit
@no_type_check
def _tile_at(index, row_blocks, column_blocks, GROUP: tl.constexpr):
    """Which tile is the index-th: down a group of row blocks, then the next column."""
    group = index // (GROUP * column_blocks)
    height = min(row_blocks - group * GROUP, GROUP)
    within = index % (GROUP * column_blocks)
    return group * GROUP + within % height, within // height


@triton.jit
@no_type_check
def _multiply(
    hidden, weight, row_block, column_block, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    dots = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, width, DEPTH):
        h = hidden.load([row_block * ROWS, k])
        w = weight.load([column_block * COLUMNS, k])
        dots = tl.dot(h, w.T, dots, input_precision="ieee")
    return dots


@triton.jit
@no_type_check
def _relative(e, base, is_top, top, reference, most):
    """e^(z − reference) of every logit, from what a tile's reduction says of all but the largest, and of that."""
    of_top = tl.exp2(tl.minimum((top - reference) * LOG2_E, 100.0))
    # In two steps: alone either would be too small for float32 where both together are not.
    half = tl.exp2(0.5 * tl.minimum(base - reference * LOG2_E, most))
    return e * half[:, None] * half[:, None] + is_top * of_top[:, None]


@triton.jit
@no_type_check
def _leave(
    peak, place, second, others, weighted, here, valid, top, at, next_top, total, gaps, ENTROPY: tl.constexpr
):  # fmt: skip
    tl.store(peak + here, top, mask=valid)
    tl.store(place + here, at.to(tl.uint8), mask=valid)
    tl.store(second + here, next_top, mask=valid)
    tl.store(others + here, total, mask=valid)
    if ENTROPY:
        tl.store(weighted + here, gaps, mask=valid)
