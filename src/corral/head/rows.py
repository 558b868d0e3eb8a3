"""Rows of tokens for the head: its inputs, its results, and asynchronous copies of results to the host."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from corral.head.logits import LogitSpec
from corral.tensors import Tensors


@dataclass(frozen=True)
class HeadRequest:
    """Request to the head: the numbers to compute for each token's distribution."""

    top_k: int | None = None
    mass: float = 1.0
    entropy: bool = False


@dataclass(frozen=True, eq=False)
class HeadRows(Tensors):
    """Results of the head for n tokens."""

    lse: Tensor
    """Log of the softmax's normaliser [n]."""
    logp: Tensor
    """Log-probability of the sampled token [n]."""
    ids: Tensor
    kept: Tensor
    """The support and its log-probabilities [n, K]."""
    rest: Tensor
    """Log tail mass, over all tokens outside the support [n]."""
    entropy: Tensor
    """Entropy [n]; zeros unless requested."""
    rest_max: Tensor
    """Largest log-probability outside the support [n]."""


@dataclass(frozen=True, eq=False)
class HeadInput(Tensors):
    """Head weights and rows of hidden states."""

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
    """True where the policy's own support joins the given support [n]; None means everywhere."""


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of hidden states, weight and bias; None if one is not needed."""


class AsyncCopy:
    """An asynchronous device-to-host copy of a small tensor: reading waits only for work queued before the copy."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.current_stream(numbers.device).record_event()  # which the copy is on

    def wait(self) -> Any:
        """Wait for the copy and return nested lists, or a number if the tensor has no axes."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()
