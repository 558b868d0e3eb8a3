"""Box pushing: an arm with seven joints pushes a box with a rod to a target position and orientation.

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

Observation, 29 numbers: seven angles, seven velocities, box (x, y, z, quaternion), target (the same), elapsed share. With
`planar`, 27: box (x, y, cos and sin of its yaw), target (the same), target as seen from the box (the same), elapsed share. A
quaternion of a yaw in [0, 2π) turns by half of it, so yaws next to each other may have opposite ones.

Otto et al., "Deep Black-Box Reinforcement Learning with Movement Primitives", 2022 (task and rewards).
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import mujoco
import numpy as np

from corral.lab.environments.drawing import Camera, picture
from corral.lab.environments.vector import SimulatedCopies, Single, copies_metadata
from corral.robot.tracking import Array

STEPS, DT, _TORQUE, UNSTABLE = 100, 0.02, 10.0, -50.0
LOW = np.array([-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973])
HIGH = np.array([2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973])
_SPEED = np.array([2.175, 2.175, 2.175, 2.175, 2.61, 2.61, 2.61])
"""Limits of the Franka arm's joint velocities in rad/s. `LOW` and `HIGH` limit the joint angles, in rad."""
REGION = np.array([[0.3, -0.45], [0.6, 0.45]])
"""Region of the table, in metres, where box and target are drawn at random, at least `APART` from each other."""
APART, _PLATE = 0.3, -0.01
_REACHED = (0.05, 0.5)
"""Largest distance in metres and angle in radians between box and target that count as success."""
_POSTURE = np.array([0.0, 0.25, 0.0, -2.3, 0.0, 2.55, np.pi / 4])
"""Reference posture of the arm, with elbow up and rod upright, for the search for initial joint angles.
The search starts there and is drawn to it."""
DOWN = np.array([0.0, 1.0, 0.0, 0.0])
"""Orientation of the arm's hand, as a quaternion, at which the rod is upright."""
_ABOVE = 0.15
"""Initial height of the arm's grip above the box, in metres.
The rod's end is inside the walls, above the plate."""
_XML = str(Path(__file__).with_name("box_pushing.xml"))
_CAMERA = Camera(centre=(0.3, 0.0, 0.3), width=1.9, azimuth=125.0, elevation=35.0)


def rotation_distance(one: Array, other: Array) -> Any:
    """Compute the angle in radians between orientations given as unit quaternions p, q [* 4]: 2 arccos |⟨p, q⟩|."""
    return 2 * np.arccos(np.minimum(1.0, np.abs((one * other).sum(-1))))


def _distances(box: Array, target: Array) -> tuple[Any, Any]:
    """Compute the distance in metres and the angle in radians between two poses [* 7]."""
    return np.linalg.norm(box[..., :3] - target[..., :3], axis=-1), rotation_distance(box[..., 3:], target[..., 3:])


def planar_pose(pose: Array) -> Array:
    """Convert poses [* 7] (position and quaternion) to planar poses [* 4]: x, y, cosine and sine of the yaw."""
    w, x, y, z = np.moveaxis(pose[..., 3:], -1, 0)
    turn = np.stack([1 - 2 * (y * y + z * z), 2 * (w * z + x * y)], -1)
    return np.concatenate([pose[..., :2], turn / np.maximum(np.linalg.norm(turn, axis=-1, keepdims=True), 1e-9)], -1)


def seen_from(own: Array, other: Array) -> Array:
    """Express the planar pose `other` [* 4] in the frame of the planar pose `own` [* 4]: x, y, cosine and sine of the angle."""
    (x, y), (c, s) = np.moveaxis(other[..., :2] - own[..., :2], -1, 0), np.moveaxis(own[..., 2:], -1, 0)
    cos, sin = np.moveaxis(other[..., 2:], -1, 0)
    return np.stack([c * x + s * y, c * y - s * x, c * cos + s * sin, c * sin - s * cos], -1)


def limit_excess(q: Array, velocity: Array) -> Any:
    """Sum the amounts by which the seven joint angles and velocities [* 7] exceed the Franka arm's limits."""
    return (np.maximum(q - HIGH, 0) + np.maximum(LOW - q, 0) + np.maximum(np.abs(velocity) - _SPEED, 0)).sum(-1)


def push_reward(
    kind: str, *, q: Array, velocity: Array, box: Array, target: Array, tip: Array, rod: Array, torque: Array, last: Any
) -> Any:
    """Compute the reward of one step of box pushing, or of many steps [*].

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


class BoxPushings(SimulatedCopies):
    """Vectorised box pushing: many arms, each with a box and a target pose."""

    metadata = copies_metadata(DT, "green: target pose")
    STEPS: ClassVar[int] = STEPS
    FIELDS: ClassVar[tuple[str, ...]] = ("qfrc_bias", "site_xpos", "xquat")
    REWARDS: ClassVar[tuple[str, ...]] = ("dense", "temporal_sparse", "temporal_spatial_sparse")

    def __init__(
        self,
        num_envs: int = 1,
        reward: str = "dense",
        planar: bool = False,
        *,
        max_episode_steps: int = STEPS,
        workers: int = 1,
    ) -> None:
        super().__init__(scene(), workers, num_envs, reward, 27 if planar else 29, 7, max_episode_steps)
        self.planar, self.target, self._data = planar, np.zeros((num_envs, 7)), mujoco.MjData(self.model)
        self._hand, self._tip, self._grip = self.model.body("hand").id, self.model.site("tip").id, self.model.site("grip").id

    def begin(self, generators: Sequence[np.random.Generator]) -> None:
        for row, generator in enumerate(generators):
            box, target = place(generator), place(generator)
            while np.linalg.norm(box[:2] - target[:2]) < APART:
                target = place(generator)
            self.batch.qpos[row] = np.concatenate([self.joints_above(box[:3]), box])
            self.target[row] = target
        self.batch.mocap_pos[:, 0], self.batch.mocap_quat[:, 0] = self.target[:, :3], self.target[:, 3:]
        self.batch.forward()

    def move(self, actions: Array) -> Array:
        batch, before, torque = self.batch, self.batch.qpos.copy(), _TORQUE * actions
        batch.ctrl[:] = torque + batch.qfrc_bias[:, :7]  # clipped by the motors' limits
        batch.time[:] = 1.0
        # All that is read depends on positions and velocities alone, and the next step goes on from these stages.
        batch.step(self.rows, nstep=round(DT / self.model.opt.timestep), stage=mujoco.mjtStage.mjSTAGE_VEL.value)
        stable = batch.time > 0.5
        if not stable.all():
            rows = np.flatnonzero(~stable)
            batch.reset(rows, stage=mujoco.mjtStage.mjSTAGE_NONE.value)
            batch.qpos[rows], batch.mocap_pos[rows, 0] = before[rows], self.target[rows, :3]
            batch.mocap_quat[rows, 0] = self.target[rows, 3:]
            batch.forward(rows)
        paid = push_reward(
            self.reward, q=batch.qpos[:, :7], velocity=batch.qvel[:, :7], box=self.box(), target=self.target, torque=torque,
            tip=batch.site_xpos[:, self._tip], rod=batch.xquat[:, self._hand], last=self.time == STEPS,
        )  # fmt: skip
        return np.where(stable, paid, UNSTABLE)

    def box(self) -> Array:
        """Poses of the boxes [E 7], as position and quaternion."""
        return self.batch.qpos[:, 7:]

    def observe(self) -> Array:
        elapsed = np.full((self.num_envs, 1), self.time / STEPS)
        places = [self.box(), self.target]
        if self.planar:
            box, target = map(planar_pose, places)
            places = [box, target, seen_from(box, target)]
        return np.concatenate([self.batch.qpos[:, :7], self.batch.qvel[:, :7], *places, elapsed], -1)

    def outcome(self) -> dict[str, Array]:
        """Compute the info of an episode's last step: success, and position and angle errors of the box."""
        p, theta = _distances(self.box(), self.target)
        success = 1.0 * ((p < _REACHED[0]) & (theta < _REACHED[1]))
        return {"success": success, "distance": p, "rotation_distance": theta}

    def render(self) -> Any:
        """Render the first arm from above and the front, with its target pose translucent, at 480 × 360 pixels."""
        return picture(self.model, self.first(), _CAMERA)

    def joints_above(self, where: Array, rounds: int = 50) -> Array:
        """Compute joint angles [7], near `_POSTURE`, that hold the rod upright above the position `where`.

            q ← q + Jᵀ (J Jᵀ + λI)⁻¹ (x − J n) + n,     n = ½ (POSTURE − q)

        Damped least squares with the spare freedom used for the posture. The start is a function of the position alone.
        """
        data, jacobian, error, turn = self._data, np.zeros((6, self.model.nv)), np.zeros(6), np.zeros(4)
        goal = where + np.array([0.0, 0.0, _ABOVE])
        posture = _POSTURE + np.arctan2(where[1], where[0]) * np.array([1, 0, 0, 0, 0, 0, 1])  # turned towards it
        q = data.qpos[:7]
        q[:] = posture
        for _ in range(rounds):
            mujoco.mj_kinematics(self.model, data)
            mujoco.mj_comPos(self.model, data)  # what the Jacobian is made of
            error[:3] = goal - data.site_xpos[self._grip]
            mujoco.mju_mulQuat(turn, DOWN, data.xquat[self._hand] * np.array([1, -1, -1, -1]))
            mujoco.mju_quat2Vel(error[3:], turn, 1.0)
            if np.abs(error).max() < 1e-5:
                return q.copy()
            mujoco.mj_jacSite(self.model, data, jacobian[:3], jacobian[3:], self._grip)
            spare, j = 0.5 * (posture - q), jacobian[:, :7]
            q += j.T @ np.linalg.solve(j @ j.T + 1e-8 * np.eye(6), error - j @ spare) + spare
            np.clip(q, LOW, HIGH, out=q)
        raise RuntimeError(f"BoxPushing: no joint angles found for a box at {where}.")


class BoxPushing(Single):
    """Box pushing environment with a single arm."""

    metadata = BoxPushings.metadata

    def __init__(self, render_mode: str | None = None, **settings: Any) -> None:
        super().__init__(BoxPushings(1, **settings), render_mode)


@cache
def scene() -> mujoco.MjModel:
    """Load the MuJoCo model of box pushing.
    An invalid state resets it to time 0, which `BoxPushings.move` detects."""
    model = mujoco.MjModel.from_xml_path(_XML)
    model.opt.disableflags &= ~mujoco.mjtDisableBit.mjDSBL_AUTORESET.value
    return model


def place(generator: np.random.Generator) -> Array:
    """Draw a random pose on the table, as position and quaternion, with uniform x, y and yaw."""
    x, y = generator.uniform(*REGION)
    yaw = generator.uniform(0, 2 * np.pi)
    return np.array([x, y, _PLATE, np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)])
