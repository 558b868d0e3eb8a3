"""Runs read from folders: metrics, settings and summaries, of `corral train` or of a CorralTrainer's checkpoints."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from corral.lab.run.files import MOST_METRICS, read_regular
from corral.lab.run.files import read_json as read_file
from corral.validate import RunError

STATE = "trainer_state.json"

_RECORD = "RunRecord"
"""The callback under whose name a CorralTrainer writes its settings."""


def newest_state(folder: Path) -> Path | None:
    """The trainer_state.json of a folder or of its newest checkpoint; None if there is none."""
    if (folder / STATE).is_file():
        return folder / STATE
    found = [path for path in folder.glob(f"checkpoint-*/{STATE}") if path.parent.name.removeprefix("checkpoint-").isdigit()]
    return max(found, key=lambda path: int(path.parent.name.removeprefix("checkpoint-")), default=None)


def settings_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The content that config.json has in a run's folder, as far as a trainer_state.json has it."""
    callbacks = state.get("stateful_callbacks")
    record = callbacks.get(_RECORD) if isinstance(callbacks, dict) else None
    arguments = record.get("args") if isinstance(record, dict) else None
    about = arguments.get("about") if isinstance(arguments, dict) else None
    content = dict(about) if isinstance(about, dict) else {}
    settings = content.get("settings")
    return {**content, "settings": {**(settings if isinstance(settings, dict) else {}), "steps": state.get("max_steps")}}


def lines_of(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Logged lines of training and evaluation, those of one update together; a step is an update here."""
    found: dict[int, dict[str, Any]] = {}
    history = state.get("log_history")
    for logged in history if isinstance(history, list) else ():
        step = logged.get("step") if isinstance(logged, dict) else None
        if type(step) is int and step >= 0 and "train_runtime" not in logged:  # the last line sums the run up
            found.setdefault(step, {}).update(logged, update=step)
    return [found[step] for step in sorted(found)]


def has_ended(state: Mapping[str, Any]) -> bool:
    """Whether all updates that were planned are done."""
    done, planned = state.get("global_step"), state.get("max_steps")
    return type(done) is int and type(planned) is int and 0 < planned <= done


_FILES = ("config.json", "metrics.jsonl")
"""A folder that holds one of these is a run, unless its config.json is a model's."""

_DEPTH = 4
"""How many folders deep runs are searched for."""

_KEPT_COMPLETIONS = 64
"""Of one run; the first of evenly spaced steps. A page is to be sent to people."""

_DEEPEST, _LARGEST_NUMBER = 50, 1e300
"""How settings may be nested, and how large a number of theirs may be."""

_LAST_STEP = 2**53

_TABLES = ("settings", "trainer", "versions", "reduction")
_NAMES = ("seed", "objective", "task", "model", "stopped")
"""What configurations and summaries hold, where they hold it."""

_COMPLETIONS = {
    "step": pa.int64(), "completion": pa.string(), "prompt": pa.string(), "reward": pa.float64(), "advantage": pa.float64(),
}  # fmt: skip
_TOKENS = {
    "step": pa.int64(), "token": pa.list_(pa.string()), "action": pa.list_(pa.string()), "kl_before": pa.list_(pa.float32()),
    "kl_after": pa.list_(pa.float32()), "log_ratio": pa.list_(pa.float32()), "reward": pa.float64(),
    "advantage": pa.float64(), "bound": pa.float64(),
}  # fmt: skip
"""Columns that are read, and their types. The lists of a row of tokens have one length."""

_Types = Mapping[str, pa.DataType]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, as far as its files tell."""

    path: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[Mapping[str, Any]] = ()
    """Lines of metrics in order of their step; numbers are numbers, also NaN and infinite ones."""
    completions: Sequence[Mapping[str, Any]] = ()
    tokens: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    """What was wrong with the files, in sentences."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings it was started with."""
        return _mapping(self.config.get("settings"))

    @property
    def trainer(self) -> Mapping[str, Any]:
        """Settings of TRL's trainer, resolved; robots have none."""
        return _mapping(self.config.get("trainer"))

    @property
    def own_reduction(self) -> bool | None:
        """Whether the loss was averaged in one of the objective's own ways; None where nothing says so."""
        said = _mapping(self.config.get("reduction")).get("own")
        return said if isinstance(said, bool) else None

    @property
    def objective(self) -> str:
        """Its name."""
        return self._said("objective")

    @property
    def is_robot(self) -> bool:
        """Whether a robot learned, and no language model."""
        return "environment" in self.settings

    @property
    def task(self) -> str:
        """Its name."""
        return self._said("task")

    @property
    def model(self) -> str:
        """Its name; robots have none."""
        return self._said("model", "")

    @property
    def seed(self) -> str:
        """As text: it only tells runs apart, and pairs them."""
        return self._said("seed")

    @property
    def stopped(self) -> str:
        """How it ended, or that it has not."""
        return str(self.summary.get("stopped") or "not ended")

    @property
    def steps(self) -> int:
        """Done so far."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    @property
    def planned_steps(self) -> int:
        """Steps in its settings; those done where the settings have none."""
        planned = self.settings.get("steps", self.settings.get("iterations"))  # a robot's steps are iterations
        return planned if type(planned) is int and 0 < planned < _LAST_STEP else self.steps

    @property
    def rollouts_per_step(self) -> int:
        """Completions, or episodes, that a step samples; 0 where nothing says so."""
        learner = _mapping(self.settings.get("learner"))
        given = self.trainer.get("generation_batch_size", learner.get("episodes"))
        return given if type(given) is int and 0 < given < _LAST_STEP else 0

    @property
    def is_smoke(self) -> bool:
        """Whether `--smoke` made it: to see that something runs, and no result."""
        command = self.config.get("command")
        return self.model == "smoke" or (isinstance(command, list) and "--smoke" in command)

    def last(self, key: str) -> float | None:
        """A number of the last line, such as the seconds so far."""
        value = self.lines[-1].get(key) if self.lines else None
        return value if isinstance(value, float) and math.isfinite(value) else None

    def values(self, key: str) -> list[tuple[int, float]]:
        """Steps at which a metric was measured, and its finite values."""
        pairs = ((int(line["step"]), line.get(key)) for line in self.lines)
        return [(step, value) for step, value in pairs if isinstance(value, float) and math.isfinite(value)]

    def _said(self, key: str, default: str = "unknown") -> str:
        """A name from the summary, the settings, or the resolved part of the configuration."""
        for said in (self.summary.get(key), self.settings.get(key), self.config.get(key)):
            said = said.get("name") if isinstance(said, Mapping) else said
            if said is not None and said != "":
                return str(said)
        return default


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """All runs in these folders, in the order of their paths."""
    return [read_run(path) for path in find_runs(folders)]


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """A folder may be a run, or hold runs up to four folders deep. A sentence if one holds none."""
    found: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise RunError(f"{folder} is no folder. report takes runs' folders, or folders that hold runs.")
        here = sorted(_runs_in(folder, _DEPTH))
        if not here:
            raise RunError(
                f"no runs in {folder}: neither it nor the folders in it, {_DEPTH} deep, hold a run's {_FILES[0]}, a "
                f"{_FILES[1]} or a trainer's {STATE}. `corral train --out {folder}/…` makes one."
            )
        found |= {path.resolve(): path for path in here}
    return list(found.values())


def _runs_in(folder: Path, depth: int) -> Iterable[Path]:
    if _is_run(folder) or newest_state(folder) is not None:
        yield folder
    elif depth:
        for inner in folder.iterdir():
            if inner.is_dir() and not inner.is_symlink() and not inner.name.startswith("."):
                yield from _runs_in(inner, depth - 1)


def _is_run(folder: Path) -> bool:
    """Whether a folder has the files of a run. A model's config.json is none of them."""
    if (folder / "metrics.jsonl").is_file():
        return True
    if not (folder / "config.json").is_file():
        return False
    try:
        content = read_json(folder / "config.json")
    except (OSError, ValueError, RecursionError):
        return True  # torn, which `read_run` will note
    return not isinstance(content, dict) or "settings" in content or not {"model_type", "architectures"} & content.keys()


def read_run(path: Path) -> Run:
    """One run's files, and notes about those that cannot be read."""
    state = None if _is_run(path) else newest_state(path)
    if state is not None:
        return _read_trainer(path, state)
    notes: list[str] = []
    config, summary = (
        _object(path / "config.json", notes),
        _object(path / "summary.json", notes, "it has not ended, or was killed"),
    )
    notes += [f"config.json: `{key}` is no table of settings." for key in _TABLES if not _is_table(config.get(key))]
    for name, content in (("config.json", _mapping(config.get("settings"))), ("summary.json", summary)):
        notes += [f"{name}: `{key}` is neither a name nor a number." for key in _NAMES if not _is_name(content.get(key))]
    lines = _lines(path / "metrics.jsonl", notes)
    robot = "environment" in _mapping(config.get("settings"))
    completions = _rows(path / "completions.parquet", ("step", "completion"), _COMPLETIONS, notes, optional=robot)
    tokens = _rows(path / "tokens.parquet", ("step", "token", "action", "kl_before"), _TOKENS, notes, optional=True)
    whole = [row for row in tokens if _aligned(row)]
    if len(whole) < len(tokens):
        notes.append(
            f"tokens.parquet: {len(tokens) - len(whole)} of {len(tokens)} rows have lists of unlike lengths: left out."
        )
    return Run(
        path=path,
        config=config,
        summary=summary,
        lines=lines,
        completions=_evenly(completions),
        tokens=_evenly(whole),
        notes=notes,
    )


def _read_trainer(path: Path, file: Path) -> Run:
    """The run of a trainer of TRL's, from a trainer_state.json."""
    notes: list[str] = []
    state = _object(file, notes)
    config = settings_of(state)
    if "objective" not in config["settings"]:
        notes.append(f"{STATE} names no objective: it was not written by a CorralTrainer.")
    lines = _lines_by_step(lines_of(state), notes, STATE)
    return Run(path=path, config=config, summary={"stopped": "finished"} if has_ended(state) else {}, lines=lines, notes=notes)


def _object(path: Path, notes: list[str], missing: str = "its settings are unknown") -> Mapping[str, Any]:
    """A JSON file that holds an object."""
    if not _is_readable(path, notes, missing):
        return {}
    try:
        content = read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(content, dict):
        notes.append(f"{path.name} holds no settings.")
        return {}
    return content


def read_json(path: Path) -> Any:
    """A JSON file whose values can be shown and computed with; a ValueError, OSError or RecursionError if they cannot."""
    content = read_file(path)
    _check_values(content)
    return content


def _check_values(content: Any) -> None:
    """A ValueError if values are nested too deep to be written out, or too large to be computed with."""
    level = [content]
    for _ in range(_DEEPEST):
        if any(isinstance(value, int) and abs(value) > _LARGEST_NUMBER for value in level):
            raise ValueError(f"it holds a number beyond {_LARGEST_NUMBER:g}.")
        inner = [value.values() if isinstance(value, dict) else value for value in level if isinstance(value, dict | list)]
        level = [value for values in inner for value in values]
        if not level:
            return
    raise ValueError(f"its values are nested more than {_DEEPEST} deep.")


def _is_readable(path: Path, notes: list[str], missing: str) -> bool:
    """Whether a file of a run can be opened; a note if not. One outside the run's folder is none of its files."""
    if not path.exists():
        notes.append(f"{path.name} is missing: {missing}.")
    elif not path.resolve().is_relative_to(path.parent.resolve()):
        notes.append(f"{path.name} is a link to a file outside the run's folder, which is not followed. Copy it there.")
    elif not path.is_file():
        notes.append(f"{path.name} cannot be read: it is no file.")
    else:
        return True
    return False


def _lines(path: Path, notes: list[str]) -> list[Mapping[str, Any]]:
    """Lines of metrics by step; of two with the same step the later one counts."""
    if not _is_readable(path, notes, "nothing was measured yet"):
        return []
    try:
        texts = [text for text in read_regular(path, MOST_METRICS).split(b"\n") if text.strip()]
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return []
    return _lines_by_step(texts, notes, path.name)


def _lines_by_step(entries: Sequence[bytes | Mapping[str, Any]], notes: list[str], name: str) -> list[Mapping[str, Any]]:
    """Lines, as JSON or read already, in order of their step; notes about the others and about odd values."""
    found: dict[int, Mapping[str, Any]] = {}
    torn = 0
    for entry in entries:
        try:
            read = json.loads(entry) if isinstance(entry, bytes) else entry
            line = {key: number(value) for key, value in read.items()}
            _check_values([value for value in line.values() if isinstance(value, dict | list)])
            if not 0 <= line["step"] <= _LAST_STEP:
                raise ValueError(f"step {line['step']}")
            found[int(line["step"])] = line
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            torn += 1
    if torn:
        notes.append(f"{name}: {torn} of {len(entries)} lines cannot be read and are left out.")
    bad = sorted(
        {key for line in found.values() for key, value in line.items() if isinstance(value, float) and not math.isfinite(value)}
    )
    if bad:
        notes.append(f"not finite at some steps: {', '.join(bad)}.")
    numbers = {key for line in found.values() for key, value in line.items() if isinstance(value, float)}
    odd = sorted({key for line in found.values() for key in numbers & line.keys() if not isinstance(line[key], float | None)})
    if odd:
        notes.append(f"no numbers at some steps: {', '.join(odd)}.")
    return [found[step] for step in sorted(found)]


def number(value: Any) -> Any:
    """A value from JSON: numbers as floats, and those that JSON does not have, "inf" and "nan", too; all else as it is.

    Beyond 1e300 it counts as infinite: sums and percentages of it would be.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if not abs(value) > _LARGEST_NUMBER else math.copysign(math.inf, value)
    if isinstance(value, str) and value.lower() in ("inf", "-inf", "infinity", "-infinity", "nan"):
        return float(value)
    return value


def _rows(
    path: Path, needed: Sequence[str], types: _Types, notes: list[str], *, optional: bool = False
) -> list[Mapping[str, Any]]:
    """Rows of a parquet file: those of its columns that are known, each in its type. One that is of no use is left out."""
    if (optional and not path.exists()) or not _is_readable(path, notes, "there are no completions to show"):
        return []
    try:
        with path.open("rb") as file:  # a path may be no UTF-8
            table = pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        notes.append(f"{path.name} cannot be read: {_first_line(error)}")
        return []
    columns = {}
    for name in [name for name in types if name in table.column_names]:
        try:
            columns[name] = table[name].cast(types[name])
        except (pa.ArrowException, KeyError) as error:  # two columns of one name are a KeyError
            notes.append(f"{path.name}: the column {name} is left out, for it is not what a run writes: {_first_line(error)}")
    missing = [name for name in needed if name not in columns]
    if missing:
        notes.append(f"{path.name} has no column {', '.join(missing)}.")
        return []
    rows: list[Mapping[str, Any]] = pa.table(columns).to_pylist()
    return rows


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _aligned(row: Mapping[str, Any]) -> bool:
    """Whether all lists of a row of tokens have one entry per token; kl_after and log_ratio may be left out."""
    if row["token"] is None or row["action"] is None or row["kl_before"] is None:
        return False
    lists = [row[name] for name in ("action", "kl_before", "kl_after", "log_ratio") if row.get(name) is not None]
    return all(len(entry) == len(row["token"]) for entry in lists)


def _evenly(rows: Sequence[Mapping[str, Any]], most: int = _KEPT_COMPLETIONS) -> list[Mapping[str, Any]]:
    """At most `most` rows: eight of the first, of the last and of evenly spaced steps between."""
    each = 8
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_step.setdefault(int(row["step"] or 0), []).append(row)
    steps = sorted(by_step)
    count = min(len(steps), max(most // each, 1))
    chosen = {steps[round(index * (len(steps) - 1) / max(count - 1, 1))] for index in range(count)} if steps else set()
    return [row for step in sorted(chosen) for row in by_step[step][:each]]


def _is_table(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _is_name(value: Any) -> bool:
    return value is None or isinstance(value, str) or (isinstance(value, int | float) and math.isfinite(value))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
