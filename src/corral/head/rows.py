"""Rows of tokens for the head: what goes in, what comes out, and copies to the host that nothing waits for."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from corral.head.logits import LogitSpec
from corral.tensors import Tensors


@dataclass(frozen=True)
class HeadRequest:
    """A request to the head: which numbers to compute of each token's distribution."""

    top_k: int | None = None
    mass: float = 1.0
    entropy: bool = False


@dataclass(frozen=True, eq=False)
class HeadRows(Tensors):
    """The head's results for n tokens."""

    lse: Tensor
    """Log of the normaliser [n]."""
    logp: Tensor
    """Log-probability of the sampled token [n]."""
    ids: Tensor
    kept: Tensor
    """The support and its log-probabilities [n, K]."""
    rest: Tensor
    """Log mass of everything outside the support [n]."""
    entropy: Tensor
    """Entropy [n]; zeros unless asked for."""
    rest_max: Tensor
    """Largest log-probability outside the support [n]."""


@dataclass(frozen=True, eq=False)
class HeadInput(Tensors):
    """A head, and rows of its input."""

    SHARED: ClassVar[tuple[str, ...]] = ("weight", "bias")

    hidden: Tensor
    """Hidden states [n, H]."""
    weight: Tensor
    bias: Tensor | None
    tokens: Tensor
    """Sampled tokens [n]."""
    ids: Tensor | None
    """A support to evaluate on [n, K], −1 at padding."""
    spec: LogitSpec
    request: HeadRequest
    joins: Tensor | None = None
    """Where the policy's own support joins the one given [n] bool; everywhere if None."""


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of hidden states, weight and bias; None where one is not needed."""


class AsyncCopy:
    """An asynchronous device-to-host copy of a small tensor: only reading it waits, and only for work queued before it."""

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
