"""Environments as stable-baselines3 steps them: a run's contexts and, if asked, the controller of plans in between."""

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from corral.robot.coloured_noise import EpisodeNoise
from corral.robot.env.vector import reset_each
from corral.robot.episode import Plant, check_finite, episode_seeds, read_info
from corral.robot.tracking import Array


class StepEnvironments(VecEnv):
    """A `Plant`'s environments as stable-baselines3 wants them: what is over starts anew in the same step."""

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
        """The environments' actions [E D] for those of a policy [E D].

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
        """The contexts of this batch come next."""
        self.finished.clear()
        seeds = episode_seeds(self.run_seed, iteration, self.rounds * self.num_envs)
        self._context_seeds = np.array(seeds).reshape(-1, self.num_envs)
        self._played = np.zeros(self.num_envs, int)

    def reset(self) -> Array:
        self._returns = np.zeros(self.num_envs)
        self._seen, _ = reset_each(self.envs, self._next_seeds())
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
            fresh, _ = reset_each(self.envs, self._next_seeds(), options)
            self._seen = np.where(over[:, None], fresh, self._seen)
            self._first = np.where(over[:, None], fresh, self._first)
            observation = np.asarray(self._seen, np.float32)
        return observation, np.asarray(reward, np.float32), over, infos

    def _next_seeds(self) -> list[int]:
        """Of each environment's next episode; one more than the batch holds begins in its last step, and is never played."""
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
