"""Simulated robot tasks with Gymnasium ids `corral/…`, registered when this package is imported.

Every environment here has episodes of fixed length, joints in its observation, the elapsed share of the episode as the
observation's last entry (rewards depend on time), a `success` in the info of the last step, and an image for a render.
"""

from dataclasses import dataclass
from typing import Any

from corral.validate import pip_install

try:
    from gymnasium.envs.registration import register, registry
except ImportError as error:
    raise ImportError(
        f"corral.lab.environments: gymnasium and mujoco simulate the tasks. Install them: {pip_install('robot')}."
    ) from error

from corral.lab.environments.vector import make_envs
from corral.robot.tracking import Tracking

__all__ = ["ENVIRONMENTS", "Environment", "make_envs"]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Description of an environment: entry point, episode length, time step and controller."""

    entry_point: Any
    steps: int
    """Number T of steps per episode."""
    dt: float
    """Time in seconds between two actions."""
    tracking: Tracking
    """Controller that makes the environment's joints follow a plan."""
    vector_entry_point: str | None = None
    """Entry point of a vectorised environment that steps all copies at once. None if there is no vectorised environment."""
    tells_event: bool = False
    """True if the last step's info reports the step of an `event`, such as a take-off, to which TCE can move later rewards."""
    maker: Any = None
    """Factory of an environment that is not corral's: a Gymnasium spec, or a class that steps all copies in one call."""


ENVIRONMENTS = {
    "corral/ViaPointReacher-v0": Environment(
        entry_point="corral.lab.environments.via_point:ViaPointReacher",
        vector_entry_point="corral.lab.environments.via_point:ViaPointReachers",
        steps=100,
        dt=0.02,
        tracking=Tracking(joints=(0, 5), velocities=(5, 10), p=10.0, d=1.0),  # 40 p = 20² and 40 d = 2 · 20: critically damped
    ),
    "corral/HopperJump-v0": Environment(
        entry_point="corral.lab.environments.hopper_jump:HopperJump",
        vector_entry_point="corral.lab.environments.hopper_jump:HopperJumps",
        steps=250,
        dt=0.008,
        tracking=Tracking(joints=(3, 6), velocities=(9, 12), p=1.0, d=0.1),
        tells_event=True,
    ),
    "corral/BoxPushing-v0": Environment(
        entry_point="corral.lab.environments.box_pushing:BoxPushing",
        vector_entry_point="corral.lab.environments.box_pushing:BoxPushings",
        steps=100,
        dt=0.02,
        tracking=Tracking(
            joints=(0, 7),
            velocities=(7, 14),
            p=(1.2, 1.2, 1.2, 1.2, 0.5, 0.3, 0.1),
            d=(0.1, 0.1, 0.1, 0.1, 0.06, 0.05, 0.03),
        ),
    ),
    "corral/MetaWorld-v0": Environment(
        entry_point="corral.lab.environments.metaworld:MetaWorld",
        steps=500,
        dt=0.0125,
        tracking=Tracking(joints=(0, 4), velocities=(4, 8), command="position"),  # the environment itself holds the gain
    ),
}

for name, environment in ENVIRONMENTS.items():
    if name not in registry:
        register(
            name,
            environment.entry_point,
            max_episode_steps=environment.steps,
            vector_entry_point=environment.vector_entry_point,
        )
