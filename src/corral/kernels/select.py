"""Exact supports from tile statistics: only the few tiles that hold more than their largest logit are made again.

A tile whose only member is its largest logit is settled by its statistics alone. Every other tile with a member is
recomputed, grouped by vocabulary so that the weights are read once, in the order of summation of the first pass.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from corral.kernels.doubt import Doubt, doubts
from corral.kernels.logits import LogitSpec
from corral.kernels.online import HeadRequest, HeadRows
from corral.kernels.settle import settle_given, settle_top_k
from corral.kernels.stream import TileStatistics, logits_of_products, spec_arguments, stream, tile_of

ROWS_AT_ONCE = 4096
"""Tokens whose tile statistics are held at once."""
TILES_AT_ONCE = 40960
"""Recomputed tiles held at once: 40 MiB of logits."""


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows of a head's input."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    marks: Tensor
    """[N, 1 + K]: the sampled token, then the given support."""
    given: bool
    spec: LogitSpec
    request: HeadRequest

    def rows(self, a: int, b: int) -> "Part":
        return dataclasses.replace(self, hidden=self.hidden[a:b], marks=self.marks[a:b])


def stream_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    ids: Tensor | None,
    spec: LogitSpec,
    request: HeadRequest,
) -> HeadRows:
    """What `OnlineHead` knows of n tokens, from one product and the recomputation of a few of its tiles.

    Without `ids` and `top_k` the support is the sampled token.
    """
    count, device = len(hidden), hidden.device
    marks = (tokens[:, None] if ids is None else torch.cat([tokens[:, None], ids], -1)).int().contiguous()
    slots = request.top_k + 1 if request.top_k is not None else marks.shape[1]
    lse, logp, rest = (torch.empty(count, device=device) for _ in range(3))
    nats = (torch.empty if request.entropy else torch.zeros)(count, device=device)
    kept = torch.empty(count, slots, device=device)
    chosen = torch.empty(count, slots if request.top_k is not None else 0, dtype=torch.int64, device=device)
    whole = HeadRows(lse, logp, chosen, kept, rest, nats)
    everything = Part(hidden, weight, bias, marks, ids is not None, spec, request)
    ranges = list(_ranges(count, ROWS_AT_ONCE))
    unsure: tuple[Part, TileStatistics, Tensor, Tensor, HeadRows] | None = None
    for (a, b), surely in zip(ranges, _surely_fit(marks, ranges, request), strict=True):
        part, out = everything.rows(a, b), rows_of(whole, a, b)
        stats = stream(part.hidden, weight, bias, spec, entropy=request.entropy)
        doubt = _settle(part, stats, out)
        # The device has the next rows to work on while the host waits for the number of the last ones' doubtful tiles.
        if unsure is not None:
            _settle_overflow(*unsure)
        unsure = None if surely else (part, stats, doubt.count, doubt.length[-1], out)
        del stats, doubt
    if unsure is not None:
        _settle_overflow(*unsure)
    if request.top_k is not None:
        return whole
    if ids is None:
        return HeadRows(lse, kept[:, 0], tokens[:, None], kept, rest, nats)
    return HeadRows(lse, kept[:, 0], ids, kept[:, 1:], rest, nats)


def rows_of(whole: HeadRows, a: int, b: int) -> HeadRows:
    """Rows a … b of every field."""
    return HeadRows(whole.lse[a:b], whole.logp[a:b], whole.ids[a:b], whole.kept[a:b], whole.rest[a:b], whole.entropy[a:b])


def _ranges(total: int, size: int) -> Iterator[tuple[int, int]]:
    """0 … total in even pieces of at most `size`."""
    even = triton.cdiv(total, triton.cdiv(total, size)) if total else 1
    yield from ((a, min(a + even, total)) for a in range(0, total, even))


def _surely_fit(marks: Tensor, ranges: list[tuple[int, int]], request: HeadRequest) -> list[bool]:
    """Whether each range of rows has no more marks than tiles fit: asked beforehand, while there is nothing to hold up."""
    if request.top_k is not None or not ranges:
        return [False] * len(ranges)
    counts = torch.stack([(marks[a:b] >= 0).sum() for a, b in ranges]).tolist()
    return [count <= TILES_AT_ONCE for count in counts]


def _settle_overflow(part: Part, stats: TileStatistics, counts: Tensor, total: Tensor, out: HeadRows) -> None:
    """Once more and in pieces, if there were too many doubtful tiles."""
    if int(total) > TILES_AT_ONCE:
        for a, b in _fitting(counts.tolist()):
            _settle(part.rows(a, b), stats.rows(a, b), rows_of(out, a, b))


def _fitting(counts: list[int]) -> Iterator[tuple[int, int]]:
    """Rows in runs whose recomputed tiles fit. One row's always do: there are fewer tiles in a vocabulary."""
    start, held = 0, 0
    for row, count in enumerate(counts):
        if held + count > TILES_AT_ONCE:
            yield start, row
            start, held = row, 0
        held += count
    yield start, len(counts)


def _settle(part: Part, stats: TileStatistics, out: HeadRows) -> Doubt:
    """Find the doubtful tiles, make them again, and fill in `out`."""
    width, top_k = tile_of(part.hidden).columns, part.request.top_k
    doubt = doubts(stats, part.marks, width, given=part.given, top_k=top_k, room=TILES_AT_ONCE)
    z = _tile_logits(part, doubt)
    if top_k is None:
        settle_given(stats, doubt, z, part.marks, part.given, out)
    else:
        settle_top_k(stats, doubt, z, part.marks, len(part.weight), part.request, out)
    return doubt


def _tile_logits(part: Part, doubt: Doubt) -> Tensor:
    """The logits of the doubtful tiles [TILES_AT_ONCE, C], by number."""
    tile, width = tile_of(part.hidden), part.hidden.shape[1]
    tiles, count = doubt.queue.shape
    z = part.hidden.new_empty(TILES_AT_ONCE, tile.columns, dtype=torch.float32)
    split = min(4, triton.cdiv(count, tile.rows))
    weight = TensorDescriptor.from_tensor(part.weight, [tile.columns, tile.depth])
    _tile_kernel[(tiles, split)](
        part.hidden, weight, part.bias, z, doubt.row, doubt.queue, doubt.length, count, len(part.weight), width,
        *spec_arguments(part.spec), BIAS=part.bias is not None, CAP=part.spec.softcap is not None, SPLIT=split,
        ROWS=tile.rows // 2, COLUMNS=tile.columns, DEPTH=tile.depth, num_warps=max(1, tile.warps // 2), num_stages=tile.stages,
    )  # fmt: skip
    return z


@triton.jit
@no_type_check
def _tile_kernel(
    hidden, weight, bias, out, of_row, queue, length, rows, vocabulary, width, before, cap, after,
    BIAS: tl.constexpr, CAP: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Every SPLIT-th block of ROWS rows that wait for one tile of the vocabulary."""
    tile = tl.program_id(0)
    waiting = tl.load(length + tile)
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    for begin in range(tl.program_id(1) * ROWS, waiting, SPLIT * ROWS):
        item = begin + tl.arange(0, ROWS)
        live = item < waiting
        number = tl.load(queue + tile.to(tl.int64) * rows + item, mask=live, other=0)
        row = tl.load(of_row + number, mask=live, other=0).to(tl.int64)
        products = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, width, DEPTH):
            within = (k + depth) < width
            h = tl.load(hidden + row[:, None] * width + (k + depth)[None, :], mask=live[:, None] & within[None, :], other=0.0)
            products = tl.dot(h, weight.load([tile * COLUMNS, k]).T, products, input_precision="ieee")
        z = logits_of_products(products, columns, bias, vocabulary, before, cap, after, BIAS, CAP)
        tl.store(out + number.to(tl.int64)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :], z, mask=live[:, None])
