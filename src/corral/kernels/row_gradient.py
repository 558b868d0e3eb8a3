"""From gradients of log-probs, support and rest to gradients of logits: a few single ones per row and one factor for the rest.

    dz_v = g_v − p_v G              on the support        G = g_a + Σ_k g_k + g_rest
    dz_v = (p_v / p_rest) c         off it                c = g_rest − p_rest G

What a sparse backward leaves out is the second line, whose size Σ |dz_v| = |c| is known, and single entries so small that all
of them together are an eighth of what may be left out. A row is dense where both are more than a given share of its own
Σ |dz_v|, or of the mean row's if that is larger: the whole batch then loses no more than twice that share. p_v / p_rest is
taken from logarithms, so that it stays exact where p_rest is too small for float32.
"""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.logits import LogitSpec
from corral.kernels.online import HeadRows

DEAD, SPARSE, DENSE = 0, 1, 2


@dataclass(frozen=True, eq=False, kw_only=True)
class Upstream:
    """Gradients of the loss with respect to what the head said of N rows; None is 0 everywhere."""

    logp: Tensor | None = None
    kept: Tensor | None = None
    rest: Tensor | None = None
    entropy: Tensor | None = None
    scale: Tensor | None = None
    """Factor of each row's gradients [N], of any stride."""
    weights: Tensor | None = None
    """Another one."""


@dataclass(frozen=True, eq=False)
class RowGradient:
    """Gradients of the logits of N rows, with S = K + 1 single entries each."""

    ids: Tensor
    """Token of each entry [N, S] int32; −1 is none."""
    value: Tensor
    """Gradient of the product h·w of that token [N, S], the soft cap's slope included."""
    factor: Tensor
    """c: the sum of all other tokens' gradients; each has the share of it that it has of the rest mass [N]."""
    route: Tensor
    """DEAD, SPARSE or DENSE [N]."""
    key: Tensor
    """`ids` of the entries that a sparse backward adds up, V for none [N, S] int32."""
    counts: Tensor
    """Rows with a gradient, and dense ones [2] int32."""
    most: Tensor
    """The largest share dropped by a sparse row, as the bits of a float32 [1] int32."""

    def report(self) -> Tensor:
        """Share of dense rows, and the largest share dropped [2]."""
        live, dense = self.counts.float().unbind()
        return torch.stack([dense / live.clamp(min=1), self.most.view(torch.float32)[0]])


def row_gradient(
    rows: HeadRows, tokens: Tensor, upstream: Upstream, spec: LogitSpec, vocabulary: int, tolerance: float
) -> RowGradient:
    """Single entries, factor and route of each row; dense are those that would drop `tolerance` or more."""
    count, kept = rows.kept.shape
    slots, device = kept + 1, tokens.device
    ids, key = (torch.empty(count, slots, dtype=torch.int32, device=device) for _ in range(2))
    value = torch.empty(count, slots, device=device)
    factor, off, size = (torch.empty(count, device=device) for _ in range(3))
    route = torch.empty(count, dtype=torch.int32, device=device)
    numbers = torch.zeros(3, dtype=torch.int32, device=device)
    width = max(2, triton.next_power_of_2(slots))
    g, scale = upstream, upstream.scale
    kept_g, rest_g, own_g, nats_g = (None if x is None else x.contiguous() for x in (g.kept, g.rest, g.logp, g.entropy))
    _row_kernel[(count,)](
        rows.ids, rows.kept, rows.rest, rows.logp, rows.lse, rows.entropy, tokens, kept_g, rest_g, own_g, nats_g,
        scale, g.weights, ids, value, factor, off, size, route, kept, slots, rows.ids.stride(0), rows.kept.stride(0),
        rows.logp.stride(0), 0 if scale is None else scale.stride(0), spec.scale / spec.temperature,
        spec.temperature / spec.softcap if spec.softcap is not None else 0.0, KEPT=kept_g is not None,
        REST=rest_g is not None, LOGP=own_g is not None, NATS=nats_g is not None, SCALE=scale is not None,
        WEIGHTS=g.weights is not None, CAP=spec.softcap is not None, SLOTS=width, num_warps=1,
    )  # fmt: skip
    _route_kernel[(count,)](
        ids, value, off, size, size.mean(), route, key, numbers, numbers[2:], slots, vocabulary, tolerance,
        abs(spec.scale / spec.temperature),
        # Where a soft cap flattens them, entries are smaller than what the sums were made of: none is left out.
        0.0 if spec.softcap is not None else tolerance / (8 * slots), SLOTS=width, num_warps=1,
    )  # fmt: skip
    return RowGradient(ids, value, factor, route, key, numbers[:2], numbers[2:])


@triton.jit
@no_type_check
def _row_kernel(
    ids, kept, rest, logp, lse, nats, tokens, g_kept, g_rest, g_logp, g_nats, scale, weights, out_ids, out_value, out_factor,
    out_off, out_size, out_route, slots_in, slots, stride_ids, stride_kept, stride_logp, stride_scale, slope, curve,
    KEPT: tl.constexpr, REST: tl.constexpr, LOGP: tl.constexpr, NATS: tl.constexpr, SCALE: tl.constexpr,
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
    if SCALE:
        times = tl.load(scale + row * stride_scale).to(tl.float32)
    if WEIGHTS:
        times = times * tl.load(weights + row).to(tl.float32)
    own_g, outer_g, entropy_g = 0.0 * times, 0.0 * times, 0.0 * times
    g = tl.zeros((SLOTS,), tl.float32)
    # What is weighted with 0 is not there, whatever it is.
    if LOGP:
        own_g = tl.where(times == 0.0, 0.0, tl.load(g_logp + row) * times)
    if REST:
        outer_g = tl.where(times == 0.0, 0.0, tl.load(g_rest + row) * times)
    if NATS:
        entropy_g = tl.where(times == 0.0, 0.0, tl.load(g_nats + row) * times)
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
    surprise = tl.where(log_p > -float("inf"), log_p + tl.load(nats + row), 0.0)
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
    tl.store(out_route + row, tl.where(alive, tl.where(must, 2, 1), 0))


@triton.jit
@no_type_check
def _route_kernel(
    ids, value, off, size, mean, route, key, counts, most, slots, vocabulary, tolerance, slope, small,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Settle the route, and which entries a sparse backward adds up."""
    row = tl.program_id(0).to(tl.int64)
    whole = tl.maximum(tl.load(size + row), tl.load(mean))
    slot = tl.arange(0, SLOTS)
    at = row * slots + slot
    id = tl.load(ids + at, mask=slot < slots, other=-1)
    g = tl.abs(tl.load(value + at, mask=slot < slots, other=0.0))
    counts_for = (id >= 0) & (g > small * slope * whole)
    left_out = tl.load(off + row) + tl.sum(tl.where((id >= 0) & ~counts_for, g, 0.0), 0) / slope
    share = tl.where(left_out > 0.0, left_out / whole, 0.0)
    way = tl.load(route + row)
    way = tl.where((way == 1) & ~(share < tolerance), 2, way)
    tl.store(route + row, way)
    tl.atomic_add(counts, (way > 0).to(tl.int32))
    tl.atomic_add(counts + 1, (way == 2).to(tl.int32))
    # A share is not negative, and then floats sort as their bits do.
    tl.atomic_max(most, share.to(tl.int32, bitcast=True), mask=(way == 1) & (share > 0.0))
    tl.store(key + at, tl.where((way == 1) & counts_for, id, vocabulary), mask=slot < slots)
