"""SAC with updates captured in a CUDA graph: stable-baselines3's arithmetic, without one launch per kernel."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from stable_baselines3 import SAC
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.utils import polyak_update
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

_EAGER_UPDATES = 3
"""Number of updates before the CUDA graph is captured. In these, Adam allocates its moments and cuBLAS its workspace."""


class GraphedSAC(SAC):
    """stable-baselines3's SAC. On a GPU, an update is captured once in a CUDA graph and then replayed.

    On the CPU, and on a GPU where `replays` is false, as with gSDE, `train` is stable-baselines3's own. In the graph formulas
    are the same, and these differ: the device's generator draws the transitions, Adam is torch's fused kernel, losses are not
    logged, hooks of optimizers see no replay, and NaN raises after the updates, not in one.
    """

    @property
    def replays(self) -> bool:
        """True if updates are replays of a CUDA graph: on a GPU, without gSDE."""
        return self.device.type == "cuda" and not self.use_sde

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        """Make `gradient_steps` updates from the current replay buffer."""
        _set_adam(self._optimizers(), fused=self.replays)  # a checkpoint brings flags and counters of where it was made
        if not self.replays:
            super().train(gradient_steps, batch_size)
            return
        assert self.replay_buffer is not None
        self.policy.set_training_mode(True)
        self._update_learning_rate(self._optimizers())
        transitions = read_transitions(self.replay_buffer, self.device)
        with _unchecked_distributions():
            self._repeat(lambda: self.update(draw(transitions, batch_size)), gradient_steps)
        self._n_updates += gradient_steps
        self._check_finite(gradient_steps)
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")

    def update(self, batch: ReplayBufferSamples) -> None:
        """Make a step of the entropy coefficient α, the critics Q and the actor π, then of the target critics Q̄.

            L_α = − mean log α · sg(log π(a|s) + H̄)
            L_Q = ½ Σ_i mean (Q_i(s, a_B) − y)²              y = r + (1 − d) γ (min_i Q̄_i(s', a') − α log π(a'|s'))
            L_π = mean (α log π(a|s) − min_i Q_i(s, a))      Q̄_i ← (1 − τ) Q̄_i + τ Q_i

        with a ~ π(·|s), a' ~ π(·|s') and the target entropy H̄. α is a constant in L_Q and L_π, and the one before its own step;
        L_π has the critics after theirs.

        Args:
            batch: s, a_B, s', d and r, each [B ·].
        Ref:
            Haarnoja et al. 2018, arXiv:1812.05905. Invariant: on the CPU, `SAC.train` with this batch, bit for bit.
        """
        assert self.log_ent_coef is not None
        assert self.ent_coef_optimizer is not None
        assert isinstance(self.target_entropy, float)
        actions, logp = self.actor.action_log_prob(batch.observations)
        logp, alpha = logp.reshape(-1, 1), self.log_ent_coef.detach().exp()
        _descend(self.ent_coef_optimizer, -(self.log_ent_coef * (logp + self.target_entropy).detach()).mean())
        with torch.no_grad():
            next_actions, next_logp = self.actor.action_log_prob(batch.next_observations)
            value = _least(self.critic_target(batch.next_observations, next_actions)) - alpha * next_logp.reshape(-1, 1)
            target = batch.rewards + (1 - batch.dones) * self.gamma * value
        error = sum(mse_loss(value, target) for value in self.critic(batch.observations, batch.actions))
        assert isinstance(error, Tensor)
        _descend(self.critic.optimizer, 0.5 * error)
        _descend(self.actor.optimizer, (alpha * logp - _least(self.critic(batch.observations, actions))).mean())
        polyak_update(self.critic.parameters(), self.critic_target.parameters(), self.tau)
        polyak_update(self.batch_norm_stats, self.batch_norm_stats_target, 1.0)

    def _repeat(self, update: Callable[[], None], count: int) -> None:
        """Make `count` updates. The first run kernel by kernel, the later ones as replays of the CUDA graph."""
        eager, stream = min(count, _EAGER_UPDATES), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(eager):
                update()
        torch.cuda.current_stream().wait_stream(stream)
        if count > eager:
            graph = torch.cuda.CUDAGraph()
            _set_adam(self._optimizers(), fused=True, capturable=True)
            with torch.cuda.graph(graph, stream=stream):
                update()
            _set_adam(self._optimizers(), fused=True)
            for _ in range(count - eager):
                graph.replay()
        for optimizer in self._optimizers():
            optimizer.zero_grad()  # gradients are in the graph's memory …
        torch.cuda.synchronize()  # … which goes with the graph, at the end of this function

    def _check_finite(self, count: int) -> None:
        """Raise a ValueError if the last `count` updates left NaN or infinity in a learned tensor. Synchronises once."""
        learned = [parameter for one in self._optimizers() for group in one.param_groups for parameter in group["params"]]
        if not bool(torch.stack([parameter.detach().isfinite().all() for parameter in learned]).all()):
            raise ValueError(
                f"sac: after {count} updates on a GPU, {self._n_updates} in all, actor, critics or entropy coefficient are NaN "
                f"or infinite, and replays of a graph cannot be skipped one by one. Lower `learner.rate`, or leave "
                f"`learner.device` at 'cpu', where the guard skips updates with a non-finite gradient."
            )

    def _optimizers(self) -> list[Optimizer]:
        learned = [] if self.ent_coef_optimizer is None else [self.ent_coef_optimizer]
        return [self.actor.optimizer, self.critic.optimizer, *learned]


def read_transitions(buffer: ReplayBuffer, device: torch.device | str) -> ReplayBufferSamples:
    """Read all transitions of a replay buffer onto a device, concatenated over environments [R ·].

    An end by a time limit is none, as when stable-baselines3 samples: d = done · (1 − timeout).
    """
    size = buffer.size()

    def rows(array: Any) -> Tensor:
        return torch.as_tensor(array[:size].reshape(size * buffer.n_envs, -1), device=device)

    ends = buffer.dones[:size] * (1 - buffer.timeouts[:size])
    parts = (buffer.observations, buffer.actions, buffer.next_observations, ends, buffer.rewards)
    return ReplayBufferSamples(*map(rows, parts))


def draw(transitions: ReplayBufferSamples, count: int) -> ReplayBufferSamples:
    """Draw `count` transitions uniformly with replacement, by the generator of their device."""
    index = torch.randint(len(transitions.rewards), (count,), device=transitions.rewards.device)
    return ReplayBufferSamples(*(part[index] for part in transitions if part is not None))


def _least(values: tuple[Tensor, ...]) -> Tensor:
    """Minimum over the critics' values, min_i Q_i [B 1]."""
    return torch.cat(values, dim=1).min(dim=1, keepdim=True).values


def _descend(optimizer: Optimizer, loss: Tensor) -> None:
    """Make a gradient step of an optimizer on a loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _set_adam(optimizers: Sequence[Optimizer], *, fused: bool, capturable: bool = False) -> None:
    """Switch Adam optimizers between the fused form, with step counters on the device, and torch's default.

    `capturable` is for the capture alone: torch warns of a step outside a graph by one that may be in it.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.update(fused=fused or None, capturable=capturable)
            for state in (optimizer.state[p] for p in group["params"] if p in optimizer.state):
                state["step"] = state["step"].to(group["params"][0].device if fused else "cpu")


@contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """Context in which torch.distributions does not check arguments, which would synchronise with the host."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
