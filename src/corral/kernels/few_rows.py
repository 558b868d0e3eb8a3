"""The exact backward of a handful of dense rows, on the device's own account: the host need not know that there are any.

Their logits are made again and turned into their gradient, one for each of the vocabulary and each row. dH is summed over parts
of the vocabulary, a fixed number of them, which are added up; their part of dW is added where dW is written anyway.
Where there are none, or more than FEW, every program leaves at once.
"""

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.head_rows import HeadRows
from corral.kernels.route import FEW, Routes
from corral.kernels.row_gradient import RowGradient
from corral.kernels.select import HeadInput
from corral.kernels.stream import logits_of_products, spec_arguments

PARTS = 64
"""Of the vocabulary, that dH is summed over."""
COLUMNS = 128
"""Of the vocabulary, that a program looks at at once."""


@dataclass(frozen=True, eq=False)
class FewRows:
    """What the rows `Routes.few` leave, each in its slot."""

    dz: Tensor
    """Gradient of the products h·w [V, FEW], in the precision of the hidden states."""
    d_hidden: Tensor | None
    """dH, summed over each part of the vocabulary [PARTS, FEW, H]."""


def few_rows(
    source: HeadInput,
    rows: HeadRows,
    g_entropy: Tensor | None,
    gradient: RowGradient,
    routes: Routes,
    *,
    want_hidden: bool,
) -> FewRows:
    """The gradient of their logits, and of their hidden states if that is wanted."""
    hidden, weight, bias, spec = source.hidden, source.weight, source.bias, source.spec
    (vocabulary, width), slots = weight.shape, gradient.ids.shape[1]
    depth = 128 // weight.element_size()
    dz = hidden.new_empty(vocabulary, FEW)
    _logit_kernel[(triton.cdiv(vocabulary, COLUMNS),)](
        hidden, weight, bias, routes.few, routes.counts, rows.lse, rows.rest, rows.entropy, g_entropy, gradient.factor,
        gradient.ids, gradient.value, dz, vocabulary, width, slots, *spec_arguments(spec), spec.slope,
        spec.curve, BIAS=bias is not None,
        CAP=spec.softcap is not None, NATS=g_entropy is not None, FEW=FEW, COLUMNS=COLUMNS, DEPTH=depth,
        SLOTS=max(2, triton.next_power_of_2(slots)), num_warps=4, num_stages=4,
    )  # fmt: skip
    if not want_hidden:
        return FewRows(dz, None)
    d_hidden = hidden.new_empty(PARTS, FEW, width, dtype=torch.float32)
    _hidden_kernel[(triton.cdiv(width, depth), PARTS)](
        weight, dz, routes.counts, d_hidden, vocabulary, width, FEW=FEW, PARTS=PARTS, COLUMNS=COLUMNS, DEPTH=depth,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return FewRows(dz, d_hidden)


def few_hidden(few: FewRows, routes: Routes, out: Tensor) -> None:
    """Write their rows of dH [N, H]."""
    width = out.shape[1]
    _sum_kernel[(FEW, triton.cdiv(width, 128))](
        few.d_hidden, routes.few, routes.counts, out, width, FEW=FEW, PARTS=PARTS, BLOCK=128, num_warps=4
    )


@triton.jit
@no_type_check
def _logit_kernel(
    hidden, weight, bias, few, counts, lse, rest, nats, g_nats, factor, ids, value, dz, vocabulary, width, slots, before, cap,
    after, slope, curve, BIAS: tl.constexpr, CAP: tl.constexpr, NATS: tl.constexpr, FEW: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """COLUMNS of the vocabulary: the factor times p / p_rest everywhere, then the single entries in their places."""
    dense = tl.load(counts + 1)
    if (dense == 0) | (dense > FEW):
        return
    place = tl.arange(0, FEW)
    real = place < dense
    row = tl.load(few + place, mask=real, other=0).to(tl.int64)
    begin = tl.program_id(0) * COLUMNS
    column = begin + tl.arange(0, COLUMNS).to(tl.int64)
    inside = column < vocabulary
    depth = tl.arange(0, DEPTH)
    products = tl.zeros((COLUMNS, FEW), tl.float32)
    for k in range(0, width, DEPTH):
        within = (k + depth) < width
        w = tl.load(weight + column[:, None] * width + (k + depth)[None, :], mask=inside[:, None] & within[None, :], other=0.0)
        h = tl.load(hidden + row[None, :] * width + (k + depth)[:, None], mask=real[None, :] & within[:, None], other=0.0)
        products = tl.dot(w, h, products, input_precision="ieee")
    z = logits_of_products(tl.trans(products), column, bias, vocabulary, before, cap, after, BIAS, CAP)
    log_p = z - tl.load(lse + row)[:, None]
    log_rest = tl.load(rest + row)
    log_rest = tl.where(log_rest == -float("inf"), 0.0, log_rest)
    g = tl.exp(log_p - log_rest[:, None]) * tl.load(factor + row)[:, None]
    if NATS:
        surprise = tl.where(log_p > -float("inf"), log_p + tl.load(nats + row)[:, None], 0.0)
        g -= tl.exp(log_p) * tl.load(g_nats + row)[:, None] * surprise
    g = tl.where(real[:, None], g * slope, 0.0)
    if CAP:
        u = z * curve
        g = tl.where(z > -float("inf"), g * (1.0 - u * u), 0.0)
    kind = dz.dtype.element_ty
    tl.store(dz + column[None, :] * FEW + place[:, None], g.to(kind), mask=inside[None, :])
    tl.debug_barrier()
    slot = tl.arange(0, SLOTS)
    at = row[:, None] * slots + slot[None, :]
    id = tl.load(ids + at, mask=real[:, None] & (slot < slots)[None, :], other=-1)
    here = (id >= begin) & (id < begin + COLUMNS)
    single = tl.load(value + at, mask=here, other=0.0)
    tl.store(dz + id.to(tl.int64) * FEW + place[:, None], single.to(kind), mask=here)


@triton.jit
@no_type_check
def _hidden_kernel(
    weight, dz, counts, out, vocabulary, width, FEW: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """DEPTH of the hidden width, summed over one part of the vocabulary."""
    dense = tl.load(counts + 1)
    if (dense == 0) | (dense > FEW):
        return
    part = tl.program_id(1)
    size = tl.cdiv(tl.cdiv(vocabulary, COLUMNS), PARTS) * COLUMNS
    place = tl.arange(0, FEW)
    column = tl.arange(0, COLUMNS)
    depth = tl.program_id(0) * DEPTH + tl.arange(0, DEPTH)
    within = depth < width
    total = tl.zeros((DEPTH, FEW), tl.float32)
    for begin in range(part * size, tl.minimum((part + 1) * size, vocabulary), COLUMNS):
        inside = begin + column < vocabulary
        at = (begin + column).to(tl.int64)
        w = tl.load(weight + at[:, None] * width + depth[None, :], mask=inside[:, None] & within[None, :], other=0.0)
        g = tl.load(dz + at[:, None] * FEW + place[None, :], mask=inside[:, None], other=0.0)
        total = tl.dot(tl.trans(w), g, total, input_precision="ieee")
    here = out + part * FEW * width + place[None, :] * width + depth[:, None]
    tl.store(here, total, mask=(place < dense)[None, :] & within[:, None])


@triton.jit
@no_type_check
def _sum_kernel(parts, few, counts, out, width, FEW: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The parts of one row's dH."""
    place, dense = tl.program_id(0), tl.load(counts + 1)
    if (place >= dense) | (dense > FEW):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = (tl.arange(0, PARTS) * FEW + place) * width
    total = tl.sum(tl.load(parts + at[:, None] + column[None, :], mask=(column < width)[None, :], other=0.0), 0)
    row = tl.load(few + place).to(tl.int64)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=column < width)
