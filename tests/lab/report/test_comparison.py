"""Comparisons and sweeps: what compare.json says, what the runs themselves show, and several tasks at once."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from report.synthetic import (
    CHOSEN,
    RATES,
    write_comparison,
    write_comparison_of_two,
    write_robot_run,
    write_run,
    write_small_set,
)

from corral.lab.report import outcomes
from corral.lab.report.content import RunReport, make_report
from corral.lab.report.export import draw_sweep
from corral.lab.report.outcomes import group_runs, pairs, split_runs
from corral.lab.report.page import page, page_data
from corral.lab.report.read import read_comparison, read_comparisons, read_run, read_runs
from corral.lab.report.sweep import axis, find_sweeps, sweep_row


def report_of(folder: Path) -> RunReport:
    runs = read_runs([folder])
    comparisons, notes = read_comparisons([folder], runs)
    return make_report(runs, comparisons, notes=notes)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_comparison(tmp_path_factory.mktemp("compared") / "compare")


@pytest.fixture(scope="module")
def report(compared: Path) -> RunReport:
    return report_of(compared)


def test_a_comparison_reports_what_it_chose_on_fresh_seeds(report: RunReport) -> None:
    assert [(group.label, group.setting, group.chosen) for group in report.groups] == [
        ("ppo_clip", "learning_rate=3e-4 num_iterations=1", True),
        ("troll", "learning_rate=1e-3 num_iterations=1", True),
    ]
    assert [[run.seed for run in group.runs] for group in report.groups] == [["2", "3", "4"]] * 2
    assert sum(len(group.runs) for group in report.sweep_groups) == 31  # 2 × 8 × 2, less the one that failed
    assert len(report.tables["runs"]) == 37
    # They are compared though their rates differ, and nobody complains of that.
    (row,) = [row for row in report.tables["comparisons"] if row["measure"] == "final"]
    assert "differ in" not in row["sentence"]
    assert row["seeds"] == 3


def test_one_contestant_with_two_chosen_settings_has_two_names(compared: Path, tmp_path: Path) -> None:
    """Two comparisons may choose otherwise: neither hides the other, and nobody beats himself."""
    again = shutil.copytree(compared, tmp_path / "again")
    content = json.loads((again / "compare.json").read_text())
    for run in content["runs"]:
        if (run["contestant"], run["stage"]) == ("troll", "report"):
            run["setting"] = {"learning_rate": 3e-4, "num_iterations": 1}
    (again / "compare.json").write_text(json.dumps(content))
    runs = read_runs([compared, again])
    report = make_report(runs, read_comparisons([compared, again], runs)[0])
    names = ["ppo_clip", "troll learning_rate=1e-3 num_iterations=1", "troll learning_rate=3e-4 num_iterations=1"]
    assert sorted(group.label for group in report.groups) == names
    assert all(row["ours"] != row["theirs"] for row in report.tables["comparisons"])


def test_the_sweep_of_a_comparison(report: RunReport) -> None:
    (sweep,) = report.sweeps
    assert (sweep.key, sweep.comparison, sweep.chosen) == ("learning_rate", report.comparisons[0], CHOSEN)
    assert len(sweep.rows) == 32
    failed = [row for row in sweep.rows if (row.contestant, row.setting["learning_rate"], row.seed) == ("ppo_clip", 3e-3, 1)]
    assert [row.final for row in failed if row.setting["num_iterations"] == 4] == [0.0]
    # gain: ppo_clip .4 at 3e-4, then −.6·log10(off); success ends at .2 + .95·gain, so half a decade costs 29 points of 57.
    assert [found.sentence for found in sweep.ranges] == [
        "ppo_clip, num_iterations=1: 3e-4 (1 of 4 rates)",
        "ppo_clip, num_iterations=4: none (0 of 4 rates)",
        # troll: half a decade costs 1.9 points of 60 and a whole one 3.8, where 3 may be lost; with two seeds each bounds are
        # two points from their means, so that 1e-3 is all that is certain and nothing is excluded.
        "troll, num_iterations=1: 1e-3 (1 of 4 rates), 0.0 to 1.5 decades",
        "troll, num_iterations=4: none (0 of 4 rates)",
    ]
    chosen = [(row["objective"], row["value"], row["other"]) for row in report.tables["sweep"] if row["chosen"]]
    assert chosen == [("ppo_clip", 3e-4, "num_iterations=1"), ("troll", 1e-3, "num_iterations=1")]


def test_of_how_many_seeds_a_sweep_is(report: RunReport) -> None:
    (sweep,) = report.sweeps
    assert sweep.seeds_text == "2 seeds"
    assert replace(sweep, rows=sweep.rows[1:]).seeds_text == "1 to 2 seeds"
    assert replace(sweep, rows=sweep.rows[:1]).seeds_text == "1 seed"


def test_what_a_comparison_planned_and_did_not_run_is_said(report: RunReport) -> None:
    rows = [row for row in report.tables["events"] if row["kind"] in ("failed", "left out")]
    assert [(row["objective"], row["seed"], row["what"]) for row in rows] == [
        ("ppo_clip learning_rate=3e-3 num_iterations=4", "1", "out of memory"),
        ("ppo_clip learning_rate=3e-4 num_iterations=1", "5", "planned, and waiting: not in the statistics."),
        ("troll learning_rate=1e-3 num_iterations=1", "5", "planned, and waiting: not in the statistics."),
    ]


def test_finished_runs_that_were_not_given_did_not_fail_to_finish(compared: Path) -> None:
    given = [path for path in sorted(compared.iterdir()) if path.name.endswith(("seed2", "seed3"))]
    runs = read_runs(given)
    found = make_report(runs, read_comparisons(given, runs)[0]).tables["events"]
    assert {row["what"] for row in found if row["kind"] == "elsewhere"} == {
        "finished, and not among the folders of this report."
    }
    assert [row["seed"] for row in found if row["kind"] == "left out"] == ["5", "5"]


def test_the_page_of_a_comparison(report: RunReport) -> None:
    found = page(report)
    assert "Usable range of learning_rate, by final success and its mean over the run (2 seeds): the lower 95 % bounds" in found
    assert "troll, num_iterations=1: 1e-3 (1 of 4 rates), 0.0 to 1.5 decades" in found
    assert "Settings were chosen on seeds 0, 1, and are reported on seeds 2, 3, 4, 5" in found
    assert "corral compare --recipe demo --sweep learning_rate --hub-token" in found
    assert "hf_secret" not in found
    assert "Their settings were chosen on 31 runs of a sweep." in found


def test_while_the_sweep_is_running_its_runs_are_what_there_is(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "compare", reported=False)
    for path in folder.glob("*_4_seed*"):
        shutil.rmtree(path)  # half of them: each is compared with each
    report = report_of(folder)
    assert len(report.groups) == 8
    assert report.sweep_groups == []
    (sweep,) = report.sweeps
    assert sweep.chosen == {}
    assert "No settings are chosen yet." in page(report)


def test_a_comparison_without_a_sweep_groups_as_always(tmp_path: Path) -> None:
    folder = write_small_set(tmp_path / "compare")
    runs = [
        {"folder": path.name, "contestant": path.name[:-2], "setting": {}, "seed": 0, "stage": "report", "state": "finished"}
        for path in sorted(folder.iterdir())
    ]
    content: dict[str, Any] = {"version": 1, "command": "corral compare", "sweep": {}, "choose_seeds": [], "chosen": {}}
    (folder / "compare.json").write_text(json.dumps({**content, "report_seeds": [0, 1, 2], "runs": runs}))
    report = report_of(folder)
    assert [group.label for group in report.groups] == ["dppo", "ppo_clip", "troll"]
    assert report.sweeps == []
    assert len(report.comparisons) == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2}', '{"version": 1}', '{"version": 1, "runs": [3]}', "null"])
def test_a_torn_file_is_a_note_on_the_page(tmp_path: Path, text: str) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "compare.json").write_text(text)
    report = report_of(tmp_path)
    assert len(report.groups) == 1
    assert any("compare.json cannot be read" in row["what"] for row in report.tables["events"])


def test_a_run_named_by_a_comparison_may_lie_outside_it_and_does_no_harm(tmp_path: Path, compared: Path) -> None:
    shutil.copytree(compared, tmp_path / "copy")
    content = json.loads((tmp_path / "copy/compare.json").read_text())
    content["runs"][0]["folder"] = "../../../../etc"
    (tmp_path / "copy/compare.json").write_text(json.dumps(content))
    runs = read_runs([tmp_path / "copy"])
    shown, swept, _ = split_runs(runs, read_comparisons([tmp_path / "copy"], runs)[0])
    assert (len(shown), len(swept)) == (7, 30)  # the run whose name was taken away belongs to nobody


def test_a_comparison_that_says_odd_things_is_drawn_as_far_as_it_goes(tmp_path: Path, compared: Path) -> None:
    """A run named twice, a setting that is missing or a word, a choice of what was never tried."""
    shutil.copytree(compared, tmp_path / "copy")
    content = json.loads((tmp_path / "copy/compare.json").read_text())
    content["runs"] += [content["runs"][0], {**content["runs"][1], "setting": {}}]
    content["runs"] += [{**content["runs"][2], "setting": {"learning_rate": "fast", "num_iterations": 1}}]
    content["chosen"] = {"troll": {"learning_rate": 7.0}, "nobody": {}}
    (tmp_path / "copy/compare.json").write_text(json.dumps(content))
    report = report_of(tmp_path / "copy")
    assert len(report.sweeps[0].rows) == 32
    assert not any(row["chosen"] for row in report.tables["sweep"])
    assert "learning_rate=7" in page(report)


def test_a_sweep_is_found_in_the_settings_of_runs(tmp_path: Path) -> None:
    for rate in (1e-4, 1e-3):
        for seed in range(2):
            write_run(tmp_path / f"troll{rate}{seed}", "troll", seed, learning_rate=rate)
            write_run(tmp_path / f"dppo{rate}{seed}", "dppo", seed, learning_rate=rate, gain=0.3 if rate == 1e-4 else 0.0)
    write_run(tmp_path / "ppo_clip", "ppo_clip", 0, learning_rate=1e-4)  # was not swept
    write_run(tmp_path / "going on", "troll", 2, learning_rate=1e-4, stopped=None)
    report = report_of(tmp_path)
    (sweep,) = report.sweeps
    assert sweep.comparison is None
    assert [found.sentence for found in sweep.ranges] == [
        "dppo: none (0 of 2 rates)",
        "troll: none (0 of 2 rates), 0.0 to 1.0 decades",
    ]
    assert "This sweep was found in the settings of the runs" in page(report)


def test_a_run_that_was_below_its_start_is_known(tmp_path: Path) -> None:
    measure = outcomes.main_metric([])
    runs = {fell: read_run(write_run(tmp_path / str(fell), collapse=fell)) for fell in (False, True)}
    rows = {fell: sweep_row("troll", {}, 0, run, replace(measure, key="success")) for fell, run in runs.items()}
    assert {fell: row.fell_below_start for fell, row in rows.items()} == {False: False, True: True}


def test_auto_is_a_value_of_a_learning_rate(tmp_path: Path) -> None:
    for rate in (1e-4, 1e-3, "auto"):
        for seed in range(4):
            write_run(tmp_path / f"{rate}{seed}", "troll", seed, learning_rate=rate, gain=0.0 if rate == 1e-3 else None)
    report = report_of(tmp_path)
    (found,) = report.sweeps[0].ranges
    assert (found.tried, found.own) == ((1e-4, 1e-3, "auto"), (1e-4, "auto"))
    assert [row["value"] for row in report.tables["sweep"]] == [1e-4, 1e-3, "auto"]
    (drawn,) = page_data(report)["sweeps"]
    assert drawn["values"] == [1e-4, 1e-3, "auto"]
    assert (drawn["names"], drawn["lines"][0]["usable"]) == (["1e-4", "1e-3", "auto"], [0, 2])
    axes = Figure().subplots()
    draw_sweep(drawn, page_data(report)["measure"], axes)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1e-4", "1e-3", "auto"]
    # A quarter of the axis to the right of its numbers, where no line leads.
    assert axes.get_xticks()[-1] == pytest.approx(1e-3 * 10**0.25)
    assert axes.lines[0].get_xdata() == pytest.approx([1e-4, 1e-3])


def test_settings_that_are_lists_stand_beside_a_swept_rate(tmp_path: Path) -> None:
    for rate, reward in ((1e-4, []), (1e-3, ["rewards.py:short"])):
        write_run(tmp_path / str(rate), "troll", learning_rate=rate, reward=reward)
    report = report_of(tmp_path)
    assert [group.setting for group in report.groups] == [
        "learning_rate=0.0001 reward=default", "learning_rate=0.001 reward=rewards.py:short",
    ]  # fmt: skip
    assert [row["other"] for row in report.tables["sweep"]] == ["reward=default", "reward=rewards.py:short"]
    assert [found.sentence for found in report.sweeps[0].ranges] == [
        "troll, reward=default: cannot be told from one run",
        "troll, reward=rewards.py:short: cannot be told from one run",
    ]
    assert "reward=[" not in page(report)


def test_a_comparison_may_sweep_lists(tmp_path: Path) -> None:
    folder = write_comparison_of_two(tmp_path / "compare")
    content = json.loads((folder / "compare.json").read_text())
    layers = {"learner.layers": [64, 64], "reward": ["rewards.py:short", "rewards.py:right"]}
    for run in content["runs"]:
        run["setting"] |= layers
    content["chosen"]["troll"] |= layers
    (folder / "compare.json").write_text(json.dumps(content))
    report = report_of(folder)
    expected = "learner.layers=[64, 64] reward=rewards.py:short,rewards.py:right"
    assert [(row["other"], row["chosen"]) for row in report.tables["sweep"]] == [(expected, False), (expected, True)]
    assert expected in page(report)


def test_runs_that_differ_in_a_word_are_no_sweep(tmp_path: Path) -> None:
    for kind in ("linear", "cosine"):
        write_run(tmp_path / kind, "troll", 0, lr_scheduler_type=kind)
    assert report_of(tmp_path).sweeps == []


def test_the_axis_is_a_rate_if_there_is_one() -> None:
    assert axis({"num_iterations": [1, 4], "learning_rate": [1e-4]}) == "learning_rate"
    assert axis({"kind": ["a"], "num_iterations": [1, 4]}) == "num_iterations"
    assert axis({"kind": ["a", 1], "flag": [True]}) is None
    assert axis({"bound": ["auto"], "learning_rate": ["auto", 1e-4, None]}) == "learning_rate"  # words alone are no axis
    assert axis({"steps": [6, 40], "iterations": [6, 40]}) is None  # a budget is no choice
    assert axis({}) is None


def test_comparisons_are_found_beside_their_runs(compared: Path) -> None:
    one = next(path for path in compared.iterdir() if path.is_dir())
    comparisons, notes = read_comparisons([one], read_runs([one]))
    assert [comparison.path for comparison in comparisons] == [compared]
    assert notes == []
    shown, swept, chosen = split_runs(read_runs([one]), [read_comparison(compared)])
    assert (len(shown), swept, chosen) == (1, [], {})  # a run of the sweep alone is shown


# ---- robots, and several tasks


@pytest.fixture(scope="module")
def robots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("robots")
    for task in ("corral/ViaPointReacher-v0", "corral/BoxPushing-v0"):
        for algorithm in ("tce", "sb3-ppo"):
            for seed in range(3):
                write_robot_run(folder / f"{task[7:]}-{algorithm}-{seed}", algorithm, seed, task=task)
    return folder


@pytest.fixture(scope="module")
def moving(robots: Path) -> RunReport:
    return report_of(robots)


def test_robots_of_different_kinds_are_compared_on_the_same_task(moving: RunReport) -> None:
    """Their models differ by nature: a plan here, a network for every step there."""
    assert {group.problem for group in moving.groups} == {"corral/BoxPushing-v0", "corral/ViaPointReacher-v0"}
    assert len(pairs(moving.groups)) == 2
    said = [row["sentence"] for row in moving.tables["comparisons"] if row["measure"] == "final"]
    assert all(text.startswith("tce beats sb3-ppo on final success in corral/") for text in said)
    assert not any("differ in" in text for text in said)
    assert moving.tables["results"][0]["return"] is not None
    assert {"motion", "learning", "region"} == {metric.section for metric in moving.metrics}


def test_robots_have_no_completions_and_nobody_misses_them(moving: RunReport) -> None:
    assert moving.tables["events"] == []
    found = page(moving)
    assert 'id="completions"' not in found
    assert 'id="motion"' in found
    assert '<option value="env_steps">environment steps</option><option value="step">' in found
    assert "held-out contexts solved, without exploration" in found


def test_returns_are_compared_besides(moving: RunReport) -> None:
    rows = [row for row in moving.tables["comparisons"] if row["measure"] == "return"]
    assert len(rows) == 2
    assert all("tce beats sb3-ppo on final return in corral/" in row["sentence"] for row in rows)
    assert "On the final return" in page(moving)


def test_golden_threshold_of_returns_and_of_nothing(tmp_path: Path) -> None:
    """From −70 to −16, nine tenths of the way is −21.4. Where nobody solves anything, there is no threshold."""
    path = write_robot_run(tmp_path / "run", solved=False)
    rows = [{"step": 0, "return": -70.0, "success": 0.0}, {"step": 1, "return": -16.0, "success": 0.0}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    groups = group_runs(read_runs([tmp_path]))
    scores = outcomes.score_runs(groups, outcomes.RETURN)
    assert outcomes.default_threshold(scores, outcomes.RETURN) == pytest.approx(-21.4)
    success = outcomes.main_metric(read_runs([tmp_path]))
    assert outcomes.default_threshold(outcomes.score_runs(groups, success), success) is None
    assert not outcomes.results(groups, scores, None)[0]["collapsed"]


def test_environments_with_other_settings_are_other_problems(tmp_path: Path) -> None:
    write_robot_run(tmp_path / "dense")
    path = write_robot_run(tmp_path / "sparse")
    config = json.loads((path / "config.json").read_text())
    config["settings"]["environment_config"]["reward"] = "sparse"
    (path / "config.json").write_text(json.dumps(config))
    groups = group_runs(read_runs([tmp_path]))
    assert [group.problem for group in groups] == [f"corral/ViaPointReacher-v0 reward={kind}" for kind in ("dense", "sparse")]


def test_a_task_without_success_makes_all_be_judged_by_return(robots: Path, tmp_path: Path) -> None:
    for algorithm in ("tce", "sb3-ppo"):
        write_robot_run(tmp_path / algorithm, algorithm, task="corral/HopperJump-v0", solved=False)
    assert outcomes.main_metric(read_runs([tmp_path])).key == "return"
    assert outcomes.main_metric(read_runs([tmp_path, robots])).key == "return"
    assert outcomes.main_metric(read_runs([robots])).key == "success"


def test_all_tasks_together(moving: RunReport) -> None:
    rows = {row["objective"]: row for row in moving.tables["overall"]}
    assert {name: (row["tasks"], row["seeds"]) for name, row in rows.items()} == {"tce": (2, 3), "sb3-ppo": (2, 3)}
    assert rows["tce"]["chance"] == 1.0
    assert rows["sb3-ppo"]["chance"] == 0.0
    ends = [end for group in moving.groups if group.label == "tce" for end in outcomes.by_seed(moving.scores, group).values()]
    assert rows["tce"]["mean"] == pytest.approx(sum(ends) / 6)
    assert rows["tce"]["mean_low"] < rows["tce"]["mean"] < rows["tce"]["mean_high"]
    assert "All tasks together" in page(moving)


def test_returns_are_put_on_one_scale(tmp_path: Path) -> None:
    for task in ("corral/ViaPointReacher-v0", "corral/HopperJump-v0"):
        for algorithm in ("tce", "sb3-ppo"):
            for seed in range(2):
                write_robot_run(tmp_path / f"{task[7:]}{algorithm}{seed}", algorithm, seed, task=task, solved=False)
    report = report_of(tmp_path)
    scores = outcomes.normalise_scores(report.scores, report.measure)
    # The best group of a task has mean 1 by construction; the other began where it began and reached half as far.
    for _, found in scores[scores["objective"] == "tce"].groupby("problem"):
        assert found["score"].mean() == pytest.approx(1.0)
    assert all(0.4 < value < 0.7 for value in scores[scores["objective"] == "sb3-ppo"]["score"])
    assert len(scores) == 8


def test_one_task_or_one_contestant_has_no_overall(robots: Path, tmp_path: Path) -> None:
    assert report_of(write_small_set(tmp_path / "one")).tables["overall"] == []
    runs = [run for run in read_runs([robots]) if run.objective == "tce"]
    assert make_report(runs).tables["overall"] == []


def test_failed_runs_of_returns_are_the_worst_there_is(robots: Path) -> None:
    measure = outcomes.Measure(key="return", name="return", unit="", factor=1.0)
    assert find_sweeps(read_runs([robots]), [], measure) == []
    assert sweep_row("tce", {"learning_rate": RATES[0]}, 0, None, measure).final == -math.inf
