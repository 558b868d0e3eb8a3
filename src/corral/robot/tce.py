"""TCE: one plan per episode, credit for each of its segments."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from corral.robot.episode import Episodes, episode_seeds
from corral.robot.learner import Learner, LearnerConfig
from corral.robot.segment import (
    critic_targets,
    draw_pairs,
    normalise_advantages,
    segment_advantages,
    segment_jitter,
    segment_log_prob,
)


@dataclass(frozen=True, kw_only=True)
class TCEConfig(LearnerConfig):
    """Settings of TCE."""

    points: int = 25
    """Ends of segments per episode."""
    closing_segment: bool = True
    """The last segment runs to the end of the episode; False as published, where no segment holds the last reward."""
    jitter: float = 1e-4
    """Added to a segment's variances, relative to the largest of them."""


class TCE(Learner):
    """Temporally correlated episodic learning: episodes explore as a whole and are credited in pieces.

        ρ_k = N(y_a, y_b; π̃) / N(y_a, y_b; π_old)          the two ends of segment k, jointly
        A_k = Σ_{t=a}^{b−1} r_t + V(s_b) − V(s_a)

    Ref:
        Li et al. 2024, arXiv:2401.11437. Invariant: with one segment of as many points as parameters it has BBRL's ratio.
    """

    name: ClassVar[str] = "tce"
    config: TCEConfig

    def begin_batch(self, chol: Tensor) -> None:
        """Segments of this batch, and what regularises their likelihoods under both policies."""
        generator = torch.Generator().manual_seed(episode_seeds(self.seed + 1, self.iteration, 1)[0])
        self.pairs = draw_pairs(self.plant.steps, self.config.points, generator=generator)
        self.rows = self.prodmp.design(self.times).position[self.pairs]
        self.jitter = segment_jitter(self.rows, chol, self.config.jitter)

    def log_prob(self, params: Tensor, mean: Tensor, chol: Tensor) -> Tensor:
        return segment_log_prob(self.rows, params, mean, chol, self.jitter)

    def credit(self, episodes: Episodes, values: Tensor) -> tuple[Tensor, Tensor]:
        advantages, mask = segment_advantages(
            episodes.rewards.to(self.dtype),
            values,
            self.pairs,
            mask=episodes.mask,
            gamma=self.config.gamma,
            closing_segment=self.config.closing_segment,
        )
        return normalise_advantages(advantages, mask), mask

    def fit_critic(self, episodes: Episodes, states: Tensor, values: Tensor) -> float:
        rewards, mask = episodes.rewards.to(self.dtype), episodes.mask
        targets = critic_targets(rewards, values, mask, gamma=self.config.gamma, lam=self.config.lam)
        return self.regress(states[mask], targets[mask])
