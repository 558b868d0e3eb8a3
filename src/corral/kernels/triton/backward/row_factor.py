"""Gradients of logits as they were stored, times one factor per row: nothing is rewritten but the single entries.

What the GEMM leaves is E = e^(z − ref), ref being about the sampled token's logit. Off the support

    dz_v = c p_v / p_rest = E_v s          s = c e^(ref − lse − log p_rest)

with one s per row, which is as good before a GEMM as after it:

    dH = diag(s) (E W)          dW = Eᵀ (diag(s) H)          db = Eᵀ s

Single entries, the support's and the sampled token's, are put into E as dz / s. bfloat16 has float32's range, so that a power
of e more or less costs nothing; where it does not reach, the row is left out, and its gradient is recomputed.
Likely tokens often have nearly the same weights, as digits do, and their gradients nearly cancel each other: what rounding took
from the first few entries is added to dH afterwards.
"""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.logits import LogitSpec
from corral.kernels.rows import HeadRows
from corral.kernels.triton.backward.dense import multiply
from corral.kernels.triton.backward.row_gradient import RowGradient

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
