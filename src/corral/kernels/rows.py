"""What a head is given and what it says of it, as packed rows: the nouns that both implementations share."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from corral.kernels.logits import LogitSpec

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
