"""A one-legged hopper that must jump high and land on a target point.

Gymnasium's own Hopper, dropped from 1.5 m: torques at hip, knee and ankle (200 N·m times the action), Δt = 0.008 s, 250 steps.
What counts is the highest point of the torso and where the foot first touches down after it has left the floor, so the
reward depends on the whole episode and not on the state alone:

    sparse   r_T = 10 h_max − 3 ‖f − g‖ − 2 ℓ + 2 [healthy]      and −10⁻³ ‖u‖² in every step
    dense    r_t = 3 h − 3 ‖f − g‖ + [healthy] − 10⁻³ ‖u‖²

with the torso's height h, the sole f under the ankle, the goal g on the floor, and ℓ the distance ‖f − g‖ at the first landing
(5 m if there was none). Healthy: the torso above 0.5 m, every other number below 100.

Observation, 16 numbers: x, z, pitch, hip, knee, ankle (m, rad), their velocities, sole minus goal (x, z), goal (x), elapsed
share.

Otto et al., "Deep Black-Box Reinforcement Learning with Movement Primitives", 2022 (task and reward).
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import gymnasium
import mujoco
import numpy as np
from numpy.typing import NDArray

from corral.lab.environments.drawing import Camera, picture
from corral.robot.tracking import Array
from corral.robot.vector import Scored, Simulated

_Reward = Literal["sparse", "dense"]

STEPS, DT = 250, 0.008
_HEIGHT = 1.5
"""Height of the torso at the start, in metres; it is 1.21 when the hopper stands straight."""
_GOAL = (0.3, 1.35)
"""Range of the goal's position in metres."""
_LEG = np.array([[-0.5, 0.0], [-0.2, 0.0], [0.0, 0.785]])
"""Ranges of the initial hip, knee and ankle angles in radians."""
NEVER = 5.0
"""Landing distance in metres that is reported if the hopper never landed."""
_LANDED, _JUMPED = 0.1, 1.6
"""Limits of success in metres: distance of the first landing from the goal, and height of the torso before it."""
_SOLE = np.array([-0.13, 0.0, 0.04])
"""Point on the underside of the foot beneath the ankle, in the frame of the foot's body."""
FALLING, _STANDING, FLYING, DOWN = range(4)
_CAMERA = Camera(centre=(0.6, 0.0, 0.9), width=3.2, azimuth=0.0, elevation=8.0)


_XML = str(Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets" / "hopper.xml")


def next_phase(phase: int, contact: bool) -> int:
    """The next phase: falling, standing after the first contact, flying when contact ends, and down at the next contact."""
    waits_for_contact = phase in (FALLING, FLYING)
    return phase + (phase != DOWN and contact == waits_for_contact)


def jump_reward(
    kind: _Reward, *, height: Any, highest: Any, distance: Any, landing: Any, healthy: Any, action: Array, last: Any
) -> Any:
    """The reward of a step from the records up to it, or of many steps [*]; actions are [* 3]."""
    cost = 1e-3 * np.square(action).sum(-1)
    if kind == "dense":
        return 3 * height - 3 * distance + 1.0 * healthy - cost
    return last * (10 * highest - 3 * distance - 2 * landing + 2.0 * healthy) - cost


class HopperJump(Simulated):
    """The hopper, its goal, and the record of its jump."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": round(1 / DT), "render_marks": "red: where to land"}  # noqa: RUF012  # Gymnasium's own form
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (16,), np.float64)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
    STEPS: ClassVar[int] = STEPS
    FIELDS: ClassVar[tuple[str, ...]] = ("xpos", "xmat", "sensordata")

    def __init__(self, reward: _Reward = "sparse", render_mode: str | None = None) -> None:
        if reward not in ("sparse", "dense"):
            raise ValueError(f"HopperJump: `reward` is 'sparse' or 'dense'; got {reward!r}.")
        self.reward, self.render_mode = reward, render_mode
        self.model = mujoco.MjModel.from_xml_path(_XML)
        self.data = mujoco.MjData(self.model)
        self._torso, self._foot = (self.model.body(name).id for name in ("torso", "foot"))
        self._pair = {self.model.geom(name).id for name in ("floor", "foot_geom")}
        self.time, self.goal, self.phase, self.highest, self.landing, self.takeoff = 0, 0.0, FALLING, 0.0, NEVER, np.nan

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        mujoco.mj_resetData(self.model, self.data)
        self.goal = self.np_random.uniform(*_GOAL)
        self.data.qpos[1] = _HEIGHT
        self.data.qpos[3:] = self.np_random.uniform(_LEG[:, 0], _LEG[:, 1])
        mujoco.mj_forward(self.model, self.data)
        self.time, self.phase, self.highest, self.landing, self.takeoff = 0, FALLING, 0.0, NEVER, np.nan
        return self.observation(), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        torque = np.clip(np.asarray(action, np.float64), -1.0, 1.0)
        self.data.ctrl[:] = torque
        mujoco.mj_step(self.model, self.data, round(DT / self.model.opt.timestep))
        mujoco.mj_forward(self.model, self.data)  # contacts and positions of the state that is observed, not of the one before
        self.time += 1
        distance, height = float(np.linalg.norm(self.offset())), float(self.data.xpos[self._torso, 2])
        self.highest = max(self.highest, height)
        before, self.phase = self.phase, next_phase(self.phase, self.contact())
        if before == _STANDING and self.phase == FLYING:
            self.takeoff = self.time - 1.0
        if before == FLYING and self.phase == DOWN:
            self.landing = distance
        over = self.time == STEPS
        reward = jump_reward(
            self.reward, height=height, highest=self.highest, distance=distance, landing=self.landing,
            healthy=self.healthy(), action=torque, last=over,
        )  # fmt: skip
        return self.observation(), float(reward), False, over, self.outcome(distance) if over else {}

    @staticmethod
    @cache
    def batch_model() -> mujoco.MjModel:
        """The hopper for a batch, with a sensor that counts contacts between foot and floor."""
        spec, geom = mujoco.MjSpec.from_file(_XML), mujoco.mjtObj.mjOBJ_GEOM
        found = [1 << mujoco.mjtConDataField.mjCONDATA_FOUND.value, 0, 1]
        pair: dict[str, Any] = {"objtype": geom, "objname": "floor", "reftype": geom, "refname": "foot_geom"}
        spec.add_sensor(name="contact", type=mujoco.mjtSensor.mjSENS_CONTACT, intprm=found, **pair)
        return spec.compile()

    @staticmethod
    def advance(batch: Any, actions: Array) -> Sequence[Array]:
        torso, foot = (batch.model.body(name).id for name in ("torso", "foot"))
        batch.ctrl[:] = actions
        batch.step(nstep=round(DT / batch.model.opt.timestep), stage=mujoco.mjtStage.mjSTAGE_ACC.value)
        return batch.qpos, batch.qvel, batch.xpos[:, torso], batch.xpos[:, foot], batch.xmat[:, foot], batch.sensordata

    @staticmethod
    def observations(copies: "Sequence[HopperJump]", readings: Array, steps: NDArray[np.integer]) -> Array:
        state, offset, goal = readings[..., :12], _offsets(copies, readings), np.array([[[copy.goal]] for copy in copies])
        return np.concatenate([state, offset[..., [0, 2]], *np.broadcast_arrays(goal, (steps / STEPS)[:, None])], -1)

    @staticmethod
    def score(copies: "Sequence[HopperJump]", readings: Array, actions: Array) -> Scored:
        """Observations, rewards and last info in the form that `step` returns."""
        state, torso, _, _, contacts = np.split(readings, [12, 15, 18, 27], -1)
        height, contact, distance = torso[..., 2], contacts[..., 0] > 0, np.linalg.norm(_offsets(copies, readings), axis=-1)
        highest = np.maximum.accumulate(height, 1)
        stood = np.logical_or.accumulate(contact, 1)
        left = np.logical_or.accumulate(stood & ~contact, 1)
        down = np.logical_or.accumulate(left & contact, 1)
        landing = np.where(down, np.take_along_axis(distance, down.argmax(1)[:, None], 1), NEVER)
        takeoff = np.where(left[:, -1], left.argmax(1), np.nan)
        healthy = (state[..., 1] > 0.5) & (np.abs(state[..., 2:]) < 100).all(-1)
        step = np.arange(1, STEPS + 1)
        rewards = jump_reward(
            copies[0].reward, height=height, highest=highest, distance=distance, landing=landing, healthy=healthy,
            action=actions, last=step == STEPS,
        )  # fmt: skip
        success = 1.0 * ((landing[:, -1] < _LANDED) & (highest[:, -1] > _JUMPED))
        info = {"success": success, "event": takeoff, "highest": highest[:, -1]}
        info |= {"landing_distance": landing[:, -1], "goal_distance": distance[:, -1]}
        return Scored(HopperJump.observations(copies, readings, step), rewards, info)

    def offset(self) -> Array:
        """Vector from the goal to the sole (x, y, z)."""
        sole = self.data.xpos[self._foot] + self.data.xmat[self._foot].reshape(3, 3) @ _SOLE
        return sole - np.array([self.goal, 0.0, 0.0])

    def contact(self) -> bool:
        """True if the foot touches the floor."""
        return any({int(one), int(two)} == self._pair for one, two in self.data.contact.geom)

    def healthy(self) -> bool:
        """True if the torso is above 0.5 m and no number is out of bounds."""
        state = np.concatenate([self.data.qpos[2:], self.data.qvel])
        return bool(self.data.qpos[1] > 0.5 and (np.abs(state) < 100).all())

    def observation(self) -> Array:
        """The observation [16]."""
        offset = self.offset()[[0, 2]]
        return np.concatenate([self.data.qpos, self.data.qvel, offset, [self.goal, self.time / STEPS]])

    def outcome(self, distance: float) -> dict[str, float]:
        """Info of the last step. The event is the step of take-off, or NaN if there was none."""
        success = float(self.landing < _LANDED and self.highest > _JUMPED)
        distances = {"landing_distance": self.landing, "goal_distance": distance}
        return {"success": success, "event": self.takeoff, "highest": self.highest, **distances}

    def render(self) -> NDArray[np.uint8]:
        """Render a view from the side with the goal as a cross; 480 × 360 pixels."""
        return picture(self.model, self.data, _CAMERA, [((self.goal, 0.0, 0.0), "tab:red")])


def _offsets(copies: Sequence[HopperJump], readings: Array) -> Array:
    """Vectors from the goal to the sole (x, y, z) [E S 3], from readings [E S R]."""
    ankle, frame = readings[..., 15:18], readings[..., 18:27]
    offset = ankle + frame.reshape(*frame.shape[:2], 3, 3) @ _SOLE
    offset[..., 0] -= np.array([[copy.goal] for copy in copies])
    return offset
