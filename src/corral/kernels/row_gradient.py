"""From gradients of log-probs, support and rest to gradients of logits: a few single ones per row and one factor for the rest.

    dz_v = g_v − p_v G              on the support        G = g_a + Σ_k g_k + g_rest
    dz_v = (p_v / p_rest) c         off it                c = g_rest − p_rest G

What a sparse backward leaves out is the second line, and its size Σ |dz_v| = |c| is known. A row is dense where that is more
than a given share of its own Σ |dz_v|, or of the mean row's if that is larger: the whole batch then loses no more than twice
that share. p_v / p_rest is taken from logarithms, so that it stays exact where p_rest is too small for float32.
"""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.head_backward import HeadGradients
from corral.kernels.logits import LogitSpec
from corral.kernels.online import HeadRows

DEAD, SPARSE, DENSE = 0, 1, 2


@dataclass(frozen=True, eq=False)
class RowGradient:
    """Gradients of the logits of N rows, with S = K + 1 single entries each."""

    ids: Tensor
    """Token of each entry [N, S] int32; −1 is none."""
    value: Tensor
    """Gradient of the product h·w of that token [N, S], the soft cap's slope included."""
    factor: Tensor
    """c: the sum of all other tokens' gradients; each has the share of it that it has of the rest mass [N]."""
    dropped: Tensor
    """Σ |dz| off the support, as a share of the row's whole or the mean row's, at most [N]."""
    route: Tensor
    """DEAD, SPARSE or DENSE [N]."""
    key: Tensor
    """`ids` of the entries that a sparse backward adds up, V for none [N, S] int32."""
    counts: Tensor
    """Rows with a gradient, and dense ones [2]."""


def row_gradient(
    rows: HeadRows, tokens: Tensor, grads: HeadGradients, spec: LogitSpec, vocabulary: int, tolerance: float
) -> RowGradient:
    """Single entries, factor and route of each row; dense are those that would drop more than `tolerance`."""
    count, kept = rows.kept.shape
    slots, device = kept + 1, tokens.device
    ids, key = (torch.empty(count, slots, dtype=torch.int32, device=device) for _ in range(2))
    value = torch.empty(count, slots, device=device)
    factor, off, size, dropped = (torch.empty(count, device=device) for _ in range(4))
    route = torch.empty(count, dtype=torch.int32, device=device)
    counts = torch.zeros(2, dtype=torch.int32, device=device)
    width = max(2, triton.next_power_of_2(slots))
    _row_kernel[(count,)](
        rows.ids.contiguous(), rows.kept.contiguous(), rows.rest, rows.logp.contiguous(), rows.lse, rows.entropy, tokens,
        grads.kept.contiguous(), grads.rest.contiguous(), grads.logp.contiguous(), grads.entropy.contiguous(),
        ids, value, factor, off, size, route, kept, slots, spec.scale / spec.temperature,
        spec.temperature / spec.softcap if spec.softcap is not None else 0.0, CAP=spec.softcap is not None, SLOTS=width,
        num_warps=1,
    )  # fmt: skip
    _route_kernel[(count,)](
        ids, value, off, size, size.mean(), route, dropped, key, counts, slots, vocabulary, tolerance, SLOTS=width, num_warps=1
    )
    return RowGradient(ids, value, factor, dropped, route, key, counts)


@triton.jit
@no_type_check
def _row_kernel(
    ids, kept, rest, logp, lse, nats, tokens, g_kept, g_rest, g_logp, g_nats, out_ids, out_value, out_factor, out_off, out_size,
    out_route, slots_in, slots, slope, curve, CAP: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    inside = slot < slots_in
    id = tl.load(ids + row * slots_in + slot, mask=inside, other=-1).to(tl.int32)
    member = id >= 0
    token = tl.load(tokens + row).to(tl.int32)
    own_g, outer_g, entropy_g = tl.load(g_logp + row), tl.load(g_rest + row), tl.load(g_nats + row)
    g = tl.where(member, tl.load(g_kept + row * slots_in + slot, mask=inside, other=0.0), 0.0)
    log_rest = tl.load(rest + row)
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
    log_p = tl.where(member, tl.load(kept + row * slots_in + slot, mask=inside, other=-float("inf")), -float("inf"))
    log_p = tl.where(extra, tl.load(logp + row), log_p)
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
    ids, value, off, size, mean, route, dropped, key, counts, slots, vocabulary, tolerance, SLOTS: tl.constexpr
):  # fmt: skip
    """Settle the route, and which entries a sparse backward adds up."""
    row = tl.program_id(0).to(tl.int64)
    left_out = tl.load(off + row)
    whole = tl.maximum(tl.load(size + row), tl.load(mean))
    share = tl.where(left_out > 0.0, left_out / whole, 0.0)
    way = tl.load(route + row)
    way = tl.where((way == 1) & ~(share <= tolerance), 2, way)
    tl.store(route + row, way)
    tl.store(dropped + row, share)
    tl.atomic_add(counts, (way > 0).to(tl.int32))
    tl.atomic_add(counts + 1, (way == 2).to(tl.int32))
    slot = tl.arange(0, SLOTS)
    at = row * slots + slot
    id = tl.load(ids + at, mask=slot < slots, other=-1)
    g = tl.load(value + at, mask=slot < slots, other=0.0)
    tl.store(key + at, tl.where((way == 1) & (id >= 0) & (g != 0.0), id, vocabulary), mask=slot < slots)
