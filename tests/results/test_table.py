"""The plan of the table: equal trials, grids that grow at their ends, disjoint seeds, one command that goes on by itself."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from corral.lab.jobs.llm.prepare import trainer_config
from corral.lab.jobs.llm.settings import resolve
from corral.lab.run.settings import read_recipe
from corral.objective import OBJECTIVES
from results import plans, study, table
from results.packed import Row
from results.spec import STARTS, Run
from results.table import ARMS, BEST, CELLS, CLIP, FRESH, RIVALS, TROLL, TUNING, Arm, Cell, cell, settings_of

TWO = (CLIP, TROLL)


def row(run: Run, level: float) -> Row:
    """A finished run whose held-out success has one level all the time: its area."""
    lines = [{"step": step, "success": level, "reward": level} for step in (0, run.steps)]
    return {"key": run.key, "seed": run.seed, "steps": run.steps, "finished": True, "dead": False, "lines": lines}


def rows_of(runs: Sequence[Run], level: Callable[[Run], float]) -> list[Row]:
    return [row(run, level(run)) for run in runs]


def to_its_end(plan: Callable[[Sequence[Row]], list[Run]], level: Callable[[Run], float]) -> list[Run]:
    """All runs of a plan in the order in which a study makes them."""
    rows: list[Row] = []
    made: list[Run] = []
    while new := [run for run in plan(rows) if run.key not in {row["key"] for row in rows}]:
        made += new
        rows += rows_of(new, level)
    return made


def peak_at(rate: float) -> Callable[[Run], float]:
    """Success that is largest at a rate and falls by .1 with every factor of two."""
    return lambda run: 0.7 - 0.1 * abs(math.log2(float(run.rate) / rate))


def simple(rows: Sequence[Row], arms: Sequence[Arm] = TWO) -> Cell:
    return cell(4, 0, rows, arms)


def plan_of(arms: Sequence[Arm] = TWO) -> Callable[[Sequence[Row]], list[Run]]:
    return lambda rows: [*simple(rows, arms).tune(), *simple(rows, arms).report()]


def test_golden_fourteen_runs_of_an_arm() -> None:
    # Three rates × two seeds, then eight seeds at the best, which is the middle one: 2 arms × (6 + 8).
    made = to_its_end(plan_of(), peak_at(2e-4))
    assert len(made) == 28
    assert [run.seed for run in made[:12]] == [601] * 6 + [602] * 6
    assert Counter(run.rate for run in made if run.seed in TUNING) == {1e-4: 4, 2e-4: 4, 4e-4: 4}
    assert {(run.seed, run.rate) for run in made[12:]} == {(seed, 2e-4) for seed in FRESH}


def test_golden_a_grid_grows_for_all_where_one_arm_is_best_at_its_end() -> None:
    # Clipping is best at 1.6e-3, two factors of two above 4e-4: grown to 3.2e-3 it is inside. TROLL is best at 2e-4.
    peaks = {"ppo_clip": 1.6e-3, "troll": 2e-4}
    made = to_its_end(plan_of(), lambda run: peak_at(peaks[run.objective])(run))
    tried = {name: sorted({run.rate for run in made if run.objective == name and run.seed in TUNING}) for name in peaks}
    assert tried["ppo_clip"] == tried["troll"] == [1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3]
    assert {run.objective: run.rate for run in made if run.seed in FRESH} == peaks
    assert len(made) == 2 * (6 * 2 + 8)


def test_a_grid_ends_after_three_extensions_on_either_side() -> None:
    made = to_its_end(plan_of(), peak_at(1e3))
    assert sorted({run.rate for run in made})[-1] == 8 * 4e-4
    made = to_its_end(plan_of(), peak_at(1e-9))
    assert sorted({run.rate for run in made})[0] == 1e-4 / 8
    assert {run.rate for run in made if run.seed in FRESH} == {1e-4 / 8}


def test_bounds_are_a_grid_of_their_own() -> None:
    arms = (CLIP, replace(CLIP, bounded=True))
    made = to_its_end(plan_of(arms), lambda run: 0.5 if run.rate != "auto" else -abs(run.bound or 0))
    bounds = {run.bound for run in made if run.rate == "auto"}
    assert min(bounds) == 0.01 / 8
    assert {run.schedule for run in made if run.rate == "auto"} == {"constant"}
    assert {run.rate for run in made if run.rate != "auto"} == {1e-4 / 8, 5e-5 / 2, 5e-5, 1e-4, 2e-4, 4e-4}, (
        "of equals the smallest"
    )


def test_an_arm_with_a_failed_run_is_left_out_and_holds_up_nobody() -> None:
    rows = rows_of(simple([]).tune(), peak_at(2e-4))
    rows[0] = {"key": rows[0]["key"], "finished": False, "error": "…"}
    found = simple(rows)
    assert {run.objective for run in found.report()} == {"troll"}
    assert not found.is_over
    ended = simple([*rows, *rows_of(found.report(), peak_at(2e-4))])
    assert ended.is_over
    assert ended.ranking() == [TROLL]


def test_nothing_is_reported_before_every_arm_is_tuned() -> None:
    rows = rows_of(simple([]).tune(), peak_at(2e-4))
    assert simple(rows[:-1]).report() == []
    assert len(simple(rows).report()) == 16
    assert simple(rows[:-1]).ranking() == simple(rows).ranking() == []


def test_golden_the_whole_table() -> None:
    level = {arm.objective: 0.5 + place / 100 for place, arm in enumerate(ARMS)}

    def success(run: Run) -> float:
        known = run if run.rate != "auto" else replace(run, rate=2e-4)
        return level[run.objective] * peak_at({1: 4e-4, 4: 2e-4}[run.passes])(known)

    made = to_its_end(table.table, success)
    assert len({run.key for run in made}) == len(made)
    far = [run for run in made if run.lag == 16]
    rest = [run for run in made if run.lag < 16]
    bounded = [run for run in rest if run.rate == "auto"]
    # Rates have an inner best everywhere: 14 runs of each arm. Bounds are equal, so the smallest is taken: three trials more.
    unbounded = len(ARMS) * len(CELLS) + sum(not arm.bounded for arm in RIVALS)
    assert len(rest) - len(bounded) == 14 * unbounded
    assert len(bounded) == 2 * (6 * 2 + 8)
    others = [arm.objective for arm in ARMS if arm != CLIP]
    assert {run.objective for run in far} == {"ppo_clip", *others[-BEST:]}
    assert len(far) == 14 * (BEST + 1)
    assert {(run.steps, run.passes) for run in far} == {(64, 1)}
    assert {run.steps for run in rest} == {10}
    assert {run.start for run in made} == {table.TABLE_START}


def test_seeds_of_the_report_are_in_no_other_study() -> None:
    assert not {*TUNING} & {*FRESH}
    taken = {run.seed for name in plans.PLANS if name != "table-tiny" for run in plans.PLANS[name]()}
    assert not taken & {*TUNING, *FRESH}
    assert len(FRESH) == 8


def test_every_objective_that_needs_no_teacher_is_an_arm() -> None:
    assert {arm.objective for arm in ARMS} == {name for name in OBJECTIVES if ":" not in name} - {"distill"}
    assert len({*ARMS, *RIVALS}) == len(ARMS) + len(RIVALS)
    assert table.TABLE_START in STARTS


@pytest.mark.parametrize("lag", [0, 4])
def test_arms_of_a_cell_differ_in_nothing_but_their_objective(lag: int) -> None:
    configs = {}
    for arm in ARMS:
        run = arm.run(2e-4, FRESH[0], **settings_of(4, lag))
        configs[arm] = trainer_config(resolve([read_recipe(run.recipe), run.layer()]), max_completion_length=8)
    for name in ("num_iterations", "rollout_lag", "lr_scheduler_type", "deployed_bound", "generation_batch_size", "max_steps"):
        assert len({vars(config)[name] for config in configs.values()}) == 1, name
    assert {arm.objective for arm, config in configs.items() if config.loss_type != "dr_grpo"} == {"gspo", "gmpo"}
    assert {config.rollout_lag for config in configs.values()} == {lag}


def test_long_runs_follow_the_cell_of_one_pass() -> None:
    assert table.long([]) == []
    rows: list[Row] = []
    while new := [
        run for run in table.table(rows) if run.key not in {row["key"] for row in rows} and (run.passes, run.lag) == (1, 0)
    ]:
        rows += rows_of(new, lambda run: peak_at(4e-4)(run) + (0.1 if run.objective == "vespo" else 0))
    found = table.long(rows)
    assert len(found) == 3 * 5
    assert {(run.objective, run.rate) for run in found} == {
        ("ppo_clip", 4e-4), ("troll", 4e-4), ("vespo", 4e-4), ("ppo_clip", "auto"), ("troll", "auto"),
    }  # fmt: skip
    assert {run.steps for run in found} == {1000}


def test_one_command_goes_from_tuning_to_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The study asks for further runs as rows come in, and a second call has nothing left to do."""
    asked: list[int] = []

    def fake(plan: Sequence[Run], options: Any, file: Path, expected: Any, deadline: float) -> bool:
        asked.append(len(plan))
        for run in plan:
            study.append_line(file, row(run, peak_at(4e-4)(run)) | asdict(run) | {"cpu": 1.0})
        return True

    monkeypatch.setattr(study, "study", fake)
    monkeypatch.setitem(study.STAGED, "table", plan_of())
    monkeypatch.setattr("sys.argv", ["study", "--plan", "table", "--out", str(tmp_path), "--done", "--commit", "x"])
    study.main()
    # 4e-4 is the largest of three rates: one more for both arms, then the report.
    assert asked == [12, 4, 16]
    study.main()
    assert asked == [12, 4, 16]


@pytest.mark.slow
def test_a_tiny_cell_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small: dict[str, Any] = {"passes": 1, "lag": 1, "steps": 2, "eval_every": 1, "eval_size": 4, "end_size": 4, "pass_at": 2}

    def tiny(rows: Sequence[Row]) -> list[Run]:
        known = {row["key"]: row for row in rows}
        found = Cell(TWO, small, known, tuning=(1,), fresh=(2,), extensions=0)
        return [*found.tune(), *found.report()]

    monkeypatch.setitem(study.STAGED, "table", tiny)
    words = ["study", "--plan", "table", "--out", str(tmp_path), "--done", "--commit", "x", "--workers", "1", "--minutes", "9"]
    monkeypatch.setattr("sys.argv", words)
    study.main()
    rows = study.read(tmp_path)
    assert len(rows) == 2 * (3 + 1)
    assert all(row["finished"] and row["end"]["pass"] >= 0 for row in rows)
    assert {row["lines"][-1]["tr/staleness"] for row in rows} == {1}
