"""Reader of runs and comparisons from folders of `corral train`, `corral compare` and CorralTrainer checkpoints."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from corral.lab.run.files import MOST_METRICS, read_regular
from corral.lab.run.files import read_json as read_file
from corral.lab.run.settings import guess
from corral.validate import RunError

ChooseBy = Literal["final", "area"]
"""Score by which a comparison chooses settings: the final value, or the mean over the run (area)."""

STATE = "trainer_state.json"

_RECORD = "RunRecord"
"""Name of the callback in trainer_state.json under which a CorralTrainer stores its settings."""


_FILES = ("config.json", "metrics.jsonl")
"""Files that identify a folder as a run, unless its config.json is a model's."""

_DEPTH = 4
"""Number of nested folder levels that are searched for runs."""

_KEPT_COMPLETIONS = 64
"""Largest number of completions that are kept per run, from evenly spaced steps, so that pages stay small."""

_DEEPEST, _LARGEST_NUMBER = 50, 1e300
"""Limits on values in a run's JSON files: depth of nesting, and absolute value of a number."""

_LAST_STEP = 2**53

_TABLES = ("settings", "trainer", "versions", "reduction")
_NAMES = ("seed", "objective", "task", "model", "stopped")
"""Names, such as the task's, that are looked up in a run's configuration or summary."""

_COMPLETIONS = {
    "step": pa.int64(), "completion": pa.string(), "prompt": pa.string(), "reward": pa.float64(), "advantage": pa.float64(),
}  # fmt: skip
_TOKENS = {
    "step": pa.int64(), "token": pa.list_(pa.string()), "action": pa.list_(pa.string()), "kl_before": pa.list_(pa.float32()),
    "kl_after": pa.list_(pa.float32()), "log_ratio": pa.list_(pa.float32()), "reward": pa.float64(),
    "advantage": pa.float64(), "bound": pa.float64(),
}  # fmt: skip
"""Columns that are read from tokens.parquet, with their types. All lists in a row have the same length."""

_NO_METHOD = {
    "seed", "objective", "objective_config", "task", "task_config", "model", "guard", "report_to", "device", "workers",
    "algorithm", "environment", "environment_config",
    "eval_every", "eval_size", "eval_batch_size", "checkpoint_every", "keep_checkpoints", "keep_completions",
}  # fmt: skip
"""Settings that are no part of the compared method: they set the problem, or may differ between repetitions of a run."""


def is_number(value: object) -> bool:
    """Return True if the value of a setting is a number, and not True or False."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run, as read from its files: configuration, summary, metrics, completions and tokens."""

    path: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[Mapping[str, Any]] = ()
    """Lines of metrics.jsonl sorted by step. Numbers in the lines are floats, which can be NaN or infinite."""
    completions: Sequence[Mapping[str, Any]] = ()
    tokens: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    """Sentences about problems with the run's files."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings that the run was started with."""
        return table_in(self.config, "settings")

    @property
    def trainer(self) -> Mapping[str, Any]:
        """Resolved settings of TRL's trainer; empty for robots."""
        return table_in(self.config, "trainer")

    @cached_property
    def own_settings(self) -> dict[str, str]:
        """Settings of the run's objective itself, as text."""
        return flatten(table_in(self.settings, "objective_config"))

    @cached_property
    def shared_settings(self) -> dict[str, str]:
        """Settings of the run that every objective has, such as the learning rate, as text."""
        return flatten({key: value for key, value in self.settings.items() if key not in _NO_METHOD})

    @cached_property
    def task_settings(self) -> dict[str, str]:
        """Settings of the run's task or robot environment, as text."""
        return flatten(table_in(self.settings, "task_config")) | flatten(table_in(self.settings, "environment_config"))

    @property
    def is_robot(self) -> bool:
        """True for a robot run, False for a language-model run."""
        return "environment" in self.settings

    @property
    def objective(self) -> str:
        """Name of the run's objective or robot algorithm."""
        return self._name("objective")

    @property
    def task(self) -> str:
        """Name of the task that the run trains on."""
        return self._name("task")

    @property
    def model(self) -> str:
        """Name of the run's language model; empty for robots."""
        return self._name("model", "")

    @property
    def seed(self) -> str:
        """Random seed of the run, as text that distinguishes and pairs runs."""
        return self._name("seed")

    @property
    def stopped(self) -> str:
        """Outcome of the run: "finished", "collapsed", …, or "not ended"."""
        return str(self.summary.get("stopped") or "not ended")

    @property
    def steps(self) -> int:
        """Number of training steps that the run has completed."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    @property
    def planned_steps(self) -> int:
        """Number of training steps that the run planned, or has completed if its settings have no plan."""
        return _whole(self.settings.get("steps", self.settings.get("iterations")), self.steps)  # of robots: iterations

    @property
    def rollouts_per_step(self) -> int:
        """Number of completions or episodes that the run samples per training step; 0 if unknown."""
        return _whole(self.trainer.get("generation_batch_size", table_in(self.settings, "learner").get("episodes")), 0)

    @property
    def is_smoke(self) -> bool:
        """True if the run was made with `--smoke`, so that it is not a result."""
        command = self.config.get("command")
        return self.model == "smoke" or (isinstance(command, list) and "--smoke" in command)

    def values(self, key: str) -> list[tuple[int, float]]:
        """List all finite measurements of a metric in the run, as (step, value)."""
        pairs = ((int(line["step"]), line.get(key)) for line in self.lines)
        return [(step, value) for step, value in pairs if isinstance(value, float) and math.isfinite(value)]

    def final(self, key: str) -> float | None:
        """Return the last finite value of a metric in the run, or None if the metric was never measured."""
        return next((value for _, value in reversed(self.values(key))), None)

    def last(self, key: str) -> float | None:
        """Return a number from the run's last line of metrics, such as the elapsed seconds, or None if it was not logged."""
        value = self.lines[-1].get(key) if self.lines else None
        return value if isinstance(value, float) and math.isfinite(value) else None

    def _name(self, key: str, default: str = "unknown") -> str:
        """Find a value, such as the task's name, in the run's summary, settings or configuration, or return `default`."""
        for said in (self.summary.get(key), self.settings.get(key), self.config.get(key)):
            said = said.get("name") if isinstance(said, Mapping) else said
            if said is not None and said != "":
                return str(said)
        return default


def table_in(tree: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Find the nested mapping under a sequence of keys. Returns an empty mapping if it is missing."""
    for key in keys:
        inner = tree.get(key)
        tree = inner if isinstance(inner, Mapping) else {}
    return tree


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested settings to a mapping from dotted name, as `a.b.c`, to text."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flatten(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return found


def _whole(value: Any, default: int) -> int:
    """Check a number of steps or samples from settings. Returns `default` if it is no positive integer."""
    return value if type(value) is int and 0 < value < _LAST_STEP else default


# ------------------------------------------------------------------------------------------------------- folders of runs


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """Read all runs in `folders` and below, in the order that `find_runs` lists them."""
    return [read_run(path) for path in find_runs(folders)]


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """Find runs: a folder can be a run, or contain runs in up to four levels. Raises RunError if a folder contains none."""
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
    if is_run(folder) or newest_state(folder) is not None:
        yield folder
    elif depth:
        for inner in folder.iterdir():
            if inner.is_dir() and not inner.is_symlink() and not inner.name.startswith("."):
                yield from _runs_in(inner, depth - 1)


def newest_state(folder: Path) -> Path | None:
    """Find the trainer_state.json of a folder or of its newest checkpoint. Returns None if there is none."""
    if (folder / STATE).is_file():
        return folder / STATE
    found = [path for path in folder.glob(f"checkpoint-*/{STATE}") if path.parent.name.removeprefix("checkpoint-").isdigit()]
    return max(found, key=lambda path: int(path.parent.name.removeprefix("checkpoint-")), default=None)


def is_run(folder: Path) -> bool:
    """Return True if a folder has the files of a run. A config.json of a model does not count."""
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
    """Read one run from its folder, with notes about unreadable files."""
    state = None if is_run(path) else newest_state(path)
    if state is not None:
        return _read_trainer(path, state)
    notes: list[str] = []
    config = _object(path / "config.json", notes)
    summary = _object(path / "summary.json", notes, "it has not ended, or was killed")
    settings = table_in(config, "settings")
    notes += [
        f"config.json: `{key}` is no table of settings." for key in _TABLES if not isinstance(config.get(key), Mapping | None)
    ]
    for name, content in (("config.json", settings), ("summary.json", summary)):
        notes += [f"{name}: `{key}` is neither a name nor a number." for key in _NAMES if not _is_name(content.get(key))]
    content = _read(path / "metrics.jsonl", notes, "nothing was measured yet", partial(read_regular, most=MOST_METRICS), b"")
    lines = [line for line in content.split(b"\n") if line.strip()]
    completions = _rows(path / "completions.parquet", _COMPLETIONS, 2, notes, optional="environment" in settings)
    tokens = _rows(path / "tokens.parquet", _TOKENS, 4, notes, optional=True)
    whole = [row for row in tokens if _aligned(row)]
    if len(whole) < len(tokens):
        notes.append(
            f"tokens.parquet: {len(tokens) - len(whole)} of {len(tokens)} rows have lists of unlike lengths: left out."
        )
    return Run(
        path=path,
        config=config,
        summary=summary,
        lines=_lines_by_step(lines, notes, "metrics.jsonl"),
        completions=_evenly(completions),
        tokens=_evenly(whole),
        notes=notes,
    )


def _read_trainer(path: Path, file: Path) -> Run:
    """Read the run of a TRL trainer from its trainer_state.json, in which a step is an update."""
    notes: list[str] = []
    state = _object(file, notes)
    about = table_in(state, "stateful_callbacks", _RECORD, "args", "about")
    settings = {**table_in(about, "settings"), "steps": state.get("max_steps")}
    if "objective" not in settings:
        notes.append(f"{STATE} names no objective: it was not written by a CorralTrainer.")
    logged: dict[int, dict[str, Any]] = {}  # lines of training and of evaluation, those of one update together
    history = state.get("log_history")
    for line in history if isinstance(history, list) else ():
        step = line.get("step") if isinstance(line, dict) else None
        if type(step) is int and step >= 0 and "train_runtime" not in line:  # the last line sums the run up
            logged.setdefault(step, {}).update(line, update=step)
    done, planned = state.get("global_step"), state.get("max_steps")
    ended = type(done) is int and type(planned) is int and 0 < planned <= done
    return Run(
        path=path,
        config={**about, "settings": settings},
        summary={"stopped": "finished"} if ended else {},
        lines=_lines_by_step([*logged.values()], notes, STATE),
        notes=notes,
    )


def _read(path: Path, notes: list[str], missing: str, read: Callable[[Path], Any], empty: Any) -> Any:
    """Read a file of a run. If that fails, add a note and return `empty`. A link out of the run's folder is not followed."""
    if not path.exists():
        notes.append(f"{path.name} is missing: {missing}.")
    elif not path.resolve().is_relative_to(path.parent.resolve()):
        notes.append(f"{path.name} is a link to a file outside the run's folder, which is not followed. Copy it there.")
    elif not path.is_file():
        notes.append(f"{path.name} cannot be read: it is no file.")
    else:
        try:
            return read(path)
        except (OSError, ValueError, RecursionError, pa.ArrowException) as error:
            notes.append(f"{path.name} cannot be read: {_first_line(error)}")
    return empty


def _object(path: Path, notes: list[str], missing: str = "its settings are unknown") -> Mapping[str, Any]:
    """Read a run's JSON file with an object. If that fails, add a note and return an empty mapping."""
    content = _read(path, notes, missing, read_json, {})
    if isinstance(content, dict):
        return content
    notes.append(f"{path.name} holds no settings.")
    return {}


def read_json(path: Path) -> Any:
    """Read a JSON file whose values can be shown and computed with. Raises ValueError, OSError or RecursionError otherwise."""
    content = read_file(path)
    _check_values(content)
    return content


def _check_values(content: Any) -> None:
    """Raise a ValueError for values that are nested too deep to write, or too large to compute with."""
    level = [content]
    for _ in range(_DEEPEST):
        if any(isinstance(value, int) and abs(value) > _LARGEST_NUMBER for value in level):
            raise ValueError(f"it holds a number beyond {_LARGEST_NUMBER:g}.")
        inner = [value.values() if isinstance(value, dict) else value for value in level if isinstance(value, dict | list)]
        level = [value for values in inner for value in values]
        if not level:
            return
    raise ValueError(f"its values are nested more than {_DEEPEST} deep.")


def _lines_by_step(entries: Sequence[bytes | Mapping[str, Any]], notes: list[str], name: str) -> list[Mapping[str, Any]]:
    """Sort a run's lines of metrics by step, with notes about invalid lines and values."""
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
    logged = [(key, value) for line in found.values() for key, value in line.items()]
    numbers = {key for key, value in logged if isinstance(value, float)}
    bad = {key for key, value in logged if isinstance(value, float) and not math.isfinite(value)}
    odd = {key for key, value in logged if key in numbers and not isinstance(value, float | None)}
    for what, keys in (("not finite", bad), ("no numbers", odd)):
        if keys:
            notes.append(f"{what} at some steps: {', '.join(sorted(keys))}.")
    return [found[step] for step in sorted(found)]


def number(value: Any) -> Any:
    """Convert a value from a run's JSON: numbers, "inf" and "nan" become floats, any other value is unchanged.

    Beyond 1e300 it counts as infinite: sums and percentages of it would be.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if not abs(value) > _LARGEST_NUMBER else math.copysign(math.inf, value)
    if isinstance(value, str) and value.lower() in ("inf", "-inf", "infinity", "-infinity", "nan"):
        return float(value)
    return value


def _rows(
    path: Path, types: Mapping[str, pa.DataType], needed: int, notes: list[str], *, optional: bool
) -> list[Mapping[str, Any]]:
    """Read the columns of a run's parquet file that `types` names. No rows if one of the first `needed` columns is missing."""
    if optional and not path.exists():
        return []

    def read(path: Path) -> pa.Table:
        with path.open("rb") as file:  # a path may be no UTF-8
            return pq.read_table(file)

    table = _read(path, notes, "there are no completions to show", read, None)
    if table is None:
        return []
    columns = {}
    for name in [name for name in types if name in table.column_names]:
        try:
            columns[name] = table[name].cast(types[name])
        except (pa.ArrowException, KeyError) as error:  # two columns of one name are a KeyError
            notes.append(f"{path.name}: the column {name} is left out, for it is not what a run writes: {_first_line(error)}")
    missing = [name for name in [*types][:needed] if name not in columns]
    if missing:
        notes.append(f"{path.name} has no column {', '.join(missing)}.")
        return []
    rows: list[Mapping[str, Any]] = pa.table(columns).to_pylist()
    return rows


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _aligned(row: Mapping[str, Any]) -> bool:
    """Return True if all lists in a row of tokens have one entry per token. kl_after and log_ratio may be missing."""
    if row["token"] is None or row["action"] is None or row["kl_before"] is None:
        return False
    lists = [row[name] for name in ("action", "kl_before", "kl_after", "log_ratio") if row.get(name) is not None]
    return all(len(entry) == len(row["token"]) for entry in lists)


def _evenly(rows: Sequence[Mapping[str, Any]], most: int = _KEPT_COMPLETIONS) -> list[Mapping[str, Any]]:
    """Select at most `most` rows of completions: eight each of the first, the last, and evenly spaced steps between."""
    each = 8
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_step.setdefault(int(row["step"] or 0), []).append(row)
    steps = sorted(by_step)
    count = min(len(steps), max(most // each, 1))
    chosen = {steps[round(index * (len(steps) - 1) / max(count - 1, 1))] for index in range(count)} if steps else set()
    return [row for step in sorted(chosen) for row in by_step[step][:each]]


def _is_name(value: Any) -> bool:
    return value is None or isinstance(value, str) or (isinstance(value, int | float) and math.isfinite(value))


# ---------------------------------------------------------------------------------------------------------- comparisons

FILE = "compare.json"
VERSION = 1


@dataclass(kw_only=True)
class PlannedRun:
    """A planned run of a comparison, and its state."""

    folder: str
    """Name of the planned run's folder inside the comparison's folder."""
    contestant: str
    setting: Mapping[str, Any]
    seed: int
    stage: str
    """Purpose of the planned run: "sweep" to choose a setting, or "report"."""
    state: str = "waiting"
    """State of the planned run: "waiting", "running", "finished", "collapsed", "interrupted" or "failed"."""
    error: str | None = None
    """Reason why the planned run failed, in one line; None if it has not failed."""

    @property
    def label(self) -> str:
        """Name of the planned run: `troll learning_rate=1e-4 seed 0`."""
        return " ".join([self.contestant, *setting_pairs(self.setting), f"seed {self.seed}"])


def value_text(value: object) -> str:
    """Format the value of a setting as short text: 3e-05 as 3e-5, .0003 as 3e-4, and a list of texts without brackets."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value) or "default"  # an empty list of reward functions or tools leaves those of the task
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if value == 0 or not math.isfinite(value) or 1e-2 <= abs(value) < 1e5:
        return f"{value:g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def setting_pairs(setting: Mapping[str, object]) -> list[str]:
    """Format each setting of a run as `key=value`."""
    return [f"{key}={value_text(value)}" for key, value in setting.items()]


def setting_text(setting: Mapping[str, object]) -> str:
    """Format the settings of a run as one text: `learning_rate=1e-4 num_iterations=4`."""
    return " ".join(setting_pairs(setting))


@dataclass(frozen=True, kw_only=True)
class SavedComparison:
    """Comparison as stored in compare.json."""

    path: Path
    command: str
    sweep: Mapping[str, Sequence[Any]]
    choose_seeds: Sequence[int]
    report_seeds: Sequence[int]
    chosen: Mapping[str, Mapping[str, Any]]
    runs: Sequence[PlannedRun]
    kind: Any = None
    """Kind of runs that are compared, "llm" or "robot". Only `--resume` needs `kind`, `contestants` and `train`."""
    contestants: Sequence[str] = ()
    train: Mapping[str, Any] = field(default_factory=dict)
    """Settings that all runs of the comparison share."""
    choose_by: Any = "final"
    """Score by which settings were chosen, "final" or "area". Only `--resume` needs `choose_by`, `extend` and `added`."""
    extend: int = 0
    added: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def places(self, stage: str | None = None) -> list[tuple[Path, PlannedRun]]:
        """List the comparison's planned runs as (folder, planned run), for all stages or for one stage."""
        return [((self.path / run.folder).resolve(), run) for run in self.runs if stage in (None, run.stage)]


def read_comparisons(folders: Iterable[Path], runs: Sequence[Run]) -> tuple[list[SavedComparison], list[str]]:
    """Read the comparisons in `folders` and in the parent folders of `runs`, with notes about unreadable files."""
    places = {path.resolve(): path for path in [*folders, *(run.path.parent for run in runs)] if (path / FILE).is_file()}
    found, notes = [], []
    for path in places.values():
        try:
            found.append(read_comparison(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            notes.append(
                f"{path / FILE} cannot be read ({type(error).__name__}: {error}); runs are shown as if it were not there."
            )
    return found, notes


def read_comparison(path: Path) -> SavedComparison:
    """Read a comparison from compare.json in its folder. Any error in the file is raised."""
    content = read_json(path / FILE)
    if content["version"] != VERSION:
        raise ValueError(f"it is of version {content['version']}, and this corral reads version {VERSION}.")
    return SavedComparison(
        path=path,
        command=str(content["command"]),
        sweep={str(key): tuple(map(guess, values)) for key, values in content["sweep"].items()},
        choose_seeds=tuple(map(int, content["choose_seeds"])),
        report_seeds=tuple(map(int, content["report_seeds"])),
        chosen={str(name): _setting(setting) for name, setting in content["chosen"].items()},
        runs=[_planned_run(run) for run in content["runs"]],
        kind=content.get("kind"),
        contestants=tuple(map(str, content.get("contestants", ()))),
        train=dict(content.get("train", {})),
        choose_by=content.get("choose_by", "final"),
        extend=int(content.get("extend", 0)),
        added={str(key): tuple(map(guess, values)) for key, values in content.get("added", {}).items()},
    )


def _planned_run(said: Any) -> PlannedRun:
    """Parse a planned run from compare.json."""
    words = {key: str(said[key]) for key in ("folder", "contestant", "stage", "state")}
    if "\0" in words["folder"]:
        raise ValueError(f"{words['folder']!r} is no folder's name.")
    error = None if said.get("error") is None else str(said["error"])
    return PlannedRun(**words, setting=_setting(said["setting"]), seed=int(said["seed"]), error=error)


def _setting(content: Any) -> dict[str, Any]:
    """Parse a run's settings from compare.json, where infinity is a text."""
    if not isinstance(content, Mapping):
        raise ValueError(f"a setting is a table of names and values; got {content!r}.")
    return {str(key): guess(value) for key, value in content.items()}
