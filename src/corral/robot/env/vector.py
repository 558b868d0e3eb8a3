"""Many copies of an environment, stepped together on all cores."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import registry
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from corral.run.cores import cores

Array = NDArray[Any]


class Threads(VectorEnv):
    """Blocks of environments, each stepped by a thread of its own.

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
    ) -> tuple[Array, dict[str, Any]]:
        seeds = [seed + index for index in range(self.num_envs)] if isinstance(seed, int) else seed
        mask = (options or {}).get("reset_mask")

        def begin(block: VectorEnv, part: slice) -> tuple[Array, dict[str, Any]]:
            own = options
            if mask is not None:
                if not mask[part].any():  # Gymnasium refuses to begin none
                    return self._seen[part], {}
                own = {**(options or {}), "reset_mask": mask[part]}
            return reset_each(block, None if seeds is None else seeds[part], own)

        observations, infos = zip(*self._pool.map(begin, self.blocks, self._slices), strict=True)
        self._seen = np.concatenate(observations)
        return self._seen.copy(), self._join_infos(infos)

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        done = self._pool.map(lambda block, part: block.step(actions[part]), self.blocks, self._slices)
        *arrays, infos = zip(*done, strict=True)
        self._seen, rewards, terminated, truncated = map(np.concatenate, arrays)
        return self._seen.copy(), rewards, terminated, truncated, self._join_infos(infos)

    def close_extras(self, **_: Any) -> None:
        self._pool.shutdown()
        for block in self.blocks:
            block.close()

    def _join_infos(self, infos: Sequence[dict[str, Any]]) -> dict[str, Array]:
        """Infos of all blocks, key by key; zeros (and so False in the mask `_key`) where a block does not say."""
        whole: dict[str, Array] = {}
        for info, part in zip(infos, self._slices, strict=True):
            for key, value in info.items():
                whole.setdefault(key, np.zeros((self.num_envs, *value.shape[1:]), value.dtype))[part] = value
        return whole


def reset_each(envs: VectorEnv, seeds: list[int] | None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
    """Begin an episode in every environment, each from a seed of its own."""
    return envs.reset(seed=seeds, options=options)  # type: ignore[arg-type]  # all take a list; their base class says int


def make_envs(name: str, count: int, *, workers: int | None = None, **kwargs: Any) -> VectorEnv:
    """`count` copies of an environment, in the form that steps fastest.

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
