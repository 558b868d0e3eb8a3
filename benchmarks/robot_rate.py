"""How many control steps a second do the simulated tasks take, as one batch and step by step, and how long is TCE's own update?

    python benchmarks/robot_rate.py                    threads 1, 2, 4, … up to the number of cores
    python benchmarks/robot_rate.py --learner          and TCE's batches of the recipes: simulation against updates, one thread
    python benchmarks/robot_rate.py --task --learner   those alone

Best of several repetitions, rewards and observations included; seconds of the clock and of the processor.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from corral.robot.env import ENVIRONMENTS, make_envs
from corral.robot.episode import Plant
from corral.robot.prepare import prepare
from corral.robot.settings import read_recipe, resolve
from corral.run.cores import cores

RECIPES = (
    "hopper_jump", "hopper_jump_published", "box_pushing", "box_pushing_published", "via_point", "via_point_sparse",
)  # fmt: skip
TASKS = {"hopper": "corral/HopperJump-v0", "box": "corral/BoxPushing-v0"}


def best(run: Callable[[], object], repetitions: int) -> tuple[float, float]:
    """Least seconds of the clock and of the processor."""
    found = []
    for _ in range(repetitions):
        clock, processor = time.perf_counter(), time.process_time()
        run()
        found.append((time.perf_counter() - clock, time.process_time() - processor))
    return min(one for one, _ in found), min(other for _, other in found)


def play(plant: Plant, seeds: list[int], batch: bool) -> None:
    """Episodes of plans that move every joint, resets included."""
    context, tracking = plant.start(seeds), plant.tracking
    start, _ = tracking.state(context)
    plan = start[:, None] + 0.3 * np.sin(np.linspace(0, 6, plant.steps))[None, :, None]
    if batch:
        plant.follow(context, plan, 0 * plan)
    else:
        plant.act(context, lambda t, seen: tracking.action(plan[:, t], 0 * plan[:, t], seen))


def measure_task(task: str, workers: list[int], episodes: int, repetitions: int) -> None:
    """One line for each number of threads and way of playing."""
    known, alone, seeds = ENVIRONMENTS[TASKS[task]], 0.0, list(range(episodes))
    steps = episodes * known.steps
    for count in workers:
        plant = Plant(make_envs(TASKS[task], episodes, workers=count), known.tracking, known.steps)
        for how in ("batch", "steps"):
            clock, processor = best(partial(play, plant, seeds, how == "batch"), repetitions)
            alone = alone or clock
            rate = f"{steps / clock:8.0f} steps/s  {1e6 * processor / steps:5.0f} µs of CPU a step"
            print(f"{task:6}  {count:2} threads  {how:5}  {rate}  {alone / clock:5.2f} × one thread's batch", flush=True)
        plant.close()


def measure_learner(recipe: str) -> None:
    """Simulation and updates of one batch of a recipe."""
    agent = prepare(resolve([read_recipe(recipe), {"workers": 1}]))
    agent.step()
    sampled, updated = best(agent.sample, 2), best(partial(agent.improve, *agent.sample()), 2)
    rates = (
        f"simulated in {sampled[0]:.2f} s ({sampled[1]:.2f} s of CPU) and learned from in {updated[0]:.2f} s ({updated[1]:.2f})"
    )
    print(f"{recipe:22} a batch is {rates}", flush=True)
    agent.plant.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, nargs="*", default=list(TASKS))
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--workers", type=int, nargs="*", help="numbers of threads")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--learner", action="store_true", help="TCE's batches of --recipe too")
    parser.add_argument("--recipe", choices=RECIPES, nargs="*", default=list(RECIPES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    workers = options.workers or [count for count in (1, 2, 4, 8, 16, 32) if count <= cores()]
    for task in options.task:
        measure_task(task, workers, options.episodes, options.repetitions)
    for recipe in options.recipe if options.learner else ():
        measure_learner(recipe)


if __name__ == "__main__":
    main()
