"""Benchmark of a step of Meta-World: its own environment, and corral's with shorter ways to the same numbers.

python benchmarks/metaworld_step.py reach-v3 pick-place-wall-v3         (needs corral[metaworld])
"""

import argparse
import time
import warnings
from typing import Any

import metaworld
import numpy as np

from corral.lab.environments.metaworld import quickened

STEPS, EPISODES = 500, 5


def microseconds(env: Any, actions: Any) -> float:
    """Processor time of a step: the least of several episodes of random actions."""
    taken = []
    for _ in range(EPISODES):
        env.reset()
        began = time.process_time()
        for action in actions:
            env.step(action)
        taken.append(time.process_time() - began)
    return 1e6 * min(taken) / len(actions)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=["reach-v3"])
    warnings.simplefilter("ignore")  # Meta-World's own, on gymnasium's newer releases
    actions = np.random.default_rng(0).uniform(-1, 1, (STEPS, 4))
    for task in parser.parse_args().tasks:
        kind = metaworld.ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE[f"{task}-goal-observable"]
        theirs, ours = (microseconds(env, actions) for env in (kind(seed=0), quickened(kind(seed=0))))
        print(f"{task:24} Meta-World's own {theirs:4.0f} µs a step, quickened {ours:4.0f} ({theirs / ours:.2f} ×)")


if __name__ == "__main__":
    main()
