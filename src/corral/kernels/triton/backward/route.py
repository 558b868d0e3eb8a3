"""Routing: which rows' gradient is sparse, which is dense, and which have none.

What a sparse backward leaves out is the gradient off the support, whose size Σ |dz_v| = |c| is known, and single entries so
small that all of them together are an eighth of what may be left out. A row is dense where both are more than a given share of
its own Σ |dz_v|, or of the mean row's if that is larger: the whole batch then loses no more than twice that share.
"""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.logits import LogitSpec
from corral.kernels.triton.backward.row_gradient import RowGradient

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
