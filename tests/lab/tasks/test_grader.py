"""Graders in processes of their own: whatever a grader does, an answer comes, and in time."""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import corral.lab.tasks.grader as grader
from corral.lab.tasks.grader import GraderPool, Verdict, grader_counts, grader_pool

SCRIPT = Path(__file__).with_name("grader_that_fails.py")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[GraderPool]:
    monkeypatch.setattr(grader, "SCRIPT", SCRIPT)
    one = GraderPool("test", 2)
    yield one
    one.close()


def scores(verdicts: list[Verdict]) -> list[tuple[str, float]]:
    return [(verdict.status, verdict.score) for verdict in verdicts]


@pytest.mark.parametrize(
    ("what", "status"),
    [
        ("spin", "timeout"),  # by the limit on processor time
        ("sleep", "timeout"),  # by the clock
        ("die", "died"),
        ("print", "error"),  # what it prints is no answer: float("print") is a ValueError
        ("memory", "error"),
        ("exit", "error"),
        ("nan", "error"),  # no score
        ("hang up", "timeout"),  # it has no answer to give any more, and does not end
        ("nonsense", "error"),
    ],
)
def test_whatever_a_grader_does_is_wrong_and_counted_and_the_next_is_graded(
    failing: GraderPool, what: str, status: str
) -> None:
    started = time.monotonic()
    assert scores(failing.grade([(what,), ("0.5",)], 0.3)) == [(status, 0.0), ("graded", 0.5)]
    assert scores(failing.grade([("0.25",)], 0.3)) == [("graded", 0.25)]
    assert failing.counts == {status: 1, "graded": 2}
    assert time.monotonic() - started < 60


def test_a_worker_that_reads_nothing_is_not_waited_for(failing: GraderPool) -> None:
    """A pipe holds 64 KiB: a longer question has to wait for its reader, and that too has an end."""
    (one,) = failing.grade([("pid",)], 1.0)
    os.kill(int(one.score), signal.SIGSTOP)
    found: list[Verdict] = []
    asking = threading.Thread(target=lambda: found.extend(failing.grade([("1" * 1_000_000,)], 0.3)), daemon=True)
    asking.start()
    asking.join(30)
    assert scores(found) == [("timeout", 0.0)]
    assert failing.grade([("0" * 1_000_000 + "1",)], 5.0) == [Verdict("graded", 1.0)]


def test_a_worker_in_use_does_not_keep_its_pool_from_closing_and_is_ended_after(failing: GraderPool) -> None:
    worker, uses = failing._take()
    closing = threading.Thread(target=failing.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert worker.process.poll() is None
    failing._put(worker, uses)
    assert worker.process.poll() is not None


def test_a_process_with_thousands_of_open_files_grades(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, resource\nimport corral.lab.tasks.grader as grader\n"
        f"grader.SCRIPT = pathlib.Path({str(SCRIPT)!r})\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "held = [os.dup(0) for _ in range(1100)]\n"
        "print(grader.GraderPool('test', 1).grade([('0.5',)], 1.0))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[Verdict(status='graded', score=0.5)]\n", done.stderr


def test_an_answer_that_runs_out_of_time_costs_no_new_process(failing: GraderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grader, "_WALL_FACTOR", 100.0)  # a crowded machine takes longer on the clock
    workers = {failing._take()[0] for _ in range(2)}
    for worker in workers:
        failing._put(worker, 0)
    assert scores(failing.grade([("spin",), ("1",)] * 4, 0.1)) == [("timeout", 0.0), ("graded", 1.0)] * 4
    assert {worker for worker, _ in failing._idle} == workers


def test_the_time_for_a_problem_whose_answers_run_out_of_it_is_halved(failing: GraderPool) -> None:
    asked: list[tuple[str, float]] = []

    class Noted(grader.GraderWorker):
        def ask(self, arguments: tuple[Any, ...], seconds: float) -> Verdict:
            asked.append((arguments[1], seconds))
            return Verdict("timeout") if arguments[0] == "bomb" else Verdict("graded", 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grader, "GraderWorker", Noted)
        for _ in range(6):
            failing.grade([("bomb", "a")], 2.0, ["a"])
        failing.grade([("right", "a"), ("right", "b")], 2.0, ["a", "b"])
        failing.grade([("bomb", "c")] * 2, 2.0)  # of no problem: the time stays
    times = {name: [seconds for one, seconds in asked if one == name] for name in "abc"}
    assert times == {"a": [2.0, 1.0, 0.5, 0.25, 0.25, 0.25, 0.25], "b": [2.0], "c": [2.0, 2.0]}


def test_problems_with_such_answers_are_forgotten_in_time(failing: GraderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grader, "_MAX_PROBLEMS", 3)
    for number in range(8):
        failing.grade([("spin",)], 0.05, [str(number)])
    assert len(failing._bombs) <= 3


def test_a_graders_memory_is_limited(failing: GraderPool) -> None:
    (one,) = failing.grade([("pid",)], 1.0)
    limits = Path(f"/proc/{int(one.score)}/limits").read_text()
    assert re.search(rf"^Max address space +{4 << 30} +{4 << 30} ", limits, re.MULTILINE)
    assert re.search("^Max core file size +0 +0 ", limits, re.MULTILINE)


def test_many_answers_keep_their_order(failing: GraderPool) -> None:
    questions = [(str(number),) if number % 7 else ("die",) for number in range(40)]
    expected = [("graded", float(number)) if number % 7 else ("died", 0.0) for number in range(40)]
    assert scores(failing.grade(questions, 1.0)) == expected
    assert failing.grade([], 1.0) == []


def test_any_thread_may_ask(failing: GraderPool) -> None:
    found: list[Verdict] = []
    threads = [threading.Thread(target=lambda: found.extend(failing.grade([("spin",), ("1",)], 0.2))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(scores(found)) == [("graded", 1.0)] * 3 + [("timeout", 0.0)] * 3


def test_a_worker_that_someone_else_killed_is_replaced(failing: GraderPool) -> None:
    (one,) = failing.grade([("pid",)], 1.0)
    os.kill(int(one.score), signal.SIGKILL)
    (other,) = failing.grade([("pid",)], 1.0)
    assert other.status == "graded"
    assert other.score != one.score
    assert failing.counts == {"graded": 2}


def test_workers_are_kept_and_ended(failing: GraderPool) -> None:
    first, second = (failing.grade([("pid",)], 1.0)[0].score for _ in range(2))
    assert first == second
    failing.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(first), 0)


def test_a_forked_process_has_workers_of_its_own(failing: GraderPool) -> None:
    (one,) = failing.grade([("pid",)], 1.0)
    failing._owner = -1  # as it looks from a fork
    with pytest.raises(RuntimeError, match="open another one after a fork"):
        failing.grade([("pid",)], 1.0)
    failing.close()
    os.kill(int(one.score), 0)  # it lives: it is not this process's to end
    failing._owner = os.getpid()


def test_however_many_threads_ask_there_are_no_more_workers_than_the_pool_has_room_for(failing: GraderPool) -> None:
    found: list[Verdict] = []
    threads = [threading.Thread(target=lambda: found.extend(failing.grade([("pid",)], 1.0))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 12
    assert len({verdict.score for verdict in found}) <= 2


def test_ctrl_c_is_not_for_graders(failing: GraderPool) -> None:
    (one,) = failing.grade([("pid",)], 1.0)
    os.kill(int(one.score), signal.SIGINT)
    time.sleep(0.1)
    assert failing.grade([("pid",)], 1.0) == [one]


def test_failures_are_said_at_the_first_the_tenth_and_so_on(failing: GraderPool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="corral.task"):
        failing.grade([("nonsense",)] * 12, 1.0)
    assert [record.getMessage() for record in caplog.records] == [
        f"grader test: error, {number} so far; such answers count as wrong." for number in (1, 10)
    ]


def test_a_grader_that_cannot_start_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(RuntimeError, match=r"does not start: .* says why"):
        GraderPool("no such kind", 1).grade([("1",)], 1.0)


def test_graders_end_with_their_process(tmp_path: Path) -> None:
    script = (
        "from corral.lab.tasks.grader import GraderPool\nimport corral.lab.tasks.grader as grader, pathlib, os, signal\n"
        f"grader.SCRIPT = pathlib.Path({str(SCRIPT)!r})\n"
        "print(int(GraderPool('test', 1).grade([('pid',)], 1.0)[0].score), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        state = Path(f"/proc/{done.stdout.strip()}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the grader outlived its process")


def test_one_pool_of_a_kind_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert grader_pool("math") is grader_pool("math")
    assert "math" in grader_counts()
    monkeypatch.setattr(grader, "_POOLS", {})
    monkeypatch.setattr(grader, "cores", lambda: 1)
    assert grader_pool("math").size == 1
    monkeypatch.setattr(grader, "_POOLS", {})
    monkeypatch.setattr(grader, "cores", lambda: 256)
    assert grader_pool("math").size == grader.MAX_WORKERS == 4
