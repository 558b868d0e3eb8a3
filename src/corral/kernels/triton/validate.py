"""Validation of token ids on the device, beside the kernels that read them."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from corral.kernels.async_copy import AsyncCopy
from corral.support import refuse_ids, refuse_repeats


class IdCheck:
    """Whether sampled tokens and a support are valid: checked on the device now, raised once the work behind it is queued.

    Until then kernels have to look after themselves: an id may be anything.
    """

    def __init__(self, where: str, tokens: Tensor, ids: Tensor | None, vocabulary: int) -> None:
        self._where, self._vocabulary = where, vocabulary
        given = {"tokens": (tokens, 0), "ids": (ids, -1)}
        self._asked = {name: (x, low) for name, (x, low) in given.items() if x is not None and x.numel()}
        found = [bound for x, _ in self._asked.values() for bound in x.aminmax()]
        if "ids" in self._asked:
            found.append(_repeats(self._asked["ids"][0]))
        self._found = AsyncCopy(torch.stack(found)) if found else None

    def wait(self) -> None:
        """Refuse ids outside the vocabulary, and a support with a token twice."""
        found = [] if self._found is None else self._found.wait()
        for i, (name, (_, lowest)) in enumerate(self._asked.items()):
            refuse_ids(self._where, name, *found[2 * i : 2 * i + 2], lowest=lowest, vocabulary=self._vocabulary)
        if "ids" in self._asked:
            refuse_repeats(self._where, "ids", bool(found[-1]))


def _repeats(ids: Tensor) -> Tensor:
    """1 where any row [N, K] has a token twice, else 0."""
    (count, slots), found = ids.shape, torch.zeros((), dtype=ids.dtype, device=ids.device)
    _repeat_kernel[(count,)](ids, found, slots, SLOTS=max(2, triton.next_power_of_2(slots)), SOME=16, num_warps=4)
    return found


@triton.jit
@no_type_check
def _repeat_kernel(ids, found, slots, SLOTS: tl.constexpr, SOME: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    id = tl.load(ids + row * slots + slot, mask=slot < slots, other=-1)
    for begin in range(0, slots, SOME):
        before = begin + tl.arange(0, SOME)
        other = tl.load(ids + row * slots + before, mask=before < slots, other=-1)
        same = (id[:, None] == other[None, :]) & (slot[:, None] > before[None, :]) & (id >= 0)[:, None]
        tl.store(found, 1, mask=tl.max(tl.max(same.to(tl.int32), 1), 0) > 0)
