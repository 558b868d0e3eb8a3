"""Comparisons whose runs are played by fake_train.py, and a board that remembers what it is shown.

`python fake_comparisons.py FOLDER` runs one as `corral compare` would, for tests of what a terminal shows.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from corral.lab.compare.job import Preparation, Schedule, describe, run_comparison
from corral.lab.compare.local import Engine, LocalEngine
from corral.lab.compare.plan import Budget, Training, make_plan
from corral.lab.compare.record import Comparison, Progress, read
from corral.lab.compare.view import CompareView, make_compare_view
from corral.lab.report.read import PlannedRun

FAKE = (sys.executable, "-I", str(Path(__file__).with_name("fake_train.py")))


@dataclass
class Notes(CompareView):
    """A board that remembers."""

    states: list[tuple[str, str]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    most: int = 0
    """Runs that ran at a time."""
    then: Callable[["Notes"], None] | None = None
    """Called at every look."""
    running: set[str] = field(default_factory=set)

    def update_run(self, record: PlannedRun, progress: Progress) -> None:
        self.states.append((record.folder, record.state))
        (self.running.add if record.state == "running" else self.running.discard)(record.folder)
        self.most = max(self.most, len(self.running))

    def update_time(self, left: float | None) -> None:
        if self.then is not None:
            self.then(self)

    def stopping(self, sentence: str) -> None:
        pass

    def say(self, sentence: str) -> None:
        self.said.append(sentence)


def begun(path: Path, *names: str, seeds: int = 2, **sweep: list[float]) -> Comparison:
    plan = make_plan("llm", names, sweep, seeds=seeds, choosing=2)
    comparison = Comparison(path=path / "all", plan=plan, training=Training(recipe="demo"), command="corral compare")
    comparison.begin(None)
    return comparison


def resumed(path: Path, *, retry_failed: bool = False) -> Comparison:
    comparison = read(path)
    comparison.resume(retry_failed=retry_failed)
    return comparison


def drive(comparison: Comparison, notes: Notes | None = None, *, stall: float = 60.0, engine: Engine | None = None) -> Schedule:
    engine = engine or LocalEngine(jobs=2, threads=1, program=FAKE)
    schedule = Schedule(comparison=comparison, engine=engine, view=notes or Notes(), steps=4, stall=stall)
    schedule.run()
    comparison.close()
    return schedule


def states(comparison: Comparison) -> dict[str, str]:
    """As the file says, which must be what is remembered."""
    written = {run["folder"]: run["state"] for run in json.loads((comparison.path / "compare.json").read_text())["runs"]}
    assert written == {record.folder: record.state for record in comparison.records}
    return written


def interrupt_when(steps: int, comparison: Comparison, times: int = 1) -> Callable[[Notes], None]:
    """Ctrl-C once a run is so far; a second one a little later."""
    sent: list[threading.Timer] = []

    def then(notes: Notes) -> None:
        lines = [len(file.read_text().splitlines()) for file in comparison.path.glob("slow*/metrics.jsonl")]
        if not sent and lines and max(lines) > steps:
            for count in range(times):
                sent.append(threading.Timer(0.5 * count, os.kill, (os.getpid(), signal.SIGINT)))
                sent[-1].start()

    return then


def main(path: Path) -> None:
    comparison = begun(path, "slow", "fine", "crash", seeds=1)
    stage = Preparation(budget=Budget(steps=120, samples=1, what="completions"), engine=LocalEngine(jobs=2, program=FAKE))
    view = make_compare_view(quiet=False)
    view.banner(describe(comparison, stage))
    sys.exit({"finished": 0, "failed": 1}[run_comparison(comparison, stage, view)])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
