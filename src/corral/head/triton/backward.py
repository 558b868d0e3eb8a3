"""Backward pass of the LM head in Triton, with a sparse or a dense logit gradient for each token."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.head.dispatch import tile_of
from corral.head.logits import LogitSpec, slices
from corral.head.packed import LossTerms
from corral.head.rows import AsyncCopy, Gradients, HeadInput, HeadRows, Upstream, blank_gradients
from corral.head.triton.gemm_stats import finish_logits, gemm_stats, lanes, spec_arguments
from corral.head.triton.loss import LossRows
from corral.head.triton.support import support_rows

DEAD, SPARSE, DENSE = map(tl.constexpr, range(3))
"""Kinds of logit gradient that a token can have in the backward pass: none, sparse or dense."""


@dataclass(frozen=True, eq=False)
class RowGradient:
    """Logit gradients of N positions in sparse form: explicit entries for some token ids, and one factor for all others.

    Each position has S = K + 1 explicit entries.
    """

    ids: Tensor
    """Token id of each explicit gradient entry [N, S] int32; −1 is padding."""
    value: Tensor
    """Gradient of each explicit entry with respect to the dot product of hidden state and weight row [N, S].
    It includes the slope of the soft cap."""
    factor: Tensor
    """Sum c of the logit gradients of all tokens without an explicit entry [N].
    Each gets a part in proportion to its share of the tail mass."""
    off: Tensor
    size: Tensor
    """L1 norm of each position's logit gradient [N], Σ |dz|; `off` is the norm |c| of the part without explicit entries.
    |c| counts as 0 if there are no tokens without an explicit entry."""
    route: Tensor
    """Kind of logit gradient at each position, if only the part in `off` may be dropped: DEAD, SPARSE or DENSE [N] int32."""


def row_gradient(
    rows: HeadRows, tokens: Tensor, upstream: Upstream, spec: LogitSpec, weights: Tensor | None = None
) -> RowGradient:
    """Compute the logit gradient of each position in sparse form; upstream gradients are multiplied by `weights` [N]."""
    (count, kept), device = rows.kept.shape, tokens.device
    ids, value = (torch.empty(count, kept + 1, dtype=kind, device=device) for kind in (torch.int32, torch.float32))
    factor, off, size = (torch.empty(count, device=device) for _ in range(3))
    route = torch.empty(count, dtype=torch.int32, device=device)
    _row_kernel[(count,)](
        rows.ids, rows.kept, rows.rest, rows.logp, rows.lse, rows.entropy, tokens, upstream.kept, upstream.rest, upstream.logp,
        upstream.entropy, weights, ids, value, factor, off, size, route, kept, kept + 1, rows.ids.stride(0),
        rows.kept.stride(0), rows.logp.stride(0), spec.slope, spec.curve, SLOTS=lanes(kept + 1), num_warps=1,
    )  # fmt: skip
    return RowGradient(ids, value, factor, off, size, route)


@triton.jit
def _row_kernel(
    ids, kept, rest, logp, lse, entropy, tokens, g_kept, g_rest, g_logp, g_entropy, weights, out_ids, out_value, out_factor,
    out_off, out_size, out_route, slots_in, slots, stride_ids, stride_kept, stride_logp, slope, curve, SLOTS: tl.constexpr,
):  # fmt: skip
    """Compute the logit gradient at one position: explicit entries for some token ids, and one factor c for all others.

        dz_v = g_v + g_a [v = a] − p_v G                on the support, G = g_a + Σ g_v + g_rest
        dz_v = p_v / p_rest · c,  c = g_rest − p_rest G  off it: one number c per row, shared in proportion to the tail

    The entropy adds −g_H p_v (log p_v + H) everywhere.
    """
    # One row per program of one warp: sums over its slots need no shared memory. Row numbers are 64-bit before they are
    # multiplied: rows × slots, and rows × H, pass 2³¹ in a large batch.
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    inside = slot < slots_in
    id = tl.load(ids + row * stride_ids + slot, mask=inside, other=-1).to(tl.int32)
    member = id >= 0
    token = tl.load(tokens + row).to(tl.int32)
    log_rest = tl.load(rest + row)
    times = log_rest * 0.0 + 1.0  # 1 as a tensor, also where the tail is empty and 0 · −∞ is NaN
    times = tl.where(times == times, times, 1.0)
    if weights is not None:
        times = tl.load(weights + row).to(tl.float32)
    own_g, outer_g, entropy_g = 0.0 * times, 0.0 * times, 0.0 * times
    g = tl.zeros((SLOTS,), tl.float32)
    # Weight 0 removes a gradient, NaN or not.
    if g_logp is not None:
        own_g = tl.where(times == 0.0, 0.0, tl.load(g_logp + row) * times)
    if g_rest is not None:
        outer_g = tl.where(times == 0.0, 0.0, tl.load(g_rest + row) * times)
    if g_entropy is not None:
        entropy_g = tl.where(times == 0.0, 0.0, tl.load(g_entropy + row) * times)
    if g_kept is not None:
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

    # Off the support all parts have the sign of c, and the parts of the tail's mass sum to 1: together they are |c|, exactly.
    off = tl.where(nothing, 0.0, tl.abs(factor))
    size = tl.sum(tl.abs(value), 0) + off
    alive = (own_g != 0.0) | (outer_g != 0.0) | (entropy_g != 0.0) | (tl.max(tl.abs(g), 0) != 0.0) | (size != size)
    # The entropy's gradient is nowhere single, and NaN spreads as it should where everything is computed.
    must = (entropy_g != 0.0) | (size != size)
    # `size` and `off` are of dz; what is stored goes into the GEMMs, and is of h·w: the slope of scale, temperature and cap.
    value = value * slope
    if curve is not None:
        u = (log_p + tl.load(lse + row)) * curve
        value = tl.where(member | extra, value * (1.0 - u * u), 0.0)
    real = slot < slots
    at = row * slots + slot
    tl.store(out_ids + at, id, mask=real)
    tl.store(out_value + at, value, mask=real)
    tl.store(out_factor + row, factor)
    tl.store(out_off + row, off)
    tl.store(out_size + row, size)
    tl.store(out_route + row, tl.where(alive, tl.where(must, DENSE, SPARSE), DEAD))


ROWS = 16
"""Number of tokens (rows) that one Triton program of `_route_kernel` processes."""
PADDED = 16
"""Multiple to which the number of tokens with a dense gradient is padded: the width of a GPU's matrix units.
Padding in the list of these tokens is −1."""


@triton.jit
def _route_kernel(
    ids, value, off, size, need, given_mean, route, key, out_share, count, slots, vocabulary, tolerance, slope, small,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose a sparse or a dense logit gradient for ROWS positions, and mark the entries that a sparse gradient keeps."""
    if given_mean is not None:
        mean = tl.load(given_mean)
    else:  # every program adds up all rows, in the same order, sooner than another kernel would start
        sums = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, count, BLOCK):
            item = begin + tl.arange(0, BLOCK)
            sums += tl.load(size + item, mask=item < count, other=0.0)
        mean = tl.sum(sums, 0) / count

    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    here = row < count
    # The share of Σ |dz| dropped stands for the relative error: dH is a sum of rows of W times dz, and dW one of rows of H.
    # Measured against the mean row where that is larger: a row with next to no gradient may lose all of it.
    whole = tl.maximum(tl.load(size + row, mask=here, other=0.0), mean)
    slot = tl.arange(0, SLOTS)
    at = row[:, None] * slots + slot[None, :]
    real = here[:, None] & (slot < slots)[None, :]
    id = tl.load(ids + at, mask=real, other=-1)
    g = tl.abs(tl.load(value + at, mask=real, other=0.0))
    # Entries too small to matter cost as much traffic as any other, a row of W and one of H each. They are left out too, as
    # many as fit in an eighth of the tolerance, and count as dropped.
    counts_for = (id >= 0) & (g > (small * slope * whole)[:, None])
    left_out = tl.load(off + row, mask=here, other=0.0) + tl.sum(tl.where((id >= 0) & ~counts_for, g, 0.0), 1) / slope
    share = tl.where(left_out > 0.0, left_out / whole, 0.0)
    way = tl.load(need + row, mask=here, other=0)
    way = tl.where((way == SPARSE) & ~(share < tolerance), DENSE, way)
    tl.store(route + row, way, mask=here)
    tl.store(out_share + row, tl.where(way == SPARSE, share, 0.0), mask=here)
    tl.store(key + at, tl.where((way == SPARSE)[:, None] & counts_for, id, vocabulary), mask=real)


@triton.jit
def _tally_kernel(route, share, counts, dense_rows, shares, count, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """List the positions with a dense gradient, in one Triton program, so that sums in dW have a fixed order.

    The list is padded with −1 to a multiple of PADDED; what follows is undefined.
    """
    # One program: a prefix sum over all rows would else need a second pass, and 8192 rows are one step of this loop.
    with_gradient, dense, most = 0, 0, 0.0
    for begin in range(0, count, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        way = tl.load(route + row, mask=row < count, other=0)
        with_gradient += tl.sum((way > DEAD).to(tl.int32), 0)
        is_dense = (way == DENSE).to(tl.int32)
        tl.store(dense_rows + dense + tl.cumsum(is_dense, 0) - 1, row.to(tl.int64), mask=way == DENSE)
        dense += tl.sum(is_dense, 0)
        most = tl.maximum(most, tl.max(tl.load(share + row, mask=row < count, other=0.0), 0))
    tl.store(dense_rows + dense + tl.arange(0, PADDED), tl.full((PADDED,), -1, tl.int64))
    tl.store(counts, with_gradient)
    tl.store(counts + 1, dense)
    tl.store(shares, tl.cast(dense, tl.float32) / tl.maximum(with_gradient, 1).to(tl.float32))
    tl.store(shares + 1, most)


LOGITS_AT_ONCE = 2**28
"""Largest number of logits in memory at once: 1 GiB in float32, plus half as much for their half-precision gradient."""
ROWS_AT_ONCE = 16384


def dense_rows(
    source: HeadInput, rows: HeadRows, gradient: RowGradient, picked: Tensor, count: int, out: Gradients, *, add: bool,
    g_entropy: Tensor | None = None,
) -> None:  # fmt: skip
    """Recompute the logits at positions with a dense gradient, and write the LM head's gradients into `out`.

    With `add`, add to dW and db. The rows are the first `count` of `picked`, which is padded with −1.
    """
    hidden, weight, bias, spec = source.hidden, source.weight, source.bias, source.spec
    for part in slices(triton.cdiv(count, PADDED) * PADDED, ROWS_AT_ONCE):
        add = add or part.start > 0
        row = picked[part]
        real = row[: max(count - part.start, 0)]
        h = hidden[row.clamp(min=0)]
        d_h = None if out.hidden is None else torch.empty_like(h, dtype=torch.float32)
        # Wide blocks of the vocabulary: dH is read and written once per block.
        columns = max(2048, LOGITS_AT_ONCE // len(row) // 256 * 256)
        memory = h.new_empty(len(row) * min(columns, len(weight)), dtype=torch.float32)
        memory_dz = torch.empty_like(memory, dtype=h.dtype)
        for block in slices(len(weight), columns):
            w = weight[block]
            shape = (len(row), len(w))
            dots, dz = (x[: shape[0] * shape[1]].view(shape) for x in (memory, memory_dz))
            # In the dtype of the forward GEMM and summed in float32: these logits are those behind lse, but for rounding.
            multiply(h, w.T, dots)
            _dense_kernel[(shape[0], triton.cdiv(shape[1], 4096))](
                dots, dz, bias, row, rows.lse, rows.rest, rows.entropy, g_entropy, gradient.factor, gradient.ids,
                gradient.value, block.start, shape[1], len(weight), gradient.ids.shape[1], *spec_arguments(spec), spec.slope,
                spec.curve, BLOCK=4096, SLOTS=lanes(gradient.ids.shape[1]), num_warps=8,
            )  # fmt: skip
            if d_h is not None:
                multiply(dz, w, d_h, add=block.start > 0)
            if out.weight is not None:
                multiply(dz.T, h, out.weight[block], add=add)
            if out.bias is not None:
                d_b = dz.sum(0, dtype=torch.float32)
                out.bias[block] = d_b + out.bias[block] if add else d_b
        if out.hidden is not None and d_h is not None:
            out.hidden.index_copy_(0, real, d_h[: len(real)].to(out.hidden.dtype))


def multiply(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Compute `out = left @ right`, or with `add` `out += left @ right`, accumulated in float32 for any dtype."""
    # `addmm` adds in the GEMM's epilogue: no temporary of the size of dW, 1.2 GB, and no second pass over it.
    if left.is_cuda or left.dtype == out.dtype == torch.float32:
        how: dict[str, Any] = {} if left.dtype == out.dtype else {"out_dtype": out.dtype}
        torch.addmm(out, left, right, out=out, **how) if add else torch.mm(left, right, out=out, **how)
    else:
        dot = left.float() @ right.float()
        out.copy_(dot + out.float() if add else dot)


@triton.jit
def _dense_kernel(
    dots, dz, bias, picked, lse, rest, entropy, g_entropy, factor, ids, value, start, width, vocabulary, slots, before, cap,
    after, slope, curve, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK columns of the dense logit gradient at one position, then write the explicit entries over them.

    A column without an explicit entry gets its factor times p / p_rest.
    """
    # Padding of the list computes row 0 and stores zeros: the GEMMs behind read whole multiples of 16 rows.
    row = tl.load(picked + tl.program_id(0))
    real = row >= 0
    row = tl.where(real, row, 0)
    begin = tl.program_id(1) * BLOCK
    column = begin + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * width
    dot = tl.load(dots + at + column, mask=column < width, other=0.0)[None, :]
    z = finish_logits(dot, start + column, bias, vocabulary, before, cap, after)
    log_p = z - tl.load(lse + row)
    log_rest = tl.load(rest + row)
    log_rest = tl.where(log_rest == -float("inf"), 0.0, log_rest)
    g = tl.exp(log_p - log_rest) * tl.load(factor + row)
    if g_entropy is not None:
        surprise = tl.where(log_p > -float("inf"), log_p + tl.load(entropy + row), 0.0)
        g -= tl.exp(log_p) * tl.load(g_entropy + row) * surprise
    g = tl.where(real, g * slope, 0.0)
    if curve is not None:
        u = z * curve
        g = tl.where(z > -float("inf"), g * (1.0 - u * u), 0.0)
    kind = dz.dtype.element_ty
    # First every column by the factor, then the explicit entries over it, in one program: a barrier orders the two. Of a block
    # only the entries in its own columns are written, so that programs of a row do not meet.
    tl.store(dz + at + column[None, :], g.to(kind), mask=(column < width)[None, :])
    tl.debug_barrier()
    slot = tl.arange(0, SLOTS)
    id = tl.load(ids + row * slots + slot, mask=slot < slots, other=-1) - start
    single = tl.load(value + row * slots + slot, mask=slot < slots, other=0.0)
    tl.store(dz + at + id, single.to(kind), mask=real & (id >= begin) & (id < begin + BLOCK) & (id < width))


REACH: tl.constexpr = tl.constexpr(50.0)
"""Largest gap between a reference logit and log Σ eᶻ within which stored exponentials are exact enough for a gradient.
A reference below is compared with the sum over the vocabulary, a reference above with the sum over the tail."""
WEAKEST: tl.constexpr = tl.constexpr(2.0**-80)
"""Smallest scale factor s of a stored logit gradient, relative to its largest explicit entry.
Entries are stored divided by s."""
LIKELY = 4
"""Number of gradient entries per position whose rounding errors are corrected.
They are the entries of the sampled and the most likely tokens."""


@dataclass(frozen=True, eq=False)
class FactoredGradient:
    """Gradient with respect to h Wᵀ [n, V] as a factor for each position times the exponentials that a GEMM stored.

    It is diag(factor) · stored. The gradient of a logit off the support is c e^(z − lse − rest), and e^(z − reference) is
    stored already, so one factor s = c e^(reference − lse − rest) per row is all that is missing. It is multiplied onto dH, or
    onto the hidden states for dW, which saves a pass that would read and write all of [n, V]. Only explicit entries are
    written, divided by s.
    """

    stored: Tensor
    factor: Tensor
    """Factor s of each position [n], by which the backward pass multiplies stored values; 0 where there is no gradient."""
    likely: Tensor
    lost: Tensor
    """Rounding errors of each position's first explicit entries [n, LIKELY]; `likely` are their token ids, −1 at padding."""


def scale_rows(x: Tensor, dz: FactoredGradient, out: Tensor, weight: Tensor | None = None) -> Tensor:
    """Multiply each row of `x` by its factor s, and with `weight` correct rounding errors of gradient entries.

    s = 0 gives 0 even for NaN. A correction is a likely token's rounding error times its weights.
    """
    (count, width), block = x.shape, min(1024, triton.next_power_of_2(x.shape[1]))
    _rows_kernel[(count, triton.cdiv(width, block))](
        x, dz.factor, dz.likely, dz.lost, weight, out, width, LIKELY=0 if weight is None else LIKELY, BLOCK=block, num_warps=2
    )
    return out


def can_store(hidden: Tensor, spec: LogitSpec) -> bool:
    """True if exponentials of logits can be stored in place of logits: not in float16, and not with a soft cap."""
    return hidden.dtype != torch.float16 and spec.softcap is None


def sampled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: LogitSpec, tokens: Tensor) -> Tensor:
    """Compute the logit of the sampled token at each position [N], as the reference for stored exponentials.

    It is exact up to rounding. A soft cap is not supported. For a token outside the vocabulary, which is refused elsewhere, it
    is the logit of the nearest token inside.
    """
    (count, width), out = hidden.shape, hidden.new_empty(len(hidden), dtype=torch.float32)
    _sampled_kernel[(count,)](
        hidden, weight, bias, tokens, out, len(weight), width, spec.slope, BLOCK=min(1024, triton.next_power_of_2(width)),
        num_warps=2,
    )  # fmt: skip
    return out


def write_entries(
    stored: Tensor, reference: Tensor, rows: HeadRows, gradient: RowGradient, spec: LogitSpec, left_out: Tensor
) -> FactoredGradient:
    """Write explicit gradient entries over the `stored` exponentials, in place, and compute each position's factor s.

    Positions without a gradient get s = 0. `left_out` [n] becomes True where a row with a gradient is out of range: it gets
    s = 0 and is recomputed later.
    """
    (count, slots), factor = gradient.ids.shape, torch.empty_like(gradient.factor)
    likely, lost = gradient.ids.new_empty(count, LIKELY), gradient.value.new_empty(count, LIKELY)
    _entries_kernel[(count,)](
        stored, reference, rows.lse, rows.rest, gradient.factor, gradient.ids, gradient.value, factor, likely, lost,
        left_out.view(torch.uint8), stored.stride(0), slots, spec.slope, LIKELY=LIKELY,
        SLOTS=max(LIKELY, triton.next_power_of_2(slots)), num_warps=1,
    )  # fmt: skip
    return FactoredGradient(stored, factor, likely, lost)


@triton.jit
def _sampled_kernel(hidden, weight, bias, tokens, out, vocabulary, width, slope, BLOCK: tl.constexpr):
    """Compute the logit of one sampled token, from the hidden state at its position and the token's row of the head weight."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.minimum(tl.maximum(tl.load(tokens + row).to(tl.int64), 0), vocabulary - 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, width, BLOCK):
        column = k + tl.arange(0, BLOCK)
        h = tl.load(hidden + row * width + column, mask=column < width, other=0.0).to(tl.float32)
        total += h * tl.load(weight + token * width + column, mask=column < width, other=0.0).to(tl.float32)
    z = tl.sum(total, 0)
    if bias is not None:
        z += tl.load(bias + token).to(tl.float32)
    z = z * slope
    # An impossible token has no finite loss, and is refused for it; until then the others are relative to something.
    tl.store(out + row, tl.where(tl.abs(z) < float("inf"), z, 0.0))


@triton.jit
def _entries_kernel(
    stored, reference, lse, rest, off_factor, ids, value, factor, likely, lost_value, left_out, stride, slots, slope,
    LIKELY: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Compute the factor s of one position, and write its explicit gradient entries, divided by s, over stored exponentials."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    id = tl.load(ids + row * slots + slot, mask=slot < slots, other=-1)
    single = tl.load(value + row * slots + slot, mask=slot < slots, other=0.0)
    ref, total, log_rest = tl.load(reference + row), tl.load(lse + row), tl.load(rest + row)
    nothing = log_rest == -float("inf")  # off the support: E is 0 there, whatever it is multiplied with
    c = tl.where(nothing, 0.0, tl.load(off_factor + row) * slope)
    # Within REACH, e^above and the entries divided by s are normal numbers in bfloat16 too. A row beyond is small enough to
    # count as rounding, or it is lost, and computed again.
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
    # An entry in bfloat16 is off by 2⁻⁹ of itself, and the largest ones nearly cancel in dH (p_a − 1 against the other p). What
    # rounding took from the first few is kept in float32, and goes into dH by itself.
    entry = (single / tl.where(s == 0.0, 1.0, s)).to(stored.dtype.element_ty)
    tl.store(stored + row * stride + id, entry, mask=id >= 0)
    tl.store(likely + row * LIKELY + slot, id, mask=slot < LIKELY)
    tl.store(lost_value + row * LIKELY + slot, tl.where(id < 0, 0.0, single - s * entry.to(tl.float32)), mask=slot < LIKELY)


@triton.jit
def _rows_kernel(x, factor, likely, lost, weight, out, width, LIKELY: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply a part of one row by its factor s, and with `weight` correct rounding errors of gradient entries.

    A correction is a likely token's rounding error times its weights.
    """
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
"""Memory in bytes for stored exponentials of logits: more memory means more rows at once, and fewer passes over dW."""


@dataclass(frozen=True, eq=False)
class DenseRows:
    """Losses and gradients of positions with a dense logit gradient; the function `finish` queues the last two GEMMs.

    These wait, so that the host can read results first.
    """

    rows: HeadRows
    loss: LossRows
    sizes: Tensor
    """L1 norm of each position's logit gradient, Σ |dz| [N]."""
    left_out: Tensor
    """True at positions whose gradient could not be stored and must be recomputed [N].
    Their sampled token is almost impossible, or their tail has a gradient but almost no mass."""
    finish: Callable[[], None]
    """Function that queues the last GEMMs of the gradients; positions in `left_out` get no gradient from it.
    They are the gradients of Σ weights · loss."""


def dense_forward(
    source: HeadInput,
    terms: LossTerms,
    loss_of: Callable[[HeadRows, LossTerms], LossRows],
    out: Gradients,
    overflows: list[AsyncCopy] | None = None,
) -> DenseRows:
    """Compute the losses at positions with a dense logit gradient, and write the LM head's gradients into `out`.

    `overflows` is as in `stream_head`.

    One GEMM makes the logits and stores their exponentials, relative to the sampled token's logit; the gradient is made from
    these in place, for two more GEMMs. The GEMMs of a part are queued after the next part's kernels, so that the host is ahead
    of the device.
    """
    hidden, weight, bias, spec = source.hidden, source.weight, source.bias, source.spec
    bias_sum = None if out.bias is None else torch.zeros_like(out.bias, dtype=torch.float32)
    tile = tile_of(hidden)
    tiles = triton.cdiv(len(weight), tile.columns)
    most = max(tile.rows, BYTES_AT_ONCE // (tiles * tile.columns * hidden.element_size()))
    memory = hidden.new_empty(triton.cdiv(len(hidden), triton.cdiv(len(hidden), most)), tiles * tile.columns)
    reference = sampled_logits(hidden, weight, bias, spec, source.tokens)
    left_out = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
    sizes = torch.empty(len(hidden), device=hidden.device)
    found: list[HeadRows] = []
    losses: list[LossRows] = []

    def multiply_out(part: slice, dz: FactoredGradient) -> None:
        if out.hidden is not None:
            d_h = torch.empty_like(out.hidden[part], dtype=torch.float32)  # rounded once, when it is multiplied
            multiply(dz.stored, weight, d_h)
            scale_rows(d_h, dz, out.hidden[part], weight)
        if out.weight is not None:
            scaled = scale_rows(hidden[part], dz, torch.empty_like(hidden[part]))
            multiply(dz.stored.T, scaled, out.weight, add=part.start > 0)
        if bias_sum is not None:
            # The factor as a sum of two numbers in half precision, so that only E is rounded; matrix units want 8 columns.
            factors = dz.stored.new_zeros(len(dz.factor), 8)
            factors[:, 0] = dz.factor
            factors[:, 1] = dz.factor - factors[:, 0].float()
            sums = torch.empty(len(weight), 8, device=weight.device)
            multiply(dz.stored.T, factors, sums)
            bias_sum.add_(sums.sum(-1))

    pending: tuple[slice, FactoredGradient] | None = None
    for part in slices(len(hidden), len(memory)):
        if pending is not None:
            multiply_out(*pending)  # of the part before, whose memory this one overwrites
        some, stored = source[part], memory[: part.stop - part.start]
        rows = support_rows(some, gemm_stats(some, store=stored, reference=reference[part]), overflows)
        loss = loss_of(rows, terms[:, part])
        gradient = row_gradient(rows, some.tokens, loss, spec, terms.weights[0, part])
        dz = write_entries(stored[:, : len(weight)], reference[part], rows, gradient, spec, left_out[part])
        found.append(rows)
        losses.append(loss)
        sizes[part] = gradient.size
        pending = part, dz

    def finish() -> None:
        assert pending is not None
        multiply_out(*pending)
        if out.bias is not None and bias_sum is not None:
            out.bias.copy_(bias_sum)

    return DenseRows(HeadRows.cat(found), LossRows.cat(losses), sizes, left_out, finish)


def recompute_rows(source: HeadInput, stored: DenseRows, weights: Tensor, out: Gradients) -> None:
    """Recompute the gradients at positions whose gradient could not be stored: write dH there, and add to dW and db.

    The positions are those in `left_out`.
    """
    picked = stored.left_out.nonzero().squeeze(-1)
    padded = torch.nn.functional.pad(picked, (0, -len(picked) % PADDED), value=-1)
    gradient = row_gradient(stored.rows, source.tokens, stored.loss, source.spec, weights)
    dense_rows(source, stored.rows, gradient, padded, len(picked), out, add=True)


def scale(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply `x` in place by the first element of `factor`; if this factor is 1, `x` is not read."""
    _scale_kernel[(triton.cdiv(x.numel(), 65536),)](x, factor, x.numel(), BLOCK=8192, num_warps=8)
    return x


@triton.jit
def _scale_kernel(x, factor, total, BLOCK: tl.constexpr):
    """Multiply a slice of `x` in place by a factor that is read on the device, so that the host does not wait.

    A factor of 1 costs no pass.
    """
    # 65,536 numbers per program: where the factor is 1, programs are few and end at once.
    times = tl.load(factor).to(tl.float32)
    if times != 1.0:
        for step in range(0, 8):
            at = (tl.program_id(0).to(tl.int64) * 8 + step) * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < total, other=0.0).to(tl.float32) * times
            tl.store(x + at, value.to(x.dtype.element_ty), mask=at < total)


BLOCK = 4096
"""Number of columns that one Triton program writes in one row of the weight gradient dW."""
PIECE = 64
"""Number of gradient entries of one token that one Triton program sums; more if the partial sums take too much memory."""
PIECE_BYTES = 36 * 2**20
"""Memory limit in bytes for the partial sums of all tokens' gradient entries."""


def sparse_rows(source: HeadInput, gradient: RowGradient, key: Tensor, out: Gradients, *, add: bool) -> None:
    """Write the LM head's gradients from positions with a sparse logit gradient; dH becomes 0 at all other positions.

    With `add`, dW and db are added to.

    `key` [N, S] has the token of each explicit entry that counts, and V elsewhere.
    """
    hidden, weight = source.hidden, source.weight
    (vocabulary, width), slots = weight.shape, key.shape[1]
    by_token = None if out.weight is None and out.bias is None else _sort_by_token(key, vocabulary)
    if out.hidden is not None:
        block = min(1024, triton.next_power_of_2(width))
        _hidden_kernel[(len(hidden), triton.cdiv(width, block))](
            weight, key, gradient.value, out.hidden, vocabulary, width, slots, BLOCK=block, SOME=4, SLOTS=lanes(slots),
            num_warps=4,
        )  # fmt: skip
    if by_token is None:
        return
    if hidden.is_cuda:
        torch.cuda.current_stream(hidden.device).wait_stream(_side_stream(hidden.device))
    tokens, order, starts = by_token
    block = min(BLOCK, triton.next_power_of_2(width))
    blocks = triton.cdiv(width, block) if out.weight is not None else 1
    piece = PIECE
    while len(tokens) // piece * 4 * width > PIECE_BYTES:
        piece *= 2
    pieces = len(tokens) // piece
    sums = None if out.weight is None else hidden.new_empty(pieces, width, dtype=torch.float32)
    sums_g = hidden.new_empty(pieces, 1, dtype=torch.float32)
    if pieces:
        _piece_kernel[(pieces, blocks)](
            hidden, gradient.value, tokens, order, sums, sums_g, vocabulary, width, slots, SOME=min(8, piece), PIECE=piece,
            BLOCK=block, num_warps=max(1, block // 256),
        )  # fmt: skip
    # One program per token of the vocabulary writes its row of dW once: no atomics, no zero fill, and a fixed order of sums.
    _weight_kernel[(vocabulary, blocks)](
        hidden, gradient.value, order, starts, sums, sums_g, out.weight, out.bias, width, slots, ADD=add, PIECE=piece,
        BLOCK=block, num_warps=max(1, block // 1024),
    )  # fmt: skip


def _sort_by_token(key: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort gradient entries by token id. Return the sorted ids, the entries' indices, and each token's first entry [V + 1].

    The indices count through the entries [N, S]. Entries of one token stay in the order of their rows, so that sums over them
    repeat bit for bit. On a GPU the sort, which is many small kernels, runs on the side stream while dH is computed.
    """
    side = None
    if key.is_cuda:
        main, side = torch.cuda.current_stream(key.device), _side_stream(key.device)
        side.wait_stream(main)
    with torch.cuda.stream(side):
        tokens, order = key.flatten().sort(stable=True)
        every = torch.arange(vocabulary + 1, dtype=torch.int32, device=key.device)
        starts = torch.searchsorted(tokens, every, out_int32=True)
    if side is not None:  # the allocator must not reuse this memory for the other stream too early
        key.record_stream(side)
        for x in (tokens, order, starts):
            x.record_stream(main)
    return tokens, order, starts


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a second CUDA stream with priority, which runs many small kernels beside the main stream."""
    return torch.cuda.Stream(device, priority=-1)


@triton.jit
def _hidden_kernel(
    weight, key, value, out, vocabulary, width, slots, BLOCK: tl.constexpr, SOME: tl.constexpr, SLOTS: tl.constexpr
):
    """Compute a part of dH at one position, as the sum of its gradient entries times rows of the head weight.

    A peaked policy has about ten entries.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    every = tl.arange(0, SLOTS)
    counted = tl.load(key + row * slots + every, mask=every < slots, other=vocabulary) < vocabulary
    # Members come in the order of the old policy's probability: most of those behind do not count. SOME rows of W are gathered
    # together, so that their loads are in flight at once; more would take registers from other programs.
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
def _piece_kernel(
    hidden, value, keys, order, sums, sums_g, vocabulary, width, slots, PIECE: tl.constexpr, BLOCK: tl.constexpr,
    SOME: tl.constexpr,
):  # fmt: skip
    """Sum PIECE consecutive gradient entries if all of them belong to the same token.

    A frequent token, such as a comma, has thousands of entries. One program for each would be what the others wait for: its
    pieces are summed side by side first, always the same entries in a piece, so that the sums repeat bit for bit.
    """
    piece = tl.program_id(0)
    token = tl.load(keys + piece * PIECE)
    if (token == vocabulary) | (token != tl.load(keys + piece * PIECE + PIECE - 1)):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total, sum_g = tl.zeros((BLOCK,), tl.float32), tl.zeros((SOME,), tl.float32)
    for begin in range(0, PIECE, SOME):
        entry = tl.load(order + piece * PIECE + begin + tl.arange(0, SOME))
        g = tl.load(value + entry)
        if sums is not None:
            from_row = hidden + (entry // slots)[:, None] * width
            h = tl.load(from_row + column[None, :], mask=(column < width)[None, :], other=0.0)
            total += tl.sum(h.to(tl.float32) * g[:, None], 0)
        sum_g += g
    if sums is not None:
        tl.store(sums + piece.to(tl.int64) * width + column, total, mask=column < width)
    if tl.program_id(1) == 0:
        tl.store(sums_g + piece, tl.sum(sum_g, 0))


@triton.jit
def _weight_kernel(
    hidden, value, order, starts, sums, sums_g, d_weight, d_bias, width, slots, ADD: tl.constexpr, PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one token's row of the weight gradient dW from its gradient entries and the sums of `_piece_kernel`."""
    # Rows of dW without any entry are written too, as zeros, unless they are added to: no pass before this fills dW.
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = column < width
    position, end = tl.load(starts + token), tl.load(starts + token + 1)
    if ADD:  # noqa: SIM102 (the first is a constexpr, the second a runtime condition)
        if position == end:
            return
    total, sum_g = tl.zeros((BLOCK,), tl.float32), tl.full((), 0.0, tl.float32)
    entry = tl.load(order + position, mask=position < end, other=0)
    while position < end:
        whole = (position % PIECE == 0) & (position + PIECE <= end)
        then = position + tl.where(whole, PIECE, 1)
        # Loads of entries depend on one another, and would be waited for one by one.
        next_entry = tl.load(order + then, mask=then < end, other=0)  # on its way while this one's hidden state is
        if whole:
            piece = (position // PIECE).to(tl.int64)
            if d_weight is not None:
                total += tl.load(sums + piece * width + column, mask=within, other=0.0)
            sum_g += tl.load(sums_g + piece)
        else:
            g = tl.load(value + entry)
            if d_weight is not None:
                total += g * tl.load(hidden + entry // slots * width + column, mask=within, other=0.0).to(tl.float32)
            sum_g += g
        position, entry = then, next_entry
    if d_weight is not None:
        here = d_weight + token * width + column
        if ADD:
            total += tl.load(here, mask=within, other=0.0).to(tl.float32)
        tl.store(here, total.to(d_weight.dtype.element_ty), mask=within)
    if d_bias is not None:  # noqa: SIM102 (the first is a constexpr, the second a runtime condition)
        if tl.program_id(1) == 0:
            if ADD:
                sum_g += tl.load(d_bias + token).to(tl.float32)
            tl.store(d_bias + token, sum_g.to(d_bias.dtype.element_ty))


def head_gradients(
    source: HeadInput,
    rows: HeadRows,
    gradient: RowGradient,
    tolerance: float,
    out: Gradients,
    *,
    g_entropy: Tensor | None = None,
    mean: Tensor | None = None,
    add: bool = False,
) -> tuple[Tensor, Tensor, Callable[[], None]]:
    """Choose a sparse or a dense logit gradient for each position, and write the LM head's gradients into `out`.

    A row is dense if a sparse gradient would drop a share of `tolerance` or more of its Σ |dz|, or of the mean row's where that
    is larger. With tolerance 0 all rows with a gradient are dense.

    Args:
        g_entropy: gradient with respect to the entropy [N].
        mean: the mean row's Σ |dz| [1], if there are other rows; by default the mean of these.
        add: add to dW and db.
    Returns:
        Numbers of rows with a gradient and with a dense gradient [2]; the share of dense rows and the largest share dropped
        [2]; and a function that waits for the number of dense rows, and recomputes these. All other kernels are queued.
    """
    (count, slots), device, spec, vocabulary = gradient.ids.shape, gradient.ids.device, source.spec, len(source.weight)
    # Token ids of the entries in a sparse gradient [N, S]; V at entries that are left out.
    key, route, share = (torch.empty_like(x) for x in (gradient.ids, gradient.route, gradient.size))
    counts, shares = torch.empty(2, dtype=torch.int32, device=device), torch.empty(2, device=device)
    dense = torch.empty(count + PADDED, dtype=torch.int64, device=device)
    _route_kernel[(triton.cdiv(count, ROWS),)](
        gradient.ids, gradient.value, gradient.off, gradient.size, gradient.route, mean, route, key, share, count, slots,
        vocabulary, tolerance, abs(spec.slope),
        # A soft cap flattens the entries after `size` was summed: none is small enough to be left out for certain.
        0.0 if spec.softcap is not None else tolerance / (8 * slots), ROWS=ROWS, SLOTS=lanes(slots), BLOCK=2048, num_warps=8,
    )  # fmt: skip
    _tally_kernel[(1,)](
        route, share, counts, dense, shares, count, PADDED=PADDED, BLOCK=min(8192, triton.next_power_of_2(count)), num_warps=8
    )
    found = AsyncCopy(counts)
    if tolerance > 0:
        sparse_rows(source, gradient, key, out, add=add)
    elif out.hidden is not None:
        out.hidden.zero_()
    written = tolerance > 0 or add

    def finish() -> None:
        _, number = found.wait()
        if number:
            dense_rows(source, rows, gradient, dense, number, out, add=written, g_entropy=g_entropy)
        elif not written:  # no row has a gradient
            out.map(torch.zero_, shared=True)

    return counts, shares, finish


def lm_head_backward(
    source: HeadInput, rows: HeadRows, upstream: Upstream, needed: Sequence[bool], *, tolerance: float, report: Tensor | None
) -> Gradients:
    """Compute the gradients of `lm_head` that are needed, and write two diagnostics of sparse gradients to `report`.

    They are the share of dense gradients and the largest share dropped [2].
    """
    out = blank_gradients(source, needed)
    if not len(source.hidden):
        return out.map(torch.zero_, shared=True)
    upstream = upstream.map(Tensor.contiguous)
    gradient = row_gradient(rows, source.tokens, upstream, source.spec)
    _, shares, finish = head_gradients(source, rows, gradient, tolerance, out, g_entropy=upstream.entropy)
    if report is not None:
        report.copy_(shares)
    finish()
    return out
