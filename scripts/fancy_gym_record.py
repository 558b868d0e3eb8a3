"""Record fancy_gym's rewards and motions as tests/robot/data/fancy_gym.npz, for comparison with ours.

Runs in an environment of its own (make test-fancy-gym): fancy_gym 0.3.0 needs gymnasium 0.29 and mujoco 2.3.3.
"""

from pathlib import Path

import fancy_gym  # noqa: F401  # registers the ids
import gymnasium
import mujoco
import numpy as np

TARGET = Path(__file__).parents[1] / "tests" / "robot" / "data" / "fancy_gym.npz"
BOX = {"dense": "Dense", "temporal_sparse": "TemporalSparse", "temporal_spatial_sparse": "TemporalSpatialSparse"}
STATES = 40
P, D = np.array([1.2, 1.2, 1.2, 1.2, 0.5, 0.3, 0.1]), np.array([0.1, 0.1, 0.1, 0.1, 0.06, 0.05, 0.03])
PLANNED = np.array([-0.9, 0.0, -0.4, 0.0, 0.0, 0.0, -0.6])
"""Radians by which the joints are asked to move, smoothly, within an episode."""


def make(name):
    return gymnasium.make(f"fancy/{name}-v0").unwrapped


def quaternions(rng, count):
    drawn = rng.standard_normal((count, 4))
    return drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)


def box_rewards(rng):
    """Rewards of drawn states, in the middle and at the end of an episode; every branch of the formulas is met."""
    q, velocity = rng.uniform(-4, 4, (STATES, 7)), rng.uniform(-4, 4, (STATES, 7))
    q[::2], velocity[::2] = [0, 0, 0, -1.5, 0, 1.5, 0], 0.5  # within the limits
    target = np.concatenate([rng.uniform(-0.4, 0.4, (STATES, 3)), quaternions(rng, STATES)], -1)
    near = rng.uniform(0.0, 0.15, (STATES, 1)) * rng.uniform(-1, 1, (STATES, 3))
    box = np.concatenate([target[:, :3] + near, quaternions(rng, STATES)], -1)
    tip = box[:, :3] + rng.uniform(-0.1, 0.1, (STATES, 3))
    rod = quaternions(rng, STATES)
    rod[::3] = [0.1, 0.99, 0.05, 0.0854]  # nearly upright
    rod[::3] /= np.linalg.norm(rod[::3], axis=-1, keepdims=True)
    torque = rng.uniform(-10, 10, (STATES, 7))
    record = {"q": q, "velocity": velocity, "box": box, "target": target, "tip": tip, "rod": rod, "torque": torque}
    for kind, name in BOX.items():
        env = make(f"BoxPushing{name}")
        for last in (False, True):
            states = zip(*np.split(box, [3], 1), *np.split(target, [3], 1), tip, rod, q, velocity, torque, strict=True)
            record[f"{kind}_{'last' if last else 'middle'}"] = np.array([env._get_reward(last, *state) for state in states])
    return record


def box_motion():
    """The arm at one posture (inertia, gravity), and a plan followed from a start with the rod in the box."""
    env = make("BoxPushingDense")
    env.reset(seed=0)
    env.data.qpos[:7], env.data.qvel[:] = [0.3, 0.2, -0.1, -1.9, 0.2, 2.1, 0.5], 0.0
    mujoco.mj_forward(env.model, env.data)
    inertia = np.zeros((env.model.nv, env.model.nv))
    mujoco.mj_fullM(env.model, inertia, env.data.qM)
    gravity = env.data.qfrc_bias[:7].copy()
    record = {"posture": env.data.qpos[:7].copy(), "inertia": np.diag(inertia)[:7].copy(), "gravity": gravity}
    record["tip"], record["rod"] = env.data.site("rod_tip").xpos.copy(), env.data.body("push_rod").xquat.copy()
    observation, _ = env.reset(seed=1)
    record["start"] = observation.copy()
    time = np.arange(1, 101) / 100
    blend, speed = 10 * time**3 - 15 * time**4 + 6 * time**5, (30 * time**2 - 60 * time**3 + 30 * time**4) / 2
    record["plan"] = observation[:7] + blend[:, None] * PLANNED
    record["plan_velocity"], states = speed[:, None] * PLANNED, []
    for position, velocity in zip(record["plan"], record["plan_velocity"], strict=True):
        action = P * (position - observation[:7]) + D * (velocity - observation[7:14])
        observation, *_ = env.step(np.clip(action, -1, 1))
        states.append(observation[:21].copy())
    return {**record, "states": np.array(states)}


def hopper(rng, sparse):
    """An episode under smooth torques: what the reward is made of, and the states."""
    env = make("HopperJumpSparse" if sparse else "HopperJump")
    env.reset(seed=3)
    record = {"start": env.data.qpos.copy(), "goal": env.goal[0]}
    time, phase = np.arange(250)[:, None] * 0.008, rng.uniform(0, 6, 3)
    actions = 0.8 * np.sin(2 * np.pi * np.array([1.3, 1.1, 0.9]) * time + phase)
    rows = []
    for action in actions:
        _, reward, _, _, info = env.step(action)
        told = [info["height"], env._is_floor_foot_contact(), info["goal_dist"], info["healthy"], reward]
        rows.append([*told, *env.data.qpos, *env.data.qvel])
    rows = np.array(rows)
    names = ("height", "contact", "distance", "healthy", "reward")
    return {
        **record,
        "actions": actions,
        **dict(zip(names, rows[:, :5].T, strict=True)),
        "states": rows[:50, 5:],  # by then it has touched the floor, and from there on the simulators' versions differ
    }


def main():
    rng = np.random.default_rng(0)
    parts = {"box": box_rewards(rng), "motion": box_motion()}
    parts |= {kind: hopper(rng, sparse=kind == "sparse") for kind in ("sparse", "dense")}
    TARGET.parent.mkdir(exist_ok=True)
    whole = TARGET.with_suffix(".part.npz")
    np.savez_compressed(whole, **{f"{part}_{name}": value for part, record in parts.items() for name, value in record.items()})
    whole.replace(TARGET)
    print(f"{TARGET.name}: {TARGET.stat().st_size / 1024:.0f} KB")  # noqa: T201


if __name__ == "__main__":
    main()
