"""Simulated tasks under Gymnasium ids `corral/…`; importing this registers them.

Every environment here has episodes of fixed length, joints in its observation, the elapsed share of the episode as the
observation's last entry (rewards depend on time), a `success` in the info of the last step, and an image for a render.
"""

from dataclasses import dataclass

from gymnasium.envs.registration import register, registry

from corral.robot.tracking import Tracking


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What a learner must know of an environment before it makes one."""

    entry_point: str
    steps: int
    """T: steps of an episode."""
    dt: float
    """Seconds from one action to the next."""
    tracking: Tracking
    """How its joints follow a plan."""
    vector_entry_point: str | None = None
    """Steps all copies at once, where there is such a form."""


ENVIRONMENTS = {
    "corral/ViaPointReacher-v0": Environment(
        entry_point="corral.robot.env.via_point:ViaPointReacher",
        vector_entry_point="corral.robot.env.via_point:ViaPointReachers",
        steps=100,
        dt=0.02,
        tracking=Tracking(joints=(0, 5), velocities=(5, 10), p=10.0, d=1.0),  # 40 p = 20² and 40 d = 2 · 20: critically damped
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
