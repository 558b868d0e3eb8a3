"""The scheduler: keeps the engine's slots full, records every run's state, and survives failed runs."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from corral.lab.compare.folder import Progress, failure_reason, log_path, read_state, read_summary
from corral.lab.compare.local import Engine, RunJob
from corral.lab.compare.plan import ChosenSettings, resume_arguments, start_arguments
from corral.lab.compare.record import ENDED, Comparison
from corral.lab.report.read import PlannedRun, setting_pairs
from corral.lab.run.life import Interruptible
from corral.validate import RunError

_PAUSE = 0.2
"""Seconds between two looks at the jobs."""


@runtime_checkable
class ScheduleView(Protocol):
    """The view that a schedule reports to: states of runs, the time left, and sentences."""

    def update_run(self, record: PlannedRun, progress: Progress) -> None:
        """A run has another state."""

    def update_time(self, left: float | None) -> None:
        """Time has passed; `left` is how many seconds it may still take."""

    def say(self, sentence: str) -> None:
        """Something good to know."""

    def stopping(self, sentence: str) -> None:
        """A signal has come."""


@dataclass(kw_only=True)
class Schedule(Interruptible):
    """Runs a comparison to its end, or until it is interrupted."""

    comparison: Comparison
    engine: Engine
    view: ScheduleView
    steps: int
    """Of each run."""
    choose: Callable[[Comparison], ChosenSettings]
    """Called once the sweep is over."""
    stall: float = 3600.0
    """Seconds without a new line of metrics or log, after which a run counts as hung and is ended."""
    running: dict[str, PlannedRun] = field(default_factory=dict)
    progress: dict[str, Progress] = field(default_factory=dict)
    last_output: dict[str, tuple[float, tuple[int, int]]] = field(default_factory=dict)
    """When a running run last gave a sign of life, and what it had written then."""
    attempted: set[str] = field(default_factory=set)
    """Each run is started once per call: one that was interrupted from outside waits for the next."""
    hung: set[str] = field(default_factory=set)
    stop_requested: bool = False
    """Whether the jobs have been asked to stop."""

    def run(self) -> None:
        """Run until no run is left to start. A second Ctrl-C ends all runs at once."""
        self.began = time.monotonic()
        for record in self.comparison.records:
            self._progress(record).update()
        self.done_before = self._work_done()
        with self.stop_on_signals():
            self.patient = True
            try:
                while self._poll():
                    time.sleep(_PAUSE)
            except KeyboardInterrupt:
                self.interrupted = True
            finally:
                self.patient = False
                self._abandon()

    def _poll(self) -> bool:
        """Poll the jobs once. Returns whether there is more to do."""
        for name, status in self.engine.poll().items():
            self._end(self.running.pop(name), status)
        for record in self.running.values():
            self._progress(record).update()
        self._end_hung()
        if self.interrupted and not self.stop_requested:
            self.stop_requested = True
            for name in self.running:
                self.engine.stop(name)
        if not self.interrupted:
            self._fill()
            if self.comparison.must_choose:
                self._choose()
                self._fill()
        self.view.update_time(self.left)
        return bool(self.running)

    def _fill(self) -> None:
        """Start runs while there are slots: interrupted ones are resumed."""
        for record in self.comparison.records:
            if len(self.running) >= self.engine.slots:
                return
            if record.state in ("waiting", "interrupted") and record.folder not in self.attempted:
                self._start(record)

    def _start(self, record: PlannedRun) -> None:
        folder, where = self.comparison.folder(record), self.comparison.path.absolute()
        if (folder / "config.json").is_file():
            arguments = resume_arguments(record, where)
        else:
            arguments = start_arguments(self.comparison.plan.kind, self.comparison.training, record, where)
        name = record.folder
        self.attempted.add(name)
        self._progress(record).begin()
        try:
            self.engine.start(RunJob(arguments=arguments, folder=folder))
        except RunError as error:
            self._change(record, "failed", str(error))
            return
        self.running[name] = record
        self.last_output[name] = time.monotonic(), self._progress(record).written
        self._change(record, "running")

    def _end(self, record: PlannedRun, status: int) -> None:
        """The run's own summary decides; without one it failed, unless it was asked to stop."""
        folder = self.comparison.folder(record)
        self._progress(record).update()
        if record.folder in self.hung:
            self._change(record, "failed", f"no sign of life for {self.stall:g} s: it hung, and was ended")
            return
        stopped = read_summary(folder).get("stopped")
        if stopped in ("finished", "collapsed"):
            self._change(record, read_state(folder))
        elif self.stop_requested or stopped == "interrupted":
            self._change(record, "interrupted")
        else:
            self._change(record, "failed", failure_reason(folder, status))

    def _choose(self) -> None:
        """The sweep is over: the settings to report on, and the runs for that."""
        self.comparison.chosen = self.choose(self.comparison)
        self.comparison.add_runs()
        self.comparison.save()
        for name, setting in self.comparison.chosen.items():
            self.view.say(f"chosen for {name}: {', '.join(setting_pairs(setting))}")

    def _end_hung(self) -> None:
        now = time.monotonic()
        for name, record in self.running.items():
            written = self._progress(record).written
            if written != self.last_output[name][1] or not log_path(self.comparison.folder(record)).exists():  # not yet placed
                self.last_output[name] = now, written
            elif now - self.last_output[name][0] > self.stall and name not in self.hung:
                self.hung.add(name)
                self.engine.kill(name)

    def _change(self, record: PlannedRun, state: str, error: str | None = None) -> None:
        record.state, record.error = state, error
        self.comparison.save()
        self.view.update_run(record, self._progress(record))

    def _abandon(self) -> None:
        """Whatever still runs is ended; its last checkpoint stays."""
        self.engine.close()
        for record in self.running.values():
            record.state = "interrupted"
            self.view.update_run(record, self._progress(record))
        if self.running:
            self.running.clear()
            self.comparison.save()

    @property
    def left(self) -> float | None:
        """Seconds until the end, at the pace so far; None before there is one."""
        done = self._work_done() - self.done_before
        if done <= 0.02:
            return None
        plan, records = self.comparison.plan, self.comparison.records
        to_come = plan.count - len(records)  # runs whose setting has not been chosen
        open_work = sum(1 - self._progress(record).share for record in records if record.state not in ENDED) + to_come
        return (time.monotonic() - self.began) * open_work / done

    def _work_done(self) -> float:
        """In runs."""
        return sum(1.0 if record.state in ENDED else self._progress(record).share for record in self.comparison.records)

    def _progress(self, record: PlannedRun) -> Progress:
        """The progress of a run."""
        name = record.folder
        if name not in self.progress:
            self.progress[name] = Progress(self.comparison.folder(record), self.steps)
        return self.progress[name]
