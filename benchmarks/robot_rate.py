"""Benchmark of the simulated tasks: control steps a second, as one batch and step by step, and TCE's own update.

    python benchmarks/robot_rate.py                     threads 1, 2, 4, … up to the number of cores
    python benchmarks/robot_rate.py --threads 1 16 --episodes 512 --way batch --repetitions 2 --save     16 cores? a minute
    python benchmarks/robot_rate.py --threads 1 --episodes 76 1024 --way batch warp --save     a GPU, and corral[warp]?
    python benchmarks/robot_rate.py --learner           and TCE's batches of the recipes, one thread
    python benchmarks/robot_rate.py --task --learner    those alone; `make results` writes saved rows into docs/warp.md

Best of several repetitions, rewards and observations included; seconds of the clock and of the processor. A batch of many
threads wants many copies: at every step the threads wait for the slowest of them.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import gymnasium
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from rows import FOLDER, Row, read_rows, rounded, stamp, table, write_rows

from corral.cores import cores
from corral.lab.environments import ENVIRONMENTS, make_envs
from corral.lab.environments.vector import Simulator, Threads
from corral.lab.jobs.robot.prepare import prepare
from corral.lab.jobs.robot.settings import resolve
from corral.lab.run.settings import read_recipe
from corral.robot.episode import Plant

RECIPES = (
    "hopper_jump", "hopper_jump_published", "box_pushing", "box_pushing_published", "via_point", "via_point_sparse",
)  # fmt: skip
TASKS = {"hopper": "corral/HopperJump-v0", "box": "corral/BoxPushing-v0"}
WAYS = {"batch": "as one batch", "steps": "step by step", "warp": "as one batch, MuJoCo Warp"}
"""MuJoCo's own batch, one environment after the other (a block of them on each thread), and a batch on a GPU."""
FILE = FOLDER / "robot_rate.jsonl"


def best(run: Callable[[], object], repetitions: int) -> tuple[float, float]:
    """Fewest seconds of the clock, and fewest of the processor."""
    found = []
    for _ in range(repetitions):
        clock, processor = time.perf_counter(), time.process_time()
        run()
        found.append((time.perf_counter() - clock, time.process_time() - processor))
    return min(one for one, _ in found), min(other for _, other in found)


def play(plant: Plant, seeds: list[int], way: str) -> None:
    """Episodes of plans that move every joint, resets included."""
    context, tracking = plant.start(seeds, learned_from=way == "warp"), plant.tracking
    start, _ = tracking.state(context)
    plan = start[:, None] + 0.3 * np.sin(np.linspace(0, 6, plant.steps))[None, :, None]
    plant.follow(context, plan, 0 * plan)


def measure_task(task: str, threads: Sequence[int], ways: Sequence[str], episodes: int, repetitions: int) -> list[Row]:
    """A row for each number of threads and way of playing."""
    known, seeds = ENVIRONMENTS[TASKS[task]], list(range(episodes))
    steps, rows = episodes * known.steps, list[Row]()
    for count, way in product(threads, ways):
        if way == "steps":
            sizes = [episodes // count + (index < episodes % count) for index in range(count)]
            envs: VectorEnv = Threads([gymnasium.make_vec(TASKS[task], size, vectorization_mode="sync") for size in sizes])
        else:
            envs = make_envs(TASKS[task], episodes, workers=count, simulator=warp_simulator() if way == "warp" else None)
        plant = Plant(envs, known.tracking, known.steps)
        if way == "warp":
            play(plant, seeds, way)  # compiles, and captures its graphs
        clock, processor = best(partial(play, plant, seeds, way), repetitions)
        measured = {"steps_per_second": steps / clock, "cpu_us_per_step": 1e6 * processor / steps}
        rows.append({"task": task, "episodes": episodes, "cores": cores(), "workers": count, "way": way, **measured})
        plant.close()
    return with_ratios(rows)


def warp_simulator() -> Simulator:
    """MuJoCo Warp, which only this way of playing needs."""
    from corral.lab.environments.warp_batch import WarpSimulator

    return WarpSimulator()


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Add each row's speed relative to one thread's batch, and to one thread step by step, if those were measured."""
    alone = {row["way"]: row["steps_per_second"] for row in rows if row["workers"] == 1}
    return [row | {f"times_one_{way}": row["steps_per_second"] / rate for way, rate in alone.items()} for row in rows]


def measure_learner(recipe: str) -> Row:
    """Simulation and updates of one batch of a recipe, on one thread."""
    agent = prepare(resolve([read_recipe(recipe), {"workers": 1}]))
    agent.step()
    sampled, updated = best(agent.sample, 2), best(partial(agent.improve, *agent.sample()), 2)
    agent.plant.close()
    cpu = {"simulated_cpu_s": sampled[1], "learned_cpu_s": updated[1]}
    return {"recipe": recipe, "simulated_s": sampled[0], "learned_s": updated[0], **cpu, "times": updated[1] / sampled[1]}


def save(rows: Sequence[Row]) -> None:
    """Put rows in place of earlier ones of the same task and numbers of cores and copies, or recipe."""
    replaced, where = {_kind(row) for row in rows}, stamp()
    short = [where | {name: rounded(value) for name, value in row.items()} for row in rows]
    write_rows(FILE, [row for row in read_rows(FILE) if _kind(row) not in replaced] + short)


def _kind(row: Row) -> tuple[object, ...]:
    return row.get("task"), row.get("cores"), row.get("episodes"), row.get("recipe")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, nargs="*", default=list(TASKS))
    parser.add_argument("--threads", type=int, nargs="*", help="numbers of threads; ratios need 1 among them")
    parser.add_argument("--way", choices=WAYS, nargs="*", default=["batch", "steps"])
    parser.add_argument("--episodes", type=int, nargs="+", default=[64], help="copies that are simulated together")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--learner", action="store_true", help="TCE's batches of --recipe too")
    parser.add_argument("--recipe", choices=RECIPES, nargs="*", default=list(RECIPES))
    parser.add_argument("--save", action="store_true", help=f"keep the rows in {FILE.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    threads = options.threads or [count for count in (1, 2, 4, 8, 16, 32) if count <= cores()]
    for task, episodes in product(options.task, options.episodes):
        rows = measure_task(task, threads, options.way, episodes, options.repetitions)
        print(table(rows), flush=True)
        if options.save:
            save(rows)
    for recipe in options.recipe if options.learner else ():
        row = measure_learner(recipe)
        print(table([row]), flush=True)
        if options.save:
            save([row])


if __name__ == "__main__":
    main()
