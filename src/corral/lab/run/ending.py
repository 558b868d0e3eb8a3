"""How a run ends: finished, interrupted, collapsed or failed, each with a summary and an exit status."""

import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, runtime_checkable

from corral.lab.run.files import disk_sentence, is_disk_full, write_json
from corral.lab.run.folder import Checkpoint, RunFolder, Stopped
from corral.lab.run.text import count
from corral.lab.run.view import RunView
from corral.validate import RunError


@dataclass(frozen=True)
class Outcome:
    """How a run ended, and where it is."""

    path: Path
    summary: dict[str, Any]


def attempt(job: Callable[[], Stopped], where: Path) -> tuple[Stopped, BaseException | None]:
    """Run `job`: how it stopped, and the exception if there was one. A full disk becomes a RunError."""
    try:
        return job(), None
    except KeyboardInterrupt:
        return "interrupted", None
    except BaseException as failure:  # whatever it is, the run says so before it passes it on
        if is_disk_full(failure) and not isinstance(failure, RunError):
            error = RunError(disk_sentence(failure, where))
            error.__cause__ = failure
            return "failed", error
        return "failed", failure


def summarise(
    about: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    stopped: Stopped,
    why: str | None,
    *,
    also: str,
) -> dict[str, Any]:
    """The content of summary.json. What is `_final` was measured after the last step: None where that was not.

    Args:
        about: objective, task, model and seed.
        lines: metrics of every step.
        also: what was measured together with `success`; its first and final value are kept too.
    """
    measured = {line["step"]: line["success"] for line in lines if line.get("success") is not None}
    beside = {line["step"]: line[also] for line in lines if line.get(also) is not None}
    last, newest = lines[-1]["step"] if lines else 0, max(measured, default=None)
    return {
        **about,
        "steps": last,
        "success_start": next(iter(measured.values()), None),
        "success_best": max(measured.values(), default=None),
        "success_final": measured.get(last),
        "success_last": measured[newest] if newest is not None else None,
        "success_last_step": newest,
        f"{also}_start": next(iter(beside.values()), None),
        f"{also}_final": beside.get(last),
        "seconds": lines[-1]["seconds"] if lines else 0.0,
        "skipped": lines[-1].get("skipped", 0) if lines else 0,
        "stopped": stopped,
        "why": why,
    }


def close(folder: RunFolder, writes: Sequence[Callable[[], None]], view: RunView) -> None:
    """Write the last files. On a full disk even that can fail, and must not hide why the run ended."""
    folder.drop_unfinished()
    for write in writes:
        try:
            write()
        except RunError as error:
            view.warn(str(error))
    folder.close()


def extend(folder: RunFolder, content: Mapping[str, Any], end: Mapping[str, int], checkpoint: Checkpoint | None) -> None:
    """Give a run another length: `end` is {"steps": 80}, or a robot's {"iterations": 80}. Earlier ends stay in config.json.

    A RunError where it has gone further already.
    """
    ((key, value),) = end.items()
    done = checkpoint.step if checkpoint is not None else 0
    if value < done:
        folder.close()
        raise RunError(f"the run in {folder.path} has done {done} steps, more than --{key} {value}. Give a larger number.")
    record_change(folder, content, end, done, "extended")


def record_change(folder: RunFolder, content: Mapping[str, Any], change: Mapping[str, Any], after: int, under: str) -> None:
    """Give a setting another value in config.json after so many steps; `under` this name it keeps which ones came before."""
    ((key, value),) = change.items()
    before = content["settings"].get(key)  # older runs may not have it
    if value != before:
        changes = [*content.get(under, ()), {"from": before, "to": value, "after": after}]
        write_json(folder.config, {**content, "settings": {**content["settings"], **change}, under: changes})


def last_words(summary: Mapping[str, Any], where: Path) -> str:
    """How it ended, and the commands that resume the run, show it and measure it."""
    change = ""
    if summary["success_start"] is not None:
        last, step = summary["success_last"], summary["success_last_step"]
        when = "" if step == summary["steps"] else f" at step {step}, the last measured" if step else " before the first step"
        moved = f"{summary['success_start']:.1%} → {last:.1%}" if step else f"{last:.1%}"
        change = f"held-out success {moved}{when}, "
    took = f"{summary['seconds']:.0f} s. The run is in {where}"
    path = shlex.quote(str(where))
    resume = "" if summary["stopped"] == "finished" else f"\nResume with: corral train --resume {path}"
    further = f"\nNext: corral report {path}, or corral eval {path}" if summary["stopped"] in ("finished", "collapsed") else ""
    return f"{summary['stopped']} after {count(summary['steps'], 'step')}: {change}{took}{resume}{further}"


STOPPING = "Stopping after this step, with a checkpoint. Once more to stop at once."


@runtime_checkable
class StopListener(Protocol):
    """Shows that a signal has arrived."""

    def stopping(self, sentence: str) -> None:
        """Called from the signal's handler: anything may be half done, a line of text too."""


@dataclass(kw_only=True)
class Interruptible:
    """A job that SIGINT and SIGTERM stop at the end of a step."""

    view: StopListener
    interrupted: bool = False
    patient: bool = False
    """Whether a signal waits for the end of the step; before training it need not."""

    @contextmanager
    def stop_on_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the run at the next step's end, with a checkpoint; a second one ends it at once."""
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
