"""BBRL: one plan per episode, one return for all of it."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from corral.robot.config import LearnerConfig
from corral.robot.episode import Episodes
from corral.robot.learner import Credit, Learner
from corral.robot.segment import normalise_advantages


@dataclass(frozen=True, kw_only=True)
class BBRLConfig(LearnerConfig):
    """Settings of BBRL: TCE's, less those of segments and of the way there. The critic sees contexts only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.episodes < 2:
            raise ValueError("bbrl: advantages are compared across a batch, so `episodes` is at least 2; got 1.")


class BBRL(Learner):
    """Black-box learning of plans: what happens on the way is not looked at.

        ρ = N(w; π̃) / N(w; π_old)          A = Σ_t r_t − V(c)

    Ref:
        Otto et al. 2023, arXiv:2210.09622.
    """

    name: ClassVar[str] = "bbrl"

    def log_prob(self, params: Tensor, mean: Tensor, chol: Tensor) -> Tensor:
        white = torch.linalg.solve_triangular(chol, (params - mean).mT, upper=False)
        log_det = chol.diagonal().log().sum()
        return (-0.5 * white.square().sum(0) - log_det - 0.5 * len(chol) * math.log(2 * math.pi))[:, None]

    def states(self, episodes: Episodes) -> Tensor:
        return episodes.observations[:, 0]

    def credit(self, episodes: Episodes) -> Credit:
        contexts, returns = self.states(episodes), episodes.returns.to(self.dtype)
        mask = torch.ones_like(returns[:, None], dtype=torch.bool)
        if self.config.plans_per_context > 1:
            return self.credit_among_plans(returns[:, None], mask)
        advantages = (returns - self.critic(contexts))[:, None]
        return Credit(normalise_advantages(advantages, mask), mask, contexts, returns)
