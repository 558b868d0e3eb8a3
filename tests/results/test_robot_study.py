"""The study of robots in pieces: plans that can be resolved, and what came out so far."""

import json
from pathlib import Path

import pytest

from corral.lab.jobs.robot.prepare import learner_config
from results.robots import study as robot_study
from results.robots.plans import PLANS, TUNED_ON, jobs


@pytest.mark.parametrize("plan", PLANS)
def test_every_run_of_a_plan_has_settings_that_exist_and_a_name_of_its_own(plan: str) -> None:
    jobs = list(PLANS[plan]())
    assert len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        settings = robot_study.settings_of(job)
        assert learner_config(settings).iterations == settings.iterations
        assert (settings.seed in TUNED_ON) == (plan.endswith(("explore", "tune")))


def test_some_runs_of_a_plan_are_chosen_by_name() -> None:
    found = list(PLANS["decisive"]())
    chosen = robot_study.select(found, "2M-(planar|published)-[01]$")
    assert [job.name for job in chosen] == [
        f"{name}-{seed}" for name in ("box-2M-planar", "hopper-2M-published") for seed in (0, 1)
    ]
    assert robot_study.select(found, None) == found


def test_runs_of_a_plan_take_other_settings_and_see_the_gpu_where_these_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [*PLANS["published-40M"]()][:1]
    [warped] = robot_study.select(found, None, ["simulator=warp", "iterations=3"])
    settings = robot_study.settings_of(warped)
    assert (settings.simulator, settings.iterations, warped.name) == ("warp", 3, found[0].name)
    seen = []
    monkeypatch.setattr("subprocess.Popen", lambda command, env, **_: seen.append(env.get("CUDA_VISIBLE_DEVICES")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    for job in (warped, *robot_study.select(found, None, ["learner.device=cuda"]), *found):
        robot_study.start(job, tmp_path / job.name)
    assert seen == ["7", "7", ""]


def test_a_run_that_began_on_a_gpu_is_resumed_by_the_simulator_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [job] = [*PLANS["published-40M"]()][:1]
    (tmp_path / job.name / "checkpoints/checkpoint-25").mkdir(parents=True)
    seen = []
    monkeypatch.setattr("subprocess.Popen", lambda command, **_: seen.append(command[4:]))
    for given in ([], ["simulator=mujoco"]):
        robot_study.start(robot_study.select([job], None, given)[0], tmp_path / job.name)
    resumed = ["--resume", str(tmp_path / job.name)]
    assert seen == [[*resumed, "--quiet"], [*resumed, "--simulator", "mujoco", "--quiet"]]


def test_a_choice_of_no_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["study.py", "--plan", "decisive", "--only", "10M", "--list", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit, match="no run of decisive matches --only '10M'"):
        robot_study.main()


def test_a_table_has_means_over_seeds_and_what_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [*jobs("arm", "via_point", range(3)), *jobs("other", "via_point", range(1))]
    for seed, success in ((0, 0.5), (2, 1.0)):
        line = {"step": 1, "return": -2.0 - seed, "success": success, "env_steps": 100, "seconds": 3.0}
        (tmp_path / f"arm-{seed}").mkdir()
        (tmp_path / f"arm-{seed}" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    robot_study.print_table(found, tmp_path)
    *_, arm, other = capsys.readouterr().out.splitlines()
    assert arm.split() == ["arm", "-3.000", "0.750", "100.000", "3.000", "2", "0.50", "1.00"]
    assert other.split() == ["other", "not", "run"]


def test_an_outcome_is_the_last_measurement(tmp_path: Path) -> None:
    assert "nothing measured" in robot_study.outcome(tmp_path)
    lines = [
        {"step": 1, "return": -2.0, "success": 0.5, "seconds": 3.0},
        {"step": 2, "return": None, "success": None, "seconds": 4.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 3, "ret')  # cut off
    assert robot_study.outcome(tmp_path).split() == ["step", "1", "success", "0.500", "return", "-2.00", "3", "s"]


def test_a_plan_is_tried_and_its_cost_told(capsys: pytest.CaptureFixture[str]) -> None:
    small = {"iterations": 10, "learner__episodes": 4, "learner__policy_epochs": 1, "learner__critic_epochs": 1}
    robot_study.try_jobs([*jobs("arm", "via_point", range(3), **small)])
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("arm ")
    assert "3 × 10 batches" in first
    assert "3 runs" in last
