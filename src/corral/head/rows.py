"""Rows of tokens for the head: their records, blocks of a matrix product, and copies to the host that nothing waits for."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from corral.head.logits import LogitSpec

Rows = TypeVar("Rows", bound=Any)
"""A dataclass of tensors [n …]."""


@dataclass(frozen=True)
class HeadRequest:
    """What to find out about each token's distribution."""

    top_k: int | None = None
    mass: float = 1.0
    entropy: bool = False


@dataclass(frozen=True, eq=False)
class HeadRows:
    """What the head knows of n tokens."""

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
class HeadInput:
    """Rows of a head's input."""

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

    def rows(self, which: slice | Tensor) -> "HeadInput":
        """Some of them."""
        ids, joins = (None if x is None else x[which] for x in (self.ids, self.joins))
        return dataclasses.replace(self, hidden=self.hidden[which], tokens=self.tokens[which], ids=ids, joins=joins)


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of hidden states, weight and bias, those that are needed."""


def join(parts: Sequence[Rows]) -> Rows:
    """Rows one behind the other."""
    if len(parts) == 1:
        return parts[0]
    fields = dataclasses.fields(parts[0])
    return type(parts[0])(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields))


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
