"""Planned trajectories → episodes: every plan is followed to its end, all environments at once."""

from dataclasses import dataclass

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from jaxtyping import Bool, Float
from torch import Tensor

from corral.robot.tracking import Array, Tracking


@dataclass(frozen=True)
class Episodes:
    """What happened: E episodes of up to T steps. Where `mask` is False an episode was already over, and rewards are 0."""

    observations: Float[Tensor, "E S O"]
    """s_0 … s_T, so S = T + 1; after an early end, the last one is repeated."""
    rewards: Float[Tensor, "E T"]
    mask: Bool[Tensor, "E T"]
    actions: Float[Tensor, "E T D"]
    """As the environment received them, after clipping."""
    success: Float[Tensor, "E"]
    """From the last step's info; NaN where the environment does not say."""

    @property
    def returns(self) -> Float[Tensor, "E"]:
        """Sums of rewards."""
        return self.rewards.sum(-1)


def episode_seeds(seed: int, iteration: int, count: int) -> list[int]:
    """Seeds of an iteration's episodes: a function of both numbers, so that a resumed run meets the same contexts."""
    return [int(value) for value in np.random.SeedSequence([seed, iteration]).generate_state(count)]


class Plant:
    """Vectorised environments and the controller that follows plans in them."""

    def __init__(self, envs: VectorEnv, tracking: Tracking, steps: int) -> None:
        self.envs, self.tracking, self.steps = envs, tracking, steps
        space = envs.single_observation_space
        if space.shape is None or len(space.shape) != 1:
            raise ValueError(
                f"Plant: observations must be flat; got {space}. gymnasium.wrappers.FlattenObservation makes them so."
            )

    def start(self, seeds: list[int]) -> Array:
        """New episodes; their first observations [E O] are the contexts."""
        observation, _ = self.envs.reset(seed=seeds)
        return np.asarray(observation, np.float64)

    def follow(self, context: Array, positions: Array, velocities: Array) -> Episodes:
        """Follow plans [E T D] from where `start` left off."""
        low, high = self.envs.single_action_space.low, self.envs.single_action_space.high
        count, steps, dof = positions.shape
        observations = np.repeat(context[:, None], steps + 1, 1)
        rewards, actions = np.zeros((count, steps)), np.zeros((count, steps, dof))
        mask, success = np.zeros((count, steps), bool), np.full(count, np.nan)
        live = np.ones(count, bool)
        for t in range(steps):
            action = self.tracking.action(positions[:, t], velocities[:, t], observations[:, t]).clip(low, high)
            observation, reward, terminated, truncated, info = self.envs.step(
                action.astype(self.envs.single_action_space.dtype)
            )
            mask[:, t], actions[:, t] = live, np.where(live[:, None], action, 0.0)
            rewards[:, t] = np.where(live, reward, 0.0)
            observations[:, t + 1] = np.where(live[:, None], observation, observations[:, t])
            over = live & (terminated | truncated)
            if "success" in info and over.any():
                success[over] = np.asarray(info["success"], float)[over]
            live &= ~over
            if not live.any():
                observations[:, t + 2 :] = observations[:, t + 1, None]
                break
        return Episodes(*map(torch.from_numpy, (observations, rewards, mask, actions, success)))

    def close(self) -> None:
        """End the environments' processes."""
        self.envs.close()
