"""What TCE and BBRL share: sample plans, follow them, fit the critic, improve the policy inside its trust region."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from corral.divergence.gaussian import gaussian_entropy, gaussian_kl
from corral.numerics import number_in
from corral.objective.ratio import bounded
from corral.projection.entropy import project_entropy_floor
from corral.projection.gaussian import GaussianProjection
from corral.projection.gaussian_frobenius import project_gaussian_frobenius
from corral.projection.gaussian_kl import project_gaussian_kl
from corral.projection.gaussian_wasserstein import project_gaussian_wasserstein
from corral.robot.episode import Episodes, Plant, episode_seeds
from corral.robot.policy import ACTIVATIONS, Critic, GaussianPolicy
from corral.robot.prodmp import ProDMP

PROJECTIONS: dict[str, Callable[..., GaussianProjection]] = {
    "kl": project_gaussian_kl,
    "wasserstein": project_gaussian_wasserstein,
    "frobenius": project_gaussian_frobenius,
}
LAST_RATE = 0.01
"""Learning rates fall linearly to this share of their first value."""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """Settings of an episodic learner; the names are those of docs/tce.md."""

    iterations: int = 125
    """Batches of episodes."""
    episodes: int = 64
    """Episodes in a batch."""
    policy_epochs: int = 25
    """Updates of the policy per batch, each on the whole batch."""
    critic_epochs: int = 10
    """Updates of the critic per batch."""
    policy_rate: float = 1e-3
    """Learning rate of the policy's Adam."""
    critic_rate: float = 1e-3
    """Learning rate of the critic's Adam."""
    weight_decay: float = 0.0
    """L2 penalty of both."""
    projection: Literal["kl", "wasserstein", "frobenius"] = "kl"
    """Measure of the trust region."""
    mean_bound: float = 0.05
    """ε_μ: how far the mean may move per batch."""
    cov_bound: float = 0.005
    """ε_Σ: how far the covariance may move per batch."""
    regression: float = 1.0
    """Weight of KL(π_θ‖sg π̃), which draws the network into the region."""
    entropy_floor: float | None = None
    """Entropy per parameter that the policy may fall to by the last batch, linearly from its first; none without it."""
    set_covariance: bool = False
    """After a batch, write the projected covariance into the network instead of trusting the regression with it."""
    gamma: float = 1.0
    """Discount γ."""
    lam: float = 0.95
    """λ of the critic's targets."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of both networks' layers."""
    activation: str = "tanh"
    """Of both networks."""
    std: float = 1.0
    """First standard deviation of every parameter."""
    min_std: float = 1e-4
    """Least entry on the diagonal of the Cholesky factor."""

    def __post_init__(self) -> None:
        for name in ("iterations", "episodes", "policy_epochs", "critic_epochs"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{self._name()}: `{name}` is a whole number ≥ 1; got {value!r}.")
        for name in ("policy_rate", "critic_rate", "mean_bound", "cov_bound"):
            value = getattr(self, name)
            if not (number_in(value, 0) and value > 0):
                raise ValueError(f"{self._name()}: `{name}` must be > 0; got {value!r}.")
        for name, most in (("regression", float("inf")), ("weight_decay", float("inf")), ("gamma", 1), ("lam", 1)):
            value = getattr(self, name)
            if not number_in(value, 0, most):
                raise ValueError(f"{self._name()}: `{name}` must lie in [0, {most}]; got {value!r}.")
        for name, known in (("projection", PROJECTIONS), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{self._name()}: `{name}` is one of {', '.join(known)}; got {getattr(self, name)!r}.")

    def _name(self) -> str:
        return type(self).__name__.removesuffix("Config").lower()


@dataclass(frozen=True)
class Batch:
    """Episodes as an update reads them: what was drawn, from which policy, and the credit of each of N parts."""

    context: Float[Tensor, "E C"]
    params: Float[Tensor, "E W"]
    mean: Float[Tensor, "E W"]
    chol: Float[Tensor, "W W"]
    advantages: Float[Tensor, "E N"]
    mask: Bool[Tensor, "E N"]
    logp: Float[Tensor, "E N"]


class Learner(ABC):
    """A contextual Gaussian over trajectory parameters, improved by episodes under a trust region.

        ρ = π̃ / π_old,   π̃ = projection of π_θ into the region around π_old
        L = − mean ρ Â + α KL(π_θ‖sg π̃)

    Subclasses say what a likelihood and an advantage belong to: the segments of an episode (TCE) or the whole of it (BBRL).
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
        self.plant, self.prodmp, self.config, self.seed, self.dtype = plant, prodmp, config, seed, dtype
        self.times = dt * torch.arange(1, plant.steps + 1, dtype=dtype)
        size = plant.envs.single_observation_space.shape[0]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            common = {"hidden": config.hidden, "activation": config.activation}
            self.policy = GaussianPolicy(size, prodmp.parameters, std=config.std, min_std=config.min_std, **common).to(dtype)
            self.critic = Critic(size, **common).to(dtype)
        self.policy_optimizer = torch.optim.Adam(self.policy.parameters(), config.policy_rate, weight_decay=config.weight_decay)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), config.critic_rate, weight_decay=config.weight_decay)
        self.first_entropy = float(gaussian_entropy(self.policy.cholesky().detach()))
        self.iteration = 0

    @abstractmethod
    def log_prob(self, params: Tensor, mean: Tensor, chol: Tensor) -> Tensor:
        """Log-density [E N] of what was drawn."""

    @abstractmethod
    def credit(self, episodes: Episodes, values: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and which of them count, [E N], from values [E T] before the critic is fitted."""

    def begin_batch(self, chol: Tensor) -> None:  # noqa: B027  # not every learner decides anything
        """What is decided once for a batch; `chol` is the old policy's."""

    def step(self) -> dict[str, float]:
        """One batch of episodes and its updates; returns metrics."""
        for optimizer, rate in (
            (self.policy_optimizer, self.config.policy_rate),
            (self.critic_optimizer, self.config.critic_rate),
        ):
            left = 1 - (1 - LAST_RATE) * self.iteration / self.config.iterations
            for group in optimizer.param_groups:
                group["lr"] = rate * left
        episodes, params, mean, chol = self.sample()
        metrics = {"return": float(episodes.returns.mean()), "success": float(episodes.success.mean())}
        metrics |= self.improve(episodes, params, mean, chol)
        self.iteration += 1
        return metrics

    @torch.no_grad()
    def sample(self) -> tuple[Episodes, Tensor, Tensor, Tensor]:
        """Draw parameters for new contexts and follow their plans; also returns parameters, means and the factor."""
        context = self.plant.start(episode_seeds(self.seed, self.iteration, self.config.episodes))
        generator = torch.Generator().manual_seed(episode_seeds(self.seed, self.iteration, self.config.episodes + 1)[-1])
        mean, chol = self.policy(torch.from_numpy(context).to(self.dtype))
        params = mean + torch.randn(mean.shape, generator=generator, dtype=self.dtype) @ chol.mT
        return self.follow(context, params), params, mean, chol

    @torch.no_grad()
    def follow(self, context: Any, params: Tensor) -> Episodes:
        """Episodes of these plans, from the contexts that `plant.start` returned."""
        position, velocity = (torch.from_numpy(x).to(self.dtype) for x in self.plant.tracking.state(context))
        y, v = self.prodmp.trajectory(self.times, params, position, velocity)
        return self.plant.follow(context, y.double().numpy(), v.double().numpy())

    @torch.no_grad()
    def evaluate(self, seeds: list[int]) -> Episodes:
        """Episodes of the mean plans: the policy without exploration."""
        context = self.plant.start(seeds)
        return self.follow(context, self.policy(torch.from_numpy(context).to(self.dtype))[0])

    def improve(self, episodes: Episodes, params: Tensor, mean: Tensor, chol: Tensor) -> dict[str, float]:
        """Credit, then the critic's updates, then the policy's."""
        states = episodes.observations[:, :-1].to(self.dtype)
        self.critic.normaliser.update(states[episodes.mask])
        with torch.no_grad():
            values = self.critic(states)
        self.begin_batch(chol)
        advantages, mask = self.credit(episodes, values)
        batch = Batch(states[:, 0], params, mean, chol, advantages, mask, self.log_prob(params, mean, chol))
        metrics = {"critic_loss": self.fit_critic(episodes, states, values)}
        for _ in range(self.config.policy_epochs):
            metrics |= self.improve_policy(batch)
        return metrics

    @abstractmethod
    def fit_critic(self, episodes: Episodes, states: Tensor, values: Tensor) -> float:
        """Move V towards its targets; returns the loss before the first update."""

    def regress(self, inputs: Tensor, targets: Tensor) -> float:
        """`critic_epochs` full-batch steps on the squared error; returns the first loss."""
        losses = []
        for _ in range(self.config.critic_epochs):
            loss = (self.critic(inputs) - targets).square().mean()
            self.critic_optimizer.zero_grad()
            loss.backward()
            self.critic_optimizer.step()
            losses.append(loss.detach())
        return float(losses[0])

    def improve_policy(self, batch: Batch) -> dict[str, float]:
        """One full-batch step on the policy's loss."""
        config = self.config
        mean, chol = self.policy(batch.context)
        projected = PROJECTIONS[config.projection](
            mean, chol, batch.mean, batch.chol, mean_bound=config.mean_bound, cov_bound=config.cov_bound
        )
        factor = projected.chol if config.entropy_floor is None else project_entropy_floor(projected.chol, self.floor()).chol
        log_ratio = self.log_prob(batch.params, projected.mean, factor) - batch.logp
        ratio = bounded(torch.where(batch.mask, log_ratio, 0.0)).exp()
        gain = torch.where(batch.mask, ratio * batch.advantages, 0.0).sum() / batch.mask.sum()
        distance = gaussian_kl(mean, chol, projected.mean.detach(), factor.detach()).total.mean()
        loss = config.regression * distance - gain
        self.policy_optimizer.zero_grad()
        loss.backward()
        self.policy_optimizer.step()
        if config.set_covariance:
            self.policy.set_cholesky(factor.detach())
        return {
            "policy_loss": float(loss.detach()),
            "entropy": float(gaussian_entropy(factor.detach())),
            "tr/active_frac": float(projected.active_mean.to(self.dtype).mean()),
            "tr/active_cov": float(projected.active_cov.to(self.dtype).mean()),
            "tr/kl_before": float((projected.before_mean.mean() + projected.before_cov.mean()).detach()),
            "tr/kl_after": float((projected.after_mean.mean() + projected.after_cov.mean()).detach()),
            "tr/ratio_max": float(ratio.detach().max()),
            "tr/unconverged": float((~projected.converged).to(self.dtype).mean()),
        }

    def floor(self) -> float:
        """The least entropy now: from the first policy's, linearly to `entropy_floor` per parameter."""
        assert self.config.entropy_floor is not None
        last = self.config.entropy_floor * self.prodmp.parameters
        return self.first_entropy + (last - self.first_entropy) * min(1.0, self.iteration / self.config.iterations)

    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs."""
        return {
            "iteration": self.iteration,
            "first_entropy": self.first_entropy,
            **{key: getattr(self, key).state_dict() for key in ("policy", "critic", "policy_optimizer", "critic_optimizer")},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        for key in ("policy", "critic", "policy_optimizer", "critic_optimizer"):
            getattr(self, key).load_state_dict(state[key])
        self.iteration, self.first_entropy = state["iteration"], state["first_entropy"]
