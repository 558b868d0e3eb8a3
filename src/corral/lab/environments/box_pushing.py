"""An arm with seven joints that pushes a box with a rod to a target position and orientation on a table.

Kinematics and limits are those of Franka's Panda (`box_pushing.xml`). An action a ∈ [−1, 1]⁷ is a torque of 10 a N·m on top of
what holds the arm against gravity and its own motion; Δt = 0.02 s, 100 steps. With u = 10 a, the box's distances p (m) and
θ (rad) to its target, d (m) from the box to the rod's tip, the rod's rotation ι (rad) away from its orientation at the start,
spin included, and e ≥ 0 by which joints exceed their limits:

    every step                 −e − 2 max(d, 0.05) − c ‖u‖² − [ι > π/4] ι/π             c = 5·10⁻⁴ (dense), 0.02 (the others)
    dense, every step          −3.5 p − θ/π
    temporal_sparse, last      −350 p − 100 θ/π − 50 ‖q̇‖
    temporal_spatial_sparse,   [p < 0.1] (300 − min(1050 p, 100) − min(150 θ/π, 100))
    last

A step that the simulator cannot take is undone, brings the arm to rest and costs 50. Success: p < 0.05 and θ < 0.5 in the end.

Observation, 29 numbers: seven angles, seven velocities, box (x, y, z, quaternion), target (the same), elapsed share.

Otto et al., "Deep Black-Box Reinforcement Learning with Movement Primitives", 2022 (task and rewards).
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import gymnasium
import mujoco
import numpy as np
from numpy.typing import NDArray

from corral.lab.environments.drawing import Camera, picture
from corral.robot.tracking import Array
from corral.robot.vector import Scored, Simulated

_Reward = Literal["dense", "temporal_sparse", "temporal_spatial_sparse"]

STEPS, DT, _TORQUE, UNSTABLE = 100, 0.02, 10.0, -50.0
LOW = np.array([-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973])
HIGH = np.array([2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973])
_SPEED = np.array([2.175, 2.175, 2.175, 2.175, 2.61, 2.61, 2.61])
"""Franka's limits of angles (rad) and velocities (rad/s)."""
REGION = np.array([[0.3, -0.45], [0.6, 0.45]])
"""Region of box and target in metres; they are at least `APART` from each other."""
APART, _PLATE = 0.3, -0.01
_REACHED = (0.05, 0.5)
"""Largest distance and angle from the target that count as success, in metres and radians."""
_POSTURE = np.array([0.0, 0.25, 0.0, -2.3, 0.0, 2.55, np.pi / 4])
"""Reference posture with elbow up and rod upright: the start of the search for the first angles, and its attractor."""
DOWN = np.array([0.0, 1.0, 0.0, 0.0])
"""Orientation of the hand with the rod upright."""
_ABOVE = 0.15
"""Initial height of the grip above the box in metres: the rod's end is inside the walls, above the plate."""
_BAD = (mujoco.mjtWarning.mjWARN_BADQPOS, mujoco.mjtWarning.mjWARN_BADQVEL, mujoco.mjtWarning.mjWARN_BADQACC)
"""Simulator warnings that mark a state as invalid."""
_XML = str(Path(__file__).with_name("box_pushing.xml"))
_CAMERA = Camera(centre=(0.3, 0.0, 0.3), width=1.9, azimuth=125.0, elevation=35.0)


def rotation_distance(one: Array, other: Array) -> Any:
    """Angle (rad) between two orientations given as unit quaternions p, q [* 4]: 2 arccos |⟨p, q⟩|."""
    return 2 * np.arccos(np.minimum(1.0, np.abs((one * other).sum(-1))))


def _distances(box: Array, target: Array) -> tuple[Any, Any]:
    """Distances in metres and radians between poses [* 7]."""
    return np.linalg.norm(box[..., :3] - target[..., :3], axis=-1), rotation_distance(box[..., 3:], target[..., 3:])


def _outcome(box: Array, target: Array) -> dict[str, Any]:
    """Info of the last step from poses [* 7]: success, and the distances to the target."""
    p, theta = _distances(box, target)
    return {"success": 1.0 * ((p < _REACHED[0]) & (theta < _REACHED[1])), "distance": p, "rotation_distance": theta}


def limit_excess(q: Array, velocity: Array) -> Any:
    """Excess e of angles and velocities [* 7] over Franka's limits, summed over the joints."""
    return (np.maximum(q - HIGH, 0) + np.maximum(LOW - q, 0) + np.maximum(np.abs(velocity) - _SPEED, 0)).sum(-1)


def push_reward(
    kind: _Reward, *, q: Array, velocity: Array, box: Array, target: Array, tip: Array, rod: Array, torque: Array, last: Any
) -> Any:
    """The reward of a step, or of many steps [*].

    `box` and `target`: position and quaternion [* 7]; `rod`: quaternion [* 4]; `torque`: 10 a [* 7].
    """
    p, theta = _distances(box, target)
    theta = theta / np.pi
    effort, tilt = np.square(torque).sum(-1), rotation_distance(rod, DOWN)
    reward = -limit_excess(q, velocity) - 2 * np.maximum(np.linalg.norm(box[..., :3] - tip, axis=-1), 0.05)
    reward = reward - (tilt > np.pi / 4) * tilt / np.pi
    if kind == "dense":
        return reward - 5e-4 * effort - 3.5 * p - theta
    reward = reward - 0.02 * effort
    if kind == "temporal_sparse":
        return reward - last * (350 * p + 100 * theta + 50 * np.linalg.norm(velocity, axis=-1))
    return reward + last * (p < 0.1) * (300 - np.minimum(1050 * p, 100) - np.minimum(150 * theta, 100))


class BoxPushing(Simulated):
    """The arm, the box and its target."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": round(1 / DT), "render_marks": "green: target pose"}  # noqa: RUF012  # Gymnasium's own form
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (29,), np.float64)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (7,), np.float32)
    STEPS: ClassVar[int] = STEPS
    FIELDS: ClassVar[tuple[str, ...]] = ("qfrc_bias", "site_xpos", "xquat")

    def __init__(self, reward: _Reward = "dense", render_mode: str | None = None) -> None:
        if reward not in get_args(_Reward):
            raise ValueError(f"BoxPushing: `reward` is one of {', '.join(map(repr, get_args(_Reward)))}; got {reward!r}.")
        self.reward, self.render_mode, self.time = reward, render_mode, 0
        self.model = mujoco.MjModel.from_xml_path(_XML)
        self.data = mujoco.MjData(self.model)
        self._hand, self._tip, self._grip = self.model.body("hand").id, self.model.site("tip").id, self.model.site("grip").id

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        mujoco.mj_resetData(self.model, self.data)
        self.time, box, target = 0, self._place(), self._place()
        while np.linalg.norm(box[:2] - target[:2]) < APART:
            target = self._place()
        self.data.qpos[7:], self.data.mocap_pos[0], self.data.mocap_quat[0] = box, target[:3], target[3:]
        self.data.qpos[:7] = self.joints_above(box[:3])
        mujoco.mj_forward(self.model, self.data)
        return self.observation(), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        torque = _TORQUE * np.clip(np.asarray(action, np.float64), -1.0, 1.0)
        reward = None if self._advance(torque) else UNSTABLE
        self.time += 1
        over = self.time == STEPS
        box, target = self.box(), self.target()
        if reward is None:
            reward = push_reward(
                self.reward, q=self.data.qpos[:7], velocity=self.data.qvel[:7], box=box, target=target,
                tip=self.data.site_xpos[self._tip], rod=self.data.xquat[self._hand], torque=torque, last=over,
            )  # fmt: skip
        return self.observation(), float(reward), False, over, self.outcome() if over else {}

    @staticmethod
    @cache
    def batch_model() -> mujoco.MjModel:
        """The scene for a batch. An invalid state restarts at time 0, which `advance` detects."""
        model = mujoco.MjModel.from_xml_path(_XML)
        model.opt.disableflags &= ~mujoco.mjtDisableBit.mjDSBL_AUTORESET.value
        return model

    @staticmethod
    def advance(batch: Any, actions: Array) -> Sequence[Array]:
        model, before = batch.model, batch.qpos.copy()
        batch.ctrl[:] = _TORQUE * actions + batch.qfrc_bias[:, :7]  # clipped by the motors' limits
        batch.time[:] = 1.0
        # All that is read depends on positions and velocities alone, and the next step goes on from these stages.
        batch.step(nstep=round(DT / model.opt.timestep), stage=mujoco.mjtStage.mjSTAGE_VEL.value)
        stable = batch.time > 0.5
        if not stable.all():
            rows = np.flatnonzero(~stable)
            target = batch.mocap_pos[rows], batch.mocap_quat[rows]
            batch.reset(rows, stage=mujoco.mjtStage.mjSTAGE_NONE.value)
            batch.qpos[rows], (batch.mocap_pos[rows], batch.mocap_quat[rows]) = before[rows], target
            batch.forward(rows)
        joints, velocities, box = batch.qpos[:, :7], batch.qvel[:, :7], batch.qpos[:, 7:]
        tip, rod = batch.site_xpos[:, model.site("tip").id], batch.xquat[:, model.body("hand").id]
        return joints, velocities, box, tip, rod, 1.0 * stable[:, None]

    @staticmethod
    def observations(copies: "Sequence[BoxPushing]", readings: Array, steps: NDArray[np.integer]) -> Array:
        state, box = readings[..., :14], readings[..., 14:21]
        target, elapsed = np.array([[copy.target()] for copy in copies]), (steps / STEPS)[:, None]
        return np.concatenate(
            [state, box, np.broadcast_to(target, box.shape), np.broadcast_to(elapsed, (*box.shape[:2], 1))], -1
        )

    @staticmethod
    def score(copies: "Sequence[BoxPushing]", readings: Array, actions: Array) -> Scored:
        """Observations, rewards and last info in the form that `step` returns."""
        q, velocity, box, tip, rod, stable = np.split(readings, [7, 14, 21, 24, 28], -1)
        target, step = np.array([[copy.target()] for copy in copies]), np.arange(1, STEPS + 1)
        paid = push_reward(
            copies[0].reward, q=q, velocity=velocity, box=box, target=target, tip=tip, rod=rod, torque=_TORQUE * actions,
            last=step == STEPS,
        )  # fmt: skip
        seen = BoxPushing.observations(copies, readings, step)
        return Scored(seen, np.where(stable[..., 0] > 0, paid, UNSTABLE), _outcome(box[:, -1], target[:, 0]))

    def joints_above(self, place: Array, rounds: int = 50) -> Array:
        """Joint angles [7] that hold the grip `_ABOVE` a position with the rod upright, near `_POSTURE`.

            q ← q + Jᵀ (J Jᵀ + λI)⁻¹ (x − J n) + n,     n = ½ (POSTURE − q)

        Damped least squares with the spare freedom used for the posture. The start is a function of the place alone. Moves
        the arm of `self.data`.
        """
        jacobian, error, turn = np.zeros((6, self.model.nv)), np.zeros(6), np.zeros(4)
        goal = place + np.array([0.0, 0.0, _ABOVE])
        posture = _POSTURE + np.arctan2(place[1], place[0]) * np.array([1, 0, 0, 0, 0, 0, 1])  # turned towards it
        q = self.data.qpos[:7]
        q[:] = posture
        for _ in range(rounds):
            mujoco.mj_kinematics(self.model, self.data)
            mujoco.mj_comPos(self.model, self.data)  # what the Jacobian is made of
            error[:3] = goal - self.data.site_xpos[self._grip]
            mujoco.mju_mulQuat(turn, DOWN, self.data.xquat[self._hand] * np.array([1, -1, -1, -1]))
            mujoco.mju_quat2Vel(error[3:], turn, 1.0)
            if np.abs(error).max() < 1e-5:
                return q.copy()
            mujoco.mj_jacSite(self.model, self.data, jacobian[:3], jacobian[3:], self._grip)
            spare, j = 0.5 * (posture - q), jacobian[:, :7]
            q += j.T @ np.linalg.solve(j @ j.T + 1e-8 * np.eye(6), error - j @ spare) + spare
            np.clip(q, LOW, HIGH, out=q)
        raise RuntimeError(f"BoxPushing: no joint angles found for a box at {place}.")

    def box(self) -> Array:
        """Position and quaternion [7] of the box."""
        return self.data.qpos[7:].copy()

    def target(self) -> Array:
        """Position and quaternion [7] of the target."""
        return np.concatenate([self.data.mocap_pos[0], self.data.mocap_quat[0]])

    def observation(self) -> Array:
        """The observation [29]."""
        return np.concatenate([self.data.qpos[:7], self.data.qvel[:7], self.box(), self.target(), [self.time / STEPS]])

    def outcome(self) -> dict[str, float]:
        """Info of the last step: success, and the distances to the target."""
        return {name: float(value) for name, value in _outcome(self.box(), self.target()).items()}

    def render(self) -> NDArray[np.uint8]:
        """Render views from above and from the front with a translucent target; 480 × 360 pixels."""
        return picture(self.model, self.data, _CAMERA)

    def _place(self) -> Array:
        """Draw a position and a quaternion on the table: x, y and yaw are uniform."""
        x, y = self.np_random.uniform(*REGION)
        yaw = self.np_random.uniform(0, 2 * np.pi)
        return np.array([x, y, _PLATE, np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)])

    def _advance(self, torque: Array) -> bool:
        """Advance one Δt under these torques. Returns False, with the old state at rest, if the simulator failed."""
        before = self.data.qpos.copy()
        self.data.ctrl[:] = torque + self.data.qfrc_bias[:7]  # clipped by the motors' limits
        mujoco.mj_step(self.model, self.data, round(DT / self.model.opt.timestep))
        stable = not any(self.data.warning[kind].number for kind in _BAD)
        if not stable:
            target = self.target()
            mujoco.mj_resetData(self.model, self.data)
            self.data.qpos[:], self.data.mocap_pos[0], self.data.mocap_quat[0] = before, target[:3], target[3:]
        mujoco.mj_forward(self.model, self.data)  # positions and compensation of the state that is observed
        return stable
