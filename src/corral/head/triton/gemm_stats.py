"""Statistics of the LM head's logits in each tile of vocabulary columns, computed in the same kernel as the logits."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from corral.head.dispatch import tile_of
from corral.head.logits import LogitSpec
from corral.head.rows import HeadInput
from corral.tensors import Tensors

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
FAR: tl.constexpr = tl.constexpr(1e30)
"""Finite number larger than any logit: subtracting it from the largest logit makes the second largest the maximum."""
HEADROOM: tl.constexpr = tl.constexpr(96.0)
"""Binary exponent added to exponentials of logits, so that logits far below the largest one do not become 0.
Logits 150 below the largest become 0."""


@triton.jit
def reduce_any(z, ENTROPY: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute the statistics of one tile of logits, some or all of which may be −inf."""
    local = tl.arange(0, COLUMNS)
    # Each of these runs over a whole tile of accumulators in registers, once per tile: it is what the GEMM waits for.
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
def reduce_plain(z, factor, ENTROPY: tl.constexpr, COMPILED: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute the statistics of one tile of logits that are a positive multiple of finite dot products h Wᵀ.

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
    # One sum carries two numbers: how many logits equal the largest, in units of 2¹⁶, and the sum of their columns. With one
    # such logit both are exact, and the sum is its place; with more only their number is read.
    marks = tl.sum(is_top * (local.to(tl.float32) + 65536.0)[None, :], 1)
    z = z - is_top * FAR
    second = tl.max(z, 1)
    # exp2 is one instruction and exp is two, so that log₂ e goes into the factor. HEADROOM shifts the range of float32 down:
    # what lies 150 below the largest logit still counts, and 256 times 2^HEADROOM does not overflow.
    exponent = factor * LOG2_E
    base = top * exponent - HEADROOM
    arguments = z * exponent - base[:, None]
    e = tl.exp2(arguments)

    equals = (marks * (1 / 65536)).to(tl.int32)
    place = tl.where(equals == 1, marks.to(tl.int32) - 65536, 0)
    second = tl.where(equals > 1, top, second)
    # From "relative to the largest" to "relative to the second": times 2^up. Where that would overflow, nothing but the second
    # is left of the sum anyway, and its 1 is put in below.
    up = (top - second) * exponent
    back = tl.exp2(tl.minimum(up - HEADROOM, 126.0))
    others = (equals - 1).to(tl.float32) + tl.sum(e, 1) * back
    gaps = others
    if ENTROPY:
        gaps = (tl.sum((arguments - HEADROOM) * e, 1) * back + up * others) * (1 / LOG2_E)
    others = tl.where(others < 1.0, 1.0, others)  # the second alone is 1, also where it was too far below
    return top * factor, place, second * factor, others, gaps, e, base, is_top


@dataclass(frozen=True, eq=False)
class TileStatistics(Tensors):
    """Statistics of the logits at each position, in each tile of C vocabulary columns [N, V/C].

    The largest logit stands apart, and the sum is relative to the second largest: the mass that remains in a tile once its
    largest logit has gone to the support is then known to full precision, however peaked the policy.
    """

    peak: Tensor
    """Largest logit in each vocabulary tile."""
    place: Tensor
    """Column of the largest logit within its vocabulary tile, uint8; on a tie, any of the equal columns."""
    second: Tensor
    """Second largest logit in each vocabulary tile."""
    others: Tensor
    """Sum of e^(z − second) over the logits z of each vocabulary tile, except its largest logit.
    It is at least 1 if all these logits are 150 below the largest."""
    weighted: Tensor
    """Sum of (z − second) e^(z − second) over each vocabulary tile, except its largest logit; empty without entropy."""


def gemm_stats(
    source: HeadInput, *, store: Tensor | None = None, reference: Tensor | None = None, counter: Tensor | None = None
) -> TileStatistics:
    """Compute the statistics of the logits in all vocabulary tiles, from hidden states and head weight, in one GEMM.

    Hidden states are [N, H], the weight is [V, H].

    `store` [N, tiles · C] gets e^(z − reference) of every logit, at most 2¹⁰⁰, for a `reference` [N]: a dense gradient is made
    from it, as exact in half precision as the gradient itself will be. With a `counter` [1] on the device, only that number of
    rows counts: the host need not know their number.
    """
    hidden, weight, bias, spec, tile = source.hidden, source.weight, source.bias, source.spec, tile_of(source.hidden)
    count, vocabulary = len(hidden), len(weight)
    tiles = triton.cdiv(vocabulary, tile.columns)
    peak, second, others = (hidden.new_empty(count, tiles, dtype=torch.float32) for _ in range(3))
    place = hidden.new_empty(count, tiles, dtype=torch.uint8)
    weighted = torch.empty_like(others) if source.entropy else others[:0]
    programs = processors(hidden)
    # Statistics are float32 whatever the inputs: a logit rounded to bfloat16 would be off by up to 0.1 nats.
    # A positive factor changes no order: it goes into the exponent and the results.
    plain = bias is None and spec.softcap is None and spec.scale > 0
    # Row blocks that share a tile's weights: a group re-reads its hidden states from L2 for every tile of weights, and the
    # weights once. With little depth a tile is done sooner, and more rows have to share its weights. Best on an H200.
    group = 16 if hidden.shape[1] >= 2048 else 32
    stages = tile.stages if store is None else min(tile.stages, 3)  # what is stored takes the shared memory of a stage
    _stats_kernel[(programs,)](
        TensorDescriptor.from_tensor(hidden, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
        None if store is None else TensorDescriptor.from_tensor(store, [tile.rows, tile.columns]),
        bias, reference, peak, place, second, others, weighted, counter, count, vocabulary, hidden.shape[1], tiles,
        *spec_arguments(spec), PLAIN=plain, ENTROPY=source.entropy, COMPILED=hidden.is_cuda and torch.version.hip is None,
        PROGRAMS=programs, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, GROUP=group, num_warps=tile.warps,
        num_stages=stages,
    )  # fmt: skip
    return TileStatistics(peak, place, second, others, weighted)


def spec_arguments(spec: LogitSpec) -> tuple[float, float | None, float]:
    """Convert a LogitSpec to the arguments `before`, `cap` and `after` of the kernel function `finish_logits`."""
    if spec.softcap is None:
        return spec.slope, None, 1.0
    return spec.scale, spec.softcap, 1 / spec.temperature


def lanes(count: int) -> int:
    """Smallest power of two that is at least `count`, and at least 2: the width of a Triton block."""
    return max(2, triton.next_power_of_2(count))


def processors(x: Tensor) -> int:
    """Number of multiprocessors of a tensor's GPU; a persistent kernel starts one program on each of them."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


@triton.jit
def finish_logits(dots, columns, bias, vocabulary, before, cap, after):
    """Convert dot products to logits z = softcap(scale · (h Wᵀ + b)) / temperature; −inf beyond the vocabulary."""
    if bias is not None:
        dots += tl.load(bias + columns, mask=columns < vocabulary, other=0.0).to(tl.float32)[None, :]
    z = dots * before
    if cap is not None:
        # tanh from e^(−2|z|/cap), which cannot overflow; sign put back by the choice of the numerator.
        e = tl.exp(-2.0 * tl.abs(z) / cap)
        z = cap * after * tl.where(z < 0.0, e - 1.0, 1.0 - e) / (1.0 + e)
    return tl.where((columns < vocabulary)[None, :], z, -float("inf"))


@triton.jit
def _stats_kernel(
    hidden, weight, store, bias, reference, peak, place, second, others, weighted, counter, count, vocabulary, width, tiles,
    before, cap, after, PLAIN: tl.constexpr, ENTROPY: tl.constexpr, COMPILED: tl.constexpr, PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Persistent Triton kernel of `gemm_stats`; each program computes the statistics of every PROGRAMS-th tile.

    Groups of row blocks share weights. First whole tiles of plain logits, which take fewer steps to reduce, then the others: as
    a rule the last of each row.
    """
    if counter is not None:  # tensors are as long as the batch; blocks beyond the unmasked rows are skipped
        count = tl.minimum(tl.load(counter), count)
    # One program per multiprocessor stays for the whole GEMM: what a tile needs at its end overlaps with the next one's loads.
    row_blocks = tl.cdiv(count, ROWS)
    whole = vocabulary // COLUMNS if PLAIN else 0
    # `flatten` makes one loop of tiles and depth, so that the next tile's first loads are in flight while this one is reduced.
    # It allows no branch in the body: plain tiles and others have loops of their own.
    if PLAIN:
        for index in tl.range(tl.program_id(0), row_blocks * whole, PROGRAMS, flatten=True):
            row_block, column_block = _tile_at(index, row_blocks, whole, GROUP)
            z = _multiply(hidden, weight, row_block, column_block, width, ROWS, COLUMNS, DEPTH)
            found = reduce_plain(z, before, ENTROPY, COMPILED, COLUMNS)
            _store_statistics(
                store, reference, peak, place, second, others, weighted, row_block, column_block, count, tiles, found,
                100.0 - HEADROOM, ENTROPY, ROWS, COLUMNS,
            )  # fmt: skip
    # The second loop goes on where the first one stopped dealing out tiles: no program gets two more than another.
    first = (tl.program_id(0) + PROGRAMS - row_blocks * whole % PROGRAMS) % PROGRAMS
    for index in tl.range(first, row_blocks * (tiles - whole), PROGRAMS, flatten=True):
        row_block, column_block = _tile_at(index, row_blocks, tiles - whole, GROUP)
        column_block += whole
        z = _multiply(hidden, weight, row_block, column_block, width, ROWS, COLUMNS, DEPTH)
        columns = column_block * COLUMNS + tl.arange(0, COLUMNS)
        z = finish_logits(z, columns, bias, vocabulary, before, cap, after)
        found = reduce_any(z, ENTROPY, COLUMNS)
        _store_statistics(
            store, reference, peak, place, second, others, weighted, row_block, column_block, count, tiles, found, 100.0,
            ENTROPY, ROWS, COLUMNS,
        )  # fmt: skip


@triton.jit
def _tile_at(index, row_blocks, column_blocks, GROUP: tl.constexpr):
    """Map a running number to the row block and the column block of a tile of logits.

    A group of row blocks shares its weights: the order is first down, then across.
    """
    # Programs that run at the same time then read GROUP blocks of hidden states and a few tiles of weights, all from L2: the
    # weights leave memory once per group, and not once per row block.
    group = index // (GROUP * column_blocks)
    height = min(row_blocks - group * GROUP, GROUP)
    within = index % (GROUP * column_blocks)
    return group * GROUP + within % height, within // height


@triton.jit
def _multiply(hidden, weight, row_block, column_block, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    # Descriptors (TMA on Hopper) load 0 beyond the last row and column: no masks in the inner loop. "ieee" keeps float32 inputs
    # in float32, since TF32 would round every logit; half precision takes the matrix units as it is.
    dots = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, width, DEPTH):
        h = hidden.load([row_block * ROWS, k])
        w = weight.load([column_block * COLUMNS, k])
        dots = tl.dot(h, w.T, dots, input_precision="ieee")
    return dots


@triton.jit
def _store_statistics(
    store, reference, peak, place, second, others, weighted, row_block, column_block, count, tiles, found, most,
    ENTROPY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the statistics of one tile of logits and, if `store` is given, the exponentials of these logits."""
    top, at, next_top, total, gaps, e, base, is_top = found
    # Every (row, tile) has one writer, so that nothing here is atomic. Statistics are [rows, tiles]: later kernels read a
    # row's.
    rows = row_block * ROWS + tl.arange(0, ROWS)
    valid = rows < count
    if store is not None:  # e^(z − reference), from e relative to `base` and from the largest, which e leaves out
        level = tl.load(reference + rows, mask=valid, other=0.0)
        of_top = tl.exp2(tl.minimum((top - level) * LOG2_E, 100.0))
        # `most` bounds base − level so that e times this is at most 2¹⁰⁰, which bfloat16 and float32 both hold.
        # In two steps: alone either would be too small for float32 where both together are not.
        half = tl.exp2(0.5 * tl.minimum(base - level * LOG2_E, most))
        kept = e * half[:, None] * half[:, None] + is_top * of_top[:, None]
        store.store([row_block * ROWS, column_block * COLUMNS], kept.to(store.dtype))
    here = rows.to(tl.int64) * tiles + column_block
    tl.store(peak + here, top, mask=valid)
    tl.store(place + here, at.to(tl.uint8), mask=valid)
    tl.store(second + here, next_top, mask=valid)
    tl.store(others + here, total, mask=valid)
    if ENTROPY:
        tl.store(weighted + here, gaps, mask=valid)
