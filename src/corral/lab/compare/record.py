"""The state of a comparison, saved as compare.json, atomically, after every change."""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from corral.lab.compare.folder import read_state, read_summary, refuse_busy
from corral.lab.compare.plan import ChosenSettings, ComparisonPlan, Training
from corral.lab.report.read import FILE, VERSION, PlannedRun, read_comparison
from corral.lab.run.files import LockedFolder, disk_sentence, write_json
from corral.validate import RunError

ENDED: tuple[str, ...] = ("finished", "collapsed", "failed")
"""States after which a run is left alone."""

COUNTED: tuple[str, ...] = ("finished", "collapsed")
"""States of runs that used their budget, or were stopped as collapsed."""


@dataclass(kw_only=True)
class Comparison(LockedFolder):
    """A comparison and its folder, which one process locks."""

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
        """The file of settings, as it was when the comparison began."""
        return self.path / self.training.config if self.training.config else None

    @property
    def flags(self) -> dict[str, Any]:
        """Everything that determines the runs, by the names of flags."""
        plan, training = self.plan, asdict(self.training)
        seeds = {"seeds": len(plan.report_seeds), "seed": str(min([*plan.choose_seeds, *plan.report_seeds]))}
        sweep = {"choose_seeds": len(plan.choose_seeds), **{f"sweep {key}": values for key, values in plan.sweep.items()}}
        return {"contestants": plan.contestants, **seeds, **sweep, **training.pop("settings"), **training}

    def add_runs(self) -> None:
        """Records of every run that can be named by now: those that are there keep their state, others have what files say.

        Report runs of a setting that is no longer chosen are let go: that happens if a failed run of the sweep is retried.
        """
        known = {record.folder: record for record in self.records}
        self.records = []
        for run in [*self.plan.sweep_runs(), *self.plan.report_runs(self.chosen)]:
            run.state = read_state(self.path / run.folder)
            self.records.append(known.get(run.folder, run))

    @property
    def sweep_records(self) -> list[PlannedRun]:
        """Runs on which settings are chosen."""
        return [record for record in self.records if record.stage == "sweep"]

    @property
    def report_records(self) -> list[PlannedRun]:
        """Runs that the comparison is about."""
        return [record for record in self.records if record.stage == "report"]

    @property
    def must_choose(self) -> bool:
        """True once the sweep is over, until settings are chosen."""
        return bool(self.plan.sweep) and not self.chosen and all(record.state in ENDED for record in self.sweep_records)

    def folder(self, record: PlannedRun) -> Path:
        """The folder of a run."""
        return self.path / record.folder

    def content(self) -> dict[str, Any]:
        """The content of compare.json."""
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
        """Write it, whole."""
        write_json(self.path / FILE, self.content())

    def begin(self, config: Path | None) -> None:
        """Make the folder, with a copy of the file of settings if there is one: who resumes has no other."""
        refuse_taken(self)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock_folder()
            if config is not None and self.training.config is not None:
                shutil.copyfile(config, self.path / self.training.config)
        except OSError as error:
            raise RunError(disk_sentence(error, self.path)) from error
        self.save()

    def resume(self, *, retry_failed: bool) -> None:
        """Take over in this process: states come from the runs' files; failed runs wait again if they are to be retried.

        If runs of the sweep are retried, settings are chosen again.
        """
        self._lock_folder()
        for record in self.records:
            refuse_busy(self.folder(record))
            found = read_state(self.folder(record))
            if record.state != "failed":
                record.state = found
                record.error = read_summary(self.folder(record)).get("why") if found == "failed" else None
            elif retry_failed:
                record.state, record.error = ("waiting" if found == "waiting" else "interrupted"), None
                self.chosen = {} if record.stage == "sweep" else self.chosen
        self.add_runs()
        self.save()

    def _lock_folder(self) -> None:
        """Keep other processes out."""
        try:
            self.hold(self.path)
        except RunError as error:
            raise RunError(f"another process is at work on the comparison in {self.path}. Wait for it, or stop it.") from error


def refuse_taken(new: Comparison) -> None:
    """A sentence if the folder holds this comparison already, or another one, or something else."""
    path = new.path
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not path.is_dir() or not (path / FILE).is_file():
        raise RunError(f"{path} is there already and is no comparison: choose another --out.")
    other = differences(read(path), new)
    if other:
        raise RunError(f"{path} holds another comparison: {'; '.join(other)}. Choose another --out.")
    raise RunError(f"{path} holds this comparison already. Resume with: corral compare --resume {path}")


def read(path: Path) -> Comparison:
    """A comparison from its folder; nothing is locked or changed."""
    file = path / FILE
    if not file.is_file():
        raise RunError(
            f"{path} holds no comparison: it has no {FILE}. --resume takes the folder that `corral compare` printed."
        )
    try:
        saved = read_comparison(path)
        if not saved.kind or not saved.train:
            raise ValueError("it does not say what all runs share (`kind` and `train`), so none can be started.")
        plan = ComparisonPlan(
            kind=saved.kind,
            contestants=tuple(saved.contestants),
            sweep={key: tuple(values) for key, values in saved.sweep.items()},
            choose_seeds=tuple(saved.choose_seeds),
            report_seeds=tuple(saved.report_seeds),
        )
        return Comparison(
            path=path,
            plan=plan,
            training=Training(**saved.train),
            command=saved.command,
            chosen=saved.chosen,
            records=[*saved.runs],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{file} cannot be read: {type(error).__name__}: {error}") from error


def differences(there: Comparison, new: Comparison) -> list[str]:
    """In what two comparisons differ, in words."""
    old, now = ({**asdict(one.plan), **asdict(one.training)} for one in (there, new))
    settings = old.pop("settings"), now.pop("settings")
    return [*list_differences(old, now), *list_differences(*settings)]


def list_differences(old: Mapping[str, Any], new: Mapping[str, Any], keys: Iterable[str] | None = None) -> list[str]:
    """`key: x there, y now` where two mappings differ."""
    names = sorted(old.keys() | new.keys()) if keys is None else keys
    return [
        f"{key} is {render_value(old.get(key))} there and {render_value(new.get(key))} here"
        for key in names
        if old.get(key) != new.get(key)
    ]


def render_value(value: Any) -> str:
    """A value in a sentence."""
    if isinstance(value, Mapping):
        return "; ".join(f"{key}={render_value(inner)}" for key, inner in value.items()) or "nothing"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "nothing"
    return "not given" if value is None else str(value)
