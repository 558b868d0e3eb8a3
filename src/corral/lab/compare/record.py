"""State of a comparison in its folder: compare.json, saved atomically after every change, and the files of the runs."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from corral.lab.compare.plan import ChosenSettings, ComparisonPlan, Training
from corral.lab.report.read import FILE, VERSION, PlannedRun, read_comparison
from corral.lab.run.files import LockedFolder, disk_errors, lock, read_json, write_json
from corral.lab.run.folder import LOG
from corral.lab.run.text import visible
from corral.lab.run.view import Clock
from corral.validate import RunError

_LONGEST_LINE = 300
"""Largest number of characters of a log line that an error quotes."""

ENDED: tuple[str, ...] = ("finished", "collapsed", "failed")
"""Final states of a run, in which the run is not started again."""


@dataclass(kw_only=True)
class Comparison(LockedFolder):
    """Comparison with its plan, runs and folder. One process locks the folder while it works on the runs."""

    path: Path
    plan: ComparisonPlan
    training: Training
    command: str
    chosen: ChosenSettings = field(default_factory=dict)
    records: list[PlannedRun] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.add_runs()

    @property
    def config(self) -> Path | None:
        """Path of the comparison's copy of the settings file; None if no settings file was given."""
        return self.path / self.training.config if self.training.config else None

    @property
    def flags(self) -> dict[str, Any]:
        """Mapping from flag name to value, for the settings that determine which runs the comparison makes."""
        plan, training = self.plan, asdict(self.training)
        seeds = {"seeds": len(plan.report_seeds), "seed": str(min([*plan.choose_seeds, *plan.report_seeds]))}
        sweep = {"choose_seeds": len(plan.choose_seeds), **{f"sweep {key}": values for key, values in plan.sweep.items()}}
        return {"contestants": plan.contestants, **seeds, **sweep, **training.pop("settings"), **training}

    def add_runs(self) -> None:
        """Update the comparison's runs from its plan. Known runs keep their state; new runs get their state from files.

        Report runs of a setting that is no longer chosen are let go: that happens if a failed run of the sweep is retried.
        """
        known = {record.folder: record for record in self.records}
        self.records = []
        for run in [*self.plan.sweep_runs(), *self.plan.report_runs(self.chosen)]:
            run.state = read_state(self.path / run.folder)
            self.records.append(known.get(run.folder, run))

    @property
    def sweep_records(self) -> list[PlannedRun]:
        """Runs of the comparison's sweep, from which settings are chosen."""
        return [record for record in self.records if record.stage == "sweep"]

    @property
    def must_choose(self) -> bool:
        """True if the sweep has ended and no settings have been chosen yet."""
        return bool(self.plan.sweep) and not self.chosen and all(record.state in ENDED for record in self.sweep_records)

    def content(self) -> dict[str, Any]:
        """Return the content of compare.json as a mapping."""
        plan = asdict(self.plan)
        return {
            "version": VERSION,
            "kind": plan.pop("kind"),
            "recipe": self.training.recipe,
            "command": self.command,
            **plan,
            "chosen": self.chosen,
            "runs": [asdict(record) for record in self.records],
            "train": asdict(self.training),
        }

    def save(self) -> None:
        """Write the comparison to compare.json atomically."""
        write_json(self.path / FILE, self.content())

    def begin(self, config: Path | None) -> None:
        """Make and lock the comparison's folder, with a copy of the settings file for a later resume."""
        refuse_taken(self)
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock_folder()
            if config is not None and self.training.config is not None:
                shutil.copyfile(config, self.path / self.training.config)
        self.save()

    def resume(self, *, retry_failed: bool) -> None:
        """Resume the comparison in this process: read the runs' states from files. `retry_failed` resets failed runs.

        If runs of the sweep are retried, settings are chosen again.
        """
        self._lock_folder()
        for record in self.records:
            folder = self.path / record.folder
            if (folder / ".lock").is_file():  # perhaps still written, if the comparison was killed
                os.close(lock(folder))
            found = read_state(folder)
            if record.state != "failed":
                record.state = found
                record.error = read_summary(folder).get("why") if found == "failed" else None
            elif retry_failed:
                record.state, record.error = ("waiting" if found == "waiting" else "interrupted"), None
                self.chosen = {} if record.stage == "sweep" else self.chosen
        self.add_runs()
        self.save()

    def _lock_folder(self) -> None:
        """Lock the comparison's folder against other processes. Raises RunError if another process has locked it."""
        try:
            self.hold(self.path)
        except RunError as error:
            raise RunError(f"another process is at work on the comparison in {self.path}. Wait for it, or stop it.") from error


def refuse_taken(new: Comparison) -> None:
    """Raise RunError if the folder already contains this comparison, another comparison, or other files."""
    path = new.path
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not path.is_dir() or not (path / FILE).is_file():
        raise RunError(f"{path} is there already and is no comparison: choose another --out.")
    other = list_differences(read(path).flags, new.flags)
    if other:
        raise RunError(f"{path} holds another comparison: {'; '.join(other)}. Choose another --out.")
    raise RunError(f"{path} holds this comparison already. Resume with: corral compare --resume {path}")


def read(path: Path) -> Comparison:
    """Read a comparison from its folder, without locking or changing anything."""
    file = path / FILE
    if not file.is_file():
        raise RunError(
            f"{path} holds no comparison: it has no {FILE}. --resume takes the folder that `corral compare` printed."
        )
    try:
        saved = read_comparison(path)
        if not saved.kind or not saved.train:
            raise ValueError("it does not say what all runs share (`kind` and `train`), so none can be started.")
        plan = ComparisonPlan(**{item.name: getattr(saved, item.name) for item in fields(ComparisonPlan)})
        training, records = Training(**saved.train), [*saved.runs]
        return Comparison(path=path, plan=plan, training=training, command=saved.command, chosen=saved.chosen, records=records)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{file} cannot be read: {type(error).__name__}: {error}") from error


def list_differences(old: Mapping[str, Any], new: Mapping[str, Any], keys: Iterable[str] | None = None) -> list[str]:
    """List the differences between two mappings as texts: `key is x there and y here`."""
    names = sorted(old.keys() | new.keys()) if keys is None else keys
    return [
        f"{key} is {render_value(old.get(key))} there and {render_value(new.get(key))} here"
        for key in names
        if old.get(key) != new.get(key)
    ]


def render_value(value: Any) -> str:
    """Format the value of a setting for a sentence."""
    if isinstance(value, Mapping):
        return "; ".join(f"{key}={render_value(inner)}" for key, inner in value.items()) or "nothing"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "nothing"
    return "not given" if value is None else str(value)


# ----------------------------------------------------------------------------------------------------- files of the runs


@dataclass
class Progress:
    """Progress of a run, read from its metrics.jsonl. Each update reads only new lines."""

    folder: Path
    steps: int
    """Number of training steps of the run."""
    step: int = 0
    success: float | None = None
    """Last measured held-out success of the run; None before the first measurement."""
    position: int = 0
    inode: int | None = field(default=None, repr=False)
    clock: Clock | None = field(default=None, repr=False)
    written: tuple[int, int] | None = field(default=None, repr=False)
    """Size in bytes of the run's metrics and of its log at the last poll."""
    heard: float = 0.0
    """Time in seconds (`time.monotonic`) at which the run's metrics or log last grew."""

    def begin(self) -> None:
        """Reset the estimate of the run's remaining time when a process starts.

        A resumed run rewrites the file from its checkpoint, and the remaining time is estimated from there.
        """
        self.update()
        self.clock = self.written = None

    def update(self) -> None:
        """Read the lines that were added to metrics.jsonl since the last call."""
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
        """Completed share of the run's training steps, from 0 to 1."""
        return min(1.0, self.step / self.steps)

    def silence(self) -> float:
        """Return the seconds since the run last wrote metrics or log; 0 while there is no log, as before a Ray task starts."""
        try:
            written = self.position, (self.folder / LOG).stat().st_size
        except OSError:
            written = None
        if written is None or written != self.written:
            self.written, self.heard = written, time.monotonic()
        return time.monotonic() - self.heard

    @property
    def left(self) -> str:
        """Remaining time of the run as text, h:mm:ss. Empty if unknown."""
        return (self.clock.left(self.step) if self.clock is not None else None) or ""


def read_state(folder: Path) -> str:
    """Determine the state of a run from its files, while no process writes them."""
    stopped = str(read_summary(folder).get("stopped"))
    if stopped in ("finished", "collapsed", "failed"):
        return stopped
    return "interrupted" if (folder / "config.json").is_file() else "waiting"


def read_summary(folder: Path) -> dict[str, Any]:
    """Read a run's summary.json. Empty if the run has not ended, or was killed."""
    try:
        content = read_json(folder / "summary.json")
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def open_log(folder: Path) -> int:
    """Open a run's log file to append to. In the folder of a run that has not begun, all other files are removed first."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "config.json").is_file():
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != LOG:
                    path.unlink()
        return os.open(folder / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def log_tail(folder: Path, count: int = 1) -> list[str]:
    """Return the last lines of a run's log, without control characters."""
    try:
        with (folder / LOG).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 16_384))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [visible(line.strip())[:_LONGEST_LINE] for line in text.splitlines() if line.strip()][-count:]


def failure_reason(folder: Path, status: int) -> str:
    """Return the reason for a run's failure in one line: the last line of its log, or the signal that ended its process."""
    if status < 0:
        names = {number.value: number.name for number in signal.Signals}
        hint = ", as when memory runs out" if -status == signal.SIGKILL else ""
        return f"killed by {names.get(-status, f'signal {-status}')}{hint}"
    said = log_tail(folder)
    return said[0].removeprefix("corral: ") if said else f"ended with status {status} and without a word"
