"""Plans: who is run with what, and that nobody gets more than another."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.lab.compare.plan import (
    ComparisonPlan,
    Training,
    contestant_key,
    half_decades,
    make_plan,
    make_run,
    parse_sweeps,
    run_arguments,
    run_settings,
)
from corral.validate import RunError


def test_without_a_sweep_all_seeds_are_reported() -> None:
    plan = make_plan("llm", ["ppo_clip", "troll"], {}, seeds=2, choosing=2)
    assert (plan.choose_seeds, plan.report_seeds, plan.count) == ((), (0, 1), 4)
    assert plan.sweep_runs() == []
    # Seed by seed, so that whoever stops early has runs of everybody.
    assert [run.folder for run in plan.report_runs({})] == ["ppo_clip_seed0", "troll_seed0", "ppo_clip_seed1", "troll_seed1"]
    assert {run.stage for run in plan.report_runs({})} == {"report"}


def test_with_a_sweep_settings_are_chosen_on_some_seeds_and_reported_on_others() -> None:
    plan = make_plan("llm", ["dppo", "troll"], {"learning_rate": [1e-4, 3e-4], "num_iterations": [1]}, seeds=3, choosing=2)
    # 2 contestants × 2 settings × 2 seeds, then 2 contestants × 3 fresh seeds.
    assert (plan.choose_seeds, plan.report_seeds, plan.count) == ((0, 1), (2, 3, 4), 14)
    swept = plan.sweep_runs()
    assert [run.folder for run in swept[:3]] == [
        "dppo_learning_rate=1e-4_num_iterations=1_seed0",
        "troll_learning_rate=1e-4_num_iterations=1_seed0",
        "dppo_learning_rate=3e-4_num_iterations=1_seed0",
    ]
    chosen = {"dppo": {"learning_rate": 1e-4}, "troll": {"learning_rate": 3e-4}}
    reported = plan.report_runs(chosen)
    assert [(run.contestant, run.setting["learning_rate"], run.seed) for run in reported[:3]] == [
        ("dppo", 1e-4, 2),
        ("troll", 3e-4, 2),
        ("dppo", 1e-4, 3),
    ]
    assert plan.report_runs({}) == []
    assert [run.contestant for run in plan.report_runs({"troll": {}})] == ["troll"] * 3


def test_the_first_seed_can_be_another() -> None:
    plan = make_plan("robot", ["tce", "bbrl"], {"learning_rate": [1e-3]}, seeds=1, choosing=1, first=10)
    assert (plan.choose_seeds, plan.report_seeds) == ((10,), (11,))


NAMES = st.lists(st.sampled_from(["reinforce", "ppo_clip", "dppo", "troll", "gspo"]), min_size=2, max_size=4, unique=True)
VALUES = st.lists(st.floats(1e-6, 1e-1).map(lambda value: float(f"{value:.2e}")), min_size=1, max_size=4, unique=True)
SWEEPS = st.dictionaries(st.sampled_from(["learning_rate", "objective_config.bound", "beta"]), VALUES, max_size=2)


@given(names=NAMES, sweep=SWEEPS, seeds=st.integers(1, 4), choosing=st.integers(1, 3), first=st.integers(0, 5))
def test_everybody_gets_the_same(
    names: list[str], sweep: dict[str, list[float]], seeds: int, choosing: int, first: int
) -> None:
    plan = make_plan("llm", names, sweep, seeds=seeds, choosing=choosing, first=first)
    runs = [*plan.sweep_runs(), *plan.report_runs(dict.fromkeys(names, plan.settings[-1]))]
    assert len(runs) == plan.count == len({run.folder for run in runs})
    assert not {run.seed for run in runs if run.stage == "sweep"} & {run.seed for run in runs if run.stage == "report"}
    shares = {
        name: Counter((run.stage, run.seed, str(run.setting)) for run in runs if run.contestant == name) for name in names
    }
    assert len({frozenset(share.items()) for share in shares.values()}) == 1
    assert all(Path(run.folder).name == run.folder for run in runs)


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ([], {}),
        (["learning_rate"], {"learning_rate": None}),
        (["learning-rate=3e-5,1e-4", "num_iterations=1, 4"], {"learning_rate": [3e-5, 1e-4], "num_iterations": [1, 4]}),
        (["loss_type=grpo,dr_grpo", "beta=0,none"], {"loss_type": ["grpo", "dr_grpo"], "beta": [0, None]}),
        (["objective_config.bound=0.05,inf"], {"objective_config.bound": [0.05, float("inf")]}),
    ],
)
def test_sweeps_are_read(texts: list[str], found: dict[str, Any]) -> None:
    assert parse_sweeps(texts) == found


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["num_iterations"], "--sweep num_iterations needs values: --sweep num_iterations=first,second. Only learning_rate"),
        (["learning_rate="], "a value is empty"),
        (["learning_rate=1e-4,,3e-4"], "a value is empty"),
        (["learning_rate=1e-4,0.0001"], "values of --sweep learning_rate: 1e-4 is there twice"),
        (["beta=0.1", "beta=0.2"], "--sweep beta is given twice"),
        (["seed=1,2"], "`seed` cannot be swept. Use --seeds"),
        (["objective=troll"], "`objective` cannot be swept. Use --objectives"),
        (["steps=1,2"], "`steps` cannot be swept. Use one budget for all: --steps"),
    ],
)
def test_mistakes_in_sweeps_get_a_sentence(texts: list[str], message: str) -> None:
    with pytest.raises(RunError) as error:
        parse_sweeps(texts)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("names", "sweep", "seeds", "message"),
    [
        (["troll", "troll"], {}, 3, "contestants: troll is there twice"),
        (["troll"], {}, 3, "troll alone has nothing to be compared with"),
        (["troll", "dppo"], {}, 0, "--seeds must be at least 1; got 0"),
        ([], {}, 3, "needs contestants"),
        (["troll", "dppo"], {"beta": [1, 1.0]}, 3, "values of the sweep over beta: 1 is there twice"),
    ],
)
def test_plans_that_make_no_sense(names: list[str], sweep: dict[str, list[Any]], seeds: int, message: str) -> None:
    with pytest.raises(RunError) as error:
        make_plan("llm", names, sweep, seeds=seeds, choosing=2)
    assert message in str(error.value)


def test_one_contestant_with_a_sweep_is_a_comparison_of_settings() -> None:
    assert make_plan("llm", ["troll"], {"beta": [True, 1]}, seeds=1, choosing=1).count == 3


def test_half_decades_hold_the_recipes_own_rate() -> None:
    # 2e-4 · 10^(k/2): /10, /√10, 1, ·√10, ·10.
    assert half_decades([2e-4, 2e-4]) == [2e-5, 6.3e-5, 2e-4, 6.3e-4, 2e-3]
    # From 3e-4 (stable-baselines3) to 1e-3: one half-decade apart (3.3 > √10), so one more.
    assert half_decades([1e-3, 3e-4]) == [3e-5, 9.5e-5, 3e-4, 9.5e-4, 3e-3, 9.5e-3]
    with pytest.raises(RunError, match="cannot be made"):
        half_decades([0.0])


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=4))
def test_half_decades_reach_a_decade_to_either_side(rates: list[float]) -> None:
    grid = half_decades(rates)
    assert grid == sorted(set(grid))
    assert min(rates) in grid
    assert grid[0] == pytest.approx(min(rates) / 10, rel=0.06)  # two digits
    assert max(rates) * 10 / 10**0.5 * 0.94 <= grid[-1] <= max(rates) * 10 * 1.06


def test_a_run_is_a_command_that_anybody_can_repeat(tmp_path: Path) -> None:
    training = Training(recipe="demo", smoke=True, settings={"steps": "3", "task_config.numbers": "-4"}, threads=1)
    run = make_run("troll", {"learning_rate": 1e-4, "use_vllm": False, "beta": None}, 2, "sweep")
    assert run_arguments("llm", training, run, Path("out")) == [
        "train", "--recipe=demo", "--smoke", "--steps=3", "--task-config.numbers=-4", "--objective=troll",
        "--learning-rate=0.0001", "--use-vllm=false", "--beta=none", "--seed=2",
        "--out=out/troll_learning_rate=1e-4_use_vllm=False_beta=None_seed2",
    ]  # fmt: skip
    (tmp_path / run.folder).mkdir()
    (tmp_path / run.folder / "config.json").touch()  # it has begun
    assert run_arguments("llm", training, run, tmp_path) == ["train", f"--resume={tmp_path / run.folder}"]
    from_file = run_arguments("robot", Training(config="settings.toml"), make_run("tce", {}, 0, "report"), Path("out"))
    assert from_file == ["train", "--config=out/settings.toml", "--algorithm=tce", "--seed=0", "--out=out/tce_seed0"]


def test_a_robots_learning_rate_has_the_name_that_its_algorithm_gives_it() -> None:
    assert (
        contestant_key("robot", "tce", "learning_rate")
        == contestant_key("robot", "bbrl", "learning_rate")
        == "learner.policy_rate"
    )
    assert contestant_key("robot", "sb3-ppo", "learning_rate") == "learner.rate"
    assert contestant_key("llm", "troll", "learning_rate") == "learning_rate"
    assert contestant_key("robot", "tce", "learner.points") == "learner.points"


def test_names_of_folders_hold_nothing_that_a_path_means() -> None:
    run = make_run("troll", {"model": "../org/name", "instruction": "a b\n{problem}"}, 0, "sweep")
    assert run.folder == "troll_model=..-org-name_instruction=a-b--problem-_seed0"
    assert isinstance(
        ComparisonPlan(kind="llm", contestants=("a", "b"), sweep={}, choose_seeds=(), report_seeds=(0,)), ComparisonPlan
    )


def test_what_is_given_for_plans_does_not_reach_contestants_without_a_trajectory() -> None:
    training = Training(recipe="via_point", settings={"prodmp.basis": "8", "dtype": "float64", "iterations": "2"})
    with_plans, without = (run_settings("robot", training, make_run(name, {}, 0, "report")) for name in ("tce", "sb3-ppo"))
    assert set(with_plans) - set(without) == {"prodmp.basis", "dtype"}
    assert without == {"iterations": "2", "algorithm": "sb3-ppo", "seed": 0}


def test_golden_axes_grow_by_the_factor_at_their_end() -> None:
    plan = make_plan("llm", ["a", "b"], {"learning_rate": [1e-4, 2e-4, 4e-4], "beta": [0.0]}, seeds=8, choosing=2, extend=2)
    assert plan.count == 2 * (3 * 2 + 8)

    def grown(plan: ComparisonPlan, a: float, b: float) -> ComparisonPlan:
        return plan.grown({"a": {"learning_rate": a, "beta": 0.0}, "b": {"learning_rate": b, "beta": 0.0}})

    assert grown(plan, 2e-4, 2e-4) == plan, "inside"
    once = grown(plan, 1e-4, 4e-4)  # both ends at once
    assert once.added == {"learning_rate": (5e-5, 8e-4)}
    assert [setting["learning_rate"] for setting in once.settings] == [1e-4, 2e-4, 4e-4, 5e-5, 8e-4]
    assert once.count == 2 * (5 * 2 + 8)
    twice = grown(once, 8e-4, 2e-4)
    assert twice.added == {"learning_rate": (5e-5, 8e-4, 1.6e-3)}
    assert grown(twice, 1.6e-3, 2e-4) == twice, "at most two at either end"
    assert grown(twice, 5e-5, 2e-4).added["learning_rate"][-1] == 2.5e-5
    assert (
        make_plan("llm", ["a", "b"], {"learning_rate": [1e-4, 2e-4]}, seeds=1, choosing=1)
        .grown({"a": {"learning_rate": 1e-4}})
        .added
        == {}
    )
    words = make_plan("llm", ["a"], {"learning_rate": ["auto", 1e-4, 2e-4]}, seeds=1, choosing=1, extend=1)
    assert words.grown({"a": {"learning_rate": "auto"}}) == words
