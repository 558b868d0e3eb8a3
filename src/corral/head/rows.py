"""Records for the head: its inputs, its results per token, and asynchronous device-to-host copies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from corral.head.logits import LogitSpec
from corral.tensors import SparseDist, Tensors


@dataclass(frozen=True, eq=False)
class HeadInput(Tensors):
    """Inputs of the head: its weights, hidden states with one row per token, and settings for the results to compute."""

    SHARED: ClassVar[tuple[str, ...]] = ("weight", "bias")

    hidden: Tensor
    """Hidden states [n, H], one row per token."""
    weight: Tensor
    bias: Tensor | None
    tokens: Tensor
    """Sampled tokens [n]."""
    ids: Tensor | None
    """Given token ids on which the policy is evaluated [n, K]; −1 at padding."""
    spec: LogitSpec
    top_k: int | None = None
    mass: float = 1.0
    """Probability mass at which the policy's top-k tokens end: the fewest that reach `mass`, at most `top_k`."""
    entropy: bool = False
    joins: Tensor | None = None
    """True for tokens whose given `ids` are extended by the policy's top-k tokens [n]; None means all."""


@dataclass(frozen=True, eq=False)
class HeadRows(Tensors):
    """Results of the head for n tokens, one row per token."""

    lse: Tensor
    """Log of the softmax's normaliser, log Σ eᶻ over all logits z [n]."""
    logp: Tensor
    """Log-probability of the sampled token [n]."""
    ids: Tensor
    kept: Tensor
    """Ids and log-probabilities of the top-k or given tokens, called the support [n, K]."""
    rest: Tensor
    """Log tail mass: the log of the summed probability of all tokens outside the support [n]."""
    entropy: Tensor
    """Entropy of the next-token distribution [n]; zeros unless requested."""
    rest_max: Tensor
    """Largest log-probability among the tokens outside the support [n]."""

    @property
    def dist(self) -> SparseDist:
        """Next-token distribution on the support, as a SparseDist."""
        return SparseDist(self.ids, self.kept, self.rest, self.rest_max)


@dataclass(frozen=True, eq=False, kw_only=True)
class Upstream(Tensors):
    """Gradients of a loss with respect to the head's results for n tokens; None means 0 everywhere."""

    logp: Tensor | None = None
    """Gradient with respect to the log-probability of the sampled token [n]."""
    kept: Tensor | None = None
    rest: Tensor | None = None
    """Gradients with respect to the support's log-probabilities [n, K], and to the log tail mass [n]."""
    entropy: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Gradients(Tensors):
    """Gradients of hidden states dH, weight dW and bias db; None for each that is not needed."""

    SHARED: ClassVar[tuple[str, ...]] = ("weight", "bias")

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def blank_gradients(source: HeadInput, needed: Sequence[bool], dtype: torch.dtype | None = None) -> Gradients:
    """Allocate uninitialised memory for the needed gradients, by default in the dtypes of their inputs."""
    inputs = zip((source.hidden, source.weight, source.bias), needed, strict=True)
    return Gradients(*(torch.empty_like(x, dtype=dtype) if need and x is not None else None for x, need in inputs))


class AsyncCopy:
    """Asynchronous device-to-host copy of a small tensor. Reading it waits only for work that was queued before the copy."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._numbers = numbers
        if numbers.is_cuda:
            # Only a copy into pinned memory is asynchronous. Its own event lets the host wait for it alone, while kernels that
            # were queued later are still running.
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.current_stream(numbers.device).record_event()

    def wait(self) -> Any:
        """Wait for the copy and return nested lists, or a number if the tensor has no axes."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()
