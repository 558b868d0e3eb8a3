"""How well do TCE, BBRL and step-based baselines reach the via-point arm's two points, after equally many steps?

python benchmarks/via_point.py tce sparse 0        (algorithm, reward, seed; about 45 s of one core for TCE, 15 s for BBRL)
python benchmarks/via_point.py sb3-ppo dense 0 --iterations 25
"""

import argparse
import time

import gymnasium
import numpy as np
import torch

from corral.robot import ProDMP
from corral.robot.baseline import BASELINES, Baseline, BaselineConfig
from corral.robot.bbrl import BBRL, BBRLConfig
from corral.robot.env import ENVIRONMENTS
from corral.robot.episode import Episodes, Plant, held_out_seeds
from corral.robot.smoothness import log_dimensionless_jerk, spectral_arc_length, torque_rate
from corral.robot.tce import TCE, TCEConfig

NAME = "corral/ViaPointReacher-v0"
ENVIRONMENT = ENVIRONMENTS[NAME]
PRODMP = ProDMP(5, 5, 2.0, alpha=10.0, auto_scale=True, relative_goal=True)
FITTED = {"std": 0.3, "policy_rate": 2e-3, "critic_rate": 1e-2, "mean_bound": 0.15, "cov_bound": 0.01}
EPISODIC = {
    "tce": (TCE, TCEConfig(**FITTED)),
    "tce-published": (TCE, TCEConfig.as_published(**FITTED)),
    "bbrl": (BBRL, BBRLConfig(std=0.3)),
}


def make(algorithm: str, reward: str, seed: int) -> TCE | BBRL | Baseline:
    envs = gymnasium.make_vec(NAME, num_envs=64, vectorization_mode="vector_entry_point", reward=reward)
    plant = Plant(envs, ENVIRONMENT.tracking, ENVIRONMENT.steps)
    if algorithm in BASELINES:
        return Baseline(plant, algorithm, BaselineConfig(), seed=seed)
    learner, config = EPISODIC[algorithm]
    return learner(plant, PRODMP, ENVIRONMENT.dt, config, seed=seed)


def smoothness(episodes: Episodes) -> str:
    """Medians over the episodes."""
    velocities = episodes.observations[:, 1:, slice(*ENVIRONMENT.tracking.velocities)].numpy()
    jerk = np.median(log_dimensionless_jerk(velocities, ENVIRONMENT.dt))
    arc = np.median(spectral_arc_length(velocities, ENVIRONMENT.dt))
    return f"LDJ {jerk:.1f} SPARC {arc:.2f} torque rate {np.median(torque_rate(episodes.actions.numpy(), ENVIRONMENT.dt)):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("algorithm", choices=[*EPISODIC, *BASELINES])
    parser.add_argument("reward", choices=["dense", "sparse"])
    parser.add_argument("seed", type=int)
    parser.add_argument("--iterations", type=int, default=125, help="batches of 6400 steps; rates still fall over 125")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    agent = make(chosen.algorithm, chosen.reward, chosen.seed)
    seeds, began = held_out_seeds(256), time.process_time()
    for number in range(1, chosen.iterations + 1):
        metrics = agent.step()
        if number % 25 == 0 or number == chosen.iterations:
            done = agent.evaluate(seeds)
            print(f"{chosen.algorithm} {chosen.reward} {chosen.seed}: {int(metrics['env_steps']):7d} steps, return "
                  f"{done.returns.mean():7.2f}, success {done.success.mean():.3f}, exploring {metrics['return']:7.2f}, "
                  f"{time.process_time() - began:.0f} s", flush=True)  # fmt: skip
    print("at the end:", smoothness(done), "| exploring:", smoothness(agent.explore(seeds)))


if __name__ == "__main__":
    main()
