"""How long is an update of SAC: stable-baselines3's own, and as replays of a CUDA graph? Both in one process.

python benchmarks/sac_update.py                         networks of 256 × 256, batches of 256
python benchmarks/sac_update.py --updates 16000         of the graph, whose capture counts; stable-baselines3 makes 200
"""

import argparse
import time

import gymnasium
import numpy as np
import torch
from stable_baselines3 import SAC
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv

from corral.lab.baselines.sac import GraphedSAC

COPIES, ROWS, BATCH, WARM_UP = 64, 4000, 256, 10
"""Environments, steps of each in the replay buffer, transitions of an update, updates before the clock starts."""


class Space(gymnasium.Env):
    """States and actions of about the hopper's size; nobody plays."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (15,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)


def measure(kind: type[SAC], updates: int, device: str, width: int = 256) -> float:
    """Milliseconds an update, from a full buffer of noise."""
    layers = {"net_arch": [width, width]}
    model = kind("MlpPolicy", DummyVecEnv([Space] * COPIES), device=device, policy_kwargs=layers, buffer_size=COPIES * ROWS)
    model.set_logger(Logger(None, []))
    buffer, draws = model.replay_buffer, np.random.default_rng(0)
    assert buffer is not None
    for array in (buffer.observations, buffer.next_observations, buffer.actions, buffer.rewards):
        array[:] = 0.3 * draws.normal(size=array.shape)
    buffer.full = True
    model.train(WARM_UP, BATCH)
    torch.cuda.synchronize() if device == "cuda" else None
    began = time.perf_counter()
    model.train(updates, BATCH)
    torch.cuda.synchronize() if device == "cuda" else None
    return 1e3 * (time.perf_counter() - began) / updates


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=16_000)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    updates = parser.parse_args().updates
    own = measure(SAC, 200, device)
    ours = measure(GraphedSAC, updates, device)
    print(f"{device}: stable-baselines3 {own:.2f} ms an update, ours {ours:.2f} ms ({own / ours:.1f} ×)")


if __name__ == "__main__":
    main()
