"""Plans of many copies of a simulated task, played as one batch: physics on threads, observations and rewards in arrays."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from numpy.typing import NDArray

from corral.robot.env.vector import Threads
from corral.robot.tracking import Array, Tracking

_BLOCKS_PER_THREAD, _LEAST_BLOCK = 4, 4
"""Several blocks a thread, so that a slow one holds up little; several copies a block, which share the controller's calls."""
_PLAIN = (PassiveEnvChecker, OrderEnforcing, TimeLimit)
"""Wrappers that Gymnasium adds by itself: they change no number."""


class Recording(NamedTuple):
    """What E copies did in T steps of Δt, as the simulator says."""

    readings: Array
    """[E T R]; they begin as observations do, up to the joints and their velocities."""
    flags: NDArray[np.bool_]
    """What `move` returned [E T]."""
    actions: Array
    """[E T D], clipped."""


class Scored(NamedTuple):
    """A recording as Gymnasium would have told it, step by step."""

    observations: Array
    """After every step [E T O]."""
    rewards: Array
    """[E T]."""
    info: dict[str, Array]
    """Of the last step [E]."""


class Simulated(gymnasium.Env):
    """A task whose physics and whose rewards can be asked for apart, so that many copies share the arithmetic of the second."""

    STEPS: ClassVar[int]
    """T: steps of an episode."""
    time: int
    readings: Sequence[Array]
    """Views of the simulator's own memory; one after the other they are a row of `Recording.readings`."""

    @abstractmethod
    def move(self, action: Array) -> bool:
        """Simulate one Δt under an action [D] within its limits; returns the flag that `score` wants to know."""

    @staticmethod
    @abstractmethod
    def score(copies: Sequence[Any], recording: Recording) -> Scored:
        """Observations, rewards and the last info of whole episodes of these copies."""


def simulated_copies(envs: VectorEnv, steps: int) -> list[Simulated]:
    """The copies behind vectorised environments if their episodes of `steps` steps can be played as a batch; else none.

    They cannot where a wrapper stands between that may change what is seen or paid.
    """
    blocks = envs.blocks if isinstance(envs, Threads) else [envs]
    copies: list[Simulated] = []
    for block in blocks:
        for env in block.envs if isinstance(block, SyncVectorEnv) else [None]:
            while isinstance(env, _PLAIN):
                env = env.env
            if not isinstance(env, Simulated) or steps != env.STEPS:
                return []
            copies.append(env)
    return copies


def play_plans(
    envs: VectorEnv, copies: Sequence[Simulated], tracking: Tracking, context: Array, positions: Array, velocities: Array
) -> tuple[Recording, Scored]:
    """Whole episodes of plans [E T D] from the states that a reset has left, whose observations are `context` [E O].

    Every thread simulates a block of copies to the end, and needs Python's lock for a few per cent of that time.
    """
    count, steps, dof = positions.shape
    if any(copy.time for copy in copies):
        raise ValueError("play_plans: plans are followed from the beginning of an episode; reset the environments first.")
    width = sum(view.size for view in copies[0].readings)
    recording = Recording(np.empty((count, steps, width)), np.empty((count, steps), bool), np.empty((count, steps, dof)))
    space = envs.single_action_space
    assert isinstance(space, gymnasium.spaces.Box)

    def play(first: int) -> None:
        block = slice(first, min(first + size, count))
        readings, flags, actions = recording.readings[block], recording.flags[block], recording.actions[block]
        seen, moved = context[block], list(enumerate(copies[block]))
        for t in range(steps):
            wanted = tracking.action(positions[block, t], velocities[block, t], seen)
            if np.isnan(wanted).any():
                raise nan_in_step(t)
            actions[:, t] = wanted.clip(space.low, space.high).astype(space.dtype)
            for index, copy in moved:
                flags[index, t] = copy.move(actions[index, t])
                np.concatenate(copy.readings, out=readings[index, t])
            seen = readings[:, t]

    if isinstance(envs, Threads):
        size = max(_LEAST_BLOCK, -(-count // (_BLOCKS_PER_THREAD * len(envs.blocks))))
        list(envs.pool.map(play, range(0, count, size)))
    else:
        size = count
        play(0)
    return recording, copies[0].score(copies[:count], recording)


def nan_in_step(t: int) -> ValueError:
    """The error of a policy that does not know what it wants."""
    return ValueError(f"Plant: the policy asked for NaN in step {t}. Have its parameters, or its plans, become NaN?")
