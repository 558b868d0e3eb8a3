"""A planar arm of five links that must pass a point in the first half of an episode and reach another at the end.

Each joint is a double integrator, so that an episode costs microseconds and every difference between methods is theirs:

    q̈ = 40 u,   |u| ≤ 1,   Δt = 0.02 s,   100 steps,   links of 1 m

    dense    r_t = −0.2 ‖tip_t − p‖ − 0.002 ‖u‖²          p: the via-point in the first half, the goal in the second
    sparse   r_t = −10 ‖tip_t − p‖ [t = 50 or t = 100] − 0.002 ‖u‖²

Observation, 15 numbers: five angles (rad, relative), five velocities (rad/s), via-point and goal (m), elapsed share. With
`hidden_goal` the goal is (0, 0) until half-way: who chooses a plan at the start cannot know where it should end.
"""

from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from corral.robot.tracking import Array

_Reward = Literal["dense", "sparse"]

_LINKS, STEPS, DT, STRENGTH = 5, 100, 0.02, 40.0
REACHED = 0.25
"""Largest distance in metres that counts as success, 5 % of the arm's length: from the via-point at any moment of the first
half, and from the goal at the end. Success does not require being at the via-point at the moment when the goal begins to count:
the dense reward's best plans are already moving to the goal by then."""
_RADIUS = (1.5, 4.0)
"""Range of distances in metres from the base to both points. The via-point is to the right, the goal to the left, both above
the base."""

_OBSERVATION = gymnasium.spaces.Box(-np.inf, np.inf, (2 * _LINKS + 5,), np.float64)
_ACTION = gymnasium.spaces.Box(-1.0, 1.0, (_LINKS,), np.float32)


def joints(angles: Array) -> Array:
    """Positions of the base, the joints and the tip [* 6 2] of arms with these relative angles [* 5]."""
    heading = angles.cumsum(-1)
    steps = np.stack([np.cos(heading), np.sin(heading)], -1)
    return np.concatenate([np.zeros_like(steps[..., :1, :]), steps.cumsum(-2)], -2)


def tip_of(angles: Array) -> Array:
    """Position of the tip alone [* 2], the last of `joints`."""
    heading = angles.cumsum(-1)
    return np.stack([np.cos(heading).sum(-1), np.sin(heading).sum(-1)], -1)


class Arms:
    """State of many arms, shared by both environments below."""

    def __init__(self, count: int, reward: _Reward, hidden_goal: bool = False) -> None:
        if reward not in ("dense", "sparse"):
            raise ValueError(f"ViaPointReacher: `reward` is 'dense' or 'sparse'; got {reward!r}.")
        self.reward, self.hidden_goal, self.time = reward, hidden_goal, 0
        self.angles, self.velocities = np.zeros((count, _LINKS)), np.zeros((count, _LINKS))
        self.via, self.goal, self.missed = np.zeros((count, 2)), np.zeros((count, 2)), np.full(count, np.inf)

    def reset(self, generators: list[np.random.Generator]) -> None:
        """Reset arms to nearly straight up and at rest, with new points. Each arm draws from its own generator."""
        self.time, self.missed = 0, np.full(len(generators), np.inf)
        draws = np.stack([generator.uniform(size=_LINKS + 4) for generator in generators])
        self.angles = 0.2 * (draws[:, :_LINKS] - 0.5)
        self.angles[:, 0] += np.pi / 2
        self.velocities = np.zeros_like(self.angles)
        radius = _RADIUS[0] + (_RADIUS[1] - _RADIUS[0]) * draws[:, _LINKS : _LINKS + 2]
        angle = np.pi / 2 * draws[:, _LINKS + 2 :] + np.array([0.0, np.pi / 2])
        points = radius[..., None] * np.stack([np.cos(angle), np.sin(angle)], -1)
        self.via, self.goal = points[:, 0], points[:, 1]

    def step(self, action: Array) -> Array:
        """Apply torques [N 5] for one Δt; returns rewards [N]."""
        torque = np.clip(action, -1.0, 1.0).astype(np.float64)
        self.velocities = self.velocities + STRENGTH * DT * torque
        self.angles = self.angles + DT * self.velocities
        self.time += 1
        distance = self.distance()
        if self.time <= STEPS // 2:
            self.missed = np.minimum(self.missed, distance)
        if self.reward == "dense":
            gain = -0.2 * distance
        else:
            gain = -10.0 * distance if self.time in (STEPS // 2, STEPS) else np.zeros_like(distance)
        return gain - 2e-3 * np.square(torque).sum(-1)

    def distance(self) -> Array:
        """Distance of each tip from the current target point."""
        target = self.via if self.time <= STEPS // 2 else self.goal
        return np.linalg.norm(tip_of(self.angles) - target, axis=-1)

    def observation(self) -> Array:
        """Observations [N 15]."""
        elapsed = np.full((len(self.angles), 1), self.time / STEPS)
        goal = np.zeros_like(self.goal) if self.hidden_goal and self.time < STEPS // 2 else self.goal
        return np.concatenate([self.angles, self.velocities, self.via, goal, elapsed], -1)

    def outcome(self) -> dict[str, Array]:
        """Info of the last step: least distance to the via-point, last distance to the goal, and whether both are small."""
        goal = self.distance()
        return {"via_distance": self.missed, "goal_distance": goal, "success": (np.maximum(self.missed, goal) < REACHED) * 1.0}


class ViaPointReachers(VectorEnv):
    """Many arms in one array with simultaneous episodes. As in `SyncVectorEnv`, sub-environment i draws from seed + i."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": []}  # noqa: RUF012  # Gymnasium's own form

    def __init__(
        self, num_envs: int = 1, reward: _Reward = "dense", *, hidden_goal: bool = False, max_episode_steps: int = STEPS
    ) -> None:
        if max_episode_steps != STEPS:  # Gymnasium passes what was registered
            raise ValueError(f"ViaPointReachers: episodes have {STEPS} steps; got max_episode_steps={max_episode_steps}.")
        self.num_envs, self.arms = num_envs, Arms(num_envs, reward, hidden_goal)
        self.single_observation_space, self.single_action_space = _OBSERVATION, _ACTION
        self.observation_space, self.action_space = batch_space(_OBSERVATION, num_envs), batch_space(_ACTION, num_envs)
        self._generators = [np.random.default_rng() for _ in range(num_envs)]

    def reset(
        self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        if seed is not None:
            seeds = [seed + index for index in range(self.num_envs)] if isinstance(seed, int) else seed
            if len(seeds) != self.num_envs:
                raise ValueError(f"ViaPointReachers: one seed for each of {self.num_envs} arms; got {len(seeds)}.")
            self._generators = [gymnasium.utils.seeding.np_random(one)[0] for one in seeds]
        if options and not np.all(options.get("reset_mask", True)):
            raise ValueError("ViaPointReachers: arms start and end together; got a `reset_mask` that leaves some out.")
        self.arms.reset(self._generators)
        return self.arms.observation(), {}

    def step(self, actions: Array) -> tuple[Array, Array, NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        nobody = np.zeros(self.num_envs, bool)
        if self.arms.time == STEPS:  # the step after the last one starts the next episodes
            return self.reset()[0], np.zeros(self.num_envs), nobody, nobody.copy(), {}
        rewards = self.arms.step(actions)
        over = self.arms.time == STEPS
        return self.arms.observation(), rewards, nobody, nobody | over, self.arms.outcome() if over else {}


class ViaPointReacher(gymnasium.Env):
    """A single arm that can be rendered."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": round(1 / DT), "render_marks": "orange: on the way, green: goal"}  # noqa: RUF012  # Gymnasium's own form
    observation_space, action_space = _OBSERVATION, _ACTION

    def __init__(self, reward: _Reward = "dense", render_mode: str | None = None, *, hidden_goal: bool = False) -> None:
        self.render_mode, self.arms = render_mode, Arms(1, reward, hidden_goal)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self.arms.reset([self.np_random])
        return self.arms.observation()[0], {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        reward = self.arms.step(np.asarray(action)[None])
        over = self.arms.time == STEPS
        info = {key: float(value[0]) for key, value in self.arms.outcome().items()} if over else {}
        return self.arms.observation()[0], float(reward[0]), False, over, info

    def render(self) -> NDArray[np.uint8]:
        """Render the arm, the via-point (circle) and the goal (cross); 480 × 480 pixels."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure((4.8, 4.8), dpi=100)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(-5.2, 5.2), ylim=(-5.2, 5.2), aspect="equal")
        axes.axis("off")
        axes.plot(*self.arms.via[0], "o", ms=14, mfc="none", mew=3, color="tab:orange")
        axes.plot(*self.arms.goal[0], "x", ms=14, mew=3, color="tab:green")
        axes.plot(*joints(self.arms.angles)[0].T, "o-", lw=5, ms=7, color="tab:blue", solid_capstyle="round")
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()
