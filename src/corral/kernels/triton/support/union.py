"""The union of two supports, row by row: all that is given, then those of the policy's own ranking that are not among them."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor


def join_supports(given: Tensor, ranked: Tensor, most: int, joins: Tensor | None = None) -> Tensor:
    """Ids [N, K + most]: the members of `given` [N, K], then the others of `ranked` [N, M], at most so many, then −1.

    Both hold −1 for no token, anywhere. Where a row does not join [N], it gets no others. `support.choose_support` is the
    reference.
    """
    (count, slots), joined = given.shape, given.shape[1] + most
    out = torch.empty(count, joined, dtype=torch.int64, device=given.device)
    _join_kernel[(count,)](
        given, ranked, None if joins is None else joins.contiguous().view(torch.uint8), out, slots, ranked.shape[1], joined,
        JOINS=joins is not None, GIVEN=_power(slots), RANKED=_power(ranked.shape[1]), SLOTS=_power(joined), SOME=16,
        num_warps=1,
    )  # fmt: skip
    return out


def _power(slots: int) -> int:
    return max(2, triton.next_power_of_2(slots))


@triton.jit
@no_type_check
def _join_kernel(
    ids, ranked, joins, out_joined, slots, slots_in, joined, JOINS: tl.constexpr, GIVEN: tl.constexpr, RANKED: tl.constexpr,
    SLOTS: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, GIVEN)
    first = tl.load(ids + row * slots + place, mask=place < slots, other=-1)
    rank = tl.arange(0, RANKED)
    id = tl.load(ranked + row * slots_in + rank, mask=rank < slots_in, other=-1)
    if JOINS:
        id = tl.where(tl.load(joins + row) != 0, id, -1)
    known = tl.zeros((RANKED,), tl.int32)
    for begin in range(0, slots, SOME):
        some = begin + tl.arange(0, SOME)
        other = tl.load(ids + row * slots + some, mask=some < slots, other=-1)
        known = tl.maximum(known, tl.max((id[:, None] == other[None, :]).to(tl.int32), 1))
    member, new = first >= 0, (id >= 0) & (known == 0)
    members = tl.sum(member.to(tl.int32), 0)
    here = out_joined + row * joined
    tl.store(here + tl.cumsum(member.to(tl.int32), 0) - 1, first, mask=member)
    tl.store(here + members + tl.cumsum(new.to(tl.int32), 0) - 1, id, mask=new)
    slot = tl.arange(0, SLOTS)
    padding = (slot >= members + tl.sum(new.to(tl.int32), 0)) & (slot < joined)
    tl.store(here + slot, tl.full((SLOTS,), -1, tl.int64), mask=padding)
