"""Schedules with jobs that take milliseconds and go wrong: crash, hang, are killed, are interrupted, are resumed."""

import json
import os
import signal
from pathlib import Path

import pytest
from fake_comparisons import FAKE, Notes, begun, drive, interrupt_when, resumed, states

from corral.lab.cli.leaderboard import ranks
from corral.lab.compare import local
from corral.lab.compare.job import Schedule, comparison_status, findings, sweep_rows
from corral.lab.compare.local import LocalEngine
from corral.lab.compare.plan import Training, make_plan
from corral.lab.compare.record import Comparison, log_tail, read
from corral.lab.run.files import lock
from corral.validate import RunError


def test_all_runs_are_run_two_at_a_time(tmp_path: Path) -> None:
    notes = Notes()
    comparison = begun(tmp_path, "fine", "collapse", seeds=3)
    drive(comparison, notes)
    assert set(states(comparison).values()) == {"finished", "collapsed"}
    assert states(comparison)["collapse_seed0"] == "collapsed"
    assert notes.most == 2
    log = (comparison.path / "fine_seed0" / "log.txt").read_text()
    assert log == "fine begins in fine_seed0, threads 1\n"


def test_one_failed_run_does_not_sink_the_rest(tmp_path: Path) -> None:
    comparison = begun(tmp_path, "crash", "refused", "killed", "fine", seeds=1)
    drive(comparison)
    found = states(comparison)
    assert found == {"crash_seed0": "failed", "refused_seed0": "failed", "killed_seed0": "failed", "fine_seed0": "finished"}
    errors = {record.contestant: record.error for record in comparison.records}
    assert errors["crash"] == "RuntimeError: out of luck"
    assert errors["refused"] == "there is no such thing."
    assert errors["killed"] == "killed by SIGKILL, as when memory runs out"
    assert errors["fine"] is None
    assert log_tail(comparison.path / "refused_seed0", 2)[0] == "refused begins in refused_seed0, threads 1"


def test_failed_runs_are_retried_only_if_asked(tmp_path: Path) -> None:
    drive(begun(tmp_path, "crash", "refused", "killed", "fine", seeds=1))
    path = tmp_path / "all"
    (path / "mended").touch()
    notes = Notes()
    left_alone = resumed(path)
    drive(left_alone, notes)
    assert notes.states == []
    assert [record.state for record in left_alone.records].count("failed") == 3
    assert left_alone.records[0].error == "RuntimeError: out of luck"
    again = resumed(path, retry_failed=True)
    drive(again, notes)
    assert set(states(again).values()) == {"finished"}
    assert all(record.error is None for record in again.records)
    assert ("fine_seed0", "running") not in notes.states
    # Nothing of what the first attempt said is lost.
    assert (path / "refused_seed0" / "log.txt").read_text().count("refused begins") == 2


def test_a_run_that_hangs_is_ended(tmp_path: Path) -> None:
    comparison = begun(tmp_path, "hang", "fine", seeds=1)
    schedule = drive(comparison, stall=1.0)
    assert states(comparison) == {"hang_seed0": "failed", "fine_seed0": "finished"}
    assert comparison.records[0].error == "no sign of life for 1 s: it hung, and was ended"
    assert not schedule.interrupted


def test_an_interrupted_comparison_stops_cleanly_and_goes_on(tmp_path: Path) -> None:
    comparison = begun(tmp_path, "slow", "fine", seeds=2)
    assert drive(comparison, Notes(then=interrupt_when(10, comparison))).interrupted
    found = states(comparison)
    assert found["slow_seed0"] == "interrupted"
    assert found["fine_seed0"] == "finished"
    assert json.loads((comparison.path / "slow_seed0" / "summary.json").read_text())["stopped"] == "interrupted"
    checkpoint = int((comparison.path / "slow_seed0" / "checkpoint").read_text())
    notes = Notes()
    again = resumed(comparison.path)
    drive(again, notes)
    assert set(states(again).values()) == {"finished"}
    assert ("fine_seed0", "running") not in notes.states
    # It went on from its checkpoint: every step is there once.
    lines = [json.loads(line)["step"] for line in (again.path / "slow_seed0" / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(121))
    assert 10 <= checkpoint < 120


def test_a_second_ctrl_c_ends_even_what_obeys_nobody(tmp_path: Path) -> None:
    comparison = begun(tmp_path, "slow", "hang", seeds=1)
    engine = LocalEngine(jobs=2, threads=1, program=FAKE)
    schedule = drive(comparison, Notes(then=interrupt_when(5, comparison, times=2)), engine=engine)
    assert schedule.interrupted
    assert states(comparison) == {"slow_seed0": "interrupted", "hang_seed0": "interrupted"}
    assert engine.started == {}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_was_killed_with_its_comparison_is_found_where_it_is(tmp_path: Path) -> None:
    comparison = begun(tmp_path, "fine", "collapse", seeds=1)
    drive(comparison)
    for record in comparison.records:  # as if the schedule had been killed while they ran
        record.state = "running"
    comparison.save()
    again = resumed(comparison.path)
    assert [record.state for record in again.records] == ["finished", "collapsed"]
    again.close()
    (comparison.path / "fine_seed0" / ".lock").touch()
    held = lock(comparison.path / "fine_seed0")
    with pytest.raises(RunError, match="another process is writing the run in"):
        resumed(comparison.path).close()
    os.close(held)


def test_only_one_process_has_a_comparison(tmp_path: Path) -> None:
    comparison = begun(tmp_path, "fine", "collapse")
    with pytest.raises(RunError, match="another process is at work on the comparison"):
        resumed(comparison.path)
    comparison.close()


def test_settings_are_chosen_on_some_seeds_and_reported_on_others(tmp_path: Path) -> None:
    notes = Notes()
    comparison = begun(tmp_path, "fine", "crash", learning_rate=[1e-4, 4e-4])
    drive(comparison, notes)
    # fine: .8 at 1e-4, .8 − .3 at 4e-4. crash never finishes, so nothing is chosen for it.
    assert comparison.chosen == {"fine": {"learning_rate": 1e-4}}
    assert notes.said == ["chosen for fine: learning_rate=1e-4"]
    assert [record.folder for record in comparison.records if record.stage == "report"] == [
        "fine_learning_rate=1e-4_seed2",
        "fine_learning_rate=1e-4_seed3",
    ]
    assert all(record.state == "finished" for record in comparison.records if record.stage == "report")
    rows = {(row.contestant, row.setting["learning_rate"], row.seed): row for row in sweep_rows(comparison)}
    assert rows["fine", 1e-4, 1].final == pytest.approx(0.81)
    assert rows["fine", 1e-4, 1].auc == pytest.approx(0.405)  # a straight line from 0
    assert rows["fine", 4e-4, 0].kl == pytest.approx(4e-4)
    assert rows["crash", 1e-4, 0].final == 0
    printed = findings(comparison, pytest.fail)
    assert "fine: 1e-4 (1 of 2 rates); by the best of all: 1e-4 (1 of 2 rates)" in printed
    assert any(line.startswith("fine        learning_rate=1e-4  2 of 2  82.5 % [82.0…83.0]") for line in printed)
    # Mended, crash is chosen for anew; what was reported of fine is kept.
    (comparison.path / "mended").touch()
    again = resumed(comparison.path, retry_failed=True)
    notes.states.clear()
    drive(again, notes)
    assert again.chosen == {"fine": {"learning_rate": 1e-4}, "crash": {"learning_rate": 1e-4}}
    assert set(states(again).values()) == {"finished"}
    assert not any(folder.startswith("fine") for folder, _ in notes.states)


def test_if_all_runs_of_a_sweep_fail_there_is_nothing_to_report(tmp_path: Path) -> None:
    comparison = begun(tmp_path, "refused", learning_rate=[1e-4])
    drive(comparison)
    assert comparison.chosen == {}
    assert {record.stage for record in comparison.records} == {"sweep"}
    assert set(states(comparison).values()) == {"failed"}
    warned: list[str] = []
    assert findings(comparison, warned.append) == []
    assert warned[0].startswith("there is no report: no runs in")
    assert comparison_status(comparison) == "failed"


def test_each_job_sees_the_gpu_with_the_fewest_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    engine = LocalEngine(gpus=local.visible_gpus(), program=FAKE)
    assert (engine.slots, engine.about) == (2, "2 at a time on GPU 2, 5")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert local.visible_gpus() == ["0", "1"]
    comparison = begun(tmp_path, "slow", "hang", seeds=1)
    seen: set[str | None] = set()

    def look(notes: Notes) -> None:
        seen.update(gpu for _, gpu in engine.started.values())
        if len(engine.started) == 2:
            for name in list(engine.started):
                engine.kill(name)

    drive(comparison, Notes(then=look), engine=engine)
    assert seen == {"2", "5"}
    assert local.environment(None, "5")["CUDA_VISIBLE_DEVICES"] == "5"
    assert LocalEngine(threads=10**6).slots == 1


def test_a_process_that_cannot_be_started_is_a_failed_run(tmp_path: Path) -> None:
    comparison = begun(tmp_path, "fine", "slow", seeds=1)
    drive(comparison, engine=LocalEngine(jobs=1, program=("/no/such/program",)))
    assert set(states(comparison).values()) == {"failed"}
    assert "no process could be started" in (comparison.records[0].error or "")


def test_time_left_is_judged_by_what_was_done(tmp_path: Path) -> None:
    left: list[float | None] = []
    comparison = begun(tmp_path, "slow", "fine", seeds=1)
    schedule = Schedule(comparison=comparison, engine=LocalEngine(jobs=2, program=FAKE), view=Notes(), steps=120)
    schedule.view.update_time = left.append
    schedule.run()
    comparison.close()
    assert left[0] is None
    known = [value for value in left if value is not None]
    assert known
    assert known[-1] == 0
    assert max(known) < 60


def test_a_sweep_grows_for_all_where_a_best_setting_is_at_its_end(tmp_path: Path) -> None:
    # Runs are best at 1e-4, a factor of two above the grid: 1e-4 is added, then 2e-4, with which 1e-4 is inside.
    names, sweep = ("fine", "collapse"), {"learning_rate": [2.5e-5, 5e-5]}
    plan = make_plan("llm", names, sweep, seeds=2, choosing=2, choose_by="area", extend=3)
    comparison = Comparison(path=tmp_path / "all", plan=plan, training=Training(recipe="demo"), command="corral compare")
    comparison.begin(None)
    notes = Notes()
    drive(comparison, notes)
    comparison.close()
    saved = read(comparison.path)
    assert saved.plan == comparison.plan
    assert saved.plan.sweep == {"learning_rate": (2.5e-5, 5e-5)}
    assert saved.plan.added == {"learning_rate": (1e-4, 2e-4)}
    for name in names:
        tried = [run.setting["learning_rate"] for run in saved.sweep_records if run.contestant == name]
        assert sorted(tried) == sorted([2.5e-5, 5e-5, 1e-4, 2e-4] * 2), "equally many trials"
    assert saved.chosen == {name: {"learning_rate": 1e-4} for name in names}
    assert len(saved.records) == saved.plan.count == 2 * (4 * 2 + 2)
    assert [said for said in notes.said if "grows" in said] == [
        "a best setting is at an end of the sweep, which grows for all contestants: learning_rate 1e-4",
        "a best setting is at an end of the sweep, which grows for all contestants: learning_rate 1e-4, 2e-4",
    ]
    heading, first, second = ranks(saved.path)
    assert heading.split("  ")[0] == "rank"
    assert {first.split()[1], second.split()[1]} == {*names}
    assert "less fine" in heading
    (other,) = (line for line in (first, second) if " collapse " in line)
    assert other.endswith("points"), other
