"""Copies of an environment that simulate whole episodes together, on threads or as one batch."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
from gymnasium.envs.registration import registry
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from numpy.typing import NDArray

from corral.cores import cores
from corral.robot.tracking import Array, Tracking

try:
    from mujoco.batch import Batch
except ImportError:  # MuJoCo before 4.0, or none, which the planar arm does not need: plans are then followed step by step
    Batch = None

AnyArray = NDArray[Any]
Plan = Callable[[Array], tuple[Array, Array]]
"""Observations [E O] → the desired positions and velocities [E R D] of the next R steps."""
Simulator = Callable[[Any, int, int], Any]
"""Factory of batches: (MjModel, copies, threads) → a `mujoco.batch.Batch` or its equal, at rest at time 0."""

_PLAIN = (PassiveEnvChecker, OrderEnforcing, TimeLimit)
"""Wrappers that Gymnasium adds by default and that change no number."""
_STATE = ("qpos", "qvel", "mocap_pos", "mocap_quat")
"""Fields of MjData that a reset sets."""


def make_envs(name: str, count: int, *, workers: int | None = None, **kwargs: Any) -> VectorEnv:
    """Make `count` copies of an environment, in the form that steps fastest.

    An environment of ours that moves all copies in one array does so; any other is split among `workers` threads, one per core
    by default. Copy i draws from seed + i (or from the i-th of a list of seeds) in every form, and sees the same.
    """
    if count < 1 or (workers is not None and workers < 1):
        raise ValueError(f"make_envs: `count` and `workers` are at least 1; got {count} and {workers}.")
    spec = registry.get(name)
    if name.startswith("corral/") and spec is not None and spec.vector_entry_point:
        return gymnasium.make_vec(name, count, vectorization_mode="vector_entry_point", **kwargs)
    workers = min(count, workers or cores())
    sizes = [count // workers + (index < count % workers) for index in range(workers)]
    blocks = [gymnasium.make_vec(name, size, vectorization_mode="sync", **kwargs) for size in sizes]
    return Threads(blocks) if workers > 1 else blocks[0]


class Threads(VectorEnv):
    """Blocks of environments, each stepped in its own thread.

    MuJoCo lets other threads run while it simulates, so two threads keep two cores busy, without the pipes, the pickling and
    the start-up of processes. Numbers do not depend on the blocks: every environment has its own state and generator.
    """

    def __init__(self, blocks: Sequence[VectorEnv]) -> None:
        self.blocks, self.num_envs = list(blocks), sum(block.num_envs for block in blocks)
        first = self.blocks[0]
        self.single_observation_space, self.single_action_space = first.single_observation_space, first.single_action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {**first.metadata, "autoreset_mode": AutoresetMode.NEXT_STEP}
        self._slices = [slice(*ends) for ends in pairwise(accumulate((block.num_envs for block in blocks), initial=0))]
        self._pool = ThreadPoolExecutor(len(self.blocks))

    def reset(
        self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[AnyArray, dict[str, Any]]:
        seeds = [seed + index for index in range(self.num_envs)] if isinstance(seed, int) else seed
        mask = (options or {}).get("reset_mask")

        def begin(block: VectorEnv, part: slice) -> tuple[AnyArray, dict[str, Any]]:
            own = options
            if mask is not None:
                if not mask[part].any():  # Gymnasium refuses to begin none
                    return self._seen[part], {}
                own = {**(options or {}), "reset_mask": mask[part]}
            return reset_each(block, None if seeds is None else seeds[part], own)

        observations, infos = zip(*self._pool.map(begin, self.blocks, self._slices), strict=True)
        self._seen = np.concatenate(observations)
        return self._seen.copy(), self._join_infos(infos)

    def step(self, actions: AnyArray) -> tuple[AnyArray, AnyArray, AnyArray, AnyArray, dict[str, Any]]:
        done = self._pool.map(lambda block, part: block.step(actions[part]), self.blocks, self._slices)
        *arrays, infos = zip(*done, strict=True)
        self._seen, rewards, terminated, truncated = map(np.concatenate, arrays)
        return self._seen.copy(), rewards, terminated, truncated, self._join_infos(infos)

    def close_extras(self, **_: Any) -> None:
        self._pool.shutdown()
        for block in self.blocks:
            block.close()

    def _join_infos(self, infos: Sequence[dict[str, Any]]) -> dict[str, AnyArray]:
        """Join the infos of all blocks, key by key; a missing key becomes zeros (and False in the mask `_key`)."""
        whole: dict[str, AnyArray] = {}
        for info, part in zip(infos, self._slices, strict=True):
            for key, value in info.items():
                whole.setdefault(key, np.zeros((self.num_envs, *value.shape[1:]), value.dtype))[part] = value
        return whole


def reset_each(
    envs: VectorEnv, seeds: list[int] | None, options: dict[str, Any] | None = None
) -> tuple[AnyArray, dict[str, Any]]:
    """Begin an episode in every environment, each with its own seed."""
    return envs.reset(seed=seeds, options=options)  # type: ignore[arg-type]  # all take a list; their base class says int


class Scored(NamedTuple):
    """Per-step results of whole episodes, as `env.step` returns them."""

    observations: Array
    """Observations after every step [E T O]."""
    rewards: Array
    """Rewards of every step [E T]."""
    info: dict[str, Array]
    """Info of the last step [E]."""


class Simulated(gymnasium.Env):
    """A task with separate functions for physics and rewards, so that many copies share each call."""

    STEPS: ClassVar[int]
    """T: steps of an episode."""
    FIELDS: ClassVar[tuple[str, ...]]
    """Fields of MjData that `advance` reads besides the state."""
    data: Any
    """MjData of a copy that steps alone; a batch begins from the state after its reset."""
    time: int

    @staticmethod
    @abstractmethod
    def batch_model() -> Any:
        """MjModel of a batch: the model of a single copy, perhaps with more sensors."""

    @staticmethod
    @abstractmethod
    def advance(batch: Any, actions: Array) -> Sequence[Array]:
        """Simulate one Δt of all copies under actions [E D] within their limits.

        Returns:
            Readings, arrays [E ·] that one after the other begin as observations do, up to the joints and their velocities.
        """

    @staticmethod
    @abstractmethod
    def observations(copies: Sequence[Any], readings: Array, steps: NDArray[np.integer]) -> Array:
        """Observations [E S O] after some steps, counted from 1 [S], from the readings of those steps [E S R]."""

    @staticmethod
    @abstractmethod
    def score(copies: Sequence[Any], readings: Array, actions: Array) -> Scored:
        """Observations, rewards and the last info of whole episodes, from all readings [E T R] and actions [E T D]."""


def simulated_copies(envs: VectorEnv, steps: int) -> list[Simulated]:
    """List the copies behind vectorised environments if a batch can play episodes of `steps` steps; otherwise an empty list.

    A batch cannot if a wrapper may change observations or rewards, nor without MuJoCo's batch.
    """
    copies: list[Simulated] = []
    for block in envs.blocks if isinstance(envs, Threads) else [envs]:
        for env in block.envs if isinstance(block, SyncVectorEnv) else [None]:
            while isinstance(env, _PLAIN):
                env = env.env
            if Batch is None or not isinstance(env, Simulated) or steps != env.STEPS:
                return []
            copies.append(env)
    return copies


def play_plans(
    envs: VectorEnv,
    copies: Sequence[Simulated],
    tracking: Tracking,
    context: Array,
    plan: Plan,
    every: int,
    simulator: Simulator | None = None,
) -> tuple[Array, Scored]:
    """Play whole episodes from the states after a reset, whose observations are `context` [E O].

    Python's lock is free while the batch simulates: one call a step moves all copies on as many threads as `envs` has.

    Args:
        plan: called at every `every`-th step.
        simulator: other than MuJoCo's own batch.
    Returns:
        Actions [E T D], clipped, and the episodes' results.
    """
    count, copies = len(context), copies[: len(context)]
    if any(copy.time for copy in copies):
        raise ValueError("play_plans: plans are followed from the beginning of an episode; reset the environments first.")
    space, task = envs.single_action_space, type(copies[0])
    assert isinstance(space, gymnasium.spaces.Box)
    batch = (simulator or Batch)(task.batch_model(), count, len(envs.blocks) if isinstance(envs, Threads) else 1)
    for name in _STATE:
        batch.bind(name)[:] = [getattr(copy.data, name) for copy in copies]  # the same fields of both, by name
    for name in task.FIELDS:
        batch.bind(name)  # before they are computed: they are 0 until then
    batch.forward()
    actions, readings, seen = np.empty((count, task.STEPS, *space.shape)), list[Array](), context
    for t in range(task.STEPS):
        if t % every == 0:
            now = task.observations(copies, seen[:, None], np.array([t]))[:, 0] if t else context
            positions, velocities = plan(now)
        wanted = tracking.action(positions[:, t % every], velocities[:, t % every], seen)
        if np.isnan(wanted).any():
            raise nan_in_step(t)
        actions[:, t] = wanted.clip(space.low, space.high).astype(space.dtype)
        seen = np.concatenate(task.advance(batch, actions[:, t]), -1)
        readings.append(seen)
    return actions, task.score(copies, np.stack(readings, 1), actions)


def nan_in_step(t: int) -> ValueError:
    """The error for an action that is NaN."""
    return ValueError(f"Plant: the policy asked for NaN in step {t}. Have its parameters, or its plans, become NaN?")
