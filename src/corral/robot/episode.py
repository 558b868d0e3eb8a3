"""Vectorised simulation of whole episodes, in which robots follow plans or act by a step-based policy."""

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
"""Function that turns observations [E O] into plans: desired positions and velocities [E R D] of the next R steps."""

_INFO_KEYS = ("success", "event", "max_height")
"""Keys that are read from the `info` dictionary of an episode's last step."""

ELAPSED = "elapsed_share_is_last"
"""Metadata key of a vector environment: True if corral appended the elapsed share of the episode to observations."""

_CONTEXTS, PLANS, SEGMENTS, UPDATES, _HELD_OUT, STATISTICS = range(6)
"""Identifiers of independent random streams, one for each purpose, such as drawing contexts or evaluating."""


@dataclass(frozen=True, eq=False)
class Episodes(Tensors):
    """Batch of E episodes of up to T steps. After the end of an episode, `mask` is False and rewards are 0."""

    observations: Float[Tensor, "E S O"]
    """Observations s_0 … s_T of each episode, S = T + 1 in number. After an early end, the last observation is repeated."""
    rewards: Float[Tensor, "E T"]
    mask: Bool[Tensor, "E T"]
    actions: Float[Tensor, "E T D"]
    """Actions as the environment received them, after clipping to its limits."""
    success: Float[Tensor, "E"]
    """1 for episodes that end in success, 0 for failures, and NaN if the environment does not report success."""
    event: Float[Tensor, "E"]
    """Step of an event that decided later rewards, such as a take-off, for each episode. NaN without such an event.
    It comes from the last step's info."""
    max_height: Float[Tensor, "E"]
    """Greatest height of the hopper's torso in metres in each episode. NaN if the environment does not report it."""

    @property
    def returns(self) -> Float[Tensor, "E"]:
        """Return of each episode: the sum of its rewards."""
        return self.rewards.sum(-1)


def episode_seeds(seed: int, iteration: int, count: int, purpose: int = _CONTEXTS) -> list[int]:
    """Compute seeds of `count` episodes from the arguments alone, so that a resumed run draws the same contexts."""
    return [int(value) for value in np.random.SeedSequence([seed, iteration, purpose]).generate_state(count)]


def held_out_seeds(count: int) -> list[int]:
    """Compute the seeds of evaluation contexts, equal for all runs and algorithms and never used in training."""
    return episode_seeds(0, 0, count, _HELD_OUT)


class Plant:
    """Vectorised environments, with the tracking controller that makes their joints follow plans.

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
        """Check the first observations [* O] of episodes. Appends an elapsed share of 0 if learners expect it."""
        given = np.asarray(observation, np.float64)
        own = self.observation_size - self.elapsed_is_added
        if self.elapsed_is_added and given.shape[-1:] == (own,):
            given = np.concatenate([given, np.zeros((*given.shape[:-1], 1))], -1)
        if given.shape[-1:] != (self.observation_size,):
            raise ValueError(f"Plant: an observation of this environment has {own} numbers; got {list(given.shape)}.")
        return given

    def rounds(self, count: int) -> list[slice]:
        """Split `count` episodes into slices that fit the number of environments, to be played one slice after the other."""
        return [slice(first, min(first + self.envs.num_envs, count)) for first in range(0, count, self.envs.num_envs)]

    def start(self, seeds: Sequence[int], *, learned_from: bool = False) -> Array:
        """Begin one episode per seed, at most one per environment, and return their first observations [E O], the contexts.

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
        """Play episodes in which the joints follow the given plans [E T D]. Call `start` first."""
        return self.follow_anew(context, lambda _: (positions, velocities), self.steps)

    def follow_anew(self, context: Array, plan: Plan, every: int) -> Episodes:
        """Play episodes with a new plan from `plan(observations)` every `every` steps. Call `start` first."""
        desired: tuple[Array, Array] = (np.empty(0), np.empty(0))

        def action(t: int, observation: Array) -> Array:
            nonlocal desired
            if t % every == 0:
                desired = plan(observation)
            return self.tracking.action(desired[0][:, t % every], desired[1][:, t % every], observation)

        return self.act(context, action)

    def act(self, context: Array, policy: Callable[[int, Array], Array]) -> Episodes:
        """Play episodes with the clipped actions [E D] of `policy(t, observations)`. Call `start` first."""
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
        """Close the vectorised environments."""
        self.envs.close()


def read_info(info: Mapping[str, Any], name: str, count: int) -> Array:
    """Read the entry `name` of a vector environment's info as an array [E]. NaN for environments that lack the entry.

    `success` may be called `is_success`, as in Gymnasium-Robotics.
    """
    if name == "success" and name not in info:
        name = "is_success"
    if name not in info:
        return np.full(count, np.nan)
    present = np.asarray(info.get(f"_{name}", True))  # Gymnasium's mask of who has the entry
    return np.where(present, np.asarray(info[name], float), np.nan)


def check_finite(observations: Array, rewards: Array) -> None:
    """Raise a ValueError if an observation or a reward is NaN or infinite."""
    if not (np.isfinite(rewards).all() and np.isfinite(observations).all()):
        raise ValueError(
            "Plant: an environment returned NaN or infinite observations or rewards. Has its simulation become unstable?"
        )
