"""Numbers on their way from the device to the host, which has other things to do until it needs them."""

from typing import Any

import torch
from torch import Tensor


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
