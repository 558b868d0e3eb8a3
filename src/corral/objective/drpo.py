"""DRPO: a quadratic penalty on the change of the sampled token's probability in place of DPPO's mask."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from corral.objective.config import Anchor, ObjectiveConfig
from corral.objective.metrics import region_metrics
from corral.objective.ratio import clamp_log_ratio, credit, log_ratio, zero_padding
from corral.tensors import ObjectiveOutput, TokenBatch
from corral.validate import require


@dataclass(frozen=True, kw_only=True)
class DRPOConfig(ObjectiveConfig):
    anchor: ClassVar[Anchor] = "rollout"

    bound: float = 0.2
    """δ: the change |π − π_old| at which the penalty balances the advantage; further out the gradient pulls back."""

    def __post_init__(self) -> None:
        require(self, "bound", above=0, what="a divergence", note="inf switches it off")

    @property
    def bounds(self) -> tuple[float, float]:
        return self.bound, self.bound


def drpo(batch: TokenBatch, config: DRPOConfig) -> ObjectiveOutput:
    """Penalised surrogate, with its optimum at the edge of the sampled token's total-variation ball.

        L_t = − ρ_t Â_t + |Â_t| π_old(a_t) (ρ_t − 1)² / (2 δ)          ρ_t = π(a_t) / π_old(a_t)

    π_old (ρ − 1) = π − π_old: it is spo with ε = δ / π_old(a_t), wide for unlikely tokens and narrow for likely ones.

    Args:
        batch: log-probs, advantages and mask, all [B T].
        config: the bound δ on |π − π_old|.
    Returns:
        Unreduced loss [B T] and metrics; `tr/active_frac` counts tokens beyond δ along their advantage.
    Ref:
        Yao et al. 2026, arXiv:2606.09821, eq. 9. Invariant: the gradient vanishes at π = π_old + sgn(Â) δ.
    """
    advantages, log_rho = credit(batch), log_ratio(batch)
    excess = torch.expm1(clamp_log_ratio(log_rho))
    moved = zero_padding(batch.logp_old.detach(), batch.mask).exp() * excess
    loss = -(1 + excess) * advantages + advantages.abs() * excess * moved / (2 * config.bound)
    acted = moved * advantages.sign() > config.bound
    return ObjectiveOutput(torch.where(batch.mask, loss, 0.0), region_metrics(batch, log_rho, acted), acted)
