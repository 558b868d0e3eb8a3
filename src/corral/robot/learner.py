"""Training loop of the robot learners: draw plans, play them in episodes, and update the critic and the policy."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from corral.deployed import retract, snapshot
from corral.divergence.gaussian import gaussian_entropy, gaussian_kl
from corral.numerics import LOG_RATIO_MAX
from corral.projection.entropy import project_entropy_floor
from corral.projection.gaussian import GaussianProjection
from corral.robot.config import DTYPES, PROJECTIONS, LearnerConfig, check_device
from corral.robot.episode import PLANS, STATISTICS, Episodes, Plant, episode_seeds
from corral.robot.planner import Planner, Plans
from corral.robot.policy import Critic, GaussianPolicy
from corral.robot.prodmp import ProDMP
from corral.robot.tracking import Array
from corral.validate import number_in

_LAST_RATE = 0.01
"""Learning rate at the end of its linear decay, as a share of the initial learning rate."""

_RESETS = 256
"""Number of environment resets from which the mean and standard deviation of contexts are estimated."""

_PIECE = 2000
"""Number of states that the critic processes at a time on a CPU.
At 128 numbers each, these take 1 MB in float32."""

_ENTROPY_OF_ONE = 0.5 * math.log(2 * math.pi * math.e)
"""Entropy in nats of a one-dimensional Gaussian with standard deviation 1.
Entropy per parameter minus this value is a mean log standard deviation."""


_COUNTERS = ("iteration", "env_steps", "first_entropy")
"""Names of the learner's counters that a checkpoint stores."""


class Credit(NamedTuple):
    """Learning signal from a batch of episodes: advantages for the policy and regression targets for the critic."""

    advantages: Float[Tensor, "E N"]
    mask: Bool[Tensor, "E N"]
    """True for advantages that enter the policy's loss."""
    inputs: Float[Tensor, "S O"] | None = None
    targets: Float[Tensor, "S"] | None = None
    """Regression targets of the value function V at the states `inputs`. None if no critic is fitted."""


class Learner(ABC):
    """Base class of robot learners: a Gaussian policy over trajectory parameters, trained within a trust region.

        π̃ = projection of π_θ into the region around π_old          L = − gain(π̃) + α KL(π_θ‖sg π̃)

    Subclasses give the gain: `OnPolicyLearner` from the episodes of the batch, TOP-ERL from a critic of the replay buffer.
    The old policy is the network that drew the plans, not a projection of it: the regression alone keeps the two close. Their
    divergence is measured after every batch, and bounded where `deployed_bound` is finite.
    Everything random is a function of (seed, iteration), so a resumed run needs only `state`.
    """

    name: ClassVar[str]

    def __init__(
        self,
        plant: Plant,
        prodmp: ProDMP,
        dt: float,
        config: LearnerConfig,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        if prodmp.dof != plant.tracking.dof:
            raise ValueError(
                f"{self.name}: the trajectory has {prodmp.dof} joints, the controller {plant.tracking.dof}. Give both the same."
            )
        if not (number_in(dt, 0) and 0 < dt < math.inf):
            raise ValueError(f"{self.name}: `dt` is in seconds, finite and > 0; got {dt!r}.")
        check_device(self.name, config.device)
        self.plant, self.prodmp, self.config, self.seed, self.dtype = plant, prodmp, config, seed, dtype
        size, activation = plant.observation_size, config.activation
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.policy = GaussianPolicy(
                size,
                prodmp.parameters,
                config.hidden,
                activation=activation,
                std=config.std,
                min_std=config.min_std,
                contextual_covariance=config.contextual_covariance,
                normalised=config.normalise_contexts,
            ).to(config.device, dtype)
            self.critic = self.build_critic(size).to(config.device)
            self.critic.value.to(dtype if config.critic_dtype is None else DTYPES[config.critic_dtype])
        if config.normalise_contexts:
            seeds = episode_seeds(seed, 0, _RESETS, STATISTICS)
            contexts = torch.cat([torch.from_numpy(plant.start(seeds[rows])) for rows in plant.rounds(_RESETS)])
            self.policy.set_contexts(contexts.to(config.device))
        every, start = config.replan_every, config.replan_from
        self.planner = Planner(plant, prodmp, dt, self.policy, every=every, start=start, dtype=dtype)
        self.policy_optimizer = torch.optim.Adam(self.policy.parameters(), config.policy_rate, weight_decay=config.weight_decay)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), config.critic_rate, weight_decay=config.weight_decay)
        self.networks: dict[str, nn.Module] = {"policy": self.policy, "critic": self.critic}
        self.optimizers = {"critic": self.critic_optimizer, "policy": self.policy_optimizer}
        origin = torch.zeros(size, dtype=dtype, device=config.device)
        self.first_entropy = float(gaussian_entropy(self.policy.cholesky(origin).detach()))
        self.iteration = self.env_steps = 0

    @abstractmethod
    def build_critic(self, observation: int) -> nn.Module:
        """Build the critic for observations with `observation` entries. Its part `value` later gets the critic's precision."""

    @abstractmethod
    def update(self, episodes: Episodes, plans: Plans) -> dict[str, Tensor]:
        """Update the critic and the policy on a batch of episodes. Returns the metrics of the last updates."""

    def step(self) -> dict[str, float]:
        """Train on one new batch of episodes and return its metrics."""
        decay_over = self.config.decay_over or self.config.iterations
        left = 1 - (1 - _LAST_RATE) * min(1.0, self.iteration / decay_over)
        self.policy_optimizer.param_groups[0]["lr"] = self.config.policy_rate * left
        self.critic_optimizer.param_groups[0]["lr"] = self.config.critic_rate * left
        episodes, plans = self.sample()
        self.env_steps += int(episodes.mask.sum())
        metrics = {"return": float(episodes.returns.mean()), "success": float(episodes.success.nanmean())}
        metrics |= self.improve(episodes, plans)
        self.iteration += 1
        return {"env_steps": float(self.env_steps), **metrics}

    def sample(self) -> tuple[Episodes, Plans]:
        """Draw plans for the contexts of a new batch, and play them in episodes."""
        plans = self.config.plans_per_context
        contexts = episode_seeds(self.seed, self.iteration, self.config.episodes // plans)
        seeds = [seed for seed in contexts for _ in range(plans)]
        noise = self.planner.noise(len(seeds), episode_seeds(self.seed, self.iteration, 1, PLANS)[0])
        return self.planner.play(seeds, mirror(noise) if self.config.mirrored else noise, learned_from=True)

    def evaluate(self, seeds: list[int]) -> Episodes:
        """Play one episode per seed with the policy's mean plan, without exploration."""
        return self.planner.play(seeds, None)[0]

    @torch.no_grad()
    def predict(self, observation: Array) -> tuple[Array, Array]:
        """Compute the mean plan for an episode's first observation [* O]: desired positions and velocities [* T D].

        Entry t is for the time (t + 1) Δt. With `replan_every` it is the first plan, up to the next.
        """
        context = torch.from_numpy(self.plant.context(observation))
        mean = self.policy(context.to(self.policy.log_diagonal))[0].cpu()
        start = (part.to(self.dtype) for part in self.plant.tracking.state(context))
        position, velocity = self.prodmp.trajectory(self.planner.times[: self.planner.every], mean, *start)
        return cast(tuple[Array, Array], (position.double().numpy(), velocity.double().numpy()))

    def explore(self, seeds: list[int]) -> Episodes:
        """Play one episode per seed with plans drawn at random as in training."""
        return self.planner.play(seeds, self.planner.noise(len(seeds), seeds[0]))[0]

    def improve(self, episodes: Episodes, plans: Plans) -> dict[str, float]:
        """Update the critic and the policy, then measure how far the policy moved. `deployed_bound` may limit the move."""
        episodes, plans = episodes.to(self.config.device), plans.to(self.config.device)  # they were played on the CPU
        context, old = self.planner.contexts(episodes).to(self.dtype), snapshot(self.policy)
        metrics = self.update(episodes, plans)
        if self.config.set_covariance:
            with torch.no_grad():
                mean, chol = self.policy(context)
                self.policy.set_cholesky(self.project(mean, chol, plans)[1])
        certificate = retract(self.policy, old, lambda: self.deployed_kl(context, plans), bound=self.config.deployed_bound)
        return {key: float(value) for key, value in metrics.items()} | certificate.metrics()

    @torch.no_grad()
    def deployed_kl(self, context: Float[Tensor, "E C"], old: Plans) -> Float[Tensor, " E"]:
        """KL(π_θ‖π_old) in nats per plan between the current and the old policy network, at each context.
        The network is not projected; it draws the next batch."""
        mean, chol = self.gaussians(context)
        return gaussian_kl(mean, chol, old.mean, old.chol).total

    def step_policy(
        self, mean: Tensor, chol: Tensor, projected: GaussianProjection, factor: Tensor, gain: Tensor
    ) -> dict[str, Tensor]:
        """Make a gradient step on the policy's loss − gain + α KL(π_θ‖sg π̃), with the projected policy π̃."""
        distance = gaussian_kl(mean, chol, projected.mean.detach(), factor.detach())
        # A covariance that will be set needs no regression.
        apart = distance.mean.mean() if self.config.set_covariance else distance.total.mean()
        loss = self.config.regression * apart - gain
        self.policy_optimizer.zero_grad()
        loss.backward()
        self.policy_optimizer.step()
        return {
            "policy_loss": loss.detach(),
            "regression": apart.detach(),
            "entropy": (entropy := gaussian_entropy(factor.detach()).mean()),
            "std": (entropy / self.prodmp.parameters - _ENTROPY_OF_ONE).exp(),
            "tr/active_frac": projected.active_mean.to(self.dtype).mean(),
            "tr/active_cov": projected.active_cov.to(self.dtype).mean(),
            "tr/kl_before": (projected.before_mean.mean() + projected.before_cov.mean()).detach(),
            "tr/kl_after": (projected.after_mean.mean() + projected.after_cov.mean()).detach(),
            "tr/unconverged": (~projected.converged).to(self.dtype).mean(),
        }

    def gaussians(self, context: Float[Tensor, "E C"]) -> tuple[Float[Tensor, "E W"], Float[Tensor, "*c W W"]]:
        """Compute the policy's mean and Cholesky factor for each plan, once for adjacent plans that share a context."""
        plans = self.config.plans_per_context
        if plans == 1:
            return self.policy(context)
        mean, chol = self.policy(context[::plans])
        return mean.repeat_interleave(plans, 0), chol if chol.ndim == 2 else chol.repeat_interleave(plans, 0)

    def project(self, mean: Tensor, chol: Tensor, old: Plans) -> tuple[GaussianProjection, Tensor]:
        """Project the policy into the trust region. Returns the projection, and its Cholesky factor after the entropy bound."""
        config = self.config
        bounds = {"mean_bound": config.mean_bound, "cov_bound": config.cov_bound}
        projected = PROJECTIONS[config.projection](mean, chol, old.mean, old.chol, **bounds)
        if config.entropy_floor is None:
            return projected, projected.chol
        last = config.entropy_floor * self.prodmp.parameters
        floor = self.first_entropy + (last - self.first_entropy) * min(
            1.0, self.iteration / (config.floor_over or config.iterations)
        )
        inside = config.floor_in_region and config.projection == "kl"
        old_chol, cov_bound = (old.chol, config.cov_bound) if inside else (None, None)
        factor = project_entropy_floor(projected.chol, floor, old_chol=old_chol, cov_bound=cov_bound).chol
        if config.entropy_equal:
            excess = (floor - gaussian_entropy(factor)) / factor.shape[-1]
            factor = factor * excess.clamp(max=0).exp()[..., None, None]
        return projected, factor

    @property
    def updates(self) -> int:
        """Number of policy updates since the training began."""
        return self.iteration * self.config.policy_epochs

    def state(self) -> dict[str, Any]:
        """Return a checkpoint of networks, optimizers and counters, as a copy that later steps do not change."""
        parts = self.networks | {f"{name}_optimizer": optimizer for name, optimizer in self.optimizers.items()}
        return deepcopy({key: part.state_dict() for key, part in parts.items()} | {key: vars(self)[key] for key in _COUNTERS})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load the networks, optimizers and counters of a checkpoint that `state` made."""
        state = deepcopy(dict(state))  # optimizers would go on with these very tensors
        for name, network in self.networks.items():
            network.load_state_dict(state[name])
            self.optimizers[name].load_state_dict(state[f"{name}_optimizer"])
        self.iteration, self.env_steps, self.first_entropy = (state[key] for key in _COUNTERS)


class OnPolicyLearner(Learner):
    """Base class of learners that use only the newest batch of episodes, with importance ratios to the old policy.

        ρ = π̃ / π_old          gain = mean ρ Â

    Subclasses give what a likelihood and an advantage belong to: the segments of an episode (TCE) or the whole of it (BBRL).
    """

    critic: Critic

    @abstractmethod
    def log_prob(self, plans: Plans) -> Tensor:
        """Compute the log-density [E N] of the drawn plans, or of their segments, under the Gaussian in `plans`."""

    @abstractmethod
    def states(self, episodes: Episodes) -> Tensor:
        """Select the states [S O] of the episodes on which the critic is trained."""

    @abstractmethod
    def credit(self, episodes: Episodes) -> Credit:
        """Compute the advantages and the critic's targets of a batch, with the critic from before this batch."""

    def begin_batch(self, plans: Plans) -> None:
        """Compute quantities that stay constant during the updates on a batch. `plans` come from the old policy."""

    def build_critic(self, observation: int) -> Critic:
        return Critic(observation, self.config.critic_hidden, activation=self.config.activation)

    def update(self, episodes: Episodes, plans: Plans) -> dict[str, Tensor]:
        """Compute the advantages and targets of a batch of episodes, then update the critic, then the policy."""
        if self.config.plans_per_context == 1 and self.config.normalise_critic:
            self.critic.normaliser.update(self.states(episodes))
        self.begin_batch(plans)
        with torch.no_grad():
            credit = self.credit(episodes)
            log_old = self.log_prob(plans)
        context, metrics = self.planner.contexts(episodes).to(self.dtype), {}
        if credit.inputs is not None and credit.targets is not None:
            inputs = self.critic.normalise(credit.inputs)  # the same in every epoch
            targets = credit.targets.to(inputs)
            for _ in range(self.config.critic_epochs):
                metrics["critic_loss"] = self.improve_critic(inputs, targets)
        for _ in range(self.config.policy_epochs):
            metrics |= self.improve_policy(context, plans, credit, log_old)
        return metrics

    def values(self, states: Float[Tensor, "*b O"]) -> Float[Tensor, "*b"]:
        """Compute values V of states with the critic, in the precision of the run."""
        return self.critic(states).to(self.dtype)

    def improve_critic(self, inputs: Float[Tensor, "S O"], targets: Float[Tensor, " S"]) -> Tensor:
        """Make one gradient step on the critic's squared error over all states, in chunks that fit a CPU's cache."""
        piece = _PIECE if inputs.device.type == "cpu" else len(inputs)
        self.critic_optimizer.zero_grad()
        loss = targets.new_zeros(())
        for states, wanted in zip(inputs.split(piece), targets.split(piece), strict=True):
            error = (self.critic.value(states).squeeze(-1) - wanted).square().sum() / len(targets)
            error.backward()
            loss += error.detach()
        self.critic_optimizer.step()
        return loss

    def improve_policy(self, context: Tensor, plans: Plans, credit: Credit, log_old: Tensor) -> dict[str, Tensor]:
        """Make one gradient step on the policy's loss over the whole batch, with importance ratios to the old policy."""
        mean, chol = self.gaussians(context)
        projected, factor = self.project(mean, chol, plans)
        log_ratio = self.log_prob(replace(plans, mean=projected.mean, chol=factor)) - log_old
        ratio = torch.where(credit.mask, log_ratio, 0.0).clamp(max=LOG_RATIO_MAX).exp()
        gain = torch.where(credit.mask, ratio * credit.advantages, 0.0).sum() / credit.mask.sum().clamp(min=1)
        return self.step_policy(mean, chol, projected, factor, gain) | {"tr/ratio_max": ratio.detach().max()}


def mirror(noise: Float[Tensor, "E *w"]) -> Float[Tensor, "E *w"]:
    """Replace every second row of noise by the negative of the row before it, so that plans form mirrored pairs μ ± L ε.

    Every plan still has the policy's distribution. Credit that both plans of a pair earn drops out of the mean's gradient. The
    price is that a batch explores half as many directions.
    """
    return torch.stack([noise[::2], -noise[::2]], 1).flatten(0, 1)


def leave_one_out(credit: Float[Tensor, "E N"], plans: int, *, mirrored: bool = False) -> Float[Tensor, "E N"]:
    """Subtract from each plan's credit the mean credit of the other plans for the same context, in each segment.

        A_i = R_i − mean_{j∉i} R_j          j ∉ i: other plans; with mirrored pairs, plans of other pairs

    The other plans are independent of what plan i drew, so the baseline biases no gradient. A fitted V is only as exact as its
    fit: once exploration has narrowed, plans of a context differ by less than V's error.

    Args:
        credit: of E episodes, the P plans of a context one after the other, mirrored ones in pairs [E N].
        plans: P ≥ 2; where mirrored, even and ≥ 4.
    Returns:
        [E N].
    Ref:
        Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!". Invariant: a context's advantages sum to 0.
    """
    unit = 2 if mirrored else 1
    if plans < 2 * unit or plans % unit or len(credit) % plans:
        raise ValueError(
            f"leave_one_out: episodes are contexts × `plans`, of which there are at least 2, or two pairs; got {len(credit)} "
            f"episodes, {plans} plans a context{' in pairs' if mirrored else ''}."
        )
    units = credit.unflatten(0, (-1, plans // unit, unit))
    own = units.sum(2, keepdim=True)
    others = (own.sum(1, keepdim=True) - own) / (plans - unit)
    return (units - others).flatten(0, 2)
