"""Asynchronous device-to-host copies of a few numbers."""

from typing import Any

import torch
from torch import Tensor


class AsyncCopy:
    """A small tensor on its way to the host behind the work queued so far; only reading it waits, for no more than that."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.current_stream(numbers.device).record_event()  # which the copy is on

    def wait(self) -> Any:
        """The numbers, as nested lists; a tensor without axes as a number."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()
