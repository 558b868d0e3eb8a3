"""Probability ratios and advantages for all objectives: 0 at padding, finite everywhere."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from corral.divergence import binary_kl
from corral.numerics import CERTAIN, LOG_RATIO_MAX, at_least_float32
from corral.tensors import TokenBatch


def credit(batch: TokenBatch) -> Float[Tensor, "B T"]:
    """Return the advantages per token [B T], 0 at padding."""
    advantages = at_least_float32(batch.advantages)
    return torch.where(batch.mask, advantages[:, None] if advantages.ndim == 1 else advantages, 0.0)


def zero_padding(x: Tensor, mask: Bool[Tensor, "B T"]) -> Tensor:
    """Replace padding of `x` [B T] or [B T K] by 0, so that arbitrary values at padding reach no result and no gradient."""
    return torch.where(mask if x.ndim == mask.ndim else mask[..., None], at_least_float32(x), 0.0)


def log_ratio(batch: TokenBatch) -> Float[Tensor, "B T"]:
    """Log-ratio log ρ = log π − log π_old of the sampled tokens, 0 at padding."""
    return zero_padding(batch.logp_new, batch.mask) - zero_padding(batch.logp_old.detach(), batch.mask)


def sampled_kl(batch: TokenBatch) -> Float[Tensor, "B T"]:
    """KL(old‖new) of the two-way distribution "the sampled token or any other token", 0 at padding.

    Under both policies the other tokens have a probability of at least 1e-8.
    """
    old, new = zero_padding(batch.logp_old, batch.mask), zero_padding(batch.logp_new, batch.mask)
    return binary_kl(old.clamp(max=CERTAIN), new.clamp(max=CERTAIN))


def clamp_log_ratio(log_rho: Tensor) -> Tensor:
    """Clamp log ρ to at most 20, so that exp(log ρ) is finite."""
    return log_rho.clamp(max=LOG_RATIO_MAX)


def capped_ratio(log_rho: Float[Tensor, "B T"], cap: float | None) -> Float[Tensor, "B T"]:
    """Return the ratio ρ. With `cap`, return a factor with the value min(ρ, cap) and the gradient min(ρ, cap) · ∇ log π.

        sg[min(ρ, cap)] · ρ/sg[ρ]

    Clamping the ratio itself would give tokens beyond the cap no gradient at all; capping the detached weight gives them
    cap · ∇ log π. Below the cap the two are the same.
    """
    if cap is None:
        return clamp_log_ratio(log_rho).exp()
    return clamp_log_ratio(log_rho.detach()).exp().clamp(max=cap) * own_gradient(log_rho)


def own_gradient(log_rho: Tensor) -> Tensor:
    """Return ρ/sg[ρ], a factor with the value 1 and the gradient of log ρ (sg: stop gradient)."""
    return (log_rho - log_rho.detach()).exp()


def clip_surrogate(
    ratio: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    low: float | Tensor,
    high: float | Tensor,
    dual: float | None = None,
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Compute PPO's surrogate min(ρ Â, clip(ρ, low, high) Â), and a mask of the tokens that are clipped.
    A token is clipped if its ratio moved past a clip bound along its advantage.

    With a dual clip c = `dual` the surrogate is at least c Â where Â < 0, and tokens with ρ > c are clipped there too.
    """
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)  # type: ignore[arg-type]
    clipped = ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))
    if dual is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual * advantages), surrogate)
        clipped = clipped | ((ratio > dual) & (advantages < 0))
    return surrogate, clipped


def sequence_log_ratio(log_rho: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Log-ratio of each sequence, (1/|o|) Σ_t log ρ_t, at most 20, repeated for every token of the sequence.

    Each token has its own gradient (straight through).

    Averaged over the tokens, Σ_t ∇ log ρ_t / |o| is the gradient of the mean itself.
    """
    mean = log_rho.detach().sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    # The difference is 0 before it is added: every token has the mean to the last bit.
    return clamp_log_ratio(mean) + (log_rho - log_rho.detach())
