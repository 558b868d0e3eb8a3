"""Runs → results page: which runs count, where they are compared, and what is said of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corral.lab.jobs.robot.settings import resolve
from corral.lab.jobs.robot.smoke import TRAINING
from corral.lab.jobs.robot.train import train
from results import packed
from results.robots import page as robot_page
from results.robots import runs as robot_results
from results.robots.runs import LENGTHS


def run(row: str, seed: int, returns: list[float], *, task: str = "via-point arm, dense", asked: int = 2) -> dict[str, Any]:
    """As robots.json holds it: measured at 0, 100, 200, … steps."""
    flat = {name: [0.5] * len(returns) for name in robot_results.MEASURED}
    steps = [100 * number for number in range(len(returns))]
    about = {
        "asked": asked,
        "iterations": len(returns) - 1,
        "batch": 100,
        "seconds": 10,
        "learner": {},
        "prodmp": None,
        "versions": {},
    }
    return {"task": task, "row": row, "seed": seed, "env_steps": steps, **about, **flat, "return": returns}


def test_a_run_is_read_as_it_was_measured(tmp_path: Path) -> None:
    plans = {"prodmp": {"basis": 3, "alpha": 10.0, "auto_scale": True}}
    published = {"tce": {"policy_epochs": 1, "critic_epochs": 1, "closing_segment": False}}
    done = train(
        resolve([TRAINING, plans, published, {"seed": 3, "environment_config": {"reward": "dense"}}]),
        out=tmp_path / "runs" / "one",
        quiet=True,
    )
    (path,) = robot_results.run_folders(tmp_path)
    found = robot_results.read_run(path)
    assert found is not None
    assert (found["task"], found["row"], found["seed"]) == ("via-point arm, dense", "TCE, published rules", 3)
    assert found["env_steps"] == [0, 400, 800]
    assert found["return"][-1] == pytest.approx(done.summary["return_final"], rel=1e-4)
    assert all(len(found[name]) == 3 for name in robot_results.MEASURED)
    assert -1 <= found["explore/autocorrelation"][-1] <= 1


def test_the_furthest_run_of_a_seed_counts() -> None:
    short, long = run("TCE", 0, [-9.0, -5.0]), run("TCE", 0, [-9.0, -5.0, -3.0])
    other = run("TCE", 1, [-9.0, -4.0])
    assert robot_results.longest([short, long, other]) == [long, other]


def test_a_row_is_looked_at_where_all_its_runs_were_measured() -> None:
    # TCE's runs were to take 400 steps and came to 300 and 200: both are looked at at 200. PPO's came to 100, less than half.
    runs = [run("TCE", 0, [-9.0, -5.0, -3.0, -1.0], asked=4), run("TCE", 1, [-9.0, -8.0, -3.0], asked=4)]
    runs += [run("PPO", 0, [-9.0, 0.0], asked=4), run("SAC", 0, [-9.0, -6.0], asked=1)]  # SAC was to take 100, and did
    rows = robot_page.by_task(runs)["via-point arm, dense"]
    assert robot_page.ends(rows) == {"TCE": 200, "SAC": 100}
    assert robot_page.values(rows["TCE"], "return", 200).tolist() == [-3.0, -3.0]
    # Highest −3 from −9: 80 % of the way is −4.2, reached after 200 steps by both.
    assert (
        "| TCE | 2 | 0 thousand | −3.0 (−3.0 … −3.0) | 50 (50 … 50) | 0 thousand (2 of 2) | 0.5 |"
        in robot_page.results_table(rows, {})
    )
    assert "over which their learning rates fall: TCE (0 thousand)." in robot_page.section("x", rows, {})


def test_golden_steps_to_most_of_the_way() -> None:
    # Best at the end: −1, from −9: 80 % of the way is −2.6, where TCE is after 200 steps.
    runs = [run("TCE", 0, [-9.0, -5.0, -2.0, -1.0]), run("BBRL", 0, [-9.0, -8.0, -5.0, -5.0])]
    runs = [one | {"env_steps": [1000 * step for step in one["env_steps"]]} for one in runs]
    assert [robot_page.way_there([one], 300_000, -1.0) for one in runs] == ["200 thousand (1 of 1)", "– (0 of 1)"]
    assert robot_page.thousands(416_000) == "416 thousand"
    assert robot_page.thousands(1_280_000) == "1.28 million"


def test_a_row_with_fewer_steps_is_compared_at_its_own_end() -> None:
    # TCE has −5 after 100 steps, where SAC ends with −6, whatever TCE has later.
    tce = [run("TCE", seed, [-9.0, -5.0 + 0.01 * seed, 90.0]) for seed in range(3)]
    sac = [run("SAC", seed, [-9.0, -6.0 - 0.01 * seed], asked=1) for seed in range(3)]
    (found,) = robot_page.compare(robot_page.by_task([*tce, *sac])).values()
    assert found["SAC"][0].mean.value == pytest.approx(1.02)


def test_rows_measured_at_other_steps_are_compared_on_the_line_between() -> None:
    # SAC ends after 150 steps, where TCE is half-way from −5 (100 steps) to −3 (200).
    tce = [run("TCE", seed, [-9.0, -5.0 + 0.01 * seed, -3.0 + 0.01 * seed]) for seed in range(3)]
    sac = [run("SAC", seed, [-9.0, -6.0 - 0.01 * seed], asked=1) | {"env_steps": [0, 150]} for seed in range(3)]
    (found,) = robot_page.compare(robot_page.by_task([*tce, *sac])).values()
    assert found["SAC"][0].mean.value == pytest.approx(2.02)


def test_a_row_that_never_rose_came_no_part_of_the_way() -> None:
    rows = {"TCE": [run("TCE", 0, [0.0, 0.0, 0.0])]}
    assert robot_page.way_there(rows["TCE"], 200, 0.0) == "– (0 of 1)"


def test_claims_need_seeds_and_hold_together() -> None:
    generator = np.random.default_rng(0)
    better = [run("TCE", seed, [-9.0, -1.0 + 0.01 * generator.standard_normal()]) for seed in range(5)]
    worse = [run("BBRL", seed, [-9.0, -5.0 + 0.01 * generator.standard_normal()]) for seed in range(5)]
    few = [run("PPO", seed, [-9.0, -8.0 - seed]) for seed in range(2)]
    tasks = robot_page.by_task([*better, *worse, *few])
    (found,) = robot_page.compare(tasks).values()
    assert found["PPO"][1] == 1.0, "two seeds tell nothing"
    _, bold, bbrl, ppo = (line for line in robot_page.results_table(*tasks.values(), found).splitlines() if "seeds" not in line)
    assert bold.startswith("| **TCE** | 5 |")
    assert bbrl.endswith("| +4.0 (4.0 … 4.0) | **<.001** |")
    assert ppo.endswith("| +7.5 | 1 |")


def test_a_task_whose_recipe_credits_later_rewards_is_judged_with_it() -> None:
    names = ("TCE", robot_page.OURS[0], "BBRL")
    rows = {
        name: [run(name, seed, [-9.0, -1.0 - place - 0.01 * seed]) for seed in range(3)] for place, name in enumerate(names)
    }
    assert set(robot_page.compare({"hopper": rows})["hopper"]) == {"TCE", "BBRL"}
    assert robot_page.compare({"hopper": {"BBRL": rows["BBRL"]}}) == {"hopper": {}}


def test_a_page_of_made_up_runs_and_its_figure(tmp_path: Path) -> None:
    runs = [run("TCE", seed, [-9.0, -1.0 - seed]) for seed in range(3)] + [run("BBRL", seed, [-9.0, -5.0]) for seed in range(3)]
    tasks = robot_page.by_task(runs)
    blocks = robot_page.blocks(tasks)
    assert blocks["glance"]().startswith("| success on held-out contexts |")
    assert blocks["tasks"]().startswith("### Via-point arm, dense\n")
    robot_page.draw_curves(tasks, "return", tmp_path / "figure.svg")
    assert "<svg" in (tmp_path / "figure.svg").read_text()


def test_golden_glance() -> None:
    # Of BBRL's two rows the one that succeeds more stands for it; TCE's is the one that recipes have, however it did.
    def succeeding(row: str, seed: int, success: float) -> dict[str, Any]:
        return run(row, seed, [0.0, 1.0], task=f"box pushing, {LENGTHS[0.9e6]}", asked=1) | {"success": [0.0, success]}

    runs = [succeeding(row, seed, 0.5) for row in ("TCE", "BBRL", "BBRL, 4 plans a context") for seed in (0, 1)]
    runs[2:4] = [succeeding("BBRL", seed, 0.75) for seed in (0, 1)]
    runs += [succeeding(robot_page.OURS[0], 0, 0.25), run("TCE", 0, [0.0, 1.0], asked=1)]
    table = robot_page.glance_table(robot_page.by_task(runs)).splitlines()
    assert table[0] == "| success on held-out contexts | TCE | BBRL |"
    assert table[2:] == [
        "| [box pushing, up to 10 million steps](#box-pushing-up-to-10-million-steps) "
        "| 25 % (1 seed, 0.0001 million) | 75 % (2 seeds, 0.0001 million) |"
    ]
    assert robot_page.anchor("Meta-World, reach-v3, up to 10 million steps") == "meta-world-reach-v3-up-to-10-million-steps"


def test_long_runs_and_variants_have_a_place_of_their_own() -> None:
    def about(algorithm: str, iterations: int, **chosen: Any) -> tuple[str, str]:
        environment = {"environment": "corral/HopperJump-v0", "environment_config": {"reward": "sparse"}}
        settings = {"algorithm": algorithm, "iterations": iterations, **environment}
        rules = {"episodes": 64, "closing_segment": True, "move_to_event": False, "noise_colour": 1.0, "replan_from": "desired"}
        config = {"settings": settings, "objective": rules | chosen, "task": {"steps": 250}}
        return robot_results.task_of(config), robot_results.row_of(config)

    # A batch is 64 × 250 = 16,000 steps: 40 are 0.64 million, 75 are 1.2, 625 are 10, 3000 are 48.
    assert about("tce", 40) == ("hopper jump, sparse", "TCE")
    assert about("sb3-sac", 75)[0] == about("tce", 625)[0] == "hopper jump, sparse, up to 10 million steps"
    assert about("tce", 3000)[0] == "hopper jump, sparse, more than 20 million steps"
    assert about("tce", 625, credit_lam=1.0)[1] == "TCE, credit for what comes later"
    assert about("tce", 625, segments_until="inf")[1] == "TCE"  # as config.json writes what is no number in JSON
    assert about("tce", 625, segments_until=1.0)[1] == "TCE, segments of the first 1 s"
    assert about("bbrl", 625, plans_per_context=4)[1] == "BBRL, 4 plans a context"
    assert about("sb3-ppo-pink", 325)[1] == "PPO, coloured noise"
    half = about("sb3-ppo-pink", 325, noise_colour=0.5, controller_span=1.0)[1]
    assert half == "PPO, coloured noise 1/f^0.5, same controller"
    assert about("tce", 325, replan_every=50, replan_from="state")[1] == "TCE, a plan every 50 steps from the state"
    assert about("bbrl", 625, contextual_covariance=True)[1] == "BBRL, covariance of the context"


def test_a_run_that_went_on_in_another_simulator_says_so() -> None:
    def task(simulator: str | None, *changes: dict[str, Any]) -> str:
        settings = {"environment": "corral/BoxPushing-v0", "environment_config": {"reward": "dense"}, "iterations": 40}
        chosen = settings if simulator is None else settings | {"simulator": simulator}
        config = {"settings": chosen, "objective": {"episodes": 76}, "task": {"steps": 100}, "simulated": changes}
        return robot_results.task_of(config)

    assert task(None) == task("mujoco") == "box pushing, dense"
    change = {"from": "warp", "to": "mujoco", "after": 3}
    assert task("warp") == task("mujoco", change) == "box pushing, dense, learned in MuJoCo Warp"
    rows = {"TCE": [run("TCE", 0, [-9.0, -5.0]) | {"batch": 1000, "simulated": [change]}, run("TCE", 1, [-9.0, -5.0])]}
    assert robot_page.moved(rows) == ["TCE (1 run, after 3 thousand steps or more)"]
    assert "Begun in MuJoCo Warp, resumed in MuJoCo: TCE (1 run" in robot_page.section("box pushing", rows, {})


def test_rows_have_an_order_and_colours_of_their_own() -> None:
    names = ["PPO, same controller", "SAC", "TCE, published rules", "BBRL", "TRPL", "TCE", "PPO"]
    tasks = robot_page.by_task([run(name, 0, [-9.0, -5.0, -4.0]) for name in names])
    (rows,) = tasks.values()
    assert list(rows) == ["TCE", "TCE, published rules", "BBRL", "PPO", "PPO, same controller", "TRPL", "SAC"]
    assert len(set(robot_page.colours(tasks).values())) == len(names)
    measured = robot_page.colours(robot_page.by_task(packed.read(robot_results.FILES["runs"])))
    assert len(set(measured.values())) == len(measured), "two rows of the page share a colour: COLOURS has too few"


def test_what_was_tried_of_box_pushings_credit_is_in_its_raw_file() -> None:
    section = robot_page.PAGE.read_text().partition("## Credit on box pushing")[2].partition("## The arm, solved")[0]
    tried = packed.read(robot_results.FILES["credit"].with_name("credit-tried.parquet"))
    rows = [[f"−{-value:.0f}" for value in one["return"][1:]] for one in tried if one["recipe"] == "box_pushing"]
    table = [line.strip("| ").split(" | ")[1:] for line in section.splitlines() if line.startswith("|") and "−" in line]
    assert len(table) == 6
    assert all([cell for cell in cells if cell != "–"] in rows for cells in table)
    assert all(cell in section for cell in rows[-1])  # seed 0, in the text
