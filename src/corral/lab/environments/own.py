"""Use of a user's own environment: a Gymnasium id or `module:Class`, and a `[tracking]` table that locates the joints."""

import importlib
import math
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec, registry
from gymnasium.spaces import Box
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from corral.lab.environments import Environment
from corral.lab.environments.drawing import Camera, picture
from corral.lab.environments.vector import Single, as_array, make_envs
from corral.lab.tasks.imports import by_path
from corral.robot.episode import ELAPSED
from corral.robot.tracking import Array, Tracking
from corral.validate import RunError, UserCodeError, number_in, run_errors, suggest

Maker = Any
"""Factory of an environment: a Gymnasium `EnvSpec`, or a subclass of `VectorEnv`, called with the number of copies."""

_HOW = 'docs/environments.md, "Your own environment", has an example'


def find_maker(name: str) -> Maker:
    """Find an environment's factory for a Gymnasium id, `module:Id-v0`, `module:Class` or `file.py:Class`."""
    module, colon, last = name.rpartition(":")
    if colon and last.isidentifier():
        with run_errors():
            found = by_path(name, "an environment of your own is module:Class or file.py:Class")
        if isinstance(found, type) and issubclass(found, VectorEnv):
            return found
        return EnvSpec(f"own/{last}-v0", entry_point=found)
    if colon:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise RunError(
                f"{name!r} is an id that the module {module} registers, which cannot be imported: {error}."
            ) from error
    if last not in registry:
        raise RunError(
            f"Gymnasium has no environment {last!r}.{suggest(last, registry)} One that a package registers is module:{last}, a "
            f"class of your own module:Class or file.py:Class."
        )
    return registry[last]


def probe(name: str, table: Mapping[str, Any], steps: int | None, dt: float | None, config: Mapping[str, Any]) -> Environment:
    """Describe a user's environment by making one copy of it. Raises an error if its joints could not follow a plan.

    Args:
        table: settings of the controller, in their types.
        steps, dt: of an episode and of a step in seconds; None for what Gymnasium has.
    """
    maker = find_maker(name)
    with closing(_make_copies(name, maker, 1, None, config, workers=1)) as one:
        observed, actions = one.single_observation_space, one.single_action_space
        if not isinstance(actions, Box) or len(actions.shape) != 1:
            raise RunError(
                f"{name}: an action is one number for each joint, from a Box of one axis; its actions are {actions}."
            )
        if not isinstance(observed, Box) or len(observed.shape) != 1:
            raise RunError(
                f"{name}: plans begin in observations that are one flat array; its are {observed}. Give a function of your "
                f"own, file.py:make, that returns the environment in gymnasium.wrappers.FlattenObservation."
            )
        if missing := [key for key in ("joints", "velocities") if key not in table]:
            raise RunError(
                f"{name}: where are the joints? `tracking.{missing[0]}` is a range [begin, end) of its observation, which has "
                f"{observed.shape[0]} numbers; there is one joint for each of {actions.shape[0]} actions. {_HOW}."
            )
        with run_errors():
            tracking = Tracking(**table)
        for key, (_, end) in (("joints", tracking.joints), ("velocities", tracking.velocities)):
            if end > observed.shape[0]:
                raise RunError(f"{name}: `tracking.{key}` ends at {end}; {observed.shape[0]} numbers are observed.")
        if actions.shape != (tracking.dof,):
            raise RunError(
                f"{name}: an action has {actions.shape[0]} numbers, and `tracking.joints` names {tracking.dof} joints. There "
                f"is one action for each joint, in the same order."
            )
        if tracking.command == "torque" and not np.any(tracking.p):
            raise RunError(f"{name}: with `tracking.p` of 0 no torque pulls a joint to its plan. Give it a gain. {_HOW}.")
        if steps is None and isinstance(maker, EnvSpec):
            steps = maker.max_episode_steps
        inner = one.envs[0].unwrapped if isinstance(one, gymnasium.vector.SyncVectorEnv) else one
        dt = getattr(inner, "dt", None) if dt is None else dt  # Gymnasium's MuJoCo tasks have it
        if steps is None or steps < 2:
            raise RunError(f"{name}: how long is an episode? `tracking.steps` is a whole number of at least 2; got {steps!r}.")
        if dt is None or not (number_in(dt, 0) and 0 < dt < math.inf):
            raise RunError(f"{name}: how long is a step? `tracking.dt` is in seconds, finite and > 0; got {dt!r}.")
        first, again = (Adapter(one, name, steps).reset(seed=[0])[0] for _ in range(2))
        if not np.array_equal(first, again):
            raise RunError(
                f"{name}: two resets with the seed 0 begin in different states, so nothing would be held out and no run would "
                f"repeat. Call super().reset(seed=seed), and draw from self.np_random alone."
            )
    return Environment(entry_point=name, steps=steps, dt=float(dt), tracking=tracking, maker=maker)


def make_own(name: str, maker: Maker, count: int, steps: int, config: Mapping[str, Any], workers: int | None) -> VectorEnv:
    """Make `count` copies of a user's environment, as one vector environment with the interface that learners expect."""
    return Adapter(_make_copies(name, maker, count, steps, config, workers), name, steps)


def _make_copies(
    name: str, maker: Maker, count: int, steps: int | None, config: Mapping[str, Any], workers: int | None
) -> VectorEnv:
    """Make copies of a user's environment without an adapter. Errors of the user's own code become a UserCodeError."""
    length: dict[str, Any] = {} if steps is None else {"max_episode_steps": steps}
    try:
        return (
            make_envs(maker, count, workers=workers, **config, **length)
            if isinstance(maker, EnvSpec)
            else maker(count, **config)
        )
    except Exception as error:  # an environment can fail in any way
        own = not (isinstance(maker, EnvSpec) and isinstance(maker.entry_point, str)) and not isinstance(error, ImportError)
        raise (UserCodeError if own else RunError)(f"{name} cannot be made: {error}") from error


class Adapter(VectorEnv):
    """Wrapper that gives a user's vector environment the interface that learners expect.

    Observations are arrays, with the elapsed share of the episode as the last number.

    Rewards are summed up to a fixed end, so what a state is worth depends on the time that is left.
    """

    def __init__(self, envs: VectorEnv, name: str, steps: int) -> None:
        self.envs, self.name, self.steps, self.num_envs = envs, name, steps, envs.num_envs
        space = envs.single_observation_space
        assert isinstance(space, Box)  # `probe` has looked
        self.single_observation_space = Box(np.append(space.low, 0.0), np.append(space.high, 1.0), dtype=np.float64)
        self.single_action_space, self.action_space = envs.single_action_space, envs.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.metadata = {**envs.metadata, ELAPSED: True}
        self._time, self._over = np.zeros(self.num_envs), np.zeros(self.num_envs, bool)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        mask = (options or {}).get("reset_mask", True)
        self._time, self._over = np.where(mask, 0.0, self._time), self._over & ~np.asarray(mask)
        observation, info = self._call("reset", lambda: self.envs.reset(seed=seed, options=options))
        return self._timed(observation), info

    def step(self, actions: Any) -> tuple[Array, Array, NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        observation, reward, *ends, info = self._call("step", lambda: self.envs.step(actions))
        terminated, truncated = (as_array(end).astype(bool) for end in ends)
        self._time, self._over = np.where(self._over, 0.0, self._time + 1.0), terminated | truncated
        info = {key: as_array(value) if isinstance(value, torch.Tensor) else value for key, value in info.items()}
        return self._timed(observation), as_array(reward).astype(np.float64), terminated, truncated, info

    def close_extras(self, **_: Any) -> None:
        self.envs.close()

    def _call(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # a user's environment can fail in any way
            raise UserCodeError(f"{self.name}: {what} raised {type(error).__name__}: {error}") from error

    def _timed(self, observation: Any) -> Array:
        seen = as_array(observation).astype(np.float64)
        return np.concatenate([seen, np.minimum(self._time / self.steps, 1.0)[:, None]], -1)


def make_film(name: str, maker: Maker, steps: int, config: Mapping[str, Any]) -> gymnasium.Env:
    """Make one copy of a user's environment that renders images. MuJoCo tasks are drawn without OpenGL.
    If MUJOCO_GL names a renderer, that renderer draws them."""
    try:
        if not isinstance(maker, EnvSpec):
            return Single(maker(1, render_mode="rgb_array", **config), "rgb_array")
        env = gymnasium.make(maker, max_episode_steps=steps, render_mode="rgb_array", **config)
    except Exception as error:  # as above
        raise RunError(f"{name} cannot be filmed: made with render_mode='rgb_array', it raised {error}") from error
    if hasattr(env.unwrapped, "mujoco_renderer") and "MUJOCO_GL" not in os.environ:  # isinstance would import MuJoCo for all
        return _Drawn(env)
    return env


class _Drawn(gymnasium.Wrapper):
    """Wrapper that renders Gymnasium's MuJoCo tasks without OpenGL.
    The camera looks from the side of the task's own camera, close to the bodies."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        found = self.env.reset(seed=seed, options=options)
        own: Any = self.unwrapped
        model, given, seen = own.model, own.mujoco_renderer.default_cam_config or {}, own.model.vis.global_
        # MuJoCo's azimuth is 90 where ours is 0, and its elevation is negative above the horizon.
        turn = given.get("azimuth", seen.azimuth) - 90.0, -given.get("elevation", seen.elevation)
        moving = (model.body_weldid[model.geom_bodyid] != 0) & (model.geom_rgba[:, 3] > 0)
        centres, radii = own.data.geom_xpos[moving], model.geom_rbound[moving, None]
        ends = np.stack([(centres - radii).min(0), (centres + radii).max(0)])
        width = 1.05 * float(np.linalg.norm(ends[1] - ends[0]))
        self._camera = Camera(centre=tuple(ends.mean(0).tolist()), width=width, azimuth=turn[0], elevation=turn[1])
        self._tracked = max(0, given.get("trackbodyid", 0))  # body 0, the world, stays
        self._from = own.data.xpos[self._tracked].copy()
        return found

    def render(self) -> Any:
        """Render the current scene as an image."""
        own: Any = self.unwrapped
        moved = np.add(self._camera.centre, own.data.xpos[self._tracked] - self._from)
        return picture(own.model, own.data, replace(self._camera, centre=tuple(moved.tolist())))
