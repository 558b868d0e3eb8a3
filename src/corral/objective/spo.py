"""SPO: a quadratic penalty on the ratio in place of a clip."""

from dataclasses import dataclass

import torch

from corral.objective.config import ObjectiveConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import clamp_log_ratio, credit, log_ratio
from corral.tensors import ObjectiveOutput, TokenBatch
from corral.validate import require


@dataclass(frozen=True, kw_only=True)
class SPOConfig(ObjectiveConfig):
    epsilon: float = 0.2
    """ε: the ratio 1 ± ε at which the penalty balances the advantage; further out the gradient pulls back."""

    def __post_init__(self) -> None:
        require(self, "epsilon", above=0, what="a distance from ratio 1")

    @property
    def bounds(self) -> tuple[float, float]:
        return self.epsilon, self.epsilon


def spo(batch: TokenBatch, config: SPOConfig) -> ObjectiveOutput:
    """Penalised surrogate, with its optimum at the edge of the region.

        L_t = − ρ_t Â_t + |Â_t| (ρ_t − 1)² / (2 ε)          ρ_t = π(a_t) / π_old(a_t)

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the ratio range ε.
    Returns:
        Unreduced loss [B T] and metrics; `tr/active_frac` counts tokens beyond 1 ± ε along their advantage.
    Ref:
        Xie et al. 2025, arXiv:2401.16025 (v7 and later). Invariant: the gradient vanishes at ρ = 1 + sgn(Â) ε.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    excess = torch.expm1(clamp_log_ratio(log_rho))
    loss = -(1 + excess) * advantages + advantages.abs() * excess**2 / (2 * config.epsilon)
    acted = excess * advantages.sign() > config.epsilon
    return ObjectiveOutput(torch.where(batch.mask, loss, 0.0), region_metrics(batch, log_rho, acted), acted)
