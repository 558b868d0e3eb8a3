"""One product of hidden states and vocabulary whose logits are never written: each tile leaves five numbers per token."""

import functools
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from corral.kernels.logits import LogitSpec


@dataclass(frozen=True)
class Tile:
    """Tokens × vocabulary × hidden of one tile of the product, and how many warps and pipeline stages work on it."""

    rows: int
    columns: int
    depth: int
    warps: int = 8
    stages: int = 3


TILES = {
    torch.bfloat16: Tile(128, 256, 64),
    torch.float16: Tile(128, 256, 64),
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
    """Its column within the tile, the lowest of equals; uint8."""
    second: Tensor
    """Largest logit but that one."""
    others: Tensor
    """Σ e^(z − second) over all columns but `place`."""
    weighted: Tensor
    """Σ (z − second) e^(z − second) over the same; for the entropy, empty unless asked for."""

    def first(self, count: int) -> "TileStatistics":
        """Those of the first tokens."""
        fields = (self.peak, self.place, self.second, self.others, self.weighted)
        return TileStatistics(*(x[:count] for x in fields))


def tile_of(x: Tensor) -> Tile:
    """The tile for this dtype on this device."""
    return (SMALL_TILES if x.is_cuda and _little_memory(x.device) else TILES)[x.dtype]


@functools.cache
def _little_memory(device: torch.device) -> bool:
    properties: Any = torch.cuda.get_device_properties(device)  # its stub lacks this field
    return bool(properties.shared_memory_per_block_optin < 160 * 1024)


def stream(
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
    every logit, at most 2¹⁰⁰. Of N rows only the first `counter` [1] may be there.
    """
    tile = tile_of(hidden)
    count, vocabulary = len(hidden), len(weight)
    tiles = triton.cdiv(vocabulary, tile.columns)
    peak, second, others = (hidden.new_empty(count, tiles, dtype=torch.float32) for _ in range(3))
    place = hidden.new_empty(count, tiles, dtype=torch.uint8)
    weighted = torch.empty_like(others) if entropy else others.new_empty(0)
    programs = _processors(hidden.device) if hidden.is_cuda else 2
    _stream_kernel[(programs,)](
        TensorDescriptor.from_tensor(hidden, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
        None if store is None else TensorDescriptor.from_tensor(store, [tile.rows, tile.columns]),
        bias, reference, peak, place, second, others, weighted, counter, count, vocabulary, hidden.shape[1], tiles,
        *spec_arguments(spec), COUNTER=counter is not None, STORE=store is not None, REFERENCE=reference is not None,
        BIAS=bias is not None,
        CAP=spec.softcap is not None, PLAIN=bias is None and spec.softcap is None and spec.scale > 0, ENTROPY=entropy,
        PROGRAMS=programs, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth,
        GROUP=16 if hidden.shape[1] >= 2048 else 32, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return TileStatistics(peak, place, second, others, weighted)


def spec_arguments(spec: LogitSpec) -> tuple[float, float, float]:
    """`before`, `cap` and `after` of `logits_of_products`."""
    if spec.softcap is None:
        return spec.scale / spec.temperature, 1.0, 1.0
    return spec.scale, spec.softcap, 1 / spec.temperature


@functools.cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
@no_type_check
def logits_of_products(products, columns, bias, vocabulary, before, cap, after, BIAS: tl.constexpr, CAP: tl.constexpr):
    """z = softcap(scale · (h Wᵀ + b)) / temperature; −inf beyond the vocabulary."""
    if BIAS:
        products += tl.load(bias + columns, mask=columns < vocabulary, other=0.0).to(tl.float32)[None, :]
    z = products * before
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
def _stream_kernel(
    hidden, weight, store, bias, reference, peak, place, second, others, weighted, counter, count, vocabulary, width, tiles,
    before, cap, after, COUNTER: tl.constexpr, STORE: tl.constexpr, REFERENCE: tl.constexpr, BIAS: tl.constexpr,
    CAP: tl.constexpr, PLAIN: tl.constexpr, ENTROPY: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Persistent: each program takes every PROGRAMS-th tile, GROUP row blocks at a time so that they share the weights."""
    if COUNTER:
        count = tl.minimum(tl.load(counter), count)
    row_blocks = tl.cdiv(count, ROWS)
    for index in tl.range(tl.program_id(0), row_blocks * tiles, PROGRAMS, flatten=True):
        group = index // (GROUP * tiles)
        height = min(row_blocks - group * GROUP, GROUP)
        row_block = group * GROUP + (index % (GROUP * tiles)) % height
        column_block = (index % (GROUP * tiles)) // height
        products = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, width, DEPTH):
            h = hidden.load([row_block * ROWS, k])
            w = weight.load([column_block * COLUMNS, k])
            products = tl.dot(h, w.T, products, input_precision="ieee")
        local = tl.arange(0, COLUMNS)
        columns = column_block * COLUMNS + local
        if PLAIN:  # a positive factor changes no order: it goes into the exponent and the results
            z = tl.where((columns < vocabulary)[None, :], products, -float("inf"))
            factor = before
        else:
            z = logits_of_products(products, columns, bias, vocabulary, before, cap, after, BIAS, CAP)
            factor = before * 0.0 + 1.0
        # The place by comparison: faster than a maximum that carries its index along. NaN has none, and takes any.
        top = tl.max(z, 1)
        at = tl.min(tl.where(z == top[:, None], local[None, :], COLUMNS - 1), 1)
        z = tl.where(local[None, :] == at[:, None], -float("inf"), z)
        next_top = tl.max(z, 1)
        # Where nothing but the largest is finite, the sum is 0 whatever it is relative to.
        base = tl.where(next_top == -float("inf"), 0.0, next_top)
        exponent = factor * 1.4426950408889634  # log2 e
        e = tl.exp2(z * exponent - (base * exponent)[:, None])
        rows = row_block * ROWS + tl.arange(0, ROWS)
        live = rows < count
        if STORE:
            kept = e
            if REFERENCE:
                level = tl.load(reference + rows, mask=live, other=0.0) * 1.4426950408889634
                of_top = tl.exp2(tl.minimum(top * exponent - level, 100.0))
                kept = e * tl.exp2(tl.minimum(base * exponent - level, 100.0))[:, None]
                kept = tl.where(local[None, :] == at[:, None], of_top[:, None], kept)
            store.store([row_block * ROWS, column_block * COLUMNS], kept.to(store.dtype))
        here = rows.to(tl.int64) * tiles + column_block
        tl.store(peak + here, top * factor, mask=live)
        tl.store(place + here, at.to(tl.uint8), mask=live)
        tl.store(second + here, next_top * factor, mask=live)
        tl.store(others + here, tl.sum(e, 1), mask=live)
        if ENTROPY:
            gap = tl.where(z > -float("inf"), (z - base[:, None]) * factor, 0.0)
            tl.store(weighted + here, tl.sum(gap * e, 1), mask=live)
