"""Numbers that summarise the per-token KLs of a batch: its mean, its tail, its worst token."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

Statistic = Callable[[Float[Tensor, " N"]], Tensor]
"""Per-token KLs [N] → a scalar that grows with each of them."""


def quantile(kl: Float[Tensor, " N"], level: float) -> Tensor:
    """The smallest value that at least a share `level` of the tokens do not exceed (nearest rank, no interpolation)."""
    return kl.flatten().kthvalue(max(1, math.ceil(level * kl.numel()))).values


def worst_mean(kl: Float[Tensor, " N"], share: float) -> Tensor:
    """CVaR: the mean of the ⌈share · N⌉ largest values."""
    return kl.flatten().topk(max(1, math.ceil(share * kl.numel()))).values.mean()


STATISTICS: dict[str, Statistic] = {
    "mean": lambda kl: kl.mean(),
    "p999": lambda kl: quantile(kl, 0.999),
    "cvar": lambda kl: worst_mean(kl, 0.01),
    "max": lambda kl: kl.max(),
}
"""What a bound can be put on, by name; `cvar` is the mean of the worst 1 %."""


@dataclass(frozen=True, kw_only=True)
class TokenKL:
    """How far a network moved on the tokens of a batch, in nats per token."""

    mean: float
    p999: float
    max: float
    tokens: int

    @classmethod
    def of(cls, kl: Float[Tensor, " N"]) -> "TokenKL":
        """The three numbers of per-token KLs; NaN anywhere makes all of them NaN."""
        if not kl.numel():
            raise ValueError("TokenKL: there is no token to measure. Is every completion masked out?")
        kl = kl.detach().double()
        if bool(kl.isnan().any()):
            return cls(mean=math.nan, p999=math.nan, max=math.nan, tokens=kl.numel())
        values = torch.stack([STATISTICS[name](kl) for name in ("mean", "p999", "max")]).tolist()
        return cls(mean=values[0], p999=values[1], max=values[2], tokens=kl.numel())
