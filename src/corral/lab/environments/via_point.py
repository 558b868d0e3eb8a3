"""Via-point reaching: a planar arm with five links passes one point in the first half and ends at another point.

Each joint is a double integrator. An episode takes microseconds, and no contacts or friction blur differences between methods:

    q̈ = 40 u,   |u| ≤ 1,   Δt = 0.02 s,   100 steps,   links of 1 m

    dense    r_t = −0.2 ‖tip_t − p‖ − 0.002 ‖u‖²          p: the via-point in the first half, the goal in the second
    sparse   r_t = −10 ‖tip_t − p‖ [t = 50 or t = 100] − 0.002 ‖u‖²

Observation, 15 numbers: five angles (rad, relative), five velocities (rad/s), via-point and goal (m), elapsed share. With
`hidden_goal` the goal is observed as (0, 0) until half-way, so that a plan made at the start cannot aim at it.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from corral.lab.environments.vector import Copies, Single, copies_metadata
from corral.robot.tracking import Array

_LINKS, STEPS, DT, STRENGTH = 5, 100, 0.02, 40.0
REACHED = 0.25
"""Largest distance in metres of the arm's tip from a target point that counts as success, 5 % of the arm's length.
It holds for the via-point at any moment of the first half, and for the goal at the end. At the moment when the goal
begins to count, the best plans for the dense reward are already moving away from the via-point, so success does not
require being there."""
_RADIUS = (1.5, 4.0)
"""Range in metres of the distances from the arm's base to the via-point and to the goal.
The via-point is on the right, the goal on the left, both above the base."""


def joints(angles: Array) -> Array:
    """Compute positions of base, joints and tip [* 6 2] of arms with the relative joint angles `angles` [* 5]."""
    heading = angles.cumsum(-1)
    steps = np.stack([np.cos(heading), np.sin(heading)], -1)
    return np.concatenate([np.zeros_like(steps[..., :1, :]), steps.cumsum(-2)], -2)


class ViaPointReachers(Copies):
    """Vectorised via-point reaching: many planar arms in one array."""

    metadata = copies_metadata(DT, "orange: on the way, green: goal")
    STEPS: ClassVar[int] = STEPS
    REWARDS: ClassVar[tuple[str, ...]] = ("dense", "sparse")

    def __init__(
        self,
        num_envs: int = 1,
        reward: str = "dense",
        *,
        hidden_goal: bool = False,
        max_episode_steps: int = STEPS,
        workers: int = 1,
    ) -> None:
        """Make the arms, at rest along x. `workers` is ignored, as this task needs no threads."""
        super().__init__(num_envs, reward, 2 * _LINKS + 5, _LINKS, max_episode_steps)
        self.hidden_goal = hidden_goal
        self.angles, self.velocities = np.zeros((num_envs, _LINKS)), np.zeros((num_envs, _LINKS))
        self.via, self.goal, self.missed = np.zeros((num_envs, 2)), np.zeros((num_envs, 2)), np.full(num_envs, np.inf)

    def begin(self, generators: Sequence[np.random.Generator]) -> None:
        """Reset the arms to rest, nearly straight up, and draw new via-points and goals."""
        self.missed = np.full(len(generators), np.inf)
        draws = np.stack([generator.uniform(size=_LINKS + 4) for generator in generators])
        self.angles = 0.2 * (draws[:, :_LINKS] - 0.5)
        self.angles[:, 0] += np.pi / 2
        self.velocities = np.zeros_like(self.angles)
        radius = _RADIUS[0] + (_RADIUS[1] - _RADIUS[0]) * draws[:, _LINKS : _LINKS + 2]
        angle = np.pi / 2 * draws[:, _LINKS + 2 :] + np.array([0.0, np.pi / 2])
        points = radius[..., None] * np.stack([np.cos(angle), np.sin(angle)], -1)
        self.via, self.goal = points[:, 0], points[:, 1]

    def move(self, actions: Array) -> Array:
        self.velocities = self.velocities + STRENGTH * DT * actions
        self.angles = self.angles + DT * self.velocities
        distance = self.distance()
        if self.time <= STEPS // 2:
            self.missed = np.minimum(self.missed, distance)
        if self.reward == "dense":
            gain = -0.2 * distance
        else:
            gain = -10.0 * distance if self.time in (STEPS // 2, STEPS) else np.zeros_like(distance)
        return gain - 2e-3 * np.square(actions).sum(-1)

    def distance(self) -> Array:
        """Distance of each arm's tip from its current target: the via-point, later the goal."""
        target = self.via if self.time <= STEPS // 2 else self.goal
        heading = self.angles.cumsum(-1)
        tip = np.stack([np.cos(heading).sum(-1), np.sin(heading).sum(-1)], -1)  # the last of `joints`, at half the cost
        return np.linalg.norm(tip - target, axis=-1)

    def observe(self) -> Array:
        elapsed = np.full((len(self.angles), 1), self.time / STEPS)
        goal = np.zeros_like(self.goal) if self.hidden_goal and self.time < STEPS // 2 else self.goal
        return np.concatenate([self.angles, self.velocities, self.via, goal, elapsed], -1)

    def outcome(self) -> dict[str, Array]:
        """Compute the info of the last step: smallest distance to the via-point, final distance to the goal, and success."""
        goal = self.distance()
        return {"via_distance": self.missed, "goal_distance": goal, "success": (np.maximum(self.missed, goal) < REACHED) * 1.0}

    def render(self) -> Any:
        """Render the first arm, its via-point (circle) and its goal (cross), at 480 × 480 pixels."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure((4.8, 4.8), dpi=100)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(-5.2, 5.2), ylim=(-5.2, 5.2), aspect="equal")
        axes.axis("off")
        axes.plot(*self.via[0], "o", ms=14, mfc="none", mew=3, color="tab:orange")
        axes.plot(*self.goal[0], "x", ms=14, mew=3, color="tab:green")
        axes.plot(*joints(self.angles)[0].T, "o-", lw=5, ms=7, color="tab:blue", solid_capstyle="round")
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()


class ViaPointReacher(Single):
    """Via-point reaching environment with a single arm."""

    metadata = ViaPointReachers.metadata

    def __init__(self, render_mode: str | None = None, **settings: Any) -> None:
        super().__init__(ViaPointReachers(1, **settings), render_mode)
