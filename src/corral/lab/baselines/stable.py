"""Step-based baselines of stable-baselines3, with the training and evaluation methods of corral's robot learners."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from corral.lab.baselines.config import BaselineConfig
from corral.robot.config import check_device
from corral.robot.episode import UPDATES, Episodes, Plant, check_finite, episode_seeds, read_info
from corral.robot.tracking import Array
from corral.validate import pip_install

try:
    from stable_baselines3 import PPO, SAC
    from stable_baselines3.common.utils import set_random_seed
    from stable_baselines3.common.vec_env import VecEnv

    from corral.lab.baselines.noise import EpisodeNoise, colour_actions
    from corral.lab.baselines.trpl import TRPL
except ImportError as error:
    raise ImportError(f"corral.lab.baselines.stable needs stable-baselines3: {pip_install('robot')}.") from error

BASELINES: dict[str, tuple[Any, Literal["white", "gsde", "coloured"]]] = {
    "sb3-ppo": (PPO, "white"),
    "sb3-ppo-gsde": (PPO, "gsde"),
    "sb3-ppo-pink": (PPO, "coloured"),
    "sb3-sac": (SAC, "white"),
    "sb3-sac-gsde": (SAC, "gsde"),
    "sb3-sac-pink": (SAC, "coloured"),
    "sb3-trpl": (TRPL, "white"),
}
"""Stable-baselines3 class and kind of exploration noise for each baseline's name.
White noise is drawn anew at every step, gSDE is a function of the state that is fixed throughout an episode, and coloured
noise is correlated from step to step."""
_REPLAY_SIZE = 1_000_000
"""Number of steps in SAC's replay buffer, stable-baselines3's default."""
REPLAY_FIELDS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


class Baseline:
    """Step-based policy of stable-baselines3, with the training and evaluation methods of corral's `Learner`.

    Actions are the environment's own, or with `controller_span` targets of the controller that plans have. An episode's end is
    an end: the time is part of the observation, so no value is expected beyond it. Training meets the contexts that TCE meets
    with the same seed, and everything random is a function of (seed, iteration).
    """

    def __init__(self, plant: Plant, algorithm: str, config: BaselineConfig, *, seed: int = 0) -> None:
        if algorithm not in BASELINES:
            raise ValueError(f"baseline: `algorithm` is one of {', '.join(BASELINES)}; got {algorithm!r}.")
        self.plant, self.name, self.config, self.seed, self.iteration = plant, algorithm, config, seed, 0
        check_device("baseline", config.device)
        self.envs = StepEnvironments(plant, config.episodes, seed, config.controller_span)
        kind, exploration = BASELINES[algorithm]
        settings: dict[str, Any] = {
            "learning_rate": config.rate,
            "gamma": config.gamma,
            "use_sde": exploration == "gsde",
            "device": config.device if kind is SAC else "cpu",
            "policy_kwargs": {"net_arch": list(config.hidden)},
        }
        if kind is SAC:
            each = plant.steps * self.envs.num_envs
            settings |= {
                "train_freq": (plant.steps, "step"),
                "gradient_steps": max(1, each * config.gradient_steps // config.train_freq),
                "learning_starts": each - 1,
                "buffer_size": min(_REPLAY_SIZE, config.iterations * config.episodes * plant.steps),
            }
        else:
            batch, odd = divmod(config.episodes * plant.steps, config.minibatches)
            if odd:
                raise ValueError(
                    f"baseline: {config.episodes} episodes of {plant.steps} steps do not divide into {config.minibatches} "
                    f"minibatches. Choose another number."
                )
            settings |= {"n_steps": plant.steps * self.envs.rounds, "batch_size": batch, "n_epochs": config.epochs}
        if kind is TRPL:
            settings["config"] = config
        with _seed_generators(episode_seeds(seed, 0, 1, UPDATES)[0], config.device):
            self.model = kind("MlpPolicy", self.envs, **settings)
        if exploration == "coloured":
            self.envs.noise = EpisodeNoise(config.noise_colour, plant.steps, plant.tracking.dof)
            colour_actions(self.model, self.envs.noise)

        policy, self.is_sac = self.model.policy, isinstance(self.model, SAC)
        self.networks: dict[str, torch.nn.Module] = {"policy": policy}
        self.optimizers = {"policy": (policy.actor if self.is_sac else policy).optimizer}
        if self.is_sac:
            self.optimizers |= {"critic": policy.critic.optimizer, "temperature": self.model.ent_coef_optimizer}

    @property
    def env_steps(self) -> int:
        """Number of steps of all environments since training began."""
        return int(self.model.num_timesteps)

    @property
    def updates(self) -> int:
        """Number of policy updates since training began."""
        return int(self.model._n_updates)

    def step(self) -> dict[str, float]:
        """Train on one batch of episodes and return its metrics."""
        self.envs.begin(self.iteration)
        self.model._last_obs = None  # so that it asks for the first observations of this batch
        seed = episode_seeds(self.seed, self.iteration, 1, UPDATES)[0]
        with _seed_generators(seed, self.config.device):
            self.model.action_space.seed(seed)
            self.model.learn(self.config.episodes * self.plant.steps, log_interval=None, reset_num_timesteps=False)
        self.iteration += 1
        if not self.envs.finished:
            raise ValueError(
                f"baseline: no episode ended within {self.plant.steps} steps, the length that the plant was given. Give it the "
                f"environment's own, or wrap the environment in gymnasium.wrappers.TimeLimit."
            )
        returns, success = torch.tensor(self.envs.finished, dtype=torch.float64).unbind(-1)
        found = {"env_steps": float(self.env_steps), "return": float(returns.mean()), "success": float(success.nanmean())}
        return found | (self.model.metrics if isinstance(self.model, TRPL) else {})

    def evaluate(self, seeds: list[int]) -> Episodes:
        """Play one episode per seed with the policy, without exploration."""
        return self._play(seeds, deterministic=True)

    def explore(self, seeds: list[int]) -> Episodes:
        """Play one episode per seed with the policy and the exploration of training."""
        with _seed_generators(seeds[0], self.config.device):
            return self._play(seeds, deterministic=False)

    def _play(self, seeds: list[int], *, deterministic: bool) -> Episodes:
        parts, noise = [], self.envs.noise
        for rows in self.plant.rounds(len(seeds)):
            first = self.plant.start(seeds[rows])
            if self.model.use_sde and not deterministic:
                (self.model.actor if self.is_sac else self.model.policy).reset_noise(len(first))
            if noise is not None:
                noise.begin(len(first))

            def act(_: int, seen: Array, first: Array = first) -> Array:
                action, _ = self.model.predict(seen.astype(np.float32), deterministic=deterministic)
                if noise is not None:
                    noise.advance(np.zeros(len(seen), bool))
                return self.envs.commands(action, first, seen)

            parts.append(self.plant.act(first, act))
        return Episodes.cat(parts)

    def state(self) -> dict[str, Any]:
        """Return a checkpoint of networks, counters and SAC's replay buffer, as a copy that later steps do not change."""
        state = {"iteration": self.iteration, "env_steps": self.env_steps, "updates": self.model._n_updates}
        state |= {"networks": self.model.get_parameters()}
        if self.is_sac:
            buffer = self.model.replay_buffer
            # The buffer's arrays are attributes, here and in `restore`.
            state |= {key: torch.from_numpy(getattr(buffer, key)[: buffer.size()]) for key in REPLAY_FIELDS}
            state |= {"log_ent_coef": self.model.log_ent_coef.detach()}
        return deepcopy(state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load the networks, counters and replay buffer of a checkpoint that `state` made."""
        self.iteration, self.model.num_timesteps = state["iteration"], state["env_steps"]
        self.model._n_updates = state["updates"]
        self.model.set_parameters(deepcopy(state["networks"]), exact_match=True, device=self.config.device)
        if self.is_sac:
            buffer, size = self.model.replay_buffer, len(state["rewards"])
            for key in REPLAY_FIELDS:
                getattr(buffer, key)[:size] = state[key].numpy()
            # A row holds one step of every environment; once all are taken, the oldest is written over.
            buffer.full, buffer.pos = size == buffer.buffer_size, self.env_steps // self.envs.num_envs % buffer.buffer_size
            self.model.log_ent_coef.data.copy_(state["log_ent_coef"])


@contextmanager
def _seed_generators(seed: int, device: str) -> Iterator[None]:
    """Seed the global generators that stable-baselines3 uses, and restore them when the context ends."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[] if device == "cpu" else [torch.cuda.current_device()]):
        set_random_seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)


class StepEnvironments(VecEnv):
    """Adapter of a `Plant` to stable-baselines3, in which an episode's last step also begins the next episode."""

    def __init__(self, plant: Plant, episodes: int, seed: int, controller_span: float | None = None) -> None:
        space, actions = plant.envs.single_observation_space, plant.envs.single_action_space
        self.plant, self.span = plant, controller_span
        self.noise: EpisodeNoise | None = None
        if controller_span is not None:
            actions = gymnasium.spaces.Box(-1.0, 1.0, (plant.tracking.dof,), np.float32)
        observed = gymnasium.spaces.Box(-np.inf, np.inf, space.shape, np.float32)
        self.envs, self.run_seed, self.finished = plant.envs, seed, list[tuple[float, float]]()
        super().__init__(plant.envs.num_envs, observed, actions)
        self.rounds, odd = divmod(episodes, self.num_envs)
        if odd or not self.rounds:
            raise ValueError(
                f"baseline: `episodes` must be a multiple of the {self.num_envs} environments; got {episodes}. Use as many "
                f"environments as episodes, or a divisor of them."
            )

    def commands(self, action: Array, first: Array, seen: Array) -> Array:
        """Convert a policy's actions to actions of the environments [E D].

            u = controller(y = q_first + span · a, ẏ = 0)        with a span; else u = a

        Args:
            action: within ±1 where there is a span.
            first, seen: the episodes' first observations, and the present ones [E O].
        """
        if self.span is None:
            return action
        tracking, space = self.plant.tracking, self.plant.action_space
        desired = tracking.state(first)[0] + self.span * np.clip(action, -1.0, 1.0)
        return tracking.action(desired, np.zeros_like(desired), seen).clip(space.low, space.high).astype(space.dtype)

    def begin(self, iteration: int) -> None:
        """Set the random seeds of the next batch's episodes, which determine their contexts."""
        self.finished.clear()
        seeds = episode_seeds(self.run_seed, iteration, self.rounds * self.num_envs)
        self._context_seeds = np.array(seeds).reshape(-1, self.num_envs)
        self._played = np.zeros(self.num_envs, int)

    def reset(self) -> Array:
        self._returns = np.zeros(self.num_envs)
        self._seen, _ = self.envs.reset(seed=self._next_seeds())
        self._first = self._seen.copy()
        if self.noise is not None:
            self.noise.begin(self.num_envs)
        return np.asarray(self._seen, np.float32)

    def step_async(self, actions: Array) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[Array, Array, NDArray[np.bool_], list[dict[str, Any]]]:
        commands = self.commands(self._actions, self._first, self._seen)
        self._seen, reward, terminated, truncated, info = self.envs.step(commands)
        observation, over = np.asarray(self._seen, np.float32), terminated | truncated
        check_finite(observation, reward)
        self._returns += reward
        infos: list[dict[str, Any]] = [{} for _ in over]
        if self.noise is not None:
            self.noise.advance(over)
        if over.any():
            success = read_info(info, "success", self.num_envs)
            for index in np.flatnonzero(over):
                infos[index] = {"terminal_observation": observation[index], "TimeLimit.truncated": False}
                self.finished.append((float(self._returns[index]), float(success[index])))
            self._returns[over] = 0.0
            self._played += over
            options = None if over.all() else {"reset_mask": over}
            fresh, _ = self.envs.reset(seed=self._next_seeds(), options=options)
            self._seen = np.where(over[:, None], fresh, self._seen)
            self._first = np.where(over[:, None], fresh, self._first)
            observation = np.asarray(self._seen, np.float32)
        return observation, np.asarray(reward, np.float32), over, infos

    def _next_seeds(self) -> list[int]:
        """Return the seeds of each environment's next episode.
        A batch's last step begins an extra episode, which is never played."""
        return [int(x) for x in self._context_seeds[self._played.clip(max=self.rounds - 1), np.arange(self.num_envs)]]

    def close(self) -> None:
        self.envs.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        # Asked for by stable-baselines3 itself when it looks for a render mode; nothing else is shared by all environments.
        return [getattr(self.envs, attr_name)] * self.envs.num_envs

    # VecEnv declares the next two abstract; nothing that trains here calls them.
    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError("StepEnvironments: environments keep the attributes they were made with.")

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **settings: Any) -> list[Any]:
        raise NotImplementedError("StepEnvironments: environments have no methods of their own here.")

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs
