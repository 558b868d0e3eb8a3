"""Statistics of the per-token KLs of a batch: mean and standard error, tail, worst token, sums over sequences."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

Statistic = Callable[[Float[Tensor, " N"]], Tensor]
"""Function from per-token KLs [N] to a scalar that is increasing in each of them."""


def quantile(kl: Float[Tensor, " N"], level: float) -> Tensor:
    """Smallest value that at least a share `level` of the tokens do not exceed (nearest rank, no interpolation)."""
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
"""Statistics that can be bounded, by name; `cvar` is the mean of the worst 1 %."""


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchKL:
    """Per-token KLs between the old and the new network, in nats, on N tokens of sequences that the old network sampled."""

    new_old: Float[Tensor, " N"]
    """KL(new‖old) at each token. Statistics of this KL are bounded."""
    old_new: Float[Tensor, " N"]
    """KL(old‖new) at each token. Its sum over a sequence estimates the KL of sequences, since the old network sampled them."""
    sequence: Int[Tensor, " N"]
    """Number of the sequence to which each token belongs; any integers."""
    log_ratio: Float[Tensor, " N"] | None = None
    """Log-ratio log π_new − log π_old of each sampled token, if known."""

    def effective_sample_size(self) -> float:
        """Effective share of the tokens under importance weights, (Σρ)² / (N Σρ²) in (0, 1]; 1 if no ratio is known."""
        if self.log_ratio is None:
            return 1.0
        ratio = (self.log_ratio.double() - self.log_ratio.max()).exp()  # a common factor changes nothing
        return float(ratio.sum().square() / (len(ratio) * ratio.square().sum()))


@dataclass(frozen=True, kw_only=True)
class TokenKL:
    """Statistics of how far a network moved on the tokens of a batch: KL in nats, per token and per sequence."""

    mean: float
    p999: float
    max: float
    tokens: int
    se: float | None = None
    """Standard error of the mean, over independent sequences, or over tokens if sequences are unknown. None for one
    sequence."""
    seq_mean: float | None = None
    """Mean of Σ_t KL(old‖new) over sequences: an estimate of the KL of whole sequences."""
    seq_max: float | None = None
    """Largest sum Σ_t KL(old‖new) over one sequence."""

    @classmethod
    def of(cls, found: "Float[Tensor, ' N'] | BatchKL") -> "TokenKL":
        """Summarise per-token KLs; one NaN makes every statistic NaN. Statistics of sequences need a `BatchKL`."""
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
    """Standard error of the mean over tokens, as a ratio of two sums over S independent sequences.

        m = Σ_s K_s / Σ_s n_s          se² = S/(S−1) · Σ_s (K_s − m n_s)² / N²

    With one token in every sequence it is s/√N with the unbiased s. None for a single sequence.
    """
    excess = _sums(kl - kl.mean(), sequence)
    count = len(excess)
    return (excess.square().sum() * count / (count - 1)).sqrt() / len(kl) if count > 1 else None
