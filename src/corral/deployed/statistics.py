"""Statistics of a batch's per-token KLs: mean with standard error, 99.9th percentile, maximum, and sums over sequences."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

Statistic = Callable[[Float[Tensor, " N"]], Tensor]
"""Type of a function that maps per-token KLs [N] to a scalar, and increases with each of the KLs."""


def quantile(kl: Float[Tensor, " N"], level: float) -> Tensor:
    """Smallest KL that at least a share `level` of the tokens do not exceed (nearest rank, without interpolation)."""
    return kl.flatten().kthvalue(max(1, math.ceil(level * kl.numel()))).values


def worst_mean(kl: Float[Tensor, " N"], share: float) -> Tensor:
    """Mean of the ⌈share · N⌉ largest of N KLs (CVaR, the conditional value at risk)."""
    return kl.flatten().topk(max(1, math.ceil(share * kl.numel()))).values.mean()


STATISTICS: dict[str, Statistic] = {
    "mean": lambda kl: kl.mean(),
    "p999": lambda kl: quantile(kl, 0.999),
    "cvar": lambda kl: worst_mean(kl, 0.01),
    "max": lambda kl: kl.max(),
}
"""Statistics of per-token KLs that can be bounded, by name. `cvar` is the mean of the largest 1 %."""


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchKL:
    """Per-token KLs in nats between old and new network, on N tokens of sequences that the old network sampled."""

    new_old: Float[Tensor, " N"]
    """KL(new‖old) at each token. The trust region bounds statistics of this KL."""
    old_new: Float[Tensor, " N"]
    """KL(old‖new) at each token. Its sum over a sequence estimates the KL of whole sequences.
    The old network sampled the sequences."""
    sequence: Int[Tensor, " N"]
    """Number of the sequence to which each token belongs. The numbers may be any integers."""
    log_ratio: Float[Tensor, " N"] | None = None
    """Log-ratio log π_new − log π_old of each sampled token. None if unknown."""

    def effective_sample_size(self) -> float:
        """Effective sample size as a share of the tokens, (Σρ)² / (N Σρ²) in (0, 1]. Returns 1 if ratios are unknown."""
        if self.log_ratio is None:
            return 1.0
        ratio = (self.log_ratio.double() - self.log_ratio.max()).exp()  # a common factor changes nothing
        return float(ratio.sum().square() / (len(ratio) * ratio.square().sum()))


@dataclass(frozen=True, kw_only=True)
class TokenKL:
    """Statistics of the KL between old and new network on the tokens of a batch, in nats, per token and per sequence."""

    mean: float
    p999: float
    max: float
    tokens: int
    se: float | None = None
    """Standard error of the mean KL, over independent sequences. None for a single sequence.
    Tokens count as independent if sequences are unknown."""
    seq_mean: float | None = None
    """Mean of Σ_t KL(old‖new) over sequences, which estimates the KL of whole sequences."""
    seq_max: float | None = None
    """Largest sum Σ_t KL(old‖new) over the tokens of one sequence."""

    @classmethod
    def of(cls, found: "Float[Tensor, ' N'] | BatchKL") -> "TokenKL":
        """Compute the statistics of per-token KLs. A single NaN makes every statistic NaN.

        Statistics of sequences need a `BatchKL`.
        """
        batch = found if isinstance(found, BatchKL) else None
        kl = (found.new_old if isinstance(found, BatchKL) else found).detach().double()
        if not kl.numel():
            raise ValueError("TokenKL: there is no token to measure. Is every completion masked out?")
        if bool(kl.isnan().any()):
            return cls(mean=math.nan, p999=math.nan, max=math.nan, tokens=kl.numel())
        numbers = {name: STATISTICS[name](kl) for name in ("mean", "p999", "max")}
        sequence = torch.arange(len(kl), device=kl.device)
        if batch is not None:
            _, sequence = batch.sequence.unique(return_inverse=True)
            moved = _sums(batch.old_new.detach().double(), sequence)
            numbers |= {"seq_mean": moved.mean(), "seq_max": moved.max()}
        if (se := _standard_error(kl, sequence)) is not None:
            numbers["se"] = se
        return cls(tokens=kl.numel(), **dict(zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True)))


def _sums(values: Float[Tensor, " N"], sequence: Int[Tensor, " N"]) -> Float[Tensor, " S"]:
    return values.new_zeros(int(sequence.max()) + 1).index_add(0, sequence, values)


def _standard_error(kl: Float[Tensor, " N"], sequence: Int[Tensor, " N"]) -> Tensor | None:
    """Compute the standard error of the mean KL per token, from sums over S independent sequences.

        m = Σ_s K_s / Σ_s n_s          se² = S/(S−1) · Σ_s (K_s − m n_s)² / N²

    With one token in every sequence it is s/√N with the unbiased s. None for a single sequence.
    """
    excess = _sums(kl - kl.mean(), sequence)
    count = len(excess)
    return (excess.square().sum() * count / (count - 1)).sqrt() / len(kl) if count > 1 else None
