"""Tracking controllers, which turn desired joint states into actions of an environment."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from corral.validate import Checked

Array = NDArray[np.floating]


@dataclass(frozen=True, kw_only=True)
class Tracking(Checked):
    """Proportional-derivative controller that makes joints follow a desired motion, given observations.

        torque     u = (p (y − q) + d (ẏ − q̇)) / scale
        velocity   u = (ẏ + p (y − q)) / scale
        position   u = y / scale

    Any Gymnasium environment with joints in a flat observation is followed this way; actions outside its action space are
    clipped to it, as motors do. Torques of a normalised action space have gains in units of that space.
    """

    joints: tuple[int, int]
    """Index range [begin, end) of the joint positions in an observation."""
    velocities: tuple[int, int]
    """Index range [begin, end) of the joint velocities in an observation."""
    command: Literal["torque", "velocity", "position"] = "torque"
    """Kind of action that the environment takes: torques, velocities or positions of the joints."""
    p: float | Sequence[float] = 0.0
    """Gain of the controller on the position error, as one number or one per joint."""
    d: float | Sequence[float] = 0.0
    """Gain of the controller on the velocity error, for torque control only."""
    scale: float | Sequence[float] = 1.0
    """Physical torque, velocity or position that an action of 1 stands for, as one number or one per joint."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, ends in (("joints", self.joints), ("velocities", self.velocities)):
            if not (len(ends) == 2 and all(type(end) is int for end in ends) and 0 <= ends[0] < ends[1]):
                raise ValueError(f"Tracking: `{name}` is a range [begin, end) in the observation, such as [0, 7]; got {ends}.")
        if self.joints[1] - self.joints[0] != self.velocities[1] - self.velocities[0]:
            raise ValueError(
                f"Tracking: `joints` and `velocities` are ranges of the same length in the observation; got {self.joints} and "
                f"{self.velocities}."
            )
        for name, gain in (("p", self.p), ("d", self.d), ("scale", self.scale)):
            value = np.asarray(gain)
            if value.size not in (1, self.dof) or not np.isfinite(value).all():
                raise ValueError(f"Tracking: `{name}` is one finite number, or one for each of {self.dof} joints; got {value}.")
        if not np.all(self.scale):
            raise ValueError(f"Tracking: `scale` is what an action of 1 stands for, and not 0; got {self.scale}.")

    @property
    def dof(self) -> int:
        """Number D of joints that the controller moves."""
        return self.joints[1] - self.joints[0]

    def state(self, observation: Any) -> tuple[Any, Any]:
        """Read joint positions and velocities [* D] from observations [* O], given as arrays or tensors."""
        return observation[..., slice(*self.joints)], observation[..., slice(*self.velocities)]

    def action(self, position: Array, velocity: Array, observation: Array) -> Array:
        """Compute actions [* D] that lead from the observed joint state to the desired joint state, before clipping."""
        q, speed = self.state(observation)
        p, d, scale = np.asarray(self.p), np.asarray(self.d), np.asarray(self.scale)
        if self.command == "torque":
            return (p * (position - q) + d * (velocity - speed)) / scale
        return (velocity + p * (position - q) if self.command == "velocity" else position) / scale
