"""BBRL (black-box reinforcement learning): the policy draws one plan per episode and learns from the episode's return."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from corral.divergence.gaussian import mahalanobis
from corral.robot.config import LearnerConfig
from corral.robot.episode import Episodes
from corral.robot.learner import Credit, OnPolicyLearner, leave_one_out
from corral.robot.planner import Plans
from corral.robot.segment import normalise_advantages
from corral.validate import limited


@dataclass(frozen=True, kw_only=True)
class BBRLConfig(LearnerConfig):
    """Settings of BBRL, the same as those of all robot learners.
    The critic's input is the context alone."""

    episodes: int = limited(64, at_least=2, note="advantages are compared across a batch")
    """Number of episodes in a training batch."""


class BBRL(OnPolicyLearner):
    """BBRL learner: a policy draws one trajectory per episode and learns from the episode's return, without per-step rewards.

        ρ = N(w; π̃) / N(w; π_old)          A = Σ_t r_t − V(c)

    With several plans per episode, each has what was earned from its beginning to the end of the episode.

    Ref:
        Otto et al. 2023, arXiv:2210.09622.
    """

    name: ClassVar[str] = "bbrl"

    def log_prob(self, plans: Plans) -> Tensor:
        chol = plans.chol
        log_det = chol.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        square = mahalanobis(plans.params - plans.mean, chol, diagonal=False)
        return (-0.5 * square - log_det - 0.5 * chol.shape[-1] * math.log(2 * math.pi))[:, None]

    def states(self, episodes: Episodes) -> Tensor:
        return self.planner.contexts(episodes)

    def credit(self, episodes: Episodes) -> Credit:
        contexts, planner = self.states(episodes), self.planner
        earned = episodes.rewards.unflatten(1, (planner.count, planner.every)).sum(-1)  # of each plan [E P]
        returns = earned.flip(1).cumsum(1).flip(1).T[planner.begun(episodes)].to(self.dtype)
        mask = torch.ones_like(returns[:, None], dtype=torch.bool)
        if self.config.plans_per_context > 1:
            apart = leave_one_out(returns[:, None], self.config.plans_per_context, mirrored=self.config.mirrored)
            return Credit(normalise_advantages(apart, mask), mask)
        advantages = (returns - self.values(contexts))[:, None]
        return Credit(normalise_advantages(advantages, mask), mask, contexts, returns)
