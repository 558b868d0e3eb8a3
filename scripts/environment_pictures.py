"""Draw docs/environments.png: one picture of each environment, side by side.

python scripts/environment_pictures.py        (needs matplotlib and imageio)
"""

from pathlib import Path

import gymnasium
import imageio.v3
import numpy as np

from corral.lab.environments import ENVIRONMENTS
from corral.lab.run.files import write_whole

TARGET = Path(__file__).parents[1] / "docs" / "environments.png"


def via_point() -> np.ndarray:
    """The arm on its way to the via-point."""
    env = gymnasium.make("corral/ViaPointReacher-v0", render_mode="rgb_array").unwrapped
    env.reset(seed=4)
    env.copies.angles[:] = [1.3, -0.5, -0.4, -0.3, -0.2]
    return env.render()[60:420]


def hopper() -> np.ndarray:
    """The hopper in the air, before the landing."""
    env = gymnasium.make("corral/HopperJump-v0", render_mode="rgb_array").unwrapped
    env.reset(seed=0)
    env.copies.batch.qpos[:] = [0.35, 1.65, 0.1, -0.35, -0.6, 0.3]
    return env.render()


def box() -> np.ndarray:
    """A push towards the target, half-way."""
    name = "corral/BoxPushing-v0"
    env, tracking = gymnasium.make(name, render_mode="rgb_array").unwrapped, ENVIRONMENTS[name].tracking
    observation, _ = env.reset(seed=6)
    ahead = observation[14:17] + 1.2 * (observation[21:24] - observation[14:17])
    guide = gymnasium.make(name).unwrapped
    for step in range(60):
        share = step / 60
        plan = guide.copies.joints_above((1 - share) * env.copies.box()[0, :3] + share * ahead)
        observation = env.step(tracking.action(plan, np.zeros(7), observation))[0]
    return env.render()


def main() -> None:
    picture = np.concatenate([via_point(), hopper(), box()], 1)
    write_whole(TARGET, lambda beside: imageio.v3.imwrite(beside, picture, extension=".png"))


if __name__ == "__main__":
    main()
