"""TRPL: PPO whose policy is projected into a trust region at every state, in place of clipping."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from stable_baselines3 import PPO
from stable_baselines3.common.type_aliases import RolloutBufferSamples
from torch import Tensor, nn

from corral.deployed import retract
from corral.divergence.gaussian import gaussian_kl
from corral.lab.baselines.config import BaselineConfig
from corral.numerics import LOG_RATIO_MAX, in_one_dtype, without_autocast
from corral.robot.config import PROJECTIONS


@dataclass(frozen=True)
class StepGaussian:
    """Diagonal Gaussian over actions, with a mean for each state and standard deviations that all states share."""

    mean: Float[Tensor, "B D"]
    std: Float[Tensor, " D"]

    def log_prob(self, actions: Float[Tensor, "B D"]) -> Float[Tensor, " B"]:
        """Compute the log-density of one action per state."""
        return torch.distributions.Normal(self.mean, self.std).log_prob(actions).sum(-1)


@without_autocast
def trpl_loss(
    new: StepGaussian, old: StepGaussian, actions: Float[Tensor, "B D"], advantages: Float[Tensor, " B"], config: BaselineConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the policy loss of TRPL on a minibatch, and its metrics.

        π̃(·|s) = projection of π_θ(·|s) into the region around π_old(·|s)          ρ = π̃(a|s) / π_old(a|s)
        L = − mean ρ A + α mean KL(π_θ‖sg π̃)

    Nothing is clipped. Gradients flow through the projection to `new` alone.

    Ref:
        Otto et al. 2021, arXiv:2101.09207. Invariant: at new = old the gradient is that of −mean A log π.
    """
    tensors = in_one_dtype(new.mean, new.std, old.mean, old.std, actions, advantages)
    new, old, (actions, advantages) = StepGaussian(*tensors[:2]), StepGaussian(*tensors[2:4]), tensors[4:]
    bounds = {"mean_bound": config.mean_bound, "cov_bound": config.cov_bound}
    near = PROJECTIONS[config.projection](new.mean, new.std, old.mean, old.std, diagonal=True, **bounds)
    projected = StepGaussian(near.mean, near.chol)
    ratio = (projected.log_prob(actions) - old.log_prob(actions)).clamp(max=LOG_RATIO_MAX).exp()
    apart = gaussian_kl(new.mean, new.std, near.mean.detach(), near.chol.detach(), diagonal=True).total.mean()
    loss = config.regression * apart - (ratio * advantages).mean()
    metrics = {
        "policy_loss": loss.detach(),
        "regression": apart.detach(),
        "tr/active_frac": near.active_mean.float().mean(),
        "tr/active_cov": near.active_cov.float().mean(),
        "tr/kl_before": (near.before_mean.mean() + near.before_cov.mean()).detach(),
        "tr/kl_after": (near.after_mean.mean() + near.after_cov.mean()).detach(),
        "tr/ratio_max": ratio.detach().max(),
        "tr/unconverged": (~near.converged).float().mean(),
    }
    return loss, metrics


class TRPL(PPO):
    """Stable-baselines3's PPO (rollouts, GAE, minibatches, critic) with `trpl_loss` as its policy loss.

    The old policy is the network that collected the batch. As with TCE, only the regression draws the network itself into the
    region. After the updates its KL to the old policy is measured over the batch's states, and bounded where `deployed_bound`
    is finite.
    """

    def __init__(self, *arguments: Any, config: BaselineConfig, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.config, self.metrics = config, dict[str, float]()
        self.old_policy = deepcopy(self.policy).requires_grad_(False)

    def train(self) -> None:
        """Make all policy and critic updates on the current batch."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        self.old_policy.load_state_dict(self.policy.state_dict())
        metrics: dict[str, Tensor] = {}
        for _ in range(self.n_epochs):
            for batch in self.rollout_buffer.get(self.batch_size):
                metrics = self._update(batch)
            self._n_updates += 1
        self.metrics = {key: float(value) for key, value in metrics.items()} | self._certify()

    def _update(self, batch: RolloutBufferSamples) -> dict[str, Tensor]:
        """Make one gradient step of policy and critic on a minibatch."""
        states, advantages = batch.observations, batch.advantages
        if len(advantages) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)  # as stable-baselines3's PPO has it
        new, old = _gaussian(self.policy, states), _gaussian(self.old_policy, states)
        loss, metrics = trpl_loss(new, old, batch.actions, advantages, self.config)
        critic_loss = (batch.returns - self.policy.predict_values(states).flatten()).square().mean()
        self.policy.optimizer.zero_grad()
        (loss + self.vf_coef * critic_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
        self.policy.optimizer.step()
        return metrics | {"critic_loss": critic_loss.detach()}

    @torch.no_grad()
    def _certify(self) -> dict[str, float]:
        """Measure KL(π_θ‖π_old) over the batch's states, and pull the policy network back if it moved too far."""
        states = self.rollout_buffer.to_torch(self.rollout_buffer.observations)
        old = _gaussian(self.old_policy, states)

        def apart() -> Tensor:
            new = _gaussian(self.policy, states)
            return gaussian_kl(new.mean, new.std, old.mean, old.std, diagonal=True).total

        before = dict(_acting(self.old_policy).named_parameters())
        return retract(_acting(self.policy), before, apart, bound=self.config.deployed_bound).metrics()


def _acting(policy: Any) -> nn.ParameterList:
    """Return the policy's parameters without the critic's, so that the critic stays as it is when the policy is pulled back."""
    return nn.ParameterList([p for name, p in policy.named_parameters() if "value_net" not in name])


def _gaussian(policy: Any, states: Tensor) -> StepGaussian:
    """Compute the policy's Gaussian action distribution in each of the given states."""
    return StepGaussian(policy.get_distribution(states).distribution.mean, policy.log_std.exp())
