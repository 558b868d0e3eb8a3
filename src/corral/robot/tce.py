"""TCE (temporally correlated episodic learning): advantages for trajectory segments, and new plans during an episode."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from corral.robot.config import AS_PUBLISHED, LearnerConfig
from corral.robot.episode import SEGMENTS, Episodes, Plant, episode_seeds
from corral.robot.learner import Credit, OnPolicyLearner, leave_one_out
from corral.robot.planner import Plans
from corral.robot.policy import Critic
from corral.robot.prodmp import ProDMP
from corral.robot.segment import (
    critic_targets,
    draw_pairs,
    normalise_advantages,
    segment_advantages,
    segment_jitter,
    segment_log_prob,
)
from corral.validate import limited


def rewards_at_event(rewards: Float[Tensor, "B T"], event: Float[Tensor, "B"]) -> Float[Tensor, "B T"]:
    """Move rewards paid after an event, such as a take-off, to the step of the event.

        r̃_e = Σ_{t ≥ e} r_t,   r̃_t = 0 for t > e,   r̃_t = r_t for t < e

    A jump is decided when the foot leaves the floor: height and landing follow from it, but are paid in the last step, hundreds
    of steps after the part of the plan that they tell about. Rewards that depend on the past and not on the state alone
    also become easier for a critic, which has nothing left to predict once the event is over.

    Args:
        rewards: of every step; 0 after an episode's end.
        event: a step's index per episode; NaN for an episode without the event, which stays as it is.
    Ref:
        Li et al. 2024, arXiv:2401.11437 (hopper jump, table tennis). Invariant: returns do not change.
    """
    known = ~event.isnan()
    at = torch.where(known, event, 0.0).long()[:, None]
    if bool(((at < 0) | (at >= rewards.shape[1])).any()):
        raise ValueError(
            f"rewards_at_event: an event is a step from 0 to {rewards.shape[1] - 1}, or NaN; got {event.tolist()}."
        )
    step = torch.arange(rewards.shape[1], device=rewards.device)
    moved = torch.where(step < at, rewards, 0.0).scatter(1, at, torch.where(step >= at, rewards, 0.0).sum(-1, keepdim=True))
    return torch.where(known[:, None], moved, rewards)


@dataclass(frozen=True, kw_only=True)
class TCEConfig(LearnerConfig):
    """Settings of the robot learner TCE."""

    gamma: float = limited(1.0, at_least=0, at_most=1)
    """Discount factor γ of later rewards."""
    lam: float = limited(0.95, at_least=0, at_most=1)
    """Trace parameter λ of the λ-returns that are the critic's targets."""
    credit_lam: float = limited(0.0, at_least=0, at_most=1)
    """Trace parameter λ of the advantages, from segment to segment. TCE was published with 0.
    With 1 a segment is credited with all rewards from its beginning on, which needs no critic that predicts later rewards
    from the state."""
    points: int = limited(25, at_least=2)
    """Number of segment endpoints per episode. The plans of an episode share them, at least two for each plan."""
    segments_until: float | None = limited(None, above=0, what="a number of seconds", note="inf is all of a plan")
    """Time in seconds from the start of each plan within which segments lie. The default is the whole plan.
    After its τ a plan rests at its goal: likelihoods of segments there depend on the goal alone, and outweigh the others
    in a long episode. Later rewards are still credited to the last segment, and with `credit_lam` to all segments."""
    closing_segment: bool = True
    """True if the last segment is credited with all rewards to the end of the episode.
    It is False as published, where no segment is credited with the last reward."""
    move_to_event: bool = False
    """True to count rewards after a reported event, such as a take-off, as earned at the event.
    It is True as published for the hopper."""
    critic_inputs: Literal["state", "context"] = "state"
    """Inputs of the critic: "state", or "context" for the episode's first observation and the elapsed share.
    The state is published. The context does not depend on the plan that was drawn, so that the baseline biases no
    gradient. But no segment then has credit for its effect on later rewards."""
    jitter: float = limited(1e-4, above=0, note="at 0 close points make a singular covariance")
    """Regulariser added to the variances of a segment's positions, as a share of the largest variance."""
    common_jitter: bool = False
    """True to use one regulariser for all segments of a policy, relative to their largest variance.
    It is True as published."""

    @classmethod
    def as_published(cls, **settings: Any) -> "TCEConfig":
        """Create settings as in the TCE paper where corral's defaults differ: last segment, regulariser and entropy bound.

        Bounds, rates and epochs were published per task and are settings like any other. See docs/tce.md for what still
        differs.
        """
        return cls(**AS_PUBLISHED["tce"] | settings)


class TCE(OnPolicyLearner):
    """TCE learner: a policy explores by whole trajectories, and learns from the advantages of their segments.

        ρ_k = N(y_a, y_b; π̃) / N(y_a, y_b; π_old)          the two ends of segment k, jointly
        A_k = Σ_{t=a}^{b−1} r_t + V(s_b) − V(s_a)          and λ A_{k+1} with `credit_lam`

    With several plans per episode, a segment lies within one of them, and the last of a plan ends where the next plan begins.

    Ref:
        Li et al. 2024, arXiv:2401.11437. Invariant: with one segment of as many points as parameters it has BBRL's ratio.
    """

    name: ClassVar[str] = "tce"
    config: TCEConfig

    def __init__(self, plant: Plant, prodmp: ProDMP, dt: float, config: TCEConfig, **settings: Any) -> None:
        if config.points > plant.steps:
            raise ValueError(f"tce: `points` is at most the {plant.steps} steps of an episode; got {config.points}.")
        super().__init__(plant, prodmp, dt, config, **settings)
        self.points, self.reach = max(2, round(config.points / self.planner.count)), self.planner.every
        if self.points > self.reach:
            raise ValueError(f"tce: a plan of {self.reach} steps has no two ends of segments. Plan anew less often.")
        if config.segments_until is not None:
            self.reach = round(min(self.reach, config.segments_until / dt))
        if self.points > self.reach:
            raise ValueError(
                f"tce: {self.points} ends of segments need as many steps, and `segments_until` has {self.reach} of {dt:g} s; "
                f"got {config.segments_until!r}. Take more seconds or fewer `points`."
            )

    def begin_batch(self, plans: Plans) -> None:
        """Draw the trajectory segments of this batch, and compute the regulariser added to each segment's variances."""
        generator = torch.Generator().manual_seed(episode_seeds(self.seed, self.iteration, 1, SEGMENTS)[0])
        self.pairs = draw_pairs(self.reach, self.points, generator=generator)
        self.rows = [position[self.pairs].to(plans.params) for position in self.planner.positions]
        parts = zip(self.rows, plans.split(), strict=True)
        self.jitter = [segment_jitter(rows, part.chol, self.config.jitter) for rows, part in parts]

    def log_prob(self, plans: Plans) -> Tensor:
        found = []  # of the first plans, of the second ones, …: each have the same columns of the trajectory
        for rows, jitter, part in zip(self.rows, self.jitter, plans.split(), strict=True):
            if self.config.common_jitter:
                jitter = segment_jitter(rows.flatten(0, 1)[None], part.chol, self.config.jitter).expand_as(jitter)
            if len(part.params):
                found.append(segment_log_prob(rows, part.params, part.mean, part.chol, jitter))
        return torch.cat(found)

    def build_critic(self, observation: int) -> Critic:
        return super().build_critic(observation + (self.config.critic_inputs == "context"))

    def states(self, episodes: Episodes) -> Tensor:
        return self._inputs(episodes)[episodes.mask]

    def _inputs(self, episodes: Episodes) -> Tensor:
        """Compute the critic's inputs at every step of every episode [E T ·]."""
        states = episodes.observations[:, :-1]
        if self.config.critic_inputs == "state":
            return states
        steps, every = states.shape[1], self.planner.every
        elapsed = torch.arange(steps, dtype=states.dtype, device=states.device)[:, None] / steps
        return torch.cat([states[:, ::every].repeat_interleave(every, 1), elapsed.expand(*states.shape[:2], 1)], -1)

    def credit(self, episodes: Episodes) -> Credit:
        config, played = self.config, episodes.mask
        rewards = rewards_at_event(episodes.rewards, episodes.event) if config.move_to_event else episodes.rewards
        alone, rewards = config.plans_per_context == 1, rewards.to(self.dtype)
        values = self.values(self._inputs(episodes)) if alone else torch.zeros_like(rewards)
        cut = partial(self.planner.cut, episodes)
        paid = rewards
        if self.planner.count > 1:  # γ V of the next plan's first state is paid with each plan's last reward
            every = self.planner.every
            last = torch.arange(every - 1, rewards.shape[1] - 1, every, device=rewards.device)
            paid = rewards.clone()
            paid[:, last] += config.gamma * torch.where(played[:, last + 1], values[:, last + 1], 0.0)
        advantages, mask = segment_advantages(
            cut(paid),
            cut(values),
            self.pairs,
            mask=cut(played),
            gamma=config.gamma,
            lam=config.credit_lam,
            closing_segment=config.closing_segment,
        )
        if not alone:
            apart = leave_one_out(advantages, config.plans_per_context, mirrored=config.mirrored)
            return Credit(normalise_advantages(apart, mask), mask)
        targets = critic_targets(rewards, values, played, gamma=config.gamma, lam=config.lam)
        return Credit(normalise_advantages(advantages, mask), mask, self.states(episodes), targets[played])
