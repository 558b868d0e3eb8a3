"""Gradients from single entries: rows of the weight gathered for dH, hidden states gathered for dW. No atomics.

For dW the entries are sorted by token, and each token's row is summed by one program in the order of the batch, so that the
result is the same every time. Common tokens are in nearly every row's support: of a long list, pieces are summed beforehand,
each by a program of its own.
"""

import functools
from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.triton.backward.route import Routes
from corral.kernels.triton.backward.row_gradient import RowGradient

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
