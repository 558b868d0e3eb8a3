"""Vectorised environments: tasks that step all copies in one call, and threads for any other environment."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec, registry
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from corral.cores import cores
from corral.robot.tracking import Array
from corral.validate import pip_install

AnyArray = NDArray[Any]
Simulator = Callable[[Any, int, int], Any]
"""Function that simulates copies of a MuJoCo model: (model, copies, threads) → a batch, at rest at time 0.
The batch is a `mujoco.batch.Batch` or an equivalent."""


def copies_metadata(dt: float, marks: str) -> dict[str, Any]:
    """Gymnasium metadata of a task with steps of `dt` seconds. `marks` explains the marks in the task's pictures."""
    return {
        "autoreset_mode": AutoresetMode.NEXT_STEP,
        "render_modes": ["rgb_array"],
        "render_fps": round(1 / dt),
        "render_marks": marks,
        "reset_options": ("episodes", "learned_from"),
    }


def make_envs(
    name: str | EnvSpec, count: int, *, workers: int | None = None, simulator: Simulator | None = None, **kwargs: Any
) -> VectorEnv:
    """Make `count` copies of an environment as one vector environment, with the fastest vectorisation that it supports.

    Tasks of ours move all copies in one call; any other environment is split among `workers` threads, one per core by default.
    Copy i draws from seed + i (or from the i-th of a list of seeds) in every form, and sees the same. A `simulator` other than
    MuJoCo plays the episodes that are learned from; measurements are always MuJoCo's.
    """
    if count < 1 or (workers is not None and workers < 1):
        raise ValueError(f"make_envs: `count` and `workers` are at least 1; got {count} and {workers}.")
    workers, spec = min(count, workers or cores()), registry.get(name) if isinstance(name, str) else name
    if spec is not None and spec.id.startswith("corral/") and spec.vector_entry_point:
        envs = gymnasium.make_vec(name, count, vectorization_mode="vector_entry_point", workers=workers, **kwargs)
        if simulator is not None:
            if not isinstance(envs.unwrapped, SimulatedCopies):
                raise ValueError(f"make_envs: another simulator than MuJoCo's cannot play {name}, which MuJoCo does not play.")
            envs.unwrapped.simulator = simulator
        return envs
    if simulator is not None:
        raise ValueError(f"make_envs: another simulator than MuJoCo's plays hopper jump and box pushing alone; got {name}.")
    sizes = [count // workers + (index < count % workers) for index in range(workers)]
    blocks = [gymnasium.make_vec(name, size, vectorization_mode="sync", **kwargs) for size in sizes]
    return Threads(blocks) if workers > 1 else blocks[0]


class Copies(VectorEnv):
    """Vector environment that steps all copies of a task together. All episodes have the same fixed length.

    As in `SyncVectorEnv`, copy i draws from seed + i, and the step after an episode's last one begins the next episode.
    """

    STEPS: ClassVar[int]
    """Number T of steps per episode."""
    REWARDS: ClassVar[tuple[str, ...]]
    """Allowed values of the environment's setting `reward`."""

    def __init__(self, num_envs: int, reward: str, observed: int, actions: int, max_episode_steps: int) -> None:
        name = type(self).__name__
        if reward not in self.REWARDS:
            raise ValueError(f"{name}: `reward` is {' or '.join(map(repr, self.REWARDS))}; got {reward!r}.")
        if max_episode_steps != self.STEPS:  # Gymnasium passes what was registered
            raise ValueError(f"{name}: episodes have {self.STEPS} steps; got max_episode_steps={max_episode_steps}.")
        self.num_envs, self.reward = num_envs, reward
        self.time = 0  # steps since the episodes began
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (observed,), np.float64)
        self.single_action_space = gymnasium.spaces.Box(-1.0, 1.0, (actions,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._generators = [np.random.default_rng() for _ in range(num_envs)]

    @abstractmethod
    def begin(self, generators: Sequence[np.random.Generator]) -> None:
        """Begin a new episode in every copy, drawn by the copy's own random generator."""

    @abstractmethod
    def move(self, actions: Array) -> Array:
        """Advance all copies by one time step Δt, with actions [E D] within their limits. Returns rewards [E]."""

    @abstractmethod
    def observe(self) -> Array:
        """Return the observation of each copy [E O]."""

    @abstractmethod
    def outcome(self) -> dict[str, Array]:
        """Return the info of an episode's last step, as one array [E] per key."""

    def reset(
        self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        name = type(self).__name__
        if seed is not None:
            seeds = [seed + index for index in range(self.num_envs)] if isinstance(seed, int) else seed
            if len(seeds) != self.num_envs:
                raise ValueError(f"{name}: one seed for each of {self.num_envs} copies; got {len(seeds)}.")
            self._generators = [gymnasium.utils.seeding.np_random(one)[0] for one in seeds]
        if options and not np.all(options.get("reset_mask", True)):
            raise ValueError(f"{name}: copies start and end together; got a `reset_mask` that leaves some out.")
        self.time = 0
        self.begin(self._generators)
        return self.observe(), {}

    def step(self, actions: Array) -> tuple[Array, Array, NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        nobody = np.zeros(self.num_envs, bool)
        if self.time == self.STEPS:
            return self.reset()[0], np.zeros(self.num_envs), nobody, nobody.copy(), {}
        self.time += 1
        rewards = self.move(np.clip(np.asarray(actions, np.float64), -1.0, 1.0))
        over = self.time == self.STEPS
        return self.observe(), rewards, nobody, nobody | over, self.outcome() if over else {}


class SimulatedCopies(Copies):
    """Vector environment whose copies MuJoCo simulates as one batch, on several threads.

    Options of `reset`: `episodes`, how many copies play, and `learned_from`, whether another simulator plays them, if any.
    """

    FIELDS: ClassVar[tuple[str, ...]]
    """Names of the MjData fields that the task reads, beyond positions and velocities."""
    simulator: Simulator | None = None
    batch: Any
    rows: NDArray[np.integer] | None = None
    """Indices of the copies in which episodes are played. None if all copies are played."""

    def __init__(self, model: Any, workers: int, num_envs: int, *settings: Any) -> None:
        super().__init__(num_envs, *settings)
        try:
            from mujoco.batch import Batch
        except ImportError as error:
            raise ImportError(f"{type(self).__name__} needs mujoco 4.0 or newer: {pip_install('robot')}.") from error
        self.model, self.workers, self._mujoco = model, workers, Batch

    def reset(
        self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        given = options or {}
        other = self.simulator if given.get("learned_from") else None
        self.batch = (other or self._mujoco)(self.model, self.num_envs, self.workers)
        playing = given.get("episodes", self.num_envs)
        self.rows = None if playing == self.num_envs else np.arange(playing)
        for name in self.FIELDS:
            self.batch.bind(name)  # before they are computed: they are 0 until then
        return super().reset(seed=seed, options=options)

    def first(self) -> Any:
        """MuJoCo data (MjData) of the first copy, to render a picture."""
        import mujoco

        data = self.batch.get_data(0)
        mujoco.mj_forward(self.model, data)
        return data


class Single(gymnasium.Env):
    """Single environment around a vector environment with one copy, of arrays or of torch tensors."""

    def __init__(self, copies: Any, render_mode: str | None = None) -> None:
        self.copies, self.render_mode, self.metadata = copies, render_mode, copies.metadata
        self.observation_space, self.action_space = copies.single_observation_space, copies.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        observations, info = self.copies.reset(seed=None if seed is None else [seed])
        return as_array(observations)[0], info

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        *found, info = self.copies.step(np.asarray(action)[None])
        observation, reward, terminated, truncated = (as_array(part)[0] for part in found)
        read = {key: as_array(value)[0] for key, value in info.items() if not key.startswith("_")}
        return observation, float(reward), bool(terminated), bool(truncated), read

    def render(self) -> Any:
        """Render the single copy as a picture."""
        picture = self.copies.render()
        return as_array(picture[0] if isinstance(picture, tuple | list) else picture)

    def close(self) -> None:
        self.copies.close()


def as_array(x: Any) -> AnyArray:
    """Convert a tensor on any device, or any other array-like value, to a NumPy array."""
    return x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)


class Threads(VectorEnv):
    """Vector environment that joins several smaller vector environments, each stepped in its own thread.

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
            if mask is not None and not mask[part].any():  # Gymnasium refuses to begin none
                return self._seen[part], {}
            own = options if mask is None else {**(options or {}), "reset_mask": mask[part]}
            return block.reset(seed=None if seeds is None else seeds[part], options=own)  # type: ignore[arg-type]  # takes a list

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
        """Join the infos of all threads, key by key. A missing key becomes zeros, and False in the mask `_key`."""
        whole: dict[str, AnyArray] = {}
        for info, part in zip(infos, self._slices, strict=True):
            for key, value in info.items():
                whole.setdefault(key, np.zeros((self.num_envs, *value.shape[1:]), value.dtype))[part] = value
        return whole
