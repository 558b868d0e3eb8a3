"""The folder of a comparison: its plan, its runs, and an estimate of the time left."""

import json
import os
import shutil
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from corral.lab.compare.plan import Kind
from corral.lab.report.read import table_in
from corral.lab.run.files import disk_sentence, lock, read_json
from corral.lab.run.text import count, visible
from corral.lab.run.view import Clock
from corral.validate import RunError

LOG = "log.txt"
"""Output of a run's processes, in its folder."""

_LONGEST_LINE = 300
"""How much of a line goes into an error."""


@dataclass
class Progress:
    """Progress of a run, from its metrics.jsonl; only new lines are read."""

    folder: Path
    steps: int
    """Those it is to do."""
    step: int = 0
    success: float | None = None
    """The last one measured."""
    position: int = 0
    inode: int | None = field(default=None, repr=False)
    clock: Clock | None = field(default=None, repr=False)

    def begin(self) -> None:
        """A process starts. One that resumes rewrites the file from its checkpoint: the time left is estimated from there."""
        self.update()
        self.clock = None

    def update(self) -> None:
        """Read what has been written since."""
        path = self.folder / "metrics.jsonl"
        try:
            inode = path.stat().st_ino
            anew = inode != self.inode
            if anew:
                self.inode, self.position, self.step = inode, 0, 0
            with path.open("rb") as file:
                file.seek(self.position)
                text = file.read()
        except OSError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self.position += len(whole)
        for row in whole.splitlines():
            try:
                line: dict[str, Any] = json.loads(row)
                self.step = int(line["step"])
            except (ValueError, KeyError, TypeError):
                continue  # torn when a machine went down; whoever resumes cuts it off
            if line.get("success") is not None:
                self.success = line["success"]
        if anew:
            self.clock = Clock(self.steps, self.step)

    @property
    def share(self) -> float:
        """Done so far, 0 to 1."""
        return min(1.0, self.step / self.steps)

    @property
    def written(self) -> tuple[int, int]:
        """Bytes written so far, of metrics and of the log."""
        try:
            return self.position, log_path(self.folder).stat().st_size
        except OSError:  # not yet there, or just moved into the run's folder
            return self.position, 0

    @property
    def left(self) -> str:
        """The time it still needs, or nothing."""
        return (self.clock.left(self.step) if self.clock is not None else None) or ""


def read_state(folder: Path) -> str:
    """The state of a run that no process writes, from its files."""
    stopped = str(read_summary(folder).get("stopped"))
    if stopped in ("finished", "collapsed", "failed"):
        return stopped
    return "interrupted" if (folder / "config.json").is_file() else "waiting"


def read_summary(folder: Path) -> dict[str, Any]:
    """summary.json; empty if the run has not ended, or was killed."""
    try:
        content = read_json(folder / "summary.json")
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def refuse_busy(folder: Path) -> None:
    """A RunError if another process writes this run: one that outlived its killed comparison."""
    if (folder / ".lock").is_file():
        os.close(lock(folder))


def pending_log(folder: Path) -> Path:
    """The path of a log before its run's folder is made, which must be empty until then."""
    return folder.with_name(f".{folder.name}.log")


def open_log(folder: Path) -> int:
    """A file to append to. A run that never began loses what little there is of its folder, but not its log."""
    pending, placed = pending_log(folder), folder / LOG
    try:
        if not (folder / "config.json").is_file() and folder.is_dir():
            if placed.is_file():
                os.replace(placed, pending)
            shutil.rmtree(folder)
        path = placed if folder.is_dir() else pending
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunError(disk_sentence(error, folder)) from error


def place_log(folder: Path, *, ended: bool = False) -> None:
    """Move a log into its run's folder once that is there; a run that ended without one gets a folder for its log."""
    pending = pending_log(folder)
    if not pending.is_file() or not (ended or (folder / "config.json").is_file()):
        return
    try:
        folder.mkdir(exist_ok=True)
        os.replace(pending, folder / LOG)  # an open file stays open
    except OSError as error:
        raise RunError(disk_sentence(error, folder / LOG)) from error


def log_path(folder: Path) -> Path:
    """The present path of a log."""
    return folder / LOG if (folder / LOG).is_file() else pending_log(folder)


def log_tail(folder: Path, count: int = 1) -> list[str]:
    """The end of a log, without control characters."""
    path = log_path(folder)
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16_384))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [visible(line.strip())[:_LONGEST_LINE] for line in text.splitlines() if line.strip()][-count:]


def failure_reason(folder: Path, status: int) -> str:
    """Why a run failed, in a line: the last line of its log, or the signal that ended the process."""
    if status < 0:
        names = {number.value: number.name for number in signal.Signals}
        hint = ", as when memory runs out" if -status == signal.SIGKILL else ""
        return f"killed by {names.get(-status, f'signal {-status}')}{hint}"
    said = log_tail(folder)
    return said[0].removeprefix("corral: ") if said else f"ended with status {status} and without a word"


_COST_SETTINGS: dict[Kind, tuple[str, ...]] = {
    "llm": (
        "model", "task", "task_config", "device", "per_device_train_batch_size", "steps_per_generation", "num_generations",
        "max_completion_length", "eval_every", "eval_size",
    ),
    "robot": ("environment", "learner.episodes", "eval_every", "eval_size"),
}  # fmt: skip
"""Settings that determine most of a step's cost."""

_KNOWN = {"demo": 3.4, "via_point": 0.5, "via_point_sparse": 0.35, "via_point_sparse_short": 0.5}
"""Seconds per step of a recipe as it ships, on one core; step-based baselines take several times as long."""


def seconds_per_step(kind: Kind, settings: Any, recipe: str | None, folders: Iterable[Path]) -> tuple[float, str] | None:
    """Seconds that a step takes, and where that is known from; None if it is not.

    Args:
        settings: resolved, of one contestant.
        folders: where earlier runs may be, three folders deep.
    """
    mine = _cost_settings(kind, settings.flat())
    paces = []
    for folder in folders:
        for path in [file for depth in ("*", "*/*", "*/*/*") for file in folder.glob(f"{depth}/config.json")]:
            try:
                given = read_json(path)["settings"]
                summary = read_summary(path.parent)
                if _cost_settings(kind, given) == mine and summary["stopped"] == "finished":
                    paces.append(summary["seconds"] / summary["steps"])
            except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
                continue  # no run, or a damaged one
    if paces:
        return median(paces), f"as {count(len(paces), 'earlier run')} here took"
    if recipe in _KNOWN:
        return _KNOWN[recipe], f"as {recipe} took on one core elsewhere"
    return None


def _cost_settings(kind: Kind, settings: Mapping[str, Any]) -> list[Any]:
    """The settings that determine a step's cost."""
    paths = [key.split(".") for key in _COST_SETTINGS[kind]]
    return [table_in(settings, *outer).get(last) for *outer, last in paths]


def duration(seconds: float) -> str:
    """`45 s`, `13 min`, `2 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
