"""Loss and exact gradient of dense rows in three GEMMs: the gradient is read off each part's logits while they are there.

Some rows at a time, the GEMM leaves e^(z − ref) of every logit beside the tiles' statistics; from these come the rows'
normalisers, supports and losses, and with them what it takes to read the gradient off what was stored: one factor per row, and
single entries (`row_factor`). In float16, and through a soft cap, what was stored is rewritten instead.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.async_copy import AsyncCopy
from corral.kernels.logits import slices
from corral.kernels.rows import Gradients, HeadInput, HeadRows, join
from corral.kernels.triton.backward.row_factor import FactoredGradient, put_singles, reaches, sampled_logits
from corral.kernels.triton.backward.row_gradient import RowGradient, Upstream, row_gradient
from corral.kernels.triton.gemm_stats import TileStatistics, gemm_stats, tile_of
from corral.kernels.triton.loss.rows import LossRows, OldRows
from corral.kernels.triton.support.select import support_rows

BYTES_AT_ONCE = 7 * 2**28
"""Of what is stored of the logits: the more rows at once, the fewer times dW is read and written."""

Rule = Callable[[HeadRows, OldRows], LossRows]


@dataclass(frozen=True, eq=False)
class DenseRows:
    """Loss and gradient of some rows, but for the last two GEMMs: what the host asks for before them is soon answered."""

    rows: HeadRows
    loss: LossRows
    sizes: Tensor
    """Σ |dz| of each row [N]."""
    left_out: Tensor
    """[N] True where a row's gradient could not be stored and has to be recomputed: a sampled token that is next to impossible,
    or next to no mass off the support and yet a gradient there."""
    finish: Callable[[], Gradients]
    """Gradients of hidden states, weight and bias for Σ weights · loss; without the rows that are left out."""


def dense_forward(
    source: HeadInput,
    old: OldRows,
    weights: Tensor,
    rule: Rule,
    needed: Sequence[bool],
    overflows: list[AsyncCopy] | None = None,
) -> DenseRows:
    """Rows, losses, and the gradients that are needed; `overflows` as in `stream_head`."""
    hidden, weight, bias, spec = source.hidden, source.weight, source.bias, source.spec
    d_hidden, d_weight = (torch.empty_like(x) if need else None for x, need in zip((hidden, weight), needed, strict=False))
    d_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needed[2] else None
    tile = tile_of(hidden)
    columns = triton.cdiv(len(weight), tile.columns) * tile.columns
    most = max(tile.rows, BYTES_AT_ONCE // (columns * hidden.element_size()))
    memory = hidden.new_empty(triton.cdiv(len(hidden), triton.cdiv(len(hidden), most)), columns)
    reference = sampled_logits(hidden, weight, bias, spec, source.tokens) if reaches(hidden, spec) else None
    left_out = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
    found: list[HeadRows] = []
    losses: list[LossRows] = []
    sizes = torch.empty(len(hidden), device=hidden.device)

    def multiply_out(part: slice, dz: FactoredGradient) -> None:
        if d_hidden is not None:
            dz.times_weight(weight, d_hidden[part])
        if d_weight is not None:
            dz.times_hidden(hidden[part], d_weight, add=part.start > 0)
        if d_bias is not None:
            d_bias.add_(dz.sums())

    pending: tuple[slice, FactoredGradient] | None = None
    for part in slices(len(hidden), len(memory)):
        if pending is not None:
            multiply_out(*pending)
        some, level = old.each(operator.itemgetter(part)), None if reference is None else reference[part]
        stored = memory[: part.stop - part.start]
        rows, loss, sizes[part], dz = _gradient_of_logits(
            source.rows(part), some, weights[part], rule, stored, level, left_out[part], overflows
        )
        found.append(rows)
        losses.append(loss)
        pending = part, dz

    def finish() -> Gradients:
        assert pending is not None
        multiply_out(*pending)
        return d_hidden, d_weight, d_bias.to(bias.dtype) if d_bias is not None and bias is not None else None

    return DenseRows(join(found), LossRows.join(losses), sizes, left_out, finish)


def _gradient_of_logits(
    source: HeadInput,
    old: OldRows,
    weights: Tensor,
    rule: Rule,
    stored: Tensor,
    reference: Tensor | None,
    left_out: Tensor,
    overflows: list[AsyncCopy] | None,
) -> tuple[HeadRows, LossRows, Tensor, FactoredGradient]:
    """Rows, loss, Σ |dz| and dz of one part of the rows; all it is given is of that part. Fills in `stored` and `left_out`."""
    spec, entropy = source.spec, source.request.entropy
    how = source.hidden, source.weight, source.bias, spec
    stats = gemm_stats(*how, entropy=entropy, store=stored, reference=reference)
    base = stats.second.clone() if reference is None else None  # it changes where tiles are recomputed
    rows = support_rows(source, stats, overflows)
    loss = rule(rows, old)
    upstream = Upstream(logp=loss.own, kept=loss.kept, rest=loss.rest, weights=weights)
    gradient, of_words = row_gradient(rows, source.tokens, upstream, spec), stored[:, : len(source.weight)]
    if reference is not None:
        return rows, loss, gradient.size, put_singles(of_words, reference, rows, gradient, spec, left_out)
    assert base is not None
    _turn_into_gradient(stored, stats, base, rows, gradient, source)
    return rows, loss, gradient.size, FactoredGradient(of_words)


def scale(x: Tensor, factor: Tensor) -> None:
    """x times the first element of another tensor, in place; nothing is read or written where that is 1, as in a plain sum."""
    flat = x.view(-1)
    _scale_kernel[(triton.cdiv(flat.numel(), 65536),)](flat, factor, flat.numel(), BLOCK=8192, num_warps=8)


@triton.jit
@no_type_check
def _scale_kernel(x, factor, total, BLOCK: tl.constexpr):
    times = tl.load(factor).to(tl.float32)
    if times != 1.0:
        for step in range(0, 8):
            at = (tl.program_id(0).to(tl.int64) * 8 + step) * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < total, other=0.0).to(tl.float32) * times
            tl.store(x + at, value.to(x.dtype.element_ty), mask=at < total)


def _turn_into_gradient(
    stored: Tensor, stats: TileStatistics, base: Tensor, rows: HeadRows, gradient: RowGradient, source: HeadInput
) -> None:
    """In place."""
    spec, (count, tiles) = source.spec, base.shape
    width, slots = tile_of(source.hidden).columns, gradient.ids.shape[1]
    some = min(16, triton.next_power_of_2(tiles))
    _gradient_kernel[(count, triton.cdiv(tiles, some))](
        stored, stats.peak, stats.place, base, rows.lse, rows.rest, gradient.factor, gradient.ids, gradient.value, tiles, slots,
        spec.slope, spec.curve,
        CAP=spec.softcap is not None, SOME=some, COLUMNS=width, SLOTS=max(2, triton.next_power_of_2(slots)), num_warps=8,
    )  # fmt: skip


@triton.jit
@no_type_check
def _gradient_kernel(
    stored, peak, place, second, lse, rest, factor, ids, value, tiles, slots, slope, curve,
    CAP: tl.constexpr, SOME: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """SOME tiles of one row: the factor times p / p_rest everywhere, then the tiles' largest, then the single entries."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * SOME + tl.arange(0, SOME)
    valid = tile < tiles
    local = tl.arange(0, COLUMNS)
    log_rest = tl.load(rest + row)
    log_rest = tl.where(log_rest == -float("inf"), 0.0, log_rest)
    shift = tl.load(lse + row) + log_rest
    times = tl.load(factor + row) * slope
    below = tl.load(second + row * tiles + tile, mask=valid, other=-float("inf"))
    top = tl.load(peak + row * tiles + tile, mask=valid, other=-float("inf"))
    here = stored + row * tiles * COLUMNS + tile[:, None] * COLUMNS + local[None, :]
    e = tl.load(here, mask=valid[:, None], other=0.0).to(tl.float32)
    # Above a rest too small for float32 only members are that large, which are replaced; in two steps, since 0 · inf is NaN.
    high = below - shift
    g = e * tl.exp(tl.minimum(high, 80.0))[:, None] * (tl.exp(tl.minimum(tl.maximum(high - 80.0, 0.0), 80.0)) * times)[:, None]
    of_top = tl.exp(top - shift) * times
    if CAP:
        u = tl.where(e > 0.0, (tl.log(e) + below[:, None]) * curve, 0.0)
        g = g * (1.0 - u * u)
        v = tl.where(top > -float("inf"), top * curve, 0.0)
        of_top = of_top * (1.0 - v * v)
    kind = stored.dtype.element_ty
    tl.store(here, g.to(kind), mask=valid[:, None])
    tl.debug_barrier()
    at = tl.load(place + row * tiles + tile, mask=valid, other=0).to(tl.int32)
    tl.store(stored + row * tiles * COLUMNS + tile * COLUMNS + at, of_top.to(kind), mask=valid)
    tl.debug_barrier()
    slot = tl.arange(0, SLOTS)
    id = tl.load(ids + row * slots + slot, mask=slot < slots, other=-1)
    single = tl.load(value + row * slots + slot, mask=slot < slots, other=0.0)
    begin = tl.program_id(1) * SOME * COLUMNS
    tl.store(stored + row * tiles * COLUMNS + id, single.to(kind), mask=(id >= begin) & (id < begin + SOME * COLUMNS))
