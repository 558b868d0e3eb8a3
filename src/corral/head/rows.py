"""Records of the LM head's inputs, results and gradients, and asynchronous device-to-host copies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from corral.head.logits import LogitSpec
from corral.tensors import SparseDist, Tensors


@dataclass(frozen=True, eq=False)
class HeadInput(Tensors):
    """Inputs of the LM head: weight, hidden states with one row per token, sampled tokens, and which results to compute."""

    SHARED: ClassVar[tuple[str, ...]] = ("weight", "bias")

    hidden: Tensor
    """Last hidden states of the model [n, H], one row per token."""
    weight: Tensor
    bias: Tensor | None
    tokens: Tensor
    """Ids of the sampled tokens [n]."""
    ids: Tensor | None
    """Token ids from the caller, at which the policy is evaluated [n, K]; −1 at padding."""
    spec: LogitSpec
    top_k: int | None = None
    mass: float = 1.0
    """Probability mass that the policy's top-k tokens should reach: the fewest tokens that do, but at most `top_k`."""
    entropy: bool = False
    joins: Tensor | None = None
    """True at positions whose given `ids` are joined with the policy's own top-k tokens [n]; None means all positions."""


@dataclass(frozen=True, eq=False)
class HeadRows(Tensors):
    """Results of the LM head for n tokens, one row per token."""

    lse: Tensor
    """Log of the softmax's normaliser at each position [n]: log Σ eᶻ over all logits z."""
    logp: Tensor
    """Log-probability of the sampled token at each position [n]."""
    ids: Tensor
    kept: Tensor
    """Log-probabilities of the support, which is the top-k tokens or the given tokens [n, K]; `ids` are their token ids."""
    rest: Tensor
    """Log tail mass at each position [n]: the log of the total probability of all tokens outside the support."""
    entropy: Tensor
    """Entropy of the next-token distribution at each position [n]; zeros unless requested."""
    rest_max: Tensor
    """Largest log-probability among the tokens outside the support (top-k or given tokens), at each position [n]."""

    @property
    def dist(self) -> SparseDist:
        """Next-token distribution as a SparseDist: log-probs of the support, and the tail mass."""
        return SparseDist(self.ids, self.kept, self.rest, self.rest_max)


@dataclass(frozen=True, eq=False, kw_only=True)
class Upstream(Tensors):
    """Gradients of a loss with respect to the LM head's results for n tokens; None means 0 everywhere."""

    logp: Tensor | None = None
    """Gradient with respect to the log-probability of the sampled token at each position [n]."""
    kept: Tensor | None = None
    rest: Tensor | None = None
    """Gradient with respect to the log tail mass [n]; `kept` is the gradient with respect to the support's log-probs [n, K]."""
    entropy: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Gradients(Tensors):
    """Gradients of a loss with respect to hidden states, head weight and head bias; None where a gradient is not needed."""

    SHARED: ClassVar[tuple[str, ...]] = ("weight", "bias")

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def blank_gradients(source: HeadInput, needed: Sequence[bool], dtype: torch.dtype | None = None) -> Gradients:
    """Allocate uninitialised tensors for the needed gradients, by default in the dtypes of hidden states, weight and bias."""
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
        """Wait for the copy, and return its values as nested lists, or as a number if the tensor has no axes."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()
