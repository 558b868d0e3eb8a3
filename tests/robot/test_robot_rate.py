"""Speed of the simulated tasks: rows, ratios and the page."""

from pathlib import Path

import pytest
import robot_rate
from rows import read_rows

from results.timings import robot_rates


def test_ratios_are_to_one_thread_in_both_ways() -> None:
    rates = {(1, "batch"): 100.0, (1, "steps"): 50.0, (16, "batch"): 1200.0}
    rows = [{"workers": workers, "way": way, "steps_per_second": rate} for (workers, way), rate in rates.items()]
    last = robot_rate.with_ratios(rows)[-1]
    assert (last["times_one_batch"], last["times_one_steps"]) == (12.0, 24.0)
    assert robot_rate.with_ratios(rows[-1:]) == rows[-1:], "without one thread there is nothing to compare with"


def test_a_batch_is_measured_with_several_threads() -> None:
    rows = robot_rate.measure_task("hopper", [1, 2], ["batch"], episodes=2, repetitions=1)
    assert [row["workers"] for row in rows] == [1, 2]
    assert rows[0]["times_one_batch"] == 1


def test_saved_rows_replace_those_of_the_same_task_and_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robot_rate, "FILE", tmp_path / "rate.jsonl")
    robot_rate.save([{"task": "box", "cores": 2, "workers": 1}, {"task": "box", "cores": 2, "workers": 2}])
    robot_rate.save([{"task": "box", "cores": 16, "workers": 16}, {"recipe": "via_point"}])
    robot_rate.save([{"task": "box", "cores": 2, "workers": 4}])
    assert [row.get("workers") for row in read_rows(robot_rate.FILE)] == [16, None, 4]


def test_the_page_shows_the_saved_rows() -> None:
    rows = [{"task": "box", "cores": 2, "episodes": 64, "workers": 1, "way": "batch", "steps_per_second": 12345.6}]
    assert robot_rates([*rows, {"recipe": "via_point"}]).splitlines()[2:] == [
        "| box | 2 | 64 | 1 | as one batch | 12 346 | – | – |"
    ]
