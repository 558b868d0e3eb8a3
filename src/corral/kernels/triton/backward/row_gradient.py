"""From gradients of log-probs, support and rest to gradients of logits: a few single ones per row and one factor for the rest.

    dz_v = g_v − p_v G              on the support        G = g_a + Σ_k g_k + g_rest
    dz_v = (p_v / p_rest) c         off it                c = g_rest − p_rest G

p_v / p_rest is taken from logarithms, so that it stays exact where p_rest is too small for float32.
"""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.logits import LogitSpec
from corral.kernels.rows import HeadRows

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
