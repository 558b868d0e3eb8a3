"""What is asked for of rows, less what was expected of some and is there already: compared on the device, nobody waits.

    left = asked − s · expected          s = median over rows of ⟨asked, expected⟩ / ⟨expected, expected⟩

Nothing at all is left where it would be no more than rounding: of every row, as a rule, or of all but a few odd ones.
"""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.foreseen import ROUNDING
from corral.kernels.head_rows import HeadRows
from corral.kernels.row_gradient import Upstream

EPS = torch.finfo(torch.float32).eps
SOME = 1024
"""Rows that the median is taken of, from all over: if they were all odd ones, that would cost time and nothing else."""


@dataclass(frozen=True, eq=False)
class Difference:
    """Of N rows."""

    factor: Tensor
    """s [1]."""
    left: Upstream
    met: Tensor
    """How many rows have a gradient, of which nothing is left [1] int32."""
    size: Tensor
    """Σ |dz| of these rows, 0 elsewhere [N]."""


def difference(
    asked: Upstream,
    expected: Upstream,
    start: int,
    index: Tensor | None,
    left_out: Tensor,
    rows: HeadRows,
    tokens: Tensor,
) -> Difference:
    """`expected` is of M rows: the i-th is row start + i, or the one that `index` [N] has there, unless `left_out` [M]."""
    count, slots = rows.kept.shape
    formed, device = len(left_out), tokens.device
    logp, kept, rest, nats = (
        None if x is None else x.contiguous() for x in (asked.logp, asked.kept, asked.rest, asked.entropy)
    )
    scale, e = asked.scale, expected
    arguments = (
        index, start, rows.ids, rows.ids.stride(0), rows.rest, tokens, logp, kept, rest, nats, scale,
        0 if scale is None else scale.stride(0), asked.weights, e.logp, e.kept, e.rest, e.weights, left_out.view(torch.uint8),
        slots,
    )  # fmt: skip
    flags = {
        "INDEX": index is not None, "LOGP": logp is not None, "KEPT": kept is not None, "REST": rest is not None,
        "NATS": nats is not None, "SCALE": scale is not None, "WEIGHTS": asked.weights is not None,
        "LOSS_OWN": e.logp is not None, "LOSS_KEPT": e.kept is not None, "WEIGHED": e.weights is not None,
        "SLOTS": max(2, triton.next_power_of_2(slots)),
    }  # fmt: skip
    ratio = torch.empty(formed, device=device)
    _ratio_kernel[(formed,)](*arguments, ratio, **flags, num_warps=1)
    factor = torch.empty(1, device=device)
    _median_kernel[(1,)](ratio, factor, formed, 4 * EPS, BLOCK=min(SOME, triton.next_power_of_2(max(2, formed))), num_warps=4)
    own, outer, entropy, size = (torch.empty(count, device=device) for _ in range(4))
    support, met = torch.empty(count, slots, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    _difference_kernel[(count,)](
        *arguments, rows.kept, rows.kept.stride(0), factor, formed, own, support, outer, entropy, size, met,
        ROUNDING * EPS, **flags, num_warps=1,
    )  # fmt: skip
    left = Upstream(logp=own, kept=support, rest=outer, entropy=None if nats is None else entropy)
    return Difference(factor, left, met, size)


@triton.jit
@no_type_check
def _gradients_of(
    logp, kept, rest, times, row, slots, id, token, nothing, LOGP: tl.constexpr, KEPT: tl.constexpr, REST: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """A row's gradients in one of the many ways to say them: the sampled token's all in one place, 0 where nothing depends."""
    slot = tl.arange(0, SLOTS)
    own, outer = 0.0 * times, 0.0 * times
    g = tl.zeros((SLOTS,), tl.float32)
    # What is weighted with 0 is not there, whatever it is.
    if LOGP:
        own = tl.where(times == 0.0, 0.0, tl.load(logp + row) * times)
    if REST:
        outer = tl.where(times == 0.0, 0.0, tl.load(rest + row) * times)
        outer = tl.where(nothing, 0.0, outer)
    if KEPT:
        g = tl.load(kept + row * slots + slot, mask=slot < slots, other=0.0)
        g = tl.where(id < 0, 0.0, tl.where(times == 0.0, 0.0, g * times))
    mine = (id >= 0) & (id == token)
    own += tl.sum(tl.where(mine, g, 0.0), 0)
    return own, tl.where(mine, 0.0, g), outer


@triton.jit
@no_type_check
def _both(
    place, row, ids, stride_ids, log_rest, tokens, g_logp, g_kept, g_rest, scale, stride_scale, weights, own, kept, rest,
    weighed, left_out, slots, LOGP: tl.constexpr, KEPT: tl.constexpr, REST: tl.constexpr, SCALE: tl.constexpr,
    WEIGHTS: tl.constexpr, LOSS_OWN: tl.constexpr, LOSS_KEPT: tl.constexpr, WEIGHED: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """What is asked for of a row, and what was expected of it: of the formed row at `place`, of none below 0."""
    slot = tl.arange(0, SLOTS)
    id = tl.load(ids + row * stride_ids + slot, mask=slot < slots, other=-1)
    token = tl.load(tokens + row)
    nothing = tl.load(log_rest + row) == -float("inf")
    times = tl.full((), 1.0, tl.float32)
    if SCALE:
        times = tl.load(scale + row * stride_scale).to(tl.float32)
    if WEIGHTS:
        times = times * tl.load(weights + row).to(tl.float32)
    a_own, a, a_outer = _gradients_of(
        g_logp, g_kept, g_rest, times, row, slots, id, token, nothing, LOGP, KEPT, REST, SLOTS
    )  # fmt: skip
    at = tl.maximum(place, 0)
    wanted = tl.where((place >= 0) & (tl.load(left_out + at) == 0), 1.0, 0.0)
    if WEIGHED:
        wanted = tl.where(wanted > 0.0, tl.load(weighed + at), 0.0)
    e_own, e, e_outer = _gradients_of(
        own, kept, rest, wanted, at, slots, id, token, nothing, LOSS_OWN, LOSS_KEPT, LOSS_KEPT, SLOTS
    )  # fmt: skip
    return a_own, a, a_outer, e_own, e, e_outer


@triton.jit
@no_type_check
def _ratio_kernel(
    index, start, ids, stride_ids, log_rest, tokens, g_logp, g_kept, g_rest, g_nats, scale, stride_scale, weights, own, kept,
    rest, weighed, left_out, slots, ratio, INDEX: tl.constexpr, LOGP: tl.constexpr, KEPT: tl.constexpr, REST: tl.constexpr,
    NATS: tl.constexpr, SCALE: tl.constexpr, WEIGHTS: tl.constexpr, LOSS_OWN: tl.constexpr, LOSS_KEPT: tl.constexpr,
    WEIGHED: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """⟨asked, expected⟩ / ⟨expected, expected⟩ of a formed row; NaN where nothing was expected."""
    place = tl.program_id(0).to(tl.int64)
    row = place + start
    if INDEX:
        row = tl.load(index + row)
    a_own, a, a_outer, e_own, e, e_outer = _both(
        place, row, ids, stride_ids, log_rest, tokens, g_logp, g_kept, g_rest, scale, stride_scale, weights, own, kept, rest,
        weighed, left_out, slots, LOGP, KEPT, REST, SCALE, WEIGHTS, LOSS_OWN, LOSS_KEPT, WEIGHED, SLOTS,
    )  # fmt: skip
    most = tl.maximum(tl.maximum(tl.abs(e_own), tl.abs(e_outer)), tl.max(tl.abs(e), 0))
    least = tl.where(most > 0.0, most, 1.0)  # of which the squares do not vanish
    e_own, e, e_outer = e_own / least, e / least, e_outer / least
    norm = e_own * e_own + tl.sum(e * e, 0) + e_outer * e_outer
    both = a_own * e_own + tl.sum(a * e, 0) + a_outer * e_outer
    tl.store(ratio + place, tl.where(most > 0.0, both / tl.where(most > 0.0, norm, 1.0) / least, float("nan")))


@triton.jit
@no_type_check
def _median_kernel(ratio, factor, formed, rounding, BLOCK: tl.constexpr):
    """Of the numbers among some of the ratios; 1 where there are none, or where that is all but 1."""
    item = tl.arange(0, BLOCK)
    row = item.to(tl.int64) * tl.maximum(formed, BLOCK) // BLOCK
    x = tl.load(ratio + row, mask=row < formed, other=float("nan"))
    number = x == x
    ordered = tl.sort(tl.where(number, x, float("inf")))
    numbers = tl.sum(number.to(tl.int32), 0)
    middle = tl.sum(tl.where(item == tl.maximum(numbers - 1, 0) // 2, ordered, 0.0), 0)
    middle = tl.where(tl.abs(middle - 1.0) < rounding, 1.0, middle)
    tl.store(factor, tl.where(numbers > 0, middle, 1.0))


@triton.jit
@no_type_check
def _difference_kernel(
    index, start, ids, stride_ids, log_rest, tokens, g_logp, g_kept, g_rest, g_nats, scale, stride_scale, weights, own, kept,
    rest, weighed, left_out, slots, log_p, stride_kept, factor, formed, out_own, out_kept, out_rest, out_nats, out_size,
    out_met, rounding, INDEX: tl.constexpr, LOGP: tl.constexpr, KEPT: tl.constexpr, REST: tl.constexpr, NATS: tl.constexpr,
    SCALE: tl.constexpr, WEIGHTS: tl.constexpr, LOSS_OWN: tl.constexpr, LOSS_KEPT: tl.constexpr, WEIGHED: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Asked less factor · expected, 0 where that is rounding; of rows that are not formed all that is asked."""
    packed = tl.program_id(0).to(tl.int64)
    row = packed
    if INDEX:
        row = tl.load(index + packed)
    place = packed - start
    place = tl.where(place < formed, place, -1)
    a_own, a, a_outer, e_own, e, e_outer = _both(
        place, row, ids, stride_ids, log_rest, tokens, g_logp, g_kept, g_rest, scale, stride_scale, weights, own, kept, rest,
        weighed, left_out, slots, LOGP, KEPT, REST, SCALE, WEIGHTS, LOSS_OWN, LOSS_KEPT, WEIGHED, SLOTS,
    )  # fmt: skip
    times = tl.load(factor)
    d_own, d, d_outer = a_own - times * e_own, a - times * e, a_outer - times * e_outer
    size = tl.abs(a_own) + tl.sum(tl.abs(a), 0) + tl.abs(a_outer)
    apart = tl.abs(d_own) + tl.sum(tl.abs(d), 0) + tl.abs(d_outer)
    nats = 0.0 * times
    if NATS:
        nats = tl.load(g_nats + row)
        if SCALE:
            nats = nats * tl.load(scale + row * stride_scale).to(tl.float32)
        if WEIGHTS:
            nats = nats * tl.load(weights + row).to(tl.float32)
        tl.store(out_nats + row, nats)
    met = (place >= 0) & (apart <= rounding * size) & (nats == 0.0)
    slot = tl.arange(0, SLOTS)
    tl.store(out_own + row, tl.where(met, 0.0, d_own))
    tl.store(out_kept + row * slots + slot, tl.where(met, 0.0, d), mask=slot < slots)
    tl.store(out_rest + row, tl.where(met, 0.0, d_outer))
    tl.atomic_add(out_met, (met & (size > 0.0)).to(tl.int32))
    # Σ |dz|, as `row_gradient` has it.
    id = tl.load(ids + row * stride_ids + slot, mask=slot < slots, other=-1)
    p = tl.exp(tl.load(log_p + row * stride_kept + slot, mask=id >= 0, other=-float("inf")))
    total = a_own + tl.sum(a, 0) + a_outer
    mine = (id >= 0) & (id == tl.load(tokens + row))
    elsewhere = tl.where(tl.max(mine.to(tl.int32), 0) > 0, 0.0, tl.abs(a_own))
    on_support = tl.sum(tl.abs(a + tl.where(mine, a_own, 0.0) - p * total), 0)
    off_support = tl.abs(a_outer - tl.exp(tl.load(log_rest + row)) * total)
    tl.store(out_size + row, tl.where(met, on_support + off_support + elsewhere, 0.0))
