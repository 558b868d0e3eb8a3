"""Plans or policies → episodes: every episode is played to its end, all environments at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, VectorEnv
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from corral.robot.tracking import Array, Tracking
from corral.robot.vector import Plan, Simulator, nan_in_step, play_plans, reset_each, simulated_copies

_Flags = NDArray[np.bool_]

_INFO_KEYS = ("success", "event")
"""Entries of the last step's info that are read."""

_CONTEXTS, PLANS, SEGMENTS, UPDATES, _HELD_OUT, STATISTICS = range(6)
"""What random numbers are for; each purpose has its own."""


@dataclass(frozen=True, eq=False)
class Episodes:
    """A batch of E episodes of up to T steps. Where `mask` is False an episode was already over, and rewards are 0."""

    observations: Float[Tensor, "E S O"]
    """s_0 … s_T, so S = T + 1; after an early end, the last one is repeated."""
    rewards: Float[Tensor, "E T"]
    mask: Bool[Tensor, "E T"]
    actions: Float[Tensor, "E T D"]
    """As the environment received them, after clipping."""
    success: Float[Tensor, "E"]
    """From the last step's info; NaN where the environment does not say."""
    event: Float[Tensor, "E"]
    """The same: the step in which something happened that decided what was paid later, such as a take-off."""

    @property
    def returns(self) -> Float[Tensor, "E"]:
        """Sums of rewards."""
        return self.rewards.sum(-1)

    @staticmethod
    def cat(parts: "Sequence[Episodes]") -> "Episodes":
        """One after the other."""
        # getattr: of its own fields
        return Episodes(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Episodes)))


def episode_seeds(seed: int, iteration: int, count: int, purpose: int = _CONTEXTS) -> list[int]:
    """Seeds of an iteration: a function of these numbers, so that a resumed run meets the same contexts."""
    return [int(value) for value in np.random.SeedSequence([seed, iteration, purpose]).generate_state(count)]


def held_out_seeds(count: int) -> list[int]:
    """Seeds of contexts for evaluation: the same for every run and every algorithm, and in no run's training."""
    return episode_seeds(0, 0, count, _HELD_OUT)


class Plant:
    """Vectorised environments and the controller that follows plans in them.

    Up to as many episodes as there are environments at a time. Environments without one repeat the last, and nobody looks.
    Another `simulator` than MuJoCo plays the plans that are learned from; what is measured is always MuJoCo's.
    """

    def __init__(self, envs: VectorEnv, tracking: Tracking, steps: int, simulator: Simulator | None = None) -> None:
        self.envs, self.tracking, self.steps = envs, tracking, steps
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
        if not all(first >= 0 and last <= space.shape[0] for first, last in (tracking.joints, tracking.velocities)):
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
        self.observation_size, self.action_space = space.shape[0], actions
        self._copies, self._simulator = simulated_copies(envs, steps), simulator
        if simulator is not None and not self._copies:
            raise ValueError(
                "Plant: another simulator than MuJoCo's plays plans of corral/HopperJump-v0 and corral/BoxPushing-v0, as they "
                "come and with mujoco 4.0 or newer. Leave it out."
            )

    def rounds(self, count: int) -> list[slice]:
        """Which of `count` episodes are played together."""
        return [slice(first, min(first + self.envs.num_envs, count)) for first in range(0, count, self.envs.num_envs)]

    def start(self, seeds: Sequence[int]) -> Array:
        """New episodes, at most one per environment; their first observations [E O] are the contexts."""
        if not 1 <= len(seeds) <= self.envs.num_envs:
            raise ValueError(f"Plant: from 1 to {self.envs.num_envs} episodes at a time, one an environment; got {len(seeds)}.")
        observation, _ = reset_each(self.envs, [*seeds, *[seeds[-1]] * (self.envs.num_envs - len(seeds))])
        return np.asarray(observation, np.float64)[: len(seeds)]

    def follow(self, context: Array, positions: Array, velocities: Array) -> Episodes:
        """Follow plans [E T D] from where `start` left off."""
        return self.follow_anew(context, lambda _: (positions, velocities), self.steps)

    def follow_anew(self, context: Array, plan: Plan, every: int, *, learned_from: bool = False) -> Episodes:
        """Follow plans that are made as the episodes go on, `plan(observations)` for the next `every` steps, from where `start`
        left off: as one batch where the task allows it, else step by step."""
        if self._copies:
            return self._play(context, plan, every, self._simulator if learned_from else None)
        positions: Array = np.empty(0)
        velocities: Array = positions

        def action(t: int, observation: Array) -> Array:
            nonlocal positions, velocities
            if t % every == 0:
                positions, velocities = plan(observation)
            return self.tracking.action(positions[:, t % every], velocities[:, t % every], observation)

        return self.act(context, action)

    def act(self, context: Array, policy: Callable[[int, Array], Array]) -> Episodes:
        """Let `policy(t, observations [E O])` choose the actions [E D] from where `start` left off; they are clipped."""
        space, steps, count = self.action_space, self.steps, len(context)
        observations = np.repeat(context[:, None], steps + 1, 1)
        rewards, actions = np.zeros((count, steps)), np.zeros((count, steps, space.shape[0]))
        mask, last_info = np.zeros((count, steps), bool), {name: np.full(count, np.nan) for name in _INFO_KEYS}
        playing = np.ones(count, bool)
        for t in range(steps):
            action = np.asarray(policy(t, observations[:, t])).clip(space.low, space.high).astype(space.dtype)
            if np.isnan(action[playing]).any():
                raise nan_in_step(t)
            observation, reward, over, info = self._step(action)
            mask[:, t], actions[:, t] = playing, np.where(playing[:, None], action, 0.0)
            rewards[:, t] = np.where(playing, reward, 0.0)
            observations[:, t + 1] = np.where(playing[:, None], observation, observations[:, t])
            for name in _INFO_KEYS:
                last_info[name] = np.where(playing & over, read_info(info, name, self.envs.num_envs)[:count], last_info[name])
            playing &= ~over
            if not playing.any():
                observations[:, t + 2 :] = observations[:, t + 1, None]
                break
        check_finite(observations, rewards)
        return Episodes(*map(torch.from_numpy, (observations, rewards, mask, actions, *last_info.values())))

    def _play(self, context: Array, plan: Plan, every: int, simulator: Simulator | None) -> Episodes:
        """What `act` returns of plans, of tasks whose episodes can be played as a batch."""
        actions, scored = play_plans(self.envs, self._copies, self.tracking, context, plan, every, simulator)
        observations = np.concatenate([context[:, None], scored.observations], 1)
        check_finite(observations, scored.rewards)
        mask = np.ones_like(scored.rewards, bool)
        last_info = (scored.info.get(name, np.full(len(context), np.nan)) for name in _INFO_KEYS)
        return Episodes(*map(torch.from_numpy, (observations, scored.rewards, mask, actions, *last_info)))

    def _step(self, action: Array) -> tuple[Array, Array, _Flags, dict[str, Any]]:
        """Observations, rewards, over or not, of the first len(action) environments, and the info of all."""
        count = len(action)
        filled = np.concatenate([action, np.repeat(action[-1:], self.envs.num_envs - count, 0)])
        observation, reward, terminated, truncated, info = self.envs.step(filled)
        return observation[:count], reward[:count], (terminated | truncated)[:count], info

    def close(self) -> None:
        """End the environments' processes."""
        self.envs.close()


def read_info(info: Mapping[str, Any], name: str, count: int) -> Array:
    """An entry of the info for each of `count` environments [E]; NaN where one does not have it."""
    if name not in info:
        return np.full(count, np.nan)
    present = np.asarray(info.get(f"_{name}", True))  # Gymnasium's mask of who has the entry
    return np.where(present, np.asarray(info[name], float), np.nan)


def check_finite(observations: Array, rewards: Array) -> None:
    """Refuse numbers that no policy can learn from, before they reach one."""
    if not (np.isfinite(rewards).all() and np.isfinite(observations).all()):
        raise ValueError(
            "Plant: an environment returned NaN or infinite observations or rewards. Has its simulation become unstable?"
        )
