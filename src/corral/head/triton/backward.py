"""Gradients of the head in kernels: dense rows, sparse rows, and the sum over both."""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.head.logits import LogitSpec, slices
from corral.head.rows import AsyncCopy, Gradients, HeadInput, HeadRows, join
from corral.head.triton.gemm_stats import TileStatistics, finish_logits, gemm_stats, spec_arguments, tile_of
from corral.head.triton.loss import LossRows, OldRows
from corral.head.triton.support import support_rows

DEAD, SPARSE, DENSE = 0, 1, 2


@dataclass(frozen=True, eq=False, kw_only=True)
class Upstream:
    """Gradients of the loss with respect to what the head said of N rows; None is 0 everywhere."""

    logp: Tensor | None = None
    kept: Tensor | None = None
    rest: Tensor | None = None
    entropy: Tensor | None = None
    weights: Tensor | None = None
    """Factor of each row's gradients [N]."""


@dataclass(frozen=True, eq=False)
class RowGradient:
    """Gradients of the logits of N rows, with S = K + 1 single entries each."""

    ids: Tensor
    """Token of each entry [N, S] int32; −1 is none."""
    value: Tensor
    """Gradient of h·w of that token [N, S], the soft cap's slope included."""
    factor: Tensor
    """c: the sum of all other tokens' gradients; each has the share of it that it has of the rest mass [N]."""
    off: Tensor
    size: Tensor
    """|c| where there are other tokens at all, and the whole Σ |dz| [N]."""
    need: Tensor
    """DEAD, SPARSE where the single entries may be enough, DENSE where they cannot be [N] int32."""


def row_gradient(rows: HeadRows, tokens: Tensor, upstream: Upstream, spec: LogitSpec) -> RowGradient:
    """Single entries and factor of each row."""
    count, kept = rows.kept.shape
    slots, device = kept + 1, tokens.device
    ids, value = (torch.empty(count, slots, dtype=kind, device=device) for kind in (torch.int32, torch.float32))
    factor, off, size = (torch.empty(count, device=device) for _ in range(3))
    need = torch.empty(count, dtype=torch.int32, device=device)
    g = upstream
    kept_g, rest_g, own_g, g_entropy = (None if x is None else x.contiguous() for x in (g.kept, g.rest, g.logp, g.entropy))
    _row_kernel[(count,)](
        rows.ids, rows.kept, rows.rest, rows.logp, rows.lse, rows.entropy, tokens, kept_g, rest_g, own_g, g_entropy,
        g.weights, ids, value, factor, off, size, need, kept, slots, rows.ids.stride(0), rows.kept.stride(0),
        rows.logp.stride(0), spec.slope, spec.curve, KEPT=kept_g is not None, REST=rest_g is not None,
        LOGP=own_g is not None, ENTROPY=g_entropy is not None,
        WEIGHTS=g.weights is not None, CAP=spec.softcap is not None, SLOTS=max(2, triton.next_power_of_2(slots)), num_warps=1,
    )  # fmt: skip
    return RowGradient(ids, value, factor, off, size, need)


@triton.jit
@no_type_check
def _row_kernel(
    ids, kept, rest, logp, lse, entropy, tokens, g_kept, g_rest, g_logp, g_entropy, weights, out_ids, out_value, out_factor,
    out_off, out_size, out_need, slots_in, slots, stride_ids, stride_kept, stride_logp, slope, curve,
    KEPT: tl.constexpr, REST: tl.constexpr, LOGP: tl.constexpr, ENTROPY: tl.constexpr,
    WEIGHTS: tl.constexpr, CAP: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    inside = slot < slots_in
    id = tl.load(ids + row * stride_ids + slot, mask=inside, other=-1).to(tl.int32)
    member = id >= 0
    token = tl.load(tokens + row).to(tl.int32)
    log_rest = tl.load(rest + row)
    times = log_rest * 0.0 + 1.0
    times = tl.where(times == times, times, 1.0)
    if WEIGHTS:
        times = tl.load(weights + row).to(tl.float32)
    own_g, outer_g, entropy_g = 0.0 * times, 0.0 * times, 0.0 * times
    g = tl.zeros((SLOTS,), tl.float32)
    # What is weighted with 0 is not there, whatever it is.
    if LOGP:
        own_g = tl.where(times == 0.0, 0.0, tl.load(g_logp + row) * times)
    if REST:
        outer_g = tl.where(times == 0.0, 0.0, tl.load(g_rest + row) * times)
    if ENTROPY:
        entropy_g = tl.where(times == 0.0, 0.0, tl.load(g_entropy + row) * times)
    if KEPT:
        g = tl.load(g_kept + row * slots_in + slot, mask=inside, other=0.0)
        g = tl.where(member, tl.where(times == 0.0, 0.0, g * times), 0.0)
    nothing = log_rest == -float("inf")
    outer_g = tl.where(nothing, 0.0, outer_g)
    log_rest = tl.where(nothing, 0.0, log_rest)  # p_v / 1: there is no such v but impossible ones
    total = own_g + tl.sum(g, 0) + outer_g
    factor = outer_g - tl.exp(log_rest) * total

    # The sampled token adds to its slot; where the support lacks it, it takes the slot behind.
    is_own = member & (id == token)
    found = tl.max(is_own.to(tl.int32), 0) > 0
    extra = (slot == slots_in) & ~found
    id = tl.where(extra, token, id)
    log_p = tl.where(member, tl.load(kept + row * stride_kept + slot, mask=inside, other=-float("inf")), -float("inf"))
    log_p = tl.where(extra, tl.load(logp + row * stride_logp), log_p)
    p = tl.exp(log_p)
    pulled = tl.where(extra, tl.exp(log_p - log_rest) * factor, -p * total)
    value = g + tl.where(is_own | extra, own_g, 0.0) + pulled
    surprise = tl.where(log_p > -float("inf"), log_p + tl.load(entropy + row), 0.0)
    value = tl.where(member | extra, value - entropy_g * p * surprise, 0.0)

    off = tl.where(nothing, 0.0, tl.abs(factor))
    size = tl.sum(tl.abs(value), 0) + off
    alive = (own_g != 0.0) | (outer_g != 0.0) | (entropy_g != 0.0) | (tl.max(tl.abs(g), 0) != 0.0) | (size != size)
    # The entropy's gradient is nowhere single, and NaN spreads as it should where everything is computed.
    must = (entropy_g != 0.0) | (size != size)
    value = value * slope
    if CAP:
        u = (log_p + tl.load(lse + row)) * curve
        value = tl.where(member | extra, value * (1.0 - u * u), 0.0)
    real = slot < slots
    at = row * slots + slot
    tl.store(out_ids + at, id, mask=real)
    tl.store(out_value + at, value, mask=real)
    tl.store(out_factor + row, factor)
    tl.store(out_off + row, off)
    tl.store(out_size + row, size)
    tl.store(out_need + row, tl.where(alive, tl.where(must, 2, 1), 0))


ROWS = 16
"""That one program routes."""
PADDED = 16
"""Dense rows come in multiples of this, as matrix units take them; −1 stands for none."""


@dataclass(frozen=True, eq=False)
class Routes:
    """The way back of N rows with S single entries each."""

    route: Tensor
    """DEAD, SPARSE or DENSE [N]."""
    key: Tensor
    """Tokens of the entries that a sparse backward adds up, V for none [N, S] int32."""
    counts: Tensor
    """Rows with a gradient, and dense ones [2] int32."""
    dense: Tensor
    """The dense rows in order, then −1 up to the next multiple of PADDED; behind that, anything [N + PADDED]."""
    shares: Tensor
    """Metrics: the share of dense rows, and the largest share dropped by a sparse one [2]."""


def route_rows(gradient: RowGradient, spec: LogitSpec, vocabulary: int, tolerance: float, mean: Tensor | None = None) -> Routes:
    """Dense are rows that would drop `tolerance` or more; at 0 that is all of them.

    `mean` is the mean row's Σ |dz| [1]; without it, that of these rows.
    """
    (count, slots), device = gradient.ids.shape, gradient.ids.device
    key, route = torch.empty_like(gradient.ids), torch.empty_like(gradient.need)
    share = torch.empty_like(gradient.size)
    counts, shares = torch.empty(2, dtype=torch.int32, device=device), torch.empty(2, device=device)
    dense = torch.empty(count + PADDED, dtype=torch.int64, device=device)
    _route_kernel[(triton.cdiv(count, ROWS),)](
        gradient.ids, gradient.value, gradient.off, gradient.size, gradient.need, mean, route, key, share, count, slots,
        vocabulary, tolerance, abs(spec.slope),
        # Where a soft cap flattens them, entries are smaller than what the sums were made of: none is left out.
        0.0 if spec.softcap is not None else tolerance / (8 * slots), MEAN=mean is not None, ROWS=ROWS,
        SLOTS=max(2, triton.next_power_of_2(slots)), BLOCK=2048, num_warps=8,
    )  # fmt: skip
    _tally_kernel[(1,)](
        route, share, counts, dense, shares, count, PADDED=PADDED, BLOCK=min(8192, triton.next_power_of_2(count)), num_warps=8
    )
    return Routes(route, key, counts, dense, shares)


@triton.jit
@no_type_check
def _route_kernel(
    ids, value, off, size, need, given_mean, route, key, out_share, count, slots, vocabulary, tolerance, slope, small,
    MEAN: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The route of ROWS rows, and which entries a sparse backward adds up."""
    if MEAN:
        mean = tl.load(given_mean)
    else:  # every program adds up all rows, in the same order, sooner than another kernel would start
        sums = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, count, BLOCK):
            item = begin + tl.arange(0, BLOCK)
            sums += tl.load(size + item, mask=item < count, other=0.0)
        mean = tl.sum(sums, 0) / count

    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    here = row < count
    whole = tl.maximum(tl.load(size + row, mask=here, other=0.0), mean)
    slot = tl.arange(0, SLOTS)
    at = row[:, None] * slots + slot[None, :]
    real = here[:, None] & (slot < slots)[None, :]
    id = tl.load(ids + at, mask=real, other=-1)
    g = tl.abs(tl.load(value + at, mask=real, other=0.0))
    counts_for = (id >= 0) & (g > (small * slope * whole)[:, None])
    left_out = tl.load(off + row, mask=here, other=0.0) + tl.sum(tl.where((id >= 0) & ~counts_for, g, 0.0), 1) / slope
    share = tl.where(left_out > 0.0, left_out / whole, 0.0)
    way = tl.load(need + row, mask=here, other=0)
    way = tl.where((way == 1) & ~(share < tolerance), 2, way)
    tl.store(route + row, way, mask=here)
    tl.store(out_share + row, tl.where(way == 1, share, 0.0), mask=here)
    tl.store(key + at, tl.where((way == 1)[:, None] & counts_for, id, vocabulary), mask=real)


@triton.jit
@no_type_check
def _tally_kernel(route, share, counts, dense_rows, shares, count, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """One program for all rows."""
    with_gradient, dense, most = 0, 0, 0.0
    for begin in range(0, count, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        way = tl.load(route + row, mask=row < count, other=0)
        with_gradient += tl.sum((way > 0).to(tl.int32), 0)
        is_dense = (way == 2).to(tl.int32)
        tl.store(dense_rows + dense + tl.cumsum(is_dense, 0) - 1, row.to(tl.int64), mask=way == 2)
        dense += tl.sum(is_dense, 0)
        most = tl.maximum(most, tl.max(tl.load(share + row, mask=row < count, other=0.0), 0))
    tl.store(dense_rows + dense + tl.arange(0, PADDED), tl.full((PADDED,), -1, tl.int64))
    tl.store(counts, with_gradient)
    tl.store(counts + 1, dense)
    tl.store(shares, dense.to(tl.float32) / tl.maximum(with_gradient, 1).to(tl.float32))
    tl.store(shares + 1, most)


LOGITS_AT_ONCE = 2**28
"""Held at once: 1 GiB of them in float32, and half as much of their gradient."""
ROWS_AT_ONCE = 16384


def dense_rows(
    source: HeadInput,
    rows: HeadRows,
    g_entropy: Tensor | None,
    gradient: RowGradient,
    picked: Tensor,
    count: int,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
    d_bias: Tensor | None,
    *,
    add: bool = False,
) -> None:
    """Write dH of the first `count` rows `picked`, −1 behind them, and their dW and db; or `add` these to what is there."""
    hidden, weight, bias, spec = source.hidden, source.weight, source.bias, source.spec
    for part in slices(triton.cdiv(count, PADDED) * PADDED, ROWS_AT_ONCE):
        add = add or part.start > 0
        row = picked[part]
        real = row[: max(count - part.start, 0)]
        h = hidden[row.clamp(min=0)]
        d_h = torch.empty(h.shape, dtype=torch.float32, device=h.device) if d_hidden is not None else None
        columns = max(2048, LOGITS_AT_ONCE // len(row) // 256 * 256)
        memory = h.new_empty(len(row) * min(columns, len(weight)), dtype=torch.float32)
        memory_dz = torch.empty_like(memory, dtype=h.dtype)
        for block in slices(len(weight), columns):
            w = weight[block]
            shape = (len(row), len(w))
            dots, dz = (x[: shape[0] * shape[1]].view(shape) for x in (memory, memory_dz))
            multiply(h, w.T, dots)
            _dense_kernel[(shape[0], triton.cdiv(shape[1], 4096))](
                dots, dz, bias, row, rows.lse, rows.rest, rows.entropy, g_entropy, gradient.factor, gradient.ids,
                gradient.value, block.start, shape[1], len(weight), gradient.ids.shape[1], *spec_arguments(spec),
                spec.slope,
                spec.curve, BIAS=bias is not None,
                CAP=spec.softcap is not None, ENTROPY=g_entropy is not None, BLOCK=4096,
                SLOTS=max(2, triton.next_power_of_2(gradient.ids.shape[1])), num_warps=8,
            )  # fmt: skip
            if d_h is not None:
                multiply(dz, w, d_h, add=block.start > 0)
            if d_weight is not None:
                multiply(dz.T, h, d_weight[block], add=add)
            if d_bias is not None:
                d_b = dz.sum(0, dtype=torch.float32)
                d_bias[block] = d_b + d_bias[block] if add else d_b
        if d_hidden is not None and d_h is not None:
            d_hidden.index_copy_(0, real, d_h[: len(real)].to(d_hidden.dtype))


def multiply(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
    """out = left @ right, or out += it, summed in float32 whatever the factors are."""
    if left.dtype == out.dtype and (left.is_cuda or left.dtype == torch.float32):
        torch.addmm(out, left, right, out=out) if add else torch.mm(left, right, out=out)
    elif left.is_cuda:
        if add:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
        else:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        dot = left.float() @ right.float()
        out.copy_(dot + out.float() if add else dot)


@triton.jit
@no_type_check
def _dense_kernel(
    dots, dz, bias, picked, lse, rest, entropy, g_entropy, factor, ids, value, start, width, vocabulary, slots, before, cap,
    after, slope, curve, BIAS: tl.constexpr, CAP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one row: the factor times p / p_rest everywhere, then the single entries in their places."""
    row = tl.load(picked + tl.program_id(0))
    real = row >= 0
    row = tl.where(real, row, 0)
    begin = tl.program_id(1) * BLOCK
    column = begin + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * width
    dot = tl.load(dots + at + column, mask=column < width, other=0.0)[None, :]
    z = finish_logits(dot, start + column, bias, vocabulary, before, cap, after, BIAS, CAP)
    log_p = z - tl.load(lse + row)
    log_rest = tl.load(rest + row)
    log_rest = tl.where(log_rest == -float("inf"), 0.0, log_rest)
    g = tl.exp(log_p - log_rest) * tl.load(factor + row)
    if ENTROPY:
        surprise = tl.where(log_p > -float("inf"), log_p + tl.load(entropy + row), 0.0)
        g -= tl.exp(log_p) * tl.load(g_entropy + row) * surprise
    g = tl.where(real, g * slope, 0.0)
    if CAP:
        u = z * curve
        g = tl.where(z > -float("inf"), g * (1.0 - u * u), 0.0)
    kind = dz.dtype.element_ty
    tl.store(dz + at + column[None, :], g.to(kind), mask=(column < width)[None, :])
    tl.debug_barrier()
    slot = tl.arange(0, SLOTS)
    id = tl.load(ids + row * slots + slot, mask=slot < slots, other=-1) - start
    single = tl.load(value + row * slots + slot, mask=slot < slots, other=0.0)
    tl.store(dz + at + id, single.to(kind), mask=real & (id >= begin) & (id < begin + BLOCK) & (id < width))


REACH: tl.constexpr = tl.constexpr(50.0)
"""How far the reference may lie below the row's normaliser, or above what is off the support."""
WEAKEST: tl.constexpr = tl.constexpr(2.0**-80)
"""The least s, as a share of the largest single entry: these are divided by it."""
LIKELY = 4
"""Entries of each row whose rounding is made good: the sampled token, and the most likely ones of the support."""


@dataclass(frozen=True, eq=False)
class FactoredGradient:
    """Gradients of h Wᵀ [n, V] of some rows: one factor per row [n], or none, times what is stored of them."""

    stored: Tensor
    factor: Tensor | None = None
    likely: Tensor | None = None
    lost: Tensor | None = None
    """The first few single entries' tokens [n, LIKELY], −1 for none, and what rounding took from them."""

    def times_weight(self, weight: Tensor, out: Tensor) -> None:
        """dH, into `out` [n, H]."""
        if self.factor is None:
            multiply(self.stored, weight, out)
            return
        sums = torch.empty_like(out, dtype=torch.float32)  # rounded once, when it is multiplied
        multiply(self.stored, weight, sums)
        scale_rows(sums, self.factor, out, self.likely, self.lost, weight)

    def times_hidden(self, hidden: Tensor, out: Tensor, *, add: bool) -> None:
        """dW, into `out` [V, H] or on top of what is there."""
        if self.factor is not None:
            hidden = scale_rows(hidden, self.factor, torch.empty_like(hidden))
        multiply(self.stored.T, hidden, out, add=add)

    def sums(self) -> Tensor:
        """db [V], in float32."""
        if self.factor is None:
            return self.stored.sum(0, dtype=torch.float32)
        # As a sum of two numbers of that dtype, so that no more than E is rounded; matrix units take columns by the eight.
        parts = self.stored.new_zeros(len(self.factor), 8)
        parts[:, 0] = self.factor
        parts[:, 1] = self.factor - parts[:, 0].float()
        out = torch.empty(self.stored.shape[1], 8, device=parts.device)
        multiply(self.stored.T, parts, out)
        return out.sum(-1)


def reaches(hidden: Tensor, spec: LogitSpec) -> bool:
    """Whether E of such rows is in range, and the slope dz / d(h·w) the same for every token."""
    return hidden.dtype != torch.float16 and spec.softcap is None


def sampled_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spec: LogitSpec,
    tokens: Tensor,
) -> Tensor:
    """About z_a of each row [N], for a reference; without a soft cap.

    A token outside the vocabulary, which is refused elsewhere, stands for the nearest inside.
    """
    (count, width), out = hidden.shape, hidden.new_empty(len(hidden), dtype=torch.float32)
    block = min(1024, triton.next_power_of_2(width))
    _sampled_kernel[(count,)](
        hidden, weight, bias, tokens, out, len(weight), width, spec.slope, BIAS=bias is not None, BLOCK=block,
        num_warps=2,
    )  # fmt: skip
    return out


def put_singles(
    stored: Tensor, reference: Tensor, rows: HeadRows, gradient: RowGradient, spec: LogitSpec, left_out: Tensor
) -> FactoredGradient:
    """Single entries into `stored` [n, columns], in place; s is 0 where nothing has a gradient.

    `left_out` [n] becomes True where a row with a gradient cannot be held, and is not: its s is 0 too.
    """
    count, slots = gradient.ids.shape
    factor = torch.empty_like(gradient.factor)
    likely, lost = gradient.ids.new_empty(count, LIKELY), gradient.value.new_empty(count, LIKELY)
    _singles_kernel[(count,)](
        stored, reference, rows.lse, rows.rest, gradient.factor, gradient.ids, gradient.value, factor, likely, lost,
        left_out.view(torch.uint8), stored.stride(0), slots, spec.slope, LIKELY=LIKELY,
        SLOTS=max(LIKELY, triton.next_power_of_2(slots)), num_warps=1,
    )  # fmt: skip
    return FactoredGradient(stored, factor, likely, lost)


def scale_rows(
    x: Tensor,
    factor: Tensor,
    out: Tensor,
    likely: Tensor | None = None,
    lost: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """out = diag(factor) x, 0 where the factor is, whatever x is; plus Σ lost · w over the `likely` tokens. Rounded once."""
    (count, width), block = x.shape, min(1024, triton.next_power_of_2(x.shape[1]))
    _rows_kernel[(count, triton.cdiv(width, block))](
        x, factor, likely, lost, weight, out, width, LIKELY=0 if likely is None else LIKELY, BLOCK=block, num_warps=2
    )  # fmt: skip
    return out


@triton.jit
@no_type_check
def _sampled_kernel(
    hidden, weight, bias, tokens, out, vocabulary, width, slope, BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.minimum(tl.maximum(tl.load(tokens + row).to(tl.int64), 0), vocabulary - 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, width, BLOCK):
        column = k + tl.arange(0, BLOCK)
        h = tl.load(hidden + row * width + column, mask=column < width, other=0.0).to(tl.float32)
        total += h * tl.load(weight + token * width + column, mask=column < width, other=0.0).to(tl.float32)
    z = tl.sum(total, 0)
    if BIAS:
        z += tl.load(bias + token).to(tl.float32)
    z = z * slope
    # An impossible token has no finite loss, and is refused for it; until then the others are relative to something.
    tl.store(out + row, tl.where(tl.abs(z) < float("inf"), z, 0.0))


@triton.jit
@no_type_check
def _singles_kernel(
    stored, reference, lse, rest, off_factor, ids, value, factor, likely, lost_value, left_out, stride, slots, slope,
    LIKELY: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    id = tl.load(ids + row * slots + slot, mask=slot < slots, other=-1)
    single = tl.load(value + row * slots + slot, mask=slot < slots, other=0.0)
    ref, total, log_rest = tl.load(reference + row), tl.load(lse + row), tl.load(rest + row)
    nothing = log_rest == -float("inf")  # off the support: E is 0 there, whatever it is multiplied with
    c = tl.where(nothing, 0.0, tl.load(off_factor + row) * slope)
    above = ref - total - tl.where(nothing, 0.0, log_rest)
    s = c * tl.exp(tl.minimum(tl.maximum(above, -REACH), REACH))

    # Too small an s, and all that it stands for is less than rounding: any other that is small enough does as well. The same
    # holds far above the rest, unless c is not as small as the rest is, and then E has lost what c should be shared among.
    biggest = tl.max(tl.abs(single), 0)
    least = tl.maximum(biggest * WEAKEST, 2.0**-120)
    weak = tl.abs(s) < least
    lost = (ref - total < -REACH) | (weak & (above < -20.0)) | ((above > REACH) & (tl.abs(c) > biggest * 2.0**-30))
    alive = (biggest > 0.0) | (c != 0.0)
    lost = lost & alive & ~nothing
    s = tl.where(weak, least, s)
    s = tl.where(lost | ~alive, 0.0, s)
    tl.store(factor + row, s)
    tl.store(left_out + row, lost.to(tl.uint8))
    id = tl.where(s == 0.0, -1, id)
    entry = (single / tl.where(s == 0.0, 1.0, s)).to(stored.dtype.element_ty)
    tl.store(stored + row * stride + id, entry, mask=id >= 0)
    tl.store(likely + row * LIKELY + slot, id, mask=slot < LIKELY)
    tl.store(lost_value + row * LIKELY + slot, tl.where(id < 0, 0.0, single - s * entry.to(tl.float32)), mask=slot < LIKELY)


@triton.jit
@no_type_check
def _rows_kernel(x, factor, likely, lost, weight, out, width, LIKELY: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    times = tl.load(factor + row)
    value = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    value = tl.where(times == 0.0, 0.0, value * times)
    for k in tl.static_range(LIKELY):
        id = tl.load(likely + row * LIKELY + k).to(tl.int64)
        w = tl.load(weight + id * width + column, mask=(column < width) & (id >= 0), other=0.0)
        value += tl.load(lost + row * LIKELY + k) * w.to(tl.float32)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=column < width)


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


BLOCK = 4096
"""Hidden width that one program writes of a row of dW."""
PIECE = 64
"""Entries of one token that a program of its own adds up beforehand, unless their sums would take too much memory."""
PIECE_BYTES = 36 * 2**20
"""For the sums of all pieces that there might be."""


def sparse_hidden(weight: Tensor, gradient: RowGradient, routes: Routes, out: Tensor) -> None:
    """dH [N, H] of the sparse rows, 0 elsewhere."""
    (vocabulary, width), slots = weight.shape, routes.key.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    _hidden_kernel[(len(out), triton.cdiv(width, block))](
        weight, routes.key, gradient.value, out, vocabulary, width, slots, BLOCK=block, SOME=4,
        SLOTS=max(2, triton.next_power_of_2(slots)), num_warps=4,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class ByToken:
    """The single entries of all rows in the order of their tokens, and within a token's in that of the rows."""

    keys: Tensor
    order: Tensor
    """Token of each, V behind the last, and its place in [N, S]."""
    starts: Tensor
    """Where each token's begin, and where the last's end [V + 1]."""
    done: torch.cuda.Event | None
    """On a GPU they are sorted beside other work: when they can be used."""


def sort_by_token(routes: Routes, vocabulary: int) -> ByToken:
    """Those that a sparse backward adds up."""
    if not routes.key.is_cuda:
        return ByToken(*_sorted(routes.key, vocabulary), None)
    usual, stream = torch.cuda.current_stream(routes.key.device), _beside(routes.key.device)
    stream.wait_stream(usual)
    with torch.cuda.stream(stream):
        found = _sorted(routes.key, vocabulary)
    routes.key.record_stream(stream)
    for x in found:
        x.record_stream(usual)
    return ByToken(*found, stream.record_event())


@functools.cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    """A stream for many small kernels that the usual one need not stop for, and that go first where both have some."""
    return torch.cuda.Stream(device, priority=-1)


def _sorted(key: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    keys, order = key.flatten().sort(stable=True)
    return keys, order, torch.searchsorted(keys, _tokens(vocabulary, key.device), out_int32=True)


@functools.lru_cache(maxsize=4)
def _tokens(vocabulary: int, device: torch.device) -> Tensor:
    """All of them, and one more."""
    return torch.arange(vocabulary + 1, dtype=torch.int32, device=device)


def sparse_weight(
    hidden: Tensor,
    gradient: RowGradient,
    routes: Routes,
    by_token: ByToken,
    d_weight: Tensor | None,
    d_bias: Tensor | None,
    *,
    add: bool,
) -> None:
    """dW [V, H] and db [V] of the sparse rows, every row of them written; or `add` them to what is there."""
    (vocabulary, width), slots = (len(by_token.starts) - 1, hidden.shape[1]), routes.key.shape[1]
    if by_token.done is not None:
        torch.cuda.current_stream(hidden.device).wait_event(by_token.done)
    block = min(BLOCK, triton.next_power_of_2(width))
    blocks = triton.cdiv(width, block) if d_weight is not None else 1
    piece = PIECE
    while len(by_token.keys) // piece * 4 * width > PIECE_BYTES:
        piece *= 2
    switches = {"WEIGHT": d_weight is not None, "PIECE": piece, "BLOCK": block}
    pieces = len(by_token.keys) // piece
    sums, sums_g = (hidden.new_empty(pieces, n, dtype=torch.float32) for n in (width if d_weight is not None else 0, 1))
    if pieces:
        _piece_kernel[(pieces, blocks)](
            hidden, gradient.value, by_token.keys, by_token.order, sums, sums_g, vocabulary, width, slots,
            SOME=min(8, piece), num_warps=max(1, block // 256), **switches,
        )  # fmt: skip
    _weight_kernel[(vocabulary, blocks)](
        hidden, gradient.value, by_token.order, by_token.starts, sums, sums_g, d_weight, d_bias, width, slots, ADD=add,
        BIAS=d_bias is not None, num_warps=max(1, block // 1024), **switches,
    )  # fmt: skip


@triton.jit
@no_type_check
def _hidden_kernel(
    weight, key, value, out, vocabulary, width, slots, BLOCK: tl.constexpr, SOME: tl.constexpr, SLOTS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    every = tl.arange(0, SLOTS)
    counted = tl.load(key + row * slots + every, mask=every < slots, other=vocabulary) < vocabulary
    # Members come in the order of the old policy's probability: most of those behind do not count.
    for k in range(0, tl.max(tl.where(counted, every + 1, 0), 0), SOME):
        slot = k + tl.arange(0, SOME)
        id = tl.load(key + row * slots + slot, mask=slot < slots, other=vocabulary)
        some = id < vocabulary
        if tl.max(some.to(tl.int32), 0) > 0:
            g = tl.load(value + row * slots + slot, mask=some, other=0.0)
            w = tl.load(
                weight + id.to(tl.int64)[:, None] * width + column[None, :],
                mask=some[:, None] & (column < width)[None, :], other=0.0,
            )  # fmt: skip
            total += tl.sum(w.to(tl.float32) * g[:, None], 0)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit
@no_type_check
def _piece_kernel(
    hidden, value, keys, order, sums, sums_g, vocabulary, width, slots, WEIGHT: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """PIECE entries, if they are all one token's."""
    piece = tl.program_id(0)
    token = tl.load(keys + piece * PIECE)
    if (token == vocabulary) | (token != tl.load(keys + piece * PIECE + PIECE - 1)):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total, sum_g = tl.zeros((BLOCK,), tl.float32), tl.zeros((SOME,), tl.float32)
    for begin in range(0, PIECE, SOME):
        entry = tl.load(order + piece * PIECE + begin + tl.arange(0, SOME))
        g = tl.load(value + entry)
        if WEIGHT:
            from_row = hidden + (entry // slots)[:, None] * width
            h = tl.load(from_row + column[None, :], mask=(column < width)[None, :], other=0.0)
            total += tl.sum(h.to(tl.float32) * g[:, None], 0)
        sum_g += g
    if WEIGHT:
        tl.store(sums + piece.to(tl.int64) * width + column, total, mask=column < width)
    if tl.program_id(1) == 0:
        tl.store(sums_g + piece, tl.sum(sum_g, 0))


@triton.jit
@no_type_check
def _weight_kernel(
    hidden, value, order, starts, sums, sums_g, d_weight, d_bias, width, slots, ADD: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: its entries one by one, or a whole piece of them at once."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = column < width
    position, end = tl.load(starts + token), tl.load(starts + token + 1)
    if ADD:  # noqa: SIM102 (decided when compiling, and the other when running)
        if position == end:
            return
    total, sum_g = tl.zeros((BLOCK,), tl.float32), tl.full((), 0.0, tl.float32)
    entry = tl.load(order + position, mask=position < end, other=0)
    while position < end:
        whole = (position % PIECE == 0) & (position + PIECE <= end)
        then = position + tl.where(whole, PIECE, 1)
        next_entry = tl.load(order + then, mask=then < end, other=0)  # on its way while this one's hidden state is
        if whole:
            piece = (position // PIECE).to(tl.int64)
            if WEIGHT:
                total += tl.load(sums + piece * width + column, mask=within, other=0.0)
            sum_g += tl.load(sums_g + piece)
        else:
            g = tl.load(value + entry)
            if WEIGHT:
                total += g * tl.load(hidden + entry // slots * width + column, mask=within, other=0.0).to(tl.float32)
            sum_g += g
        position, entry = then, next_entry
    if WEIGHT:
        here = d_weight + token * width + column
        if ADD:
            total += tl.load(here, mask=within, other=0.0).to(tl.float32)
        tl.store(here, total.to(d_weight.dtype.element_ty), mask=within)
    if BIAS:  # noqa: SIM102 (decided when compiling, and the other when running)
        if tl.program_id(1) == 0:
            if ADD:
                sum_g += tl.load(d_bias + token).to(tl.float32)
            tl.store(d_bias + token, sum_g.to(d_bias.dtype.element_ty))


@dataclass(frozen=True, eq=False)
class PendingGradients:
    """Gradients of which all is queued that the host need not know of."""

    routes: Routes
    finish: Callable[[], Gradients]
    """Wait until the number of dense rows is known, recompute those, and hand over dH, dW and db, those that are needed."""


def head_gradients(
    source: HeadInput,
    rows: HeadRows,
    gradient: RowGradient,
    tolerance: float,
    needed: Sequence[bool],
    *,
    g_entropy: Tensor | None = None,
    mean: Tensor | None = None,
    add_to: tuple[Tensor | None, Tensor | None] | None = None,
) -> PendingGradients:
    """Gradients of hidden states, weight and bias, those that are needed.

    `mean` is the mean row's Σ |dz| where there are other rows; those of weight and bias are added to `add_to`.
    """
    hidden, weight, bias = source.hidden, source.weight, source.bias
    routes = route_rows(gradient, source.spec, len(weight), tolerance, mean)
    counts = AsyncCopy(routes.counts)
    d_hidden = torch.empty_like(hidden) if needed[0] else None
    if add_to is None:
        d_weight = torch.empty_like(weight) if needed[1] else None
        d_bias = torch.empty_like(bias) if bias is not None and needed[2] else None
    else:
        d_weight, d_bias = add_to
    if tolerance > 0:
        by_token = None if d_weight is None and d_bias is None else sort_by_token(routes, len(weight))
        if d_hidden is not None:
            sparse_hidden(weight, gradient, routes, d_hidden)
        if by_token is not None:
            sparse_weight(hidden, gradient, routes, by_token, d_weight, d_bias, add=add_to is not None)
    elif d_hidden is not None:
        d_hidden.zero_()
    written = tolerance > 0 or add_to is not None

    def finish() -> Gradients:
        _, dense = counts.wait()
        if dense:
            dense_rows(source, rows, g_entropy, gradient, routes.dense, dense, d_hidden, d_weight, d_bias, add=written)
        elif not written:  # no row has a gradient
            for x in (d_weight, d_bias):
                if x is not None:
                    x.zero_()
        return d_hidden, d_weight, d_bias

    return PendingGradients(routes, finish)
