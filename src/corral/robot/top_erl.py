"""TOP-ERL: off-policy learning of trajectory plans, with a transformer critic trained on segments of past episodes."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from corral.robot.config import LearnerConfig
from corral.robot.episode import UPDATES, Episodes, Plant, episode_seeds
from corral.robot.learner import Learner
from corral.robot.planner import Plans
from corral.robot.policy import GaussianPolicy
from corral.robot.prodmp import ProDMP
from corral.robot.segment import draw_segments, segment_returns
from corral.robot.sequence_critic import SequenceCritic
from corral.tensors import Tensors
from corral.validate import limited


@dataclass(frozen=True, kw_only=True)
class TopERLConfig(LearnerConfig):
    """Settings of TOP-ERL, with the published widths and epochs. Its updates use batches of past episodes."""

    policy_epochs: int = limited(15, at_least=1)
    """Number of policy updates after each batch of new episodes."""
    critic_epochs: int = limited(30, at_least=1)
    """Number of critic updates after each batch of new episodes."""
    policy_rate: float = limited(3e-4, above=0, finite=True)
    """Learning rate of the Adam optimizer of the policy."""
    critic_rate: float = limited(3e-4, above=0, finite=True)
    """Learning rate of the Adam optimizer of the critic."""
    critic_hidden: tuple[int, ...] = limited((128, 128), each=True, at_least=1, integer=True)
    """Widths of the blocks of the critic's transformer, all equal. The default is two blocks of 128."""
    critic_dtype: Literal["float64", "float32"] | None = "float32"
    """Floating-point precision of the critic network, which takes most of the time. None uses the precision of the run."""
    heads: int = limited(8, at_least=1)
    """Number of attention heads in each block of the critic's transformer, a divisor of the block's width."""
    gamma: float = limited(1.0, at_least=0, at_most=1)
    """Discount factor γ of later rewards."""
    segments: int = limited(25, at_least=1)
    """Largest number of segments per episode.
    Each update draws a number of segments up to it at random, which sets their length."""
    replay: int = limited(5000, at_least=1)
    """Largest number of episodes in the replay buffer."""
    batch: int = limited(512, at_least=1)
    """Number of episodes drawn from the replay buffer, with replacement, for each update."""
    warm_up: int = limited(300, at_least=1)
    """Number of episodes in the replay buffer before the first update of policy and critic."""
    target_rate: float = limited(0.005, above=0, at_most=1)
    """Share of the distance to the critic's weights by which the target network moves after each critic update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plans_per_context > 1 or self.replan_every is not None:
            self._refuse(
                f"an episode has one plan, and a critic gives its credit; got plans_per_context={self.plans_per_context} and "
                f"replan_every={self.replan_every}. Leave both out."
            )
        if len({*self.critic_hidden}) > 1 or self.critic_hidden[0] % self.heads:
            self._refuse(
                f"`critic_hidden` is one width for all blocks of the transformer, a multiple of `heads`; got "
                f"{list(self.critic_hidden)} and {self.heads} heads."
            )
        if self.warm_up > self.replay:
            self._refuse(f"`replay` holds at least the episodes of `warm_up`; got {self.replay} and {self.warm_up}.")


@dataclass(frozen=True, eq=False)
class Replay(Tensors):
    """Replay buffer of the newest episodes, with the parameters of their plans."""

    observations: Float[Tensor, "E S O"]
    """Observations s_0 … s_T of each episode, S = T + 1 in number."""
    rewards: Float[Tensor, "E T"]
    mask: Bool[Tensor, "E T"]
    params: Float[Tensor, "E W"]


class Segments(NamedTuple):
    """Segments cut from a batch of B past episodes: K segments of L steps from each episode."""

    replay: Replay
    """Past episodes from which the segments are cut."""
    rows: Int[Tensor, "K L"]
    """Step indices of each segment. Indices past the episode's last step are replaced by that last step."""
    states: Float[Tensor, "B K O"]
    """Observed state at the first step of each segment."""
    position: Float[Tensor, "B K D"]
    """Joint positions from which a new plan starts at the first step of each segment."""
    velocity: Float[Tensor, "B K D"]
    """Joint velocities with which a new plan starts at the first step of each segment."""
    actions: Float[Tensor, "B K L D"]
    """Desired joint positions in each segment, taken from the plan that was executed in the episode."""
    mask: Bool[Tensor, "B K L"]
    """True for steps of segments before the end of the episode."""


class TopERL(Learner):
    """TOP-ERL learner: updates raise the values that a critic, trained on past episodes, gives to the policy's plans.

        critic   mean_n (Q(s_t, a_t … a_{t+n−1}) − G_n)² + (V(s_t) − Q̄(s_t, ã_t … ã_{t+L−1}))²
        gain     mean_n Q(s_t, ã_t … ã_{t+n−1}) / σ
        ã        desired positions of a plan w̃ ~ π̃(·|s_0) that begins at t where the episode's own plan was

    over segments of random length L of past episodes, with G_n as in `segment_returns` from the target network's V̄, Q̄ that of
    the target network, and σ the scale of the critic. w̃ is reparametrised, so the policy's gradient goes through ProDMP into
    its mean and covariance. With `replan_from="state"` ã begins where the joints were.

    Ref:
        Li et al. 2025, arXiv:2410.09536, Sec. 4. Invariant: the gain of the plans that were followed is the mean of Q.
    """

    name: ClassVar[str] = "top_erl"
    config: TopERLConfig
    critic: SequenceCritic

    def __init__(self, plant: Plant, prodmp: ProDMP, dt: float, config: TopERLConfig, **settings: Any) -> None:
        if config.segments > plant.steps:
            raise ValueError(f"top_erl: `segments` is at most the {plant.steps} steps of an episode; got {config.segments}.")
        if config.replan_from == "state" and prodmp.delay:
            raise ValueError(
                f"top_erl: a plan rests until its delay of {prodmp.delay:g} s is over, and joints may move before. Leave "
                f"`replan_from` at 'desired', or the trajectory without a delay."
            )
        super().__init__(plant, prodmp, dt, config, **settings)
        self.critic.target.to(self.critic.value.head.weight)
        self.dt, self.anew = dt, replace(prodmp, relative_goal=False)
        self.replay: Replay | None = None

    def build_critic(self, observation: int) -> SequenceCritic:
        widths, dof = self.config.critic_hidden, self.prodmp.dof
        return SequenceCritic(observation, dof, self.plant.steps, widths[0], len(widths), self.config.heads)

    def update(self, episodes: Episodes, plans: Plans) -> dict[str, Tensor]:
        """Add new episodes to the replay buffer, then update the critic and the policy on batches from the buffer."""
        new = Replay(episodes.observations, episodes.rewards, episodes.mask, plans.params).to(dtype=self.dtype)
        self.replay = new if self.replay is None else Replay.cat([self.replay, new])[-self.config.replay :]
        if self.config.normalise_critic:
            self.critic.states.update(new.observations[:, :-1][new.mask])
            self.critic.actions.update(self._followed(new)[0][:, 1:][new.mask])
        if len(self.replay.params) < self.config.warm_up:
            return {}
        if self.updates == 0:
            to_go = self.replay.rewards.flip(1).cumsum(1).flip(1)
            self.critic.set_scale(to_go[self.replay.mask])
        generator = torch.Generator().manual_seed(episode_seeds(self.seed, self.iteration, 1, UPDATES)[0])
        old, metrics = deepcopy(self.policy).requires_grad_(False), dict[str, Tensor]()
        for _ in range(self.config.critic_epochs):
            metrics |= self.improve_critic(self.draw(generator), self._noise(generator))
        self.critic.value.requires_grad_(False)  # the policy's gradient goes through it, and none of its own is needed
        for _ in range(self.config.policy_epochs):
            metrics |= self.improve_policy(self.draw(generator), self._noise(generator), old)
        self.critic.value.requires_grad_(True)
        return metrics

    def draw(self, generator: torch.Generator) -> Segments:
        """Draw a batch of past episodes from the replay buffer, and cut the episodes into segments."""
        assert self.replay is not None
        count, steps = len(self.replay.params), self.plant.steps
        chosen = torch.randint(count, (self.config.batch,), generator=generator)
        return self.cut(
            self.replay[chosen.to(self.replay.params.device)], *draw_segments(steps, self.config.segments, generator)
        )

    def cut(self, replay: Replay, starts: Int[Tensor, "K"], length: int) -> Segments:
        """Cut episodes into segments of `length` steps that begin at the steps `starts`."""
        starts = starts.to(replay.params.device)
        rows, states = starts[:, None] + torch.arange(length, device=starts.device), replay.observations[:, starts]
        inside, rows = rows < self.plant.steps, rows.clamp(max=self.plant.steps - 1)
        followed, speed = self._followed(replay)
        position, velocity = followed[:, starts], speed[:, starts]
        if self.config.replan_from == "state":
            position, velocity = self.plant.tracking.state(states)
        return Segments(replay, rows, states, position, velocity, followed[:, 1:][:, rows], replay.mask[:, rows] & inside)

    def plan(self, params: Float[Tensor, "B W"], at: Segments) -> Float[Tensor, "B K L D"]:
        """Compute desired positions of the plans `params` in each segment, restarted at the segment's first state."""
        rows, (start, _) = at.rows.cpu(), self.plant.tracking.state(at.replay.observations[:, 0])
        params = self.prodmp.absolute(params, start)[:, None]  # goals relative to the episode's start, not to a segment's
        begin = self.dt * rows[:, 0].double()  # to the bit what the episode's own plan had as the time of this state
        return self.anew.trajectory(self.planner.times[rows], params, at.position, at.velocity, begin)[0]

    def improve_critic(self, at: Segments, noise: Float[Tensor, "B W"]) -> dict[str, Tensor]:
        """Make a gradient step on the critic's squared errors of V and Q, and move the target network."""
        mask = torch.cat([at.mask[..., :1], at.mask], -1)
        targets = self.targets(at, noise)
        error = (self.critic(at.states, at.actions) - targets) / self.critic.scale.to(targets)
        loss = torch.where(mask, error, 0.0).square().sum() / mask.sum().clamp(min=1)
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        self.critic.follow(self.config.target_rate)
        return {"critic_loss": loss.detach()}

    @torch.no_grad()
    def targets(self, at: Segments, noise: Float[Tensor, "B W"]) -> Float[Tensor, "B K S"]:
        """Compute the regression targets of V and of Q_1 … Q_L for each segment, S = L + 1 in all.

        V's is Q̄ of the actions that the policy takes from there, as many as were taken before the episode's end.
        """
        mean, chol = self.policy(at.replay.observations[:, 0])
        fresh = self.critic(at.states, self.plan(_reparametrise(mean, chol, noise), at), target=True)
        value = fresh.gather(-1, at.mask.sum(-1, keepdim=True))
        ahead = self.critic(at.replay.observations, target=True).squeeze(-1)
        returns = segment_returns(at.replay.rewards.to(ahead), ahead, at.replay.mask, at.rows, self.config.gamma)
        return torch.cat([value, returns], -1)

    def improve_policy(self, at: Segments, noise: Float[Tensor, "B W"], old: GaussianPolicy) -> dict[str, Tensor]:
        """Make a gradient step that raises the critic's value of the policy's plans, within a trust region.
        The region is around the policy before this batch."""
        context = at.replay.observations[:, 0]
        (mean, chol), (old_mean, old_chol) = self.policy(context), old(context)
        projected, factor = self.project(mean, chol, Plans(at.replay.params, old_mean, old_chol, (len(context),)))
        return self.step_policy(mean, chol, projected, factor, self.gain(_reparametrise(projected.mean, factor, noise), at))

    def gain(self, params: Float[Tensor, "B W"], at: Segments) -> Float[Tensor, ""]:
        """Mean of the critic's Q over all segments and their first 1 … L actions, divided by the critic's scale."""
        values = self.critic(at.states, self.plan(params, at))[..., 1:] / self.critic.scale
        return torch.where(at.mask, values, 0.0).sum() / at.mask.sum().clamp(min=1)

    def _followed(self, replay: Replay) -> tuple[Float[Tensor, "B S D"], Float[Tensor, "B S D"]]:
        """Compute the desired positions and velocities at every state, from the plan that each episode followed."""
        begin = self.plant.tracking.state(replay.observations[:, 0])
        plans = self.prodmp.trajectory(self.planner.times, replay.params, *begin)
        position, velocity = (torch.cat([first[:, None], later], 1) for first, later in zip(begin, plans, strict=True))
        return position, velocity

    def _noise(self, generator: torch.Generator) -> Float[Tensor, "B W"]:
        """Draw standard normal noise for one plan per episode of a batch."""
        noise = torch.randn(self.config.batch, self.prodmp.parameters, generator=generator, dtype=self.dtype)
        return noise.to(self.config.device)

    @property
    def updates(self) -> int:
        waiting = (self.config.warm_up - 1) // self.config.episodes  # batches without an update
        return max(0, self.iteration - waiting) * self.config.policy_epochs

    def state(self) -> dict[str, Any]:
        """Return a checkpoint that includes the replay buffer."""
        return super().state() | {"replay": None if self.replay is None else vars(self.replay)}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        replay = state["replay"]
        self.replay = None if replay is None else Replay(**replay).to(self.config.device)


def _reparametrise(mean: Float[Tensor, "B W"], chol: Float[Tensor, "*c W W"], noise: Float[Tensor, "B W"]) -> Tensor:
    """Compute trajectory parameters μ + L ε [B W] from noise ε, with one Cholesky factor L for all plans or one per plan."""
    return mean + (chol @ noise[..., None])[..., 0]
