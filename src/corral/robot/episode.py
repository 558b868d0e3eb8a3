"""Play plans or policies in vectorised environments, each episode to its end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, VectorEnv
from jaxtyping import Bool, Float
from torch import Tensor

from corral.robot.tracking import Array, Tracking
from corral.tensors import Tensors

Plan = Callable[[Array], tuple[Array, Array]]
"""Function that makes plans: observations [E O] → desired positions and velocities [E R D] of the next R steps."""

_INFO_KEYS = ("success", "event", "max_height")
"""Keys that are read from the info dictionary of an episode's last step."""

ELAPSED = "elapsed_share_is_last"
"""Key of a vector environment's metadata. True if the last observed number is the elapsed share of the episode, added by
corral."""

_CONTEXTS, PLANS, SEGMENTS, UPDATES, _HELD_OUT, STATISTICS = range(6)
"""Purposes of random numbers. Each purpose has its own random stream."""


@dataclass(frozen=True, eq=False)
class Episodes(Tensors):
    """Batch of E episodes of up to T steps. After the end of an episode, `mask` is False and rewards are 0."""

    observations: Float[Tensor, "E S O"]
    """Observations s_0 … s_T, so S = T + 1. After an early end, the last observation is repeated."""
    rewards: Float[Tensor, "E T"]
    mask: Bool[Tensor, "E T"]
    actions: Float[Tensor, "E T D"]
    """Actions after clipping, as the environment received them."""
    success: Float[Tensor, "E"]
    """`success` in the info of each episode's last step. NaN if the environment does not report it."""
    event: Float[Tensor, "E"]
    """Step of the event that decided later rewards, such as a take-off, from the last step's info. NaN if there is none."""
    max_height: Float[Tensor, "E"]
    """Greatest height of the hopper's torso in metres, from the last step's info. NaN if it is not reported."""

    @property
    def returns(self) -> Float[Tensor, "E"]:
        """Return of each episode: the sum of its rewards."""
        return self.rewards.sum(-1)


def episode_seeds(seed: int, iteration: int, count: int, purpose: int = _CONTEXTS) -> list[int]:
    """Seeds for one iteration and purpose. They depend on the arguments alone, so that a resumed run draws equal contexts."""
    return [int(value) for value in np.random.SeedSequence([seed, iteration, purpose]).generate_state(count)]


def held_out_seeds(count: int) -> list[int]:
    """Seeds of evaluation contexts, which are equal for all runs and algorithms and never used in training."""
    return episode_seeds(0, 0, count, _HELD_OUT)


class Plant:
    """Vectorised environments with the controller that makes their joints follow plans.

    At most one episode per environment is played at a time. Environments without an episode repeat the last one; their results
    are dropped.
    """

    def __init__(self, envs: VectorEnv, tracking: Tracking, steps: int) -> None:
        self.envs: Any = envs  # every vector environment takes a list of seeds, which its base class does not say
        self.tracking, self.steps = tracking, steps
        space = envs.single_observation_space
        if space.shape is None or len(space.shape) != 1:
            raise ValueError(
                f"Plant: observations must be flat; got {space}. gymnasium.wrappers.FlattenObservation makes them so."
            )
        mode = envs.metadata.get("autoreset_mode")
        if mode != AutoresetMode.NEXT_STEP:
            raise ValueError(
                f"Plant: an episode's last observation must be its own, so environments start anew with the next step; got "
                f"{mode}. Make them with autoreset_mode=AutoresetMode.NEXT_STEP, Gymnasium's default."
            )
        if max(tracking.joints[1], tracking.velocities[1]) > space.shape[0]:
            raise ValueError(
                f"Plant: `joints` and `velocities` lie within the observation's {space.shape[0]} numbers; got {tracking}."
            )
        actions = envs.single_action_space
        if not isinstance(actions, Box) or actions.shape != (tracking.dof,):
            raise ValueError(
                f"Plant: an action is one number for each of {tracking.dof} joints; the environment has {actions}."
            )
        if type(steps) is not int or steps < 1:
            raise ValueError(f"Plant: `steps` is a whole number ≥ 1; got {steps!r}.")
        self.observation_size, self.action_space, self._started = space.shape[0], actions, False
        self.elapsed_is_added = bool(envs.metadata.get(ELAPSED))

    def context(self, observation: Array) -> Array:
        """Check first observations [* O]. An elapsed share of 0 is appended if learners expect it."""
        given = np.asarray(observation, np.float64)
        own = self.observation_size - self.elapsed_is_added
        if self.elapsed_is_added and given.shape[-1:] == (own,):
            given = np.concatenate([given, np.zeros((*given.shape[:-1], 1))], -1)
        if given.shape[-1:] != (self.observation_size,):
            raise ValueError(f"Plant: an observation of this environment has {own} numbers; got {list(given.shape)}.")
        return given

    def rounds(self, count: int) -> list[slice]:
        """Slices of `count` episodes, each small enough to be played at the same time."""
        return [slice(first, min(first + self.envs.num_envs, count)) for first in range(0, count, self.envs.num_envs)]

    def start(self, seeds: Sequence[int], *, learned_from: bool = False) -> Array:
        """Begin episodes, at most one per environment, and return the first observations [E O], which are the contexts.

        Episodes that are `learned_from` may be played by another simulator; measurements are always MuJoCo's.
        """
        if not 1 <= len(seeds) <= self.envs.num_envs:
            raise ValueError(f"Plant: from 1 to {self.envs.num_envs} episodes at a time, one an environment; got {len(seeds)}.")
        options = {"episodes": len(seeds), "learned_from": learned_from}
        padded = [*seeds, *[seeds[-1]] * (self.envs.num_envs - len(seeds))]
        ours = self.envs.metadata.get("reset_options")  # of tasks that move all copies in one call
        observation, _ = self.envs.reset(seed=padded, options=options if ours else None)
        self._started = True
        return np.asarray(observation, np.float64)[: len(seeds)]

    def follow(self, context: Array, positions: Array, velocities: Array) -> Episodes:
        """Play episodes that follow the given plans [E T D], after `start` has begun them."""
        return self.follow_anew(context, lambda _: (positions, velocities), self.steps)

    def follow_anew(self, context: Array, plan: Plan, every: int) -> Episodes:
        """Play episodes with a new plan every `every` steps, made by `plan(observations)`, after `start` has begun them."""
        desired: tuple[Array, Array] = (np.empty(0), np.empty(0))

        def action(t: int, observation: Array) -> Array:
            nonlocal desired
            if t % every == 0:
                desired = plan(observation)
            return self.tracking.action(desired[0][:, t % every], desired[1][:, t % every], observation)

        return self.act(context, action)

    def act(self, context: Array, policy: Callable[[int, Array], Array]) -> Episodes:
        """Play episodes with the actions [E D] of `policy(t, observations)`, clipped, after `start` has begun them."""
        if not self._started:
            raise ValueError("Plant: episodes are played from their beginning, and once. Call `start` before each.")
        self._started = False
        space, steps, count = self.action_space, self.steps, len(context)
        idle = self.envs.num_envs - count  # environments without an episode repeat the last one's actions
        observations = np.repeat(context[:, None], steps + 1, 1)
        rewards, actions = np.zeros((count, steps)), np.zeros((count, steps, *space.shape))
        mask, last_info = np.zeros((count, steps), bool), {name: np.full(count, np.nan) for name in _INFO_KEYS}
        playing = np.ones(count, bool)
        for t in range(steps):
            # Actions in an episode that has ended do not count, and may be NaN.
            asked = np.where(playing[:, None], np.asarray(policy(t, observations[:, t])), 0.0)
            if np.isnan(asked).any():
                raise ValueError(f"Plant: the policy asked for NaN in step {t}. Have its parameters, or its plans, become NaN?")
            action = asked.clip(space.low, space.high).astype(space.dtype)
            observation, reward, terminated, truncated, info = self.envs.step(
                np.concatenate([action, np.repeat(action[-1:], idle, 0)])
            )
            over = (terminated | truncated)[:count] | (t == steps - 1)
            mask[:, t], actions[:, t] = playing, action
            rewards[:, t] = np.where(playing, reward[:count], 0.0)
            observations[:, t + 1] = np.where(playing[:, None], observation[:count], observations[:, t])
            for name in _INFO_KEYS:
                last_info[name] = np.where(playing & over, read_info(info, name, count + idle)[:count], last_info[name])
            playing &= ~over
            if not playing.any():
                observations[:, t + 2 :] = observations[:, t + 1, None]
                break
        check_finite(observations, rewards)
        return Episodes(*map(torch.from_numpy, (observations, rewards, mask, actions, *last_info.values())))

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()


def read_info(info: Mapping[str, Any], name: str, count: int) -> Array:
    """Read one key of a vector environment's info [E]. NaN for environments that lack the key.

    `success` may be called `is_success`, as in Gymnasium-Robotics.
    """
    if name == "success" and name not in info:
        name = "is_success"
    if name not in info:
        return np.full(count, np.nan)
    present = np.asarray(info.get(f"_{name}", True))  # Gymnasium's mask of who has the entry
    return np.where(present, np.asarray(info[name], float), np.nan)


def check_finite(observations: Array, rewards: Array) -> None:
    """Raise a ValueError if an observation or reward is NaN or infinite."""
    if not (np.isfinite(rewards).all() and np.isfinite(observations).all()):
        raise ValueError(
            "Plant: an environment returned NaN or infinite observations or rewards. Has its simulation become unstable?"
        )
