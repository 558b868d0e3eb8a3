"""Point masses in plain torch, all moved in one call on any device: a vector environment that a robot's learner takes.

    corral train --environment examples/point_masses.py:PointMasses --tracking.joints "[0, 2]" --tracking.velocities "[2, 4]" \\
        --tracking.p 4 --tracking.d 2 --tracking.steps 50 --tracking.dt 0.04 --set learner.std=0.3
    … --set environment_config.device=cuda      the masses on a GPU

What a learner needs of such a class: `Class(num_envs, **environment_config)`; flat observations and actions; `reset` with a
list of seeds, one for each copy; `step`, which takes an array; tensors or arrays as results; an `autoreset_mode` of NEXT_STEP.
`success` in the last step's info and `render` are for measuring and filming.
"""

from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

STEPS, DT = 50, 0.04


class PointMasses(VectorEnv):
    """Masses of 1 kg in the plane, forces of up to 4 N, and a goal for each; pays minus the distance at every step."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": ["rgb_array"], "render_fps": round(1 / DT)}
    single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (6,), np.float32)  # position, velocity, goal
    single_action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, num_envs: int, render_mode: str | None = None, device: str = "cpu") -> None:
        self.num_envs, self.render_mode, self.device = num_envs, render_mode, device
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
        """Begin all episodes; the seed of a copy alone decides where it and its goal are."""
        seeds = range(self.num_envs) if seed is None else seed
        drawn = torch.stack([torch.rand(4, generator=torch.Generator().manual_seed(int(one))) for one in seeds])
        self.position, self.goal = (2 * drawn - 1).to(self.device).split(2, -1)
        self.velocity, self.time = torch.zeros_like(self.position), 0
        return self.observe(), {}

    def step(self, actions: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Push all masses for one step."""
        self.time += 1
        self.velocity = self.velocity + DT * 4 * torch.as_tensor(actions, device=self.device).clamp(-1, 1)
        self.position = self.position + DT * self.velocity
        apart = (self.position - self.goal).norm(dim=-1)
        never = torch.zeros_like(apart, dtype=torch.bool)
        return self.observe(), -apart, never, never | (self.time == STEPS), {"success": apart < 0.1}

    def observe(self) -> torch.Tensor:
        """Observations [E 6]."""
        return torch.cat([self.position, self.velocity, self.goal], -1)

    def render(self) -> tuple[np.ndarray, ...]:
        """One picture per mass: the mass in black, its goal in red."""
        pictures = np.full((self.num_envs, 160, 160, 3), 255, np.uint8)
        for points, colour in ((self.goal, (220, 0, 0)), (self.position, (0, 0, 0))):
            for picture, (x, y) in zip(pictures, (80 + 60 * points.cpu().clamp(-1.2, 1.2)).int().tolist(), strict=True):
                picture[160 - y - 3 : 160 - y + 3, x - 3 : x + 3] = colour
        return tuple(pictures)
