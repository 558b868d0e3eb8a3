"""Course of a run of a language model or a robot: begin or resume, train, record metrics, and end with a summary."""

import shlex
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, TypeVar

from corral.lab.run.files import append_line, disk_errors, disk_sentence, reached_limit, write_json
from corral.lab.run.folder import Checkpoint, RunFolder, Stopped
from corral.lab.run.guard import Guard
from corral.lab.run.text import count
from corral.lab.run.view import RunView, make_view
from corral.provenance import versions
from corral.validate import RunError

_Result = TypeVar("_Result")
_Line = Mapping[str, Any]
_Lines = list[dict[str, Any]]

STOPPING = "Stopping after this step, with a checkpoint. Once more to stop at once."


@dataclass(frozen=True)
class Outcome:
    """Result of a finished run: its folder and the content of its summary.json."""

    path: Path
    summary: dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation: its folder and the content of its eval.json."""

    path: Path
    result: dict[str, Any]


@dataclass(kw_only=True)
class Interruptible:
    """Job that the signals SIGINT and SIGTERM stop at the end of a training step."""

    view: Any
    """Terminal output with a method `stopping(sentence)`, which may be called while the output writes a line."""
    interrupted: bool = False
    patient: bool = False
    """True during training, when a signal waits for the end of the step. At other times it stops the job at once."""

    @contextmanager
    def stop_on_signals(self) -> Iterator[None]:
        """Context in which Ctrl-C or SIGTERM ends the run after the current step, with a checkpoint.
        A second signal ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, self._on_signal) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted or not self.patient:
            raise KeyboardInterrupt
        self.interrupted = True
        self.view.stopping(STOPPING)


@dataclass(kw_only=True)
class Recorder(Interruptible):
    """Recorder of a run in progress: run folder, metrics, guard, terminal output and signals.

    A job calls `begin` once, `add` for every line of metrics, and `saving` around every checkpoint.
    """

    job: "Job"
    view: RunView
    path: Path
    """Path of the run's folder."""
    folder: RunFolder | None
    """Run folder open for writing, or None outside the main process."""
    lines: _Lines
    """Metrics of every step, including steps from before the run was resumed."""
    checkpoint: Checkpoint | None = None
    """Checkpoint from which the run resumes, or None for a new run."""

    def __post_init__(self) -> None:
        self.steps: int = vars(self.job.settings)[self.job.length]
        self.guard = self.job.guard
        self.guard.say = self.view.warn
        self.guard.restore(self.lines)
        self.started = time.monotonic() - (self.lines[-1]["seconds"] if self.lines else 0.0)

    def begin(self, banner: Sequence[tuple[str, str]]) -> None:
        """Show the heading of the run in the terminal."""
        self.view.begin(banner, self.steps, self.checkpoint.step if self.checkpoint is not None else 0)

    def is_due(self, step: int, every: int) -> bool:
        """Return True if `step` is a multiple of `every` or the last step of the run."""
        return step % every == 0 or step == self.steps

    def add(self, line: dict[str, Any]) -> None:
        """Add time, pace, skipped updates and warnings to a step's metrics, then write and show them."""
        line["seconds"] = time.monotonic() - self.started
        if self.lines:
            (counter, pace), before = self.job.pace, self.lines[-1]
            more = (line.get(counter) or 0) - (before.get(counter) or 0)
            line |= {pace: more / max(line["seconds"] - before["seconds"], 1e-9), "skipped": self.guard.skipped}
        if self.guard.news:
            line["warnings"], self.guard.news = self.guard.news, []
        self.lines.append(line)
        if self.folder is not None:
            append_line(self.folder.metrics, line)
        self.view.line(line)

    @contextmanager
    def saving(self, path: Path) -> Iterator[None]:
        """Context for writing the checkpoint `path`. If the writing fails, the partial checkpoint is removed."""
        try:
            with disk_errors(path):
                yield
        except Exception:
            if self.folder is not None:
                self.folder.drop_unfinished()
            raise

    def finish(self, stopped: Stopped, why: str | None, *writes: Callable[[], None]) -> Outcome:
        """Write summary.json and the other last files of a run.
        A failure, as on a full disk, must not hide why the run ended."""
        summary = summarise(self.job.about, self.lines, stopped, why, also=self.job.beside)
        if self.folder is not None:
            self.folder.drop_unfinished()
            last: list[Callable[[], None]] = [partial(write_json, self.folder.summary, summary), *writes]
            for write in last:
                try:
                    write()
                except RunError as error:
                    self.view.warn(str(error))
            self.folder.close()
        if stopped != "failed":
            self.view.end(last_words(summary, self.path))
        return Outcome(self.path, summary)


class Job(ABC):
    """Base class of runs of language models and robots, with methods to build, load, train and measure.

    `train` and `resume` call a job's methods in the order in which they stand here.
    """

    length: ClassVar[str]
    """Name of the setting that holds the run's number of steps."""
    beside: ClassVar[str]
    """Name of the metric that the run's summary reports together with success."""
    pace: ClassVar[tuple[str, str]]
    """Name of a metric that counts work, such as tokens, and the name of the work's rate per second."""
    completions: ClassVar[bool] = False
    """True if the run records completions of a language model."""
    is_main: bool = True
    """True if this process is the main process, which writes files and prints."""
    settings: Any
    """Settings of the run. Language models and robots each have a class of settings."""
    about: dict[str, Any]
    """Objective, task, model and seed of the run, for summary.json."""
    guard: Guard
    """Guard that checks updates and metrics for a collapse. The recorder restores its state and shows its warnings."""

    @abstractmethod
    def prepare(self) -> None:
        """Build the parts of a run from its settings. Raises RunError for a wrong setting."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the content of config.json for a new run."""

    def notes(self) -> Iterator[str]:
        """Yield remarks to print when the run is resumed."""
        yield from ()

    def check_changes(self, content: Mapping[str, Any], done: int, path: Path, view: RunView) -> dict[str, Any]:
        """Return new entries of config.json for a run resumed after `done` steps.
        Raises RunError if the run must not be resumed."""
        return {}

    def load(self, checkpoint: Checkpoint) -> None:  # noqa: B027 - TRL's trainer loads when it trains
        """Load a checkpoint's state, unless `fit` loads it."""

    def together(self, do: Callable[[], _Result]) -> _Result:
        """Call `do` in all processes of the run. If `do` fails in one process, it fails in all."""
        return do()

    def share(self, values: list[Any]) -> list[Any]:
        """Copy the main process's values to all processes of the run."""
        return values

    @abstractmethod
    def fit(self, record: Recorder) -> None:
        """Train until the last step, or until the guard or a signal stops the run."""

    def explain(self, error: BaseException) -> BaseException:
        """Convert the error that ended the run into the error to raise for the user."""
        return error

    def close(self) -> None:  # noqa: B027 - a model holds nothing that has to be released
        """Release the resources that `prepare` acquired."""


def train(job: Job, label: str, *, out: Path | str | None, quiet: bool, smoke: bool, verbose: bool) -> Outcome:
    """Train a new run in the folder `out`, or in a new folder under runs/ (under smoke-runs/ with `smoke`)."""

    def begin() -> RunFolder | None:
        job.prepare()
        if not job.is_main:
            return None
        folder = RunFolder.create(out, label, smoke=smoke)
        folder.write_config(job.describe())
        return folder

    return _live(job, job.together(begin), make_view(quiet=quiet, silent=not job.is_main, verbose=verbose), None, [])


def resume(
    make: Callable[[dict[str, Any]], Job], path: Path, *, quiet: bool, extended: bool, verbose: bool, is_main: bool = True
) -> Outcome:
    """Resume the run in `path` from its last intact checkpoint. Steps after that checkpoint are repeated, bit for bit.

    Args:
        make: makes the job from the content of config.json.
        extended: whether the job was given another number of steps, so that rates and bounds follow a schedule of that length.
    """
    folder, view = RunFolder.open(path, write=is_main), make_view(quiet=quiet, silent=not is_main, verbose=verbose)
    try:
        content = folder.read_config()
        job = make(content)
        steps: int = vars(job.settings)[job.length]
        checkpoint, complaints = folder.last_whole_checkpoint()
        done = checkpoint.step if checkpoint is not None else 0
        if extended and is_main:
            content = extend(folder, content, job.length, steps, checkpoint)
        for sentence in complaints:
            view.warn(sentence)
        if checkpoint is not None and done >= steps:  # summary.json may be missing, if the process was killed
            done_run = Recorder(job=job, view=view, path=path, folder=folder if is_main else None, lines=folder.lines())
            return done_run.finish("finished", None)
        if content.get("versions") != versions():
            view.warn("versions differ from those the run began with: it goes on, but perhaps not bit for bit the same.")
        if checkpoint is None:
            view.say(f"{path} has no whole checkpoint: the run starts from the beginning.")
        else:
            view.say(f"going on after step {done}, from {checkpoint.path}")
        for sentence in job.notes():
            view.say(sentence)

        def rebuild() -> dict[str, Any]:
            job.prepare()
            return job.check_changes(content, done, path, view)

        changes = job.together(rebuild)
        if changes and is_main:
            write_json(folder.config, content | changes)
        if checkpoint is not None:
            job.load(checkpoint)
    except RunError:
        folder.close()  # else this process could not try again
        raise
    if not is_main:
        return _live(job, None, view, None, [])
    folder.drop_unfinished()
    return _live(job, folder, view, checkpoint, folder.cut_back(done if checkpoint is not None else -1))


def _live(job: Job, folder: RunFolder | None, view: RunView, checkpoint: Checkpoint | None, lines: _Lines) -> Outcome:
    """Train a new or resumed run, and write summary.json however the run ends."""
    path, checkpoint, lines = job.share([folder.path if folder is not None else None, checkpoint, lines])
    record = Recorder(job=job, view=view, path=path, folder=folder, lines=lines, checkpoint=checkpoint)
    stopped: Stopped = "interrupted"
    error: BaseException | None = None
    try:
        with record.stop_on_signals():
            job.fit(record)
        if record.guard.collapsed or lines[-1]["step"] == record.steps:
            stopped = "collapsed" if record.guard.collapsed else "finished"
    except KeyboardInterrupt:
        pass
    except BaseException as failure:  # whatever it is, the run says so before it passes it on
        stopped, error = "failed", job.explain(failure)
        if reached_limit(failure) and not isinstance(failure, RunError):
            error = RunError(disk_sentence(failure, path))
            error.__cause__ = failure
    view.close()
    job.close()
    writes = (folder.write_completions,) if folder is not None and job.completions else ()
    outcome = record.finish(stopped, record.guard.collapsed or (str(error) if error is not None else None), *writes)
    if error is None:
        return outcome
    # Before the first step all processes are refused alike, and one speaks.
    raise error if job.is_main or record.patient or not isinstance(error, RunError) else SystemExit(1)


def summarise(
    about: Mapping[str, Any], lines: Sequence[_Line], stopped: Stopped, why: str | None, *, also: str
) -> dict[str, Any]:
    """Compute the content of summary.json from a run's metrics.
    Entries named `…_final` hold the measurements after the last step, or None without a measurement there.

    Args:
        about: objective, task, model and seed.
        lines: metrics of every step.
        also: what was measured together with `success`; its first and final value are kept too.
    """
    measured, beside = ({line["step"]: line[key] for line in lines if line.get(key) is not None} for key in ("success", also))
    end = lines[-1] if lines else {"step": 0, "seconds": 0.0}
    newest = max(measured, default=None)
    return {
        **about,
        "steps": end["step"],
        "success_start": next(iter(measured.values()), None),
        "success_best": max(measured.values(), default=None),
        "success_final": measured.get(end["step"]),
        "success_last": measured[newest] if newest is not None else None,
        "success_last_step": newest,
        f"{also}_start": next(iter(beside.values()), None),
        f"{also}_final": beside.get(end["step"]),
        "seconds": end["seconds"],
        "skipped": end.get("skipped", 0),
        "stopped": stopped,
        "why": why,
    }


def last_words(summary: Mapping[str, Any], where: Path) -> str:
    """Describe how a run ended, with the commands that resume, show and measure the run."""
    change = ""
    if summary["success_start"] is not None:
        last, step = summary["success_last"], summary["success_last_step"]
        when = "" if step == summary["steps"] else f" at step {step}, the last measured" if step else " before the first step"
        moved = f"{summary['success_start']:.1%} → {last:.1%}" if step else f"{last:.1%}"
        if summary.get("greedy_final") is not None:
            moved += f" sampled, {summary['greedy_start']:.1%} → {summary['greedy_final']:.1%} greedy"
        change = f"held-out success {moved}{when}, "
    path = shlex.quote(str(where))
    further = [] if summary["stopped"] == "finished" else [f"corral train --resume {path}"]
    further += [f"corral report {path} --open", f"corral eval {path}"] if summary["steps"] else []
    following = "\nNext: " + "\n      ".join(further) if further else ""
    ended = f"{summary['stopped']} after {count(summary['steps'], 'step')}"
    return f"{ended}: {change}{summary['seconds']:.0f} s. The run is in {where}{following}"


def extend(folder: RunFolder, content: dict[str, Any], key: str, steps: int, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """Change a run's number of steps, stored in the setting `key`, and return the new content of config.json.

    Earlier ends stay there. A RunError where the run has gone further already.
    """
    done = checkpoint.step if checkpoint is not None else 0
    if steps < done:
        raise RunError(f"the run in {folder.path} has done {done} steps, more than --{key} {steps}. Give a larger number.")
    changes = changed_setting(content, key, steps, done, "extended")
    if changes:
        write_json(folder.config, content | changes)
    return content | changes


def changed_setting(content: Mapping[str, Any], key: str, value: Any, after: int, under: str) -> dict[str, Any]:
    """Return the entries of config.json that record a setting's change during a run, or no entries without a change.

    The values that it had before stay in the list with the name `under`.
    """
    before = content["settings"].get(key)  # older runs may not have it
    if value == before:
        return {}
    changes = [*content.get(under, ()), {"from": before, "to": value, "after": after}]
    return {"settings": {**content["settings"], key: value}, under: changes}
