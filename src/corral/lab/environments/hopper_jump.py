"""Hopper jump: a one-legged hopper must jump high and land on a target point.

Gymnasium's own Hopper, dropped from 1.5 m: torques at hip, knee and ankle (200 N·m times the action), Δt = 0.008 s, 250 steps.
What counts is the highest point of the torso and where the foot first touches down after it has left the floor, so the
reward depends on the whole episode and not on the state alone:

    sparse   r_T = 10 h_max − 3 ‖f − g‖ − 2 ℓ + 2 [healthy]      and −10⁻³ ‖u‖² in every step
    dense    r_t = 3 h − 3 ‖f − g‖ + [healthy] − 10⁻³ ‖u‖²

with the torso's height h, the sole f under the ankle, the goal g on the floor, and ℓ the distance ‖f − g‖ at the first landing
(5 m if there was none). Healthy: the torso above 0.5 m, every other number below 100.

Observation, 16 numbers: x, z, pitch, hip, knee, ankle (m, rad), their velocities, sole minus goal (x, z), goal (x), elapsed
share. With `takeoff` there is one more before the last: 1 once the foot has left the floor, which the rewards depend on.

Otto et al., "Deep Black-Box Reinforcement Learning with Movement Primitives", 2022 (task and reward).
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import mujoco
import numpy as np
from numpy.typing import NDArray

from corral.lab.environments.drawing import Camera, picture
from corral.lab.environments.vector import SimulatedCopies, Single, copies_metadata
from corral.robot.tracking import Array

STEPS, DT = 250, 0.008
_HEIGHT = 1.5
"""Height of the hopper's torso in metres at the start of an episode. It is 1.21 when the hopper stands straight."""
_GOAL = (0.3, 1.35)
"""Range in metres from which the landing goal's position is drawn."""
_LEG = np.array([[-0.5, 0.0], [-0.2, 0.0], [0.0, 0.785]])
"""Ranges in radians from which the initial hip, knee and ankle angles are drawn."""
NEVER = 5.0
"""Landing distance in metres that is reported if the hopper never lands."""
_LANDED, _JUMPED = 0.1, 1.6
"""Thresholds of success in metres: largest landing distance from the goal, and smallest jump height of the torso.
Only the first landing counts, and the height before it."""
_SOLE = np.array([-0.13, 0.0, 0.04])
"""Point on the underside of the hopper's foot below the ankle, in the frame of the foot."""
FALLING, _STANDING, FLYING, DOWN = range(4)
_CAMERA = Camera(centre=(0.6, 0.0, 0.9), width=3.2, azimuth=0.0, elevation=8.0)


_XML = str(Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets" / "hopper.xml")


def next_phase(phase: Any, contact: Any) -> Any:
    """Compute the next phase of each hopper's jump from the contact of its foot with the floor.
    Phases are falling, standing after the first contact, flying, and down after the next contact."""
    waits_for_contact = (phase == FALLING) | (phase == FLYING)
    return phase + ((phase != DOWN) & (contact == waits_for_contact))


def jump_reward(
    kind: str, *, height: Any, highest: Any, distance: Any, landing: Any, healthy: Any, action: Array, last: Any
) -> Any:
    """Compute the reward of one step of a hopper's jump, or of many steps [*], from the jump's course so far.
    Actions are [* 3]."""
    cost = 1e-3 * np.square(action).sum(-1)
    if kind == "dense":
        return 3 * height - 3 * distance + 1.0 * healthy - cost
    return last * (10 * highest - 3 * distance - 2 * landing + 2.0 * healthy) - cost


class HopperJumps(SimulatedCopies):
    """Vectorised hopper jump: many hoppers, with their goals and records of their jumps."""

    metadata = copies_metadata(DT, "red: where to land")
    STEPS: ClassVar[int] = STEPS
    FIELDS: ClassVar[tuple[str, ...]] = ("xpos", "xmat", "sensordata")
    REWARDS: ClassVar[tuple[str, ...]] = ("sparse", "dense")

    def __init__(
        self,
        num_envs: int = 1,
        reward: str = "sparse",
        takeoff: bool = False,
        *,
        max_episode_steps: int = STEPS,
        workers: int = 1,
    ) -> None:
        super().__init__(hopper(), workers, num_envs, reward, 17 if takeoff else 16, 3, max_episode_steps)
        self.observes_takeoff, self.goal = takeoff, np.zeros(num_envs)
        self._torso, self._foot = (self.model.body(name).id for name in ("torso", "foot"))

    def begin(self, generators: Sequence[np.random.Generator]) -> None:
        count = len(generators)
        self.phase, self.highest = np.full(count, FALLING), np.zeros(count)
        self.landing, self.takeoff = np.full(count, NEVER), np.full(count, np.nan)
        self.batch.qpos[:, 1] = _HEIGHT
        for row, generator in enumerate(generators):
            self.goal[row] = generator.uniform(*_GOAL)
            self.batch.qpos[row, 3:] = generator.uniform(_LEG[:, 0], _LEG[:, 1])
        self.batch.forward()

    def move(self, actions: Array) -> Array:
        batch = self.batch
        batch.ctrl[:] = actions
        steps = round(DT / self.model.opt.timestep)
        batch.step(self.rows, nstep=steps, stage=mujoco.mjtStage.mjSTAGE_ACC.value)
        height, distance = batch.xpos[:, self._torso, 2], self.distance()
        self.highest = np.maximum(self.highest, height)
        before, self.phase = self.phase, next_phase(self.phase, self.contact())
        self.takeoff[(before == _STANDING) & (self.phase == FLYING)] = self.time - 1.0
        self.landing = np.where((before == FLYING) & (self.phase == DOWN), distance, self.landing)
        healthy = (batch.qpos[:, 1] > 0.5) & (np.abs(np.concatenate([batch.qpos[:, 2:], batch.qvel], -1)) < 100).all(-1)
        return jump_reward(
            self.reward, height=height, highest=self.highest, distance=distance, landing=self.landing, healthy=healthy,
            action=actions, last=self.time == STEPS,
        )  # fmt: skip

    def offset(self) -> Array:
        """Vector (x, y, z) from each goal to the sole of the hopper's foot [E 3]."""
        frame = self.batch.xmat[:, self._foot].reshape(self.num_envs, 3, 3)
        sole = self.batch.xpos[:, self._foot] + frame @ _SOLE
        sole[:, 0] -= self.goal
        return sole

    def distance(self) -> Array:
        """Distance in metres of each hopper's sole from its goal [E]."""
        return np.linalg.norm(self.offset(), axis=-1)

    def contact(self) -> NDArray[np.bool_]:
        """Mask [E], True for hoppers whose foot touches the floor."""
        return self.batch.sensordata[:, 0] > 0

    def observe(self) -> Array:
        goal, elapsed = self.goal[:, None], np.full((self.num_envs, 1), self.time / STEPS)
        left = [1.0 * (self.phase >= FLYING)[:, None]] if self.observes_takeoff else []
        return np.concatenate([self.batch.qpos, self.batch.qvel, self.offset()[:, [0, 2]], goal, *left, elapsed], -1)

    def outcome(self) -> dict[str, Array]:
        """Compute the info of an episode's last step. Its `event` is the step of take-off, or NaN without a take-off."""
        success = 1.0 * ((self.landing < _LANDED) & (self.highest > _JUMPED))
        distances = {"landing_distance": self.landing, "goal_distance": self.distance()}
        return {"success": success, "event": self.takeoff, "max_height": self.highest, **distances}

    def render(self) -> Any:
        """Render the first hopper from the side, with its goal as a cross, at 480 × 360 pixels."""
        return picture(self.model, self.first(), _CAMERA, [((self.goal[0], 0.0, 0.0), "tab:red")])


class HopperJump(Single):
    """Hopper jump environment with a single hopper."""

    metadata = HopperJumps.metadata

    def __init__(self, render_mode: str | None = None, **settings: Any) -> None:
        super().__init__(HopperJumps(1, **settings), render_mode)


@cache
def hopper() -> mujoco.MjModel:
    """Load the MuJoCo model of the hopper, with a sensor that counts contacts between foot and floor."""
    spec, geom = mujoco.MjSpec.from_file(_XML), mujoco.mjtObj.mjOBJ_GEOM
    found = [1 << mujoco.mjtConDataField.mjCONDATA_FOUND.value, 0, 1]
    pair: dict[str, Any] = {"objtype": geom, "objname": "floor", "reftype": geom, "refname": "foot_geom"}
    spec.add_sensor(name="contact", type=mujoco.mjtSensor.mjSENS_CONTACT, intprm=found, **pair)
    return spec.compile()
