"""The schedule: fills the engine's slots, writes down what becomes of every run, and lets nothing sink the rest."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from corral.compare.command import resume_words, start_words
from corral.compare.engine import Engine, Job
from corral.compare.folder import Progress, found_state, log_of, log_size, summary, why_failed
from corral.compare.plan import Chosen, State
from corral.compare.record import ENDED, Comparison, Record
from corral.report.sweep.ranges import setting_pairs
from corral.run.files import RunError
from corral.run.interrupt import Interruptible

PAUSE = 0.2
"""Seconds between two looks at the jobs."""


@runtime_checkable
class Board(Protocol):
    """Who shows a schedule."""

    def changed(self, record: Record, progress: Progress) -> None:
        """A run has another state."""

    def look(self, left: float | None) -> None:
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
    view: Board
    steps: int
    """Of each run."""
    choose: Callable[[Comparison], Chosen]
    """Called once the sweep is over."""
    stall: float = 3600.0
    """Seconds without a new line of metrics or log, after which a run counts as hung and is ended."""
    running: dict[str, Record] = field(default_factory=dict)
    progress: dict[str, Progress] = field(default_factory=dict)
    heard: dict[str, tuple[float, tuple[int, int]]] = field(default_factory=dict)
    """When a running run last gave a sign of life, and what it had written then."""
    tried: set[str] = field(default_factory=set)
    """Each run is started once: one that somebody else interrupted is for the next time."""
    hung: set[str] = field(default_factory=set)
    asked: bool = False
    """Whether the jobs have been asked to stop."""

    def run(self) -> None:
        """Until no run is left that could be started. A second Ctrl-C ends all at once."""
        self.began = time.monotonic()
        for record in self.comparison.records:
            self._known(record).update()
        self.already = self._work_done()
        with self.obeying_signals():
            self.patient = True
            try:
                while self._turn():
                    time.sleep(PAUSE)
            except KeyboardInterrupt:
                self.interrupted = True
            finally:
                self.patient = False
                self._abandon()

    def _turn(self) -> bool:
        """One look at the jobs. Returns whether there is more to do."""
        for name, status in self.engine.ended().items():
            self._end(self.running.pop(name), status)
        for record in self.running.values():
            self._known(record).update()
        self._end_hung()
        if self.interrupted and not self.asked:
            self.asked = True
            for name in self.running:
                self.engine.stop(name)
        if not self.interrupted:
            self._fill()
            if self.comparison.choosing:
                self._choose()
                self._fill()
        self.view.look(self.left)
        return bool(self.running)

    def _fill(self) -> None:
        """Start runs while there are slots: interrupted ones go on from their checkpoints."""
        for record in self.comparison.records:
            if len(self.running) >= self.engine.slots:
                return
            if record.state in ("waiting", "interrupted") and record.run.folder not in self.tried:
                self._start(record)

    def _start(self, record: Record) -> None:
        folder, where = self.comparison.folder(record), self.comparison.path.absolute()
        if (folder / "config.json").is_file():
            words = resume_words(record.run, where)
        else:
            words = start_words(self.comparison.plan.kind, self.comparison.training, record.run, where)
        name = record.run.folder
        self.tried.add(name)
        self._known(record).begin()
        try:
            self.engine.start(Job(words=words, folder=folder))
        except RunError as error:
            self._change(record, "failed", str(error))
            return
        self.running[name] = record
        self.heard[name] = time.monotonic(), self._written(record)
        self._change(record, "running")

    def _end(self, record: Record, status: int) -> None:
        """What a run says of its own end counts; one that says nothing failed, unless it was asked to stop."""
        folder = self.comparison.folder(record)
        self._known(record).update()
        if record.run.folder in self.hung:
            self._change(record, "failed", f"no sign of life for {self.stall:g} s: it hung, and was ended")
            return
        stopped = summary(folder).get("stopped")
        if stopped in ("finished", "collapsed"):
            self._change(record, found_state(folder))
        elif self.asked or stopped == "interrupted":
            self._change(record, "interrupted")
        else:
            self._change(record, "failed", why_failed(folder, status))

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
            written = self._written(record)
            if written != self.heard[name][1] or not log_of(self.comparison.folder(record)).exists():  # not yet placed
                self.heard[name] = now, written
            elif now - self.heard[name][0] > self.stall and name not in self.hung:
                self.hung.add(name)
                self.engine.kill(name)

    def _written(self, record: Record) -> tuple[int, int]:
        """Something that changes whenever a run writes metrics or log."""
        return self._known(record).position, log_size(self.comparison.folder(record))

    def _change(self, record: Record, state: State, error: str | None = None) -> None:
        record.state, record.error = state, error
        self.comparison.save()
        self.view.changed(record, self._known(record))

    def _abandon(self) -> None:
        """Whatever still runs is ended; its last checkpoint stays."""
        self.engine.close()
        for record in self.running.values():
            record.state = "interrupted"
            self.view.changed(record, self._known(record))
        if self.running:
            self.running.clear()
            self.comparison.save()

    @property
    def left(self) -> float | None:
        """Seconds until the end, if all goes on as fast as since the beginning; None while nobody can tell."""
        done = self._work_done() - self.already
        if done <= 0.02:
            return None
        plan, records = self.comparison.plan, self.comparison.records
        to_come = plan.count - len(records)  # runs whose setting has not been chosen
        open_work = sum(1 - self._known(record).share for record in records if record.state not in ENDED) + to_come
        return (time.monotonic() - self.began) * open_work / done

    def _work_done(self) -> float:
        """In runs."""
        return sum(1.0 if record.state in ENDED else self._known(record).share for record in self.comparison.records)

    def _known(self, record: Record) -> Progress:
        """How far a run is."""
        name = record.run.folder
        if name not in self.progress:
            self.progress[name] = Progress(self.comparison.folder(record), self.steps)
        return self.progress[name]
