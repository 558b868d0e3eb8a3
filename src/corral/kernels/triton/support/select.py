"""Exact supports from tile statistics: only the few tiles that hold more than their largest logit are recomputed.

Nothing here waits for the device, except for rows of a policy's own support where more tokens come into question than fit.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.async_copy import AsyncCopy
from corral.kernels.rows import HeadInput, HeadRows, join
from corral.kernels.torch.online import head_forward
from corral.kernels.torch.sharded import Shard
from corral.kernels.triton.gemm_stats import TileStatistics, gemm_stats, tile_of
from corral.kernels.triton.support.finalize import best_of, finalize_given, finalize_own
from corral.kernels.triton.support.recompute import recompute_tiles
from corral.kernels.triton.support.recompute_plan import plan_given, plan_own
from corral.kernels.triton.support.union import join_supports

ROWS_AT_ONCE = 8192
"""Tokens whose tile statistics are held at once."""
ROOM = 4
"""Times k: tokens that may be members of a row's own support, held at once. Common tokens are neighbours, so it takes some."""
MORE_ROOM = 32
"""For rows where that was too little; and where this is, as in a row of equal logits, the torch path looks at every logit."""
UNION_ROOM = 8
"""The room where the host does not wait for the overflow flag; all is done again where it was set."""
MOST_LISTED = 8192
"""Tokens that are sorted at once in 64 KiB of shared memory, which every GPU has."""


def fits_at_once(count: int) -> bool:
    """Whether so many rows are one part, so that their statistics can be made beforehand."""
    return count <= ROWS_AT_ONCE


def stream_head(
    whole: HeadInput,
    stats: TileStatistics | None = None,
    queued: Callable[[], None] = lambda: None,
    overflows: list[AsyncCopy] | None = None,
) -> HeadRows:
    """What the torch head knows of n tokens, from one GEMM and the recomputation of a few of its tiles.

    Without `ids` and `top_k` the support is the sampled token, with both their union. `stats` are those of all n, where they
    are there already. `queued` is called when all is queued that there is to do, before the host waits for any of it but the
    ranking of a union; and for that neither, where there is a list of `overflows`: one that is not 0 says that rows are wrong.
    """
    assert stats is None or fits_at_once(len(whole.hidden))
    top_k, given = whole.request.top_k, whole.ids
    if top_k is not None and given is None:
        return _own_rows(whole, ROOM, stats, queued)
    parts = [support_rows(part, stats or _statistics(part), overflows) for part in _parts(whole)]
    queued()
    return join(parts) if parts else _blank(whole, 1 if given is None else given.shape[1] + (top_k or 0))


def _statistics(part: HeadInput) -> TileStatistics:
    return gemm_stats(part.hidden, part.weight, part.bias, part.spec, entropy=part.request.entropy)


def support_rows(part: HeadInput, stats: TileStatistics, overflows: list[AsyncCopy] | None = None) -> HeadRows:
    """Rows on the support `ids`, its union with the policy's own, or the sampled token alone. The statistics are used up."""
    return _given_rows(part, stats) if part.request.top_k is None else _union_rows(part, stats, overflows)


def _given_rows(part: HeadInput, stats: TileStatistics) -> HeadRows:
    """Rows on the support `ids`, or on the sampled token alone."""
    given = part.ids is not None
    marks = _marks(part)
    out = _blank(part, marks.shape[1])
    plan = plan_given(stats, marks, tile_of(part.hidden).columns, given=given, out=out)
    recompute_tiles(part.hidden, part.weight, part.bias, part.spec, stats, plan, marks, out, given=given, own=False)
    finalize_given(stats, plan, marks, given, out)
    if part.ids is None:
        return dataclasses.replace(out, logp=out.kept[:, 0], ids=part.tokens[:, None])
    return dataclasses.replace(out, logp=out.kept[:, 0], ids=part.ids, kept=out.kept[:, 1:])


def _union_rows(part: HeadInput, stats: TileStatistics, overflows: list[AsyncCopy] | None) -> HeadRows:
    """Rows on the union of `ids` and the policy's own support: that is found first, then both are given."""
    top_k, given = part.request.top_k, part.ids
    assert top_k is not None
    assert given is not None
    # Beside a given support, even an empty one, the sampled token is a token like any other.
    own = dataclasses.replace(part, ids=given.new_full((len(given), 1), -1))
    ranked = _own_rows(own, ROOM if overflows is None else UNION_ROOM, stats.copy(), overflows=overflows).ids
    ids = join_supports(given.contiguous(), ranked, top_k, part.joins)
    request = dataclasses.replace(part.request, top_k=None)
    return _given_rows(dataclasses.replace(part, ids=ids, request=request), stats)


def _own_rows(
    whole: HeadInput,
    room: int,
    early: TileStatistics | None = None,
    queued: Callable[[], None] = lambda: None,
    overflows: list[AsyncCopy] | None = None,
) -> HeadRows:
    """Rows on the policy's own support: with the sampled token in slot 0 or, where a support is given, with no token there."""
    top_k = whole.request.top_k
    assert top_k is not None
    parts, filled, copies = [], [], []
    for part in _parts(whole):
        stats = early or _statistics(part)
        marks = (part.tokens[:, None] if part.ids is None else part.ids[:, :1]).int()
        out = _blank(part, top_k + 1)
        width = tile_of(part.hidden).columns
        plan = plan_own(stats, marks, width, top_k=top_k, room=room * best_of(top_k), out=out)
        recompute_tiles(part.hidden, part.weight, part.bias, part.spec, stats, plan, marks, out, given=False, own=True)
        copies.append(AsyncCopy(plan.overflow))
        finalize_own(stats, plan, marks, whole.request, out)
        parts.append(out)
        filled.append(plan.filled)
    queued()
    if not parts:
        return _blank(whole, top_k + 1)
    rows = join(parts)
    if overflows is not None:
        overflows += copies
    elif any(overflow.wait()[0] for overflow in copies):
        _redo(whole, rows, (torch.cat(filled) > room * best_of(top_k)).nonzero().squeeze(-1), room)
    return rows


def _marks(part: HeadInput) -> Tensor:
    """The sampled token and the given support, if there is one [N, 1 + K] int32; −1 for what is no token of the vocabulary."""
    slots = 1 if part.ids is None else 1 + part.ids.shape[1]
    ids = part.tokens if part.ids is None else part.ids.contiguous()
    marks = torch.empty(len(part.tokens), slots, dtype=torch.int32, device=part.tokens.device)
    block = 1024
    _marks_kernel[(triton.cdiv(marks.numel(), block),)](
        part.tokens, ids, marks, marks.numel(), slots, len(part.weight), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return marks


def _redo(whole: HeadInput, rows: HeadRows, which: Tensor, room: int) -> None:
    """Some rows once more, with more room, or by the torch path."""
    part, more = whole.rows(which), min(MORE_ROOM, MOST_LISTED // best_of(whole.request.top_k or 0))
    again = _own_rows(part, more) if room < more else head_forward(part, Shard.of(part.weight, None))
    for field in dataclasses.fields(HeadRows):
        getattr(rows, field.name)[which] = getattr(again, field.name)


def _blank(part: HeadInput, slots: int) -> HeadRows:
    """Rows to be filled in; without entropy zeros stand for it."""
    count, device = len(part.tokens), part.tokens.device
    lse, logp, rest, rest_max = (torch.empty(count, device=device) for _ in range(4))
    entropy = (torch.empty if part.request.entropy else torch.zeros)(count, device=device)
    ids = torch.empty(count, slots if part.request.top_k is not None else 0, dtype=torch.int64, device=device)
    return HeadRows(lse, logp, ids, torch.empty(count, slots, device=device), rest, entropy, rest_max)


def _parts(whole: HeadInput) -> Iterator[HeadInput]:
    """Even pieces of at most ROWS_AT_ONCE rows."""
    total = len(whole.hidden)
    if fits_at_once(total):
        yield from [whole] if total else []
        return
    size = triton.cdiv(total, triton.cdiv(total, ROWS_AT_ONCE))
    yield from (whole.rows(slice(a, a + size)) for a in range(0, total, size))


@triton.jit
@no_type_check
def _marks_kernel(
    tokens, ids, marks, total, slots, vocabulary, BLOCK: tl.constexpr
):  # fmt: skip
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # of at most ROWS_AT_ONCE rows: 32 bits will do
    row, slot = item // slots, item % slots
    mark = tl.load(tokens + row, mask=(item < total) & (slot == 0), other=0)
    id = tl.load(ids + row * (slots - 1) + slot - 1, mask=(item < total) & (slot > 0), other=0)
    mark = tl.where(slot == 0, mark, id)
    tl.store(marks + item, tl.where((mark >= 0) & (mark < vocabulary), mark, -1).to(tl.int32), mask=item < total)
