"""Numbers on their way from the device to the host, which has other things to do until it needs them."""

from typing import Any

import torch
from torch import Tensor

from corral.support import refuse_ids


class Later:
    """Copies a small tensor to the host behind the work queued so far; only reading it waits, and for no more than that."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.current_stream(numbers.device).record_event()  # which the copy is on

    def numbers(self) -> list[Any]:
        """All of them."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()

    def number(self) -> int:
        """The only one."""
        if self._event is not None:
            self._event.synchronize()
        return int(self._numbers)


class IdsLater:
    """`check_ids` of sampled tokens and of a support, asked now and answered once the work behind it is queued.

    Until then kernels have to look after themselves: an id may be anything.
    """

    def __init__(self, where: str, tokens: Tensor, ids: Tensor | None, vocabulary: int) -> None:
        self._where, self._vocabulary = where, vocabulary
        given = {"tokens": (tokens, 0), "ids": (ids, -1)}
        self._asked = {name: (x, low) for name, (x, low) in given.items() if x is not None and x.numel()}
        bounds = [bound for x, _ in self._asked.values() for bound in x.aminmax()]
        self._bounds = Later(torch.stack(bounds)) if bounds else None

    def answer(self) -> None:
        """Refuse ids outside the vocabulary."""
        found = [] if self._bounds is None else self._bounds.numbers()
        for i, (name, (_, lowest)) in enumerate(self._asked.items()):
            refuse_ids(self._where, name, *found[2 * i : 2 * i + 2], lowest=lowest, vocabulary=self._vocabulary)
