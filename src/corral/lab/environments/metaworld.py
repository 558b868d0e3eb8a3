"""Meta-World's manipulation tasks, with four position-controlled joints: three axes of the hand, and the gripper.

An action is where the hand should be (m) and how the gripper is driven (−1 opens, 1 closes). Per step of 0.0125 s the hand's
guide m moves towards it by at most 1 cm on each axis, as Meta-World's own action of ±1 does:

    a_xyz = clip(100 (desired − m), −1, 1)     a_gripper = clip(desired, −1, 1)

Observation, 48 numbers: guide (x, y, z) and right finger (0 m open, 0.04 m closed), their velocities, Meta-World's 39 (goal
included), elapsed share. A plan begins at the finger, near 0, as in the published wrapper: from the command −1, with which
Meta-World opens the gripper, the recipe's first plans never reach a command that closes it.

Reward is Meta-World's, of each step; success is that of the last one.

Yu et al., "Meta-World: A Benchmark and Evaluation for Multi-Task and Meta Reinforcement Learning", 2019.
"""

import math
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import gymnasium
import mujoco
import numpy as np
from numpy.typing import NDArray

from corral.robot.tracking import Array

STEPS, DT, _GAIN = 500, 0.0125, 100.0
_FINGER = "r_close"
"""Name of the right finger's slide joint in Meta-World. The left finger mirrors the right finger."""


def task_names() -> list[str]:
    """Return the names of all tasks of Meta-World v3."""
    return sorted(_metaworld().ALL_V3_ENVIRONMENTS)


class MetaWorld(gymnasium.Env):
    """Environment for a task of Meta-World v3. Positions of object and goal are drawn anew in every episode."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": round(1 / DT), "render_marks": "red: goal"}  # noqa: RUF012  # Gymnasium's own form
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (48,), np.float64)

    def __init__(self, task: str = "reach-v3", render_mode: str | None = None) -> None:
        classes = _metaworld().ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE
        if f"{task}-goal-observable" not in classes:
            raise ValueError(f"MetaWorld: no task {task!r}; there are {', '.join(task_names())}.")
        self.inner = quickened(classes[f"{task}-goal-observable"](seed=0))
        self.inner._freeze_rand_vec, self.inner.seeded_rand_vec = False, True  # a new draw per reset, from the seeded generator
        self.render_mode, self.time = render_mode, 0
        self.action_space = gymnasium.spaces.Box(
            np.array([*self.inner.mocap_low, -1.0], np.float32), np.array([*self.inner.mocap_high, 1.0], np.float32)
        )
        self.position: Array = np.zeros(4)
        self.velocity: Array = np.zeros(4)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.inner.seed(int(self.np_random.integers(2**31)))
        seen, _ = self.inner.reset()
        self.time, self.position, self.velocity = 0, self._state(), np.zeros(4)
        return self._observation(seen), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        desired = np.asarray(action, np.float64)
        command = np.clip(np.append(_GAIN * (desired[:3] - self.position[:3]), desired[3]), -1.0, 1.0)
        seen, reward, _, _, info = self.inner.step(command)
        self.time += 1
        before, self.position = self.position, self._state()
        self.velocity = (self.position - before) / DT
        over = self.time == STEPS
        return self._observation(seen), float(reward), False, over, {"success": float(info["success"])} if over else {}

    def render(self) -> NDArray[np.uint8]:
        """Render the table, the robot with boxes for its meshes, and the target as a cross, at 480 × 360 pixels."""
        from corral.lab.environments.drawing import Camera, picture

        camera = Camera(centre=(0.0, 0.6, 0.25), width=1.6, azimuth=155.0, elevation=25.0)
        return picture(self.inner.model, self.inner.data, camera, [(self.inner._target_pos, "tab:red")])

    def close(self) -> None:
        self.inner.close()

    def _state(self) -> Array:
        """Return the positions [4] of the mocap body that guides the hand (x, y, z), and of the finger."""
        return np.append(self.inner.data.mocap_pos[0], self.inner.data.joint(_FINGER).qpos)

    def _observation(self, seen: Array) -> Array:
        return np.concatenate([self.position, self.velocity, seen, [self.time / STEPS]])


def quickened(env: Any) -> Any:
    """Make a Meta-World environment faster, without changes to observations, contacts and rewards.

    Meta-World checks every rotation by scipy, looks at contacts one by one, and computes rewards by arrays with one number.
    Avoiding these makes a step 1.2 to 2.9 times as fast, depending on the task.
    """
    shares = vars(_metaworld().utils.reward_utils) | {"tolerance": _tolerance}
    others = {"Rotation": _Rotation, "reward_utils": SimpleNamespace(**shares), "tolerance": _tolerance}

    def observed(self: Any) -> Array:
        """Return hand position, gripper opening, and position and quaternion of each object, padded to 18 numbers."""
        apart = self.data.body("rightclaw").xpos - self.data.body("leftclaw").xpos
        seen = np.zeros(4 + self._obs_obj_max_len)
        seen[:3], seen[3] = self.get_endeff_pos(), min(np.linalg.norm(apart) / 0.1, 1.0)
        objects = np.reshape(self._get_pos_objects(), (-1, 3)), np.reshape(self._get_quat_objects(), (-1, 4))
        poses = np.concatenate(objects, -1).ravel()
        seen[4 : 4 + poses.size] = poses
        return seen

    def touched(self: Any, object_geom_id: int) -> bool:
        """Return True if both finger pads press on the object with the id `object_geom_id`."""
        geoms, forces = self.data.contact.geom, self.data.efc_force[self.data.contact.efc_address]
        on_object = (geoms == object_geom_id).any(-1)
        pads = (self.data.geom(f"{side}pad_geom").id for side in ("left", "right"))
        return all(forces[on_object & (geoms == pad).any(-1)].sum() > 0 for pad in pads)

    for name in ("_get_quat_objects", "compute_reward", "_gripper_caging_reward"):  # of some each task has its own
        setattr(env, name, MethodType(_with_globals(getattr(type(env), name), others), env))
    env._get_curr_obs_combined_no_goal = MethodType(observed, env)
    env.touching_object = MethodType(touched, env)
    return env


def _with_globals(function: FunctionType, others: dict[str, Any]) -> FunctionType:
    """Copy a function with some of its global names replaced."""
    names, defaults = function.__globals__ | others, function.__defaults__
    return FunctionType(function.__code__, names, argdefs=defaults, closure=function.__closure__)


def _tolerance(
    x: Any, bounds: Any = (0.0, 0.0), margin: Any = 0.0, sigmoid: str = "gaussian", value_at_margin: float = 0.1
) -> Any:
    """Compute Meta-World's reward for a value's distance from an interval, which is 1 inside the interval.
    All but the long tail of a single distance d is computed by Meta-World's own function. The long tail is

    1 / (1 + (1/v − 1) (d / margin)²)
    """
    lower, upper = bounds
    if sigmoid != "long_tail" or not (margin > 0 and lower <= upper and isinstance(x, float)):
        return _metaworld().utils.reward_utils.tolerance(x, bounds, margin, sigmoid, value_at_margin)
    if lower <= x <= upper:
        return 1.0
    scaled = float((lower - x if x < lower else x - upper) / margin) * math.sqrt(1 / value_at_margin - 1)
    return 1 / (scaled * scaled + 1)


class _Rotation:
    """Replacement for scipy's Rotation without its checks, with only the methods that Meta-World's tasks use."""

    def __init__(self, matrix: Array) -> None:
        self._matrix = matrix

    from_matrix = classmethod(lambda cls, matrix: cls(matrix))

    def as_quat(self) -> Array:
        """Return the quaternion (x, y, z, w) with scipy's sign.
        The entry with the largest diagonal element or trace is positive."""
        quaternion, diagonal = np.empty(4), self._matrix.diagonal()
        mujoco.mju_mat2Quat(quaternion, self._matrix.ravel())
        found = quaternion[[1, 2, 3, 0]]
        return found * np.sign(found[np.append(diagonal, diagonal.sum()).argmax()])


def _metaworld() -> Any:
    try:
        import metaworld
    except ImportError as error:
        raise ImportError(
            "MetaWorld: the package metaworld is missing. It asks for its own release of mujoco: install corral[metaworld] "
            "into a virtual environment of its own."
        ) from error
    return metaworld
